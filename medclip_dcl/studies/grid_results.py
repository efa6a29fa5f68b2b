"""The folder of an experiment: experiment.json, and results.parquet made from the runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import write_json, write_parquet
from medclip_dcl.metrics.summaries import by_path
from medclip_dcl.metrics.table import SECTIONS, is_computed
from medclip_dcl.report.draws import TestedRun
from medclip_dcl.runs import saved
from medclip_dcl.runs.run_folder import FIT_FILE, METRICS_FILE
from medclip_dcl.studies import grid
from medclip_dcl.studies.one_run import Run, is_done

EXPERIMENT_FILE, TABLE_FILE = "experiment.json", "results.parquet"


def claim_folder(experiment: grid.Experiment, writes: bool = True) -> None:
    """Check that the folder is new or of this experiment, whose levels may change, and write experiment.json."""
    file, table = experiment.folder / EXPERIMENT_FILE, experiment.folder / TABLE_FILE
    now = experiment.identity()
    earlier = saved.read_json(file) if file.is_file() else {}
    if before := grid.with_prompt_texts(earlier):
        differing = list(saved.differing_settings(before["settings"], now["settings"]))
        differing += ["commands"] * (before["commands"] != now["commands"])
        if before["order"] != now["order"]:
            differing.append(f"axes ({', '.join(before['order'])})")
        else:
            for axis, levels in before["axes"].items():
                depends, did = _dependence(now["axes"][axis]), _dependence(levels)
                changed = (level for level in depends.keys() & did.keys() if depends[level] != did[level])
                differing += [f"{axis}={level}: configs" for level in changed]
                for level in levels.keys() & now["axes"][axis].keys():
                    keys = saved.differing_settings(levels[level], now["axes"][axis][level])
                    differing += [f"{axis}={level}: {key}" for key in keys]
                now["axes"][axis] = levels | now["axes"][axis]
        if differing:
            raise UserError(
                f"{experiment.folder} holds runs of another grid: {file.name} differs in "
                f"{', '.join(sorted(differing))}; restore these settings, choose another folder in "
                f"{experiment.own_file}, or delete this one"
            )
    elif runs := sorted(experiment.folder.glob(f"runs/*/{saved.CONFIG_FILE}")):
        raise UserError(
            f"{experiment.folder} holds runs of unknown settings, such as {runs[0].parent.name}, but no {file.name}; "
            f"restore it, or choose another folder in {experiment.own_file}"
        )
    elif not (experiment.folder / "runs").exists() and table.is_file() and len(saved.read_parquet(table)):
        raise UserError(
            f"{table} holds results whose runs are not beside it; choose another folder in "
            f"{experiment.own_file}, or move the file away"
        )
    if writes and now != earlier:
        write_json(now, file)


def _dependence(levels: Iterable[str]) -> dict[str, list[str]]:
    """Level -> other axes on which its settings depend, from the keys of experiment.json."""
    parts = (key.split(grid.AT) for key in levels)
    return {name: [one.partition("=")[0] for one in others] for name, *others in parts}


def results_table(experiment: grid.Experiment) -> pd.DataFrame:
    """One row for each finished run and outcome, in the order of the grid; without outcomes, one for each run.

    An outcome at the best step has a row for each kept step. The columns are the axes, run, outcome, value,
    `STEP_COLUMNS` and `FACTS`; an axis of numbers has a numeric column.
    """
    values = {axis: {level.name: level.value for level in levels} for axis, levels in experiment.axes.items()}
    rows: list[dict[str, Any]] = []
    for run in experiment.runs():
        if not is_done(run, experiment.commands):
            continue
        levels = {axis: values[axis][name] for axis, name in run.levels.items()}
        for name in experiment.outcomes or (None,):
            outcome = grid.Outcome("") if name is None else experiment.outcomes[name]
            found = [_row(run, name, outcome, step) for step in _steps(outcome, name, run)]
            chosen = found
            if outcome.step == grid.BEST:
                known = [row for row in found if pd.notna(row["validate"])]
                best = max if outcome.is_higher_chosen else min  # the first of equal ones
                chosen = [best(known, key=itemgetter("validate"))] if known else []
            rows += [{**levels, **row, "chosen": any(row is one for one in chosen)} for row in found]
    columns = [*experiment.axes, "run", "outcome", "value", *grid.STEP_COLUMNS, *grid.FACTS]
    kinds = {"run": "string", "outcome": "string", "value": "float64", **grid.STEP_COLUMNS, **grid.FACTS}
    return pd.DataFrame(rows, columns=columns).astype(kinds)


def write_table(experiment: grid.Experiment) -> pd.DataFrame:
    """Make results.parquet from the runs."""
    table = results_table(experiment)
    write_parquet(table, experiment.folder / TABLE_FILE)
    return table


def _row(run: Run, name: str | None, outcome: grid.Outcome, step: int | None) -> dict[str, Any]:
    """Number of an outcome, and of the validation that may choose it, after a step; None: of results.json."""
    folder = run.folder if step is None else run.folder / saved.STEPS / str(step)
    metrics, facts = _read_cell(
        run.folder, folder, _time_of(folder / saved.RESULTS_FILE), _time_of(run.folder / FIT_FILE)
    )
    value = None if name is None else _value(metrics, outcome.paths, name, run, step)
    validate = _value({}, [outcome.validate], name, run, step) if outcome.validate else None
    return {"run": run.name, "outcome": name, "value": value, "step": step, "validate": validate, **facts}


def _steps(outcome: grid.Outcome, name: str | None, run: Run) -> Sequence[int | None]:
    """The steps of an outcome's rows; None for results.json. The run must have tested them for a number of the test."""
    if outcome.step == "":
        return [None]
    kept = (saved.read_config(run.folder) or {}).get("kept_steps") or []
    steps: list[Any] = (
        kept if outcome.step == grid.BEST else kept[-1:] if outcome.step == grid.END else [outcome.step]
    )
    for step in [] if outcome.is_of_validation else steps or [outcome.step]:
        if not (run.folder / saved.STEPS / str(step) / saved.RESULTS_FILE).is_file():
            raise UserError(
                f"outcomes.{name}: {run.folder} has no test of step {step} ({saved.STEPS}/{step}/{saved.RESULTS_FILE})"
                "; set kept_steps, or test the run again"
            )
    return steps


