"""Converted models against the libraries that saved them: embeddings, logits, images, and every command's `load`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import transformers as T

from medclip_dcl import load
from medclip_dcl.command import cli
from medclip_dcl.common.errors import UserError
from medclip_dcl.exchange.formats import export_layout
from medclip_dcl.networks.image_text import ImageTextNetwork, pad_tokens
from tests.dual_encoders import (
    KINDS,
    MEAN,
    SIDE,
    STD,
    TEXTS,
    answers,
    assert_equal,
    grey_image,
    of_open_clip,
    of_transformers,
    shown,
    write_dual_encoder,
)
from tests.program import verb
from tests.text_models import BERTS, SIZES, word_pieces, write_text_model

main = verb("convert")

NORMALISATION = {"mean": MEAN, "std": STD}


def converted(source: Path, output: Path, *more: Any) -> ImageTextNetwork:
    main([str(source), "--output", str(output), *map(str, more)])
    return load(output).image_text


@pytest.mark.parametrize(("family", "side"), [("clip", 32), ("clip", 64), ("siglip", 32), ("siglip", 64)])
def test_logits_are_transformers_own(family: str, side: int, tmp_path: Path) -> None:
    folder = write_dual_encoder(family, tmp_path / "source")
    network = converted(folder, tmp_path / "output")
    padding = "max_length" if family == "siglip" else True
    tokens = T.AutoTokenizer.from_pretrained(folder)(
        TEXTS, return_tensors="pt", padding=padding, max_length=40
    )
    images = torch.rand(2, 3, side, side)
    inputs = {"pixel_values": network.normalised(images), "input_ids": tokens["input_ids"]}
    original = KINDS[family].from_pretrained(folder).eval()
    expected = of_transformers(original, **inputs, interpolate_pos_encoding=side != SIDE)
    assert_equal(answers(network, images), expected)
    assert network.mean.flatten().tolist() == pytest.approx(MEAN)
    assert network.std.flatten().tolist() == pytest.approx(STD)
    card = (tmp_path / "output/README.md").read_text()
    assert ("logit bias" in card) == (family == "siglip") and "- logit scale: " in card


@pytest.mark.parametrize("family", ["clip", "siglip"])
@torch.no_grad()
def test_heat_map_shows_regions_in_texts_space(family: str, tmp_path: Path) -> None:
    network = converted(write_dual_encoder(family, tmp_path / "source"), tmp_path / "output")
    original = KINDS[family].from_pretrained(tmp_path / "source").eval()
    images = torch.rand(1, 3, 48, 32)
    vision = original.vision_model
    tokens = vision(pixel_values=network.normalised(images), interpolate_pos_encoding=True).last_hidden_state
    if family == "clip":
        patches = original.visual_projection(vision.post_layernorm(tokens[:, 1:]))
    else:
        patches = torch.stack([vision.head(tokens[:, place, None]) for place in range(6)], dim=1)
    expected = patches.transpose(1, 2).unflatten(2, (3, 2))
    torch.testing.assert_close(network.encode(images).feature_map, expected, atol=1e-5, rtol=1e-5)


PROCESSORS: tuple[dict[str, Any], ...] = (
    {"do_convert_rgb": True},
    {"do_normalize": False, "do_rescale": False},
    {"rescale_offset": False, "do_flip_channel_order": None, "crop_pct": 0},
    {"image_mean": 0.5, "image_std": [0.25]},
    {"do_normalize": None},
    {"do_rescale": None, "do_reduce_labels": True},
    {"size": 32, "crop_size": 32, "_valid_processor_keys": ["size"], "data_format": "channels_first"},
)


@pytest.mark.parametrize(
    ("family", "preprocessor", "is_saved_by_processor"),
    [
        *(("clip", settings, False) for settings in PROCESSORS),
        *(("clip", {}, True), ("siglip", {}, False), ("siglip", {}, True)),
    ],
)
def test_images_are_shown_as_the_processor_does(family, preprocessor, is_saved_by_processor, tmp_path):
    folder = write_dual_encoder(family, tmp_path / "source", **preprocessor)
    processor: Any = T.AutoImageProcessor.from_pretrained(folder)
    if is_saved_by_processor:  # into processor_config.json
        whole = {"clip": T.CLIPProcessor, "siglip": T.SiglipProcessor}[family]
        whole(processor, T.AutoTokenizer.from_pretrained(folder)).save_pretrained(folder)
        (folder / "preprocessor_config.json").unlink()
    expected = processor(grey_image().convert("RGB"), return_tensors="pt")["pixel_values"]
    std = converted(folder, tmp_path / "output").std.min()
    # Two bicubic filters, torchvision's on whole grey levels and PIL's.
    assert (shown(tmp_path / "output", grey_image()) - expected).abs().max() <= 2.01 / 255 / std


@pytest.fixture(scope="module")
def clip_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model("clip", tmp_path_factory.mktemp("tokenizer") / "clip")


def small_clip(
    tokenizer: Path, quick_gelu: bool, side: int = SIDE, context: int = 40
) -> tuple[Any, dict[str, Any]]:
    """A CLIP of open_clip with random weights, and its configuration."""
    vocabulary = json.loads((tokenizer / "config.json").read_text())["text_config"]["vocab_size"]
    vision = {"image_size": [side, side] if quick_gelu else side, "layers": 2, "width": 64, "patch_size": 16}
    text = {"context_length": context, "vocab_size": vocabulary, "width": 64, "heads": 1, "layers": 2}
    settings = {"embed_dim": 12, "vision_cfg": vision, "text_cfg": text, "quick_gelu": quick_gelu}
    torch.manual_seed(1)
    model = open_clip.CLIP(**settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim:
                parameter.normal_(std=0.4)
    return model, settings


def write_open_clip(folder: Path, model: Any, settings: dict[str, Any], **preprocess: Any) -> Path:
    folder.mkdir(exist_ok=True)
    content = {"model_cfg": settings, "preprocess_cfg": {**NORMALISATION, **preprocess}}
    (folder / "open_clip_config.json").write_text(json.dumps(content))
    torch.save(model.state_dict(), folder / "open_clip_pytorch_model.bin")
    return folder


def assert_open_clips(network: ImageTextNetwork, model: Any, side: int) -> None:
    tokens, _ = pad_tokens(network.text_encoder.tokenize(TEXTS))
    # open_clip pads with zeros to the context.
    tokens = torch.nn.functional.pad(tokens, (0, 40 - tokens.shape[1]))
    images = torch.rand(2, 3, side, side)
    assert_equal(answers(network, images), of_open_clip(model, network.normalised(images), tokens))


@pytest.mark.parametrize(
    ("quick_gelu", "side", "mode"), [(False, 32, "shortest"), (True, 64, "squash"), (False, 32, "longest")]
)
def test_a_folder_of_open_clip_is_equal(quick_gelu, side, mode, clip_tokenizer, tmp_path) -> None:
    model, settings = small_clip(clip_tokenizer, quick_gelu, side)
    source = write_open_clip(tmp_path / "source", model, settings, resize_mode=mode)
    if quick_gelu:  # saved by DataParallel
        wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
        torch.save(wrapped, source / "open_clip_pytorch_model.bin")
    (source / "README.md").write_text("# Of somebody")
    (source / "LICENSE").write_text("Terms of somebody")
    (source / "model.safetensors").write_text("of transformers")
    output = tmp_path / "output"
    assert_open_clips(converted(source, output, "--text_encoder", clip_tokenizer), model, side)
    show: Any = open_clip.image_transform(side, is_train=False, resize_mode=mode, **NORMALISATION)
    image = grey_image(70, 80, 176)  # not clipped where a filter overshoots
    torch.testing.assert_close(shown(output, image)[0], show(image), atol=1e-6, rtol=1e-6)
    assert (output / "LICENSE").read_text() == "Terms of somebody"
    assert (output / "SOURCE_README.md").read_text() == "# Of somebody"


def test_long_contexts_and_null_settings_are_open_clips(clip_tokenizer, tmp_path) -> None:
    model, settings = small_clip(clip_tokenizer, quick_gelu=False, context=200)
    nulls = dict.fromkeys(("mean", "std", "interpolation", "resize_mode"))
    source, output = write_open_clip(tmp_path / "source", model, settings, **nulls), tmp_path / "output"
    network = converted(source, output, "--text_encoder", clip_tokenizer)
    tokens = open_clip.tokenizer.HFTokenizer(str(clip_tokenizer), 200)([text := "pleural effusion " * 99])
    assert torch.tensor(network.text_encoder.tokenize([text])).equal(tokens)
    show: Any = open_clip.create_model_and_transforms(f"local-dir:{source}")[2]
    image = grey_image(70, 80, 176)
    torch.testing.assert_close(shown(output, image)[0], show(image), atol=1e-6, rtol=1e-6)


def test_a_state_dict_of_openai_is_equal(clip_tokenizer, tmp_path) -> None:
    model, _ = small_clip(clip_tokenizer, quick_gelu=True)
    extra = {"input_resolution": torch.tensor(SIDE), "context_length": torch.tensor(40)}
    halves = {name: x.half() for name, x in model.state_dict().items()}
    file = tmp_path / "chexzero.pt"
    torch.save({**halves, **extra, "logit_bias": torch.tensor(-9.5)}, file)
    shown_by = ["--mean", *[0.4] * 3, "--std", *[0.33] * 3]
    network = converted(file, tmp_path / "output", "--text_encoder", clip_tokenizer, *shown_by)
    model.load_state_dict({name: x.float() for name, x in halves.items()})
    assert_open_clips(network, model, SIDE)
    assert network.mean.flatten().tolist() == pytest.approx([0.4] * 3)
    card = (tmp_path / "output/README.md").read_text()
    assert "- logit bias: -9.5 (" in card and "taken are OpenAI's, QuickGELU, 64" in card
    other = write_text_model("bert", tmp_path / "bert")
    for message, more in (
        (f"{other}: tokenizer does not fit the weights: 93 tokens, but 658", [other, *shown_by]),
        ("--mean and --std: expected both", [clip_tokenizer]),
        ("found 101.5; divide", [clip_tokenizer, "--mean", *[101.5] * 3, "--std", *[83.4] * 3]),
        (f"{tmp_path}: no tokenizer", [tmp_path, *shown_by]),
    ):
        with pytest.raises(UserError, match=message):
            converted(file, tmp_path / "other", "--text_encoder", *more)


@pytest.mark.slow
@pytest.mark.parametrize("side", [160, 192])
def test_a_model_of_timm_and_bert_is_equal(side, tmp_path) -> None:
    """BiomedCLIP's layout; test_vit is of 160 pixels, and open_clip sets other sizes after its weights."""
    text = tmp_path / "text"
    tokenizer = T.BertTokenizer(vocab=word_pieces(BERTS))
    T.BertConfig(**SIZES, vocab_size=len(tokenizer), pad_token_id=0).save_pretrained(text)
    tokenizer.save_pretrained(text)
    vision = {"timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear", "image_size": side}
    words: dict[str, Any] = {"hf_model_name": str(text), "hf_tokenizer_name": str(text), "context_length": 40}
    words |= {"hf_proj_type": "mlp", "hf_pooler_type": "cls_last_hidden_state_pooler"}
    torch.manual_seed(2)
    model: Any = open_clip.CustomTextCLIP(12, vision, {**words, "hf_model_pretrained": False}).eval()
    model.visual.set_input_size(side)
    settings = {"embed_dim": 12, "vision_cfg": vision, "text_cfg": words}
    source = write_open_clip(tmp_path / "source", model, settings)
    with pytest.raises(UserError, match="--text_encoder: expected the folder of"):
        converted(source, tmp_path / "output")
    network = converted(source, tmp_path / "output", "--text_encoder", text)
    assert_open_clips(network, model, side)
    torch.save({**model.state_dict(), "adapter": torch.ones(1)}, source / "open_clip_pytorch_model.bin")
    with pytest.raises(UserError, match=r"do not fit the network; unexpected \['adapter'\]"):
        converted(source, tmp_path / "other", "--text_encoder", text)
    # And out again, with the weights of a training.
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.rand(parameter.shape))
    network.save_pretrained(tmp_path / "output")
    if side != 160:
        with pytest.raises(UserError, match="expected test_vit as timm builds it, .*160.*, found .*192"):
            export_layout(tmp_path / "output", tmp_path / "theirs", "open_clip")
        return
    export_layout(tmp_path / "output", tmp_path / "theirs", "open_clip")
    theirs: Any = open_clip.create_model(f"local-dir:{tmp_path / 'theirs'}").eval()
    tokens = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'theirs'}")(TEXTS)
    images = torch.rand(2, 3, side, side)
    expected = of_open_clip(theirs, network.normalised(images), tokens)
    assert_equal(answers(network, images), expected)
    back = converted(tmp_path / "theirs", tmp_path / "back", "--text_encoder", tmp_path / "theirs")
    assert_equal(answers(back, images), expected)


