"""Converted models against the libraries that saved them: embeddings, logits, images, and every command's `load`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
import transformers as T
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import normalize

from medclip_dcl import load
from medclip_dcl.command import cli
from medclip_dcl.common.errors import UserError
from medclip_dcl.convert.__main__ import main
from medclip_dcl.export.formats import export_layout
from medclip_dcl.networks.image_text import ImageTextNetwork, pad_tokens
from tests.dual_encoders import MEAN, PREPROCESSORS, SIDE, STD, TEXTS, grey_image, write_dual_encoder
from tests.text_models import BERTS, word_pieces, write_text_model


def converted(source: Path, output: Path, *more: str) -> ImageTextNetwork:
    main([str(source), "--output", str(output), *more])
    return load(output).network


def logits_of(network: ImageTextNetwork, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (text, image) of images in [0, 1], and the unit embeddings of images and texts."""
    with torch.no_grad():
        encoded, sentences = network.encode(images), network.embed_texts(TEXTS)
        vectors = network.image_vectors(encoded)
        return network.logits(encoded, sentences), normalize(vectors, dim=-1), normalize(sentences, dim=-1)


@pytest.mark.parametrize(("family", "side"), [("clip", 32), ("clip", 64), ("siglip", 32), ("siglip", 64)])
def test_logits_are_transformers_own(family: str, side: int, tmp_path: Path) -> None:
    folder = write_dual_encoder(family, tmp_path / "source")
    kind = {"clip": T.CLIPModel, "siglip": T.SiglipModel}[family]
    original = kind.from_pretrained(folder).eval()
    tokens = T.AutoTokenizer.from_pretrained(folder)(
        TEXTS, return_tensors="pt", padding="max_length" if family == "siglip" else True, max_length=40
    )
    images = torch.rand(2, 3, side, side)
    shown = (images - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    with torch.no_grad():
        expected = original(
            pixel_values=shown, input_ids=tokens["input_ids"], interpolate_pos_encoding=side != SIDE
        )
    network = converted(folder, tmp_path / "output")
    logits, image, text = logits_of(network, images)
    torch.testing.assert_close(image, normalize(expected.image_embeds, dim=-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(text, normalize(expected.text_embeds, dim=-1), atol=1e-5, rtol=1e-5)
    bias = original.logit_bias.item() if family == "siglip" else 0.0
    torch.testing.assert_close(logits + bias, expected.logits_per_text, atol=1e-4, rtol=1e-5)
    card = (tmp_path / "output/README.md").read_text()
    assert ("logit bias" in card) == (family == "siglip") and "- logit scale: " in card


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_heat_map_shows_regions_in_texts_space(family: str, tmp_path: Path) -> None:
    network = converted(write_dual_encoder(family, tmp_path / "source"), tmp_path / "output")
    original = (
        {"clip": T.CLIPModel, "siglip": T.SiglipModel}[family].from_pretrained(tmp_path / "source").eval()
    )
    images = torch.rand(1, 3, 48, 32)
    with torch.no_grad():
        found = network.encode(images).feature_map
        own = original.vision_model(pixel_values=network.normalised(images), interpolate_pos_encoding=True)
        tokens = own.last_hidden_state
        if family == "clip":
            patches = original.visual_projection(original.vision_model.post_layernorm(tokens[:, 1:]))
        else:
            patches = torch.stack(
                [original.vision_model.head(tokens[:, place, None]) for place in range(6)], dim=1
            )
    expected = patches.transpose(1, 2).unflatten(2, (3, 2))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_images_are_shown_as_the_processor_does(family: str, tmp_path: Path) -> None:
    folder = write_dual_encoder(family, tmp_path / "source", do_convert_rgb=True)
    kind = {"clip": T.CLIPImageProcessor, "siglip": T.SiglipImageProcessor}[family]
    expected = kind.from_pretrained(folder)(grey_image().convert("RGB"), return_tensors="pt")["pixel_values"]
    converted(folder, tmp_path / "output")
    model = load(tmp_path / "output")
    (inputs,) = model._inputs([grey_image()], 1)
    shown = model.network.normalised(torch.as_tensor(np.stack([inputs] * 3, axis=1) / 255).float())
    # Two bicubic filters, torchvision's on whole grey levels and PIL's.
    assert (shown - expected).abs().max() <= 2.01 / 255 / min(STD)


@pytest.mark.parametrize(("mode", "preprocessor"), [("shortest", "clip"), ("squash", "siglip")])
def test_images_are_open_clips_own(mode: str, preprocessor: str, tmp_path: Path) -> None:
    show = open_clip.image_transform(
        SIDE, is_train=False, mean=tuple(MEAN), std=tuple(STD), resize_mode=mode, interpolation="bicubic"
    )
    options = {**PREPROCESSORS[preprocessor], "do_center_crop": mode == "shortest"}
    converted(write_dual_encoder("clip", tmp_path / "source", **options), tmp_path / "output")
    model = load(tmp_path / "output")
    (inputs,) = model._inputs([grey_image()], 1)
    shown = model.network.normalised(torch.as_tensor(np.stack([inputs] * 3, axis=1) / 255).float())
    torch.testing.assert_close(shown[0], show(grey_image()), atol=1e-6, rtol=1e-6)


@pytest.fixture(scope="module")
def clip_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model("clip", tmp_path_factory.mktemp("tokenizer") / "clip")


def small_clip(tokenizer: Path, quick_gelu: bool, side: int = SIDE) -> tuple[Any, dict[str, Any]]:
    """A CLIP of open_clip with random weights, and its configuration."""
    vocabulary = json.loads((tokenizer / "config.json").read_text())["text_config"]["vocab_size"]
    settings = {
        "embed_dim": 12,
        "vision_cfg": {"image_size": side, "layers": 2, "width": 64, "patch_size": 16},
        "text_cfg": {"context_length": 40, "vocab_size": vocabulary, "width": 64, "heads": 1, "layers": 2},
        "quick_gelu": quick_gelu,
    }
    torch.manual_seed(1)
    model = open_clip.CLIP(**settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim:
                parameter.normal_(std=0.4)
    return model, settings


def token_ids(network: ImageTextNetwork, length: int) -> Tensor:
    """Of open_clip: padded with zeros to the context."""
    tokens, _ = pad_tokens(network.text_encoder.tokenize(TEXTS))
    return torch.nn.functional.pad(tokens, (0, length - tokens.shape[1]))


def assert_equal(original: Any, network: ImageTextNetwork, tokens: Tensor, side: int = SIDE) -> None:
    images = torch.rand(2, 3, side, side)
    logits, image, text = logits_of(network, images)
    with torch.no_grad():
        vectors = original.encode_image(network.normalised(images), normalize=True)
        words = original.encode_text(tokens, normalize=True)
        expected = original.logit_scale.exp() * words @ vectors.T
    torch.testing.assert_close(image, vectors, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(text, words, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("quick_gelu", "side"), [(False, 32), (True, 64)])
def test_a_folder_of_open_clip_is_equal(quick_gelu, side, clip_tokenizer, tmp_path) -> None:
    model, settings = small_clip(clip_tokenizer, quick_gelu, side)
    source = tmp_path / "source"
    source.mkdir()
    shown = {"mean": MEAN, "std": STD, "interpolation": "bicubic", "resize_mode": "shortest"}
    content = {"model_cfg": settings, "preprocess_cfg": shown}
    (source / "open_clip_config.json").write_text(json.dumps(content))
    (source / "README.md").write_text("# Of somebody")
    (source / "LICENSE").write_text("Terms of somebody")
    save_file(model.state_dict(), source / "open_clip_model.safetensors")
    network = converted(source, tmp_path / "output", "--text_encoder", str(clip_tokenizer))
    assert (network.image_size, network.geometry) == (side, "shortest")
    assert network.mean.flatten().tolist() == pytest.approx(MEAN)
    assert_equal(model, network, token_ids(network, 40), side)
    assert (tmp_path / "output/LICENSE").read_text() == "Terms of somebody"
    assert (tmp_path / "output/SOURCE_README.md").read_text() == "# Of somebody"
    content["model_cfg"]["vision_cfg"]["attentional_pool"] = True
    (source / "open_clip_config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="model_cfg.vision_cfg: expected .* alone, found attentional_pool"):
        converted(source, tmp_path / "other", "--text_encoder", str(clip_tokenizer))


def test_a_state_dict_of_openai_is_equal(clip_tokenizer, tmp_path) -> None:
    model, _ = small_clip(clip_tokenizer, quick_gelu=True)
    extra = {"input_resolution": torch.tensor(SIDE), "context_length": torch.tensor(40)}
    torch.save(
        {**{name: x.half() for name, x in model.state_dict().items()}, **extra}, tmp_path / "chexzero.pt"
    )
    more = [
        "--text_encoder",
        str(clip_tokenizer),
        "--mean",
        "0.4",
        "0.4",
        "0.4",
        "--std",
        "0.33",
        "0.33",
        "0.33",
    ]
    network = converted(tmp_path / "chexzero.pt", tmp_path / "output", *more)
    model.load_state_dict({name: x.half().float() for name, x in model.state_dict().items()})
    assert_equal(model, network, token_ids(network, 40))
    other = write_text_model("bert", tmp_path / "bert")
    with pytest.raises(UserError, match="tokenizer does not fit the weights: 93 tokens, but 658"):
        converted(tmp_path / "chexzero.pt", tmp_path / "other", "--text_encoder", str(other), *more[2:])
    with pytest.raises(UserError, match="--mean and --std: expected three numbers"):
        converted(tmp_path / "chexzero.pt", tmp_path / "other", *more[:2])
    with pytest.raises(UserError, match="--text_encoder"):
        converted(tmp_path / "chexzero.pt", tmp_path / "other")


def test_a_model_of_timm_and_bert_is_equal(tmp_path) -> None:
    """BiomedCLIP's layout."""
    text = tmp_path / "text"
    tokenizer = T.BertTokenizer(vocab=word_pieces(BERTS))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = T.BertConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=40, pad_token_id=0)
    config.save_pretrained(text)
    tokenizer.save_pretrained(text)
    settings: dict[str, Any] = {
        "embed_dim": 12,
        "vision_cfg": {
            "timm_model_name": "test_vit",
            "timm_model_pretrained": False,
            "timm_pool": "",
            "timm_proj": "linear",
            "image_size": 160,
        },
        "text_cfg": {
            "hf_model_name": str(text),
            "hf_tokenizer_name": str(text),
            "hf_proj_type": "mlp",
            "hf_pooler_type": "cls_last_hidden_state_pooler",
            "context_length": 40,
        },
    }
    own = {**settings["text_cfg"], "hf_model_pretrained": False}
    torch.manual_seed(2)
    model = open_clip.CustomTextCLIP(12, settings["vision_cfg"], own).eval()
    source = tmp_path / "source"
    source.mkdir()
    shown = {"mean": MEAN, "std": STD}
    (source / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": settings, "preprocess_cfg": shown})
    )
    torch.save(model.state_dict(), source / "open_clip_pytorch_model.bin")
    with pytest.raises(UserError, match="--text_encoder: expected the folder of"):
        converted(source, tmp_path / "output")
    network = converted(source, tmp_path / "output", "--text_encoder", str(text))
    assert_equal(model, network, token_ids(network, 40), 160)


@pytest.mark.parametrize(
    ("preprocessor", "words"),
    [
        ({"size": {"shortest_edge": 40}}, "the original shows the middle 32 of 40 pixels"),
        (
            {"size": {"height": 48, "width": 48}, "crop_size": {"height": 32, "width": 32}},
            "the original shows the middle 32 of 48 pixels; here the whole image",
        ),
        ({"resample": 2}, "the original resizes by filter 2 of PIL"),
    ],
)
def test_a_difference_is_said(preprocessor, words, tmp_path, capsys) -> None:
    network = converted(write_dual_encoder("clip", tmp_path / "source", **preprocessor), tmp_path / "output")
    assert network.image_size == 32
    assert words in capsys.readouterr().out and words in (tmp_path / "output/README.md").read_text()


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_no_source_names_code_to_run(name, tmp_path) -> None:
    """transformers would download a kernel of that name, and run it."""
    folder = write_dual_encoder("clip", tmp_path / "clip")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: "somebody/kernel"}))
    backbone: Any = converted(folder, tmp_path / "output").image_encoder.backbone
    assert backbone.config._attn_implementation == "sdpa"


def test_wrong_sources_are_named(tmp_path) -> None:
    folder = write_dual_encoder("clip", tmp_path / "clip")
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(
        UserError, match="--mean, --text_encoder: no part in the conversion of .*clip; leave it out"
    ):
        converted(folder, tmp_path / "output", "--text_encoder", str(folder), "--mean", "0", "0", "0")
    with pytest.raises(UserError, match="SOURCE .*nothing: no file and no folder"):
        converted(tmp_path / "nothing", tmp_path / "output")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(UserError, match="--output .*full exists and is not an exported model"):
        converted(folder, tmp_path / "full")
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "blip"}))
    with pytest.raises(UserError, match="model_type: expected clip or siglip, found 'blip'"):
        converted(folder, tmp_path / "output")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 32, "width": 48}}))
    with pytest.raises(UserError, match="mean and std|expected size with height and width alike"):
        converted(folder, tmp_path / "output")


