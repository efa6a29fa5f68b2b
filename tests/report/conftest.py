"""Tested runs that are made up: random predictions, and a results.json that scikit-learn and pandas compute of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score, balanced_accuracy_score, roc_auc_score

from medclip_dcl.common.findings import CHEX5

N_PATIENTS = 31
PHRASE = "SECRET words of a report"
MIN_CASES = 3

Tables = dict[str, pd.DataFrame]


@pytest.fixture(scope="session")
def make_predictions() -> Callable[..., Tables]:
    return _predictions


@pytest.fixture(scope="session")
def measured() -> Callable[[Tables], dict[str, Any]]:
    return _measured


@pytest.fixture(scope="session")
def make_tested_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Each run is computed once, and copied."""

    @cache
    def made(*options: Any, **named: Any) -> Path:
        return _tested_run(tmp_path_factory.mktemp("tested") / "run", *options, **named)

    return lambda folder, *options, **named: shutil.copytree(made(*options, **named), folder)


def _predictions(skill: float = 1.0, seed: int = 0) -> Tables:
    """Predictions of the three evaluations: always the same cases, scores by seed; many ties, some CNR undefined."""
    cases, scores = np.random.default_rng(99), np.random.default_rng(seed)
    chex5 = []
    for finding in CHEX5:
        for patient in range(N_PATIENTS):
            for image in range(int(cases.integers(0, 4))):
                label = int(cases.random() < 0.4)
                if finding == "Pneumothorax":
                    label = int(patient == 3 or (patient == 8 and image == 0))
                difference = round(skill * (label - 0.5) + scores.normal(), 1)
                chex5.append(
                    (f"i{patient}_{image}", 100 + patient, finding, label, difference / 2, -difference / 2)
                )
    boxes = []
    for patient in range(0, N_PATIENTS, 2):
        for i in range(int(cases.integers(1, 6))):
            phrase = f"{PHRASE} {cases.integers(0, 2)}"
            category = ("Edema", "Nodule/Mass", "Pneumonia")[int(cases.integers(3))]
            dicom_id = f"i{patient}_{i // 3}"
            boxes.append(
                (dicom_id, 100 + patient, category, phrase, *(float(v) for v in cases.integers(1, 50, 4)))
            )
    grounding = pd.DataFrame(
        boxes, columns=["dicom_id", "subject_id", "category", "phrase", "x", "y", "w", "h"]
    )
    n = len(grounding)
    grounding["box"] = np.arange(n) * 3
    # Boxes of a patient are alike.
    of_patient = grounding["subject_id"].map(dict(zip(range(100, 140), scores.normal(size=40), strict=True)))
    grounding["cnr_signed"] = of_patient + skill + 0.3 * scores.normal(size=n)
    grounding.loc[[2, 5], "cnr_signed"] = np.nan
    grounding["cnr"] = grounding["cnr_signed"].abs()
    grounding["miou"] = scores.random(n)
    pair = grounding.groupby(["dicom_id", "phrase"])
    grounding["pair_cnr_signed"] = pair["cnr_signed"].transform("sum")
    grounding["pair_miou"] = pair["miou"].transform("max")
    queries = [
        grounding[["dicom_id", "subject_id", "phrase", "box"]].assign(
            direction=direction,
            rank=scores.integers(2, 2 * 180, n) / 2,
            rank_tolerant=scores.integers(2, 2 * 140, n) / 2,
            n_candidates=n,
        )
        for direction in ("image_to_text", "text_to_image")
    ]
    reports = [
        pd.DataFrame(
            {
                "task": task,
                "direction": direction,
                "query": [f"q{i}" for i in range(N_PATIENTS + 50)],
                "subject_id": 100 + np.arange(N_PATIENTS + 50) % N_PATIENTS,
                "rank": scores.integers(2, 2 * 150, N_PATIENTS + 50) / 2,
                "rank_tolerant": scores.integers(2, 2 * 110, N_PATIENTS + 50) / 2,
                "n_candidates": N_PATIENTS + 50,
            }
        )
        for task in ("image_report", "image_sentence")
        for direction in ("image_to_text", "text_to_image")
    ]
    columns = ["dicom_id", "subject_id", "finding", "label", "score_positive", "score_negative"]
    return {
        "classification": pd.DataFrame(chex5, columns=columns),
        "grounding": grounding,
        "retrieval": pd.concat(queries, ignore_index=True),
        "report_retrieval": pd.concat(reports, ignore_index=True),
    }