CLEANED = [
    *("a &amp; b", "a &amp;amp; b", "&amp;lt;5 mm", "&lt;5 mm&gt;", "5&nbsp;mm", "R&D", "&amp;nbsp;x"),
    *("  x \t\r\n y\u00a0\u2003z ", "cafe\u0301 caf\u00e9 \u212b", "a < b &amp; c"),
    "&quot;x&quot; &#39;y&#39; &apos;z",
]
"""Texts that open_clip changes before it splits them."""


def test_texts_are_cleaned_as_by_open_clip(clip_tokenizer, tmp_path, capsys) -> None:
    model, settings = small_clip(clip_tokenizer, quick_gelu=False)
    source = write_open_clip(tmp_path / "source", model, settings)
    network = converted(source, tmp_path / "output", "--text_encoder", clip_tokenizer)
    split: Any = open_clip.tokenizer.HFTokenizer(str(clip_tokenizer), 40)
    ids = network.text_encoder.tokenize(CLEANED)
    expected = [row[: len(own)] for row, own in zip(split(CLEANED).tolist(), ids, strict=True)]
    assert ids == expected and len({tuple(row) for row in ids}) > 7
    assert "curly quotes and ligatures are not" in capsys.readouterr().out
    # Written for open_clip and back, they are cleaned once.
    export_layout(tmp_path / "output", tmp_path / "theirs", "open_clip")
    back = converted(tmp_path / "theirs", tmp_path / "back")
    assert back.text_encoder.config()["tokenizer"] == network.text_encoder.config()["tokenizer"]
    plain = converted(write_dual_encoder("clip", tmp_path / "clip"), tmp_path / "whole").text_encoder
    texts = ["a &amp; b"]
    assert plain.tokenize(texts) == T.AutoTokenizer.from_pretrained(tmp_path / "clip")(texts)["input_ids"]


