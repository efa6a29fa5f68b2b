"""Image encoders of transformers: their patch tokens (or last feature map) as regions, each projected."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor, nn
from transformers import CLIPVisionModelWithProjection, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from medclip_dcl.common.errors import UserError, check_choice, check_range
from medclip_dcl.common.find_model import CONFIG_FILE
from medclip_dcl.networks.bert_folder import load_library_model, read_folder_json, resolve_folder
from medclip_dcl.networks.image_encoder import Features, Images, ProjectedRegions
from medclip_dcl.networks.library_folder import (
    check_source,
    forward_settings,
    library_config,
    plain_settings,
    pretrained_size,
    unknown_family,
)

_CLIP, _SIGLIP = "clip_vision_model", "siglip_vision_model"
FINAL_NORM = {
    **dict.fromkeys(("vit", "deit", "vit_msn", "ijepa", "dinov2", "dinov2_with_registers", "dinov3_vit")),
    **dict.fromkeys(("dinov3_convnext", "swin", "swinv2", _SIGLIP)),
    _CLIP: "post_layernorm",
    "convnext": "layernorm",
    "convnextv2": "layernorm",
}
"""Families (model_type) -> norm that transformers applies to the pooled vector alone, here to each region (choice)."""

_WITHOUT_GLOBAL_VECTOR = ("ijepa", "swin", "swinv2", "convnext", "convnextv2")

# Settings of image processors that change grey levels or channels, beside those of the normalisation.
_CHANGES = ("rescale_offset", "offset", "do_flip_channel_order", "include_top")
_BLOCK = re.compile(r"\.(\d+)\.")


class PretrainedRegions(ProjectedRegions):
    """Base class of encoders around a library's model, with a linear projection of each region."""

    channels: int
    projection_kind: str = "linear"

    def __init__(self, dim: int, global_vector: bool) -> None:
        super().__init__()
        check_range("image_encoder", "[1, inf)", dim=dim)
        self.dim, self.has_global_vector = dim, global_vector

    def set_normalisation(self, mean: Any, std: Any) -> None:
        """Of a new network; ImageNet's where both are None."""
        given = [x for x in (mean, std) if isinstance(x, Sequence) and len(x) == 3]
        if not (mean is std is None or len(given) == 2):
            raise UserError(f"image_encoder: expected 3 numbers each, found mean {mean}, std {std}; set both")
        if given:
            self.mean, self.std = given

    @property
    def feature_dim(self) -> int:
        return self.channels

    def config(self) -> dict[str, Any]:
        return {"architecture": self.architecture(), "global_vector": self.has_global_vector, "dim": self.dim}

    def trunk_settings(self) -> dict[str, Any]:
        return {"architecture": self.architecture(), "global_vector": self.has_global_vector}

    def architecture(self) -> dict[str, Any]:
        """Description of the library's model, in plain values."""
        raise NotImplementedError

    def check_sides(self, sides: Mapping[str, int]) -> None:
        for name, side in sides.items():
            if side % self.stride:
                lower = side // self.stride * self.stride
                raise UserError(
                    f"{name}: expected a multiple of the image encoder's patch, {self.stride} pixels, found {side}: "
                    f"pixels would be left out or made up at the border; give {lower or self.stride}"
                )

    def features(self, images: Images) -> Features:
        return self._states(images)[0]

    def features_and_global(self, images: Images) -> tuple[Features, Float[Tensor, "image channel"]]:
        features, vector = self._states(images)
        assert vector is not None, "only of an encoder with a global vector"
        return features, vector

    def _states(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Features of the regions in their places, and of the whole image where there is a global vector."""
        raise NotImplementedError

    def _grid(self, images: Tensor) -> tuple[int, int]:
        """Rows and columns of the regions."""
        height, width = images.shape[-2:]
        self.check_sides({"height of the images": height, "width of the images": width})
        return height // self.stride, width // self.stride


class TransformersRegions(PretrainedRegions):
    """An image model of transformers: ViT, DINOv2, DINOv3, Swin, ConvNeXt, the image towers of CLIP and SigLIP.

    A region is a patch token after the final norm, or a place of the last feature map; class and register tokens are
    left out. Sides of images must be multiples of the patch (of the stride of the last stage); position embeddings are
    interpolated as transformers does it. Give either `pretrained`, or `architecture` for random weights.

    Args:
        pretrained: a folder or repository id of transformers, e.g. microsoft/rad-dino; its config.json names one of the
            families in `FINAL_NORM`, or a CLIP or SigLIP, whose image tower is used.
        dim: size of the projected regions.
        projection: of each region: "linear", with random initial weights; "pretrained": CLIP's visual_projection, or
            nothing behind SigLIP's pooling, so that `dim` is theirs.
        mean: of the channels, for a new network; null for that of the folder's preprocessor_config.json.
        std: of the channels.
        gradient_checkpointing: true: blocks are computed again in the backward pass, which saves memory.
        global_vector: true: also a vector of the whole image, which GlobalCosine compares: the class token after the
            final norm, or SigLIP's attention pooling, through the projection of the regions. SigLIP's regions then
            pass through that pooling, too, each alone (choice).
        architecture: content of a config.json, as returned by `config`.

    Raises:
        UserError: a setting out of range; a folder without preprocessor_config.json where mean or std is null.
        ModelFolderError: an unknown family, or one that needs code of its own; weights that do not fit exactly.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        dim: int = 128,
        projection: Literal["linear", "pretrained"] = "linear",
        mean: list[float] | None = None,
        std: list[float] | None = None,
        gradient_checkpointing: bool = False,
        global_vector: bool = False,
        *,
        architecture: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(dim, global_vector)
        check_source("image_encoder", pretrained, {"architecture": architecture})
        check_choice("image_encoder.projection", projection, ("linear", "pretrained"))
        self.projection_kind = projection
        folder = None if pretrained is None else resolve_folder(pretrained)
        if folder is None:
            config = _image_config(dict(architecture or {}), "image_encoder.architecture")
        else:
            config = _image_config(read_folder_json(folder / CONFIG_FILE), str(folder / CONFIG_FILE))
        kind, options = _without_pooler(config, global_vector)
        if folder is None:
            self.backbone = kind(config, **options)
        else:
            remedy = f"give the folder of a {config.model_type}"
            self.backbone = load_library_model(kind, folder, config, remedy, **options)
            if mean is None or std is None:
                of_folder = _normalisation(folder)
                mean, std = mean or of_folder[0], std or of_folder[1]
        self.set_normalisation(mean, std)
        embeddings: Any = getattr(self.backbone, "embeddings", None)
        if getattr(embeddings, "mask_token", None) is not None:
            embeddings.mask_token = None  # of masked training; it would have no gradient
        if gradient_checkpointing:
            self.backbone.gradient_checkpointing_enable({"use_reentrant": False})
        # Each stage of Swin and ConvNeXt halves the map; the patch of DINOv3's ConvNeXt is not in its configuration.
        self.stride = int(getattr(config, "patch_size", 4)) * 2 ** (len(getattr(config, "depths", "1")) - 1)
        self._norm_name = FINAL_NORM[config.model_type]
        self.channels = (getattr(config, "hidden_sizes", None) or [config.hidden_size])[-1]
        interpolates = "interpolate_pos_encoding" in inspect.signature(kind.forward).parameters
        self._options = {"interpolate_pos_encoding": True} if interpolates else {}
        layers = (x for x in self.backbone.modules() if hasattr(x, "set_shift_and_window_size"))
        self._windows = [(layer, layer.shift_size, layer.window_size) for layer in layers]
        if projection == "pretrained":
            self.projection = self._own_projection(config, folder)
        else:
            self.projection = nn.Conv2d(self.channels, dim, kernel_size=1)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "projection": self.projection_kind}

    def architecture(self) -> dict[str, Any]:
        return plain_settings(self.backbone.config)

    def trunk_settings(self) -> dict[str, Any]:
        config = self.backbone.config
        own = {"family": config.model_type, "architecture": forward_settings(config)}
        return {**super().trunk_settings(), **own}

    def check_sides(self, sides: Mapping[str, int]) -> None:
        super().check_sides(sides)
        config = self.backbone.config
        for name, side in sides.items():
            # transformers' Swin makes its windows smaller, but not the table of their position biases.
            if config.model_type == "swin" and side // self.stride < config.window_size:
                raise UserError(
                    f"{name}: expected at least {config.window_size * self.stride} pixels, a window of the Swin's last "
                    f"map, found {side}"
                )

    def _states(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        grid = self._grid(images)
        # transformers' Swin changes them at a small image, for all later ones.
        for layer, shift, window in self._windows:
            layer.shift_size, layer.window_size = shift, window
        output = self.backbone(pixel_values=images, **self._options)
        states = output.last_hidden_state
        if states.ndim == 4:
            states = states.flatten(2).transpose(1, 2)
        if self._norm_name is not None:
            states = self.backbone.get_submodule(self._norm_name)(states)
        regions = states[:, -grid[0] * grid[1] :].transpose(1, 2).unflatten(2, grid)
        if not self.has_global_vector:
            return regions, None
        if self.backbone.config.model_type != _SIGLIP:
            return regions, states[:, 0]
        alone = self.backbone.head(states.flatten(0, 1)[:, None]).unflatten(0, states.shape[:2])
        return alone.transpose(1, 2).unflatten(2, grid), output.pooler_output

    def _own_projection(self, config: Any, folder: Path | None) -> nn.Module:
        """CLIP's projection into the space of the texts; SigLIP's pooling has none behind it."""
        own = {_CLIP: "projection_dim", _SIGLIP: "hidden_size"} if self.has_global_vector else {}
        pretrained_size("image_encoder", config, own, f"global_vector {self.has_global_vector}", self.dim)
        if config.model_type == _SIGLIP:
            return nn.Identity()
        found = nn.Conv2d(config.hidden_size, self.dim, kernel_size=1, bias=False)
        if folder is not None:
            advice = "give a folder of CLIP that has both towers"
            whole = load_library_model(CLIPVisionModelWithProjection, folder, config, advice)
            found.weight.data = whole.visual_projection.weight.data[..., None, None].clone()
        return found

    def feature_layers(self) -> list[list[nn.Parameter]]:
        """The embeddings, then each block (each stage of Swin and ConvNeXt), the last one with the final norm."""
        layers: dict[int, list[nn.Parameter]] = {}
        block = -1
        for name, parameter in self.backbone.named_parameters():
            found = _BLOCK.search(name)
            block = block if found is None else int(found[1])
            layers.setdefault(block, []).append(parameter)
        return [layers[place] for place in sorted(layers)]


def _image_config(raw: dict[str, Any], source: str) -> Any:
    """transformers' configuration of an image model, or that of the image tower of two; never runs code of a folder."""
    config = library_config(raw, source, "vision_config")
    if config is None or config.model_type not in FINAL_NORM:
        expected = f"one of {', '.join(FINAL_NORM)}, clip and siglip"
        remedy = "give another, a model of timm (TimmRegions), or a class of your own (docs/contributing.md)"
        raise unknown_family(raw, source, expected, remedy)
    for name, side in ((name, getattr(config, name, 0)) for name in ("image_size", "patch_size")):
        if isinstance(side, Sequence):
            if len({*side}) > 1:
                raise UserError(f"{source}: {name}: expected equal sides, found {side}; give another model")
            setattr(config, name, side[0])
    if (channels := getattr(config, "num_channels", 3)) != 3:
        raise UserError(f"{source}: num_channels: expected 3, found {channels}; give another model")
    return config


def _without_pooler(config: Any, global_vector: bool) -> tuple[type[PreTrainedModel], dict[str, Any]]:
    """The class of a configuration's model, and options without pooled vectors, whose weights regions do not need."""
    kind, family = MODEL_MAPPING[type(config)], config.model_type
    if global_vector and family in _WITHOUT_GLOBAL_VECTOR:
        raise UserError(
            f"image_encoder.global_vector: a {family} has no class token and no attention pooling; set it to false"
        )
    if family == _SIGLIP:
        config.vision_use_head = global_vector
    if hasattr(config, "use_mask_token"):
        config.use_mask_token = False
    has_pooler = "add_pooling_layer" in inspect.signature(kind.__init__).parameters
    return kind, {"add_pooling_layer": False} if has_pooler else {}


def _normalisation(folder: Path) -> tuple[list[float], list[float]]:
    """Mean and deviation of channels in [0, 1] that a folder's image processor expects."""
    files = [folder / name for name in ("preprocessor_config.json", "processor_config.json")]
    file = next((file for file in files if file.is_file()), files[0])
    settings = read_folder_json(file) if file.is_file() else {}
    settings = settings.get("image_processor", settings)
    is_normalised = not settings or settings.get("do_normalize", True)
    if is_normalised and not {"image_mean", "image_std"} <= settings.keys():
        raise UserError(
            f"image_encoder.mean and std: {files[0]} with image_mean and image_std is missing; copy it, or set them, "
            "e.g. mean: [0.485, 0.456, 0.406] and std: [0.229, 0.224, 0.225] for ImageNet's"
        )
    if changed := [f"{name} {settings[name]}" for name in _CHANGES if settings.get(name)]:
        raise UserError(
            f"image_encoder.mean and std: {file} changes grey levels by {', '.join(changed)}, too, which has no "
            "counterpart here; set mean and std as the model was trained, or give another model"
        )
    defaults = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
    return normalisation({**defaults, **settings}, file)


def normalisation(settings: Mapping[str, Any], source: Path) -> tuple[list[float], list[float]]:
    """Mean and deviation of channels in [0, 1] by the settings of an image processor; `source` names it in errors."""
    # The processor rescales grey levels up to 255, which are images in [0, 1] here.
    factor = settings.get("rescale_factor") if settings.get("do_rescale") else 1
    if not isinstance(factor, (int, float)) or not factor > 0:
        raise UserError(f"{source}: rescale_factor: expected a number above 0, found {factor!r}; correct it")
    values: tuple[Any, Any] = (0.0, 1.0)
    if settings.get("do_normalize"):
        values = settings.get("image_mean"), settings.get("image_std")
    mean, std = (
        per_channel(x, f"{source}: {name}")
        for x, name in zip(values, ("image_mean", "image_std"), strict=True)
    )
    return [x / (255 * factor) for x in mean], [x / (255 * factor) for x in std]


def per_channel(value: Any, name: str) -> list[float]:
    """A number for each of three channels, of which a setting states one or all."""
    values = [value] if isinstance(value, (int, float)) else list(value or ())
    values *= 3 if len(values) == 1 else 1
    if len(values) != 3 or not all(isinstance(x, (int, float)) for x in values):
        raise UserError(
            f"{name}: expected a number, or one for each of three channels, found {value!r}; correct it"
        )
    return [float(x) for x in values]
