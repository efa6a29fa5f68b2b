"""Builders of a small prepared set, language model, network and calibration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertTokenizer

from medclip_dcl.common.files import digest_of_file, write_json
from medclip_dcl.common.findings import CHEX5, CHEXPERT
from medclip_dcl.data.identity import describe
from medclip_dcl.data.prepared import (
    FORMAT_VERSION,
    TABLES,
    PreparedSet,
    TextEmbedding,
    write_table,
    write_text_embedding,
)
from medclip_dcl.data.vectors import write_vectors
from medclip_dcl.metrics.calibration import Calibration, FindingCalibration
from medclip_dcl.networks.bert_folder import save_language_model
from medclip_dcl.networks.image_encoder import RegionEncoder, ResNetRegions
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import LSENonLocal, Similarity, pooled_score
from medclip_dcl.networks.text_encoder import BertSentences

SENTENCES = (
    "No pneumothorax.",
    "Heart size is normal.",
    "Small left pleural effusion.",
    "There is a patchy opacity in the right lower lung.",
    "Mild pulmonary edema.",
    "The lungs are clear.",
    "Cardiomegaly is unchanged from ___.",
    "Large right pneumothorax.",
    "No acute osseous abnormality",
)


class PatchRegions(RegionEncoder):
    """Patches of 16 x 16 pixels, normalised over the batch: has running statistics, as a ResNet has."""

    def __init__(self, dim: int = 16, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.dim, self.stride, self.bias, self.dropout = dim, 16, bias, dropout
        convolution = nn.Conv2d(3, dim, 16, stride=16, bias=bias)
        self.map = nn.Sequential(convolution, nn.BatchNorm2d(dim), nn.Dropout(dropout))

    def forward(self, images: Tensor) -> Tensor:
        return self.map(images)

    def config(self) -> dict[str, Any]:
        return {"dim": self.dim, "bias": self.bias, "dropout": self.dropout}


class LinearPatches(RegionEncoder):
    """Square patches, mapped linearly: no BatchNorm, no projection."""

    def __init__(self, dim: int = 8, stride: int = 4) -> None:
        super().__init__()
        self.dim, self.stride = dim, stride
        self.map = nn.Conv2d(3, dim, kernel_size=stride, stride=stride)

    def forward(self, images: Tensor) -> Tensor:
        return self.map(images)

    def config(self) -> dict[str, Any]:
        return {"dim": self.dim, "stride": self.stride}


class GlobalPatches(LinearPatches):
    """Also a vector of the whole image that is not the mean of its regions."""

    has_global_vector = True

    def features_and_global(self, images: Tensor) -> tuple[Tensor, Tensor]:
        maps = self.map(images)
        return maps, (3 * maps).tanh().mean((2, 3))


class RegionsAndGlobal(Similarity):
    """The mean of the cosines with the mean region and with the global vector."""

    uses_global_vector = True

    def scores(self, regions: Tensor, sentences: Tensor, global_vector: Tensor | None = None) -> Tensor:
        assert global_vector is not None
        both = pooled_score(regions, sentences) + pooled_score(global_vector[:, None], sentences)
        return both / 2


def write_pixel(figure: object, file: Path) -> None:
    """In place of drawing a figure."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (1, 1)).save(file)


def write_small_set(folder: Path) -> None:
    """Write the set of `small_set`; images are 40 x 40, originals 60 x 50."""
    uses = ["train"] * 24 + ["validate"] * 8 + ["test"] * 6 + ["grounding"] * 4
    generator = np.random.default_rng(0)
    images: list[tuple] = []
    reports: list[tuple] = []
    labels: list[tuple] = []
    cases: list[tuple] = []
    boxes: list[tuple] = []
    for i, use in enumerate(uses):
        dicom_id, study, subject = f"{i:08x}-0", 5000 + i, 100 + i // 2
        path = f"files/p1/s{study}/{dicom_id}.jpg"
        split = {"grounding": "train"}.get(use, use)
        images.append((dicom_id, subject, study, "PA", split, use, path, 60, 50))
        file = folder / "images" / path
        file.parent.mkdir(parents=True)
        grey = generator.integers(0, 60, (40, 40)).astype(np.uint8)
        row, column = divmod(i % 9, 3)  # a bright square whose place tells the first sentence
        grey[row * 13 : row * 13 + 12, column * 13 : column * 13 + 12] += 180
        Image.fromarray(grey).save(file, quality=95)
        for position, sentence in enumerate((i % 9, (i * 5 + 1) % 9)):
            reports.append((study, "findings", position, sentence))
        labels.append((study, *([float(i % 2)] * len(CHEXPERT))))
        if use in ("validate", "test"):
            cases += [(dicom_id, finding, (i + j) % 2, use) for j, finding in enumerate(CHEX5)]
        if use == "grounding":
            boxes.append((dicom_id, "Edema", SENTENCES[i % 9], 5.0 + i % 3, 10.0, 20.0, 30.0))
    frames: dict[str, list[tuple]] = {
        "images": images,
        "sentences": [(i, text, 3) for i, text in enumerate(SENTENCES)],
        "reports": reports,
        "labels": labels,
        "cases": cases,
        "boxes": boxes,
        "classes": [(i, 10 + i, 0.1 * i, 0.01 * i) for i in range(9)],
        "image_classes": [
            (f"{i:08x}-0", 10 + (i * j) % 9) for i in range(42) for j in (1, 5) if i % 9 or j == 1
        ],
        "log_p": [(i, 4, -1.5 * i - 0.5) for i in range(9)],
    }
    files = {path: folder / "images" / path for *_, path, _, _ in images}
    frames["image_files"] = [(x, file.stat().st_size, digest_of_file(file), 9) for x, file in files.items()]
    tables = {name: pd.DataFrame(rows, columns=list(TABLES[name])) for name, rows in frames.items()}
    for name, frame in tables.items():
        file = folder / ("log_p/small-0123.parquet" if name == "log_p" else f"{name}.parquet")
        write_table(frame, file, name)
    info = {
        "format_version": FORMAT_VERSION,
        "source": "test",
        "phantom": True,
        "options": {},
        "counts": {},
        **describe(folder, {name: frame for name, frame in tables.items() if name != "log_p"}),
    }
    write_json(info, folder / "dataset.json")


