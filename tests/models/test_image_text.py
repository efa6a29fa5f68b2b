"""ImageTextModel: one step is the written-down loss; schedule, decay groups and checkpoints."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pytorch_lightning import Callback, LightningDataModule, Trainer

from medclip_dcl.common.errors import UserError
from medclip_dcl.data import by_length
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.models.optimisation import (
    adamw_warmup_cosine,
    learning_rates,
    parameter_groups,
    warmup_cosine,
)
from medclip_dcl.models.trained_model import Batch, _with_strides
from medclip_dcl.networks.similarity import LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences
from medclip_dcl.objectives import (
    ClassProbability,
    LanguageModelClassProbability,
    NegativeWeights,
    PosteriorTargets,
    RankedByText,
    contrastive_loss,
)
from medclip_dcl.training.class_probability import ClassProbabilityTable
from medclip_dcl.use.model import load
from tests.networks.test_text_encoder import of_family
from tests.objectives.test_anchor_losses import Scaled
from tests.small import LinearPatches, PatchRegions


def build(small_bert, **options) -> ImageTextModel:
    torch.manual_seed(2)
    return ImageTextModel(
        PatchRegions(),
        BertSentences(str(small_bert), dim=16),
        LSENonLocal(dim=16),
        **{
            "class_probability": LanguageModelClassProbability(),
            "learning_rate": 1e-3,
            "warmup_steps": 2,
            **options,
        },
    )


def trainer(folder, **options) -> Trainer:
    off = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    return Trainer(default_root_dir=folder, accelerator="cpu", **{**off, **options})


class Losses(Callback):
    """The loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.values.append(float(outputs["loss"]))


def data_of(folder: Path, **options: Any) -> ImageTextDataModule:
    return ImageTextDataModule(
        str(folder), **{"image_size": 48, "crop_size": 32, "num_workers": 0, **options}
    )


@pytest.fixture
def data(small_set) -> ImageTextDataModule:
    return data_of(small_set, batch_size=8)


def first_batch(model: ImageTextModel, data: ImageTextDataModule) -> dict[str, Any]:
    data.connect(model.requirements())
    data.setup("fit")
    return next(iter(data.train_dataloader()))


def test_training_learns_and_its_settings_are_saved(small_bert, data, tmp_path):
    model = build(small_bert)
    data.sentences = "all"
    losses = Losses()
    fit = trainer(tmp_path, max_epochs=8, limit_val_batches=0, callbacks=[losses])
    fit.fit(model, data)
    first, last = sum(losses.values[:6]) / 6, sum(losses.values[-6:]) / 6
    assert last < 0.7 * first
    assert model.network.image_size == 48
    assert fit.logged_metrics["train/class_probability"] > 0
    fit.save_checkpoint(tmp_path / "a.ckpt")
    again = ImageTextModel.load_from_checkpoint(tmp_path / "a.ckpt")
    assert again.class_probability.config() == {"a": 0.2, "k": 0.35, "max_eta": 0.3}
    assert again.learning_rate == 1e-3 and again.network.image_size == 48


class OwnData(LightningDataModule):
    """A user's datamodule: it knows nothing of the model, and says only the size of its images."""

    image_size = 48

    def __init__(self, data: ImageTextDataModule, model: ImageTextModel) -> None:
        super().__init__()
        data.connect(model.requirements())
        data.setup("fit")
        self.train_dataloader = data.train_dataloader  # type: ignore[method-assign]


def test_a_users_datamodule_trains(small_bert, data, tmp_path):
    model = build(small_bert)
    own = OwnData(data, model)
    fit = trainer(tmp_path, max_steps=1, limit_val_batches=0, num_sanity_val_steps=0)
    fit.fit(model, own)
    assert fit.global_step == 1
    assert (model.network.image_size, model.network.crop_size) == (48, None)
    own.image_size = 50
    with pytest.raises(UserError, match="data.image_size 50 must be a multiple of .* stride, 16"):
        trainer(tmp_path, max_steps=1).fit(model, own)