def _value(
    metrics: Mapping[str, Any], paths: Sequence[str], name: str | None, run: Run, step: int | None
) -> float | None:
    """Mean over an outcome's paths; None where one of them has no number."""
    file = run.folder / saved.RESULTS_FILE
    if (prefix := paths[0].partition("/")[0] + "/") in (grid.VALIDATION, grid.TRAINING):
        file = run.folder / METRICS_FILE
        metrics = _of_metrics_file(file, _time_of(file), step, prefix)
    elif any(path not in metrics and is_computed(path) for path in paths):
        folder = run.folder if step is None else run.folder / saved.STEPS / str(step)
        computed: Mapping[str, Any] = _computed(folder, _time_of(folder / saved.RESULTS_FILE))
        metrics = {**(computed or dict.fromkeys(filter(is_computed, paths))), **metrics}
    if missing := [path for path in paths if path not in metrics]:
        known = ", ".join(sorted(metrics))
        raise UserError(f"outcomes.{name}: {file} has no metric {missing[0]}; it has {known}")
    values = [metrics[path] for path in paths]
    return None if None in values else sum(values) / len(values)


@cache
def _of_metrics_file(file: Path, time: int, step: int | None, prefix: str) -> dict[str, float]:
    """Metrics with a prefix after an optimiser step, None for the last with any; NaN where that has no number."""
    if not time:
        return {}
    table = pd.read_csv(file)
    if step is not None:
        table = table[table["step"] == step - 1]  # Lightning counts from 0
    rows = table[[name for name in table if str(name).startswith(prefix)]].dropna(how="all")
    return {str(name): float(value) for name, value in rows.iloc[-1].items()} if len(rows) else {}


@cache
def _computed(folder: Path, time: int) -> dict[str, float]:
    """Numbers of a test by path, from its predictions; empty, and said once, without them."""
    tested = TestedRun(folder)
    if not any(tested.file_of(section).is_file() for section in SECTIONS):
        print(f"{tested.file} lacks numbers, and there are no predictions: NaN; test again", file=sys.stderr)
        return {}
    values = tested.predictions.values.values()
    return {path: float(value) for of_section in values for path, (value,) in of_section.items()}


@cache
def _read_cell(folder: Path, tested: Path, *times: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metrics of a test by path, and `FACTS`; a run is read again only when its files are new."""
    results = saved.read_results(tested) or {}
    fit = saved.read_json(folder / FIT_FILE) if (folder / FIT_FILE).is_file() else {}
    config, timings = folder / saved.CONFIG_FILE, results.get("timings", {})
    facts = {
        "weights": results.get("checkpoint", {}).get("weights"),
        "dataset": results.get("dataset", {}).get("fingerprint"),
        "precision": fit.get("precision", results.get("precision")),
        "device": fit.get("device", timings.get("device")),
        "versions": json.dumps(results["versions"], sort_keys=True) if "versions" in results else None,
        "protocol": saved.protocol_digest(results) if results else None,
        "epochs": fit.get("epochs"),
        "steps": fit.get("steps"),
        "train_patients": fit.get("train_patients"),
        "fit_seconds": fit.get("seconds"),
        "test_seconds": timings.get("test_seconds"),
        "config": config.read_text(encoding="utf-8") if config.is_file() else None,
    }
    # A list, such as of draws, is not a number.
    numbers = {
        path.removeprefix("/"): value
        for path, value in by_path(results.get("metrics", {}), "")
        if value is None or isinstance(value, int | float)
    }
    return numbers, facts


def _time_of(file: Path) -> int:
    return file.stat().st_mtime_ns if file.is_file() else 0
