"""Phrases that two readers have drawn: every number by numpy, pixel by pixel."""

from __future__ import annotations

import dataclasses
import json
from itertools import groupby

import numpy as np
import pandas as pd
import pytest

from medclip_dcl.evaluation import Grounding, ResultsWriter
from medclip_dcl.report.draws import bootstrap_intervals
from medclip_dcl.report.report import render
from tests.evaluation.test_callbacks import ColourData, ColourModel, agreement, expected_maps, trainer_for


def test_a_pair_is_the_mean_of_its_readers(tmp_path):
    data = ColourData()
    boxes = data.tables.boxes.assign(reader="1").sort_values(["dicom_id", "phrase"], ignore_index=True)
    # A phrase of the second reader beside, or apart from, the boxes of the first.
    others = boxes.drop_duplicates(["dicom_id", "phrase"])[::2].assign(reader="2")
    others["x"] = (others["x"] + 3).where(np.arange(len(others)) % 2 == 0, 30 - others["x"])
    boxes = pd.concat([boxes, others]).sort_values(["dicom_id", "phrase"], ignore_index=True)
    data.tables = dataclasses.replace(data.tables, boxes=boxes)
    trainer = trainer_for(tmp_path, Grounding(examples=1), ResultsWriter())
    trainer.test(ColourModel(), datamodule=data, verbose=False)
    found = pd.read_parquet(tmp_path / "predictions/grounding.parquet").sort_values("box", ignore_index=True)
    results = json.loads((tmp_path / "results.json").read_text())
    metrics, counts = results["metrics"]["grounding"], results["counts"]["grounding"]

    rows = zip(boxes[["dicom_id", "phrase", "reader"]].to_numpy().tolist(), expected_maps(data), strict=True)
    by_reader: dict[str, list] = {"1": [], "2": []}
    pairs, ious, n_alone = [], [], 0
    for _, of_pair in groupby(sorted(rows, key=lambda row: row[0]), lambda row: row[0][:2]):
        masks: dict[str, np.ndarray] = {}
        of_readers, drawn = [], list(of_pair)
        heat = drawn[0][1][0]
        for (*_, reader), (_, mask) in drawn:
            masks[reader] = mask | masks.get(reader, False)
        for reader, mask in masks.items():
            cnr, miou = agreement(heat, mask)
            of_readers.append((abs(cnr), cnr, miou, mask[heat > heat.max() - 1e-6].mean(), mask.mean()))
            by_reader[reader].append(of_readers[-1])
        pairs.append(np.mean(of_readers, axis=0))
        n_alone += len(masks) == 1
        if len(masks) == 2:
            ious.append((masks["1"] & masks["2"]).sum() / (masks["1"] | masks["2"]).sum())
    names = ("cnr", "cnr_signed", "miou", "hit", "area")
    for numbers, expected in (
        (metrics["by_pair"], pairs),
        *((metrics["by_reader"][reader], of) for reader, of in by_reader.items()),
    ):
        assert [numbers[name] for name in names] == pytest.approx(np.mean(expected, axis=0), abs=2e-3)
    assert metrics["by_pair"]["reader_iou"] == pytest.approx(np.mean(ious))
    assert metrics["by_pair"]["reader_dice"] == pytest.approx(np.mean([2 * iou / (1 + iou) for iou in ious]))
    assert 0 in ious and max(ious) > 0.3 and "reader_iou" not in metrics
    assert counts["by_reader"] == {reader: len(of) for reader, of in by_reader.items()}
    assert counts["pairs_of_one_reader"] == n_alone > 0 and counts["pairs"] == len(pairs)
    assert found["reader"].tolist() == boxes["reader"].tolist()
    interval = bootstrap_intervals(tmp_path, n_draws=50)["grounding/by_pair/hit"]
    assert interval.low is not None and interval.low < metrics["by_pair"]["hit"] < interval.high
    page = render(tmp_path)
    assert "Grounding by reader" in page and "readers" in page
