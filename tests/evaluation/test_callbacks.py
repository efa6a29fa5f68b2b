"""The evaluation callbacks on a network whose regions are mean colours and whose sentences are colours.

Everything they should find can be computed by hand or by a few lines of numpy.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from scipy.interpolate import RegularGridInterpolator
from sklearn.metrics import roc_auc_score
from torch.nn.functional import avg_pool2d
from torch.utils.data import DataLoader

from medclip_dcl.common.errors import UserError
from medclip_dcl.data.image_text import EvaluationTables
from medclip_dcl.evaluation import (
    EmbeddingMap,
    EvaluationResult,
    FindingClassification,
    Grounding,
    ResultsWriter,
    Retrieval,
    SentenceClassification,
    ZeroShotClassification,
)
from medclip_dcl.evaluation.retrieval import box_features, by_chance
from medclip_dcl.metrics.table import place_of
from medclip_dcl.networks.image_encoder import RegionEncoder
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import GlobalCosine
from medclip_dcl.networks.text_encoder import SentenceEncoder
from medclip_dcl.pictures.geometry import View
from medclip_dcl.report.draws import bootstrap_intervals
from medclip_dcl.report.report import render

STRIDE, ROWS, COLUMNS = 4, 3, 5
N_IMAGES = 23
WORDS = {
    "red": (1.0, 0.0, 0.0),
    "green": (0.0, 1.0, 0.0),
    "blue": (0.0, 0.0, 1.0),
    "not red": (0.0, 1.0, 1.0),
    "yellow": (1.0, 1.0, 0.0),
    "dark": (-1.0, -1.0, -1.0),
}
PROMPTS = {"Redness": ("not red", "red"), "Blueness": ("yellow", "blue"), "Rarity": ("dark", "green")}


class MeanColour(RegionEncoder):
    dim, stride = 3, STRIDE

    def forward(self, images):
        return avg_pool2d(images, STRIDE)


class ColourWords(SentenceEncoder):
    dim = 3

    def __init__(self):
        super().__init__()
        self.register_buffer("vectors", torch.tensor(list(WORDS.values())))
        self.n_encoded = 0

    def tokenize(self, texts):
        self.n_encoded += len(texts)
        return [[list(WORDS).index(text)] for text in texts]

    def forward(self, tokens, lengths):
        return self.get_buffer("vectors")[tokens[:, 0]]


class ColourModel(LightningModule):
    def __init__(self):
        super().__init__()
        similarity = GlobalCosine(gamma2=7.0)
        self.network = ImageTextNetwork(
            MeanColour(), ColourWords(), similarity, mean=[0.0] * 3, std=[1.0] * 3
        )

    def test_step(self, batch, batch_index):
        return {"feature_map": self.network.feature_map(batch["images"]), "dicom_id": batch["dicom_id"]}

    def validation_step(self, batch, batch_index):
        return {"loss": torch.zeros(()), **self.test_step(batch, batch_index)}


TRAIN_TABLES = {
    "reports": pd.DataFrame({"study_id": [1, 2, 3], "sentence_id": [0, 1, 2]}),
    "sentences": pd.DataFrame({"sentence_id": [0, 1, 2], "text": ["Not red.", "dark", "yellow"]}),
}
"""Of two training reports and of another."""
SHARES = {"Redness": 0.5, "Blueness": 0.05, "Rarity": 0.005}
"""Share of 200 train patients with two studies each that have the finding in one of them, or in both."""


def train_rows(table: str, columns: Any = None, **where: Any) -> pd.DataFrame:
    patient = np.arange(400) // 2
    if table == "images":
        return pd.DataFrame({"study_id": np.arange(400), "subject_id": patient})
    found = {name: np.where(patient < 200 * share, 1.0, np.nan) for name, share in SHARES.items()}
    found["Redness"][1::2] = -1.0
    return pd.DataFrame({"study_id": np.arange(400), **found})


class ColourData(LightningDataModule):
    """Images of random colours; ``order`` says which are served, twice if named twice."""

    def __init__(self, batch_size=4, order=None, with_boxes=True):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.images = torch.rand(N_IMAGES, 3, ROWS * STRIDE, COLUMNS * STRIDE, generator=generator)
        self.images += (
            (torch.rand(N_IMAGES, 3, ROWS, COLUMNS, generator=generator))
            .repeat_interleave(STRIDE, 2)
            .repeat_interleave(STRIDE, 3)
        )
        self.images /= 2
        self.batch_size = batch_size
        self.order = list(range(N_IMAGES)) if order is None else order
        info = {"source": "colours"}
        self.prepared = SimpleNamespace(
            info=info,
            fingerprint="f00d",
            is_phantom=True,
            names_patients=True,
            folder=Path("somewhere/colour_set"),
            rows=train_rows,
            studies=lambda use: pd.Series([1, 2] if use == "train" else []),
        )
        self.image_size = ROWS * STRIDE
        ids = [f"image{i:02}" for i in range(N_IMAGES)]
        random = np.random.default_rng(5)
        images = pd.DataFrame(
            {
                "dicom_id": ids,
                "subject_id": 1000 + np.arange(N_IMAGES) // 2,
                "study_id": 5000 + np.arange(N_IMAGES),
                "height": 31 + np.arange(N_IMAGES),
                "width": 52 + 2 * np.arange(N_IMAGES),
            }
        )
        of_set = images.assign(
            view="PA", sex=["F", "M"] * (N_IMAGES // 2) + ["unknown"] * (N_IMAGES % 2), age=np.nan
        )
        others = of_set.iloc[:1].assign(dicom_id="image of another use")
        self.prepared.table = ({"images": pd.concat([others, of_set[::-1]])} | TRAIN_TABLES).__getitem__
        cases = [(d, f, int(random.integers(2))) for d in ids[:-2] for f in ("Redness", "Blueness")]
        cases += [(ids[i], "Rarity", int(i < 2)) for i in range(9)] + [(ids[0], "Not asked for", 1)]
        boxes = []
        for i in range(0, N_IMAGES, 2):
            for _ in range(1 + i % 3):
                w, h = int(random.integers(5, 20)), int(random.integers(4, 15))
                word = ("red", "green", "blue")[int(random.integers(3))]
                boxes.append(
                    (
                        ids[i],
                        f"{word} things",
                        word,
                        float(random.integers(1, 30)),
                        float(random.integers(1, 15)),
                        float(w),
                        float(h),
                    )
                )
        sentences = [(d, j, list(WORDS)[j]) for i, d in enumerate(ids[:-1]) for j in {i % 4, (i * i) % 6}]
        self.tables = EvaluationTables(
            images=images,
            cases=pd.DataFrame(cases, columns=["dicom_id", "finding", "label"]),
            boxes=pd.DataFrame(
                boxes if with_boxes else [], columns=["dicom_id", "category", "phrase", "x", "y", "w", "h"]
            ),
            sentences=pd.DataFrame(sentences, columns=["dicom_id", "sentence_id", "text"]),
        )

    def evaluation(self, stage):
        return self.tables

    def load_image(self, dicom_id):
        return np.full((ROWS * STRIDE, COLUMNS * STRIDE), 90, dtype=np.uint8)

    def _loader(self):
        def collate(indices):
            return {"images": self.images[indices], "dicom_id": [f"image{i:02}" for i in indices]}

        served: Any = self.order
        return DataLoader(served, batch_size=self.batch_size, collate_fn=collate)

    test_dataloader = val_dataloader = _loader


def trainer_for(folder: Path, *callbacks, **kwargs) -> Trainer:
    return Trainer(
        accelerator="cpu",
        default_root_dir=str(folder),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **kwargs,
    )


def all_callbacks(**kwargs):
    return [ZeroShotClassification(PROMPTS), Grounding(examples=1), Retrieval(), ResultsWriter(**kwargs)]


def run_test(
    folder: Path, data: ColourData, *callbacks, model: ColourModel | None = None
) -> tuple[dict, Any]:
    """results.json of a test by some callbacks, without figures, or by all; and what it logged."""
    measured = [*callbacks, ResultsWriter(figures=False)] if callbacks else all_callbacks()
    trainer = trainer_for(folder, *measured)
    (logged,) = trainer.test(model or ColourModel(), datamodule=data, verbose=False)
    return json.loads((folder / "results.json").read_text()), logged


def regions_of(data: ColourData) -> np.ndarray:
    """(image, row, column, colour) mean colours, without torch."""
    pixels = data.images.double().numpy().reshape(N_IMAGES, 3, ROWS, STRIDE, COLUMNS, STRIDE)
    return pixels.mean(axis=(3, 5)).transpose(0, 2, 3, 1)


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def enlarge(
    heat_map: np.ndarray, height: int, width: int, interpolation: str = "bilinear", sigma: float = 0.0
) -> np.ndarray:
    """Pixel by pixel: value at the place of the pixel among the region centres, then a Gaussian by its definition."""
    rows, columns = heat_map.shape

    def at(pixel: int, n_pixels: int, n_regions: int) -> float:
        return min(max((pixel + 0.5) / n_pixels * n_regions - 0.5, 0), n_regions - 1)

    places = [
        np.array([at(i, n, r) for i in range(n)], dtype="float64")
        for n, r in ((height, rows), (width, columns))
    ]
    if interpolation == "nearest":
        places = [np.floor(place + 0.5) for place in places]
    found = RegularGridInterpolator((range(rows), range(columns)), heat_map)(
        np.stack(np.meshgrid(*places, indexing="ij"), axis=-1)
    )
    if sigma:
        reach = int(4 * sigma + 0.5)
        kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
        kernel /= kernel.sum()
        for axis in (0, 1):
            padded = np.pad(found, [(reach, reach) if a == axis else (0, 0) for a in (0, 1)], mode="edge")
            found = np.apply_along_axis(lambda line: np.convolve(line, kernel, mode="valid"), axis, padded)
    return found


@pytest.fixture(scope="module")
def tested(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    data, model = ColourData(), ColourModel()
    with pytest.warns(UserWarning, match="Rarity: no AUC and accuracy from 2 positive and 7 negative cases"):
        results, logged = run_test(folder, data, model=model)
    return SimpleNamespace(folder=folder, data=data, results=results, logged=logged, model=model)


def test_classification_is_scikit_learns_on_mean_colours(tested):
    found = tested.results["metrics"]["classification"]
    mean_regions = regions_of(tested.data).reshape(N_IMAGES, -1, 3).mean(1)
    aucs, accs = [], []
    for finding in ("Redness", "Blueness"):
        rows = tested.data.tables.cases.query("finding == @finding")
        index = rows["dicom_id"].str[5:].astype(int)
        negative, positive = (cosine(mean_regions[index], np.array(WORDS[text])) for text in PROMPTS[finding])
        aucs.append(roc_auc_score(rows["label"], positive - negative))
        accs.append(float(((positive > negative) == rows["label"].astype(bool)).mean()))
        assert found["by_finding"][finding]["auc"] == pytest.approx(aucs[-1], abs=1e-6)
        assert found["by_finding"][finding]["acc"] == pytest.approx(accs[-1], abs=1e-6)
        predictions = pd.read_parquet(tested.folder / "predictions/classification.parquet")
        predictions = (
            predictions[predictions["finding"] == finding].set_index("dicom_id").loc[rows["dicom_id"]]
        )
        assert predictions["score_positive"].to_numpy() == pytest.approx(positive, abs=1e-6)
        assert predictions["score_negative"].to_numpy() == pytest.approx(negative, abs=1e-6)
        assert predictions["label"].tolist() == rows["label"].tolist()
    assert found["auc"] == pytest.approx(np.mean(aucs), abs=1e-6)
    assert found["acc"] == pytest.approx(np.mean(accs), abs=1e-6)
    assert found["n_findings"] == 2
    assert not (tested.folder / "predictions/prompts.parquet").exists(), "one prompt a side"


def test_findings_are_in_bands_of_train_patients(tested):
    numbers, counts = (tested.results[part]["classification"] for part in ("metrics", "counts"))
    assert counts["bands"] == {"Redness": "head", "Blueness": "middle", "Rarity": "tail"}
    for band, finding in (("head", "Redness"), ("middle", "Blueness")):
        for name in ("auc", "average_precision", "pos", "neg"):
            assert numbers[band][name] == pytest.approx(numbers["by_finding"][finding][name])
    assert set(numbers["tail"].values()) == {None}, "too few cases"
    saved = pd.read_parquet(tested.folder / "predictions/classification.parquet")
    assert dict(zip(saved["finding"], saved["band"], strict=True)) == counts["bands"]


def test_bands_end_where_the_option_says(tmp_path):
    with pytest.warns(UserWarning, match="Rarity"):
        results, _ = run_test(tmp_path, ColourData(), ZeroShotClassification(PROMPTS, bands=(0.005, 0.001)))
    bands = {"Redness": "head", "Blueness": "head", "Rarity": "middle"}
    assert results["counts"]["classification"]["bands"] == bands
    assert results["protocol"]["classification"]["bands"] == [0.005, 0.001]
    for wrong in ((0.01, 0.1), (1.0, 0.1), (0.1, 0.0)):
        with pytest.raises(ValueError, match="bands: expected 1 > head >= tail > 0"):
            ZeroShotClassification(PROMPTS, bands=wrong)


def test_a_set_without_train_patients_has_no_bands(tmp_path):
    data = ColourData()
    data.prepared.rows = lambda *of, **where: train_rows(*of).head(0)
    with pytest.warns(UserWarning, match="no means over head, middle, tail .*the set has no train patients"):
        results, _ = run_test(tmp_path, data, ZeroShotClassification(PROMPTS))
    assert results["counts"]["classification"]["bands"] == {}
    assert "head" not in results["metrics"]["classification"]


def test_prompts_of_training_reports_are_known():
    for fingerprint, known in (("f00d", ["not red"]), ("other", None)):
        writer: Any = ResultsWriter()
        writer.lineage = SimpleNamespace(fingerprint=fingerprint)
        pair = {"negative": "not red", "positive": ["yellow", "red"]}
        measured = EvaluationResult({}, protocol={"prompts": {"Redness": pair}})
        assert writer._prompts_in_training(ColourData(), {"classification": measured}) == known


def expected_maps(
    data: ColourData,
    heat_map_size: str = "original",
    interpolation: str = "bilinear",
    smoothing: float = 0.0,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Heat map, NaN where nothing is seen, and mask of each box by numpy."""
    found = []
    is_middle = data.tables.view != View()  # of three fifths
    for box in data.tables.boxes.to_dict("records"):
        index = int(box["dicom_id"][5:])
        original: Any = data.tables.images.loc[index, ["height", "width"]].astype(int)
        size = tuple(round(n * STRIDE * (5 / 3 if is_middle else 1)) for n in (ROWS, COLUMNS))
        height, width = original if heat_map_size == "original" else size
        (top, bottom), (left, right) = (
            (round(n / 5), round(n * 4 / 5)) if is_middle else (0, n) for n in (height, width)
        )
        regions = cosine(regions_of(data)[index], np.array(WORDS[box["phrase"]]))
        heat_map = np.full((height, width), np.nan)
        heat_map[top:bottom, left:right] = enlarge(
            regions, bottom - top, right - left, interpolation, smoothing
        )
        down, across = height / original["height"], width / original["width"]
        mask = np.zeros((height, width), dtype=bool)
        mask[
            round(box["y"] * down) : round((box["y"] + box["h"]) * down),
            round(box["x"] * across) : round((box["x"] + box["w"]) * across),
        ] = True
        found.append((heat_map, mask))
    return found


