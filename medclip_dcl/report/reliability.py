"""Section of the run report: calibration of the zero-shot findings on test patients.

Reads results.json, predictions/classification.parquet and calibration.json of the run folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.special import expit

from medclip_dcl.common.errors import UserError
from medclip_dcl.metrics.calibration import CALIBRATION_FILE, Calibration
from medclip_dcl.metrics.summaries import BINS, bins_of, calibration_error
from medclip_dcl.pictures.geometry import View
from medclip_dcl.report import charts
from medclip_dcl.report.intervals import Interval, Predictions, bootstrap_numbers, intervals_of
from medclip_dcl.report.tables import Cell, Column, Row, Table, interval_cell, number
from medclip_dcl.runs.saved import SavedResultsError, value_at

_N_SIMULATED = 1000
_DIGITS = 3


_FLOAT32 = ("32", "32-true")


def section(run: Path, results: Mapping[str, Any], cases: pd.DataFrame) -> dict[str, Any] | None:
    """Content of calibration.html: charts, tables and notes; or the reason why there are none.

    Args:
        run: folder of the run.
        results: its results.json.
        cases: its predictions/classification.parquet.

    Returns:
        None for a run without calibration.json.

    Raises:
        SavedResultsError: calibration.json cannot be read.
    """
    file = run / CALIBRATION_FILE
    if not file.is_file():
        return None
    try:
        calibration = Calibration.read(file)
    except UserError as error:
        raise SavedResultsError(str(error)) from error
    if differing := _differing(calibration, results):
        return {
            "reason": f"{CALIBRATION_FILE} does not belong to this test: {differing}; calibrate again (python -m "
            f"medclip_dcl.evaluation.calibrate {run}), and test again where other images or prompts are wanted"
        }
    fitted, notes = [], []
    for finding, one in calibration.findings.items():
        if one.method is None:
            notes.append(f"{finding}: not calibrated: {one.reason}.")
        elif value_at(results["metrics"], f"classification/by_finding/{finding}/auc") is None:
            notes.append(
                f"{finding}: calibrated, but not measured by the test: too few cases, or none of its prompts."
            )
        else:
            fitted.append(finding)
    if results["precision"] not in _FLOAT32:
        notes.append(
            f"The test ran with {results['precision']} precision, the calibration was fitted in float32: scores differ "
            "by rounding."
        )
    rows = _with_probabilities(cases[cases["finding"].isin(fitted)], calibration)
    numbers = intervals_of(bootstrap_numbers(Predictions({"calibration": rows}))) if fitted else {}
    prefix = "calibration/by_finding"
    return {
        "reason": None,
        "charts": [
            charts.chart(
                f"reliability{place}",
                (3.6, 3.6),
                charts.draw_reliability,
                str(finding),
                _curves(of_finding, numbers, f"{prefix}/{finding}"),
            )
            for place, (finding, of_finding) in enumerate(rows.groupby("finding", sort=False))
        ],
        "tables": [
            _table_of_errors(rows, calibration, numbers, prefix),
            _table_of_thresholds(rows, calibration, numbers, prefix),
        ]
        if fitted
        else [],
        "notes": notes,
        "data": calibration.data,
        "is_other_data": calibration.data.get("fingerprint") != results["dataset"].get("fingerprint"),
        "scale": calibration.scale,
        "bins": BINS,
    }


def _differing(calibration: Calibration, results: Mapping[str, Any]) -> str:
    """Differences between the calibration's model and inputs and those of the test; "" if they agree."""
    own, shown = calibration.fingerprint, results.get("images", {}).get("shown", {})
    protocol = results["protocol"].get("classification", {})
    pairs = {
        "weights": (own["weights"], results["checkpoint"]["weights"]),
        "image size": (own["image_size"], shown.get("image_size")),
        "part of the image": (str(View(geometry=own["geometry"])), protocol.get("view")),
        **{
            f"prompts of {finding}": (
                {"negative": list(one.negative), "positive": list(one.positive)},
                {side: [x] if isinstance(x, str) else x for side, x in protocol["prompts"][finding].items()},
            )
            for finding, one in calibration.findings.items()
            if finding in protocol.get("prompts", {})
        },
    }
    found = [
        f"{name} {here!r} instead of {there!r}" for name, (there, here) in pairs.items() if here != there
    ]
    return ", ".join(found)


