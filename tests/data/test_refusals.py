"""Settings and damaged sets that the datamodules refuse, each in a line that names them and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from medclip_dcl.common.files import write_json, write_parquet
from medclip_dcl.data import ImageTextDataModule, LabelledDataModule, PreparedSet
from medclip_dcl.data.prepared import (
    PreparedDataError,
    TextEmbedding,
    seal,
    seal_of_texts,
    write_table,
    write_text_embedding,
)
from tests.data.test_image_text import batches, datamodule, require
from tests.data.test_labelled import datamodule as labelled_datamodule
from tests.data.test_reports import USE, set_up, write_set


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ImageTextDataModule, {"crop_size": 600}, r"crop_size: expected a number in .* 512\], found 600"),
        (ImageTextDataModule, {"brightness": 1.5}, r"data.brightness: expected a number in \[0, 1\), found 1.5"),
        (ImageTextDataModule, {"views": 0}, "data.views: expected at least 1, found 0"),
        (ImageTextDataModule, {"evaluation_crop": 0}, r"evaluation_crop: expected .* 512\], found 0"),
        (ImageTextDataModule, {"contrastive_batch": 100}, "contrastive_batch 100 must be a multiple of .* 64"),
        (ImageTextDataModule, {"features": "x", "views": 2}, r"data.contrastive_batch: null \(got 2, None\)"),
        (ImageTextDataModule, {"features": "x", "contrastive_batch": 64}, r"\(got 1, 64\)"),
        (ImageTextDataModule, {"mask_probability": 1.0}, r"mask_probability: expected .* in \(0, 1\), found 1.0"),
        (LabelledDataModule, {"label_fraction": 0.0}, r"data.label_fraction: expected a number in \(0, 1\], found 0.0"),
        (LabelledDataModule, {"contrast": 1.0}, r"data.contrast: expected a number in \[0, 1\), found 1.0"),
    ],
)  # fmt: skip
def test_a_setting_is_refused_by_name(kind, options, message, small_set):
    with pytest.raises(ValueError, match=message):
        kind(str(small_set), **options)


@pytest.mark.parametrize(
    ("written", "options", "message"),
    [
        ({}, {"mask_probability": 1.0}, r"data.mask_probability: expected a number in \(0, 1\), found 1.0"),
        ({}, {"max_tokens": 2}, "data.max_tokens: expected at least 3, found 2"),
        ({}, {"batch_size": 8}, "no more than the 7 training sentences, found a batch of 8"),
        ({}, {"vocabulary_size": 20}, r"vocabulary_size 20 is too small: special tokens and the \d+ characters"),
        ({}, {"vocabulary_size": None}, "vocabulary_size must be given for a model from scratch"),
        ({}, {"pretrained": "somewhere"}, "got vocabulary_size 90, pretrained 'somewhere'"),
        ({}, {"extra_text": "/no/such.txt"}, "no file /no/such.txt"),
        ({"patients": {11: 2}}, {}, r"1 patients are both in training and in evaluation \(first: 2\)"),
        ({"uses": {**USE, 11: "excluded"}}, {}, r"has no validate sentences \(0 studies of use validate\)"),
    ],
)  # fmt: skip
def test_settings_and_sets_of_sentences_are_refused(written, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        set_up(write_set(tmp_path, **written), **options).train_dataloader()


def test_batches_that_cannot_be_are_refused(small_set, small_bert, monkeypatch):
    def load(**options: Any) -> None:
        data = datamodule(small_set, small_bert, **options)
        data.setup("fit")
        data.train_dataloader()
        data.val_dataloader()

    for option in ({"batch_size": 25}, {"batch_size": 8, "contrastive_batch": 48}):
        with pytest.raises(
            ValueError, match="no more than the 24 training images, found a batch of (25|48); lower it"
        ):
            load(**option)
    for place in ("image_text", "samplers"):
        monkeypatch.setattr(f"medclip_dcl.data.{place}.rank_and_size", lambda: (0, 3))
    with pytest.raises(ValueError, match="data.batch_size .* a multiple of .* processes, 3, .* a batch of 8"):
        load(contrastive_batch=24)
    with pytest.raises(ValueError, match="images or batches for each of 3 processes, found 1; lower it"):
        load(batch_size=12)


# Damaged sets

Damage = Callable[[Path], object]


def edit(table: str, change: Callable[[pd.DataFrame], pd.DataFrame]) -> Damage:
    return lambda folder: write_parquet(change(pd.read_parquet(folder / table)), folder / table)


def delete(name: str) -> Damage:
    def remove(folder: Path) -> None:
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()

    return remove


def write(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def embeddings(values: np.ndarray, ids: Any = None, name: str = "bert-1") -> Damage:
    ids = np.arange(len(values)) if ids is None else ids
    file = f"text_embedding/{name}.parquet"
    return lambda folder: write_text_embedding(TextEmbedding(ids, values), folder / file, {})


def info(**changes: Any) -> Damage:
    def change(folder: Path) -> None:
        found = json.loads((folder / "dataset.json").read_text())
        write_json({**found, **changes}, folder / "dataset.json")

    return change


def sealed(changed: str) -> Damage:
    def change(folder: Path) -> None:
        sentences, scores = PreparedSet(folder).table("sentences"), PreparedSet(folder).log_p()
        scores.attrs |= seal(scores, sentences)
        write_table(scores, folder / SCORES, "log_p")
        assert PreparedSet(folder).log_p().equals(scores)
        frame, name = (scores, SCORES) if changed == "log_p" else (sentences, "sentences.parquet")
        write_parquet(frame.assign(**{changed: frame[changed][::-1].tolist()}), folder / name)

    return change


def sealed_embeddings(folder: Path) -> None:
    """The same number of sentences, of which one says something else."""
    prepared = PreparedSet(folder)
    sentences, name = prepared.table("sentences"), "text_embedding/bert-1.parquet"
    write_text_embedding(TextEmbedding(np.arange(9), VECTORS), folder / name, seal_of_texts(sentences))
    assert len(PreparedSet(folder).text_embedding().embedding) == 9
    texts = [*sentences["text"][:-1], "Other."]
    write_parquet(sentences.assign(text=texts), folder / "sentences.parquet")


def two(first: Damage, second: Damage) -> Damage:
    return lambda folder: (first(folder), second(folder))


SCORES = "log_p/small-0123.parquet"
VECTORS = np.random.default_rng(0).normal(size=(9, 7)).astype(np.float32)
BROKEN = VECTORS.copy()
BROKEN[[3, 5], 2] = np.nan, np.inf
OTHER_SCORES: Damage = lambda folder: shutil.copy(folder / SCORES, folder / "log_p/other-9.parquet")  # noqa: E731
NULLS = pa.table(
    {"sentence_id": range(10), "embedding": pa.array([[0.0, 1.0], None] * 5, pa.list_(pa.float32(), 2))}
)
LISTS = pd.DataFrame({"sentence_id": range(9), "embedding": list(VECTORS)})


def nulls(folder: Path) -> None:
    try:
        pq.write_table(NULLS, folder / "text_embedding/bert-1.parquet")
    except pa.ArrowNotImplementedError as error:
        pytest.skip(f"pyarrow {pa.__version__}: {error}")


def log_p(change: dict[int, float]) -> Damage:
    return edit(SCORES, lambda t: t.assign(log_p=t["sentence_id"].map(change).fillna(t["log_p"])))


def table(name: str) -> Callable[[PreparedSet], object]:
    return lambda prepared: prepared.table(name)


@pytest.mark.parametrize(
    ("damage", "read", "message"),
    [
        (delete("dataset.json"), PreparedSet.log_p, "holds no dataset.json"),
        (write("dataset.json", b"{"), PreparedSet.log_p, "dataset.json: Expecting .*; prepare the set again"),
        (write("dataset.json", b"[]"), PreparedSet.log_p, "expected a prepared data set .*, found version none"),
        (info(format_version=99), PreparedSet.log_p, "format version 3, found version 99; .* prepare"),
        (delete("boxes.parquet"), table("boxes"), "no table boxes.parquet; create it with: .*--ms_cxr FILE"),
        (write("labels.parquet", b"PAR1"), table("labels"), "labels.parquet: .*; make it again: medclip-dcl prepare"),
        (edit("sentences.parquet", lambda t: t.drop(columns="n_reports")), table("sentences"),
         r"sentences\.parquet: table sentences: expected the columns .*n_reports.*; make it again: medclip-dcl"),
        (edit(SCORES, lambda t: t.drop(columns="n_tokens")), PreparedSet.log_p,
         r"small-0123\.parquet: table log_p: .*; make it again: medclip-dcl score"),
        (edit("images.parquet", lambda t: pd.concat([t, t.iloc[[2]]])), table("images"),
         r"images\.parquet: duplicate dicom_id: 1 .first: 00000002-0.*; correct the table, or prepare the set again"),
        (edit("images.parquet", lambda t: t.replace({"use": {"test": "tset"}})), table("images"),
         "unknown use, expected train, .*: 1 .first: tset"),
        (edit("reports.parquet", lambda t: t.assign(sentence_id=99)), table("reports"),
         "sentence_id that is not in sentences.parquet: 1 .first: 99"),
        (edit("labels.parquet", lambda t: t.assign(Edema=2.0)), table("labels"),
         r"labels\.parquet: labels other than 1, 0, -1: 42 .first: 5000,"),
        (edit("cases.parquet", lambda t: t.assign(label=2)), table("cases"), "label, expected 0, 1: 1 .first: 2"),
        (edit("boxes.parquet", lambda t: t.assign(dicom_id="x")), table("boxes"),
         "dicom_id that is not in images.parquet: 1 .first: x"),
        (edit("classes.parquet", lambda t: t.iloc[1:]), table("classes"),
         "sentence_id of sentences.parquet without a row: 1 .first: 0"),
        (edit("image_classes.parquet", lambda t: t.assign(class_id=-1)), table("image_classes"),
         r"image_classes\.parquet: class_id below 0: \d+ .first: -1"),
        (OTHER_SCORES, PreparedSet.log_p, r"several sentence scores \(there: other-9, small-0123\); name one"),
        (OTHER_SCORES, lambda s: s.log_p("x"), r"no sentence scores named x in log_p \(there: other-9, small-0123\)"),
        (delete("log_p"), PreparedSet.log_p, "has no sentence scores; create scores with: .*medclip-dcl score"),
        (edit(SCORES, lambda t: t.iloc[3:]), PreparedSet.log_p, "3 of 9 sentences have no row; correct the file"),
        (log_p({2: np.inf, 4: -np.inf}), PreparedSet.log_p, "logarithms .* 2 of 9 rows .* 2, log_p inf"),
        (log_p({3: 3.0}), PreparedSet.log_p, "sign changed.* 1 of 9 rows .* 3, log_p 3.; .*medclip-dcl score"),
        (edit(SCORES, lambda t: pd.concat([t, t.iloc[4:6].assign(log_p=-1.0)], ignore_index=True)), PreparedSet.log_p,
         "expected one row for each sentence, .* 2 of 11 rows .* 4, log_p -1"),
        (sealed_embeddings, PreparedSet.text_embedding,
         "bert-1.parquet: expected sentence embeddings of the set's texts, .* changed since; .* medclip-dcl embed"),
        (sealed("log_p"), PreparedSet.log_p, "scores and texts as they were scored, .*medclip-dcl score"),
        (sealed("text"), PreparedSet.log_p, "scores and texts as they were scored, .*medclip-dcl score"),
        (two(embeddings(VECTORS), embeddings(VECTORS, name="b")), PreparedSet.text_embedding,
         r"several sentence embeddings .*b, bert-1\); name one \(the option text_embedding\), or"),
        (embeddings(VECTORS[:7]), PreparedSet.text_embedding, "2 of 9 sentences have no row; .*medclip-dcl embed"),
        (embeddings(BROKEN), PreparedSet.text_embedding, r"finite numbers, .* 2 of 9 rows \(first: .* 3\)"),
        (two(embeddings(VECTORS), nulls),
         PreparedSet.text_embedding, "cannot reshape"),
        (embeddings(VECTORS, np.arange(9)[::-1]), PreparedSet.text_embedding, "expected ascending sentence_id"),
        (two(embeddings(VECTORS), lambda x: write_parquet(LISTS, x / "text_embedding/bert-1.parquet")),
         PreparedSet.text_embedding, "expected .*a fixed size, found .*embedding: list<"),
        (two(embeddings(VECTORS), write("text_embedding/bert-1.parquet", b"nothing")), PreparedSet.text_embedding,
         "bert-1.parquet: .*; correct the file, or delete it"),
    ],
)  # fmt: skip
def test_damage_to_a_set_is_one_line(damage, read, message, copy):
    damage(copy)
    with pytest.raises(PreparedDataError, match=message) as error:
        read(PreparedSet(copy))
    assert "\n" not in str(error.value)


def moved(use: str) -> Damage:
    """Images of a use become those of a patient in training."""
    return edit("images.parquet", lambda t: t.assign(subject_id=t["subject_id"].where(t["use"] != use, 100)))


NO_LABELS = edit("labels.parquet", lambda t: t.assign(**dict.fromkeys(t.columns[1:], np.nan)))


def fit(*fields: str, **options: Any) -> Callable[[Path, Path], object]:
    return lambda folder, bert: datamodule(folder, bert, fields, **options).setup("fit")


def fit_classifier(folder: Path, bert: Path) -> None:
    labelled_datamodule(folder).setup("fit")


EQUAL_VIEWS: dict[str, Any] = {"views": 2, "crop_size": 40, "brightness": 0.0, "contrast": 0.0}


@pytest.mark.parametrize(
    ("damage", "use", "message"),
    [
        (delete("log_p"), fit("log_p"), "no sentence scores; .*medclip-dcl score"),
        (delete("classes.parquet"), fit("rho"), "no table classes.parquet; .*phantom"),
        (delete("labels.parquet"), fit("labels"), "no table labels.parquet"),
        (NO_LABELS, fit("labels"), "no CheXpert label for any of 24 images"),
        (moved("grounding"), fit(), "1 patients are both in training and in evaluation .first: 100."),
        (edit("images.parquet", lambda t: t[t["use"] != "validate"]), fit(), "has no validate images"),
        (edit("reports.parquet", lambda t: t[t["study_id"] < 5024]), fit(), "no validate images with a sentence of a"),
        (lambda folder: None, fit(**EQUAL_VIEWS), "data.views 2: all views of an image would be equal"),
        (delete("labels.parquet"), fit_classifier, "create it with: medclip-dcl prepare mimic-cxr"),
        (NO_LABELS, fit_classifier, "model.findings: .* does not label 'Pneumonia'; it labels no finding"),
        (moved("test"), fit_classifier, "1 patients are both in training and in evaluation .first: 100."),
        (NO_LABELS, lambda folder, _: labelled_datamodule(folder).evaluation("test"),
         "no labelled test images to evaluate a classifier of Pneumonia,"),
        (lambda folder: None, lambda folder, _: labelled_datamodule(folder, frozen=True).setup("fit"),
         "set data.crop_size: null, data.brightness: 0 and data.contrast: 0"),
        (shutil.rmtree, fit(), "does not exist; make it with: medclip-dcl prepare mimic-cxr"),
    ],
)  # fmt: skip
def test_damage_is_found_before_training(damage, use, message, copy, small_bert):
    damage(copy)
    with pytest.raises(ValueError, match=message):
        use(copy, small_bert)


def test_a_damaged_image_is_named(copy, small_bert):
    path = pd.read_parquet(copy / "images.parquet")["path"][0]
    write(f"images/{path}", b"\xff\xd8 truncated")(copy)
    data = datamodule(copy, small_bert)
    data.setup("fit")
    with pytest.raises(PreparedDataError, match=f"prepared image .*{path} cannot be read .* run the command"):
        batches(data.train_dataloader())


@pytest.mark.parametrize(
    ("of_sentences", "of_images", "message"),
    [
        (("mood",), (), "a field 'mood' of sentences; expected it in the prepared set"),
        (("labels",), (), r"a field 'labels' of sentences; .* which has \['class_id', 'log_p'"),
        ((), ("log_p",), r"a field 'log_p' of images; .* which has \['Atelectasis', .* 'height', 'image_"),
    ],
)
def test_a_field_that_no_table_has_is_named(of_sentences, of_images, message, small_set, small_bert):
    data = datamodule(small_set, small_bert)
    require(data, of_sentences, of_images)
    with pytest.raises(ValueError, match=message):
        data.setup("fit")
