"""The datamodule: what a batch holds, that randomness follows (seed, epoch, index), and what it refuses."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.data.transforms import load_grey, to_input
from medclip_dcl.encoders.text import BertSentences
from medclip_dcl.prepared import PreparedDataError, write_table


def datamodule(folder, small_bert, fields=(), **options) -> ImageTextDataModule:
    options = {"image_size": 40, "crop_size": 32, "batch_size": 8, "num_workers": 0, **options}
    data = ImageTextDataModule(str(folder), **options)
    network = SimpleNamespace(text_encoder=BertSentences(str(small_bert)))
    model = SimpleNamespace(network=network, anchor_fields=fields)
    data.trainer = SimpleNamespace(lightning_module=model)  # type: ignore[assignment]
    return data


def batches(loader, epoch=0):
    loader.sampler.set_epoch(epoch)
    return list(loader)


def test_training_batches(small_set, small_bert):
    data = datamodule(small_set, small_bert, fields=("log_p", "rho"), sentences="all")
    data.setup("fit")
    found = batches(data.train_dataloader())
    assert len(found) == 3
    batch = found[1]
    assert batch["images"].shape == (8, 3, 32, 32)
    assert batch["image_index"].tolist() == sorted(batch["image_index"].tolist())
    reports = data.prepared.table("reports").set_index("study_id")["sentence_id"]
    for i, study in enumerate(batch["study_id"].tolist()):
        mine = batch["sentence_id"][batch["image_index"] == i].tolist()
        assert mine == list(dict.fromkeys(reports[[study]]))
    ids = batch["sentence_id"].tolist()
    assert batch["anchor"]["log_p"].tolist() == pytest.approx([-1.5 * i - 0.5 for i in ids])
    assert batch["anchor"]["rho"].tolist() == pytest.approx([0.1 * i for i in ids])
    text = data.prepared.table("sentences")["text"][ids[0]]
    expected = data._model().network.text_encoder.tokenize([text])[0]
    assert batch["tokens"][0, : batch["lengths"][0]].tolist() == expected
    assert (batch["tokens"][0, batch["lengths"][0] :] == 0).all()
    everyone = [x for b in found for x in b["dicom_id"]]
    assert len(set(everyone)) == 24
    assert set(everyone) == set(data.prepared.table("images").query("use == 'train'")["dicom_id"])


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"cache_images": True}])
def test_workers_and_cache_change_nothing(small_set, small_bert, options):
    plain, other = datamodule(small_set, small_bert), datamodule(small_set, small_bert, **options)
    plain.setup("fit")
    other.setup("fit")
    for epoch in (0, 1):
        a, b = batches(plain.train_dataloader(), epoch), batches(other.train_dataloader(), epoch)
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x["images"], y["images"]) and torch.equal(x["sentence_id"], y["sentence_id"])


def test_epochs_and_seeds_draw_other_sentences_and_crops(small_set, small_bert):
    def by_image(seed, epoch):
        data = datamodule(small_set, small_bert, seed=seed)
        data.setup("fit")
        rows = {}
        for batch in batches(data.train_dataloader(), epoch):
            for dicom_id, sentence, image in zip(
                batch["dicom_id"], batch["sentence_id"].tolist(), batch["images"], strict=True
            ):
                rows[dicom_id] = (sentence, image)
        return rows

    first, again, later, other = by_image(0, 0), by_image(0, 0), by_image(0, 1), by_image(1, 0)
    assert all(torch.equal(first[k][1], again[k][1]) and first[k][0] == again[k][0] for k in first)
    for changed in (later, other):
        assert any(first[k][0] != changed[k][0] for k in first)
        assert not any(torch.equal(first[k][1], changed[k][1]) for k in first)


def test_validation_and_test_loaders_hold_every_image_whole_and_once(small_set, small_bert):
    data = datamodule(small_set, small_bert, batch_size=3)
    data.setup("fit")
    validate = [x for batch in data.val_dataloader() for x in batch["dicom_id"]]
    assert sorted(validate) == sorted(data.evaluation("validate").images["dicom_id"])
    test = list(data.test_dataloader())
    ids = [x for batch in test for x in batch["dicom_id"]]
    assert sorted(ids) == sorted(data.evaluation("test").images["dicom_id"]) and len(set(ids)) == 10
    path = data.prepared.table("images").set_index("dicom_id")["path"][ids[0]]
    assert torch.equal(test[0]["images"][0], to_input(load_grey(data.prepared.image_file(path), 40)))
    assert (data.load_image(ids[0]) == load_grey(data.prepared.image_file(path), 40)).all()


def test_evaluation_tables(small_set, small_bert):
    data = datamodule(small_set, small_bert)
    test = data.evaluation("test")
    assert len(test.chex5) == 30 and len(test.boxes) == 4 and test.phantom
    assert set(test.images.columns) == {"dicom_id", "subject_id", "study_id", "height", "width"}
    validate = data.evaluation("validate")
    assert len(validate.boxes) == 0 and len(validate.images) == 8 and len(validate.chex5) == 40
    assert not validate.sentences.duplicated(["dicom_id", "sentence_id"]).any()
    assert not set(validate.images["subject_id"]) & set(test.images["subject_id"])


def test_refusals_at_construction(small_set):
    for options, message in (
        ({"crop_size": 600}, r"crop_size 600 must lie in \[1, image_size = 512\]"),
        ({"sentences": "two"}, 'must be "one" or "all", got \'two\''),
        ({"brightness": 1.5}, r"data.brightness must lie in \[0, 1\), got 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            ImageTextDataModule(str(small_set), **options)


def test_refusals_at_setup(small_set, small_bert, tmp_path):
    with pytest.raises(ValueError, match="24 training images do not fill one batch of 25"):
        datamodule(small_set, small_bert, batch_size=25).setup("fit")
    with pytest.raises(ValueError, match="no sentence field named 'mood'; there are"):
        datamodule(small_set, small_bert, fields=("mood",)).setup("fit")
    broken = shutil.copytree(small_set, tmp_path / "broken")
    shutil.rmtree(broken / "log_p")
    (broken / "classes.parquet").unlink()
    with pytest.raises(PreparedDataError, match="no sentence scores; .*data_prep.score_sentences"):
        datamodule(broken, small_bert, fields=("log_p",)).setup("fit")
    with pytest.raises(PreparedDataError, match="no table classes.parquet; .*phantom"):
        datamodule(broken, small_bert, fields=("rho",)).setup("fit")
    images = pd.read_parquet(broken / "images.parquet")
    moved = images.assign(subject_id=images["subject_id"].where(images["use"] != "grounding", 100))
    write_table(moved, broken / "images.parquet", "images")
    with pytest.raises(
        PreparedDataError, match="1 patients stand both in training and in evaluation .first: 100."
    ):
        datamodule(broken, small_bert).setup("fit")
    write_table(images.query("use != 'validate'"), broken / "images.parquet", "images")
    with pytest.raises(PreparedDataError, match="has no validate images"):
        datamodule(broken, small_bert).setup("fit")


def test_a_missing_prepared_image_is_named(small_set, small_bert, tmp_path):
    broken = shutil.copytree(small_set, tmp_path / "broken")
    path = pd.read_parquet(broken / "images.parquet")["path"][0]
    (broken / "images" / path).write_bytes(b"\xff\xd8 truncated")
    data = datamodule(broken, small_bert)
    data.setup("fit")
    with pytest.raises(
        PreparedDataError, match=f"prepared image .*{path} cannot be read .* run data_prep.mimic_cxr"
    ):
        batches(data.train_dataloader())