def test_mean_in_grey_levels_is_tested_not_trained(small_bert, data, tmp_path):
    model, old = build(small_bert), tmp_path / "old.ckpt"
    model.network.set_normalisation([123.675, 116.28, 103.53], [58.395, 57.12, 57.375])
    fit = trainer(tmp_path, max_steps=1)
    with pytest.raises(UserError, match="image_encoder.mean and std: .* found 123.675; divide"):
        fit.fit(model, data)
    fit.save_checkpoint(old)
    for read in (load, ImageTextModel.load_from_checkpoint):
        with pytest.warns(UserWarning, match="mean and std: .* found 123.675"):
            read(old)
    model = build(small_bert)
    with pytest.warns(UserWarning, match="mean and std: .* found 123.675"):
        trainer(tmp_path, limit_test_batches=1).test(model, data, ckpt_path=str(old), weights_only=True)
    assert model.network.std.flatten().tolist() == pytest.approx([58.395, 57.12, 57.375])


class Learned(ClassProbability):
    """A user's rule: a factor that is learned from 0 on, times a column of the user's file."""

    requires = ("difficulty", "n_reports", "sentence_embedding")

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.start = start
        self.scale = torch.nn.Parameter(torch.tensor(start))

    def config(self) -> dict[str, Any]:
        return {"start": self.start}

    def forward(self, difficulty, n_reports, sentence_embedding):
        assert sentence_embedding.shape == (len(difficulty), 6)
        assert difficulty.dtype == torch.float32 and n_reports.dtype == torch.int64
        eta = self.scale * difficulty
        return self.capped(eta + (eta.clamp(min=0) - eta).detach())  # a clamp alone has no gradient at 0


class OtherPatients(NegativeWeights):
    """A user's rule: images of the anchor's patient are no negatives."""

    candidate_requires = ("subject_id",)

    def config(self) -> dict[str, Any]:
        return {}

    def pair_weights(self, anchor, candidate, logits):
        assert candidate["subject_id"].dtype == torch.int64
        return (anchor["subject_id"][:, None] != candidate["subject_id"]).float()


def test_a_users_objective_trains_on_its_file(small_bert, embedded_set, tmp_path):
    file = tmp_path / "my_fields.parquet"
    pd.DataFrame({"sentence_id": range(8, -1, -1), "difficulty": [x / 9 for x in range(9)]}).to_parquet(file)
    data = data_of(embedded_set, fields=str(file), batch_size=24)
    model = build(small_bert, negative_weights=OtherPatients())
    model.objective.class_probability = rule = Learned()
    fit = trainer(tmp_path, max_epochs=2, callbacks=[ClassProbabilityTable()])
    fit.fit(model, data)
    batch = next(iter(data.train_dataloader()))
    expected = [(8 - i) / 9 for i in batch["sentence_id"].tolist()]
    assert batch["anchor"]["difficulty"].tolist() == pytest.approx(expected)
    # 24 images of 12 patients: of 23 negatives one does not count.
    assert fit.logged_metrics["train/weight"].item() == pytest.approx(22 / 23)
    learned = rule.scale.item()
    assert math.isfinite(learned) and learned != 0
    table = pd.read_parquet(tmp_path / "class_probability.parquet")
    assert {"difficulty", "n_reports", "eta"} <= set(table) and (table["eta"] == 0).all()
    assert "sentence_embedding" not in table  # as large as the embeddings
    fit.save_checkpoint(tmp_path / "a.ckpt")
    again = ImageTextModel.load_from_checkpoint(tmp_path / "a.ckpt")
    assert again.class_probability.state_dict()["scale"].item() == learned
    assert load(tmp_path / "a.ckpt").network.image_size == 48


def test_a_users_loss_is_trained_and_comes_back(small_bert, data, tmp_path):
    model = build(small_bert, loss=Scaled(0.5), image_to_text=0.2)
    fit = trainer(tmp_path, max_epochs=1)
    fit.fit(model, data)
    learned = model.objective.state_dict()["loss.scale"].item()
    assert learned != 0.5 and fit.logged_metrics["train/scale"].item() == pytest.approx(learned, abs=2e-3)
    fit.save_checkpoint(tmp_path / "a.ckpt")
    again = ImageTextModel.load_from_checkpoint(tmp_path / "a.ckpt")
    assert isinstance(again.objective.loss, Scaled) and again.objective.loss.start == 0.5
    assert again.objective.loss.scale.item() == learned


def test_a_step_is_the_written_loss(small_bert, data):
    model = build(small_bert).eval()
    batch = first_batch(model, data)
    logits = model(batch["images"], batch["tokens"], batch["lengths"], batch["image_scale"])
    eta = 0.2 * (0.35 * batch["anchor"]["log_p"]).exp()
    expected = contrastive_loss(logits, batch["image_index"], class_probability=eta, floor=-14.0)
    loss, _, statistics = model._losses(batch)
    torch.testing.assert_close(loss, expected)
    assert statistics["class_probability"].item() == pytest.approx(eta.mean().item())


