"""Adapters of peft in a ViT and a BERT: what a step changes, merging, and runs that are killed and tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from pytorch_lightning import Trainer
from transformers import ViTConfig

from medclip_dcl import load
from medclip_dcl.common.errors import UserError
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.networks.adapters import LoRA, add_adapters, has_adapters, merge_adapters
from medclip_dcl.networks.image_text import ImageTextNetwork, pad_tokens
from medclip_dcl.networks.pretrained_regions import TransformersRegions
from medclip_dcl.networks.similarity import LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences, TransformersSentences
from tests.models.test_resuming import Kill, Killed, assert_same_run, train
from tests.networks.test_pretrained_regions import ARCHITECTURES
from tests.small import PatchRegions
from tests.text_models import FAMILIES, write_text_model

RANK, ALPHA = 3, 5.0
HEADS = ("network.image_encoder.projection.", "network.text_encoder.projection.", "network.similarity.")
TEXTS = ["No pneumothorax.", "Small left pleural effusion"]


def build(small_set: Path, small_bert: Path, **options: Any) -> tuple[ImageTextModel, ImageTextDataModule]:
    torch.manual_seed(3)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
    vit = ViTConfig(**sizes, image_size=32, patch_size=8).to_diff_dict()
    image = TransformersRegions(architecture=vit, dim=16)
    text = BertSentences(str(small_bert), dim=16, dropout=0.2)
    settings = {"learning_rate": 3e-3, "warmup_steps": 2, "lora": LoRA(RANK, ALPHA), **options}
    data: dict[str, Any] = {"image_size": 48, "crop_size": 32, "batch_size": 8, "num_workers": 0}
    model = ImageTextModel(image, text, LSENonLocal(dim=16), **settings)
    return model, ImageTextDataModule(str(small_set), **data)


@pytest.fixture(scope="module")
def run(small_set: Path, small_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "run"
    train(folder, *build(small_set, small_bert), minutes=1000.0, max_epochs=2)
    return folder


@pytest.fixture(scope="module")
def trained(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]


def test_only_adapters_and_heads_are_trained(trained, small_set, small_bert) -> None:
    before = build(small_set, small_bert)[0].state_dict()
    adapters = {name for name in trained if ".lora_A." in name or ".lora_B." in name}
    # Two matrices of each of six linear layers in two blocks of two encoders.
    assert len(adapters) == 2 * 6 * 2 * 2 and all(trained[name].any() for name in adapters)
    assert {trained[name].shape[0] for name in adapters if ".lora_A." in name} == {RANK}
    others = {name.replace(".base_layer.", "."): x for name, x in trained.items() if name not in adapters}
    changed = {name for name, value in others.items() if not torch.equal(value, before[name])}
    assert others.keys() == before.keys()
    assert changed and changed == {name for name in before if name.startswith(HEADS)}


def test_number_of_trained_parameters_is_logged(small_set, small_bert, caplog) -> None:
    model, data = build(small_set, small_bert)
    with caplog.at_level("INFO"):
        Trainer(fast_dev_run=1, accelerator="cpu", enable_progress_bar=False).fit(model, data)
    sizes = ((12, 12), (12, 20)), ((32, 32), (32, 64))
    width = [sum(4 * (a + b) if a == b else 2 * (a + b) for a, b in encoder) for encoder in sizes]
    heads = sum(p.numel() for name, p in model.named_parameters() if name.startswith(HEADS))
    total = sum(p.numel() for p in model.parameters())
    expected = RANK * 2 * sum(width) + heads
    assert f"{expected:,} of {total + expected - heads:,} parameters are trained" in caplog.text


@torch.no_grad()
def test_merged_equals_unmerged(run, trained, small_set, small_bert, tmp_path) -> None:
    """By peft's own layers, and by its own merging."""
    network = build(small_set, small_bert)[0].network.eval()
    for encoder in (network.image_encoder.trunk, network.text_encoder.transformer):
        add_adapters(encoder, LoRA(RANK, ALPHA))
    network.load_state_dict(
        {name.removeprefix("network."): x for name, x in trained.items() if "network." in name}
    )
    inputs = torch.rand(2, 3, 32, 24), *network.tokenize(TEXTS)
    expected = network(*inputs), network.encode(inputs[0]).feature_map
    load(run / "checkpoints/last.ckpt").save_pretrained(tmp_path / "exported")
    found = ImageTextNetwork.from_pretrained(tmp_path / "exported")
    assert found.state_dict().keys() == build(small_set, small_bert)[0].network.state_dict().keys()
    torch.testing.assert_close(
        (found(*inputs), found.encode(inputs[0]).feature_map), expected, atol=1e-5, rtol=1e-5
    )
    for layer in network.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
    merged = {name.replace(".base_layer.", "."): x for name, x in network.state_dict().items()}
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value, merged[name], atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_an_interrupted_training_is_saved_merged(small_set, small_bert, tmp_path) -> None:
    """As in a notebook, where Ctrl-C leaves the adapters in the network."""
    network = build(small_set, small_bert)[0].network.eval()
    for encoder in (network.image_encoder.trunk, network.text_encoder.transformer):
        add_adapters(encoder, LoRA(RANK, ALPHA))
    for name, parameter in network.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    inputs = torch.rand(2, 3, 32, 24), *network.tokenize(TEXTS)
    network.save_pretrained(tmp_path)
    found = ImageTextNetwork.from_pretrained(tmp_path)
    torch.testing.assert_close(found(*inputs), network(*inputs), atol=1e-5, rtol=1e-5)
    assert has_adapters(network) and not has_adapters(found)


