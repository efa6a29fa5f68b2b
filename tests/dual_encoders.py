"""Small CLIPs and SigLIPs with random weights, saved by transformers, and what is shown to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as T
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from medclip_dcl import load
from medclip_dcl.networks.image_text import ImageTextNetwork
from tests.text_models import write_text_model

SIDE = 32
TEXTS = ["No pneumothorax.", "Small left pleural effusion", "Heart size is normal"]
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "clip": {
        "size": {"shortest_edge": SIDE},
        "do_center_crop": True,
        "crop_size": {"height": SIDE, "width": SIDE},
    },
    "siglip": {"size": {"height": SIDE, "width": SIDE}},
}
KINDS: dict[str, Any] = {"clip": T.CLIPModel, "siglip": T.SiglipModel}
MEAN, STD = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]


def write_dual_encoder(family: str, folder: Path, **preprocessor: Any) -> Path:
    write_text_model(family, folder)
    if family == "siglip":  # whose heads have one size
        config = T.AutoConfig.from_pretrained(folder)
        config.text_config.projection_size = config.vision_config.hidden_size
        model = T.SiglipModel(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.6)
        model.save_pretrained(folder)
    content = {**PREPROCESSORS[family], "resample": 3, "image_mean": MEAN, "image_std": STD, **preprocessor}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    return folder


def grey_image(height: int = 70, low: int = 0, high: int = 256) -> Image.Image:
    """Noise of these grey levels, 50 pixels wide."""
    return Image.fromarray(np.random.default_rng(0).integers(low, high, (height, 50), dtype=np.uint8))


def shown(folder: Path, image: Image.Image) -> Tensor:
    """Normalised input of an exported folder's network."""
    model = load(folder)
    (grey,) = model._inputs([image], 1)
    return model.network.normalised(torch.as_tensor(np.stack([grey] * 3, axis=1) / 255).float())


Answers = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def answers(network: ImageTextNetwork, images: Tensor) -> Answers:
    """Logits (text, image) of images in [0, 1], and the unit embeddings of images and texts."""
    encoded, sentences = network.encode(images), network.embed_texts(TEXTS)
    vectors = network.image_vectors(encoded)
    return network.logits(encoded, sentences), normalize(vectors, dim=-1), normalize(sentences, dim=-1)


@torch.no_grad()
def of_open_clip(model: Any, images: Tensor, tokens: Tensor) -> Answers:
    """`answers` of a model of open_clip, to normalised images."""
    vectors, words = model.encode_image(images, normalize=True), model.encode_text(tokens, normalize=True)
    return model.logit_scale.exp() * words @ vectors.T, vectors, words


@torch.no_grad()
def of_transformers(model: Any, **inputs: Any) -> Answers:
    """`answers` of a model of transformers, without its bias."""
    found = model(**inputs)
    bias = getattr(model, "logit_bias", 0.0)
    vectors = (normalize(x, dim=-1) for x in (found.image_embeds, found.text_embeds))
    return found.logits_per_text - bias, *vectors


def assert_equal(found: Answers, expected: Answers) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
