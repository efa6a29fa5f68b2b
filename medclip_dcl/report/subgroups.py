"""Metrics by view, sex and age group of the tested images, and the gap of each group to the others.

The gap is the group minus the rest: all images whose attribute is known and another; a small reference group would make
every gap uncertain (choice). Of two groups, and of the views AP and PA among others, it is one minus the other.
Patients are drawn as in ``medclip_dcl.report.draws``; p is adjusted by ``medclip_dcl.report.contrasts.joint_p``, with
the patients of the smaller side: for all gaps of sensitivity at the calibrated thresholds, and for all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, UInt8

from medclip_dcl.common.findings import MIN_PATIENTS
from medclip_dcl.metrics import summaries
from medclip_dcl.metrics.table import ARROWS, CLASSIFICATIONS, place_of
from medclip_dcl.report import draws, tables
from medclip_dcl.report.contrasts import ALPHA, joint_p
from medclip_dcl.report.reliability import calibrated_cases
from medclip_dcl.runs.saved import SavedResultsError

ATTRIBUTES = {"view": "View", "sex": "Sex", "age": "Age at the study"}
"""Attribute -> its name on the page."""
AGE_GROUPS = {"under 40": 40, "40 to 59": 60, "60 to 79": 80, "80 and over": np.inf}
"""Age group -> the age in years that it ends before (choice)."""
UNKNOWN = "unknown"

_NUMBERS = ("value", "low", "high", "gap", "gap_low", "gap_high", "p")
COLUMNS = ("attribute", "group", "images", "patients", "metric", *_NUMBERS)

_COMPUTED: dict[str, tuple[Any, str]] = {
    **{section: (summaries.classification, section) for section in CLASSIFICATIONS},
    "calibration": (summaries.calibration, "calibration"),
    "grounding": (summaries.box_means, "grounding"),
    "localisation": (summaries.localisation, "localisation"),
    "retrieval": (summaries.recalls, "retrieval"),
    "report_retrieval": (summaries.recalls, "report_retrieval/image_report"),
}
"""Section -> function that computes its metrics, and the path before them."""

_LABELS = {x.path: (x.heading, x.digits) for x in map(tables.column_of, tables.DESCRIPTIONS["subgroups"])}

Draws = Float[np.ndarray, "one_and_draws"]
"""A number among the tested patients, then in each draw; NaN where there is none."""
RowMask = Bool[np.ndarray, "row"]


_Compared = tuple[Draws, Draws, int]
"""A metric in a group and in the rest, and the patients of the smaller side."""


class Groups(NamedTuple):
    """Table of groups, and for each row its gap in each draw, and the patients of the smaller side."""

    table: pd.DataFrame
    gaps: Float[np.ndarray, "row one_and_draws"]
    n_patients: np.ndarray


def subgroup_table(run: Path | draws.TestedRun, n_draws: int = draws.N_DRAWS, seed: int = 0) -> pd.DataFrame:
    """Table of :func:`groups_of_run`; empty where nothing divides the images."""
    groups = groups_of_run(draws.TestedRun(run) if isinstance(run, Path) else run, n_draws, seed)
    return pd.DataFrame(columns=list(COLUMNS)) if groups is None else groups.table


def groups_of_run(run: draws.TestedRun, n_draws: int = draws.N_DRAWS, seed: int = 0) -> Groups | None:
    """Groups of a tested run, with sensitivities where its calibration.json has the prompts."""
    if (images := run.table("images")) is None:
        return None
    sections = dict(run.predictions.tables)
    if calibrated := calibrated_cases(run):
        sections["calibration"] = calibrated[2].drop(columns="before")
    return compared_groups(replace(run.predictions, tables=sections), images, n_draws, seed)


def compared_groups(
    predictions: draws.Predictions, images: pd.DataFrame, n_draws: int = draws.N_DRAWS, seed: int = 0
) -> Groups | None:
    """Metrics by group, from predictions of a test and its images (predictions/images.parquet); None without groups.

    Returns:
        A row for each attribute by which the images fall into two or more groups, each group and each metric: the
        group's tested images and patients; the metric (a path as in results.json), its value with a percentile
        interval, and the gap with an interval and p, adjusted for all gaps. Of a pair only the first has the gap.
        The last group may be "unknown", without numbers. An average over findings takes those with a number, in the
        group and in the rest. NaN: fewer than `MIN_PATIENTS`, or too few cases.
    """
    groups = _groups_of_images(images)
    counts = draws.patient_draws(len(predictions.patients), n_draws, seed)
    evaluations = []
    for name, table in predictions.tables.items():
        # Sentences belong to no image.
        rows = table[table["task"] == "image_report"] if name == "report_retrieval" else table
        patient = np.searchsorted(predictions.patients, rows["subject_id"])
        if len(rows) and name in _COMPUTED:
            rows = rows.reset_index(drop=True)
            evaluations.append(_Evaluation(name, rows, counts, patient, predictions.min_cases))
    if not groups or not evaluations:
        return None
    nothing = np.full(n_draws + 1, np.nan)
    found, gaps, n_patients = [], [], []
    for attribute, of_images in groups.items():
        names = _names(of_images, attribute)
        first, second = pair_of(names) or ("", "")
        labels = [_labels_of_rows(one.table, images, of_images, predictions.name) for one in evaluations]
        for group in [*names, UNKNOWN] if (of_images == UNKNOWN).any() else names:
            its_patients = images.loc[of_images == group, "subject_id"]
            about = (attribute, group, len(its_patients), its_patients.nunique())
            for evaluation, of_rows in zip(evaluations, labels, strict=True):
                is_its, is_known = of_rows == group, of_rows != UNKNOWN
                is_other = of_rows == second if group == first else ~is_its & is_known
                compared = {} if group == UNKNOWN else evaluation.compared(is_its, is_other)
                for metric in evaluation.metrics:
                    own, others, n = compared.get(metric, (nothing, nothing, 0))
                    gap = nothing if group == second else own - others
                    numbers = (end for x in (own, gap) for end in draws.estimate(x)[:3])
                    found.append((*about, metric, *numbers))
                    gaps.append(gap)
                    n_patients.append(n)
    table = pd.DataFrame(found, columns=list(COLUMNS[:-1])).assign(p=np.nan)
    table = table.astype(dict.fromkeys(_NUMBERS, "float64"))
    own, n_behind = np.stack(gaps), np.array(n_patients)
    is_of_calibration = table["metric"].str.startswith("calibration/").to_numpy()
    for family in (is_of_calibration, ~is_of_calibration):
        table.loc[family, "p"] = joint_p(own[family], n_behind[family])
    return Groups(table, own, n_behind)


def rows_of(groups: Groups | None) -> Iterator[tuple[str, str, draws.Estimate]]:
    """Group ("view/PA/"), path and estimate of each number of a group, and of each gap ("view/AP − PA/")."""
    for place, row in enumerate([] if groups is None else groups.table.to_dict("records")):
        assert groups is not None
        n_draws = groups.gaps.shape[1] - 1
        value, low, high, gap, gap_low, gap_high, p = (row[x] for x in _NUMBERS)
        if np.isfinite(value):
            found = draws.Estimate(value, low, high, None, n_draws * (low == low), row["patients"])
            yield f"{row['attribute']}/{row['group']}/", row["metric"], found
        if np.isfinite(gap):
            found = draws.Estimate(
                gap, gap_low, gap_high, p, n_draws * (gap_low == gap_low), int(groups.n_patients[place])
            )
            name = gap_name(groups.table, row["attribute"], row["group"])
            yield f"{row['attribute']}/{name}/", row["metric"], found


def age_groups(ages: pd.Series) -> pd.Series:
    """The name in `AGE_GROUPS` of each age in years; `UNKNOWN` for NaN."""
    found = pd.cut(ages, [-np.inf, *AGE_GROUPS.values()], right=False, labels=list(AGE_GROUPS))
    return found.astype(object).fillna(UNKNOWN)


def _groups_of_images(images: pd.DataFrame) -> dict[str, pd.Series]:
    """Attribute -> group of each image, for attributes that divide the images."""
    found = {"view": images["view"].str.upper().replace("", UNKNOWN)}
    if "sex" in images:
        found["sex"] = images["sex"]
    if "age" in images:
        found["age"] = age_groups(images["age"])
    return {name: groups for name, groups in found.items() if len(_names(groups, name)) > 1}


def _names(groups: pd.Series, attribute: str) -> list[str]:
    """The known groups, in the order of the page."""
    known = set(groups) - {UNKNOWN}
    return [name for name in AGE_GROUPS if name in known] if attribute == "age" else sorted(known)


def pair_of(names: Sequence[str]) -> tuple[str, str] | None:
    """Groups that are compared with each other alone: the only two, or the views AP and PA."""
    pair = [name for name in names if name in ("AP", "PA")] if len(names) > 2 else names
    return (pair[0], pair[1]) if len(pair) == 2 else None


def _labels_of_rows(table: pd.DataFrame, images: pd.DataFrame, groups: pd.Series, name: str) -> np.ndarray:
    """Group of each row: of its image, or of a report the group of all its images."""
    of_image = dict(zip(images["dicom_id"], groups, strict=True))
    if "dicom_id" in table:
        labels = table["dicom_id"].map(of_image)
    else:
        by_study = groups.groupby(images["study_id"].astype(str))
        of_study = by_study.first().where(by_study.nunique() == 1, UNKNOWN)
        is_image = table["direction"] == summaries.DIRECTIONS[0]
        labels = table["query"].map(of_image).where(is_image, table["query"].map(of_study))
    if labels.isna().any():
        raise SavedResultsError(
            f"{name}/images.parquet lacks {int(labels.isna().sum())} tested images or reports; test the run again"
        )
    return labels.to_numpy()


@dataclass
class _Evaluation:
    """The rows of one evaluation, how often each patient was drawn, and each row's column in these counts."""

    section: str
    table: pd.DataFrame
    counts: UInt8[np.ndarray, "one_and_draws patient"]
    patient: np.ndarray
    min_cases: int

    def __post_init__(self) -> None:
        names = self.table.get("finding", pd.Series(dtype="str"))
        self._finding, found = pd.factorize(names)
        self._findings = list(found)
        self.metrics = {path: "" for path in _LABELS if path.split("/")[0] == self.section}
        self.is_calibration = self.section == "calibration"
        metric = "sensitivity" if self.is_calibration else "auc"
        self.metrics |= {f"{self.section}/by_finding/{name}/{metric}": name for name in self._findings}
        self._known: dict[Any, dict[str, Draws]] = {}

    def compared(self, *sides: RowMask) -> dict[str, _Compared]:
        """Each metric in the group and in the rest."""
        if self.section == "localisation" and not (sides := self._with_shared_categories(sides)):
            return {}
        patients = {finding: self._n_patients(finding, sides) for finding in self._findings}
        patients = {finding: n for finding, n in patients.items() if n >= MIN_PATIENTS}
        own, others = (self._numbers(rows, tuple(patients)) for rows in sides)
        # Of a mean over findings, the fewest of any.
        patients[""] = min(patients.values(), default=0)
        if not self._findings:
            patients[""] = min(len(np.unique(self.patient[rows])) for rows in sides)
        return {
            metric: (own[metric], others[metric], patients.get(finding, 0))
            for metric, finding in self.metrics.items()
            if metric in own and metric in others
        }

    def _with_shared_categories(self, sides: Sequence[RowMask]) -> tuple[RowMask, ...]:
        """The rows of categories that enough patients of each side have; none without such a category."""
        category, is_measured = self.table["category"], self.table["hit"].notna().to_numpy()
        n_patients = [
            pd.Series(self.patient[rows & is_measured])
            .groupby(category[rows & is_measured].to_numpy())
            .nunique()
            for rows in sides
        ]
        shared = set.intersection(*({*n.index[n >= MIN_PATIENTS]} for n in n_patients))
        return tuple(rows & category.isin(shared).to_numpy() for rows in sides) if shared else ()

    def _n_patients(self, finding: str, sides: Sequence[RowMask]) -> int:
        """Patients with, or without, the finding in the group or in the rest, the fewest; 0 for too few cases."""
        least = len(self.counts[0])
        its, positive = self._finding == self._findings.index(finding), self.table["label"].to_numpy() == 1
        for rows, is_positive in product(sides, (True,) if self.is_calibration else (True, False)):
            cases = self.patient[rows & its & (positive == is_positive)]
            n = int(np.count_nonzero(np.bincount(cases)))
            least = min(least, n if len(cases) >= self.min_cases else 0)
        return least

    def _numbers(self, rows: RowMask, findings: tuple[str, ...]) -> dict[str, Draws]:
        """Path -> number over these rows, computed once: of two groups each is the rest of the other."""
        key = rows.tobytes(), findings
        if key not in self._known:
            compute, prefix = _COMPUTED[self.section]
            if self.section in CLASSIFICATIONS:
                compute = partial(compute, min_cases=self.min_cases)
            if self._findings:
                rows = rows & np.isin(self._finding, [*map(self._findings.index, findings)])
            table, patient = self.table[rows].reset_index(drop=True), self.patient[rows]
            self._known[key] = draws.numbers_of_draws(
                compute, prefix, table, self.counts, patient, MIN_PATIENTS
            )
        return self._known[key]


