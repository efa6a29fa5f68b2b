"""Labelled images: what labels become, whose labels are used, and what is refused before training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.data.labelled import LabelledDataModule, draw_patients
from medclip_dcl.data.link import LabelledRequirements
from medclip_dcl.data.prepared import PreparedDataError, write_table
from medclip_dcl.pictures.transforms import load_grey

FINDINGS = ("Pneumonia", "Edema", "Fracture")


@pytest.fixture(scope="module")
def labelled_set(small_set, tmp_path_factory) -> Path:
    """`small_set` with labels of every kind, in no order; the last validate study is wholly blank."""
    folder = shutil.copytree(small_set, tmp_path_factory.mktemp("labelled") / "set")
    labels = pd.read_parquet(folder / "labels.parquet")
    generator = np.random.default_rng(5)
    values = generator.choice([1.0, 0.0, -1.0, np.nan], size=(len(labels), len(CHEXPERT)))
    labels[list(CHEXPERT)] = values
    labels.loc[labels["study_id"] == 5031, list(CHEXPERT)] = np.nan
    write_table(labels.sample(frac=1, random_state=0), folder / "labels.parquet", "labels")
    return folder


def datamodule(folder: Path, findings=FINDINGS, frozen=False, **options: Any) -> LabelledDataModule:
    defaults: dict[str, Any] = {"image_size": 40, "crop_size": 32, "batch_size": 8, "num_workers": 0}
    data = LabelledDataModule(str(folder), **(defaults | options))
    data.connect(LabelledRequirements(tuple(findings), lambda loader: {}, frozen))
    return data


def served(data: LabelledDataModule) -> dict[str, list[float]]:
    """Labels of every image of an epoch, by dicom_id; a left-out entry is 9."""
    data.setup("fit")
    return {
        dicom_id: row
        for batch in data.train_dataloader()
        for dicom_id, row in zip(batch["dicom_id"], batch["labels"].nan_to_num(9.0).tolist(), strict=True)
    }


@pytest.mark.parametrize("uncertain", ["ones", "zeros", "ignore"])
@pytest.mark.parametrize("blank", ["zeros", "ignore"])
def test_labels_become_targets_by_the_policy(labelled_set, uncertain, blank):
    data = datamodule(labelled_set, uncertain=uncertain, blank=blank, batch_size=1)
    images = data.prepared.table("images").set_index("dicom_id")
    labels = data.prepared.table("labels").set_index("study_id")
    meant = {"ones": 1.0, "zeros": 0.0, "ignore": 9.0}
    found = served(data)
    expected = {}
    for dicom_id in images.index[images["use"] == "train"]:
        row = []
        for finding in FINDINGS:
            value = labels.loc[images.loc[dicom_id, "study_id"], finding]
            row.append(meant[blank] if np.isnan(value) else meant[uncertain] if value == -1 else value)
        if row != [9.0] * 3:
            expected[dicom_id] = row
    assert found == expected
    assert len(expected) == 24 or "ignore" in (uncertain, blank)


def test_blank_labels_that_count_as_negative_are_said(labelled_set, caplog):
    data = datamodule(labelled_set, blank="zeros", batch_size=1)
    data.setup("fit")
    labels = data.prepared.table("labels").set_index("study_id")
    images = data.prepared.table("images").query("use == 'train'")
    codes = labels.loc[images["study_id"], data.requirements.findings].dropna(how="all")
    n_blank = int(codes.isna().to_numpy().sum())
    assert 0 < n_blank < codes.size
    assert f"{n_blank} of {codes.size} training labels are blank and count as negative" in caplog.text
    caplog.clear()
    datamodule(labelled_set, blank="ignore", batch_size=1).setup("fit")
    assert "blank" not in caplog.text


def test_an_unlabelled_study_is_not_healthy(labelled_set, caplog):
    data = datamodule(labelled_set, blank="zeros")
    data.setup("fit")
    ids = [dicom_id for batch in data.val_dataloader() for dicom_id in batch["dicom_id"]]
    blank = data.prepared.table("images").query("study_id == 5031")["dicom_id"].item()
    assert len(ids) == 7 and blank not in ids
    assert blank not in set(data.evaluation("validate").images["dicom_id"])
    assert "1 of 8 validate images are left out: all label columns of their studies are blank" in caplog.text


def test_fewer_patients_are_among_more_and_seeds_differ():
    subjects = np.repeat(np.arange(200) * 7, 3)
    drawn = {share: set(draw_patients(subjects, share, 4)) for share in (0.01, 0.1, 0.5, 1.0)}
    assert [len(found) for found in drawn.values()] == [2, 20, 100, 200]
    assert drawn[0.01] < drawn[0.1] < drawn[0.5] < drawn[1.0]
    assert set(draw_patients(subjects[::-1], 0.1, 4)) == drawn[0.1]
    assert set(draw_patients(subjects, 0.1, 5)) != drawn[0.1]
    assert len(draw_patients(subjects[:6], 0.01, 0)) == 1


def test_a_fraction_takes_all_images_of_some_patients(labelled_set):
    ids = {}
    choices: dict[str, dict[str, Any]] = {
        "half": {"label_fraction": 0.5},
        "most": {"label_fraction": 0.8, "seed": 3},
        "other policy": {"label_fraction": 0.5, "uncertain": "ones"},
        "other seed": {"label_fraction": 0.5, "label_seed": 1},
    }
    for name, options in choices.items():
        ids[name] = set(served(datamodule(labelled_set, ("Edema",), batch_size=1, **options)))
    data = datamodule(labelled_set)
    train = data.prepared.table("images").query("use == 'train'").set_index("dicom_id")
    patients = set(train.loc[list(ids["other policy"]), "subject_id"])
    assert len(patients) == 6 and set(train.index[train["subject_id"].isin(patients)]) == ids["other policy"]
    assert ids["half"] < ids["other policy"] and ids["half"] < ids["most"]
    assert ids["other seed"] != ids["half"]


def test_fewer_images_than_a_batch_are_one_batch(labelled_set):
    data = datamodule(labelled_set, ("Edema",), label_fraction=0.5, uncertain="zeros", batch_size=64)
    with pytest.warns(UserWarning, match="batch_size 64 is more than the 12 labelled training images"):
        data.setup("fit")
    assert [len(batch["labels"]) for batch in data.train_dataloader()] == [12]


def test_crops_vary_and_validation_sees_whole_images(labelled_set):
    data = datamodule(labelled_set, cache_images=True)
    data.setup("fit")
    loader = data.train_dataloader()
    sampler: Any = loader.sampler

    def by_image(epoch: int) -> dict[str, torch.Tensor]:
        sampler.set_epoch(epoch)
        return {
            i: image for batch in loader for i, image in zip(batch["dicom_id"], batch["images"], strict=True)
        }

    first, again, later = by_image(0), by_image(0), by_image(1)
    assert first.keys() == again.keys() and all(torch.equal(first[i], again[i]) for i in first)
    assert not any(torch.equal(first[i], later[i]) for i in first.keys() & later.keys())
    assert next(iter(first.values())).shape == (1, 32, 32)
    batch = next(iter(data.val_dataloader()))
    path = data.prepared.table("images").set_index("dicom_id")["path"][batch["dicom_id"][0]]
    assert (batch["images"][0, 0].numpy() == load_grey(data.prepared.read_image(path), 40)).all()


@pytest.mark.parametrize("use", ["test", "grounding"])
def test_evaluation_has_raw_labels_of_the_test_split(labelled_set, tmp_path, use):
    folder = shutil.copytree(labelled_set, tmp_path / "set")
    images = pd.read_parquet(folder / "images.parquet").replace({"use": {"test": use}})
    write_table(images, folder / "images.parquet", "images")
    data = datamodule(folder, uncertain="ones", blank="ignore")
    tables = data.evaluation("test")
    expected = images.query("official_split == 'test'")
    assert set(tables.images["dicom_id"]) == set(expected["dicom_id"]) and len(tables.images) == 6
    labels = data.prepared.table("labels").set_index("study_id")
    study = images.set_index("dicom_id")["study_id"]
    assert len(tables.labels) == 6 * 3
    for dicom_id, finding, label in tables.labels[["dicom_id", "finding", "label"]].to_numpy().tolist():
        value = labels.loc[study[dicom_id], finding]
        assert label == value or (np.isnan(label) and np.isnan(value))


def test_findings_without_a_class_are_named(labelled_set):
    data = datamodule(labelled_set, FINDINGS, label_fraction=0.01, label_seed=2, blank="ignore", batch_size=1)
    with pytest.raises(PreparedDataError) as error:
        data.setup("fit")
    message = str(error.value)
    assert "data.label_fraction 0.01, label_seed 2" in message and "raise label_fraction" in message
    labels = data._targets("train")
    patient = draw_patients(labels.subject_ids, 0.01, 2)
    rows = labels.labels[torch.from_numpy(labels.subject_ids == patient)]
    for finding, column in zip(FINDINGS, rows.T, strict=True):
        for kind, value in (("positive", 1.0), ("negative", 0.0)):
            assert (f"{finding} (no {kind} one)" in message) == (value not in column.tolist())


def test_weights_of_positive_cases_are_negatives_over_positives(labelled_set):
    data = datamodule(labelled_set, label_fraction=0.8, uncertain="zeros")
    data.setup("fit")
    labels = data._targets("train").labels
    for weight, column in zip(data.positive_weight().tolist(), labels.T.tolist(), strict=True):
        assert weight == pytest.approx(column.count(0.0) / column.count(1.0))
    assert data.positive_weight().unique().numel() > 1


def test_findings_of_any_name_may_be_labelled(labelled_set, tmp_path):
    folder = shutil.copytree(labelled_set, tmp_path / "set")
    labels = pd.read_parquet(folder / "labels.parquet")
    ribs = labels["Fracture"].where(labels["study_id"] % 3 > 0)
    write_table(labels.assign(**{"Rib fracture": ribs}), folder / "labels.parquet", "labels")
    data = datamodule(folder, ("Rib fracture", "Edema"), batch_size=1)
    of_study = data.prepared.table("images").set_index("dicom_id")["study_id"]
    expected = labels.assign(ribs=ribs).set_index("study_id")["ribs"].replace(-1, 9.0).fillna(0.0)
    assert {row[0] == expected[of_study[dicom_id]] for dicom_id, row in served(data).items()} == {True}
    assert set(data.evaluation("test").labels["finding"]) == {"Rib fracture", "Edema"}
    with pytest.raises(
        UserError, match="'rib fractures'; did you mean Rib fracture.*Cardiomegaly, .*Rib fracture"
    ):
        datamodule(folder, ("rib fractures",)).setup("fit")
    # A classifier from elsewhere is tested on the findings that this set labels.
    assert set(datamodule(folder, ("Edema", "Nodule")).evaluation("test").labels["finding"]) == {"Edema"}
    with pytest.raises(
        PreparedDataError, match="no labelled test images .* Nodule on; it labels Cardiomegaly, "
    ):
        datamodule(folder, ("Nodule",)).evaluation("test")
