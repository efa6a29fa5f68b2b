"""The last two checkpoints survive a crash at any moment of writing; damaged ones are noticed."""

from __future__ import annotations

import os
import signal
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from medclip_dcl.common.errors import UserError
from medclip_dcl.runs.checkpoint_files import ResumeError, find_readable, rotate, whats_wrong
from medclip_dcl.training import last_checkpoint as resuming
from medclip_dcl.training.last_checkpoint import AtomicCheckpointIO, StopSignals


class Crash(BaseException):
    """Stands for a kill."""


def write(folder: Path, number: int) -> None:
    """Save as LastCheckpoint does, with a checkpoint that holds its number."""
    content = {"loops": {}, "number": number, "weights": torch.full((300,), float(number))}
    AtomicCheckpointIO().save_checkpoint(content, folder / "new.ckpt")
    rotate(folder)


def test_unloadable_state_is_refused_at_the_first_save(tmp_path):
    states = {"Fine{}": {"n": 1, "t": torch.ones(2)}, "Mine{'a': 1}": {"score": np.float64(0.5)}}
    with pytest.raises(UserError, match="the state of Mine could not be loaded again"):
        AtomicCheckpointIO().save_checkpoint({"callbacks": states, "loops": {}}, tmp_path / "new.ckpt")
    assert not any(tmp_path.iterdir())


def number_of(file: Path | None) -> int:
    assert file is not None
    return torch.load(file, weights_only=True)["number"]


def test_the_last_two_are_kept(tmp_path):
    assert find_readable(tmp_path) is None
    for number in range(4):
        write(tmp_path, number)
        assert number_of(find_readable(tmp_path)) == number
    assert number_of(tmp_path / "previous.ckpt") == 2
    assert {file.name for file in tmp_path.iterdir()} == {"last.ckpt", "previous.ckpt"}


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    write(tmp_path, 1)
    open_file = Path.open
    monkeypatch.setattr(Path, "open", lambda *_: open_file(Path("/dev/full"), "wb"))
    with pytest.raises(OSError, match="No space left on device: .*new.ckpt"):
        write(tmp_path, 2)
    assert number_of(find_readable(tmp_path)) == 1


@pytest.mark.parametrize("has_hard_links", [True, False])
def test_a_crash_between_disk_operations_loses_nothing(has_hard_links, monkeypatch, tmp_path):
    """Before and after each of them the run finds the checkpoint of before, or the new one; the next is written."""
    real = {name: getattr(os, name) for name in ("replace", "link", "fsync", "unlink")}
    left = [0]

    def counted(name):
        def operation(*arguments, **options):
            if name == "link" and not has_hard_links:
                raise PermissionError("no hard links on this file system")
            if left[0] == 0:
                raise Crash
            left[0] -= 1
            return real[name](*arguments, **options)

        return operation

    for name in real:
        monkeypatch.setattr(os, name, counted(name))
    moments = 0
    for moment in range(40):
        folder = tmp_path / str(moment)
        left[0] = -1
        write(folder, 1)
        write(folder, 2)
        left[0] = moment
        try:
            write(folder, 3)
            crashed = False
        except Crash:
            crashed = True
        left[0] = -1
        assert number_of(find_readable(folder)) in ((2, 3) if crashed else (3,)), moment
        # Were the last one lost now, there would still be another.
        both = [file for name in ("last.ckpt", "previous.ckpt") if (file := folder / name).exists()]
        assert all(whats_wrong(file) is None for file in both)
        write(folder, 4)
        assert number_of(find_readable(folder)) == 4
        assert number_of(folder / "previous.ckpt") in (2, 3)
        moments += crashed
        if not crashed:
            break
    assert moments >= 5, "each operation was crashed before"


@pytest.mark.parametrize("size", [0, 1, 100, -1])
def test_a_truncated_checkpoint_is_set_aside(size, tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2)
    content = (tmp_path / "last.ckpt").read_bytes()
    (tmp_path / "last.ckpt").write_bytes(content[:size])
    with pytest.warns(
        UserWarning, match=r"last.ckpt cannot be read .*continues from the one before it, .*previous"
    ):
        assert number_of(find_readable(tmp_path)) == 1
    assert (tmp_path / "unreadable.ckpt").read_bytes() == content[:size]
    assert number_of(find_readable(tmp_path)) == 1, "another process finds the same"
    write(tmp_path, 3)
    assert (number_of(tmp_path / "last.ckpt"), number_of(tmp_path / "previous.ckpt")) == (3, 1)


def test_a_flipped_bit_is_noticed(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2)
    file = tmp_path / "last.ckpt"
    with zipfile.ZipFile(file) as archive:
        (data,) = [entry for entry in archive.infolist() if entry.file_size == 1200]
    content = bytearray(file.read_bytes())
    content[data.header_offset + 700] ^= 1
    file.write_bytes(content)
    assert "checksum" in str(whats_wrong(file))
    with pytest.warns(UserWarning, match="checksum of .* is wrong"):
        assert number_of(find_readable(tmp_path)) == 1


@pytest.mark.parametrize("trouble", [MemoryError(), PermissionError(13, "denied")])
def test_other_trouble_sets_no_checkpoint_aside(tmp_path, monkeypatch, trouble):
    def refuse(*_args, **_options):
        raise trouble

    (tmp_path / "last.ckpt").write_bytes(b"whole")
    monkeypatch.setattr("medclip_dcl.runs.checkpoint_files.zipfile.ZipFile", refuse)
    with pytest.raises(type(trouble)):
        find_readable(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_two_unreadable_checkpoints_are_named(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "last.ckpt")
    assert whats_wrong(tmp_path / "last.ckpt") == "it is not a checkpoint of training"
    write(tmp_path, 1)
    write(tmp_path, 2)
    for name in ("last.ckpt", "previous.ckpt"):
        (tmp_path / name).write_bytes(b"PK" + bytes(70))
    with pytest.raises(ResumeError) as error:
        find_readable(tmp_path)
    for words in ("last.ckpt: 72 bytes", "previous.ckpt: 72 bytes", "backup", "--ckpt_path", "to train anew"):
        assert words in str(error.value)
    assert (tmp_path / "last.ckpt").exists() and (tmp_path / "previous.ckpt").exists()


def test_the_file_is_synced_before_it_is_renamed(monkeypatch, tmp_path):
    events: list[str] = []
    monkeypatch.setattr(resuming.os, "fsync", lambda descriptor: events.append("fsync"))
    real = os.replace

    def replace(a, b):
        events.append(f"to {Path(b).name}")
        real(a, b)

    monkeypatch.setattr(resuming.os, "replace", replace)
    write(tmp_path, 1)
    write(tmp_path, 2)
    assert events[:4] == ["fsync", "to new.ckpt", "fsync", "to last.ckpt"]
    assert events[5:] == ["fsync", "to new.ckpt", "fsync", "to previous.ckpt", "to last.ckpt", "fsync"]


def test_a_second_ctrl_c_interrupts_at_once():
    before = signal.getsignal(signal.SIGINT)  # a shell's background jobs ignore it
    signals = StopSignals()
    signals.install()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.requested == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signals.restore()
    assert signal.getsignal(signal.SIGINT) is before
