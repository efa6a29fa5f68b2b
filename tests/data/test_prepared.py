"""The prepared set's format: what is refused, and what the message says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from medclip_dcl.data.prepared import (
    PreparedDataError,
    PreparedSet,
    TextEmbedding,
    write_table,
    write_text_embedding,
)
from medclip_dcl.objectives import LanguageModelClassProbability


def test_images_may_have_a_sex_and_an_age(copy):
    images = PreparedSet(copy).table("images")
    columns: dict[str, Any]
    for columns in ({"sex": "F"}, {"age": 61.0}, {"sex": "unknown", "age": np.nan}):
        write_table(images.assign(**columns), copy / "images.parquet", "images")
        assert list(PreparedSet(copy).table("images").columns) == [*images.columns, *columns]
    for columns in ({"age": 61.0, "sex": "F"}, {"sex": 1}, {"mood": "good"}):
        with pytest.raises(PreparedDataError, match="table images"):
            write_table(images.assign(**columns), copy / "images.parquet", "images")


def test_wrong_type_is_not_written(tmp_path):
    frame = pd.DataFrame({"sentence_id": [0.5], "text": ["a"], "n_reports": [1]})
    with pytest.raises(PreparedDataError, match="column sentence_id: expected int64, found float64"):
        write_table(frame, tmp_path / "sentences.parquet", "sentences")
    frame = pd.DataFrame({"sentence_id": [0], "text": [None], "n_reports": [1]})
    with pytest.raises(PreparedDataError, match="column text: expected str"):
        write_table(frame, tmp_path / "sentences.parquet", "sentences")
    assert list(tmp_path.iterdir()) == []


def test_certain_rounded_and_empty_sentences_are_legal(copy):
    scores = pd.read_parquet(copy / "log_p/small-0123.parquet")
    scores.loc[:3, "log_p"] = [0.0, -0.0, 1e-5, np.nan]
    write_table(scores, copy / "log_p/small-0123.parquet", "log_p")
    found = PreparedSet(copy).log_p()["log_p"]
    assert found.equals(scores["log_p"])
    LanguageModelClassProbability()(torch.tensor(found.dropna().to_numpy()))


def embeddings(copy: Path, name: str = "bert-1", rows: int = 9) -> np.ndarray:
    """Writes random embeddings of the first sentences; 7 dimensions."""
    values = np.random.default_rng(0).normal(size=(rows, 7)).astype(np.float32)
    write_text_embedding(TextEmbedding(np.arange(rows), values), copy / f"text_embedding/{name}.parquet", {})
    return values


def test_embeddings_in_row_groups_of_partition_folders(tmp_path, monkeypatch, copy):
    monkeypatch.setattr("medclip_dcl.data.prepared._EMBEDDING_ROWS", 4)
    moved = Path(shutil.copytree(copy, tmp_path / "year=2023"))
    values = embeddings(moved)
    for found in (PreparedSet(moved).text_embedding(), PreparedSet(moved).text_embedding("bert-1")):
        assert found.sentence_id.tolist() == list(range(9))
        assert found.embedding.dtype == np.float32 and np.array_equal(found.embedding, values)


def test_studies_of_a_use_are_its_images(copy):
    images = pd.read_parquet(copy / "images.parquet")
    expected = images.loc[images["use"] == "train", "study_id"].tolist()
    assert len(expected) == 24 and PreparedSet(copy).studies("train").tolist() == expected
    # Two images of one study are one study.
    again = images.iloc[:3].assign(dicom_id=["a", "b", "c"])
    write_table(pd.concat([images, again]), copy / "images.parquet", "images")
    assert PreparedSet(copy).studies("train").tolist() == expected
