"""Positives of the correction: which training images are drawn for an anchor, and what is refused."""

from __future__ import annotations

import shutil
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch

from medclip_dcl.common.errors import UserError
from medclip_dcl.data.arrays import Arrays
from medclip_dcl.data.correction import CorrectionImages
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.data.link import ImageTextRequirements
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet, write_table
from tests.data.test_image_text import batches, encoder_of


def module(folder, small_bert, kind, count=3, is_frozen=False, **options) -> ImageTextDataModule:
    options = {"image_size": 40, "crop_size": 32, "batch_size": 8, "num_workers": 0, **options}
    data = ImageTextDataModule(str(folder), **options)
    data.connect(
        ImageTextRequirements(
            encoder_of(small_bert).tokenize,
            correction_images=kind,
            correction_count=count,
            is_frozen=is_frozen,
        )
    )
    return data


def tables(folder):
    """Study and sentences of each training image, classes of each image, class of each sentence."""
    prepared = PreparedSet(folder)
    images = prepared.table("images").query("use == 'train'").set_index("dicom_id")["study_id"]
    said = prepared.table("reports").groupby("study_id")["sentence_id"].apply(set)
    carried = prepared.table("image_classes").groupby("dicom_id")["class_id"].apply(set)
    return images, said, carried, prepared.table("classes").set_index("sentence_id")["class_id"]


