"""Options of `benchmark` and `study`, declared without torch and pandas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from medclip_dcl.common.command_line import (
    ENSEMBLE,
    MODEL,
    PROMPTS,
    device,
    imports,
    number,
    option,
    positional,
    require_task,
    whole_number,
)
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import Ensemble


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Test models on prepared sets by one protocol, and compare them on one page.

    Tests that are finished are kept: the same command continues after a kill, and one with a further model or set tests
    only that. Writes benchmark.html, .csv and .tex of the models and sets of the command, and probe_shares.csv.
    """

    models: Sequence[Path] = positional(MODEL, nargs="+", metavar="MODEL")
    sets: Sequence[Path] = option("prepared sets", nargs="+", metavar="SET")
    output: Path = option("where tests and page go", metavar="FOLDER")
    names: str | None = option("names of the models, by commas (of their folders)", None, metavar="A,B")
    baseline: str | None = option(
        "model that is subtracted from the others (the first)", None, metavar="NAME"
    )
    prompts: str = option(f"{PROMPTS} (public)", "public", metavar="FILE")
    ensemble: Ensemble = option(f"{ENSEMBLE}, as in CLIP (scores)", "scores")
    probe: bool = option(
        "also test logistic regressions on each image encoder's features, fitted to the train patients of the set; "
        "MODEL may then be the folder of an image encoder alone (transformers, timm)",
        False,
    )
    blank: Literal["zeros", "ignore"] | None = option(
        "with --probe: count of a blank label, in fits and all tests: negative, or left out (zeros)", None
    )
    probe_shares: Sequence[float] = option(
        "with --probe: also fits on these shares of the train patients, five draws of each (none)",
        (),
        type=lambda text: sorted({*map(number(1), text.split(","))}),
        metavar="A,B",
    )
    device: str = device()
    imported: Sequence[str] = imports()

    def __post_init__(self) -> None:
        if (self.blank or self.probe_shares) and not self.probe:
            raise UserError("--blank, --probe_shares: expected --probe beside them, found none; add it")

    @property
    def counts_blank(self) -> str:
        """Policy for blank labels in every test; without probes that of `test`."""
        return (self.blank or "zeros") if self.probe else "ignore"


@dataclass(frozen=True, kw_only=True)
class Study:
    """Run the grid of a study: what is finished is kept, what was killed continues.

    Writes results.parquet, report.html, tables.md, plots/ and what is chosen into the study's folder.
    """

    file: Path = positional("experiment file, or a packaged one by its name, such as digits")
    workers: int = option("processes that share the cores (1)", 1, type=whole_number(1))
    task: int = option("train the runs task, task + tasks, ... (0)", 0, type=whole_number(0))
    tasks: int = option("commands that share the grid (SLURM array) (1)", 1, type=whole_number(1))
    report_only: bool = option("make table and report of what is finished, run nothing", False)
    device: str = device("; for runs whose trainer.accelerator is auto")
    imported: Sequence[str] = imports()

    def __post_init__(self) -> None:
        require_task(self.task, self.tasks)