def write_small_embedding(folder: Path) -> None:
    """Write sentence embeddings of 6 dimensions into the set of `write_small_set`."""
    vectors = np.random.default_rng(1).normal(size=(9, 6)).astype(np.float32)
    write_text_embedding(
        TextEmbedding(np.arange(9), vectors), folder / "text_embedding/small-0123.parquet", {}
    )


def write_small_ranking(folder: Path, dim: int = 6) -> None:
    """Write a ranking of the reports of the set of `write_small_set`, by random vectors."""
    prepared, random = PreparedSet(folder), np.random.default_rng(2)
    sentences, reports = (random.normal(size=(count, dim)).astype(np.float16) for count in (9, 32))
    quantiles = np.quantile(sentences @ reports[:24].T, np.linspace(0, 1, 101), axis=1).T.astype(np.float16)
    of_sentences: dict[str, np.ndarray] = {
        "sentence_id": np.arange(9),
        "vector": sentences,
        "quantiles": quantiles,
    }
    of_reports: dict[str, np.ndarray] = {"study_id": 5000 + np.arange(32), "vector": reports}
    for name, part in (("ranking", of_sentences), ("ranking_reports", of_reports)):
        write_vectors([part], folder / name / "small-0123.parquet", prepared.seal_of_reports())


def write_small_posterior(folder: Path, dim: int = 6) -> None:
    """Write a posterior of the reports of the set of `write_small_set`, by random vectors."""
    random, seal = np.random.default_rng(3), PreparedSet(folder).seal_of_reports()
    sentences, reports = (random.normal(size=(count, dim)).astype(np.float32) for count in (9, 32))
    log_c = -random.random((9, 1), dtype=np.float32)
    parts: dict[str, dict[str, np.ndarray]] = {
        "posterior": {"sentence_id": np.arange(9), "vector": sentences, "log_c": log_c},
        "posterior_reports": {"study_id": 5000 + np.arange(32), "vector": reports},
    }
    for name, part in parts.items():
        write_vectors([part], folder / name / "small-0123.parquet", seal)


def write_small_bert(folder: Path) -> None:
    """Write a BERT of 2 layers x 32 with random weights and a vocabulary of characters."""
    words = sorted({word for text in SENTENCES for word in text.lower().replace(".", " . ").split()})
    letters = list("abcdefghijklmnopqrstuvwxyz_.")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{x}" for x in letters)]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*pieces, *words]))}
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
    )
    save_language_model(BertForMaskedLM(config), BertTokenizer(vocab=vocabulary), folder)


def export_network(small_bert: Path, folder: Path, seed: int = 0) -> Path:
    """Write a network of 16 dimensions for images of 64 pixels as an exported folder."""
    torch.manual_seed(seed)
    parts = (
        ResNetRegions(dim=16, stride=16, width=16),
        BertSentences(str(small_bert), dim=16),
        LSENonLocal(dim=16),
    )
    ImageTextNetwork(*parts, image_size=64).save_pretrained(folder)
    return folder


def platt_calibration(
    network: ImageTextNetwork,
    temperature: float = 0.5,
    offset: float = -1.0,
    threshold: float = 0.3,
    without: Sequence[str] = (),
    **data: Any,
) -> Calibration:
    """A calibration of CheX5's findings to a network; those of `without` had too few cases."""
    platt: dict[str, Any] = {"method": "platt", "threshold": threshold}
    platt["parameters"] = {"temperature": temperature, "offset": offset}
    findings = {
        finding: FindingCalibration(
            *((pair.negative,), (pair.positive,), 30, 30, 25, 25), **({} if finding in without else platt)
        )
        for finding, pair in CHEX5.items()
    }
    scale = network.similarity.gamma2.item()
    return Calibration(network.fingerprint(), scale, {"sensitivity": 0.95}, data, findings)