def describe(groups: Groups | None) -> dict[str, Any] | None:
    """The report's section: found gaps, number of gaps, and a table for each attribute; None without groups."""
    if groups is None:
        return None
    table = groups.table
    found = table[(table["p"] <= ALPHA) & table["gap_low"].notna()]
    found = found.sort_values(["p", "metric"], kind="stable")
    return {
        "n_gaps": int(table["p"].notna().sum()),
        "found": [
            f"{ATTRIBUTES[row['attribute']]}, {gap_name(table, row['attribute'], row['group'])}: "
            f"{_label(row['metric'])[0]} {_gap_cell(row, mark='')} (p = {row['p']:.2g})"
            for row in found.to_dict("records")
        ],
        "level": ALPHA,
        "min_patients": MIN_PATIENTS,
        "n_draws": draws.N_DRAWS,
        "tables": [_table(rows, str(name)) for name, rows in table.groupby("attribute", sort=False)],
    }


def _table(rows: pd.DataFrame, attribute: str) -> tables.Table:
    """Metrics in rows; groups and their gaps in columns."""
    by_cell = {(row["metric"], row["group"]): row for row in rows.to_dict("records")}
    of_groups = {str(group): row for (_, group), row in by_cell.items()}
    names = [name for name in of_groups if name != UNKNOWN]
    _, second = pair_of(names) or ("", "")
    gaps = [name for name in names if name != second]
    counts = [
        tables.Cell(f"{of_groups[name]['images']:,} / {of_groups[name]['patients']:,}") for name in names
    ]
    shown = [tables.Row("images / patients", "counts", counts + [tables.Cell("")] * len(gaps))]
    for metric in rows["metric"].unique():
        cells = [by_cell[metric, name] for name in names]
        if any(np.isfinite(cell["value"]) for cell in cells):
            values = [_value_cell(cell, rows) for cell in cells]
            shown.append(
                tables.Row(
                    _label(metric)[0],
                    "plain",
                    [*values, *(_gap_cell(by_cell[metric, name]) for name in gaps)],
                )
            )
    columns = [*map(tables.Column, names), *(tables.Column(gap_name(rows, attribute, name)) for name in gaps)]
    note = ""
    if unknown := of_groups.get(UNKNOWN):
        n_images, n_patients = unknown["images"], unknown["patients"]
        note = f"In no group, because unknown: {n_images:,} images of {n_patients:,} patients."
    return tables.Table(ATTRIBUTES[attribute], columns, shown, note)


