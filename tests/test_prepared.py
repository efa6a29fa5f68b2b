"""The prepared set's format: what is refused, and what the message says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from medclip_dcl.prepared import PreparedDataError, PreparedSet, write_json, write_parquet, write_table


@pytest.fixture
def copy(small_set: Path, tmp_path: Path) -> Path:
    """A set that a test may break."""
    return Path(shutil.copytree(small_set, tmp_path / "copy"))


def test_tables_and_scores_are_read(small_set):
    prepared = PreparedSet(small_set)
    assert prepared.is_phantom
    assert len(prepared.table("images")) == 42
    assert prepared.log_p().equals(prepared.log_p("small-0123"))
    assert prepared.patients_in_training_and_evaluation == []
    assert not prepared.has("image_classes")


def test_missing_folder_and_unfinished_set(tmp_path):
    with pytest.raises(
        PreparedDataError, match="does not exist; make it with: python -m data_prep.mimic_cxr"
    ):
        PreparedSet(tmp_path / "nowhere")
    with pytest.raises(PreparedDataError, match="holds no dataset.json"):
        PreparedSet(tmp_path)


def test_another_format_version(copy):
    info = json.loads((copy / "dataset.json").read_text())
    write_json({**info, "format_version": 99}, copy / "dataset.json")
    with pytest.raises(PreparedDataError, match="format version 99, this program reads version 1; prepare"):
        PreparedSet(copy)


def test_missing_table_names_its_command(copy):
    (copy / "boxes.parquet").unlink()
    with pytest.raises(PreparedDataError, match="no table boxes.parquet; made by: .*--ms_cxr FILE"):
        PreparedSet(copy).table("boxes")


def test_missing_column(copy):
    frame = pd.read_parquet(copy / "sentences.parquet").drop(columns="n_reports")
    write_parquet(frame, copy / "sentences.parquet")
    with pytest.raises(PreparedDataError, match="table sentences: expected the columns .*n_reports"):
        PreparedSet(copy).table("sentences")


def test_wrong_type_is_not_written(tmp_path):
    frame = pd.DataFrame({"sentence_id": [0.5], "text": ["a"], "n_reports": [1]})
    with pytest.raises(PreparedDataError, match="column sentence_id: expected int64, found float64"):
        write_table(frame, tmp_path / "sentences.parquet", "sentences")
    frame = pd.DataFrame({"sentence_id": [0], "text": [None], "n_reports": [1]})
    with pytest.raises(PreparedDataError, match="column text: expected str"):
        write_table(frame, tmp_path / "sentences.parquet", "sentences")
    assert list(tmp_path.iterdir()) == []


def test_no_scores_several_scores_another_name(copy):
    scores = pd.read_parquet(copy / "log_p/small-0123.parquet")
    write_table(scores, copy / "log_p/other-9.parquet", "log_p")
    with pytest.raises(PreparedDataError, match=r"several sentence scores \(other-9, small-0123\); name one"):
        PreparedSet(copy).log_p()
    with pytest.raises(
        PreparedDataError, match=r"no sentence scores named x in .*\(there: other-9, small-0123\)"
    ):
        PreparedSet(copy).log_p("x")
    shutil.rmtree(copy / "log_p")
    with pytest.raises(
        PreparedDataError, match="has no sentence scores; scores are made by: .*score_sentences"
    ):
        PreparedSet(copy).log_p()


def test_sentences_without_scores(copy):
    scores = pd.read_parquet(copy / "log_p/small-0123.parquet")
    write_table(scores.iloc[3:], copy / "log_p/small-0123.parquet", "log_p")
    with pytest.raises(PreparedDataError, match="3 of 9 sentences have no score; delete the file"):
        PreparedSet(copy).log_p()


def test_a_patient_in_training_and_evaluation_is_found(copy):
    images = pd.read_parquet(copy / "images.parquet")
    images.loc[images["use"] == "test", "subject_id"] = 100
    write_table(images, copy / "images.parquet", "images")
    assert PreparedSet(copy).patients_in_training_and_evaluation == [100]


def test_json_is_strict(tmp_path):
    with pytest.raises(ValueError):
        write_json({"auc": float("nan")}, tmp_path / "results.json")
    assert not (tmp_path / "results.json").exists()