@pytest.mark.parametrize("kind", ["class", pytest.param("sentence", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:model.correction_count")
def test_drawn_images_carry_the_class_or_the_sentence(kind, small_set, small_bert):
    data = module(small_set, small_bert, kind, cache_images=True)
    data.setup("fit")
    examples, (images, said, carried, class_of) = data._train, tables(small_set)
    assert examples is not None
    names = PreparedSet(small_set).table("images")["dicom_id"]
    drawn: dict[int, Counter] = {}
    for epoch in range(60):
        for index in range(len(examples)):
            example = examples[epoch, index]
            (sentence,), own = example["sentence_ids"], examples.reported["dicom_id"][index]
            found = [names[place] for place in example["drawn"]]
            fitting = {
                dicom_id
                for dicom_id, study in images.items()
                if study != images[own]
                and (
                    class_of[sentence] in carried.get(dicom_id, ())
                    if kind == "class"
                    else sentence in said[study]
                )
            }
            assert example["has_others"] == bool(fitting)
            assert set(found) <= (fitting or {own}) and len(found) == 3
            assert len(example["views"]) == 4
            if index == 0:
                drawn.setdefault(sentence, Counter()).update(found)
                assert len(drawn[sentence]) <= max(len(fitting), 1)
    # With replacement, from all of them.
    assert max(len(counts) for counts in drawn.values()) > 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:model.correction_count")
def test_draws_follow_seed_epoch_and_index(small_set, small_bert):
    """They change neither order, sentences nor crops; validation draws training images, the same in each epoch."""
    plain = module(small_set, small_bert, "own", 1)
    plain.setup("fit")
    found = []
    for options in ({}, {"num_workers": 2}, {"cache_images": True}, {"seed": 1}):
        data = module(small_set, small_bert, "sentence", **options)
        data.setup("fit")
        found.append(batches(data.train_dataloader(), epoch=1))
        validation = batches(data.val_dataloader()), batches(data.val_dataloader(), epoch=3)
        assert all(torch.equal(a["images"], b["images"]) for a, b in zip(*validation, strict=True))
        assert all(len(x["images"]) == 4 * len(x["dicom_id"]) for x in validation[0])
    for without, first, *same in zip(batches(plain.train_dataloader(), epoch=1), *found[:3], strict=True):
        assert torch.equal(first["images"][:8], without["images"]) and len(first["images"]) == 32
        assert torch.equal(first["image_scale"][:8], without["image_scale"])
        assert first["sentence_id"].tolist() == without["sentence_id"].tolist()
        assert first["view_of"].tolist() == list(range(8))
        for other in same:
            assert all(
                torch.equal(first[name], other[name]) for name in ("images", "image_scale", "has_others")
            )
    assert not torch.equal(found[0][0]["images"], found[3][0]["images"])
    assert data._train is not None
    epochs = [[data._train[epoch, index]["drawn"] for index in range(24)] for epoch in (0, 1)]
    assert epochs[0] != epochs[1]


def write_features(folder, name="frozen", size=40):
    """Features whose numbers say which image they are of."""
    from dataclasses import asdict

    from medclip_dcl.common.files import write_json
    from medclip_dcl.data.features import FeaturesInfo
    from medclip_dcl.pictures.geometry import View

    prepared = PreparedSet(folder)
    place = folder / "features" / name
    place.mkdir(parents=True)
    images, sentences = len(prepared.table("images")), len(prepared.table("sentences"))
    np.save(place / "images.npy", np.arange(images, dtype=np.float16)[:, None, None, None])
    np.save(place / "sentences.npy", np.arange(sentences, dtype=np.float32)[:, None])
    write_json(
        asdict(FeaturesInfo.of({"image_encoder": "a"}, prepared, View(size, size))), place / "features.json"
    )


def test_features_of_drawn_images_follow_the_own_ones(small_set, small_bert, tmp_path, recwarn):
    folder = shutil.copytree(small_set, tmp_path / "set")
    write_features(folder)
    options = {"crop_size": None, "brightness": 0.0, "contrast": 0.0, "features": "frozen"}
    data = module(folder, small_bert, "class", 2, is_frozen=True, **options)
    data.setup("fit")
    assert not [x for x in recwarn if "correction_count" in str(x.message)]
    number = {dicom_id: i for i, dicom_id in enumerate(data.prepared.table("images")["dicom_id"])}
    assert data._train is not None
    batch = batches(data.train_dataloader())[0]
    examples = [data._train[0, index] for index in batch["image_key"].tolist()]
    own = [number[name] for name in batch["dicom_id"]]
    drawn = [example["drawn"][m] for m in range(2) for example in examples]
    assert batch["features"].flatten().tolist() == [*own, *drawn]


def test_what_cannot_be_drawn_is_refused(small_set, small_bert, tmp_path):
    for options in ({"sentences": "all"}, {"views": 2}, {"contrastive_batch": 16}):
        with pytest.raises(UserError, match="model.correction_images class: expected data.sentences one"):
            module(small_set, small_bert, "class", **options).setup("fit")
    with pytest.warns(UserWarning, match="a step encodes 4 times the images of data.batch_size"):
        module(small_set, small_bert, "sentence").setup("fit")
    without = shutil.copytree(small_set, tmp_path / "without")
    for name in ("classes", "image_classes"):
        (without / f"{name}.parquet").unlink()
    with pytest.raises(PreparedDataError, match="only there the truth is known"):
        module(without, small_bert, "class").setup("fit")
    alone = shutil.copytree(small_set, tmp_path / "alone")
    images = pd.read_parquet(alone / "images.parquet")
    reports = pd.read_parquet(alone / "reports.parquet").drop_duplicates("study_id")
    training = images.loc[images["use"] == "train", "study_id"].unique()
    reports = reports[~reports["study_id"].isin(training[9:])].reset_index(drop=True)
    reports.loc[reports["study_id"].isin(training), "sentence_id"] = range(9)
    write_table(reports, alone / "reports.parquet", "reports")
    with pytest.raises(UserError, match="no class or sentence has images of two training studies"):
        module(alone, small_bert, "sentence").setup("fit")


def test_a_sentence_without_a_group_draws_nothing():
    numbers = {"sentence": [5], "group_of_sentence": [7], "group": [7, 7], "image": [0, 1]}
    arrays = Arrays({name: np.array(values) for name, values in numbers.items()})
    rows = CorrectionImages(arrays, Arrays({"study_id": np.array([1, 2])}), [], 2)  # type: ignore[arg-type]
    generator = np.random.default_rng(0)
    assert rows.draw(5, 1, generator).tolist() == [1, 1] and len(rows.draw(6, 1, generator)) == 0
    assert Counter(rows.draw(5, 3, generator).tolist()).keys() <= {0, 1}
