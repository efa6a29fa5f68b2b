"""The classifier: its loss, what is trained at which rate, what stays frozen, where it starts from, how it is kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from pytorch_lightning import Callback, Trainer
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from medclip_dcl import load
from medclip_dcl.common.findings import CHEX5
from medclip_dcl.data.labelled import LabelledDataModule
from medclip_dcl.models.classifier import Classifier, finding_losses
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.similarity import LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences
from medclip_dcl.pictures.transforms import GreyCrop, batch_of, load_grey
from tests.models.test_image_text import trainer as quick
from tests.models.test_resuming import assert_same
from tests.small import LinearPatches

NAN = float("nan")
WHOLE: dict[str, Any] = {"crop_size": None, "brightness": 0.0, "contrast": 0.0}


class Squashed(LinearPatches):
    """Bounded features."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).tanh()


def datamodule(folder: Path, **options: Any) -> LabelledDataModule:
    defaults: dict[str, Any] = {"image_size": 32, "crop_size": 24, "batch_size": 8, "num_workers": 0}
    return LabelledDataModule(str(folder), **(defaults | options))


def trainer(folder: Path, epochs: int, *callbacks: Callback, **options: Any) -> Trainer:
    return quick(folder, max_epochs=epochs, callbacks=list(callbacks), num_sanity_val_steps=0, **options)


def resnet(**options: Any) -> ResNetRegions:
    return ResNetRegions(dim=5, stride=16, **{"width": 8, **options})


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