@pytest.mark.parametrize(
    ("preprocessor", "words"),
    [
        ({"rescale_offset": True}, "changes images by rescale_offset True, which has no"),
        ({"do_flip_channel_order": True}, "by do_flip_channel_order True"),
        ({"do_grayscale": True, "crop_pct": 0.9}, "by .*crop_pct 0.9"),
        ({"image_processor_type": "MobileViTImageProcessor"}, "by do_flip_channel_order True"),
        ({"image_processor_type": "EfficientNetImageProcessor"}, "by include_top True"),
        ({"size": None}, "expected an image processor whose size .* found size {}"),
        ({"size": {"shortest_edge": 32, "longest_edge": 40}}, "expected an image processor whose size"),
        ({"size": {"height": 32}}, "none that can be read .size must have one of"),
        ({"image_mean": 127.5, "image_std": 64}, "SOURCE: mean and std: .* found 127.5; divide"),
        ({"image_mean": None}, "image_mean: expected a number, or one for each of three"),
        ({"image_std": [0.5] * 4}, "image_std: expected a number, or one for each of three"),
        ({"rescale_factor": None}, "rescale_factor: expected a number above 0, found None"),
    ],
)
def test_processors_without_counterpart_are_refused(preprocessor, words, tmp_path) -> None:
    source = write_dual_encoder("clip", tmp_path / "source", **preprocessor)
    with pytest.raises(UserError, match=words):
        converted(source, tmp_path / "output")
    assert not (tmp_path / "output").exists()


