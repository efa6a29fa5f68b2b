"""Checkpoint files of a run: keeping two, finding one that can be read. Without Lightning."""

from __future__ import annotations

import os
import warnings
import zipfile
from pathlib import Path

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import link, sync_folder
from medclip_dcl.common.find_model import BEST, LAST
from medclip_dcl.common.weight_files import read_torch_file

PREVIOUS, UNREADABLE, NEW = "previous.ckpt", "unreadable.ckpt", "new.ckpt"


class ResumeError(UserError):
    """A run cannot be resumed; the message says what to do."""


def rotate(folder: Path) -> None:
    """Make new.ckpt the last checkpoint and the last one the previous; two are readable at every moment."""
    new, last, previous = (folder / name for name in (NEW, LAST, PREVIOUS))
    if last.exists():
        link(last, previous)
    os.replace(new, last)
    sync_folder(folder)


def find_readable(folder: Path) -> Path | None:
    """The last checkpoint, or the previous one if the last cannot be read; None if there is neither.

    A damaged file is renamed to unreadable.ckpt, so that the next rotation keeps the readable one. Several processes
    may do this at once.
    """
    problems: dict[Path, str] = {}
    for file in (folder / LAST, folder / PREVIOUS):
        if not file.is_file():
            continue
        problem = whats_wrong(file)
        if problem is not None:
            problems[file] = problem
            continue
        for bad, why in problems.items():
            try:
                os.replace(bad, folder / UNREADABLE)
            except FileNotFoundError:
                continue  # another process was quicker, and says so
            warnings.warn(
                f"{bad} cannot be read ({why}): the run continues from the one before it, {file}",
                stacklevel=2,
            )
        return file
    if problems:
        what = "; ".join(f"{file}: {problem}" for file, problem in problems.items())
        raise ResumeError(
            f"no checkpoint of the run can be read ({what}); restore one of them from a backup, or continue from "
            f"another with --ckpt_path (e.g. {folder / BEST}), or delete {folder.parent} to train anew"
        )
    return None


def whats_wrong(file: Path) -> str | None:
    """Reason why a checkpoint cannot be read; None if all of it can (every byte is read and its checksum compared)."""
    try:
        with zipfile.ZipFile(file) as archive:
            broken = archive.testzip()
        if broken is not None:
            return f"the checksum of {broken} is wrong"
        content = read_torch_file(file)
    except (PermissionError, MemoryError):  # not a problem of the file, which must not be set aside
        raise
    except Exception as error:  # whatever a damaged file makes the readers say
        size = file.stat().st_size if file.is_file() else 0
        return f"{size} bytes, {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None if "loops" in content else "it is not a checkpoint of training"


def remove_leftovers(folder: Path) -> None:
    """Delete the unfinished files of a killed run."""
    for file in (folder / NEW, *folder.glob(".*.ckpt.tmp")):
        file.unlink(missing_ok=True)
