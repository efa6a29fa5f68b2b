"""A small network, and a run folder that it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import yaml

from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences


def small_network(small_bert: Path, **text) -> ImageTextNetwork:
    """Of 48 pixels and 5 dimensions, with normalisation of its own and weights that depend on `text`."""
    options = {"dim": 5, "max_tokens": 40, "pooling": "mean", **text}
    network = ImageTextNetwork(
        ResNetRegions(dim=5, stride=16, width=8),
        BertSentences(str(small_bert), **options),
        LSENonLocal(dim=5),
        48,
        (0.1, 0.2, 0.3),
        (0.4, 0.7, 1.0),
    )
    # BatchNorm that has seen images.
    network.train().feature_map(torch.rand(4, 3, 48, 48))
    return network.eval()


def write_run(folder: Path, network: ImageTextNetwork) -> Path:
    """A run folder with a checkpoint and a configuration, not tested."""
    (folder / "checkpoints").mkdir(parents=True)
    state = {f"network.{name}": value for name, value in network.state_dict().items()}
    content = {"format_version": 3, "network": network.config(), "state_dict": state, "objective": {}}
    torch.save(content, folder / "checkpoints/best.ckpt")
    config = {"seed_everything": 3, "data": {"init_args": {"folder": "data/nowhere"}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "data.json").write_text(json.dumps({"fingerprint": "f00d"}))
    return folder
