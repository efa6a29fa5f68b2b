"""The draw of a split by patient, and the findings that have too few patients in a part of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pandas as pd

from data_prep.sources.source_tables import SHOWN, SPLITS
from medclip_dcl.common.findings import MIN_PATIENTS, PLATT_PATIENTS
from medclip_dcl.data.prepared import PreparedSet, case_table, labelled_findings

_NEEDS = {"validate": (PLATT_PATIENTS, "calibration"), "test": (MIN_PATIENTS, "an interval")}
"""Use -> patients with, and patients without a finding that something needs there."""
_TRAIN_SHARES = (0.8, 0.7, 0.6, 0.5, 0.4)
"""Shares of training patients that are tried; validate and test get half of the others each (choice)."""


def draw_split(patients: pd.Series, shares: Sequence[float], seed: int) -> pd.Series:
    """Draw train, validate or test for each patient, by a hash of seed and name: it stays when the table grows."""
    bounds = (shares[0], shares[0] + shares[1])

    def draw(name: str) -> str:
        place = int(hashlib.sha256(f"{seed} {name}".encode()).hexdigest()[:13], 16) / 16**13
        return SPLITS[sum(place >= bound for bound in bounds)]

    return patients.map({name: draw(name) for name in patients.unique()})


def too_few_lines(folder: Path, info: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """Lines about findings with too few patients for calibration or an interval; none where there are no cases.

    Where the whole split was drawn, the last line has the shares by which most of them get enough, if any do.

    Args:
        folder: the set, whose names of patients are drawn.
        info: its dataset.json.
        tables: images, labels and cases.
    """
    images, labels, cases = (tables[name] for name in ("images", "labels", "cases"))
    now, lines = _patients(images, labels, cases), []
    for use, (needed, what) in _NEEDS.items():
        if few := _words(now[(now < needed) & (now.index.get_level_values("use") == use)]):
            lines.append(f"  {'too few':<10} {use} patients: {few}; {what} needs {needed} of each")
    tried = {shares: _patients(*split) for shares, split in _other_splits(folder, info, images, labels)}
    best = max(tried, key=lambda shares: _enough(tried[shares]).sum(), default=None)
    if cases.empty or not lines or best is None or _enough(tried[best]).sum() <= _enough(now).sum():
        return [] if cases.empty else lines
    gained = tried[best][_enough(tried[best]) & ~_enough(now)]
    shares = ",".join(f"{share:g}" for share in best)
    return [*lines, f"{'':<13}--split_shares {shares} (to another --output) gives {_words(gained, True)}"]


def _patients(images: pd.DataFrame, labels: pd.DataFrame, cases: pd.DataFrame) -> pd.Series:
    """Patients with a case, by use, finding and label."""
    rows = cases.merge(images[["dicom_id", "subject_id"]], on="dicom_id")
    names = ["use", "finding", "label"]
    every = pd.MultiIndex.from_product([[*_NEEDS], labelled_findings(labels), (1, 0)], names=names)
    return rows.groupby(names)["subject_id"].nunique().reindex(every, fill_value=0)


def _enough(patients: pd.Series) -> pd.Series:
    return patients >= patients.index.get_level_values("use").map(lambda use: _NEEDS[use][0])


def _words(patients: pd.Series, names_use: bool = False) -> str:
    words = []
    for key, n in patients.items():
        use, finding, label = cast(tuple[str, str, int], key)
        of = f"{use} patients " if names_use else ""
        words.append(f"{n} {of}{'with' if label else 'without'} {finding}")
    return ", ".join([*words[:SHOWN], *[f"{len(words) - SHOWN} more"] * (len(words) > SHOWN)])


def _other_splits(folder: Path, info: Mapping[str, Any], images: pd.DataFrame, labels: pd.DataFrame) -> Any:
    """Pairs of shares and the tables of the set with them; none where a part was not drawn, or not of all patients."""
    options = info["options"]
    split = options.get("split")
    if not isinstance(split, dict) or options.get("limit") is not None:
        return
    names = PreparedSet(folder).patient_names(images["subject_id"])
    if (draw_split(names, split["shares"], split["seed"]) != images["official_split"]).any():
        return
    for train in (share for share in _TRAIN_SHARES if share < split["shares"][0]):
        shares = train, round((1 - train) / 2, 3), round((1 - train) / 2, 3)
        drawn = draw_split(names, shares, split["seed"])
        redrawn = images.assign(official_split=drawn, use=drawn.mask(images["use"] == "excluded", "excluded"))
        yield shares, (redrawn, labels, case_table(redrawn, labels, options["cases"]))
