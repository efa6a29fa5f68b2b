"""Frozen encoders: nothing before the projections moves, and features computed once train and test as images do."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import pytest
import torch
from pytorch_lightning import Trainer

from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.evaluation import Grounding, Retrieval, ZeroShotClassification
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.similarity import LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences
from medclip_dcl.objectives import ConstantClassProbability
from medclip_dcl.use.model import load
from tests.models.test_image_text import Losses, trainer
from tests.program import verb

encode = verb("encode")

BACKBONES = ["image_encoder.backbone", "text_encoder.transformer"]


@pytest.fixture(scope="module")
def encoded(small_set, exported, tmp_path_factory) -> Path:
    """A copy of `small_set` with the features of `exported` at 32 pixels."""
    folder = shutil.copytree(small_set, tmp_path_factory.mktemp("encoded") / "set")
    words = [str(exported), str(folder), "--device", "cpu"]
    encode([*words, "--image_size", "32", "--name", "once"])
    return folder


def build(small_bert, source: Path | str | None, dim: int = 7, **options) -> ImageTextModel:
    """Projections of another size than the source's; dropout and a projection with BatchNorm of its own."""
    torch.manual_seed(4)
    return ImageTextModel(
        ResNetRegions(dim=dim, stride=16, projection="mlp", width=16),
        BertSentences(str(small_bert), dim=dim, dropout=0.5),
        LSENonLocal(dim=dim),
        ConstantClassProbability(0.05),
        **{
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "frozen": True,
            "init_from": source and str(source),
            "init_parts": source and BACKBONES,
            **options,
        },
    )


def data(folder: Path, **options) -> ImageTextDataModule:
    plain = {"image_size": 32, "crop_size": 32, "brightness": 0.0, "contrast": 0.0, "batch_size": 8}
    return ImageTextDataModule(str(folder), **{**plain, "sentences": "all", "num_workers": 0, **options})


def fitted(
    model: ImageTextModel, module: ImageTextDataModule, folder: Path, **options
) -> tuple[Trainer, list[float]]:
    losses = Losses()
    fit = trainer(folder, **{"max_epochs": 2, "callbacks": [losses], **options})
    fit.fit(model, module)
    return fit, losses.values


def test_only_projections_and_similarity_are_trained(small_bert, encoded, exported, tmp_path, recwarn):
    model = build(small_bert, exported)
    before = {name: value.clone() for name, value in model.network.state_dict().items()}
    source = load(exported).network.state_dict()
    # Augmented images: nothing but the encoders stays as it is.
    fitted(model, data(encoded, crop_size=28, brightness=0.2), tmp_path, max_epochs=1)
    moved = {
        name for name, value in model.network.state_dict().items() if not torch.equal(value, before[name])
    }
    kept = before.keys() - moved
    assert {name for name in kept if "projection" in name} == set()
    assert {name.split(".")[1] for name in moved} == {"projection", "q", "log_gamma2"}
    assert [name for name in kept if not torch.equal(before[name], source[name])] == []
    network = model.train().network
    are_training = {
        name.split(".")[1] for name, part in network.named_modules() if "." in name and part.training
    }
    assert are_training == {"projection", "q"}
    trained = {name.split(".")[1] for name, p in network.named_parameters() if p.requires_grad}
    assert trained == {"projection", "q", "log_gamma2"}
    assert not [warning for warning in recwarn if "eval mode" in str(warning.message)]


def test_training_on_features_equals_training_on_images(small_bert, encoded, exported, tmp_path):
    of_images, losses = fitted(build(small_bert, exported), data(encoded), tmp_path)
    of_features, again = fitted(build(small_bert, exported), data(encoded, features="once"), tmp_path)
    assert again == pytest.approx(losses, rel=2e-3) and len(losses) == 6
    assert losses[-1] < losses[0]
    name = "validate/loss"
    assert float(of_features.callback_metrics[name]) == pytest.approx(
        float(of_images.callback_metrics[name]), rel=2e-3
    )


@pytest.mark.slow
def test_a_resumed_run_on_features_ends_alike(small_bert, encoded, exported, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "estimated_stepping_batches", 6)
    whole = build(small_bert, exported)
    fitted(whole, data(encoded, features="once"), tmp_path)
    half, _ = fitted(build(small_bert, exported), data(encoded, features="once"), tmp_path, max_epochs=1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = build(small_bert, None)
    trainer(tmp_path, max_epochs=2).fit(
        resumed, data(encoded, features="once"), ckpt_path=tmp_path / "half.ckpt", weights_only=True
    )
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    assert ImageTextModel.load_from_checkpoint(tmp_path / "half.ckpt").frozen


@pytest.mark.slow
def test_a_test_on_features_equals_one_on_images(small_bert, encoded, exported, tmp_path):
    model = build(small_bert, exported)

    def numbers(**options) -> Mapping[str, float]:
        callbacks = [ZeroShotClassification(min_cases=1), Grounding(), Retrieval()]
        return trainer(tmp_path, callbacks=callbacks).test(model, data(encoded, **options), verbose=False)[0]

    expected, found = numbers(), numbers(features="once", batch_size=5)
    assert found.keys() == expected.keys() and {"test/auc", "test/cnr", "test/medr"} <= found.keys()
    assert found == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(
    ("options", "of_data", "message"),
    [
        ({"frozen": False}, {}, "whose encoders are trained needs the images; set model.init_args.frozen: true"),
        ({}, {"crop_size": 31}, "are of whole images, so nothing can vary them; set data.crop_size: null"),
        ({}, {"contrast": 0.1}, "nothing can vary them"),
        ({}, {"image_size": 48, "crop_size": None}, r"are of other images, with image_size 32 \(here: 48\)"),
        ({}, {"evaluation_crop": 16}, r"with evaluation_size 32 \(here: 16\)"),
        ({"init_from": None, "init_parts": None}, {}, "are of another image_encoder than this model's"),
    ],
)  # fmt: skip
def test_features_that_do_not_fit_are_refused(
    options, of_data, message, small_bert, encoded, exported, tmp_path
):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path).fit(
            build(small_bert, exported, **options), data(encoded, features="once", **of_data)
        )


def test_features_know_their_set_and_their_files(encoded, tmp_path):
    folder = shutil.copytree(encoded, tmp_path / "set")
    images = (folder / "images.parquet").read_bytes()
    pd.read_parquet(folder / "images.parquet")[::-1].to_parquet(folder / "images.parquet", index=False)
    with pytest.raises(
        ValueError, match="was made of another content of .* images or tables have changed since"
    ):
        data(folder, features="once").provided()
    (folder / "images.parquet").write_bytes(images)
    rows = folder / "features/once/images.npy"
    rows.write_bytes(rows.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match="no finished features named once .*mmap.*; make them, after deleting"
    ):
        data(folder, features="once").provided()


def test_what_a_fingerprint_depends_on(small_bert):
    """Dropout and the projections change nothing that is computed before them."""

    def fingerprint(dim: int = 4, **options) -> dict[str, str]:
        text = BertSentences(str(small_bert), dim=dim, **options)
        torch.manual_seed(0)
        images = ResNetRegions(dim=dim, stride=16, width=16)
        return ImageTextModel(images, text, LSENonLocal(dim=dim)).network.encoders_fingerprint()

    expected = fingerprint()
    assert set(fingerprint(pooling="mean").items()) & set(expected.items()) == {
        ("image_encoder", expected["image_encoder"])
    }
    assert fingerprint(final_period=False)["text_encoder"] != expected["text_encoder"]
    assert fingerprint(dim=6, dropout=0.3, projection="mlp") == expected