def test_defaults_that_open_clip_states_are_taken(clip_tokenizer, tmp_path) -> None:
    model, settings = small_clip(clip_tokenizer, quick_gelu=False)
    settings["vision_cfg"] |= {"pool_type": "tok", "timm_drop": 0.1, "head_width": None}
    settings["text_cfg"] |= {"pool_type": "argmax", "no_causal_mask": False, "eos_id": 2}
    source = write_open_clip(tmp_path / "source", model, settings, mean=0.5, std=0.25)
    network = converted(source, tmp_path / "output", "--text_encoder", clip_tokenizer)
    assert network.mean.flatten().tolist() == [0.5] * 3 and network.std.flatten().tolist() == [0.25] * 3
    assert_open_clips(network, model, SIDE)
    settings["text_cfg"]["pool_type"] = "last"
    write_open_clip(source, model, settings)
    with pytest.raises(UserError, match="text_cfg: expected .* alone, found pool_type"):
        converted(source, tmp_path / "other", "--text_encoder", clip_tokenizer)


def test_a_half_of_a_killed_conversion_is_replaced(tmp_path, monkeypatch) -> None:
    source = write_dual_encoder("clip", tmp_path / "source")
    (source / "LICENSE").write_text("Terms of somebody")

    def killed(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("medclip_dcl.exchange.convert.copy_terms", killed)
        converted(source, tmp_path / "output")
    (tmp_path / ".output.tmp").mkdir()
    (tmp_path / ".output.tmp/half").touch()  # of a kill, which removes nothing
    (tmp_path / "output").mkdir()
    converted(source, tmp_path / "output")
    assert {file.name for file in (tmp_path / "output").iterdir()} >= {"LICENSE", "model.safetensors"}
    assert not (tmp_path / "output/half").exists() and not (tmp_path / ".output.tmp").exists()


@pytest.mark.parametrize(
    ("preprocessor", "words"),
    [
        ({"size": {"shortest_edge": 40}}, "shows the middle 32 of 40 pixels; here the middle square"),
        ({"size": {"height": 48, "width": 48}}, "shows the middle 32 of 48 pixels; here the whole image"),
        ({"size": {"shortest_edge": 24}}, "has black around its 24 of 32 pixels; here the middle square"),
        ({"resample": 2}, "the original resizes by filter 2 of PIL"),
        ({"do_resize": False}, "the original does not resize images"),
    ],
)
def test_a_difference_is_said(preprocessor, words, tmp_path, capsys) -> None:
    network = converted(write_dual_encoder("clip", tmp_path / "source", **preprocessor), tmp_path / "output")
    assert network.image_size == 32
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith("prepare each SET with --geometry s")
    assert words in said and words in (tmp_path / "output/README.md").read_text()


def test_no_source_names_code_to_run(tmp_path) -> None:
    """transformers would download a kernel of that name, and run it."""
    folder = write_dual_encoder("clip", tmp_path / "clip")
    config = json.loads((folder / "config.json").read_text())
    kernel = dict.fromkeys(("attn_implementation", "_attn_implementation"), "somebody/kernel")
    (folder / "config.json").write_text(json.dumps({**config, **kernel}))
    backbone: Any = converted(folder, tmp_path / "output").image_encoder.backbone
    assert backbone.config._attn_implementation == "sdpa"


def test_wrong_sources_are_named(clip_tokenizer, tmp_path) -> None:
    folder = write_dual_encoder("clip", tmp_path / "clip")
    blip = shutil.copytree(folder, tmp_path / "blip")
    (blip / "config.json").write_text('{"model_type": "blip"}')
    model, settings = small_clip(clip_tokenizer, quick_gelu=False)
    bare = write_open_clip(tmp_path / "bare", model, settings)
    settings["vision_cfg"]["attentional_pool"] = True
    pooled = write_open_clip(tmp_path / "pooled", model, settings)
    resnet, coca = tmp_path / "resnet.pt", tmp_path / "coca.pt"
    torch.save({"visual.attnpool.k_proj.weight": torch.ones(1)}, resnet)
    torch.save({"visual.proj": torch.ones(5, 64), "text.cls_emb": torch.ones(5, 64)}, coca)

    def of_type(family: str) -> Path:
        (folder := tmp_path / family).mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": family}))
        return folder

    settings["vision_cfg"] = {"timm_model_name": "naflexvit_base_patch16_siglip"}
    naflex = write_open_clip(tmp_path / "naflex", model, settings)
    text, shown_by = ["--text_encoder", folder], ["--mean", *[0.4] * 3, "--std", *[0.3] * 3]
    for source, more, message in (
        (coca, [*text, *shown_by], "OpenAI's CLIP with a vision transformer, found cls_emb, too"),
        (folder, [*text, "--mean", 0, 0, 0], "--mean, --text_encoder: no part in the conv"),
        (tmp_path / "nothing", [], "FOLDER: .*nothing does not exist"),
        (coca, shown_by, "--text_encoder: expected the folder of the text encoder's tokenizer"),
        (resnet, text, "expected a CLIP with a vision .*, found visual.att"),
        (blip, [], "model_type: expected clip or siglip, found 'blip'"),
        (
            of_type("siglip2"),
            [],
            "found 'siglip2'; NaFlex shows patches of",
        ),
        (of_type("dinov2"), [], "found 'dinov2'; .*; a model of images alone is for fit .*--probe"),
        (naflex, [], "timm_model_name: NaFlex shows patches of"),
        (pooled, [], "model_cfg.vision_cfg: expected .* alone, found attentional_pool"),
        (bare, [], "no tokenizer: .* give their folder by --text_encoder"),
    ):
        with pytest.raises(UserError, match=message):
            converted(source, tmp_path / "output", *more)
    assert not (tmp_path / "output").exists()
    with pytest.raises(UserError, match="--output: .*blip is there already"):
        converted(folder, blip)


@pytest.mark.slow
def test_a_converted_model_is_trained_and_tested(small_set, tmp_path, undrawn) -> None:
    (write_dual_encoder("clip", tmp_path / "source") / "LICENSE").write_text("Terms of somebody")
    converted(tmp_path / "source", tmp_path / "output")
    words = ["--config", "mimic_cxr", "--config", "published"]
    words += ["--config", "objective/infonce", "--run_folder", str(tmp_path / "run")]
    words += ["--data.init_args.folder", str(small_set), "--data.init_args.num_workers", "0"]
    for name, value in {"image_size": 48, "crop_size": 32, "batch_size": 8}.items():
        words += [f"--data.init_args.{name}", str(value)]
    words += ["--model.init_args.init_from", str(tmp_path / "output"), "--trainer.max_epochs", "1"]
    words += ["--trainer.accelerator", "cpu", "--trainer.precision", "32-true", "--untrained", "false"]
    cli.main(["fit", *words])
    shutil.rmtree(tmp_path / "source")
    shutil.rmtree(tmp_path / "output")
    cli.main(["test", "--config", str(tmp_path / "run/config.yaml")])
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert 0 <= results["metrics"]["grounding"]["miou"] <= 1
    assert (tmp_path / "run/LICENSE").read_text() == "Terms of somebody"
    network = load(tmp_path / "run").image_text
    assert type(network.similarity).__name__ == "GlobalCosine" and network.image_size == 48
    assert network.mean.flatten().tolist() == pytest.approx(MEAN)
    # And out again, with the weights of its training.
    export_layout(tmp_path / "run", tmp_path / "theirs", "transformers")
    assert (tmp_path / "theirs/LICENSE").read_text() == "Terms of somebody"
    images = torch.rand(2, 3, 48, 48)
    tokens = T.AutoTokenizer.from_pretrained(tmp_path / "theirs")(TEXTS, return_tensors="pt", padding=True)
    theirs = T.CLIPModel.from_pretrained(tmp_path / "theirs").eval()
    inputs = {"pixel_values": network.normalised(images), **tokens}
    assert_equal(answers(network, images), of_transformers(theirs, **inputs))