def _with_probabilities(cases: pd.DataFrame, calibration: Calibration) -> pd.DataFrame:
    """The cases with the columns before, after and threshold."""
    cases = cases.reset_index(drop=True)
    logits = calibration.scale * (cases["score_positive"] - cases["score_negative"]).to_numpy("float64")
    after = np.full(len(cases), np.nan)
    for finding, rows in cases.groupby("finding"):
        after[rows.index] = calibration.findings[str(finding)].probabilities(logits[rows.index])
    thresholds = {finding: one.threshold for finding, one in calibration.findings.items()}
    return cases.assign(before=expit(logits), after=after, threshold=cases["finding"].map(thresholds))


def _curves(
    rows: pd.DataFrame, numbers: Mapping[str, Interval], path: str
) -> dict[str, tuple[pd.DataFrame, list[Interval]]]:
    """before and after: mean probability and number of cases of each bin, with the share of positives."""
    found = {}
    for name in ("before", "after"):
        p = rows[name].to_numpy()
        in_bins = rows.groupby(bins_of(p))[name].agg(["mean", "size"])
        found[name] = in_bins, [numbers[f"{path}/{name}/bins/{place}"] for place in in_bins.index]
    return found


def _table_of_errors(
    rows: pd.DataFrame, calibration: Calibration, numbers: Mapping[str, Interval], prefix: str
) -> Table:
    """ECE and Brier score before and after, beside what is expected of a perfect model and of the prevalence alone."""
    shown = []
    for finding, of_finding in rows.groupby("finding", sort=False):
        own, share = calibration.findings[str(finding)], of_finding["label"].mean()
        found = {
            (time, name): interval_cell(*numbers[f"{prefix}/{finding}/{time}/{name}"][:3], _DIGITS)
            for time in ("before", "after")
            for name in ("ece", "brier")
        }
        cells = [
            Cell(f"{int(of_finding['label'].sum())} / {int((of_finding['label'] == 0).sum())}"),
            Cell(number(own.n_positive / (own.n_positive + own.n_negative), 2)),
            Cell(number(share, 2)),
            *(found[time, "ece"] for time in ("before", "after")),
            Cell(number(perfect_error(of_finding["after"].to_numpy()), _DIGITS)),
            *(found[time, "brier"] for time in ("before", "after")),
            Cell(number(share * (1 - share), _DIGITS)),
        ]
        shown.append(Row(str(finding), "plain", cells))
    headings = (
        "positive / negative cases",
        "validate",
        "test",
        "before",
        "after",
        "if perfect",
        "before",
        "after",
    )
    return Table(
        "Calibration of zero-shot findings on test patients",
        [*map(Column, headings), Column("prevalence alone")],
        shown,
        f"ECE: expected calibration error over {BINS} bins of equal width; lower is better. It is biased upwards, in "
        "the bootstrap draws once more, so that an interval may lie above its number; if perfect: its mean for a "
        "perfectly calibrated model with these probabilities, on as many cases. Brier: mean squared error; "
        "prevalence alone: of the test's share of positives as probability of every case.",
        [("", 1), ("share of positives", 2), ("ECE", 3), ("Brier score", 3)],
    )


def _table_of_thresholds(
    rows: pd.DataFrame, calibration: Calibration, numbers: Mapping[str, Interval], prefix: str
) -> Table:
    """Sensitivity and specificity at the thresholds, on the patients that they were chosen on and on test patients."""
    shown = []
    for finding in rows["finding"].unique():
        own = calibration.findings[finding]
        cells = [
            Cell(number(own.threshold, _DIGITS)),
            *(Cell(number(x, _DIGITS)) for x in (own.sensitivity, own.specificity)),
            *(
                interval_cell(*numbers[f"{prefix}/{finding}/{name}"][:3], _DIGITS)
                for name in ("sensitivity", "specificity")
            ),
        ]
        shown.append(Row(finding, "plain", cells))
    [(target, share)] = calibration.target.items()
    return Table(
        f"Thresholds chosen for a {target} of {share:g} on validate patients",
        [Column(heading) for heading in ("probability", *("sensitivity", "specificity") * 2)],
        shown,
        "",
        [("threshold", 1), ("validate, where chosen", 2), ("test", 2)],
    )


def perfect_error(probabilities: Float[np.ndarray, " case"]) -> float:
    """Mean expected calibration error where the labels are drawn from the probabilities (Broecker and Smith 2007)."""
    drawn = np.random.default_rng(0).random((_N_SIMULATED, len(probabilities))) < probabilities
    return float(calibration_error(probabilities, drawn, np.ones_like(drawn, dtype=float)).mean())
