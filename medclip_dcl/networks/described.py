"""Base class of the networks of radiographs: size, geometry and normalisation of their images."""

from __future__ import annotations

import inspect
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from medclip_dcl.common.errors import UserError, check_choice
from medclip_dcl.common.files import digest, write_text
from medclip_dcl.common.find_model import CONFIG_FILE, WEIGHTS_FILE
from medclip_dcl.common.formats import NETWORK, VERSION_KEY
from medclip_dcl.common.parts import build_part, class_path, part_config
from medclip_dcl.common.weight_files import (
    SavedModel,
    load_exactly,
    read_model,
    require_kind,
    write_safetensors,
)
from medclip_dcl.networks.adapters import merged_state
from medclip_dcl.networks.bert_folder import weights_fingerprint
from medclip_dcl.networks.image_encoder import RegionEncoder
from medclip_dcl.pictures.geometry import GEOMETRIES, View
from medclip_dcl.pictures.transforms import to_input

Network = TypeVar("Network", bound="DescribedNetwork")
ImageInput: TypeAlias = UInt8[Tensor, "image 1 height width"] | Float[Tensor, "image 3 height width"]
"""Grey levels, or images in [0, 1]."""
ImageScale: TypeAlias = Float[Tensor, "image 3"] | None
"""Brightness, contrast and mean of each image, see `medclip_dcl.pictures.transforms.to_input`."""

_OF_IMAGES = ("image_size", "mean", "std", "geometry", "prepared_size", "crop_size")
"""Entries of a description about the images that a network was trained with."""


def check_side(setting: str, value: object) -> None:
    """Refuse a side of images in pixels that is not a whole number from 1 to 10,000 (choice)."""
    if not (isinstance(value, int) and value is not True and 1 <= value <= 10_000):
        raise UserError(f"{setting}: expected a whole number of pixels from 1 to 10,000, found {value!r}")


class DescribedNetwork(nn.Module):
    """A network that describes itself."""

    kind: ClassVar[str]
    """One of `KINDS`."""
    parts: ClassVar[Mapping[str, type[nn.Module]]]
    """Names of its parts, which describe themselves, and their base classes."""

    def config(self) -> dict[str, Any]:
        """Plain values (JSON) from which `from_config` builds the same network with random weights."""
        parts = {name: part_config(getattr(self, name)) for name in self.parts}
        return {VERSION_KEY: NETWORK.version, "kind": self.kind, **parts}

    @classmethod
    def from_config(cls: type[Network], config: dict[str, Any]) -> Network:
        """A network with random weights from `config`."""
        require_kind(config, cls.kind)
        parts = {name: build_part(config[name], base) for name, base in cls.parts.items()}
        others = {name: config[name] for name in inspect.signature(cls).parameters if name not in parts}
        return cls(**parts, **others)

    @classmethod
    def from_pretrained(cls: type[Network], source: str | Path) -> Network:
        """Load a network from a folder of `save_pretrained` or a checkpoint of `fit`, in evaluation mode.

        Raises:
            MissingFileError: nothing there, or the folder is incomplete.
            UserError: a description of another version or kind, or that builds no network; weights that do not fit.
        """
        return cls.of_saved(read_model(source))

    @classmethod
    def of_saved(cls: type[Network], saved: SavedModel) -> Network:
        """`from_pretrained` of a file or folder that is read already."""
        described = saved.require_network(cls.kind)
        try:
            network = cls.from_config(described)
        # Torch, transformers and tokenizers raise almost anything for values that they do not know.
        except Exception as error:
            reason = str(error) if isinstance(error, UserError) else repr(error)
            raise UserError(f"{saved.path}: {' '.join(reason.split())[:300]}") from error
        load_exactly(network, saved.tensors(), saved.path)
        return network.eval()


class Encoded(NamedTuple):
    """Images as a network encodes them: vectors of regions in their places, and global vectors if any."""

    feature_map: Float[Tensor, "image dim region_row region_column"]
    global_vector: Float[Tensor, "image dim"] | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> Encoded:
        """Both tensors, changed alike."""
        vector = self.global_vector
        return Encoded(change(self.feature_map), None if vector is None else change(vector))