def agreement(heat_map: np.ndarray, mask: np.ndarray) -> tuple[float, float]:
    """Signed CNR and mIoU of the pixels that the map defines."""
    seen = ~np.isnan(heat_map)
    if not mask[seen].any():
        return math.nan, 0.0
    inside, outside, heat_map = heat_map[mask & seen], heat_map[~mask & seen], np.nan_to_num(heat_map, nan=-2)
    cnr = (inside.mean() - outside.mean()) / math.sqrt(inside.var() + outside.var())
    mask, thresholds = mask & seen, [i / 20 for i in range(-20, 21)]
    iou = np.mean([((heat_map > t) & mask).sum() / ((heat_map > t) | mask).sum() for t in thresholds])
    return cnr, float(iou)


@pytest.mark.parametrize(
    ("options", "view"),
    [
        ({}, View()),
        ({"heat_map_size": "model", "interpolation": "nearest"}, View()),
        ({"smoothing": 2.5}, View()),
        ({}, View(3, 5)),
        ({"heat_map_size": "model"}, View(3, 5)),
    ],
)
def test_grounding_is_numpys(tmp_path, options, view):
    data = ColourData()
    boxes = data.tables.boxes.copy()
    # Image 0 is 31 x 52: the view sees 19 x 32 from (6, 10) on.
    boxes.loc[0, ["x", "y", "w", "h"]] = [0.0, 0.0, 7.0, 4.0]
    boxes.loc[1, ["x", "y", "w", "h"]] = [0.0, 1.0, 25.0, 30.0]
    data.tables = dataclasses.replace(data.tables, boxes=boxes, view=view)
    draws = options == {"heat_map_size": "model"}
    callbacks = [Grounding(examples=1, **options), Retrieval(), ResultsWriter(figures=draws)]
    trainer_for(tmp_path, *callbacks).test(ColourModel(), datamodule=data, verbose=False)
    found = pd.read_parquet(tmp_path / "predictions/grounding.parquet").sort_values("box")
    maps = expected_maps(data, **options)
    unions: dict = {}
    keys = list(zip(boxes["dicom_id"], boxes["phrase"], strict=True))
    for key, (heat_map, mask) in zip(keys, maps, strict=True):
        unions[key] = heat_map, mask | unions.get(key, (None, False))[1]
    of_boxes = np.array([agreement(*one) for one in maps])
    of_pairs = np.array([agreement(*unions[key]) for key in keys])
    each_pair = np.array([agreement(*union) for union in unions.values()])
    assert 0 < len(unions) < len(maps) == len(found)
    # A pixel may lie on a threshold within float32's precision.
    for columns, expected in (
        (["cnr_signed", "miou"], of_boxes),
        (["cnr", "miou"], abs(of_boxes)),
        (["pair_cnr_signed", "pair_miou"], of_pairs),
    ):
        np.testing.assert_allclose(found[columns[0]], expected[:, 0], atol=1e-4)
        np.testing.assert_allclose(found[columns[1]], expected[:, 1], atol=5e-3)
    results = json.loads((tmp_path / "results.json").read_text())
    metrics, counts = results["metrics"]["grounding"], results["counts"]["grounding"]
    category = boxes["category"] == "red things"
    for numbers, expected in (
        (metrics, of_boxes),
        (metrics["by_pair"], each_pair),
        (metrics["by_category"]["red things"], of_boxes[category]),
    ):
        assert numbers["cnr_signed"] == pytest.approx(np.nanmean(expected[:, 0]), abs=1e-4)
        assert numbers["cnr"] == pytest.approx(np.nanmean(abs(expected[:, 0])), abs=1e-4)
        assert numbers["miou"] == pytest.approx(expected[:, 1].mean(), abs=2e-3)
    unseen = int(np.isnan(of_boxes[:, 0]).sum())
    assert (counts["pairs"], counts["boxes_without_cnr"]) == (len(unions), unseen)
    assert (0 < unseen < len(boxes) / 2) == (view != View())
    told = f"{unseen} of {len(boxes)} boxes lie outside the middle 3 x 3 of 5 x 5 pixels that the model sees"
    assert any(note.startswith(told) for note in results["notes"]["grounding"]) == (unseen > 0)
    assert results["protocol"]["retrieval"]["view"] == str(view)
    protocol = {"heat_map_size": "original", "interpolation": "bilinear", "smoothing": 0.0, **options}
    assert protocol.items() <= results["protocol"]["grounding"].items()
    assert len(list(tmp_path.glob("figures/grounding_*.png"))) == (3 if draws else 0)