class Watch(Callback):
    """The encoder's state and the rates after each optimiser step."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []
        self.rates: list[list[float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.states.append(state_of(pl_module.network.image_encoder))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])


# Loss


def test_losses_are_a_loop_over_the_labelled_entries():
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(7, 3, generator=generator, dtype=torch.float64)
    labels = torch.tensor(
        [[1.0, 0, NAN], [NAN] * 3, [0, 0, 1], [1, NAN, NAN], [0, 1, 0], [1, 1, 1], [NAN, 0, 0]]
    )
    weight = torch.tensor([0.5, 1.0, 3.0])
    expected = []
    for row, targets in zip(logits.tolist(), labels.tolist(), strict=True):
        for finding, (logit, target) in enumerate(zip(row, targets, strict=True)):
            if math.isnan(target):
                continue
            p = 1 / (1 + math.exp(-logit))
            expected.append(-weight[finding].item() * math.log(p) if target else -math.log(1 - p))
    assert finding_losses(logits, labels.double(), weight).tolist() == pytest.approx(expected, rel=1e-9)


def test_a_batch_without_labels_teaches_nothing():
    model = Classifier(["Edema", "Fracture"], Squashed(6))
    loss = model._loss({"images": torch.rand(3, 3, 8, 8), "labels": torch.full((3, 2), NAN)})
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


# Linear probe


@pytest.fixture(scope="module")
def probed(small_set, tmp_path_factory) -> tuple[Classifier, dict[str, Tensor], list[int]]:
    """A probe trained for five epochs, its encoder before, and the sizes of all batches that were encoded."""
    torch.manual_seed(0)
    model = Classifier(["Edema", "Pneumonia"], resnet(), frozen=True, learning_rate=0.01)
    before, encoded = state_of(model.network.image_encoder), []
    backbone: Any = model.network.image_encoder.backbone
    backbone.register_forward_pre_hook(lambda _, inputs: encoded.append(len(inputs[0])))
    model.train()
    trainer(tmp_path_factory.mktemp("probe"), 5).fit(model, datamodule(small_set, **WHOLE))
    return model, before, encoded


def test_a_probe_encodes_once_and_keeps_the_encoder(probed):
    model, before, encoded = probed
    assert sum(encoded) == 24 + 8
    assert any("running_mean" in name for name in before)
    assert_same(before, state_of(model.network.image_encoder))
    assert model.network.head.weight.abs().max() > 0
    assert not model.train().network.image_encoder.training


def test_probed_features_are_the_images_standardised(probed, small_set):
    model, _, _ = probed
    data = datamodule(small_set, **WHOLE)
    model.trainer = trainer(Path("unused"), 1)
    data.connect(model.requirements())
    data.setup("fit")
    features = data.features("train")
    images = torch.cat([batch["images"] for batch in data._image_loader(data._targets("train").dicom_ids)])
    with torch.no_grad():
        model.eval()
        assert torch.allclose(features, model.network.features(images), atol=1e-5)
        scaled = (features - model.network.feature_mean) / model.network.feature_std
        assert torch.allclose(model(images), model.network.head(scaled), atol=1e-4)
    assert scaled.mean(0).abs().max() < 1e-4
    deviation = features.std(0, correction=0)
    varies = deviation > 0.01 * deviation.mean()
    assert varies.any() and torch.allclose(scaled.std(0, correction=0)[varies], torch.ones(1), atol=1e-3)


def test_a_probe_is_logistic_regression_on_the_features(small_set, tmp_path, monkeypatch):
    options: dict[str, Any] = {"frozen": True, "balanced": True, "learning_rate": 0.4, "weight_decay": 0.0}
    model = Classifier(["Edema"], Squashed(6), **options)
    data = datamodule(small_set, batch_size=24, **WHOLE)
    # Labels that have nothing to do with the images, with more negative ones: no plane separates them.
    labels = (torch.rand(42, generator=torch.Generator().manual_seed(2)) < 0.4).float()
    all_targets = LabelledDataModule._targets

    def own_labels(self, use):
        found = all_targets(self, use)
        return type(found)(
            found.dicom_ids, found.paths, found.subject_ids, labels[: len(found.dicom_ids), None]
        )

    monkeypatch.setattr(LabelledDataModule, "_targets", own_labels)
    trainer(tmp_path, 200, limit_val_batches=0).fit(model, data)
    features = data.features("train")
    scaled = ((features - model.network.feature_mean) / model.network.feature_std).numpy()
    target = data._targets("train").labels[:, 0].numpy()
    weights = np.where(target == 1, (target == 0).sum() / (target == 1).sum(), 1.0)
    expected = LogisticRegression(C=np.inf, max_iter=10_000, tol=1e-10).fit(scaled, target, weights)
    found = model.network.classify(features)[:, 0].detach().numpy()
    assert found == pytest.approx(expected.decision_function(scaled), abs=0.02)
    assert np.abs(found).max() > 0.3


# Fine-tuning


def test_the_encoder_is_frozen_then_warms_up(small_set, tmp_path):
    options: dict[str, Any] = {"learning_rate": 0.01, "encoder_learning_rate": 0.004}
    model = Classifier(["Edema"], resnet(), frozen_steps=4, warmup_steps=1, **options)
    before, watch = state_of(model.network.image_encoder), Watch()
    trainer(tmp_path, 3, watch).fit(model, datamodule(small_set))
    assert len(watch.states) == 9
    for state in watch.states[:4]:
        assert_same(before, state)
    after = watch.states[4]
    for name in ("0.weight", "6.1.conv2.weight", "1.running_mean", "6.1.bn2.bias"):
        assert not torch.equal(before[f"backbone.{name}"], after[f"backbone.{name}"]), name
    assert torch.equal(before["projection.weight"], watch.states[-1]["projection.weight"])
    head = [rates[-1] for rates in watch.rates]
    encoder = [rates[0] for rates in watch.rates]
    assert head[:2] == pytest.approx([0.005, 0.01])
    assert encoder[:6] == pytest.approx([0, 0, 0, 0, 0.002, 0.004])
    assert head[-1] < head[1] and encoder[-1] < encoder[5]


def test_fine_tuning_scales_the_first_features(small_set, tmp_path, monkeypatch):
    monkeypatch.setattr("medclip_dcl.models.classifier._SCALED_BY", 9)
    torch.manual_seed(0)
    model = Classifier(["Edema"], resnet(), learning_rate=0.01)
    images = pd.read_parquet(small_set / "images.parquet").query("use == 'train'").sort_values("dicom_id")[:9]
    shown = batch_of(
        [GreyCrop(load_grey((small_set / "images" / path).read_bytes(), 32)) for path in images["path"]]
    )["images"]
    with torch.no_grad():
        features = model.eval().network.features(shown)
    trainer(tmp_path, 2).fit(model.train(), datamodule(small_set))
    torch.testing.assert_close(model.network.feature_mean, features.mean(0))
    with torch.no_grad():
        assert not torch.allclose(model.eval().network.features(shown).mean(0), features.mean(0), rtol=0.05)


def test_each_stage_has_its_rate(small_set):
    rates: dict[str, Any] = {"learning_rate": 0.3, "encoder_learning_rate": 0.08, "layer_decay": 0.5}
    model = Classifier(None, ResNetRegions(dim=5, width=8), **rates, weight_decay=0.1)
    assert model.findings == tuple(CHEX5)
    model.trainer = trainer(Path("unused"), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "estimated_stepping_batches", 7)
        groups = model.configure_optimizers()["optimizer"].param_groups
    name_of = {id(p): name for name, p in model.named_parameters()}
    rate = {name_of[id(p)]: group["initial_lr"] for group in groups for p in group["params"]}
    decayed = {name_of[id(p)] for group in groups for p in group["params"] if group["weight_decay"]}
    expected = {"backbone.0": 0.005, "backbone.1": 0.005, "backbone.4": 0.01, "backbone.5": 0.02}
    expected |= {"backbone.6": 0.04, "backbone.7": 0.08}
    assert len(rate) == sum(len(group["params"]) for group in groups)
    for name, parameter in model.named_parameters():
        part = ".".join(name.split(".")[2:4])
        if name.startswith("network.head"):
            assert rate[name] == 0.3
        elif part.startswith("projection"):
            assert name not in rate and not parameter.requires_grad
        else:
            assert rate[name] == pytest.approx(expected[part]), name
        assert (name in decayed) == (name in rate and parameter.dim() >= 2)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_resumed_equals_uninterrupted(small_set, tmp_path, frozen):
    class Saved(Callback):
        """Checkpoints in the middle of an epoch and at its end."""

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if trainer.global_step in (5, 6):
                trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    def fit(*callbacks: Callback, checkpoint: Path | None = None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        options: dict[str, Any] = (
            {"frozen": True} if frozen else {"frozen_steps": 4, "encoder_learning_rate": 1e-3}
        )
        model = Classifier(["Edema", "Fracture"], resnet(), balanced=True, learning_rate=0.01, **options)
        data = datamodule(small_set, **(WHOLE if frozen else {}))
        trainer(tmp_path, 4, *callbacks).fit(model, data, ckpt_path=checkpoint, weights_only=True)
        return state_of(model)

    whole = fit(Saved())
    for step in (5, 6):
        assert_same(whole, fit(checkpoint=tmp_path / f"{step}.ckpt"))


# Two processes


def double_model(**options: Any) -> Classifier:
    torch.manual_seed(3)
    model = Classifier(["Edema", "Fracture", "Pneumonia"], Squashed(6), **options).double()
    for parameter in model.network.head.parameters():
        nn.init.normal_(parameter)
    model.positive_weight.copy_(torch.tensor([0.5, 2.0, 1.0]))
    return model


CASES: dict[str, dict[str, Any]] = {
    "fine-tuning": {},
    "warm-up": {"frozen_steps": 5},
    "probe": {"frozen": True},
}


def labelled_batch() -> dict[str, Tensor]:
    """Five images, of which the second process has two with a single labelled entry."""
    generator = torch.Generator().manual_seed(4)
    images = torch.rand(5, 3, 12, 8, generator=generator, dtype=torch.float64)
    labels = torch.tensor(
        [[1.0, 0, 1], [0, 0, NAN], [1, 1, 0], [NAN] * 3, [NAN, 1, NAN]], dtype=torch.float64
    )
    return {"images": images, "labels": labels}


def part_of(batch: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    return {key: values[:3] if rank == 0 else values[3:] for key, values in batch.items()}


def step(model: Classifier, batch: dict[str, Tensor], world: int = 1) -> dict[str, Tensor]:
    """Loss and parameters after a step; gradients are averaged as by DistributedDataParallel, which wants them all."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    loss = model._loss(batch)
    loss.backward()
    shared = loss.detach().clone()
    if world > 1:
        assert all(parameter.grad is not None for parameter in trained)
        for tensor in (shared, *(p.grad for p in trained if p.grad is not None)):
            dist.all_reduce(tensor)
            tensor.div_(world)
    model.on_before_optimizer_step(optimizer)
    optimizer.step()
    return {"loss": shared, **{name: p.detach() for name, p in model.named_parameters()}}


