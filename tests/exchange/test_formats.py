"""`--format`: folders that transformers and open_clip load unchanged, with equal numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import transformers as T

from medclip_dcl import load
from medclip_dcl.common.errors import UserError
from medclip_dcl.exchange.formats import export_layout
from medclip_dcl.exchange.transformers_folder import from_transformers
from medclip_dcl.models import ImageTextModel
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.text_encoder import TransformersSentences
from medclip_dcl.objectives import SigmoidLoss
from tests.dual_encoders import (
    KINDS,
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
from tests.program import shell, verb

convert = verb("convert")
main = shell("export")

# Neither clipped where a filter overshoots, nor with an odd margin around the middle square.
IMAGE = grey_image(75, 80, 176)


def fine_tuned(family: str, folder: Path, geometry: str = "shortest", side: int = 48) -> ImageTextNetwork:
    """A network whose weights, image size and longest text are not those of its origin."""
    start, _ = from_transformers(write_dual_encoder(family, folder / "source"))
    text: Any = start.text_encoder
    options = {**text.config(), **({"max_tokens": 20} if family == "clip" else {})}
    network = ImageTextNetwork(
        start.image_encoder, TransformersSentences(**options), start.similarity, side, geometry=geometry
    )
    network.text_encoder.load_state_dict(text.state_dict())
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.rand(parameter.shape))
    network.eval().save_pretrained(folder / "model")
    return network


@pytest.mark.parametrize("family", ["clip", "siglip"])
@pytest.mark.parametrize("geometry", ["shortest", "stretch"])
def test_transformers_loads_it_with_equal_numbers(family: str, geometry: str, tmp_path: Path) -> None:
    network = fine_tuned(family, tmp_path, geometry)
    main([str(tmp_path / "model"), "--output", str(tmp_path / "theirs"), "--format", "transformers"])
    model, found = KINDS[family].from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not (found["missing_keys"] or found["unexpected_keys"] or found["mismatched_keys"])
    processor = T.AutoProcessor.from_pretrained(tmp_path / "theirs")
    inputs = processor(
        text=TEXTS,
        images=IMAGE.convert("RGB"),
        return_tensors="pt",
        padding="max_length" if family == "siglip" else True,
        truncation=True,
    )
    # Two bicubic filters, torchvision's on whole grey levels and PIL's.
    assert (shown(tmp_path / "model", IMAGE) - inputs["pixel_values"]).abs().max() <= 2.01 / 255 / min(STD)
    images = torch.rand(2, 3, 48, 48)
    inputs["pixel_values"] = network.normalised(images)
    assert_equal(of_transformers(model.eval(), **inputs), answers(network, images))
    long = processor(text=["pleural effusion " * 20], truncation=True)["input_ids"]
    assert [list(x) for x in long] == network.text_encoder.tokenize(["pleural effusion " * 20])


@pytest.mark.parametrize("geometry", ["shortest", "stretch", "pad"])
def test_open_clip_loads_it_with_equal_numbers(geometry: str, tmp_path: Path) -> None:
    network = fine_tuned("clip", tmp_path, geometry)
    export_layout(tmp_path / "model", tmp_path / "theirs", "open_clip")
    name = f"local-dir:{tmp_path / 'theirs'}"
    model, _, show = open_clip.create_model_and_transforms(name)
    pixels: Any = show(IMAGE)
    torch.testing.assert_close(pixels, shown(tmp_path / "model", IMAGE)[0], atol=1e-6, rtol=1e-6)
    images = torch.rand(2, 3, 48, 48)
    expected = answers(network, images)
    tokens = open_clip.get_tokenizer(name)(TEXTS)
    assert_equal(of_open_clip(model.eval(), network.normalised(images), tokens), expected)
    convert([str(tmp_path / "theirs"), "--output", str(tmp_path / "back")])
    back = load(tmp_path / "back").image_text
    assert_equal(answers(back, images), expected)
    assert back.geometry == geometry


def test_siglip_gets_the_bias_of_its_training(tmp_path: Path, capsys: Any) -> None:
    fine_tuned("siglip", tmp_path)
    model = ImageTextModel(init_from=str(tmp_path / "model"), loss=SigmoidLoss(bias=-3.5))
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    content: dict[str, Any] = {"state_dict": model.state_dict()}
    model.on_save_checkpoint(content)
    torch.save(content, tmp_path / "run/checkpoints/best.ckpt")
    for source, bias in (("run", -3.5), ("run/checkpoints/best.ckpt", -3.5), ("model", 0.0)):
        main([str(tmp_path / source), "--output", str(tmp_path / "theirs"), "--format", "transformers"])
        assert T.SiglipModel.from_pretrained(tmp_path / "theirs").logit_bias.item() == bias
        assert ("note: the logit bias is not known" in capsys.readouterr().out) == (source == "model")
        shutil.rmtree(tmp_path / "theirs")


def test_architectures_without_a_counterpart_are_named(run: Path, tmp_path: Path) -> None:
    relu: Any = fine_tuned("clip", tmp_path / "clip")
    fine_tuned("siglip", tmp_path / "siglip")
    relu.image_encoder.backbone.config.hidden_act = "relu"
    relu.save_pretrained(tmp_path / "relu")
    for source, layout, message in (
        (run, "transformers", "expected clip_vision.* or siglip_.*, found ResNetRegions, bert with"),
        (tmp_path / "siglip/model", "open_clip", "found siglip_vision_model with projection pretrained, sig"),
        (tmp_path / "relu", "open_clip", "vision_config.hidden_act: expected gelu or quick_gelu, found"),
    ):
        with pytest.raises(UserError, match=message):
            export_layout(source, tmp_path / "theirs", layout)
    assert not (tmp_path / "theirs").exists()


def test_terms_of_the_source_travel_on(run: Path, tmp_path: Path) -> None:
    source = write_dual_encoder("clip", tmp_path / "source")
    converted, copy, theirs, back = (tmp_path / name for name in ("a", "b", "theirs", "back"))
    terms = {"LICENSE.md": "Of somebody", "notice.txt": "Of others", "SOURCE_README.md": "# Of somebody"}
    for name, words in terms.items():
        (source / name.removeprefix("SOURCE_")).write_text(words)
    convert([str(source), "--output", str(converted)])
    for _ in range(2):
        main([str(converted), "--output", str(copy)])
    main([str(copy), "--output", str(theirs), "--format", "open_clip"])
    convert([str(theirs), "--output", str(back)])
    for folder in (converted, copy, theirs, back):
        assert {name: (folder / name).read_text() for name in terms} == terms
    assert load(copy).image_text.fingerprint() == load(converted).network.fingerprint()
    main([str(run), "--output", str(copy)])
    assert not any((copy / name).exists() for name in terms)
