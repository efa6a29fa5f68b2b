"""Orders of examples: functions of (seed, epoch), the same for every number of processes."""

from __future__ import annotations

import pytest

from medclip_dcl.data.samplers import EpochSampler, ShardSampler


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
def test_global_batches_do_not_depend_on_the_number_of_processes(monkeypatch, size):
    single = [index for _, index in EpochSampler(31, 6, seed=0)]
    parts = [[index for _, index in part] for part in ranks(monkeypatch, EpochSampler, size, 31, 6, 0)]
    local = 6 // size
    for batch in range(5):
        together = [i for part in parts for i in part[batch * local : (batch + 1) * local]]
        assert together == single[batch * 6 : (batch + 1) * 6]


def test_shards_hold_every_example_once(monkeypatch):
    parts = ranks(monkeypatch, ShardSampler, 3, 11)
    assert sorted(i for part in parts for i in part) == list(range(11))
    assert [len(part) for part in parts] == [4, 4, 3]


def test_errors(monkeypatch):
    with pytest.raises(ValueError, match="3 training images do not fill one batch of 4"):
        EpochSampler(3, 4, 0)
    monkeypatch.setattr("medclip_dcl.data.samplers.rank_and_size", lambda: (0, 3))
    with pytest.raises(ValueError, match="batch_size 4 .* must be a multiple of their number, 3"):
        EpochSampler(10, 4, 0)
