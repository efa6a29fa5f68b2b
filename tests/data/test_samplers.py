"""Orders of examples: functions of (seed, epoch), the same for every number of processes."""

from __future__ import annotations

import os
import resource
import signal
import time

import numpy as np
import pytest
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from medclip_dcl.common.errors import UserError
from medclip_dcl.data.reports import LengthSampler
from medclip_dcl.data.samplers import EpochSampler, ShardSampler, worker_options
from medclip_dcl.training.last_checkpoint import StopSignals


def ranks(monkeypatch, kind, size, *args):
    parts = []
    for rank in range(size):
        monkeypatch.setattr("medclip_dcl.data.samplers.rank_and_size", lambda rank=rank: (rank, size))
        parts.append(kind(*args))
    return parts


def test_order_depends_on_seed_and_epoch_alone():
    sampler = EpochSampler(10, 4, seed=1)
    first = list(sampler)
    assert first == list(EpochSampler(10, 4, seed=1))
    assert len(first) == len(sampler) == 8
    assert len({index for _, index in first}) == 8
    sampler.set_epoch(1)
    assert [epoch for epoch, _ in sampler] == [1] * 8
    assert [i for _, i in sampler] != [i for _, i in first]
    assert [i for _, i in EpochSampler(10, 4, seed=2)] != [i for _, i in first]


@pytest.mark.parametrize("size", [2, 3])
def test_global_batches_ignore_the_number_of_processes(monkeypatch, size):
    single = [index for _, index in EpochSampler(31, 6, seed=0)]
    parts = [[index for _, index in part] for part in ranks(monkeypatch, EpochSampler, size, 31, 6, 0)]
    local = 6 // size
    for batch in range(5):
        together = [i for part in parts for i in part[batch * local : (batch + 1) * local]]
        assert together == single[batch * 6 : (batch + 1) * 6]


def test_shards_hold_every_example_once(monkeypatch):
    parts = ranks(monkeypatch, ShardSampler, 3, range(11))
    assert sorted(i for part in parts for i in part) == list(range(11))
    assert [len(part) for part in parts] == [4, 4, 3]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("done", [0, 2, 5])
def test_a_resumed_epoch_is_the_rest_of_it(monkeypatch, rank, done):
    """The other epochs, and the number of batches that Lightning counts, stay as they are."""
    monkeypatch.setattr("medclip_dcl.data.samplers.rank_and_size", lambda: (rank, 2))
    lengths = np.arange(31) % 7 + 3
    for order, elements in ((EpochSampler(31, 6, 3), 3), (LengthSampler(lengths, 6, 3), 1)):
        order.set_epoch(4)
        whole = list(order)
        order.start_at(4, done)
        assert list(order) == list(order) == whole[done * elements :], "each time anew"
        assert len(order) == len(whole)
        order.set_epoch(5)
        assert len(list(order)) == len(whole)


class Slow:
    """Examples that take a while."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        time.sleep(0.04)
        return os.getpid() if index == 0 else index


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM])
def test_loader_processes_outlast_a_signal_to_all(number):
    """A terminal's Ctrl-C and a batch system's signals reach them too, while training finishes its step."""
    signals = StopSignals()
    signals.install()
    try:
        loader = iter(DataLoader(Slow(), batch_size=None, **worker_options(1)))  # type: ignore[arg-type]
        os.kill(next(loader), number)
        assert list(loader) == [1, 2, 3, 4, 5]
    finally:
        signals.restore()


def test_workers_without_training_end_at_sigterm(monkeypatch):
    """Else the end of a script, which ends its children by it, would wait five minutes."""
    # Lightning puts back the handler of SIGCHLD that it found; torch sets its own, which tells of dead workers, once.
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    loader = iter(DataLoader(Slow(), batch_size=None, **worker_options(1)))  # type: ignore[arg-type]
    worker = next(loader)
    with pytest.raises(RuntimeError, match="killed by signal|exited unexpectedly"):
        os.kill(worker, signal.SIGTERM)
        time.sleep(1)  # a signal just before the wait for a batch would be answered after its ten minutes
        list(loader)


def test_too_few_descriptors_are_refused(monkeypatch):
    limits: list[tuple[int, int]] = [(40, 60)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    assert worker_options(0)["timeout"] == 0
    with pytest.raises(UserError, match=r"data.num_workers: .* \(ulimit -n\) for 6 workers, found 60"):
        worker_options(6)
    limits.append((40, 5000))
    assert worker_options(6)["timeout"] == 600
    assert limits[-1][0] > 6 * 60 and limits[-1][1] == 5000
