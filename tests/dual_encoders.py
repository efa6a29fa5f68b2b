"""Small CLIPs and SigLIPs with random weights, saved by transformers, and what is shown to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as T
from PIL import Image

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
