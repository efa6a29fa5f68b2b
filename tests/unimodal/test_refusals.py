"""Unimodal settings that are refused, each in one line that names setting and value."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from medclip_dcl.common.errors import MissingFileError, UserError
from medclip_dcl.unimodal import (
    Blocks,
    CrossView,
    SimCLR,
    SmallConvNet,
    UnimodalDataModule,
    UnimodalEvaluation,
    UnimodalModel,
    average_k_metrics,
    k_negative_loss,
    margin_loss,
    simclr_loss,
)
from medclip_dcl.unimodal.arrays import read_images
from medclip_dcl.unimodal.augmentation import Augmentation
from medclip_dcl.unimodal.data import ViewsRequirements
from tests.unimodal.test_arrays import write_stl10

VIEWS = torch.ones(2, 3)


def data(fields: tuple[str, ...] = (), members: int = 0, **options: Any) -> None:
    found = UnimodalDataModule(**options)
    found.connect(ViewsRequirements(2, fields, members))
    found.load("fit")


def model(**options: Any) -> None:
    UnimodalModel(SmallConvNet(4), SimCLR(), **options)


def too_many_rivals() -> None:
    average_k_metrics(torch.eye(9), torch.arange(9), torch.eye(9), 9)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (data, {"fraction": 0.0}, ["data.fraction", "(0, 1]", "0.0"]),
        (data, {"fraction": 0.001}, ["data.fraction", "0.001 keeps none of the 121 training images of class 5"]),
        (data, {"fraction": 0.5, "classes": ["0", "1"]}, ["data.selected", "some of 0, 1 for data.fraction 0.5"]),
        (data, {"classes": ["0", "10", "frog"]}, ["data.classes", "0, 1, 2", "found 10, frog"]),
        (data, {"classes": ["3", "3"]}, ["data.classes", "at least two", "['3', '3']"]),
        (data, {"selected": ["7"], "classes": ["3", "4"]}, ["data.selected", "some of 3, 4", "found 7"]),
        (data, {"files": "here"}, ["data.files", "come with scikit-learn", "here"]),
        (data, {"source": "cifar10"}, ["data.files", "found None for cifar10"]),
        (data, {"batch_size": 1199}, ["1198 training images", "batch of 1199"]),
        (Augmentation, {"crop_scale": 0.0}, ["data.augmentation", "(0, 1]", "crop_scale=0.0"]),
        (Augmentation, {"jitter": [0.4, 0.4, 0.4]}, ["four strengths", "[0.4, 0.4, 0.4]"]),
        (Augmentation, {"jitter": [0.4, -0.4, 0.4, 0.6]}, ["at most 0.5", "-0.4"]),
        (data, {"fraction": 0.01, "members": 1}, ["data.fraction", "two training images of every class", "0.01"]),
        (data, {"fields": ("rho", "log_p")}, ["requires log_p of an image", "class_id, rho, lowest_rho"]),
        (model, {"learning_rate": 0.0}, ["learning_rate: expected a number in (0, inf)"]),
        (model, {"hidden": 0, "batch_norm": True}, ["model.batch_norm: expected false", "(hidden 0), found true"]),
        (CrossView, {"gamma2": 0.0}, ["objective.gamma2", "(0, inf)", "0.0"]),
        (SimCLR, {"gamma2": 0.0}, ["objective.gamma2", "(0, inf)", "0.0"]),
        (SimCLR, {"n_positives": 2}, ["class_probability and no loss for n_positives 2"]),
        (Blocks, {"k": 0}, ["objective.k: expected at least 1, found 0"]),
        (UnimodalEvaluation, {"label_fractions": [0.5, 0.0]}, ["label_fractions", "(0, 1]", "0.0"]),
        (UnimodalEvaluation, {"temperature": 0.0}, ["temperature", "(0, inf)", "0.0"]),
        (too_many_rivals, {}, ["average_k", "1 to 8 rivals for 9 classes, found 9"]),
        (margin_loss, {"margins": torch.ones(2, 1), "loss": "Hinge"}, ["loss", "hinge", "'Hinge'"]),
        (simclr_loss, {"first": VIEWS, "second": VIEWS, "class_probability": 1.0}, ["class_probability", "[0, 1)"]),
        (simclr_loss, {"first": VIEWS, "second": VIEWS, "class_probability": torch.zeros(3)}, ["(4,), found (3,)"]),
    ],
)  # fmt: skip
def test_a_setting_is_refused_by_name(make, options, words):
    with pytest.raises(ValueError) as error:
        make(**options)
    assert all(part in str(error.value) for part in words), error.value
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("_shapes_unchecked")
def test_shapes_that_would_broadcast_are_refused():
    ones = torch.ones
    for call in (
        lambda: k_negative_loss(VIEWS, VIEWS[:1], ones(2, 1, 3)),
        lambda: k_negative_loss(VIEWS, VIEWS, ones(2, 0, 3)),
        lambda: k_negative_loss(ones(3, 3), ones(3, 3), ones(3, 3, 3, 3)),
        lambda: Blocks(2, 3)(ones(3, 3, 4), {}),
        lambda: SimCLR()(ones(4, 2, 4), {}),
        lambda: average_k_metrics(torch.eye(3) * torch.nan, torch.arange(3), torch.eye(3), 1),
    ):
        with pytest.raises(ValueError, match="expected"):
            call()


def test_folders_without_the_files_are_named(tmp_path):
    for source, folder, message in (
        ("cifar10", tmp_path / "nowhere", r"no folder .*nowhere \(looked at /"),
        ("cifar10", tmp_path, "no CIFAR-10 in .*; expected the files data_batch_1 .*unpacked"),
        ("class_folders", tmp_path, "expected train and val in .*each class; .*train"),
    ):
        with pytest.raises(MissingFileError, match=message):
            read_images(source, str(folder), 8)


def test_fields_of_unlabelled_images_are_refused(tmp_path):
    folder = str(write_stl10(tmp_path)[0])
    for name in ("rho", "class_id"):
        with pytest.raises(
            UserError, match=f"requires {name} of an image, stl10 has unlabelled images; .*classes"
        ):
            data((name,), source="stl10", files=folder, batch_size=5)