def test_images_are_anchors_with_their_weight(small_bert, data):
    data.sentences = "all"
    model = build(small_bert, image_to_text=0.3).eval()
    batch = first_batch(model, data)
    logits = model(batch["images"], batch["tokens"], batch["lengths"], batch["image_scale"]).detach()
    eta = 0.2 * (0.35 * batch["anchor"]["log_p"]).exp()
    of_sentences = contrastive_loss(logits, batch["image_index"], class_probability=eta, floor=-14.0)
    losses = []
    for image in range(logits.shape[1]):
        own = [i for i, of in enumerate(batch["image_index"].tolist()) if of == image]
        others = [i for i in range(len(logits)) if i not in own]
        mean_eta = eta[own].mean()
        scores = logits[:, image].double().exp()
        g = (scores[others].mean() - mean_eta * scores[own].mean()) / (1 - mean_eta)
        n_g = len(others) * g.clamp(min=math.exp(-14.0))
        losses.append(torch.stack([-(scores[i] / (scores[i] + n_g)).log() for i in own]).mean())
    expected = 0.7 * of_sentences + 0.3 * torch.stack(losses).mean()
    loss, _, _ = model._losses(batch)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert abs(loss.item() - of_sentences.item()) > 1e-3


def test_the_masked_language_loss_is_added(small_bert, data):
    def with_head(weight):
        torch.manual_seed(2)
        text = BertSentences(str(small_bert), dim=16, masked_language_head=True)
        parts = (PatchRegions(), text, LSENonLocal(dim=16))
        return ImageTextModel(*parts, masked_language_weight=weight, warmup_steps=0)

    model, idle = with_head(0.7).eval(), with_head(0.0).eval()
    batch = first_batch(model, data)
    loss, _, figures = model._losses(batch)
    contrastive, _, without = idle._losses({k: v for k, v in batch.items() if not k.startswith("masked")})
    encoder = model.network.text_encoder
    hidden = encoder.model(batch["masked_tokens"], (batch["tokens"] > 0).long()).last_hidden_state
    logits = encoder.masked_language_head(hidden, encoder.model.get_input_embeddings().weight)
    mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["masked_labels"].flatten())
    torch.testing.assert_close(loss, contrastive + 0.7 * mean)
    assert figures["masked_language_loss"].item() == pytest.approx(mean.item(), rel=1e-5)
    assert "masked_language_loss" not in without
    assert not any(p.requires_grad for p in idle.network.text_encoder.masked_language_head.parameters())
    assert all(p.requires_grad for p in encoder.masked_language_head.parameters())


def test_equal_sentences_in_pieces_cost_the_same(small_bert, data, monkeypatch):
    monkeypatch.setattr(by_length, "_PASS", 1)
    data.sentences = "all"
    model = build(small_bert, image_to_text=0.3)
    batch = first_batch(model, data)
    rows = batch["row_of_sentence"]
    assert len(batch["by_length"]) > 1 and len(rows.unique()) == len(batch["sentence_id"].unique()) < len(
        rows
    )
    plain = {key: value for key, value in batch.items() if key not in ("by_length", "row_of_sentence")}
    model.eval()
    torch.testing.assert_close(model._losses(batch)[0], model._losses(plain)[0])


