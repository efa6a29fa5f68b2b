"""Steps of a small model with the objective of a configuration file."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from lightning_fabric.utilities.apply_func import move_data_to_device
from torch import Tensor

from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.models.image_text import ImageTextModel

ROOT = Path(__file__).resolve().parents[1]
OBJECTIVES = {file.stem: file for file in sorted((ROOT / "configs/objective").glob("*.yaml"))}
IN_PARTS = "biovil in parts"
"""BioViL's objective, whose sentences are encoded twice, with activations that are computed again (GradCache)."""


class Steps(NamedTuple):
    """Two batches, between which the optimiser does not move the weights."""

    losses: list[float]
    gradient: Tensor
    """Sum over the batches, of all parameters."""
    state: dict[str, Tensor]
    """Buffers of the objective."""


def built(config: Any) -> Any:
    """The object that class_path and init_args describe."""
    if not isinstance(config, dict) or "class_path" not in config:
        return config
    module, _, name = config["class_path"].rpartition(".")
    return getattr(import_module(module), name)(
        **{key: built(value) for key, value in config.get("init_args", {}).items()}
    )


def model_of(name: str, bert: str, **options: Any) -> ImageTextModel:
    """A small model with the objective of a configuration, and further options."""
    parts: dict[str, Any] = {
        "image_encoder": {"class_path": "tests.small.PatchRegions", "init_args": {"dim": 16}},
        "text_encoder": {
            "class_path": "medclip_dcl.networks.TransformersSentences",
            "init_args": {"pretrained": bert, "dim": 16, "dropout": 0.0},
        },
        "similarity": {"class_path": "medclip_dcl.networks.LSENonLocal", "init_args": {"dim": 16}},
    }
    said = yaml.safe_load(OBJECTIVES[name].read_text())["model"]["init_args"]
    # A deep network from random weights multiplies rounding errors: the gradient of bfloat16 would be noise.
    said.pop("image_encoder", None)
    for key, value in said.items():
        before = parts.get(key)
        if before and value.get("class_path", before["class_path"]) == before["class_path"]:
            before["init_args"] |= value["init_args"]
        else:
            parts[key] = value
    torch.manual_seed(3)
    return ImageTextModel(**{key: built(value) for key, value in parts.items()}, **options)


def steps(
    name: str, device: torch.device, dtype: torch.dtype, folder: str, bert: str, **options: Any
) -> Steps:
    """Forward and backward of two batches, float16 with a GradScaler."""
    model = model_of(name.partition(" ")[0], bert, **options)
    batch_size, contrastive_batch = (4, 8) if name == IN_PARTS else (8, None)
    data = ImageTextDataModule(
        folder,
        image_size=48,
        crop_size=32,
        batch_size=batch_size,
        contrastive_batch=contrastive_batch,
        num_workers=0,
    )
    data.connect(model.requirements())
    data.setup("fit")
    model.use_data(data.provided(), "fit")
    model.to(device).train()
    # No gradient overflows at this scale; with Lightning's first one the scaler would skip steps until it fits.
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, enabled=dtype == torch.float16)
    losses = []
    for step, batch in zip(range(2), data.train_dataloader(), strict=False):
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32, cache_enabled=False):
            loss, _, _ = model._losses(move_data_to_device(batch, device), step=step)
        scaler.scale(loss).backward()
        losses.append(loss.item())
    parameters = [p for p in model.parameters() if p.requires_grad]
    scaler.unscale_(torch.optim.SGD(parameters))
    gradients = []
    for parameter in parameters:
        assert parameter.grad is not None and parameter.grad.device.type == device.type
        gradients.append(parameter.grad.flatten().cpu())
    state = {key: value.cpu() for key, value in model.objective.named_buffers()}
    return Steps(losses, torch.cat(gradients), state)
