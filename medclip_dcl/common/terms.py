"""Licences and model card of a published model, which stay with its weights."""

from __future__ import annotations

import shutil
from pathlib import Path

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


def copy_terms(source: Path | None, folder: Path) -> list[str]:
    """Copy those of a folder unless their names exist; returns the names. None: there is no such folder."""
    files = files_of_terms(source) if source else []
    for file in files:
        if not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
    return [file.name for file in files]
