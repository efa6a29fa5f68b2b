"""Tables and charts of calibrations: of a fitted one, and of its findings on the test patients of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from medclip_dcl.common.findings import ensemble_used
from medclip_dcl.metrics.calibration import CALIBRATION_FILE, Calibration, perfect_error
from medclip_dcl.metrics.summaries import BINS, bins_of
from medclip_dcl.metrics.table import CALIBRATION
from medclip_dcl.pictures.geometry import View
from medclip_dcl.report import charts, tables
from medclip_dcl.report.draws import Estimate, Predictions, TestedRun, bootstrap_intervals, units_of
from medclip_dcl.runs.saved import value_at

_DIGITS = 3
_FLOAT32 = ("32", "32-true")
_OF_A_FIT = {
    "method": "method",
    "threshold": "threshold",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "positive cases": "n_positive",
    "negative cases": "n_negative",
}
"""Column of the fitted calibration -> its field."""
_TIMES = ("before", "after")
_PREFIX = "calibration/by_finding"


def fitted_table(calibration: Calibration) -> tables.Table:
    """Map and threshold of each finding, with numbers of the cases that they were fitted to."""

    def shown(value: Any) -> str:
        return tables.NOTHING if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    findings = calibration.findings.items()
    rows = [
        tables.Row(
            finding, "plain", [tables.Cell(shown(getattr(one, field))) for field in _OF_A_FIT.values()]
        )
        for finding, one in findings
    ]
    note = " ".join(f"{finding}: {one.reason}." for finding, one in findings if one.reason)
    return tables.Table("By finding", [*map(tables.Column, _OF_A_FIT)], rows, note)


def calibrated_cases(run: TestedRun) -> tuple[Calibration, str, pd.DataFrame] | None:
    """Calibration, how it differs from the test ("" if not), and the test cases of its findings that were measured.

    They have probabilities and thresholds. None without calibration.json or a classification.
    """
    file, results = run.folder / CALIBRATION_FILE, run.tested
    section = tables.CLASSIFIER if tables.is_of_classifier(results) else "classification"
    if (cases := run.table(section)) is None or not file.is_file():
        return None
    calibration = Calibration.read(file)
    differing, path = _differing(calibration, results, section), f"{section}/by_finding/{{}}/auc".format
    known = [] if differing else calibration.calibrated()
    known = [one for one in known if value_at(results["metrics"], path(one)) is not None]
    return calibration, differing, calibration.of_cases(cases[cases["finding"].isin(known)])


def section(run: TestedRun) -> dict[str, Any] | None:
    """Content of calibration.html: charts, tables and notes, or why there are none; None without calibration.json.

    The run has predictions of a classification.
    """
    if (found := calibrated_cases(run)) is None:
        return None
    calibration, differing, rows = found
    results = run.tested
    if differing:
        return {
            "reason": f"{CALIBRATION_FILE} does not belong to this test: {differing}; calibrate again (medclip-dcl "
            f"calibrate {run.folder}), and test again where other images or prompts are wanted"
        }
    notes = []
    for finding, one in calibration.findings.items():
        if one.method is None:
            notes.append(f"{finding}: not calibrated: {one.reason}.")
        elif finding not in set(rows["finding"]):
            notes.append(
                f"{finding}: calibrated, but not measured by the test: too few cases, or none of its prompts."
            )
    if results["precision"] not in _FLOAT32:
        notes.append(
            f"The test ran with {results['precision']} precision, the calibration was fitted in float32: scores differ "
            "by rounding."
        )
    by_finding = {str(finding): its for finding, its in rows.groupby("finding", sort=False)}
    images = run.table("images")
    numbers = bootstrap_intervals(Predictions({"calibration": rows}, images=images)) if by_finding else {}
    is_other_data = calibration.data.get("fingerprint") != results["dataset"].get("fingerprint")
    units = units_of(results)
    fitted_units = "patients" if is_other_data else units
    return {
        "reason": None,
        "charts": [
            charts.chart(
                f"reliability{place}",
                (3.6, 3.6),
                charts.draw_reliability,
                finding,
                {time: _curve(its, time, numbers, f"{_PREFIX}/{finding}/{time}") for time in _TIMES},
            )
            for place, (finding, its) in enumerate(by_finding.items())
        ],
        "tables": [
            _table_of_errors(by_finding, calibration, numbers, units),
            _table_of_thresholds(list(by_finding), calibration, numbers, fitted_units),
        ]
        if by_finding
        else [],
        "notes": notes,
        "fitted": calibration,
        "is_other_data": is_other_data,
        "fitted_units": fitted_units,
        "bins": BINS,
    }


def _differing(calibration: Calibration, results: Mapping[str, Any], section: str) -> str:
    """Differences between the calibration's model and inputs and those of the test; "" if they agree."""
    own, shown = calibration.fingerprint, results.get("images", {}).get("shown", {})
    protocol = results["protocol"].get(section, {})
    settings, tested = own.get("settings", {}), results["checkpoint"].get("settings", {})
    used = {
        name: one.prompts for name, one in calibration.findings.items() if name in protocol.get("prompts", {})
    }
    pairs = {
        "weights": (own["weights"], results["checkpoint"]["weights"]),
        **{f"settings of {x}": (settings.get(x), tested.get(x)) for x in sorted(settings | tested)},
        **(
            {"ensemble": (calibration.ensemble, protocol.get("ensemble"))}
            if ensemble_used(used, "scores")
            else {}
        ),
        "blank labels": (calibration.data.get("blank"), protocol.get("blank")),
        "image size": (own["image_size"], shown.get("image_size")),
        "part of the image": (str(View(geometry=own["geometry"])), protocol.get("view")),
        **{
            f"prompts of {finding}": (
                {"negative": list(one.negative), "positive": list(one.positive)},
                {side: [x] if isinstance(x, str) else x for side, x in protocol["prompts"][finding].items()},
            )
            for finding, one in calibration.findings.items()
            if finding in used
        },
    }
    found = [
        f"{name} {here!r} instead of {there!r}" for name, (there, here) in pairs.items() if here != there
    ]
    return ", ".join(found)