def test_a_converted_model_is_trained_and_tested(small_set, tmp_path, undrawn) -> None:
    (write_dual_encoder("clip", tmp_path / "source") / "LICENSE").write_text("Terms of somebody")
    converted(tmp_path / "source", tmp_path / "output")
    words = ["--config", "configs/mimic_cxr.yaml", "--config", "configs/published.yaml"]
    words += ["--config", "configs/objective/infonce.yaml", "--run_folder", str(tmp_path / "run")]
    words += ["--data.init_args.folder", str(small_set), "--data.init_args.num_workers", "0"]
    words += [
        "--data.init_args.image_size",
        "48",
        "--data.init_args.crop_size",
        "32",
        "--data.init_args.batch_size",
        "8",
    ]
    words += ["--model.init_args.init_from", str(tmp_path / "output"), "--trainer.max_epochs", "1"]
    words += ["--trainer.accelerator", "cpu", "--trainer.precision", "32-true", "--untrained", "false"]
    cli.main(["fit", *words])
    shutil.rmtree(tmp_path / "source")
    shutil.rmtree(tmp_path / "output")
    cli.main(["test", "--config", str(tmp_path / "run/config.yaml")])
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert 0 <= results["metrics"]["grounding"]["miou"] <= 1
    assert (tmp_path / "run/LICENSE").read_text() == "Terms of somebody"
    network = load(tmp_path / "run").network
    assert type(network.similarity).__name__ == "GlobalCosine" and network.image_size == 48
    assert network.mean.flatten().tolist() == pytest.approx(MEAN)
    # And out again, with the weights of its training.
    export_layout(tmp_path / "run", tmp_path / "theirs", "transformers")
    assert (tmp_path / "theirs/LICENSE").read_text() == "Terms of somebody"
    images = torch.rand(2, 3, 48, 48)
    tokens = T.AutoTokenizer.from_pretrained(tmp_path / "theirs")(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        theirs = T.CLIPModel.from_pretrained(tmp_path / "theirs").eval()(
            pixel_values=network.normalised(images), **tokens
        )
    torch.testing.assert_close(theirs.logits_per_text, logits_of(network, images)[0], atol=1e-5, rtol=1e-5)