@pytest.mark.slow
def test_a_killed_run_continues_exactly(run, small_set, small_bert, tmp_path) -> None:
    with pytest.raises(Killed):
        train(tmp_path, *build(small_set, small_bert), Kill("on_train_batch_end", 1, 1), max_epochs=2)
    train(tmp_path, *build(small_set, small_bert), max_epochs=2)
    assert_same_run(run, tmp_path)


def test_the_tested_network_is_the_loaded_one(run, small_set, small_bert) -> None:
    """Results and an export name their weights by one fingerprint."""
    checkpoint = run / "checkpoints/last.ckpt"
    expected = ImageTextNetwork.from_pretrained(checkpoint).fingerprint()
    for model, data in (
        build(small_set, small_bert),
        (ImageTextModel.load_from_checkpoint(checkpoint), build(small_set, small_bert)[1]),
    ):
        trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
        trainer.test(model, data, ckpt_path=str(checkpoint), weights_only=True)
        assert model.network.fingerprint() == expected
    taken, _ = build(small_set, small_bert, lora=None, init_from=str(checkpoint))
    assert taken.network.fingerprint()["weights"] == expected["weights"]


def assert_adapted(encoder: Any, transformer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Every adapter has a gradient, nothing else of the transformer has, and merging changes no output."""
    add_adapters(transformer, LoRA(RANK, ALPHA))
    for name, parameter in transformer.named_parameters():
        assert parameter.requires_grad == (".lora_" in name), name
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    encoder.eval()
    expected = encoder(*inputs)
    expected.square().sum().backward()
    assert all((p.grad is not None and p.grad.any()) == p.requires_grad for p in transformer.parameters())
    merge_adapters(transformer, LoRA(RANK, ALPHA))
    assert not has_adapters(encoder)
    torch.testing.assert_close(encoder(*inputs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_adapters_of_image_families(name) -> None:
    encoder = TransformersRegions(architecture=ARCHITECTURES[name], dim=5)
    side = 2 * encoder.stride
    assert_adapted(encoder, encoder.trunk, (torch.rand(2, 3, side, side + encoder.stride),))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_text_families(family, tmp_path) -> None:
    encoder = TransformersSentences(str(write_text_model(family, tmp_path)), dim=5)
    tokens, lengths = pad_tokens(encoder.tokenize(TEXTS))
    assert_adapted(encoder, encoder.transformer, (tokens, lengths))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frozen": True}, "model.lora: expected frozen and compile false"),
        ({"masked_language_weight": 0.5}, "and masked_language_weight 0 with it, found False, False and 0.5"),
    ],
)
def test_options_without_adapters_are_refused(small_set, small_bert, options, message) -> None:
    with pytest.raises(UserError, match=message):
        build(small_set, small_bert, **options)


def test_other_encoders_and_ranks_are_refused(small_bert) -> None:
    message = "model.lora: expected models of transformers as both encoders, found PatchRegions"
    with pytest.raises(UserError, match=message):
        ImageTextModel(PatchRegions(), BertSentences(str(small_bert), dim=16), lora=LoRA())
    with pytest.raises(UserError, match="model.lora.rank: expected at least 1, found 0"):
        LoRA(rank=0)
