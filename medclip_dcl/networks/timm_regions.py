"""Image encoders of timm: patch tokens, or the places of the last feature map, as regions, each projected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.weight_files import CONFIG_FILE, check_numbers
from medclip_dcl.networks.bert_folder import ModelFolderError, read_folder_json, resolve_folder
from medclip_dcl.networks.image_encoder import region_projection
from medclip_dcl.networks.pretrained_regions import PretrainedRegions

# Options by which a model of timm takes other image sizes than its own; each model knows some of them.
_ANY_SIZE = {"dynamic_img_size": True, "strict_img_size": False}


class TimmRegions(PretrainedRegions):
    """A model of timm up to `forward_features`: ViT, EVA, Swin, ConvNeXt, EfficientNet and others (extra `timm`).

    Class and register tokens are left out, and so is what timm computes behind its features: the classifier, its
    pooling and the norm of the pooled vector. Sides of images must be multiples of the patch (the stride of the last
    map); models that timm builds for one size take that size alone. Position embeddings are interpolated as timm does.
    Give either `pretrained`, or `architecture` for random weights.

    Args:
        pretrained: a folder of timm's `save_for_hf` or a repository id, e.g. timm/convnext_tiny.in12k.
        dim: size of the projected regions.
        projection: of each region, "linear" or "mlp", as in `ResNetRegions`.
        mean: of the channels, for a new network; null for that of the folder's config.json.
        std: of the channels.
        gradient_checkpointing: true: blocks are computed again in the backward pass, which saves memory.
        global_vector: true: also a vector of the whole image, which GlobalCosine compares: what timm pools for its
            classifier (class token, mean or attention pooling, and its norm), through the projection of the regions.
        architecture: `name` of a model of timm and, optionally, its `model_args`, as returned by `config`.

    Raises:
        UserError: a setting out of range; timm is not installed or does not know the model.
        ModelFolderError: a folder of another library; weights that do not fit exactly.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        dim: int = 128,
        projection: Literal["linear", "mlp"] = "linear",
        mean: list[float] | None = None,
        std: list[float] | None = None,
        gradient_checkpointing: bool = False,
        global_vector: bool = False,
        *,
        architecture: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(pretrained, architecture, dim, projection, mean, std, global_vector)
        folder = None if pretrained is None else resolve_folder(pretrained)
        raw: dict[str, Any] = {}
        if folder is not None:
            raw = read_folder_json(folder / CONFIG_FILE)
            if not isinstance(raw.get("architecture"), str) or "pretrained_cfg" not in raw:
                raise ModelFolderError(
                    f"{folder / CONFIG_FILE}: expected architecture and pretrained_cfg of timm, found "
                    f"{', '.join(sorted(raw)[:8])}; for a model of transformers choose TransformersRegions"
                )
            architecture = {"name": raw["architecture"], "model_args": raw.get("model_args", {})}
            if mean is None:
                mean, std = (raw["pretrained_cfg"].get(name) for name in ("mean", "std"))
            if mean is None or std is None:
                raise UserError(
                    f"image_encoder.mean and std: {folder / CONFIG_FILE} has none in pretrained_cfg; set them"
                )
        self.name, self.model_args = _checked(architecture or {})
        model, options = _created(self.name, self.model_args)
        with torch.device("meta"):
            twin, _ = _created(self.name, self.model_args)
        built_for = self.model_args.get("img_size") or twin.pretrained_cfg["input_size"][-1]
        size = built_for if isinstance(built_for, int) else built_for[-1]
        self._one_size = size if twin.pretrained_cfg.get("fixed_input_size") and not options else None
        maps, vector, unused = _on_meta(_Features(twin, global_vector), size)
        for name in unused:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, None)
        if folder is not None:
            _load(model, self.name, folder, raw)
        if mean is not None and std is not None:
            self.mean, self.std = mean, std
        if gradient_checkpointing:
            model.set_grad_checkpointing(True)
        self.backbone = _Features(model, global_vector)
        self._channels_last = maps.ndim == 3 or getattr(model, "output_fmt", "NCHW") == "NHWC"
        self._n_prefix = getattr(model, "num_prefix_tokens", 0) if maps.ndim == 3 else 0
        self.stride = int(model.feature_info[-1]["reduction"])
        self.channels = maps.shape[-1 if self._channels_last else 1]
        if vector is not None and vector.shape[1] != self.channels:
            raise UserError(
                f"image_encoder.global_vector: that of {self.name} has {vector.shape[1]} channels, its regions have "
                f"{self.channels}; set it to false"
            )
        self.projection = region_projection(projection, self.channels, dim)

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


def _checked(architecture: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a model that timm knows."""
    try:
        import timm
    except ImportError as error:
        raise UserError(
            "image_encoder: TimmRegions needs the package timm: pip install -e '.[timm]'"
        ) from error
    name = architecture.get("name", "")
    if not timm.is_model(name):
        raise UserError(
            f"image_encoder: timm {timm.__version__} does not know the model {name!r}; update timm, or choose one of "
            "timm.list_models()"
        )
    arguments = architecture.get("model_args") or {}
    return name, {key: value for key, value in arguments.items() if key not in ("num_classes", *_ANY_SIZE)}


def _created(name: str, arguments: Mapping[str, Any], n_classes: int = 0) -> tuple[Any, dict[str, Any]]:
    """A model with random weights, and those of `_ANY_SIZE` that it takes."""
    import timm

    both, (first, last) = _ANY_SIZE, ({key: value} for key, value in _ANY_SIZE.items())
    for options in (both, first, last, {}):
        try:
            fixed = {"pretrained": False, "checkpoint_path": "", "num_classes": n_classes}
            return timm.create_model(name, **fixed, **arguments, **options), options
        except TypeError as error:
            reason = str(error)
    raise UserError(f"image_encoder.architecture.model_args: {name}: {reason}")


def _on_meta(features: _Features, size: int) -> tuple[Tensor, Tensor | None, list[str]]:
    """Features of a model on the meta device, and the names of the parameters that they do not depend on."""
    names, parameters = zip(*features.model.named_parameters(), strict=True)
    with torch.enable_grad():
        maps, vector = features(torch.empty(2, 3, size, size, device="meta"))
        total = maps.sum() if vector is None else maps.sum() + vector.sum()
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    return maps, vector, [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]


def _load(model: nn.Module, name: str, folder: Any, raw: Mapping[str, Any]) -> None:
    """Load a folder's weights through timm, which converts older names and refuses what does not fit."""
    import timm

    n_classes = raw.get("num_classes", raw["pretrained_cfg"].get("num_classes"))
    try:
        # With the classifier of the file, timm loads strictly.
        whole = timm.create_model(f"local-dir:{folder.resolve()}", pretrained=True, num_classes=n_classes)
        state = whole.state_dict()
        model.load_state_dict({key: state[key] for key in model.state_dict()})
    except Exception as error:  # timm's readers fail on other bytes with many exceptions
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelFolderError(
            f"{folder}: weights of {name} do not fit: {reason}; copy the folder again"
        ) from error
    check_numbers(model.state_dict(), folder)
