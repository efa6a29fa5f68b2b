"""Convert classifiers of torchxrayvision (Cohen et al., MIDL 2022): a DenseNet or a ResNet of one channel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.finding_names import common_names
from medclip_dcl.common.weight_files import load_exactly
from medclip_dcl.networks.classifier import FindingNetwork
from medclip_dcl.networks.image_encoder import resnet_depth
from medclip_dcl.networks.timm_regions import TimmRegions

HOW_TO_SAVE = (
    "save a classifier of torchxrayvision for convert by these lines, where you trust its file: "
    'import torch, torchxrayvision as xrv; m = xrv.models.get_model("densenet121-res224-all"); '
    'torch.save({"state": m.state_dict(), "findings": m.targets}, "classifier.pt")'
)
_DENSE, _RESIDUAL = ("features.conv0.weight", "classifier.", 224), ("conv1.weight", "fc.", 512)
"""First kernel, beginning of the classifier's names, and the side in pixels that the library shows."""


def from_torchxrayvision(
    state: Mapping[str, Tensor], findings: Any, file: Path, image_size: int | None = None
) -> tuple[FindingNetwork, list[str]]:
    """Convert a classifier's state dict with a name for each logit, of which empty ones are left out.

    The library shows [-1024, 1024] in one channel. Its operating points become logit 0: logit(op_threshs) is
    subtracted, which changes no AUC; its `op_norm`, which is not linear, is left out.

    Args:
        state: of the library's DenseNet or ResNet, or of torchvision's ResNet of one channel.
        findings: names, checked here.
        file: names the source in errors.
        image_size: side in pixels; None for the library's, 224 or 512.
    """
    state = {name.removeprefix("model."): x for name, x in state.items()}
    first, head, side = _DENSE if _DENSE[0] in state else _RESIDUAL
    kernel, weight, bias = (state.pop(name, None) for name in (first, f"{head}weight", f"{head}bias"))
    architecture = _architecture(state)
    if kernel is None or weight is None or bias is None or kernel.shape[1:2] != (1,) or not architecture:
        raise UserError(
            f"{file}: expected a DenseNet, or a ResNet-18, -34 or -50, of one channel, found a first kernel of "
            f"{None if kernel is None else [*kernel.shape]} and {sorted(state)[:8]}; {HOW_TO_SAVE}"
        )
    thresholds = state.pop("op_threshs", torch.full([len(weight)], torch.nan)).float()
    is_named = isinstance(findings, list) and all(isinstance(name, str) for name in findings)
    if not is_named or not len(findings) == len(weight) == len(thresholds):
        raise UserError(
            f"{file}: findings: expected a name for each of {len(weight)} logits and {len(thresholds)} thresholds, "
            f"found {len(findings) if is_named else findings!r}; {HOW_TO_SAVE}"
        )
    kept = [place for place, name in enumerate(findings) if name]
    common, notes = common_names(findings[place] for place in kept)
    with torch.random.fork_rng(devices=[]):  # one projection for all conversions; no logit depends on it
        torch.manual_seed(0)
        encoder = TimmRegions(architecture=architecture)
    size = image_size or side
    encoder.check_sides({"image_size": size})
    names = [common[findings[place]] for place in kept]
    network = FindingNetwork(encoder, names, size, (0.5,) * 3, (1 / 2048,) * 3, "shortest")
    # The first of three equal channels is read; the others are multiplied by 0.
    state[first] = torch.cat([kernel, kernel.new_zeros(len(kernel), 2, *kernel.shape[2:])], dim=1)
    points = thresholds[kept]
    own = network.state_dict().items()
    tensors = {name: x for name, x in own if name.startswith(("image_encoder.proj", "feature_"))}
    tensors |= {f"image_encoder.backbone.model.{name}": x for name, x in state.items()}
    shift = points.logit().masked_fill(points.isnan(), 0.0)
    tensors |= {"head.weight": weight[kept], "head.bias": bias[kept] - shift}
    load_exactly(network, tensors, file)
    without = [name for name, x in zip(common, points, strict=True) if x.isnan()]
    renamed = [f"{old} is {new}" for old, new in common.items() if old != new]
    differences = {
        f"{len(findings) - len(kept)} of {len(findings)} logits without a name are left out": "" in findings,
        f"findings have their common names: {', '.join(renamed)}": renamed,
        "a logit of 0 is the library's operating point, logit(op_threshs); its op_norm is left out": (
            len(without) < len(kept)
        ),
        f"without an operating point, logits are as trained: {', '.join(without)}": without,
        "the library resizes the middle square bilinearly, here images are resized bicubically": True,
    }
    return network.eval(), [*notes, *(note for note, is_true in differences.items() if is_true)]


def _architecture(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """timm's description of what the names and shapes show; {} for another network."""
    if depth := resnet_depth(state):
        return {"name": f"resnet{depth}"}
    growth = len(state.get("features.denseblock1.denselayer1.conv2.weight", ()))
    layers = [name.split(".")[1] for name in state if name.endswith(".conv2.weight")]
    arguments = {"growth_rate": growth, "block_config": [layers.count(x) for x in sorted({*layers})]}
    return {"name": "densenet121", "model_args": arguments} if growth else {}
