"""Licences and model card of a published model, which stay with its weights."""

from __future__ import annotations

import shutil
from pathlib import Path

from medclip_dcl.common.weight_files import is_exported

SOURCE_CARD = "SOURCE_README.md"
"""Model card of the source, beside the one of this program."""
TERMS = (
    *("LICENSE*", "License*", "license*", "LICENCE*", "Licence*", "licence*"),
    *("NOTICE*", "Notice*", "notice*", "USE_POLICY*", "TERMS*", SOURCE_CARD),
)
"""Patterns of their names."""


def files_of_terms(folder: Path) -> list[Path]:
    """Licences and source's model card in a folder."""
    return sorted({file for pattern in TERMS for file in folder.glob(pattern) if file.is_file()})


def copy_terms(source: Path, folder: Path) -> list[str]:
    """Copy those of a folder, where none of their names is there yet; returns the names."""
    files = files_of_terms(source)
    for file in files:
        if not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
    return [file.name for file in files]


def copy_terms_of_model(source: Path, folder: Path) -> list[str]:
    """`copy_terms` from an exported folder, a run folder, or the run folder of a checkpoint; none of other files."""
    path = source.expanduser().absolute()
    home = path if path.is_dir() else path.parent.parent
    return copy_terms(home, folder) if is_exported(home) or (home / "checkpoints").is_dir() else []
