"""The page of an experiment: tables of means and paired differences, plots, and what the numbers depend on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from medclip_dcl.common.files import write_text
from medclip_dcl.report.draws import N_DRAWS, TestedRun, units_of
from medclip_dcl.report.page import render_template
from medclip_dcl.report.tables import NOTHING
from medclip_dcl.studies.grid import BEST, Experiment
from medclip_dcl.studies.grid_plots import draw_plots
from medclip_dcl.studies.grid_tables import ALPHA, tables
from medclip_dcl.studies.one_run import LOG_FILE, error_of, is_done

REPORT_FILE, TABLES_FILE = "report.html", "tables.md"


def write_report(experiment: Experiment, table: pd.DataFrame, verdicts: Sequence[str] = ()) -> Path:
    """Write report.html, with verdicts on top, tables.md and plots/*.png; the same runs give the same page."""
    runs = experiment.runs()
    n_done = sum(is_done(run, experiment.commands) for run in runs)
    failures = [
        f"{run.name}: {error} (runs/{run.name}/{LOG_FILE})"
        for run in runs
        if (error := error_of(run)) and not is_done(run, experiment.commands)
    ]
    finished = table.drop_duplicates("run")
    seconds = finished[["fit_seconds", "test_seconds"]].sum().sum() if len(finished) else 0.0
    content = {
        "name": experiment.folder.resolve().name,
        "grid": " × ".join(f"{len(levels)} {axis}" for axis, levels in experiment.axes.items()),
        "tiles": [
            ("runs done", f"{n_done:,} of {len(runs):,}"),
            ("failed", len(failures)),
            *(
                (f"levels of {axis}", len(levels))
                for axis, levels in experiment.axes.items()
                if axis == experiment.pairs
            ),
            ("hours of fit and test", f"{seconds / 3600:.1f}"),
        ],
        "notes": [*_notes(finished, len(runs) - n_done), *experiment.optional],
        "failures": failures,
        "method": _method(experiment, finished),
        "pairs": experiment.pairs,
        "verdicts": verdicts,
        "tables": tables(experiment, table),
        "figures": draw_plots(experiment, table),
        "facts": _facts(finished),
        "files": {file.name: file.read_text(encoding="utf-8") for file in experiment.files},
    }
    file = experiment.folder / REPORT_FILE
    write_text(render_template("experiment.html", content), file)
    write_text(render_template("experiment.md", content), experiment.folder / TABLES_FILE)
    return file


def _method(experiment: Experiment, finished: pd.DataFrame) -> str:
    """Description of the statistics in the tables."""
    if experiment.pairs is None:
        text = "One run of each: there are no intervals over trainings."
    else:
        text = f"Means over {experiment.pairs}; in brackets, 95% t intervals over {experiment.pairs}, each for itself."
    if experiment.reference is not None and experiment.pairs is not None:
        text += f" Differences from {experiment.reference.name} are paired by {experiment.pairs}. * marks "
        text += (
            "hypotheses alone; all other differences are described, not tested."
            if experiment.hypotheses
            else f"those with p ≤ {ALPHA} by the paired t test, adjusted by Holm's method for all differences of their "
            "outcome; outcomes are not adjusted for one another."
        )
    if by := [f"{one.validate} ({name})" for name, one in experiment.outcomes.items() if one.step == BEST]:
        text += (
            f" Best step: of the kept steps of each run alone, that with the best {', '.join(by)}. Last step: the last"
            " kept one."
        )
    if experiment.patients:
        runs = [run for run in experiment.runs() if run.name in set(finished["run"])]
        units = units_of(*(TestedRun(run.folder).tested for run in runs))
        number = f"number, the mean over {experiment.pairs}" if experiment.pairs else "number"
        text += (
            f" In round brackets, 95% percentile intervals over {N_DRAWS:,} bootstrap draws of the tested "
            f"{units}, of the same {number}: they do not say how trainings vary."
        )
    return text


def _notes(finished: pd.DataFrame, n_missing: int) -> list[str]:
    found = [f"{n_missing:,} runs are missing: averages are over those that are finished."] * (n_missing > 0)
    if n := int(finished["protocol"].str.endswith("batches").sum()):
        found.append(f"{n} runs were tested on some batches alone.")
    for column, what in (
        ("versions", "versions of the software"),
        ("precision", "precisions"),
        ("device", "devices"),
        ("dataset", "data sets"),
        ("protocol", "protocols of the test, so that numbers may have other meanings"),
    ):
        if (n := finished[column].nunique()) > 1:
            found.append(f"The runs were made with {n} {what}; results.parquet says which.")
    return found


def _facts(finished: pd.DataFrame) -> dict[str, str]:
    """Distinct values over the finished runs."""

    def distinct(column: str) -> str:
        values = sorted(finished[column].dropna().unique())
        return (
            ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values) or NOTHING
        )

    versions = [json.loads(text) for text in finished["versions"].dropna().unique()]
    of_name = {
        name: sorted({one[name] for one in versions if name in one}) for one in versions for name in one
    }
    seconds = finished[["fit_seconds", "test_seconds"]].median()
    columns = {**{x: x for x in ("device", "precision", "epochs", "steps")}, "data set": "dataset"}
    return {
        **{name: distinct(column) for name, column in columns.items()},
        "versions": "; ".join(f"{name} {', '.join(of_name[name])}" for name in sorted(of_name)),
        "seconds of a run": f"fit {seconds['fit_seconds']:.1f}, test {seconds['test_seconds']:.1f} (medians)",
    }
