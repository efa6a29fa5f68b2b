"""The map of image embeddings: groups by finding, neighbours stay neighbours, the same picture again."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.functional import normalize

from medclip_dcl.data.image_text import EvaluationTables
from medclip_dcl.evaluation import EmbeddingMap
from medclip_dcl.evaluation.embedding_map import embedding_map, groups_of_images
from medclip_dcl.networks.described import Encoded
from medclip_dcl.networks.image_encoder import RegionEncoder
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.text_encoder import SentenceEncoder
from medclip_dcl.report.report import render

CHEX5_ROWS = [
    ("a", "Edema", 1),
    ("a", "Pneumonia", 0),
    ("b", "Edema", 1),
    ("b", "Pneumothorax", 1),
    ("c", "Edema", 0),
    ("d", "Pneumothorax", 1),
    ("d", "Pneumothorax", 1),
]


class Nothing(RegionEncoder):
    """The callback gets feature maps: nothing is encoded."""

    dim, stride = 8, 4


class Silence(SentenceEncoder):
    dim = 8


def tables(count: int) -> EvaluationTables:
    """Images 0, 1, ... of which every third has edema and every third pneumonia."""
    ids = [f"image{i:03}" for i in range(count)]
    rows = [(id_, "Edema", int(i % 3 == 0)) for i, id_ in enumerate(ids)]
    rows += [(id_, "Pneumonia", int(i % 3 == 1)) for i, id_ in enumerate(ids)]
    images = pd.DataFrame({"dicom_id": ids, "subject_id": range(count), "study_id": range(count)})
    empty = pd.DataFrame(columns=["dicom_id"])
    return EvaluationTables(
        images=images,
        cases=pd.DataFrame(rows, columns=["dicom_id", "finding", "label"]),
        boxes=empty,
        sentences=empty,
    )


def evaluate(count: int, **options) -> EmbeddingMap:
    """The callback on images whose regions lie near one of three directions, by finding; in batches of 7."""
    callback, data = EmbeddingMap(**options), tables(count)
    network = ImageTextNetwork(Nothing(), Silence())
    directions = 5 * torch.eye(3, 8)
    maps = directions[torch.arange(count) % 3, :, None, None] + torch.randn(count, 8, 2, 3)
    wanted = callback.prepare(data, "test")
    ids = data.images["dicom_id"].tolist()
    values: dict[str, np.ndarray] = {}
    for start in range(0, count, 7):
        values |= callback.measure(network, Encoded(maps[start : start + 7]), ids[start : start + 7])
    assert set(values) == wanted
    mean = normalize(maps.mean((2, 3)), dim=1)
    assert all(np.allclose(values[id_], mean[ids.index(id_)], atol=1e-6) for id_ in values)
    callback.results = callback.summarise(network, dict(sorted(values.items())), data)
    return callback


def test_groups():
    cases = pd.DataFrame(CHEX5_ROWS, columns=["dicom_id", "finding", "label"])
    assert groups_of_images(cases).to_dict() == {
        "a": "Edema",
        "b": "several",
        "c": "none of them",
        "d": "Pneumothorax",
    }


def test_images_of_a_finding_lie_together():
    callback = evaluate(60)
    found = callback.results["embedding_map"]
    cases = found.predictions
    assert found.counts["by_group"] == {"Edema": 20, "Pneumonia": 20, "none of them": 20}
    places = cases[["x", "y"]].to_numpy()
    distances = np.linalg.norm(places[:, None] - places, axis=-1)
    np.fill_diagonal(distances, np.inf)
    nearest = cases["group"].to_numpy()[distances.argmin(1)]
    assert (nearest == cases["group"]).mean() > 0.95
    ((name, figure),) = callback.figures(None)
    (axes,) = figure.axes
    assert name == "embedding_map" and len(axes.collections) == 3
    assert sum(np.asarray(points.get_offsets()).shape[0] for points in axes.collections) == 60


def test_same_images_are_drawn_and_placed():
    torch.manual_seed(1)
    callback = evaluate(50, max_images=20)
    torch.manual_seed(1)
    first, again = (x.results["embedding_map"] for x in (callback, evaluate(50, max_images=20)))
    pd.testing.assert_frame_equal(first.predictions, again.predictions)
    assert first.counts["images"] == 20
    assert callback.prepare(tables(50), "test") == set(first.predictions["dicom_id"])


@pytest.mark.parametrize("count", [0, 3, 4, 9])
def test_few_images_are_no_error(count):
    places = embedding_map(np.random.default_rng(0).normal(size=(count, 5)).astype(np.float32), 30.0, 0)
    assert places.shape == (count, 2) and np.isfinite(places).all()


def test_the_report_shows_the_map(tmp_path):
    (tmp_path / "figures").mkdir()
    ((_, figure),) = evaluate(12).figures(None)
    figure.savefig(tmp_path / "figures/embedding_map.png")
    (tmp_path / "config.yaml").write_text(json.dumps({"run_folder": "x"}))
    assert 'alt="t-SNE of image embeddings"' in render(tmp_path)
    (tmp_path / "figures/embedding_map.png").unlink()
    assert 'alt="t-SNE of image embeddings"' not in render(tmp_path)
