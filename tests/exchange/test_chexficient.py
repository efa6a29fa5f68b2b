"""CheXficient's and CXR-CLIP's names: small towers of timm, torchvision and transformers saved under them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers as T
from torch import Tensor
from torch.nn.functional import normalize

from medclip_dcl import load
from medclip_dcl.common.errors import UserError
from tests.dual_encoders import TEXTS, answers, assert_equal
from tests.program import verb
from tests.text_models import BERTS, SIZES, word_pieces

main = verb("convert")

DIM, WIDTH = 6, 64


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT and its tokenizer, with more positions than the tokens that the originals take."""
    folder = tmp_path_factory.mktemp("text") / "bert"
    tokenizer = T.BertTokenizer(vocab=word_pieces(BERTS))
    torch.manual_seed(2)
    settings = {**SIZES, "vocab_size": len(tokenizer), "pad_token_id": 0, "max_position_embeddings": 300}
    T.BertModel(T.BertConfig(**settings)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def dinov2(registers: int) -> Any:
    """timm's DINOv2 of 56 pixels, whose names but for the registers' are those of DINOv2's own class."""
    torch.manual_seed(1)
    name = "vit_small_patch14_reg4_dinov2" if registers else "vit_small_patch14_dinov2"
    model = timm.create_model(name, img_size=56, embed_dim=WIDTH, depth=2, num_heads=1, num_classes=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model.eval()


def of_dinov2(model: Any) -> dict[str, Tensor]:
    """timm adds no position to the class token of a model with registers: here one of 0."""
    state = {f"image_encoder.model.{name}": x for name, x in model.state_dict().items()}
    state["image_encoder.model.mask_token"] = torch.randn(1, WIDTH)
    if "image_encoder.model.reg_token" in state:
        state["image_encoder.model.register_tokens"] = state.pop("image_encoder.model.reg_token")
        positions = state["image_encoder.model.pos_embed"]
        state["image_encoder.model.pos_embed"] = torch.cat([torch.zeros(1, 1, WIDTH), positions], dim=1)
    return state


def with_texts(
    of_image: dict[str, Tensor], text_folder: Path, start: str, channels: int
) -> dict[str, Tensor]:
    torch.manual_seed(5)
    bert = T.BertModel.from_pretrained(text_folder).state_dict()
    heads = {"image": channels, "text": SIZES["hidden_size"]}
    projections = {f"{side}_projection.projection.weight": torch.randn(DIM, n) for side, n in heads.items()}
    biases = {f"{side}_projection.projection.bias": torch.randn(DIM) for side in heads}
    texts = {f"text_encoder.{start}.{name}": x for name, x in bert.items()}
    return {**of_image, **texts, **projections, **biases, "logit_scale": torch.tensor(1.5)}


def of_training() -> dict[str, Tensor]:
    """CheXficient's prototypes and averages."""
    names = ("prototypes", "prototype_usage", "step_count", "batch_prototype_updates", "pending_ema_features")
    return {**dict.fromkeys(names, torch.ones(2)), "batch_update_weight_stats": torch.zeros(1, 2)}


@torch.no_grad()
def expected(vectors: Tensor, state: dict[str, Tensor], text_folder: Path, texts: list[str] = TEXTS) -> Any:
    """Logits and unit embeddings: each side's head, the text's last token of at most 256."""
    tokenizer, bert = (
        T.AutoTokenizer.from_pretrained(text_folder),
        T.BertModel.from_pretrained(text_folder).eval(),
    )
    tokens = tokenizer(texts, padding="longest", truncation=True, max_length=256, return_tensors="pt")
    states = bert(**tokens).last_hidden_state
    last = states[torch.arange(len(texts)), tokens["attention_mask"].sum(1) - 1]
    image, text = (
        normalize(
            x @ state[f"{side}_projection.projection.weight"].T + state[f"{side}_projection.projection.bias"]
        )
        for side, x in (("image", vectors), ("text", last))
    )
    return state["logit_scale"].exp() * text @ image.T, image, text


def converted(content: Any, output: Path, *more: Any) -> Any:
    torch.save(content, output.parent / "weights.pth")
    main([str(output.parent / "weights.pth"), "--output", str(output), *map(str, more)])
    return load(output).image_text


@pytest.mark.parametrize("registers", [0, 4])
def test_chexficients_layout_is_equal(registers: int, text_folder, tmp_path) -> None:
    model = dinov2(registers)
    state = with_texts(of_dinov2(model), text_folder, "model", WIDTH)
    content = {"model": {**state, **of_training()}, "epoch": 3, "subset": [1, 2]}
    network = converted(content, tmp_path / "output", "--text_encoder", text_folder)
    images = torch.rand(2, 3, 56, 56)
    with torch.no_grad():
        vectors = model(network.normalised(images))
    assert_equal(answers(network, images), expected(vectors, state, text_folder))
    assert (network.image_size, network.geometry) == (56, "shortest")
    assert network.mean.flatten().tolist() == pytest.approx([0.48145466, 0.4578275, 0.40821073])
    long = ["effusion " * 290]
    own = normalize(network.embed_texts(long))
    torch.testing.assert_close(own, expected(vectors, state, text_folder, long)[2], atol=1e-5, rtol=0)


def test_cxr_clips_resnet_is_equal(text_folder, tmp_path, capsys) -> None:
    torch.manual_seed(3)
    resnet = torchvision.models.resnet18(weights=None)
    resnet.train()(torch.rand(4, 3, 64, 64))
    resnet.eval().fc = torch.nn.Identity()
    of_image = {f"image_encoder.resnet.{name}": x for name, x in resnet.state_dict().items()}
    state = with_texts(of_image, text_folder, "text_encoder", 512)
    network = converted({"model": state, "config": {}}, tmp_path / "output", "--text_encoder", text_folder)
    images = torch.rand(2, 3, 64, 96)
    with torch.no_grad():
        vectors = resnet(network.normalised(images))
    assert_equal(answers(network, images), expected(vectors, state, text_folder))
    assert (network.image_size, network.geometry) == (224, "shortest")
    assert network.mean.flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])
    assert "the original resizes images bilinearly" in capsys.readouterr().out


def test_other_towers_are_refused(text_folder, tmp_path) -> None:
    state = with_texts(of_dinov2(dinov2(0)), text_folder, "model", WIDTH)
    swin = {
        name.replace("image_encoder.model", "image_encoder.image_encoder"): x for name, x in state.items()
    }
    swiglu = {name.replace("mlp.fc2", "mlp.w3"): x for name, x in state.items()}
    fused = {"state_dict": {"CARZero.fusion_module.decoder.norm.weight": torch.ones(3)}}
    words = ["--text_encoder", text_folder]
    for content, more, message in (
        (state, [], "--text_encoder: expected the folder"),
        (state, [*words, "--image_size", 56], "--image_size: no part in"),
        (
            swin,
            words,
            "found .*image_encoder.image_encoder.* CXR-CLIP's Swin takes the vector of its first patch",
        ),
        (swiglu, words, r"do not fit the network; missing .*mlp.fc2.*unexpected .*mlp.w3"),
        ({**state, "adapter": torch.ones(1)}, words, r"unexpected \['adapter'\]"),
        (fused, [], "CARZero scores image and text together by a decoder"),
        ({**fused, "hyper_parameters": Path("a")}, [], "CARZero scores image and text together by a decoder"),
        ({"blocks.0.attn.qkv.weight": torch.ones(1)}, [], "found blocks.0.*benchmark FOLDER --probe"),
    ):
        with pytest.raises(UserError, match=message):
            converted(content, tmp_path / "output", *more)
    assert not (tmp_path / "output").exists()
