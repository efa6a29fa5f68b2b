"""Image encoders of timm: patch tokens, or the places of the last feature map, as regions, each projected."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medclip_dcl.common.errors import UserError, needs_extra
from medclip_dcl.common.find_model import CONFIG_FILE
from medclip_dcl.common.weight_files import check_numbers, check_sizes
from medclip_dcl.networks.bert_folder import ModelFolderError, folder_shapes, read_folder_json, resolve_folder
from medclip_dcl.networks.library_folder import check_source
from medclip_dcl.networks.pretrained_regions import PretrainedRegions

# Options by which a model of timm takes other image sizes than its own; each model knows some of them.
_ANY_SIZE = {"dynamic_img_size": True, "strict_img_size": False}


class TimmRegions(PretrainedRegions):
    """A model of timm up to `forward_features`: ViT, EVA, Swin, ConvNeXt, EfficientNet and others (extra `models`).

    Class and register tokens are left out, and so is what timm computes behind its features: the classifier, its
    pooling and the norm of the pooled vector. Sides of images must be multiples of the patch (the stride of the last
    map); models that timm builds for one size take that size alone. Position embeddings are interpolated as timm does.
    Give either `pretrained`, or `architecture` for random weights.

    Args:
        pretrained: a folder of timm's `save_for_hf` or a repository id, e.g. timm/convnext_tiny.in12k.
        dim: size of the projected regions.
        mean: of the channels, for a new network; null for that of the folder's config.json.
        std: of the channels.
        gradient_checkpointing: true: blocks are computed again in the backward pass, which saves memory.
        global_vector: true: also a vector of the whole image, which GlobalCosine compares: what timm pools for its
            classifier (class token, mean or attention pooling, and its norm), through the projection of the regions.
        architecture: `name` of a model of timm and, optionally, its `model_args`, as returned by `config`.

    Raises:
        UserError: a setting out of range; timm is not installed, or cannot build the model.
        ModelFolderError: a folder of another library, or one that timm cannot load exactly.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        dim: int = 128,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        gradient_checkpointing: bool = False,
        global_vector: bool = False,
        *,
        architecture: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(dim, global_vector)
        check_source("image_encoder", pretrained, {"architecture": architecture})
        folder = None if pretrained is None else resolve_folder(pretrained)
        n_classes: Any = 0
        if folder is not None:
            raw = read_folder_json(folder / CONFIG_FILE)
            own = raw.get("pretrained_cfg")
            if not (isinstance(raw.get("architecture"), str) and isinstance(own, Mapping)):
                raise ModelFolderError(
                    f"{folder / CONFIG_FILE}: expected architecture and pretrained_cfg of timm, found "
                    f"{', '.join(sorted(raw)[:8])}; for a model of transformers choose TransformersRegions"
                )
            architecture = {"name": raw["architecture"], "model_args": raw.get("model_args")}
            check_sizes(raw.get("model_args") or {}, folder_shapes(folder), folder)
            n_classes = raw.get("num_classes", own.get("num_classes"))
            mean, std = mean or own.get("mean"), std or own.get("std")
            if mean is None or std is None:
                raise UserError(
                    f"image_encoder.mean and std: {folder / CONFIG_FILE} has none in pretrained_cfg; set them"
                )
        self.set_normalisation(mean, std)
        described = architecture or {}
        self.name = described.get("name", "")
        if ":" in self.name:
            raise UserError(
                f"image_encoder.architecture.name: expected the name of a model of timm, found {self.name!r}, which "
                "names files elsewhere; give a folder or repository id as pretrained"
            )
        arguments = (described.get("model_args") or {}).items()
        self.model_args = {key: x for key, x in arguments if key not in ("num_classes", *_ANY_SIZE)}
        if (channels := self.model_args.get("in_chans", 3)) != 3:
            raise UserError(f"{self.name}: in_chans: expected 3, found {channels}; give another model")
        try:
            model, takes_any_size = _created(self.name, self.model_args, folder, n_classes)
            defaults = model.pretrained_cfg
            built_for = self.model_args.get("img_size") or defaults["input_size"][-1]
            size = built_for if isinstance(built_for, int) else built_for[-1]
            self.stride = int(model.feature_info[-1]["reduction"])
            self._one_size = size if defaults.get("fixed_input_size") and not takes_any_size else None
            side = self._one_size or max(1, size // self.stride) * self.stride
            maps, vector, unused = _on_meta(_Features(model, global_vector), side)
        except UserError:
            raise
        except Exception as error:  # timm reads, builds and computes in many ways
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            if folder is None:
                raise UserError(f"image_encoder.architecture: timm, {self.name}: {reason}") from error
            raise ModelFolderError(
                f"{folder}: timm, {self.name}: {reason}; update timm, or copy the folder again"
            ) from error
        for name in unused:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, None)
        if folder is not None:
            check_numbers(model.state_dict(), folder)
        if gradient_checkpointing:
            model.set_grad_checkpointing(True)
        self.backbone = _Features(model, global_vector)
        self._channels_last = maps.ndim == 3 or getattr(model, "output_fmt", "NCHW") == "NHWC"
        self._n_prefix = getattr(model, "num_prefix_tokens", 0) if maps.ndim == 3 else 0
        self.channels = maps.shape[-1 if self._channels_last else 1]
        count = maps[0].numel() // self.channels - self._n_prefix
        if side % self.stride or count != (side // self.stride) ** 2:
            raise UserError(
                f"image_encoder: {self.name}: expected a region for each {self.stride} x {self.stride} pixels, found "
                f"{count} of its {side} x {side}; give a model whose features are a map of its image"
            )
        if vector is not None and vector.shape[1] != self.channels:
            raise UserError(
                f"image_encoder.global_vector: that of {self.name} has {vector.shape[1]} channels, its regions have "
                f"{self.channels}; set it to false"
            )
        self.projection = nn.Conv2d(self.channels, dim, kernel_size=1)

    def architecture(self) -> dict[str, Any]:
        return {"name": self.name, "model_args": self.model_args}

    def check_sides(self, sides: Mapping[str, int]) -> None:
        super().check_sides(sides)
        for name, side in sides.items():
            if self._one_size not in (None, side):
                raise UserError(
                    f"{name}: expected {self._one_size} pixels, the only size of {self.name}, found {side}"
                )

    def _states(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        grid = self._grid(images)
        maps, vector = self.backbone(images)
        if maps.ndim == 3:
            maps = maps[:, self._n_prefix :]
            maps = maps.unflatten(1, grid) if maps.shape[1] == grid[0] * grid[1] else maps[:, None]
        if self._channels_last:
            maps = maps.permute(0, 3, 1, 2)
        if maps.shape[2:] != grid:
            raise UserError(
                f"image_encoder: expected {grid[0]} x {grid[1]} regions of {self.name}, found "
                f"{maps.shape[2]} x {maps.shape[3]}; choose a model whose features are a map of its image"
            )
        return maps, vector

    def feature_layers(self) -> list[list[nn.Parameter]]:
        """The layers of timm's own grouping: the stem, then each block, the last one with the final norm."""
        from timm.models import group_parameters

        model = self.backbone.model
        names = group_parameters(model, model.group_matcher(coarse=False))
        return [[model.get_parameter(name) for name in names[layer]] for layer in sorted(names)]


class _Features(nn.Module):
    """A model of timm without what follows its features, or without its classifier alone."""

    def __init__(self, model: nn.Module, is_pooled: bool) -> None:
        super().__init__()
        self.model: Any = model
        self.is_pooled = is_pooled

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        maps = self.model.forward_features(images)
        return maps, self.model.forward_head(maps, pre_logits=True) if self.is_pooled else None


def _created(
    name: str, arguments: Mapping[str, Any], folder: Path | None, n_classes: int
) -> tuple[Any, bool]:
    """A model without its classifier, and whether it takes other image sizes than its own.

    With the classifier of the file, timm loads strictly, and converts older names.
    """
    try:
        import timm
    except ImportError as error:
        raise UserError(needs_extra("image_encoder: TimmRegions", "timm", "models")) from error
    source = name if folder is None else f"local-dir:{folder.resolve()}"
    fixed = {"pretrained": folder is not None, "checkpoint_path": "", "num_classes": n_classes}
    first, last = ({key: value} for key, value in _ANY_SIZE.items())
    for options in (_ANY_SIZE, first, last):
        try:
            model = timm.create_model(source, **fixed, **arguments, **options)
            break
        except TypeError:
            continue
    else:
        options, model = {}, timm.create_model(source, **fixed, **arguments)
    if n_classes:
        model.reset_classifier(0)
    return model, bool(options)


def _on_meta(features: _Features, size: int) -> tuple[Tensor, Tensor | None, list[str]]:
    """Features of a copy on the meta device, and the names of the parameters that they do not depend on."""
    features = copy.deepcopy(features).to("meta")
    names, parameters = zip(*features.model.named_parameters(), strict=True)
    with torch.enable_grad():
        maps, vector = features(torch.empty(2, 3, size, size, device="meta"))
        total = maps.sum() if vector is None else maps.sum() + vector.sum()
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    return maps, vector, [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]
