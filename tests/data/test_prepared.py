"""The prepared set's format: what is refused, and what the message says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from medclip_dcl.common.files import write_json, write_parquet
from medclip_dcl.data.prepared import (
    FORMAT_VERSION,
    PreparedDataError,
    PreparedSet,
    TextEmbedding,
    seal,
    write_table,
    write_text_embedding,
)
from medclip_dcl.objectives import LanguageModelClassProbability


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
    assert prepared.has("image_classes") and not prepared.has("mood")


def test_images_may_have_a_sex_and_an_age(copy):
    images = PreparedSet(copy).table("images")
    columns: dict[str, Any]
    for columns in ({"sex": "F"}, {"age": 61.0}, {"sex": "unknown", "age": np.nan}):
        write_table(images.assign(**columns), copy / "images.parquet", "images")
        assert list(PreparedSet(copy).table("images").columns) == [*images.columns, *columns]
    for columns in ({"age": 61.0, "sex": "F"}, {"sex": 1}, {"mood": "good"}):
        with pytest.raises(PreparedDataError, match="table images"):
            write_table(images.assign(**columns), copy / "images.parquet", "images")


def test_missing_folder_and_unfinished_set(tmp_path):
    with pytest.raises(
        PreparedDataError, match="does not exist; make it with: python -m data_prep.mimic_cxr"
    ):
        PreparedSet(tmp_path / "nowhere")
    with pytest.raises(PreparedDataError, match="holds no dataset.json"):
        PreparedSet(tmp_path)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (99, "format version 3, found version 99; .* prepare"),
        (2, "format version 3, found version 2; .* prepare"),
    ],
)
def test_another_format_version(copy, version, message):
    info = json.loads((copy / "dataset.json").read_text())
    write_json({**info, "format_version": version}, copy / "dataset.json")
    with pytest.raises(PreparedDataError, match=message):
        PreparedSet(copy)


def test_missing_table_names_its_command(copy):
    (copy / "boxes.parquet").unlink()
    with pytest.raises(PreparedDataError, match="no table boxes.parquet; create it with: .*--ms_cxr FILE"):
        PreparedSet(copy).table("boxes")


def test_missing_column(copy):
    frame = pd.read_parquet(copy / "sentences.parquet").drop(columns="n_reports")
    write_parquet(frame, copy / "sentences.parquet")
    message = r"sentences\.parquet: table sentences: expected the columns .*n_reports.*; make it again: python -m data_"
    with pytest.raises(PreparedDataError, match=message):
        PreparedSet(copy).table("sentences")
    (scores,) = (copy / "log_p").glob("*.parquet")
    write_parquet(pd.read_parquet(scores).drop(columns="n_tokens"), scores)
    message = r"small-0123\.parquet: table log_p: .*; make it again: python -m data_prep\.score_sentences"
    with pytest.raises(PreparedDataError, match=message):
        PreparedSet(copy).log_p()


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
        PreparedDataError, match="has no sentence scores; create scores with: .*score_sentences"
    ):
        PreparedSet(copy).log_p()


def test_sentences_without_scores(copy):
    scores = pd.read_parquet(copy / "log_p/small-0123.parquet")
    write_table(scores.iloc[3:], copy / "log_p/small-0123.parquet", "log_p")
    with pytest.raises(PreparedDataError, match="3 of 9 sentences have no score; delete the file"):
        PreparedSet(copy).log_p()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({2: np.inf, 4: -np.inf}, "2 of 9 rows hold an infinite log_p; .* sentence_id 2 and log_p inf; "),
        ({5: -np.inf}, "1 of 9 rows hold an infinite log_p; .* sentence_id 5 and log_p -inf; "),
        ({3: 3.0}, "1 of 9 rows hold a log_p above 0; .* sentence_id 3 and log_p 3; "),
        (
            {i: 1.5 * i + 0.5 for i in range(9)},
            r"9 of 9 rows hold .* above 0; .*\(-log p needs its sign changed\)",
        ),
    ],
)
def test_scores_that_are_no_logarithms_of_probabilities(copy, damage, message):
    scores = pd.read_parquet(copy / "log_p/small-0123.parquet")
    scores["log_p"] = scores["sentence_id"].map(damage).fillna(scores["log_p"])
    write_table(scores, copy / "log_p/small-0123.parquet", "log_p")
    expected = rf"log_p/small-0123\.parquet: {message}.*delete it and make it again with: .*score_sentences"
    with pytest.raises(PreparedDataError, match=expected):
        PreparedSet(copy).log_p()


def test_a_certain_sentence_rounding_and_an_empty_sentence_are_legal(copy):
    scores = pd.read_parquet(copy / "log_p/small-0123.parquet")
    scores.loc[:3, "log_p"] = [0.0, -0.0, 1e-5, np.nan]
    write_table(scores, copy / "log_p/small-0123.parquet", "log_p")
    found = PreparedSet(copy).log_p()["log_p"]
    assert found.equals(scores["log_p"])
    LanguageModelClassProbability()(torch.tensor(found.dropna().to_numpy()))


def test_a_sentence_with_two_scores(copy):
    scores = pd.read_parquet(copy / "log_p/small-0123.parquet")
    twice = pd.concat([scores, scores.iloc[4:6].assign(log_p=-1.0)], ignore_index=True)
    write_table(twice, copy / "log_p/small-0123.parquet", "log_p")
    with pytest.raises(
        PreparedDataError,
        match="2 of 11 rows repeat a sentence_id; expected one row .* sentence_id 4 and log_p -1",
    ):
        PreparedSet(copy).log_p()


def embeddings(copy: Path, name: str = "bert-1", rows: int = 9) -> np.ndarray:
    """Writes random embeddings of the first sentences; 7 dimensions."""
    values = np.random.default_rng(0).normal(size=(rows, 7)).astype(np.float32)
    write_text_embedding(TextEmbedding(np.arange(rows), values), copy / f"text_embedding/{name}.parquet", {})
    return values


def test_embeddings_come_back_exactly(copy):
    values = embeddings(copy)
    found = PreparedSet(copy).text_embedding()
    assert found.sentence_id.tolist() == list(range(9))
    assert found.embedding.dtype == np.float32 and np.array_equal(found.embedding, values)
    assert np.array_equal(PreparedSet(copy).text_embedding("bert-1").embedding, values)
    frame = pd.read_parquet(copy / "text_embedding/bert-1.parquet")
    assert np.array_equal(np.stack(frame["embedding"].tolist()), values)


def test_embeddings_of_many_row_groups_and_a_folder_that_looks_like_a_column(tmp_path, monkeypatch, copy):
    monkeypatch.setattr("medclip_dcl.data.prepared._EMBEDDING_ROWS", 4)
    moved = Path(shutil.copytree(copy, tmp_path / "year=2023"))
    values = embeddings(moved)
    assert np.array_equal(PreparedSet(moved).text_embedding().embedding, values)


def test_no_embeddings_several_embeddings_another_name(copy):
    command = "python -m data_prep.embed_sentences --data SET --model FOLDER"
    with pytest.raises(
        PreparedDataError, match=f"has no sentence embeddings; create embeddings with: {command}"
    ):
        PreparedSet(copy).text_embedding()
    embeddings(copy)
    embeddings(copy, "other-9-mean")
    message = r"several sentence embeddings \(bert-1, other-9-mean\); name one of them \(the option text_embedding\)"
    with pytest.raises(PreparedDataError, match=message):
        PreparedSet(copy).text_embedding()
    with pytest.raises(
        PreparedDataError, match=r"no sentence embeddings named x in .*\(there: bert-1, other-9-mean\)"
    ):
        PreparedSet(copy).text_embedding("x")


def test_sentences_without_embeddings(copy):
    embeddings(copy, rows=7)
    with pytest.raises(
        PreparedDataError, match="2 of 9 sentences have no embedding; delete .*embed_sentences"
    ):
        PreparedSet(copy).text_embedding()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_embeddings_that_are_not_finite(copy, bad):
    values = embeddings(copy)
    values[[3, 5], 2] = bad
    file = copy / "text_embedding/bert-1.parquet"
    write_text_embedding(TextEmbedding(np.arange(9), values), file, {})
    with pytest.raises(
        PreparedDataError, match=r"2 of 9 embeddings hold NaN or infinity \(first: sentence_id 3\)"
    ):
        PreparedSet(copy).text_embedding()


def test_malformed_embeddings(copy):
    values = embeddings(copy)
    file = copy / "text_embedding/bert-1.parquet"
    write_text_embedding(TextEmbedding(np.arange(9)[::-1], values), file, {})
    with pytest.raises(PreparedDataError, match="bert-1.parquet: expected ascending sentence_id"):
        PreparedSet(copy).text_embedding()
    write_parquet(pd.DataFrame({"sentence_id": range(9), "embedding": list(values)}), file)
    with pytest.raises(
        PreparedDataError, match=r"expected .*\(fixed-size list of float32\), found .*embedding \(list<"
    ):
        PreparedSet(copy).text_embedding()
    file.write_bytes(b"nothing")
    with pytest.raises(
        PreparedDataError, match="bert-1.parquet: not readable as Parquet .*; delete the file and make"
    ):
        PreparedSet(copy).text_embedding()


def test_a_patient_in_training_and_evaluation_is_found(copy):
    images = pd.read_parquet(copy / "images.parquet")
    images.loc[images["use"] == "test", "subject_id"] = 100
    write_table(images, copy / "images.parquet", "images")
    assert PreparedSet(copy).patients_in_training_and_evaluation == [100]


def test_the_studies_of_a_use_are_those_of_its_images(copy):
    images = pd.read_parquet(copy / "images.parquet")
    expected = images.loc[images["use"] == "train", "study_id"].tolist()
    assert len(expected) == 24 and PreparedSet(copy).studies("train").tolist() == expected
    # Two images of one study are one study.
    again = images.iloc[:3].assign(dicom_id=["a", "b", "c"])
    write_table(pd.concat([images, again]), copy / "images.parquet", "images")
    assert PreparedSet(copy).studies("train").tolist() == expected


def test_files_that_are_damaged_are_named(copy):
    (copy / "labels.parquet").write_bytes((copy / "labels.parquet").read_bytes()[:-9])
    with pytest.raises(
        PreparedDataError, match=r"labels\.parquet: not readable as Parquet .* make the set again"
    ):
        PreparedSet(copy).table("labels")
    (copy / "dataset.json").write_text("{")
    with pytest.raises(PreparedDataError, match=r"dataset\.json is not JSON .*; prepare the set again"):
        PreparedSet(copy)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            [],
            r"dataset\.json: expected a prepared data set .*, found version none; .* prepare the set again",
        ),
        ({"format_version": FORMAT_VERSION}, r"dataset\.json, phantom: expected bool, found 'None'"),
        (
            {"format_version": FORMAT_VERSION, "phantom": True, "options": [1]},
            r"dataset\.json, options: expected dict",
        ),
    ],
)
def test_a_description_in_another_form_is_named(copy, content, message):
    (copy / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(PreparedDataError, match=message):
        PreparedSet(copy)


def test_json_is_strict(tmp_path):
    with pytest.raises(ValueError):
        write_json({"auc": float("nan")}, tmp_path / "results.json")
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("images", lambda t: pd.concat([t, t.iloc[[2]]]), r"images\.parquet: duplicate dicom_id: 1 .first: 00000002-0"),
        ("images", lambda t: t.replace({"use": {"test": "tset"}}), "unknown use, expected train, .*: 1 .first: tset"),
        ("reports", lambda t: t.assign(sentence_id=99), "sentence_id that is not in sentences.parquet: 1 .first: 99"),
        ("labels", lambda t: t.assign(Edema=2.0), r"labels\.parquet: labels other than 1, 0, -1: 42 .first: 5000,"),
        ("labels", lambda t: pd.concat([t, t.iloc[[2]]]), "duplicate study_id: 1 .first: 5002"),
        ("cases", lambda t: t.assign(label=2), "cases.parquet: unknown label, expected 0, 1: 1 .first: 2"),
        ("boxes", lambda t: t.assign(dicom_id="x"), "dicom_id that is not in images.parquet: 1 .first: x"),
        ("classes", lambda t: t.iloc[1:], "sentence_id of sentences.parquet without a row: 1 .first: 0"),
        ("image_classes", lambda t: t.assign(class_id=-1), r"image_classes\.parquet: class_id below 0: \d+ .first: -1"),
    ],
)  # fmt: skip
def test_damage_to_a_table_is_one_line(copy, table, change, message):
    write_parquet(change(pd.read_parquet(copy / f"{table}.parquet")), copy / f"{table}.parquet")
    with pytest.raises(PreparedDataError, match=f"{message}.*; correct the table, or prepare the set again"):
        PreparedSet(copy).table(table)


@pytest.mark.parametrize("changed", ["scores", "texts"])
def test_scores_of_other_rows_or_texts_are_refused(copy, changed):
    sentences, scores = PreparedSet(copy).table("sentences"), PreparedSet(copy).log_p()
    scores.attrs |= seal(scores, sentences)
    write_table(scores, copy / "log_p/small-0123.parquet", "log_p")
    assert PreparedSet(copy).log_p().equals(scores)
    if changed == "texts":
        write_table(
            sentences.assign(text=sentences["text"][::-1].tolist()), copy / "sentences.parquet", "sentences"
        )
    else:
        scores["log_p"] = scores["log_p"][::-1].tolist()
        write_table(scores, copy / "log_p/small-0123.parquet", "log_p")
    with pytest.raises(PreparedDataError, match="scores and texts as they were scored, .*score_sentences"):
        PreparedSet(copy).log_p()
