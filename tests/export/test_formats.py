"""`--format`: folders that transformers and open_clip load unchanged, with equal numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
import transformers as T
from torch import Tensor
from torch.nn.functional import normalize

from medclip_dcl import load
from medclip_dcl.common.errors import UserError
from medclip_dcl.convert.__main__ import main as convert
from medclip_dcl.convert.transformers_folder import from_transformers
from medclip_dcl.export.__main__ import main
from medclip_dcl.export.formats import export_layout
from medclip_dcl.models import ImageTextModel
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.pretrained_sentences import TransformersSentences
from medclip_dcl.objectives import SigmoidLoss
from tests.dual_encoders import STD, TEXTS, grey_image, write_dual_encoder

# Neither clipped where a filter overshoots, nor with an odd margin around the middle square.
IMAGE = grey_image(75, 80, 176)
KINDS: dict[str, Any] = {"clip": T.CLIPModel, "siglip": T.SiglipModel}


def fine_tuned(family: str, folder: Path, geometry: str = "shortest", side: int = 48) -> ImageTextNetwork:
    """A network whose weights, image size and longest text are not those of its origin."""
    start = from_transformers(write_dual_encoder(family, folder / "source")).network
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


def own(network: ImageTextNetwork, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        encoded, sentences = network.encode(images), network.embed_texts(TEXTS)
        return (
            network.logits(encoded, sentences),
            normalize(network.image_vectors(encoded), dim=-1),
            normalize(sentences, dim=-1),
        )


def assert_equal(found: tuple[Tensor, Tensor, Tensor], expected: tuple[Tensor, Tensor, Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["clip", "siglip"])
@pytest.mark.parametrize("geometry", ["shortest", "stretch"])
def test_transformers_loads_it_with_equal_numbers(family: str, geometry: str, tmp_path: Path) -> None:
    network = fine_tuned(family, tmp_path, geometry)
    main([str(tmp_path / "model"), str(tmp_path / "theirs"), "--format", "transformers"])
    model, found = KINDS[family].from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not (found["missing_keys"] or found["unexpected_keys"] or found["mismatched_keys"])
    processor = T.AutoProcessor.from_pretrained(tmp_path / "theirs")
    padding = "max_length" if family == "siglip" else True
    inputs = processor(
        text=TEXTS, images=IMAGE.convert("RGB"), return_tensors="pt", padding=padding, truncation=True
    )
    (grey,) = load(tmp_path / "model")._inputs([IMAGE], 1)
    shown = network.normalised(torch.as_tensor(np.stack([grey] * 3, axis=1) / 255).float())
    # Two bicubic filters, torchvision's on whole grey levels and PIL's.
    assert (shown - inputs["pixel_values"]).abs().max() <= 2.01 / 255 / min(STD)
    images = torch.rand(2, 3, 48, 48)
    inputs["pixel_values"] = network.normalised(images)
    with torch.no_grad():
        theirs = model.eval()(**inputs)
    vectors = (normalize(theirs.image_embeds, dim=-1), normalize(theirs.text_embeds, dim=-1))
    assert_equal((theirs.logits_per_text, *vectors), own(network, images))
    long = processor(text=["pleural effusion " * 20], truncation=True)["input_ids"]
    assert [list(x) for x in long] == network.text_encoder.tokenize(["pleural effusion " * 20])


@pytest.mark.parametrize("geometry", ["shortest", "stretch", "pad"])
def test_open_clip_loads_it_with_equal_numbers(geometry: str, tmp_path: Path) -> None:
    network = fine_tuned("clip", tmp_path, geometry)
    export_layout(tmp_path / "model", tmp_path / "theirs", "open_clip")
    name = f"local-dir:{tmp_path / 'theirs'}"
    model, _, show = open_clip.create_model_and_transforms(name)
    tokenizer = open_clip.get_tokenizer(name)
    (grey,) = load(tmp_path / "model")._inputs([IMAGE], 1)
    images = torch.as_tensor(np.stack([grey] * 3, axis=1) / 255).float()
    shown: Any = show(IMAGE)
    torch.testing.assert_close(shown[None], network.normalised(images), atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        vectors = model.eval().encode_image(shown[None], normalize=True)
        words = model.encode_text(tokenizer(TEXTS), normalize=True)
        logits = model.logit_scale.exp() * words @ vectors.T
    assert_equal((logits, vectors, words), own(network, images))
    if geometry == "shortest":
        convert([str(tmp_path / "theirs"), "--output", str(tmp_path / "back")])
        assert_equal(own(load(tmp_path / "back").network, images), own(network, images))


def test_siglip_gets_the_bias_of_its_training(tmp_path: Path, capsys: Any) -> None:
    fine_tuned("siglip", tmp_path)
    model = ImageTextModel(init_from=str(tmp_path / "model"), loss=SigmoidLoss(bias=-3.5))
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    content: dict[str, Any] = {"state_dict": model.state_dict()}
    model.on_save_checkpoint(content)
    torch.save(content, tmp_path / "run/checkpoints/best.ckpt")
    for source, bias in (("run", -3.5), ("run/checkpoints/best.ckpt", -3.5), ("model", 0.0)):
        main([str(tmp_path / source), str(tmp_path / "theirs"), "--format", "transformers"])
        assert T.SiglipModel.from_pretrained(tmp_path / "theirs").logit_bias.item() == bias
        assert ("note: the logit bias is not known" in capsys.readouterr().out) == (source == "model")


def test_architectures_without_a_counterpart_are_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected clip_vision.* or siglip_.*, found ResNetRegions, BertSent"):
        export_layout(run, tmp_path / "theirs", "transformers")
    fine_tuned("siglip", tmp_path / "siglip")
    with pytest.raises(UserError, match="found siglip_vision_model with projection pretrained, siglip_text"):
        export_layout(tmp_path / "siglip/model", tmp_path / "theirs", "open_clip")
    model = fine_tuned("clip", tmp_path / "clip")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/mine.txt").write_text("mine")
    for folder in (tmp_path / "notes", tmp_path / "clip/model"):
        with pytest.raises(UserError, match="holds something else"):
            export_layout(tmp_path / "clip/model", folder, "open_clip")
    image: Any = model.image_encoder
    image.backbone.config.hidden_act = "relu"
    model.save_pretrained(tmp_path / "clip/model")
    with pytest.raises(UserError, match="vision_config.hidden_act: expected gelu or quick_gelu, found relu"):
        export_layout(tmp_path / "clip/model", tmp_path / "theirs", "open_clip")
    assert not list(tmp_path.glob("*theirs*"))


def test_terms_of_the_source_travel_on(run: Path, tmp_path: Path) -> None:
    source, converted, copy = write_dual_encoder("clip", tmp_path / "source"), tmp_path / "a", tmp_path / "b"
    (source / "LICENSE.md").write_text("Terms of somebody")
    (source / "README.md").write_text("# Of somebody")
    terms = {"LICENSE.md": "Terms of somebody", "SOURCE_README.md": "# Of somebody"}
    for _ in range(2):
        convert([str(source), "--output", str(converted)])
        main([str(converted), str(copy)])
        main([str(copy), str(tmp_path / "theirs"), "--format", "open_clip"])
        for folder in (converted, copy, tmp_path / "theirs"):
            assert {name: (folder / name).read_text() for name in terms} == terms
        assert load(copy).network.fingerprint() == load(converted).network.fingerprint()
    (tmp_path / "theirs/.git").mkdir()
    with pytest.raises(UserError, match="also holds .git; move it away"):
        export_layout(copy, tmp_path / "theirs", "open_clip")
    convert([str(tmp_path / "theirs"), "--output", str(converted)])
    assert {name: (converted / name).read_text() for name in terms} == terms
    (copy / "image_encoder.onnx").write_text("of the earlier one")
    (source / "LICENSE.md").unlink()
    convert([str(source), "--output", str(copy)])
    assert not (copy / "LICENSE.md").exists() and not (copy / "image_encoder.onnx").exists()
    main([str(run), str(copy)])
    assert not (copy / "SOURCE_README.md").exists() and json.loads((copy / "config.json").read_text())