def gap_name(table: pd.DataFrame, attribute: str, group: str) -> str:
    groups = table.loc[(table["attribute"] == attribute) & (table["group"] != UNKNOWN), "group"].unique()
    pair = pair_of([*groups])
    return f"{pair[0]} − {pair[1]}" if pair and group in pair else f"{group} − rest"


def _label(metric: str) -> tuple[str, int]:
    """Name of a metric on the page, and its decimals."""
    if metric in _LABELS:
        return _LABELS[metric]
    place = place_of(metric)
    assert place is not None, metric
    return f"{place.number.heading or place.name}{ARROWS[place.number.higher_is_better]}, {place.entry}", 3


def _value_cell(cell: Mapping[Any, Any], rows: pd.DataFrame) -> tables.Cell:
    """A number; of an average that lacks findings, with the number of those that it has."""
    if not np.isfinite(cell["value"]):
        return tables.Cell(tables.NOTHING)
    value = draws.Estimate(cell["value"], cell["low"], cell["high"], n_patients=cell["patients"])
    found = tables.interval_cell(value, _label(cell["metric"])[1])
    section, _, name = cell["metric"].partition("/")
    if section in CLASSIFICATIONS and "/" not in name:
        of_findings = rows["metric"].str.startswith(f"{section}/by_finding/") & (
            rows["group"] == cell["group"]
        )
        has_number = rows.loc[of_findings, "value"].notna()
        if not has_number.all():
            return found._replace(text=f"{found.text} ({has_number.sum()} of {len(has_number)})")
    return found


def _gap_cell(cell: Mapping[Any, Any], mark: str = " *") -> tables.Cell:
    """A gap with its sign; the mark follows one that is found."""
    if not np.isfinite(cell["gap"]):
        return tables.Cell(tables.NOTHING)
    gap = draws.Estimate(cell["gap"], cell["gap_low"], cell["gap_high"], n_patients=cell["patients"])
    found = tables.interval_cell(gap, _label(cell["metric"])[1], tables.signed)
    return found._replace(text=found.text + mark * (cell["p"] <= ALPHA and pd.notna(gap.low)))
