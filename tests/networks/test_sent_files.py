"""Descriptions, weights and adapters of a file that somebody sent: refused in a line, before a model is built."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from medclip_dcl import load
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.formats import CHECKPOINT, VERSION_KEY
from medclip_dcl.common.weight_files import check_sizes, read_model, read_state_dict, shapes_of
from medclip_dcl.networks.adapters import LoRA, add_adapters
from medclip_dcl.networks.pretrained_regions import FINAL_NORM, TransformersRegions
from medclip_dcl.networks.text_encoder import TransformersSentences, _model_class
from tests.dual_encoders import write_dual_encoder
from tests.program import verb

convert = verb("convert")

Change = Callable[[Any], Any]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dual_encoder("clip", tmp_path_factory.mktemp("sent") / "clip")


@pytest.fixture(scope="module")
def exported(source: Path) -> Path:
    convert([str(source), "--output", str(source.parent / "model")])
    return source.parent / "model"


def setting(part: str, *path: Any) -> Change:
    *names, last, value = path

    def change(config: dict[str, Any]) -> None:
        arguments = config[part]["init_args"]
        for name in names:
            arguments = arguments[name]
        arguments[last] = value

    return change


def image_encoder(name: str, **arguments: Any) -> Change:
    described = {"class_path": f"medclip_dcl.networks.{name}", "init_args": {"dim": 12, **arguments}}
    return lambda config: config.update(image_encoder=described)


def timm(**architecture: Any) -> Change:
    return image_encoder("TimmRegions", global_vector=True, architecture=architecture)


IN_TEXTS, IN_IMAGES = ("text_encoder", "architecture"), ("image_encoder", "architecture")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (setting("text_encoder", "pretrained", "somebody/model"), "text_encoder.init_args: expected no pretrained or"),
        (setting("image_encoder", "pretrained", "somebody/model"), "image_encoder.init_args: expected no pretrained"),
        (image_encoder("ResNetRegions", weights="imagenet"), "found {'weights': 'imagenet'}; do not use"),
        (timm(name="hf-hub:somebody/model"), "architecture.name: expected the name of .*'hf-hub:somebody/model'"),
        (timm(name="hf_hub:somebody/model"), "architecture.name: expected"),
        (timm(name="test_vit", model_args={"depth": 100_000}), "depth: expected at most 62, the number of tensors"),
        (timm(name="test_vit", model_args={"mlp_ratio": 1e6}), "mlp_ratio: expected at most 658, the longest side"),
        (timm(name="test_vit", model_args={"embed_dim": 1e6}), "embed_dim: expected at most 658, the longest side"),
        (setting(*IN_TEXTS, "vocab_size", 30_000_000), "vocab_size: expected at most 658, .* found 30,000,000"),
        (setting(*IN_TEXTS, "num_hidden_layers", 100_000), "num_hidden_layers: expected at most 62"),
        (setting(*IN_TEXTS, "max_position_embeddings", 10**8), "max_position_embeddings: expected at most 658"),
        (setting(*IN_IMAGES, "num_hidden_layers", 100_000), "num_hidden_layers: expected at most 62"),
        (setting(*IN_IMAGES, "hidden_size", 3e6), "hidden_size: expected at most 658"),
        (setting(*IN_IMAGES, "intermediate_size", float("nan")), "intermediate_size: expected at most 658"),
        (image_encoder("ResNetRegions", width=100_000), "width: expected at most 658"),
        (lambda config: config["text_encoder"].update(init_args=[1]), "model"),
        (
            lambda config: config["text_encoder"].update(
                class_path=f"{__name__}.TransformersSentences", init_args={"pretrained": "somebody/model"}
            ),
            "text_encoder.init_args: expected no pretrained",
        ),
    ],
)  # fmt: skip
def test_descriptions_are_refused_before_building(change, words, exported, tmp_path, monkeypatch) -> None:
    folder, checkpoint = shutil.copytree(exported, tmp_path / "model"), tmp_path / "model.ckpt"
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    state = {f"network.{name}": x for name, x in load_file(folder / "model.safetensors").items()}
    torch.save({VERSION_KEY: CHECKPOINT.version, "network": config, "state_dict": state}, checkpoint)
    for path in (folder, checkpoint):
        with pytest.raises(UserError, match=words) as error:
            load(path)
        assert "\n" not in str(error.value)


def test_settings_of_other_classes_are_not_compared(exported, tmp_path) -> None:
    folder = shutil.copytree(exported, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    arguments = {"width": 2048, "depth": 500, "pretrained": False, "weights": [1, 2]}
    config["image_encoder"] = {"class_path": "own.Encoder", "init_args": arguments}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_model(folder).network == config


REAL = (
    *("bert", "roberta", "mpnet", "modernbert", "deberta", "deberta-v2", "distilbert", "electra", "albert"),
    *(
        "clip_text_model",
        "siglip_text_model",
        "clip_vision_model",
        "siglip_vision_model",
        "gpt2",
        "llama",
        "convbert",
    ),
    *(
        "reformer",
        "gemma3_text",
        "funnel",
        "mobilebert",
        "longformer",
        "big_bird",
        "rembert",
        "camembert",
        "canine",
    ),
)


@pytest.mark.parametrize("family", sorted({*REAL, *FINAL_NORM}))
def test_families_of_real_size_pass(family: str) -> None:
    """Their default configurations; no weights."""
    config: Any = CONFIG_MAPPING[family]()
    with torch.device("meta"):
        model: Any = _model_class(config)
        shapes = shapes_of(model(config).state_dict())
    for settings in (config.to_dict(), config.to_diff_dict()):
        check_sizes(settings, shapes, family)
    if "vocab_size" in config.to_dict():
        with pytest.raises(UserError, match="vocab_size: expected at most"):
            check_sizes({"text_encoder": {"vocab_size": 30_000_000}}, shapes, family)


def test_adapters_and_distant_shards_are_refused(source, tmp_path) -> None:
    folder = shutil.copytree(source, tmp_path / "clip")
    names = list(load_file(folder / "model.safetensors"))
    shutil.move(folder / "model.safetensors", tmp_path / "theirs.safetensors")
    index = folder / "model.safetensors.index.json"
    loaders = (
        lambda: convert([str(folder), "--output", str(tmp_path / "output")]),
        lambda: TransformersSentences(str(folder)),
    )
    for shard in ("../theirs.safetensors", str(tmp_path / "theirs.safetensors")):
        index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, shard)}))
        for load_folder in loaders:
            with pytest.raises(UserError, match="index.json: expected names of files beside it"):
                load_folder()
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "a.safetensors")}))
    shutil.move(tmp_path / "theirs.safetensors", folder / "a.safetensors")
    loaders[1]()
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "somebody/model"}'
    )
    for load_folder in loaders:
        with pytest.raises(UserError, match="found an adapter .adapter_config.json.; merge it"):
            load_folder()


GLOBAL: dict[Any, dict[str, Any]] = {TransformersSentences: {}, TransformersRegions: {"global_vector": True}}
A, B, BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer.weight"


@pytest.fixture(scope="module")
def adapted(exported: Path) -> dict[str, Any]:
    network = load(exported).image_text
    config = network.config()
    for encoder in (network.image_encoder, network.text_encoder):
        add_adapters(encoder, LoRA(rank=2))
    state = {f"network.{name}": x for name, x in network.state_dict().items()}
    return {VERSION_KEY: CHECKPOINT.version, "network": config, "state_dict": state, "lora": {"alpha": 4.0}}


def without(*ends: str) -> Change:
    return lambda found: [found["state_dict"].pop(first(found, end)) for end in ends]


def first(found: Mapping[str, Any], end: str) -> str:
    return next(name for name in found["state_dict"] if name.endswith(end))


def tensor(end: str, *shape: int) -> Change:
    return lambda found: found["state_dict"].update({first(found, end): torch.zeros(shape)})


@pytest.mark.parametrize(
    "change",
    [
        *(without(A), without(B), without(BASE), without(A, B)),
        *(
            tensor(A, 3, 16),
            tensor(A, 2, 1),
            tensor(A, 2),
            tensor(A),
            tensor(A, 0, 16),
            tensor(B, 16, 3),
            tensor(BASE),
        ),
        *(
            lambda found, x=x: found.update(lora=x)
            for x in ({}, [1], "x", {"alpha": None}, {"alpha": float("nan")})
        ),
        lambda found: found.update(state_dict=[1]),
    ],
)
def test_damaged_adapters_are_one_line(change: Change, adapted, tmp_path) -> None:
    torch.save(adapted, tmp_path / "whole.ckpt")
    load(tmp_path / "whole.ckpt")
    damaged = {**adapted, "state_dict": dict(adapted["state_dict"])}
    change(damaged)
    torch.save(damaged, tmp_path / "damaged.ckpt")
    with pytest.raises(UserError, match="its LoRA adapters are incomplete or damaged|is not a state dict"):
        load(tmp_path / "damaged.ckpt")


@pytest.mark.parametrize("end", [A, B, BASE])
def test_infinite_weights_are_refused(end: str, adapted, tmp_path) -> None:
    state = {name: x.clone() for name, x in adapted["state_dict"].items()}
    state[first(adapted, end)].view(-1)[0] = float("inf")
    torch.save({**adapted, "state_dict": state}, tmp_path / "infinite.ckpt")
    with pytest.raises(UserError, match="weights are NaN or infinite in .'image_encoder"):
        load(tmp_path / "infinite.ckpt")


@pytest.mark.parametrize("is_safe", [False, True])
def test_folders_of_data_parallel_are_read(is_safe: bool, source, tmp_path) -> None:
    folder = shutil.copytree(source, tmp_path / "clip")
    state = {f"module.{name}": x for name, x in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    if is_safe:
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    else:
        torch.save(state, folder / "pytorch_model.bin")
    for kind in (TransformersSentences, TransformersRegions):
        wrapped, plain = (
            kind(str(x), projection="pretrained", dim=12, **GLOBAL[kind]) for x in (folder, source)
        )
        for one, other in zip(wrapped.state_dict().values(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    # One such name among others is a name.
    torch.save({**state, "logit_scale": torch.ones(())}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink(missing_ok=True)
    with pytest.raises(UserError, match="weights do not fit config.json"):
        TransformersSentences(str(folder))


def test_prefix_of_data_parallel_is_left_out(tmp_path) -> None:
    state = {"weight": torch.ones(2), "bias": torch.ones(1)}
    torch.save({f"module.{name}": x for name, x in state.items()}, tmp_path / "wrapped.pth")
    assert read_state_dict(tmp_path / "wrapped.pth").keys() == state.keys()
    torch.save({**state, "module.x": torch.ones(1)}, tmp_path / "other.pth")
    assert read_model(tmp_path / "other.pth").state.keys() == {*state, "module.x"}