def steps_of_two_processes(rank: int, folder: Path) -> None:
    """Called in each of two processes by tests/models/test_two_processes.py."""
    for name, options in CASES.items():
        found = step(double_model(**options), part_of(labelled_batch(), rank), world=2)
        torch.save(found, folder / f"{name}{rank}.pt")


def assert_steps_are_those_of_one_process(folder: Path) -> None:
    for name, options in CASES.items():
        expected = step(double_model(**options), labelled_batch())
        before = double_model(**options)
        losses = finding_losses(
            before(labelled_batch()["images"]), labelled_batch()["labels"], before.positive_weight
        )
        assert len(losses) == 9 and expected["loss"] == pytest.approx(losses.mean().item(), rel=1e-12)
        for rank in range(2):
            found = torch.load(folder / f"{name}{rank}.pt", weights_only=True)
            for key in expected:
                torch.testing.assert_close(
                    found[key], expected[key], rtol=1e-12, atol=1e-14, msg=f"{name}: {key}"
                )
        start = dict(before.named_parameters())["network.image_encoder.map.weight"]
        moved = not torch.equal(expected["network.image_encoder.map.weight"], start)
        assert moved == (name == "fine-tuning")


# Where it starts from


@pytest.fixture(scope="module")
def sources(small_bert, tmp_path_factory) -> dict[str, Path]:
    """An image-text checkpoint, and the same exported."""
    folder = tmp_path_factory.mktemp("sources")
    torch.manual_seed(7)
    model = ImageTextModel(resnet(), BertSentences(str(small_bert), dim=5), LSENonLocal(dim=5))
    model.network.set_normalisation((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    run = trainer(folder, 1)
    run.strategy.connect(model)
    run.save_checkpoint(folder / "model.ckpt", weights_only=True)
    model.network.save_pretrained(folder / "exported")
    return {name: folder / name for name in ("model.ckpt", "exported")}


@pytest.mark.parametrize("name", ["model.ckpt", "exported"])
def test_it_starts_from_a_described_encoder(sources, name):
    model = Classifier(init_from=str(sources[name]))
    expected = load(sources[name]).image_text
    assert_same(state_of(expected.image_encoder), state_of(model.network.image_encoder))
    assert model.initial_weights is not None
    left_out = model.initial_weights.left_out
    assert set(left_out) == {x for x in expected.state_dict() if not x.startswith("image_encoder.")}
    assert model.network.mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    images = torch.rand(2, 3, 48, 48)
    with torch.no_grad():
        mean_feature = model.eval().network.features(images)
        regions = expected.feature_map(images).flatten(2).mean(2)
        projection: Any = expected.image_encoder.projection
        projected = mean_feature @ projection.weight[:, :, 0, 0].T + projection.bias
    torch.testing.assert_close(projected, regions, rtol=1e-4, atol=1e-5)


def test_weights_of_another_encoder_are_refused(sources):
    with pytest.raises(ValueError, match="training cannot start from it: .*backbone.7.0.conv1.weight"):
        Classifier(image_encoder=ResNetRegions(dim=5, width=8), init_from=str(sources["model.ckpt"]))


def save(model: Classifier, file: Path) -> None:
    run = trainer(file.parent, 1)
    run.strategy.connect(model)
    run.save_checkpoint(file, weights_only=True)


def test_a_checkpoint_needs_nothing_else(sources, tmp_path):
    options: dict[str, Any] = {"layer_decay": 0.5, "balanced": True, "frozen_steps": 3}
    model = Classifier(["Fracture", "Edema"], None, str(sources["model.ckpt"]), **options)
    nn.init.normal_(model.network.head.weight)
    model.network.standardise(torch.randn(9, model.network.image_encoder.feature_dim))
    model.positive_weight.copy_(torch.tensor([2.0, 3.0]))
    model.network.image_size = 48
    save(model, tmp_path / "classifier.ckpt")
    found = Classifier.load_from_checkpoint(tmp_path / "classifier.ckpt")
    assert_same(state_of(model), state_of(found))
    assert found.network.config() == model.network.config() and found.findings == ("Fracture", "Edema")
    assert found.description() == model.description() and not found.training
    assert found.initial_weights == model.initial_weights is not None
    assert [p.requires_grad for p in found.parameters()] == [p.requires_grad for p in model.parameters()]
    images = torch.rand(2, 3, 48, 48)
    with torch.no_grad():
        torch.testing.assert_close(found(images), model.eval()(images))
    again = Classifier(["Pneumonia"], init_from=str(tmp_path / "classifier.ckpt"))
    assert_same(state_of(model.network.image_encoder), state_of(again.network.image_encoder))
    assert again.network.mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    content = torch.load(tmp_path / "classifier.ckpt", weights_only=True)
    assert content["format_version"] == 3 and content["network"]["findings"] == ["Fracture", "Edema"]
    assert load(tmp_path / "classifier.ckpt").network.kind == "classifier"


def test_checkpoints_of_other_models_are_refused(sources, tmp_path):
    with pytest.raises(ValueError, match="expected kind classifier, found image-text"):
        Classifier.load_from_checkpoint(sources["model.ckpt"])
    content = torch.load(sources["model.ckpt"], weights_only=True)
    model = Classifier(["Edema"], resnet())
    with pytest.raises(
        ValueError,
        match="expected kind classifier, found image-text; .* give it as model.init_args.init_from",
    ):
        model.on_load_checkpoint(content)
    save(Classifier(["Fracture"], ResNetRegions(dim=5, width=8)), tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="trained with another image_encoder and findings "):
        model.on_load_checkpoint(torch.load(tmp_path / "other.ckpt", weights_only=True))