def _measured(tables: Tables, decided_on: Tables | None = None) -> dict[str, Any]:
    """The metrics of results.json; ``decided_on``: the tables whose cases decide which findings have a number.

    Rows that were drawn again carry another ``copy``.
    """
    cases = tables["classification"]
    by_finding = {}
    for finding in CHEX5:
        decisive = (decided_on or tables)["classification"].query("finding == @finding")["label"]
        rows = cases[cases["finding"] == finding]
        names = ("auc", "acc", "balanced_acc", "average_precision", "pos", "neg", "gain")
        found: dict[str, Any] = dict.fromkeys(names)
        if min((decisive == 1).sum(), (decisive == 0).sum()) >= MIN_CASES:
            found = dict.fromkeys(found, np.nan)
            if rows["label"].nunique() == 2:
                difference = rows["score_positive"] - rows["score_negative"]
                found["auc"] = float(roc_auc_score(rows["label"], difference))
                found["acc"] = float(((difference > 0) == (rows["label"] == 1)).mean())
                found["balanced_acc"] = float(balanced_accuracy_score(rows["label"], difference > 0))
                found["average_precision"] = float(average_precision_score(rows["label"], difference))
                found["pos"] = float(roc_auc_score(rows["label"], rows["score_positive"]))
                found["neg"] = float(roc_auc_score(1 - rows["label"], rows["score_negative"]))
                found["gain"] = found["auc"] - found["pos"]
        by_finding[finding] = found
    boxes = tables["grounding"]
    keys = ["dicom_id", "phrase", *(["copy"] if "copy" in boxes else [])]
    pairs = boxes.drop_duplicates(keys)[["pair_cnr_signed", "pair_miou"]]
    pairs = pairs.rename(columns=lambda name: name.removeprefix("pair_")).assign(
        cnr=pairs["pair_cnr_signed"].abs()
    )
    retrieval, of_reports, of_sentences = (
        {
            column: _recalls({str(d): r[column] for d, r in rows.groupby("direction")})
            for column in ("rank", "rank_tolerant")
        }
        for rows in (
            tables["retrieval"],
            *(
                tables["report_retrieval"].query("task == @task")
                for task in ("image_report", "image_sentence")
            ),
        )
    )
    return {
        "classification": {
            **{
                name: float(
                    np.mean([found[name] for found in by_finding.values() if found[name] is not None])
                )
                for name in by_finding["Edema"]
            },
            "n_findings": sum(found["auc"] is not None for found in by_finding.values()),
            "by_finding": by_finding,
        },
        "grounding": {
            **_means(boxes),
            "by_category": {str(category): _means(rows) for category, rows in boxes.groupby("category")},
            "by_pair": _means(pairs),
        },
        "retrieval": {**retrieval["rank"], "tolerant": retrieval["rank_tolerant"]},
        "report_retrieval": {
            "image_report": {**of_reports["rank"], "tolerant": of_reports["rank_tolerant"]},
            "image_sentence": of_sentences["rank"],
        },
    }


def _means(rows: pd.DataFrame) -> dict[str, float]:
    return {name: float(rows[name].mean()) for name in ("cnr", "cnr_signed", "miou")}


def _recalls(ranks: dict[str, pd.Series]) -> dict[str, Any]:
    found: dict[str, Any] = {
        direction: {
            **{f"R@{k}": float((of_direction <= k).mean()) for k in (1, 5, 10, 50, 100)},
            "MedR": float(of_direction.median()),
        }
        for direction, of_direction in ranks.items()
    }
    recalls = [found[d][f"R@{k}"] for d in ranks for k in (10, 50, 100)]
    return {"recall": np.mean(recalls), "medr": np.mean([found[d]["MedR"] for d in ranks]), **found}


SETTINGS = dict.fromkeys(("image_encoder", "text_encoder", "similarity"), "0")


def _tested_run(
    folder: Path,
    skill: float = 1.0,
    seed: int = 0,
    untrained: str | None = "0untrained",
    phantom: bool = True,
) -> Path:
    """A run folder as `test` leaves it; ``untrained``: fingerprint of the untrained weights, None for no such test."""
    for suffix, of_skill, of_seed, weights in (
        ("", skill, seed, f"weights{seed}"),
        ("_untrained", 0.0, 77, untrained),
    ):
        if weights is None:
            continue
        tables = _predictions(of_skill, of_seed)
        (folder / f"predictions{suffix}").mkdir(parents=True)
        for section, table in tables.items():
            table.to_parquet(folder / f"predictions{suffix}/{section}.parquet")
        cases, boxes = tables["classification"], tables["grounding"]
        results = {
            "format_version": 2,
            "metrics": _measured(tables),
            "protocol": {
                "classification": {
                    "min_cases": MIN_CASES,
                    "prompts": {"Edema": {"negative": "No edema", "positive": "Edema"}},
                },
                "grounding": {"interpolation": "bilinear", "thresholds": list(np.linspace(-1, 1, 41))},
                "retrieval": {"ties": "half"},
                "report_retrieval": {"reports": "all"},
            },
            "counts": {
                "classification": {
                    "by_finding": {
                        f: {"positives": int(r["label"].sum()), "negatives": int((r["label"] == 0).sum())}
                        for f, r in cases.groupby("finding")
                    },
                    "images": cases["dicom_id"].nunique(),
                },
                "grounding": {
                    "boxes": len(boxes),
                    "images": boxes["dicom_id"].nunique(),
                    "boxes_by_category": boxes["category"].value_counts().to_dict(),
                },
                "retrieval": {"boxes": len(boxes), "phrases": 2},
                "report_retrieval": {
                    **{"images": 40, "patients": 20, "reports": 40, "distinct_reports": 39, "sentences": 40}
                },
            },
            "notes": {"classification": ["a note"], "grounding": [], "retrieval": []},
            "checkpoint": {"file": "checkpoints/best.ckpt", "weights": weights, "settings": SETTINGS},
            "dataset": {
                **{"source": "a source", "fingerprint": "f00d", "phantom": phantom},
                **{"folder": "a_set", "images": 90, "patients": N_PATIENTS},
            },
            "images": {"shown": {"image_size": 48, "geometry": "stretch"}, "trained": {"image_size": 48}},
            "precision": "32-true",
            "versions": {"medclip_dcl": "0.1.0"},
            "timings": {"test_seconds": 1.0 + seed},
        }
        (folder / f"results{suffix}.json").write_text(json.dumps(results))
    return folder
