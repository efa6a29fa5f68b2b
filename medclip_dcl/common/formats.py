"""Format versions of checkpoints, exported models and prepared sets.

A format gets a new version when files of the old one can no longer be read. Until version 1.0 of this program there are
no upgrades: files of another version are made again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from medclip_dcl.common.errors import UserError

VERSION_KEY = "format_version"


@dataclass(frozen=True)
class Format:
    """A file format: its name, for errors, and its version."""

    name: str
    version: int

    def check(self, content: Any, source: str) -> None:
        """Refuse content of another version, or of another program."""
        found = content.get(VERSION_KEY, "none") if isinstance(content, dict) else "none"
        if found != self.version:
            raise UserError(
                f"{source}: expected a {self.name} of format version {self.version}, found version {found}; make it "
                "again, or use the medclip_dcl that wrote it"
            )


CHECKPOINT = Format("checkpoint", 3)
"""Checkpoints of `fit`, of all models."""

NETWORK = Format("network configuration", 3)
"""`ImageTextNetwork.config()`: config.json of an exported folder, and "network" of a checkpoint."""

PREPARED_SET = Format("prepared data set", 3)
"""dataset.json, for the tables of its set."""

CALIBRATION = Format("calibration", 1)
"""calibration.json of a run or an exported folder."""