def test_every_number_has_an_interval(tested):
    found = bootstrap_intervals(tested.folder, n_draws=100)
    for section, metrics in tested.results["metrics"].items():
        for path, value in _numbers(metrics, section):
            assert place_of(path) is not None, path
            if not path.endswith("n_findings"):
                assert found[path].value == (None if value is None else pytest.approx(value, abs=1e-6)), path
    assert found["grounding/by_pair/cnr"].low is not None
    assert found["classification/by_finding/Rarity/auc"][:5] == (None, None, None, None, 0)


def _numbers(metrics, path):
    for key, value in metrics.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{path}/{key}")
        else:
            yield f"{path}/{key}", value


def test_box_features_of_a_view_equal_the_whole():
    whole = torch.randn(6, 10, 15)
    part, view = whole[:, 2:8, 3:12], View(30, 50)
    boxes = torch.tensor([[40.0, 30.0, 33.0, 21.0], [0.0, 0.0, 20.0, 90.0], [0.0, 25.0, 70.0, 40.0]])
    found = box_features(part, boxes, (100, 150), view)
    torch.testing.assert_close(found[:1], box_features(whole, boxes[:1], (100, 150), View()))
    assert not found[1].any(), "the model has not seen the box"
    seen = torch.tensor([[30.0, 25.0, 40.0, 40.0]])
    torch.testing.assert_close(found[2:], box_features(part, seen, (100, 150), view))


