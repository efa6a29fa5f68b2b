"""Options of `report` and `compare`, declared without torch and pandas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from medclip_dcl.common.command_line import option, positional


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write RUN/report.html from the run folder alone."""

    run: Path = positional("folder of a run, e.g. runs/demo", metavar="RUN")


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare tested runs in the shape of SSD's tables 1, 3, 4 and 5, with bootstrap intervals by patient.

    Writes comparison.html, .md, .tex and .json, and prints the Markdown.
    """

    runs: Sequence[Path] = positional("folder of a tested run, or of a study", nargs="+", metavar="RUN")
    baseline: str | None = option(
        "folder or name of the row that is subtracted from the others", None, metavar="RUN"
    )
    names: str | None = option("names of the rows, by commas (the folders' names)", None, metavar="A,B")
    untrained: bool = option("add the untrained network of each run", False)
    output: Path = option("where to write (runs/comparison)", Path("runs/comparison"), metavar="FOLDER")