def test_schedule():
    factors = [warmup_cosine(step, 4, 24) for step in range(25)]
    assert factors[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert factors[4] == 1.0 and factors[14] == pytest.approx(0.5) and factors[24] == pytest.approx(0.0)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    group = {"params": [torch.nn.Parameter(torch.zeros(2))]}
    made = adamw_warmup_cosine([group], 0.5, 4, math.inf, schedule="constant")
    factor = made["lr_scheduler"]["scheduler"].lr_lambdas[0]
    assert [factor(step) for step in (*range(4), 4, 1000)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_no_decay_on_gamma_biases_and_norms(small_bert):
    model = build(small_bert)
    decayed, plain = parameter_groups(model.network.parameters(), 0.5)
    assert decayed["weight_decay"] == 0.5 and plain["weight_decay"] == 0.0
    assert any(p is model.network.similarity.log_gamma2 for p in plain["params"])
    count = len(decayed["params"]) + len(plain["params"])
    assert count == sum(1 for p in model.network.parameters() if p.requires_grad)


def test_warns_when_the_warmup_never_ends(small_bert, data, tmp_path):
    fit = trainer(tmp_path, max_steps=1, limit_val_batches=0, num_sanity_val_steps=0)
    with pytest.warns(UserWarning, match="warmup_steps 50 is not less than the run's 1 optimiser steps"):
        fit.fit(build(small_bert, warmup_steps=50), data)


@pytest.mark.parametrize(
    "options",
    [
        {"class_probability": LanguageModelClassProbability()},
        {"negative_weights": RankedByText(0.3)},
        {"loss": PosteriorTargets(0.5)},
    ],
    ids=["plain", "ranked by text", "posterior targets"],
)
def test_a_batch_in_parts_trains_like_a_whole(options, small_bert, embedded_set, tmp_path):
    encoded = []
    states = []
    for batch_size, contrastive_batch in ((12, None), (4, 12)):
        torch.manual_seed(2)
        parts = (
            LinearPatches(16, 16),
            BertSentences(str(small_bert), dim=16, dropout=0.0),
            LSENonLocal(dim=16),
        )
        model = ImageTextModel(*parts, **options, learning_rate=1e-3, warmup_steps=0)
        seen: list[int] = []
        model.network.image_encoder.register_forward_pre_hook(
            lambda module, args, seen=seen: seen.append(len(args[0]))
        )
        fit = trainer(tmp_path, max_epochs=1, limit_val_batches=0, num_sanity_val_steps=0)
        sizes = {"batch_size": batch_size, "contrastive_batch": contrastive_batch}
        fit.fit(model, data_of(embedded_set, sentences="all", views=2, **sizes))
        encoded.append(max(seen))
        states.append(model.state_dict())
    assert encoded == [24, 4]
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-4, atol=2e-5, msg=name)


def test_validation_loss_is_the_mean_over_sentences(small_bert, small_set, tmp_path):
    found = validation_loss(tmp_path, small_bert, small_set)
    data, model = data_of(small_set, batch_size=3, sentences="all"), build(small_bert).eval()
    first_batch(model, data)
    pairs = [(model._losses(batch)[0].item(), len(batch["lengths"])) for batch in data.val_dataloader()]
    assert len({count for _, count in pairs}) > 1
    expected = sum(loss * count for loss, count in pairs) / sum(count for _, count in pairs)
    assert found == pytest.approx(expected, rel=1e-5)


def validation_loss(folder: Path, small_bert: Path, small_set: Path, **options: Any) -> float:
    """Three blocks of images, of 3, 3 and 2, with unequal numbers of sentences."""
    data = data_of(small_set, batch_size=3, sentences="all")
    (metrics,) = trainer(folder, **options).validate(build(small_bert), data, verbose=False)
    return metrics["validate/loss"]


def test_each_named_groups_learning_rate_is_logged():
    one, two = (torch.nn.Linear(2, 3) for _ in range(2))
    groups = [
        *parameter_groups(one.parameters(), 0.1, 1e-4, name="text"),
        *parameter_groups(two.parameters(), 0.1),
    ]
    made = adamw_warmup_cosine(groups, learning_rate=1e-3, warmup_steps=1, total_steps=9)
    # Of two of one name no LearningRateMonitor.
    assert [group.get("name") for group in groups] == ["text", None, None, None]
    half = {"learning_rate": 5e-4, "learning_rate_text": 5e-5}  # of the warm-up
    assert learning_rates(made["optimizer"]) == pytest.approx(half)
    alone = adamw_warmup_cosine(parameter_groups(two.parameters(), 0.1), 1e-3, 0, 9)
    assert learning_rates(alone["optimizer"]) == pytest.approx({"learning_rate": 1e-3})
    torch.set_default_dtype(torch.bfloat16)  # as in a step of bf16-true
    try:
        assert learning_rates(alone["optimizer"])["learning_rate"].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def unused_text_parameters(
    folder: Path, small_bert: Path, small_set: Path, steps: int, **options: Any
) -> None:
    """Train a LayoutLM, whose pooler has no gradient, to this step; continue where a checkpoint is there."""
    torch.manual_seed(2)
    text: Any = of_family("layoutlm", small_bert, dim=16)
    model = ImageTextModel(PatchRegions(), text, LSENonLocal(dim=16), learning_rate=1e-3, warmup_steps=0)
    start = text.model.pooler.dense.weight.clone()
    fit = trainer(folder, max_steps=steps, limit_val_batches=0, num_sanity_val_steps=0, **options)
    there = str(folder / "a.ckpt") if steps > 1 else None
    fit.fit(model, data_of(small_set, batch_size=8), ckpt_path=there, weights_only=True)
    pooler = text.model.pooler.dense.weight
    assert fit.global_step == steps and torch.equal(pooler, start)
    assert pooler.requires_grad == ("devices" not in options)
    fit.save_checkpoint(folder / "a.ckpt")


def test_batches_of_one_image_are_refused(small_set, small_bert, tmp_path):
    """It has no negatives: every loss is 0."""
    with pytest.raises(UserError, match="data.batch_size: expected at least 2 images of all processes"):
        trainer(tmp_path, max_steps=1).fit(build(small_bert), data_of(small_set, batch_size=1))
    both = data_of(small_set, batch_size=1, contrastive_batch=2)
    trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(build(small_bert), both)


def test_validation_leaves_out_last_single_image(small_set, small_bert, tmp_path):
    """Eight images in blocks of seven: the loss of the eighth would be 0."""
    model, found = build(small_bert), []
    for options in ({}, {"limit_val_batches": 1}):
        one = trainer(tmp_path, **options)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("default")
            one.validate(model, data_of(small_set, batch_size=7), verbose=False)
        found.append(one.callback_metrics["validate/loss"])
        assert sum("leaves out a block of one image" in str(x.message) for x in said) == (not options)
    assert found[0] == found[1] > 0


def test_batch_names_the_entry_it_lacks():
    """Of a datamodule of a user's own."""
    batch = Batch({"images": 1, "anchor": {"log_p": 2}})
    assert batch["images"] == 1 and batch.get("tokens") is None and batch["anchor"]["log_p"] == 2
    with pytest.raises(UserError, match="an entry 'tokens', found images, anchor"):
        batch["tokens"]
    with pytest.raises(UserError, match="batches as dictionaries, found list"):
        Batch([torch.zeros(1)])
    with pytest.raises(UserError, match="an entry 'embedding', found log_p"):
        batch["anchor"]["embedding"]


def test_gradients_take_strides_where_nothing_moves():
    weight = torch.zeros(4, 3, 1, 1)
    gradient = torch.rand(4, 1, 1, 3).permute(0, 3, 1, 2)
    assert gradient.stride() != weight.stride()
    found = _with_strides(weight.stride(), gradient)
    assert found.stride() == weight.stride() and found.data_ptr() == gradient.data_ptr()
    torch.testing.assert_close(found, gradient, atol=0, rtol=0)
    other = torch.rand(4, 3, 3, 3).to(memory_format=torch.channels_last)
    assert _with_strides(torch.zeros(4, 3, 3, 3).stride(), other) is other


@pytest.mark.parametrize(("sentences", "k"), [("one", 0.35), ("all", 0.2)])
def test_c_is_solved_over_training_anchors_and_kept(sentences, k, small_bert, embedded_set, tmp_path):
    rule = RankedByText(0.4, k)
    model = build(small_bert, class_probability=None, negative_weights=rule)
    data = data_of(embedded_set, sentences=sentences, batch_size=8)
    fit = trainer(tmp_path, max_epochs=1, limit_val_batches=0, num_sanity_val_steps=0)
    fit.fit(model, data)
    prepared = PreparedSet(embedded_set)
    log_p = prepared.log_p().set_index("sentence_id")["log_p"]
    reports = prepared.table("reports")[["study_id", "sentence_id"]].drop_duplicates()
    reports = reports.merge(prepared.table("images").query("use == 'train'"), on="study_id")
    shares = np.minimum(np.exp(float(rule.log_c) + k * log_p), 0.95)
    of_reports = reports.assign(share=reports["sentence_id"].map(shares)).groupby("study_id")["share"]
    assert (
        of_reports.mean().mean() if sentences == "one" else of_reports.sum().sum() / of_reports.size().sum()
    ) == (pytest.approx(0.4, abs=1e-4))
    fit.save_checkpoint(tmp_path / "kept.ckpt")
    restored = ImageTextModel.load_from_checkpoint(tmp_path / "kept.ckpt")
    kept = restored.objective.negative_weights
    assert isinstance(kept, RankedByText) and torch.equal(kept.log_c, rule.log_c)
