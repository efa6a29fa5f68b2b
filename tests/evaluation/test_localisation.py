"""Localisation on the network of mean colours: every number by numpy, pixel by pixel."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import pytest

from medclip_dcl.common.errors import UserError
from medclip_dcl.data.prepared import TABLES
from medclip_dcl.evaluation import Localisation, ResultsWriter
from medclip_dcl.report.draws import bootstrap_intervals
from tests.evaluation.test_callbacks import (
    WORDS,
    ColourData,
    ColourModel,
    cosine,
    enlarge,
    regions_of,
    trainer_for,
)

FINDINGS = {"Redness": ("not red", "red"), "Blueness": ("yellow", "blue")}
TUNING = 8
"""The first images choose thresholds."""


@pytest.fixture(scope="module")
def data() -> ColourData:
    """Two readers' boxes of redness and masks of blueness on most images; nothing has a phrase."""
    data, generator = ColourData(with_boxes=False), np.random.default_rng(4)
    boxes, masks = [], []
    for place, (dicom_id, height, width) in enumerate(
        data.tables.images[["dicom_id", "height", "width"]].to_numpy()
    ):
        for reader in ("R1", "R2")[: 1 + place % 2]:
            x, y, w, h = generator.integers(2, 16, 4).tolist()
            boxes.append((dicom_id, "Redness", "", float(x), float(y), float(w), float(h), reader))
        if place % 3:
            # Drawn on a picture of half the size.
            shape = (height // 2, width // 2)
            flat = (generator.random(shape[0] * shape[1]) < 0.3).astype(int)
            edges = np.flatnonzero(np.diff(flat)) + 1
            runs = np.diff([0, *edges, flat.size]).tolist()
            counts = " ".join(map(str, [0, *runs] if flat[0] else runs))
            masks.append((dicom_id, "Blueness", "", "", *shape, counts))
    data.tables = dataclasses.replace(
        data.tables,
        regions=pd.DataFrame(boxes, columns=[*TABLES["boxes"], "reader"]),
        masks=pd.DataFrame(masks, columns=list(TABLES["masks"])),
        tuning=frozenset(data.tables.images["dicom_id"][:TUNING]),
    )
    return data


def records(frame: pd.DataFrame) -> list[Any]:
    return frame.to_dict("records")


def by_numpy(data: ColourData) -> pd.DataFrame:
    """A row for each image and finding: hit, signed CNR, IoU and Dice at 41 thresholds, agreement of readers."""
    rows, regions = [], regions_of(data)
    for place, image in enumerate(records(data.tables.images)):
        dicom_id, height, width = image["dicom_id"], image["height"], image["width"]
        for finding, (_, word) in FINDINGS.items():
            drawn: dict[str, np.ndarray] = {}
            for box in records(data.tables.regions):
                if (box["dicom_id"], box["category"]) == (dicom_id, finding):
                    x, y, w, h = (int(box[name]) for name in "xywh")
                    drawn[box["reader"]] = np.zeros((height, width), bool)
                    drawn[box["reader"]][y : y + h, x : x + w] = True
            for mask in records(data.tables.masks):
                if (mask["dicom_id"], mask["category"]) == (dicom_id, finding):
                    rows_of, columns_of = mask["height"], mask["width"]
                    line, at, inside = np.zeros(rows_of * columns_of, bool), 0, False
                    for length in map(int, mask["counts"].split()):
                        line[at : at + length], at, inside = inside, at + length, not inside
                    small = line.reshape(columns_of, rows_of).T
                    down = [int((r + 0.5) * rows_of / height) for r in range(height)]
                    across = [int((c + 0.5) * columns_of / width) for c in range(width)]
                    drawn[""] = np.array([[small[r, c] for c in across] for r in down])
            if not drawn:
                continue
            union = np.logical_or.reduce(list(drawn.values()))
            heat = enlarge(cosine(regions[place], np.array(WORDS[word])), height, width)
            above = [heat > t for t in np.arange(-20, 21) / 20]
            pairs = [(a, b) for a, b in combinations(drawn.values(), 2)]
            a, b = heat[union], heat[~union]
            rows.append(
                {
                    "dicom_id": dicom_id,
                    "category": finding,
                    # Beyond the outermost regions' centres the enlarged map is flat: equal maxima share the hit.
                    "hit": union[heat > heat.max() - 1e-6].mean(),
                    "area": union.mean(),
                    "cnr_signed": (a.mean() - b.mean()) / math.sqrt(a.var() + b.var()),
                    "ious": [(u & union).sum() / (u | union).sum() for u in above],
                    "dices": [2 * (u & union).sum() / (u.sum() + union.sum()) for u in above],
                    "reader_iou": np.mean([(x & y).sum() / (x | y).sum() for x, y in pairs])
                    if pairs
                    else math.nan,
                }
            )
    return pd.DataFrame(rows)


def test_every_number_is_numpys(data: ColourData, tmp_path) -> None:
    trainer = trainer_for(tmp_path, Localisation(FINDINGS, min_cases=3, examples=1), ResultsWriter())
    trainer.test(ColourModel(), datamodule=data, verbose=False)
    results = json.loads((tmp_path / "results.json").read_text())
    found = pd.read_parquet(tmp_path / "predictions/localisation.parquet")
    expected = by_numpy(data)
    is_tuning = expected["dicom_id"].isin(data.tables.tuning)
    for finding in FINDINGS:
        tuning = np.array(expected.loc[is_tuning & (expected["category"] == finding), "ious"].tolist())
        best = int(tuning.mean(axis=0).argmax())
        rows = expected[~is_tuning & (expected["category"] == finding)].sort_values("dicom_id")
        mine = found[found["category"] == finding].sort_values("dicom_id")
        assert mine["dicom_id"].tolist() == rows["dicom_id"].tolist()
        assert results["protocol"]["localisation"]["thresholds"][finding] == pytest.approx(best / 20 - 1)
        for name in ("hit", "area", "cnr_signed", "reader_iou"):
            np.testing.assert_allclose(mine[name], rows[name].astype(float), atol=2e-5, err_msg=name)
        for name, curves in (("iou", "ious"), ("dice", "dices")):
            at_best = [curve[best] for curve in rows[curves]]
            np.testing.assert_allclose(mine[name], at_best, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(mine["miou"], [np.mean(curve) for curve in rows["ious"]], atol=1e-6)
        metrics = results["metrics"]["localisation"]["by_category"][finding]
        assert metrics["dice"] == pytest.approx(mine["dice"].mean())
    assert results["metrics"]["localisation"]["hit"] == pytest.approx(
        found.groupby("category")["hit"].mean().mean()
    )
    assert results["counts"]["localisation"]["cases"] == len(found) == (~is_tuning).sum()
    assert results["dataset"]["images"] == len(data.tables.images) - TUNING
    interval = bootstrap_intervals(tmp_path)["localisation/by_category/Redness/hit"]
    assert interval.value == pytest.approx(found.loc[found["category"] == "Redness", "hit"].mean())
    assert interval.low is None and interval.n_patients == found["subject_id"].nunique() < 20
    assert bootstrap_intervals(tmp_path)["localisation/hit"].low is None, "all findings are of few patients"


@pytest.mark.parametrize("normalised", ["otsu", "tuned"])
def test_options_add_numbers_of_their_own(data: ColourData, tmp_path, normalised) -> None:
    callback = Localisation(FINDINGS, min_cases=3, examples=0, normalised=normalised, tolerance=3)
    trainer_for(tmp_path, callback, ResultsWriter(figures=False)).test(
        ColourModel(), datamodule=data, verbose=False
    )
    results = json.loads((tmp_path / "results.json").read_text())
    found = pd.read_parquet(tmp_path / "predictions/localisation.parquet")
    assert (found["hit_within"] >= found["hit"]).all() and (found["hit_within"] > found["hit"]).any()
    assert found["iou_normalised"].between(0, 1).all()
    chosen = results["protocol"]["localisation"].get("thresholds_normalised", {})
    assert set(chosen) == (set(FINDINGS) if normalised == "tuned" else set())
    metrics = results["metrics"]["localisation"]
    for name in ("iou_normalised", "hit_within"):
        assert metrics[name] == pytest.approx(found.groupby("category")[name].mean().mean())
        assert f"localisation/{name}" in bootstrap_intervals(tmp_path)


def test_without_validate_cases_there_is_no_threshold(data: ColourData, tmp_path) -> None:
    trainer = trainer_for(tmp_path, Localisation(FINDINGS, min_cases=99), ResultsWriter(figures=False))
    with pytest.warns(
        UserWarning, match="no IoU and Dice at a threshold of Blueness, Redness: fewer than 99"
    ):
        trainer.test(ColourModel(), datamodule=data, verbose=False)
    found = json.loads((tmp_path / "results.json").read_text())["metrics"]["localisation"]
    assert found["dice"] is None and found["iou"] is None and found["hit"] is not None


def test_a_damaged_mask_is_named(data: ColourData, tmp_path) -> None:
    damaged = ColourData(with_boxes=False)
    masks = data.tables.masks.head(1).assign(counts="3 4")
    damaged.tables = dataclasses.replace(damaged.tables, masks=masks)
    with pytest.raises(
        UserError,
        match=f"image {masks['dicom_id'].iloc[0]}, mask of Blueness: expected run lengths of .* found 7;",
    ):
        trainer_for(tmp_path, Localisation(FINDINGS)).test(ColourModel(), datamodule=damaged, verbose=False)