class ImageNetwork(DescribedNetwork):
    """A network of radiographs that describes the images that it was trained with: one of two kinds of model."""

    mean: Tensor
    std: Tensor
    image_encoder: RegionEncoder
    parts = {"image_encoder": RegionEncoder}

    def __init__(
        self,
        image_encoder: RegionEncoder,
        image_size: int,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        geometry: str,
        prepared_size: int | None,
        crop_size: int | None,
    ) -> None:
        super().__init__()
        check_choice("geometry", geometry, GEOMETRIES)
        check_side("image_size", image_size)
        if prepared_size is not None:
            check_side("prepared_size", prepared_size)
        self.image_size, self.crop_size, self.geometry = image_size, crop_size, geometry
        self.prepared_size = prepared_size
        self.register_buffer("mean", torch.zeros(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.ones(3, 1, 1), persistent=False)
        self.set_normalisation(mean or image_encoder.mean, std or image_encoder.std)
        self.image_encoder = image_encoder

    @property
    def view(self) -> View:
        """The part of an image that the network sees in evaluation."""
        return View(self.image_size, self.image_size, self.geometry, self.prepared_size)

    @property
    def scale(self) -> float:
        """Factor from scores to logits."""
        return 1.0

    def inputs_of(self, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Arguments of `encode` in a batch, on the network's device: images and, where they are given, image_scale."""
        names = ("images", "image_scale") if "image_scale" in batch else ("images",)
        return tuple(batch[name].to(self.mean.device) for name in names)

    def encode(self, images: ImageInput, image_scale: ImageScale = None) -> Encoded:
        """Encode grey levels, or images in [0, 1]."""
        raise NotImplementedError

    def image_vectors(self, encoded: Encoded) -> Float[Tensor, "image dim"]:
        """One vector of each image: the global one, or the mean of the regions."""
        if encoded.global_vector is not None:
            return encoded.global_vector
        return encoded.feature_map.flatten(2).mean(2)

    def fingerprint(self) -> dict[str, Any]:
        """Identity of the scores that this network gives: all that its forward pass uses."""
        return {
            "weights": weights_fingerprint(self),
            **{name: getattr(self, name) for name in ("image_size", "geometry", "prepared_size")},
            "settings": self.settings_fingerprint(),
        }

    def settings_fingerprint(self) -> dict[str, str]:
        """Digest of the settings of each part that its tensors do not show, alike in all versions of the libraries."""
        parts = {name: getattr(self, name) for name in self.parts}
        used = {name: [class_path(type(part)), part.forward_settings()] for name, part in parts.items()}
        used["image_encoder"].append(self._normalisation())
        return {name: digest(json.dumps(one, sort_keys=True).encode()) for name, one in used.items()}

    def _normalisation(self) -> dict[str, Any]:
        return {"mean": self.mean.tolist(), "std": self.std.tolist()}

    def set_normalisation(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Set mean and deviation of the channels, which no state dict holds."""
        if not (all(map(math.isfinite, [*mean, *std])) and min(std) > 0):
            raise UserError(f"mean and std: expected finite numbers, std above 0, found {mean} and {std}")
        if problem := self.unit_problem({"mean": mean, "std": std}):
            warnings.warn(f"the network's {problem}", stacklevel=2)
        self.mean.copy_(torch.tensor(mean).view(3, 1, 1))
        self.std.copy_(torch.tensor(std).view(3, 1, 1))

    def normalised(
        self, images: ImageInput, image_scale: ImageScale = None
    ) -> Float[Tensor, "image 3 height width"]:
        """Input of the image encoder from grey levels, or from images in [0, 1]."""
        return (to_input(images, image_scale).to(self.mean.dtype) - self.mean) / self.std

    def config(self) -> dict[str, Any]:
        return {**super().config(), **self.image_config()}

    def image_config(self) -> dict[str, Any]:
        """Values of `_OF_IMAGES`."""
        found: dict[str, Any] = {name: getattr(self, name) for name in _OF_IMAGES}
        return found | {name: found[name].flatten().tolist() for name in ("mean", "std")}

    @staticmethod
    def unit_problem(config: Mapping[str, Any]) -> str:
        """A line about a mean and std that are not of images in [0, 1], as those of grey levels; "" for none."""
        mean, std = config.get("mean") or (), config.get("std") or ()
        wrong = [*(x for x in mean if not 0 <= x <= 1), *(x for x in std if x > 1)]
        line = "mean and std: expected those of images in [0, 1], found {:.6g}; divide those of grey levels by 255"
        return line.format(*wrong) if wrong else ""

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors, from which `from_pretrained` loads without the original files."""
        folder = Path(folder)
        write_safetensors(merged_state(self), folder / WEIGHTS_FILE)
        write_text(json.dumps(self.config(), indent=2, sort_keys=True) + "\n", folder / CONFIG_FILE)