@pytest.mark.filterwarnings("ignore:test. Rarity")
@pytest.mark.parametrize("ensemble", ["scores", "embeddings"])
def test_an_ensemble_of_prompts_is_numpys_mean(tested, tmp_path, ensemble):
    prompts: Any = {
        "Redness": (["not red", "blue"], ["red", "yellow", "dark"]),
        "Blueness": PROMPTS["Blueness"],
    }
    results, _ = run_test(tmp_path, tested.data, ZeroShotClassification(prompts, ensemble=ensemble))
    mean_regions = regions_of(tested.data).reshape(N_IMAGES, -1, 3).mean(1)
    found = pd.read_parquet(tmp_path / "predictions/classification.parquet")
    index = found["dicom_id"].str[5:].astype(int)
    for finding, pair in prompts.items():
        rows = found["finding"] == finding
        for column, texts in zip(("score_negative", "score_positive"), pair, strict=True):
            vectors = np.array([WORDS[text] for text in ([texts] if isinstance(texts, str) else texts)])
            if ensemble == "scores":
                expected = np.mean([cosine(mean_regions[index[rows]], vector) for vector in vectors], axis=0)
            else:
                unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
                expected = cosine(mean_regions[index[rows]], unit.mean(axis=0))
            assert found.loc[rows, column].to_numpy() == pytest.approx(expected, abs=1e-6)
    each = pd.read_parquet(tmp_path / "predictions/prompts.parquet")
    of_images = {d: mean_regions[int(d[5:])][None] for d in each["dicom_id"]}
    one: Any
    for one, rows in each.groupby(["prompt", "finding", "side"]):
        text, finding, side = one
        assert text in prompts[finding][side == "positive"] or text == prompts[finding][side == "positive"]
        expected = [cosine(of_images[d], np.array(WORDS[text]))[0] for d in rows["dicom_id"]]
        assert rows["score"].to_numpy() == pytest.approx(expected, abs=1e-6)
    own = each.query("finding == 'Redness' and side == 'negative'")
    aucs = {text: roc_auc_score(1 - rows["label"], rows["score"]) for text, rows in own.groupby("prompt")}
    numbers = results["metrics"]["prompts"]["by_finding"]["Redness"]
    assert numbers["wordings"] == pytest.approx(aucs) and numbers["neg_lowest"] == min(aucs.values())
    protocol = results["protocol"]["classification"]
    assert protocol["prompts"]["Redness"]["positive"] == ["red", "yellow", "dark"]
    assert protocol["prompts"]["Blueness"] == {"negative": "yellow", "positive": "blue"}
    assert (protocol["ensemble"], protocol["min_cases"], protocol["final_period"]) == (ensemble, 5, False)
    single = tested.results["metrics"]["classification"]["by_finding"]["Blueness"]
    assert results["metrics"]["classification"]["by_finding"]["Blueness"] == single


def test_box_feature_of_whole_regions_is_their_mean():
    feature_map = torch.randn(6, ROWS, COLUMNS)
    # 100 x 60 pixels: a region is 20 x 20; rows 1-2, columns 2-4.
    boxes = torch.tensor([[40.0, 20.0, 60.0, 40.0], [0.0, 0.0, 100.0, 60.0], [20.0, 40.0, 20.0, 20.0]])
    expected = torch.stack(
        [feature_map[:, 1:3, 2:5].mean((1, 2)), feature_map.mean((1, 2)), feature_map[:, 2, 1]]
    )
    torch.testing.assert_close(box_features(feature_map, boxes, (60, 100), View()), expected)


def test_retrieval_ranks_cosines_of_boxes_and_phrases(tested):
    tables = tested.data.tables
    regions = torch.tensor(regions_of(tested.data).transpose(0, 3, 1, 2)).float()
    features = []
    for box in tables.boxes.itertuples():
        index = int(box.dicom_id[5:])
        size = (int(tables.images.loc[index, "height"]), int(tables.images.loc[index, "width"]))
        features.append(
            box_features(regions[index], torch.tensor([[box.x, box.y, box.w, box.h]]), size, View())[
                0
            ].numpy()
        )
    phrases = tables.boxes["phrase"].tolist()
    scores = np.array([[cosine(f, np.array(WORDS[p])) for p in phrases] for f in features]).round(6)
    found = pd.read_parquet(tested.folder / "predictions/retrieval.parquet")
    for direction, matrix in (("image_to_text", scores), ("text_to_image", scores.T)):
        rows = found[found["direction"] == direction].set_index("box")
        for query in range(len(phrases)):
            alike = np.array([[phrase == phrases[query] for phrase in phrases]])
            for column, correct in (
                ("rank", np.arange(len(phrases))[None] == query),
                ("rank_tolerant", alike),
            ):
                assert [rows.loc[query, column]] == ranks_of(matrix[[query]], correct)
        summary = tested.results["metrics"]["retrieval"][direction]
        assert summary["MedR"] == pytest.approx(rows["rank"].median())
        for k in (1, 5, 10):
            assert summary[f"R@{k}"] == pytest.approx((rows["rank"] <= k).mean())
    metrics = tested.results["metrics"]["retrieval"]
    both = [metrics["image_to_text"], metrics["text_to_image"]]
    assert metrics["medr"] == pytest.approx(np.mean([m["MedR"] for m in both]))
    assert metrics["recall"] == pytest.approx(np.mean([m[f"R@{k}"] for m in both for k in (10, 50, 100)]))
    assert metrics["tolerant"]["medr"] <= metrics["medr"]


