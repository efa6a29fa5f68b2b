"""Find the model that a user names. No weights are read, and everything after it sees a local path."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from medclip_dcl.common.errors import MissingFileError, UserError
from medclip_dcl.common.terms import TERMS

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
"""Files of an exported folder."""
BEST, LAST = "best.ckpt", "last.ckpt"
"""Checkpoints of a run: the one that validation selected, if any, and the last."""
LANGUAGE_MODEL = "language_model"
"""Folder of the trained model in the run folder of a language model."""
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run folder."""
RUN_FILE = "config.yaml"
"""Configuration of a run, by which its folder is known."""
_REPOSITORY = re.compile(r"([\w.-]+/)?[\w.-]+")
_FILES = (WEIGHTS_FILE, "*.json", "*.md", *TERMS)


class FoundModel(NamedTuple):
    """A model on this machine.

    Attributes:
        path: checkpoint file or exported folder.
        is_downloaded: True for the local copy of a repository.
    """

    path: Path
    is_downloaded: bool = False

    @property
    def run(self) -> Path | None:
        """Run folder that owns the checkpoint; None for an exported folder and for a checkpoint in no run."""
        path = self.path if len(self.path.parts) > 2 else self.path.absolute()
        run = path.parent.parent
        return run if path.parent.name == CHECKPOINTS and (run / RUN_FILE).is_file() else None

    @property
    def folder(self) -> Path | None:
        """Folder with calibration, lineage and card: the run or the exported folder; None for a lone checkpoint."""
        return self.run or (self.path if self.path.is_dir() else None)


def find_model(model: str | Path, setting: str = "") -> FoundModel:
    """Find a run folder, a checkpoint, an exported folder or a repository (owner/name) of the Hugging Face Hub.

    A path that exists wins. Of a run the best checkpoint by validation is taken; without one the last, with a warning.
    `setting` opens an error.

    Raises:
        MissingFileError: no such file, folder or repository, or a run without a checkpoint.
        UserError: a folder with several checkpoint files, or without a model.
    """
    try:
        return _found(model)
    except UserError as error:
        raise type(error)(f"{setting}: {error}" if setting else str(error)) from error


def _found(model: str | Path) -> FoundModel:
    path = Path(model).expanduser()
    if not path.exists() and "/" not in str(model):
        raise MissingFileError(f"no file or folder {model}")
    if not path.exists():
        return FoundModel(download(str(model), _FILES), is_downloaded=True)
    if path.is_file() or is_exported(path):
        return FoundModel(path)
    if (path / CHECKPOINTS).is_dir():
        return FoundModel(_checkpoint_of_run(path))
    files = sorted(path.glob("*.ckpt"))
    if len(files) == 1:
        return FoundModel(files[0])
    if files:
        raise UserError(
            f"{path} holds several checkpoints: {', '.join(file.name for file in files)}; give one of these files"
        )
    return FoundModel(path)  # its reader says what is missing


def is_exported(folder: Path) -> bool:
    """True for a folder written by `save_pretrained`, complete or not."""
    file = folder / CONFIG_FILE
    return file.is_file() and b'"image_encoder"' in file.read_bytes()


def may_be_repository(name: str) -> bool:
    """True for a name that the hub is asked for: [owner/]name, where no folder `owner` exists."""
    owner = name.rpartition("/")[0]
    return bool(_REPOSITORY.fullmatch(name)) and not (owner and Path(owner).is_dir())


def download(repository: str, files: Sequence[str]) -> Path:
    """Local copy of those files of a repository."""
    from huggingface_hub import snapshot_download

    if not may_be_repository(repository):
        raise MissingFileError(f"no file or folder {repository}")
    try:
        return Path(snapshot_download(repository, allow_patterns=[*files]))
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise MissingFileError(
            f"no file or folder {repository}, and no Hugging Face repository of that name could be downloaded "
            f"({reason}); check the spelling and the network, or give the path of a local copy"
        ) from error


def _checkpoint_of_run(run: Path) -> Path:
    best, last = (run / CHECKPOINTS / name for name in (BEST, LAST))
    if best.is_file():
        return best
    if not last.is_file():
        raise MissingFileError(
            f"{run / CHECKPOINTS} holds neither {BEST} nor {LAST}; wait for the run's first checkpoint, or give a "
            ".ckpt file"
        )
    warnings.warn(f"{run} has no {BEST} by validation: using {last}", stacklevel=2)
    return last