def _curve(
    rows: pd.DataFrame, time: str, numbers: Mapping[str, Estimate], path: str
) -> tuple[pd.DataFrame, list[Estimate]]:
    """Mean probability and number of cases of each bin, with the share of positives."""
    in_bins = rows.groupby(bins_of(rows[time].to_numpy()))[time].agg(["mean", "size"])
    return in_bins, [numbers[f"{path}/bins/{place}"] for place in in_bins.index]


def _table_of_errors(
    by_finding: Mapping[str, pd.DataFrame],
    calibration: Calibration,
    numbers: Mapping[str, Estimate],
    units: str,
) -> tables.Table:
    """ECE and Brier score before and after, beside what is expected of a perfect model and of the prevalence alone."""
    columns: list[tables.Column] = []
    shown = []
    for finding, rows in by_finding.items():
        own, share = calibration.findings[finding], rows["label"].mean()
        n_positive, n_negative = int(rows["label"].sum()), int((rows["label"] == 0).sum())
        validate = own.n_positive / (own.n_positive + own.n_negative)
        ece, brier = (
            {tables.Column(time, group=group): _cell(numbers, f"{finding}/{time}/{name}") for time in _TIMES}
            for group, name in (("ECE", "ece"), ("Brier score", "brier"))
        )
        cells = {
            tables.Column("positive / negative cases"): tables.Cell(f"{n_positive} / {n_negative}"),
            tables.Column("validate", group="share of positives"): tables.Cell(tables.number(validate, 2)),
            tables.Column("test", group="share of positives"): tables.Cell(tables.number(share, 2)),
            **ece,
            tables.Column("if perfect", group="ECE"): tables.Cell(
                tables.number(perfect_error(rows["after"].to_numpy()), _DIGITS)
            ),
            **brier,
            tables.Column("prevalence alone", group="Brier score"): tables.Cell(
                tables.number(share * (1 - share), _DIGITS)
            ),
        }
        columns = list(cells)
        shown.append(tables.Row(finding, "plain", list(cells.values())))
    return tables.Table(
        f"Calibration of findings on test {units}",
        columns,
        shown,
        f"ECE: expected calibration error over {BINS} bins of equal width; lower is better. It is biased upwards, in "
        "the bootstrap draws once more, so that an interval may lie above its number; if perfect: its mean for a "
        "perfectly calibrated model with these probabilities, on as many cases. Brier: mean squared error; "
        "prevalence alone: of the test's share of positives as probability of every case.",
    )


def _table_of_thresholds(
    findings: list[str], calibration: Calibration, numbers: Mapping[str, Estimate], units: str
) -> tables.Table:
    """Sensitivity and specificity at the thresholds, where they were chosen and on the test."""
    rates = ("sensitivity", "specificity")
    later = {x.name: x.heading for x in CALIBRATION.numbers if x.family}
    groups = {
        "threshold": ["probability"],
        "validate, where chosen": rates,
        "test": (*rates, *later.values()),
    }
    shown = []
    for finding in findings:
        own = calibration.findings[finding]
        fitted = [tables.Cell(tables.number(getattr(own, name), _DIGITS)) for name in ("threshold", *rates)]
        tested = [_cell(numbers, f"{finding}/{name}") for name in (*rates, *later)]
        shown.append(tables.Row(finding, "plain", [*fitted, *tested]))
    [(target, share)] = calibration.target.items()
    return tables.Table(
        f"Thresholds chosen for a {target} of {share:g} on validate {units}",
        [tables.Column(heading, group=group) for group, headings in groups.items() for heading in headings],
        shown,
    )


def _cell(numbers: Mapping[str, Estimate], path: str) -> tables.Cell:
    return tables.interval_cell(numbers[f"{_PREFIX}/{path}"], _DIGITS)