def ranks_of(scores: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Rank of the best correct candidate of each row; incorrect ones that tie with it count half."""
    best = np.where(correct, scores, -np.inf).max(axis=1, keepdims=True)
    return 1 + (scores > best).sum(axis=1) + ((scores == best) & ~correct).sum(axis=1) / 2


def test_reports_and_sentences_are_retrieved_beside_boxes(tmp_path):
    """Numpy, from the definitions: two images of a study, studies of the same sentences, an image without report."""
    data = ColourData()
    images = data.tables.images.copy()
    images["study_id"] = images["study_id"].replace(5001, 5000)
    of_image = {str(d): set(rows["sentence_id"]) for d, rows in data.tables.sentences.groupby("dicom_id")}
    of_image["image01"] = of_image["image00"]
    of_image["image05"] = of_image["image04"] = {1, 3}
    rows = [(d, j, list(WORDS)[j]) for d, ids in of_image.items() for j in sorted(ids)]
    sentences = pd.DataFrame(rows, columns=["dicom_id", "sentence_id", "text"])
    data.tables = dataclasses.replace(data.tables, images=images, sentences=sentences)
    results, logged = run_test(tmp_path, data, Retrieval())
    found = results["metrics"]["report_retrieval"]

    ids = sorted(of_image)
    mean_regions = regions_of(data).reshape(N_IMAGES, -1, 3).mean(1)[[int(d[5:]) for d in ids]]
    words = list(WORDS.values())[:5]  # nobody says "dark"
    of_words = np.stack([cosine(mean_regions, np.array(vector)) for vector in words], axis=1)
    study_of: dict[str, int] = dict(zip(images["dicom_id"], images["study_id"], strict=True))
    studies = sorted({study_of[d] for d in ids})
    said = {study: of_image[next(d for d in ids if study_of[d] == study)] for study in studies}
    of_reports = np.stack([of_words[:, sorted(said[s])].mean(axis=1) for s in studies], axis=1)
    own = np.array([[study_of[d] == s for s in studies] for d in ids])
    alike = np.array([[of_image[d] == said[s] for s in studies] for d in ids])
    holds = np.array([[j in of_image[d] for j in range(5)] for d in ids])
    assert len(studies) == len(ids) - 1 and alike.sum() > own.sum() + 1
    # Equal reports tie, which rounding must not undo.
    for task, scores, correct in (
        ("image_report", of_reports.round(9), own),
        ("tolerant", of_reports.round(9), alike),
        ("image_sentence", of_words, holds),
    ):
        one = found["image_report"]["tolerant"] if task == "tolerant" else found[task]
        both = ranks_of(scores, correct), ranks_of(scores.T, correct.T)
        for direction, ranks in zip(("image_to_text", "text_to_image"), both, strict=True):
            assert one[direction]["MedR"] == np.median(ranks), (task, direction)
            for k in (1, 5, 10):
                assert one[direction][f"R@{k}"] == pytest.approx((ranks <= k).mean())
    assert logged["test/image_report_medr"] == found["image_report"]["medr"]
    assert logged["test/image_sentence_recall"] == pytest.approx(found["image_sentence"]["recall"])
    counts = results["counts"]["report_retrieval"]
    assert (counts["images"], counts["reports"], counts["sentences"]) == (22, 21, 5)
    assert counts["distinct_reports"] == len({tuple(sorted(ids)) for ids in said.values()}) < 21
    queries = pd.read_parquet(tmp_path / "predictions/report_retrieval.parquet")
    assert len(queries) == 2 * 22 + 21 + 5 and "text" not in queries
    assert bootstrap_intervals(tmp_path, n_draws=100)["report_retrieval/image_report/recall"].low is not None


def test_retrieval_among_equal_texts_is_not_measured(tmp_path):
    data = ColourData()
    sentences = data.tables.sentences.assign(sentence_id=0, text="red").drop_duplicates()
    data.tables = dataclasses.replace(
        data.tables, sentences=sentences, boxes=data.tables.boxes.assign(phrase="red")
    )
    with pytest.warns(UserWarning, match="images have the same text; there is nothing to tell apart"):
        results, logged = run_test(tmp_path, data, Retrieval())
    metrics = results["metrics"]
    assert metrics["retrieval"]["recall"] is None and metrics["report_retrieval"] == {} and logged == {}
    assert "the same text" in render(tmp_path)
    (logged,) = trainer_for(tmp_path, Retrieval()).validate(ColourModel(), datamodule=data, verbose=False)
    assert "validate/medr" not in logged


@pytest.mark.parametrize(("n_correct", "n_candidates"), [([1], 12), ([1, 1, 4, 12], 12), ([2, 3], 200)])
def test_chance_is_that_of_shuffled_candidates(n_correct, n_candidates):
    random = np.random.default_rng(0)
    ranks = [1 + np.sort(random.permutation(n_candidates)[:n]).min() for _ in range(6000) for n in n_correct]
    expected = by_chance(np.array(n_correct), n_candidates)
    for k in (1, 5, 10):
        assert expected[f"R@{k}"] == pytest.approx(np.mean(np.array(ranks) <= k), abs=0.015)
    assert expected["MedR"] == pytest.approx(np.median(ranks), rel=0.1)
    if set(n_correct) == {1}:
        assert expected["MedR"] == (n_candidates + 1) / 2
        assert expected["R@10"] == pytest.approx(10 / n_candidates)


def test_results_say_what_they_are_of(tested):
    results = tested.results
    rarity = [
        found["classification"]["by_finding"]["Rarity"] for found in (results["metrics"], results["counts"])
    ]
    declared = ("auc", "acc", "balanced_acc", "average_precision", "pos", "neg", "gain")
    assert rarity == [dict.fromkeys(declared), {"positives": 2, "negatives": 7}]
    assert results["notes"]["classification"] == [
        "Rarity: no AUC and accuracy from 2 positive and 7 negative cases; at least 5 of each are needed (min_cases)"
    ]
    assert results["format_version"] == 2
    assert results["dataset"] == {
        "source": "colours",
        "fingerprint": "f00d",
        "phantom": True,
        "folder": "colour_set",
        "images": N_IMAGES,
        "patients": 12,
        "names_patients": True,
    }
    assert results["images"]["shown"]["image_size"] == ROWS * STRIDE
    assert results["precision"] == "32-true"
    assert results["checkpoint"]["file"] is None and len(results["checkpoint"]["weights"]) == 16
    assert results["protocol"]["classification"]["prompts"]["Redness"] == {
        "negative": "not red",
        "positive": "red",
    }
    assert set(results["versions"]) >= {"torch", "pytorch-lightning", "transformers", "medclip_dcl"}
    assert results["timings"]["test_seconds"] > 0
    names = {file.name for file in (tested.folder / "figures").iterdir()}
    assert names == {
        "grounding_best_1.png",
        "grounding_median_1.png",
        "grounding_worst_1.png",
        "ranks.png",
        "roc.png",
    }
    assert not [file for file in tested.folder.rglob("*.tmp")]
    images = pd.read_parquet(tested.folder / "predictions/images.parquet")
    assert list(images.columns) == ["dicom_id", "study_id", "subject_id", "view", "sex", "age"]
    assert images["dicom_id"].tolist() == [f"image{i:02}" for i in range(N_IMAGES)]
    assert images["subject_id"].tolist() == [1000 + i // 2 for i in range(N_IMAGES)]
    assert images["sex"].tolist()[:3] == ["F", "M", "F"] and images["age"].isna().all()


def test_the_documented_evaluation_is_in_the_report(tmp_path):
    text = (Path(__file__).resolve().parents[2] / "docs/contributing.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(text.partition("## A new evaluation")[2].partition("```python\n")[2].partition("```")[0], names)
    # Without its attributes, and with a constructor that calls no other.
    source = {
        "__init__": lambda self: None,
        **{x: vars(names["ImageNorm"])[x] for x in ("prepare", "measure")},
    }
    bare = type(
        "OwnNorm", (names["EvaluationCallback"],), {**source, "summarise": names["ImageNorm"].summarise}
    )
    data = ColourData()
    results, logged = run_test(tmp_path, data, names["ImageNorm"](), bare())
    mean = np.linalg.norm(regions_of(data).mean((1, 2)), axis=1).mean()
    assert logged["test/image_norm"] == pytest.approx(mean)
    one = {"mean": pytest.approx(mean)}
    assert results["metrics"] == {"image_norm": one, "own_norm": one}
    html = render(tmp_path)
    assert "<figcaption>Image norm</figcaption>" in html and f"<td>{mean:.3f}</td>" in html


@pytest.mark.filterwarnings("ignore:test. Rarity")
@pytest.mark.parametrize(
    ("batch_size", "order"),
    [(1, None), (N_IMAGES, [*reversed(range(N_IMAGES)), 0, 1, 7, 7])],
    ids=["one by one", "backwards and padded with duplicates"],
)
def test_results_do_not_depend_on_batches(tested, tmp_path, batch_size, order):
    results, _ = run_test(tmp_path, ColourData(batch_size, order), *all_callbacks()[:-1])
    for key in results.keys() - {"timings", "metrics"}:
        assert results[key] == tested.results[key]
    compare(results["metrics"], tested.results["metrics"])
    assert not (tmp_path / "figures").exists()


def compare(found, expected):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            compare(found[key], expected[key])
    else:
        assert found == (expected if expected is None else pytest.approx(expected, abs=1e-5))


@pytest.mark.filterwarnings("ignore:test. Rarity")
def test_results_name_the_checkpoint_in_the_run(tested, tmp_path):
    file = tmp_path / "checkpoints" / "best.ckpt"
    trainer = trainer_for(tmp_path, *all_callbacks(figures=False))
    trainer.strategy.connect(ColourModel())
    trainer.save_checkpoint(file)
    trainer.test(ColourModel(), datamodule=ColourData(), ckpt_path=str(file), verbose=False)
    results = json.loads((tmp_path / "results.json").read_text())
    saved = {"file": "checkpoints/best.ckpt", "epoch": 0, "step": 0}
    assert results["checkpoint"] == {**tested.results["checkpoint"], **saved}
    assert results["metrics"] == tested.results["metrics"]


def test_an_earlier_test_leaves_nothing(tested, tmp_path):
    data = ColourData()
    shutil.copytree(tested.folder, tmp_path, dirs_exist_ok=True)
    callbacks = [Grounding(examples=0), ResultsWriter("results_untrained.json")]
    (tmp_path / "predictions/finding_scores.parquet").write_bytes(b"of predict")
    trainer_for(tmp_path, *callbacks).test(ColourModel(), data, verbose=False)
    before = {file.relative_to(tested.folder) for file in tested.folder.rglob("*.*")}
    added = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.*")} - set(map(str, before))
    of_predict = "predictions/finding_scores.parquet"
    of_untrained = {f"predictions_untrained/{name}.parquet" for name in ("grounding", "images")}
    assert added == {of_predict, "results_untrained.json", *of_untrained}
    callbacks[1] = ResultsWriter()
    trainer_for(tmp_path, *callbacks).test(ColourModel(), data, verbose=False)
    files = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.*")}
    assert files == added | {"results.json", "predictions/grounding.parquet", "predictions/images.parquet"}


def test_each_phrase_is_encoded_once_for_all_callbacks(tested):
    # Six prompts, the phrases red, green and blue among them; the reports' sentences, five words, in a batch of theirs.
    assert tested.model.network.text_encoder.n_encoded == 6 + 5


def test_test_scalars_are_logged(tested):
    logged, metrics = tested.logged, tested.results["metrics"]
    assert "test/auc_rarity" not in logged
    for name, value in {
        "auc": metrics["classification"]["auc"],
        "auc_redness": metrics["classification"]["by_finding"]["Redness"]["auc"],
        "cnr_signed": metrics["grounding"]["cnr_signed"],
        "pair_miou": metrics["grounding"]["by_pair"]["miou"],
        "text_to_image_recall_at_10": metrics["retrieval"]["text_to_image"]["R@10"],
        "medr_tolerant": metrics["retrieval"]["tolerant"]["medr"],
    }.items():
        assert logged[f"test/{name}"] == pytest.approx(value)


@pytest.mark.filterwarnings("ignore:validate. Rarity")
def test_validation_logs_classification_and_image_sentence_retrieval(tmp_path):
    data = ColourData()
    trainer = trainer_for(tmp_path, *all_callbacks())
    (logged,) = trainer.validate(ColourModel(), datamodule=data, verbose=False)
    assert not list(tmp_path.iterdir()) and "validate/auc" in trainer.progress_bar_metrics
    assert {"validate/auc", "validate/acc", "validate/auc_redness", "validate/auc_blueness"} <= logged.keys()
    assert not any(name.startswith("validate/cnr") for name in logged)

    mean_regions = regions_of(data).reshape(N_IMAGES, -1, 3).mean(1)
    texts = data.tables.sentences.drop_duplicates("sentence_id").sort_values("sentence_id")["text"]
    scores = np.array([[cosine(image, np.array(WORDS[text])) for text in texts] for image in mean_regions])
    holds = np.zeros(scores.shape, dtype=bool)
    for dicom_id, text in data.tables.sentences[["dicom_id", "text"]].to_numpy():
        holds[int(dicom_id[5:]), list(texts).index(text)] = True
    assert not holds[-1].any()
    medians, recalls = [], []
    for matrix, right in ((scores[:-1], holds[:-1]), (scores.T, holds.T)):
        ranks = [1 + (row > row[ok].max()).sum() for row, ok in zip(matrix, right, strict=True)]
        medians.append(np.median(ranks))
        recalls += [np.mean([rank <= k for rank in ranks]) for k in (10, 50, 100)]
    assert logged["validate/image_to_text_medr"] == medians[0]
    assert logged["validate/text_to_image_medr"] == medians[1]
    assert logged["validate/medr"] == pytest.approx(np.mean(medians))
    assert logged["validate/retrieval_recall"] == pytest.approx(np.mean(recalls))


@pytest.mark.filterwarnings("ignore:(test|validate). (Rarity|Redness|Blueness)")
def test_nothing_to_evaluate_is_said_and_not_fatal(tmp_path):
    data = ColourData(with_boxes=False)
    data.tables = EvaluationTables(
        data.tables.images,
        data.tables.cases.query("finding == 'Rarity'"),
        data.tables.boxes,
        data.tables.sentences,
        findings=list(PROMPTS),
    )
    trainer = trainer_for(tmp_path, *all_callbacks())
    with pytest.warns(
        UserWarning, match="the set has no boxes with phrases: .*medclip-dcl prepare mimic-cxr --ms_cxr FILE"
    ):
        (logged,) = trainer.test(ColourModel(), datamodule=data, verbose=False)
    results = json.loads((tmp_path / "results.json").read_text())
    metrics = results["metrics"]
    assert "test/auc" not in logged
    assert metrics["classification"]["auc"] is None and metrics["classification"]["n_findings"] == 0
    assert metrics["grounding"]["cnr"] is None and metrics["grounding"]["by_category"] == {}
    assert metrics["retrieval"]["recall"] is None and metrics["retrieval"]["image_to_text"]["R@10"] is None
    assert results["notes"]["grounding"] == results["notes"]["retrieval"]
    assert pd.read_parquet(tmp_path / "predictions/grounding.parquet").empty
    assert pd.read_parquet(tmp_path / "predictions/retrieval.parquet").empty
    (logged,) = trainer.validate(ColourModel(), datamodule=data, verbose=False)
    assert math.isnan(logged["validate/auc"]) and "validate/auc" not in trainer.progress_bar_metrics


def begin_fit(folder: Path, callback: ZeroShotClassification, data: ColourData) -> None:
    trainer = trainer_for(folder)
    trainer.datamodule = data  # type: ignore[attr-defined]
    callback.on_fit_start(trainer, ColourModel())


def test_prompts_for_an_unlabelled_finding_are_refused(tmp_path):
    """Before the first image, and before training."""
    data = ColourData()
    for misspelt, known in (("redness", "Redness"), ("Rednes", "Redness"), ("Absence", None)):
        callback = ZeroShotClassification({"Blueness": ("yellow", "blue"), misspelt: ("not red", "red")})
        message = f"does not label '{misspelt}'{f'.*mean {known}' if known else ';'}.*Blueness.*Not asked for"
        for start in (
            lambda callback: trainer_for(tmp_path, callback).test(ColourModel(), datamodule=data),
            lambda callback: begin_fit(tmp_path, callback, data),
        ):
            with pytest.raises(UserError, match=message):
                start(callback)


def test_a_set_without_chex5_is_tested(tmp_path):
    callback = ZeroShotClassification()
    begin_fit(tmp_path, callback, ColourData())
    data = ColourData()
    assert callback.prepare(data.tables, "test") == set()
    found = callback.summarise(ColourModel().network, {}, data.tables)["classification"]
    (note,) = found.notes
    assert "zero-shot classification is not measured" in note and "the set labels Redness" in note
    assert found.metrics["n_findings"] == 0


def test_a_prompt_that_is_cut_is_named(monkeypatch):
    monkeypatch.setattr(
        ColourWords, "are_truncated", lambda self, texts: [text == "yellow" for text in texts]
    )
    found = ZeroShotClassification(PROMPTS).summarise(ColourModel().network, {}, ColourData().tables)
    notes = [note for note in found["classification"].notes if "a prompt is longer than" in note]
    assert len(notes) == 1 and notes[0].startswith("Blueness: ")


def test_sanity_check_is_left_alone(tmp_path):
    callback = ZeroShotClassification(PROMPTS)
    trainer = trainer_for(tmp_path)
    trainer.sanity_checking = True
    callback.on_validation_epoch_start(trainer, ColourModel())
    callback.on_validation_batch_end(trainer, ColourModel(), {"dicom_id": ["image00"]}, None, 0)
    callback.on_validation_epoch_end(trainer, ColourModel())


@pytest.mark.filterwarnings("ignore:test. (Rarity|Redness|Blueness|retrieval|classification)")
def test_a_limited_run_says_so(tmp_path):
    trainer = trainer_for(tmp_path, *all_callbacks(figures=False), limit_test_batches=2)
    with pytest.warns(UserWarning, match="grounding: 8 of 12 images were not evaluated: the run was limited"):
        trainer.test(ColourModel(), datamodule=ColourData(), verbose=False)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["notes"]["retrieval"][0].startswith("retrieval: 15 of 23 images were not evaluated")
    assert results["counts"]["report_retrieval"]["images"] == 8
    assert results["counts"]["grounding"]["images"] == 4


def changed_box(data: ColourData, **values: float) -> None:
    for column, value in values.items():
        data.tables.boxes.loc[0, column] = value


NO_PIXEL = (
    r"image image00: box \(.*expected one that covers a pixel of the 52 x 31 image.*correct the file of boxes"
)


def without_features(image, model):
    """The image is black, and the encoder has NaN for such images."""
    image.zero_()
    model.network.image_encoder.register_forward_hook(
        lambda module, images, maps: maps / images[0].flatten(1).any(1)[:, None, None, None]
    )


@pytest.mark.parametrize(
    ("callbacks", "change", "words"),
    [
        ([Grounding], lambda data, model: changed_box(data, x=9999.0), NO_PIXEL),
        ([Retrieval], lambda data, model: changed_box(data, h=math.nan), NO_PIXEL),
        (
            [Retrieval],
            lambda data, model: without_features(data.images[17], model),
            r"features of 1 of 4 images of a batch hold NaN \(first: image image17\)",
        ),
        (
            [ZeroShotClassification],
            lambda data, model: setattr(model, "network", torch.nn.Identity()),
            "expected a model with an ImageTextNetwork as `network`, found ColourModel with Identity",
        ),
        (
            [ZeroShotClassification, lambda: ZeroShotClassification(PROMPTS)],
            lambda data, model: None,
            "both write section 'classification' of results.json",
        ),
        (
            [type("Own", (Retrieval,), {"section": "images"})],
            lambda data, model: None,
            "section 'images' is the table of tested images",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_named(tmp_path, callbacks, change, words):
    data, model = ColourData(), ColourModel()
    change(data, model)
    trainer = trainer_for(tmp_path, *(make() for make in callbacks), ResultsWriter())
    with pytest.raises(UserError, match=words):
        trainer.test(model, datamodule=data, verbose=False)
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ZeroShotClassification(min_cases=0), "min_cases: .* 0"),
        (lambda: ZeroShotClassification({"Edema": ("No edema", " ")}), "Edema .* prompt"),
        (lambda: ZeroShotClassification(ensemble="mean"), "ensemble: expected one of .*mean"),  # type: ignore[arg-type]
        (lambda: FindingClassification(min_cases=0), "min_cases: .* 0"),
        (lambda: Grounding(smoothing=math.nan), "smoothing: .* nan"),
        (lambda: Grounding(interpolation="cubic"), "interpolation: expected one of .*cubic"),  # type: ignore[arg-type]
        (lambda: EmbeddingMap(max_images=0), "max_images: .* 0"),
    ],
)
@pytest.mark.usefixtures("_shapes_unchecked")
def test_bad_options_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def sentence_data(**options: Any) -> ColourData:
    """Two classes with enough images, one of two wordings, and one that is true of two images alone."""
    data = ColourData(**options)
    classes = [(0, "red", 31, 0.5), (3, "not red", 32, 0.05), (5, "dark", 32, 0.05), (1, "green", 33, 0.2)]
    of_images = [(i, c) for i in range(N_IMAGES) for c, n in ((31, 2), (32, 3), (33, 20)) if i % n == 0]
    data.tables = dataclasses.replace(
        data.tables,
        sentence_classes=pd.DataFrame(classes, columns=["sentence_id", "text", "class_id", "rho"]),
        image_classes=pd.DataFrame(
            [(f"image{i:02}", c) for i, c in of_images], columns=["dicom_id", "class_id"]
        ),
    )
    return data


def auc_of_word(data: ColourData, word: str, is_true: np.ndarray, rows: Any = slice(None)) -> float:
    mean_regions = regions_of(data).reshape(N_IMAGES, -1, 3).mean(1)
    return float(roc_auc_score(is_true[rows], cosine(mean_regions, np.array(WORDS[word]))[rows]))


def test_sentences_are_classified_by_the_truth(tmp_path):
    """A class counts once whatever its wordings; whatever the batches, and twice-served images."""
    data = sentence_data(batch_size=7, order=[*range(N_IMAGES), 0])
    results, logged = run_test(tmp_path, data, SentenceClassification(min_cases=5))
    found, images = results["metrics"]["sentences"], np.arange(N_IMAGES)
    red = auc_of_word(data, "red", images % 2 == 0)
    others = [auc_of_word(data, word, images % 3 == 0) for word in ("not red", "dark")]
    assert found["common"]["auc"] == pytest.approx(red, abs=1e-6)
    assert found["rare"]["auc"] == pytest.approx(np.mean(others), abs=1e-6)
    assert found["auc"] == pytest.approx((red + np.mean(others)) / 2, abs=1e-6)
    assert found["middle"]["auc"] is None
    assert logged["test/sentences_common_auc"] == pytest.approx(red, abs=1e-6)
    counts = results["counts"]["sentences"]
    assert (counts["images"], counts["classes"], counts["sentences"], counts["rare_classes"]) == (
        N_IMAGES,
        2,
        3,
        1,
    )
    intervals = bootstrap_intervals(tmp_path, n_draws=50)
    assert intervals["sentences/rare/auc"].value == pytest.approx(found["rare"]["auc"])
    low, high = intervals["sentences/auc"][1:3]
    assert low < found["auc"] < high


def test_sentences_of_a_file_have_the_cases_of_their_finding(tmp_path):
    file = tmp_path / "sentences.csv"
    file.write_text("sentence,finding,sign\nred,Redness,+\nnot red,Redness,-\ndark,Rarity,+\n")
    data = ColourData()
    results, _ = run_test(tmp_path, data, SentenceClassification(str(file), min_cases=5))
    cases = data.tables.cases.query("finding == 'Redness'")
    rows, label = cases["dicom_id"].str[5:].astype(int).to_numpy(), np.full(N_IMAGES, -1)
    label[rows] = cases["label"]
    aucs = auc_of_word(data, "red", label, rows), auc_of_word(data, "not red", 1 - label, rows)
    found = results["metrics"]["sentences"]
    assert found["auc"] == pytest.approx(np.mean(aucs), abs=1e-6) and found["rare"]["auc"] is None
    file.write_text("sentence,finding,sign\nred,Readness,+\n")
    with pytest.raises(UserError, match="labels no finding Readness; it labels Redness"):
        run_test(tmp_path, data, SentenceClassification(str(file)))
    file.write_text("sentence,finding,sign\nred,Redness,1\n")
    with pytest.raises(UserError, match=r"sign \+ or -, found '1' in row 1"):
        SentenceClassification(str(file))


def test_sentences_without_truth_are_said(tmp_path):
    with pytest.warns(UserWarning, match="the set has no truth"):
        results, _ = run_test(tmp_path, ColourData(), SentenceClassification())
    assert results["metrics"]["sentences"]["auc"] is None
