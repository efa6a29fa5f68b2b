"""The image-text network: encoders, similarity and tokenizer in one nn.Module that can describe and rebuild itself.

Nothing here knows Lightning or file formats of data sets; this is what a notebook loads.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from medclip_dcl.encoders.image import RegionEncoder
from medclip_dcl.encoders.text import SentenceEncoder
from medclip_dcl.errors import UserError
from medclip_dcl.files import write_text
from medclip_dcl.formats import NETWORK, VERSION_KEY
from medclip_dcl.pictures.geometry import check_geometry
from medclip_dcl.similarity import LSENonLocal, Similarity
from medclip_dcl.weight_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    read_exported_config,
    read_state_dict,
    write_safetensors,
)

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

Part = TypeVar("Part", bound=nn.Module)


class ImageTextNetwork(nn.Module):
    """Image regions and sentences in one space, and the logits of their pairs.

    Args:
        image_encoder: images to a map of region embeddings.
        text_encoder: sentences to embeddings of the same size.
        similarity: logits from regions and sentences; default LSE+NL.
        image_size: side of the whole image as the network sees it in evaluation, in pixels.
        mean: of the three channels, images in [0, 1].
        std: of the three channels.
        geometry: how images were fitted to a square in training, see `medclip_dcl.pictures.geometry`.
        prepared_size: to which they were fitted before they were scaled to `image_size`; None for the same.
        crop_size: side of the random crops of training, in pixels; None where it is not known.

    Raises:
        ValueError: encoders (or the similarity) of different embedding sizes; an unknown geometry.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        image_encoder: RegionEncoder,
        text_encoder: SentenceEncoder,
        similarity: Similarity | None = None,
        image_size: int = 512,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        geometry: str = "stretch",
        prepared_size: int | None = None,
        crop_size: int | None = None,
    ) -> None:
        super().__init__()
        self.image_encoder = image_encoder
        self.text_encoder = text_encoder
        self.similarity = LSENonLocal(dim=image_encoder.dim) if similarity is None else similarity
        sizes = {"image_encoder": image_encoder.dim, "text_encoder": text_encoder.dim}
        sizes["similarity"] = getattr(self.similarity, "dim", image_encoder.dim)
        if len(set(sizes.values())) > 1:
            raise UserError(f"embedding sizes (dim) must agree, got {sizes}")
        self.image_size, self.crop_size = image_size, crop_size
        self.geometry, self.prepared_size = check_geometry(geometry), prepared_size
        self.register_buffer("mean", torch.tensor(list(mean)).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(list(std)).view(3, 1, 1), persistent=False)

    @property
    def stride(self) -> int:
        """Pixels for each region."""
        return self.image_encoder.stride

    @property
    def region_centre(self) -> float:
        """Where a region lies in its cell, see ``RegionEncoder.region_centre``."""
        return self.image_encoder.region_centre

    def feature_map(
        self, images: Float[Tensor, "image 3 height width"]
    ) -> Float[Tensor, "image dim region_row region_column"]:
        """Projected regions in their places; images in [0, 1]. Not normalised to length 1."""
        return self.image_encoder((images - self.mean) / self.std)

    def regions(
        self, feature_map: Float[Tensor, "image dim region_row region_column"]
    ) -> Float[Tensor, "image region dim"]:
        """The regions of a feature map, row by row."""
        return feature_map.flatten(2).transpose(1, 2)

    def encode_sentences(
        self, tokens: Int[Tensor, "sentence token"], lengths: Int[Tensor, " sentence"]
    ) -> Float[Tensor, "sentence dim"]:
        """Sentence embeddings; not normalised to length 1."""
        return self.text_encoder(tokens, lengths)

    def forward(
        self,
        images: Float[Tensor, "image 3 height width"],
        tokens: Int[Tensor, "sentence token"],
        lengths: Int[Tensor, " sentence"],
    ) -> Float[Tensor, "sentence image"]:
        """Logits of every sentence with every image."""
        regions = self.regions(self.feature_map(images))
        return self.similarity(regions, self.encode_sentences(tokens, lengths))

    def tokenize(
        self, texts: Sequence[str]
    ) -> tuple[Int[Tensor, "sentence token"], Int[Tensor, " sentence"]]:
        """Padded word pieces and their numbers, on the CPU."""
        return pad_tokens(self.text_encoder.tokenize(texts))

    @torch.no_grad()
    def embed_texts(self, texts: Sequence[str], batch_size: int = 256) -> Float[Tensor, "sentence dim"]:
        """Sentence embeddings of texts, without gradient, in batches; not normalised to length 1."""
        parts = []
        for start in range(0, len(texts), batch_size):
            tokens, lengths = self.tokenize(texts[start : start + batch_size])
            parts.append(self.encode_sentences(tokens.to(self.mean.device), lengths.to(self.mean.device)))
        return torch.cat(parts) if parts else self.mean.new_zeros((0, self.text_encoder.dim))

    def config(self) -> dict[str, Any]:
        """Plain values (JSON) from which `from_config` builds the same network with random weights."""
        return {
            VERSION_KEY: NETWORK.version,
            "image_encoder": part_config(self.image_encoder),
            "text_encoder": part_config(self.text_encoder),
            "similarity": part_config(self.similarity),
            "image_size": self.image_size,
            "mean": self.mean.flatten().tolist(),
            "std": self.std.flatten().tolist(),
            "geometry": self.geometry,
            "prepared_size": self.prepared_size,
            "crop_size": self.crop_size,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ImageTextNetwork:
        """Build a network from what `config` returned.

        Raises:
            ValueError: a format version that this program does not read, a classifier, or a part that is no encoder or
                similarity of a module that is known: only modules of medclip_dcl, or those already imported, are
                looked into.
        """
        config = dict(config)
        NETWORK.upgrade(config, "this model")
        if "findings" in config:
            raise UserError(
                "this model is a classifier of findings and knows no text; load it with "
                "medclip_dcl.models.classifier.Classifier.load_from_checkpoint"
            )
        return cls(
            build_part(config["image_encoder"], RegionEncoder),
            build_part(config["text_encoder"], SentenceEncoder),
            build_part(config["similarity"], Similarity),
            image_size=config["image_size"],
            mean=config["mean"],
            std=config["std"],
            # Models of before there was a choice.
            geometry=config.get("geometry", "stretch"),
            prepared_size=config.get("prepared_size"),
            crop_size=config.get("crop_size"),
        )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors, from which `from_pretrained` loads without the original files."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        temporary = folder / f".{WEIGHTS_FILE}.tmp"
        write_safetensors(weights, temporary)
        temporary.replace(folder / WEIGHTS_FILE)
        write_text(json.dumps(self.config(), indent=2, sort_keys=True) + "\n", folder / CONFIG_FILE)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> ImageTextNetwork:
        """Load what `save_pretrained` wrote, in evaluation mode.

        Raises:
            FileNotFoundError: config.json or model.safetensors is missing.
            ValueError: see `from_config`; or weights that do not fit.
        """
        folder = Path(folder)
        network = cls.from_config(read_exported_config(folder))
        load_exactly(network, read_state_dict(folder / WEIGHTS_FILE), str(folder / WEIGHTS_FILE))
        return network.eval()


def pad_tokens(
    ids: Sequence[Sequence[int]],
) -> tuple[Int[Tensor, "sentence token"], Int[Tensor, " sentence"]]:
    """Word-piece lists as one zero-padded tensor, and their lengths."""
    lengths = torch.tensor([len(row) for row in ids], dtype=torch.int64)
    tokens = torch.zeros((len(ids), max((len(row) for row in ids), default=0)), dtype=torch.int64)
    for row, values in enumerate(ids):
        tokens[row, : len(values)] = torch.tensor(values)
    return tokens, lengths


def load_exactly(module: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Load weights of which none is missing, left over or of another shape.

    Raises:
        ValueError: names what does not fit.
    """
    expected = module.state_dict()
    missing, unexpected = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
    shapes = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in expected
        if name in state and state[name].shape != expected[name].shape
    ]
    if missing or unexpected or shapes:
        raise UserError(
            f"{source}: weights do not fit the network; missing {missing or 'none'}, "
            f"unexpected {unexpected or 'none'}, of another shape {shapes or 'none'}"
        )
    module.load_state_dict(state)


@runtime_checkable
class Describable(Protocol):
    """Something that returns the arguments it can be built from again."""

    def config(self) -> dict[str, Any]: ...


def part_config(part: Describable) -> dict[str, Any]:
    """Class path and arguments of a part, in plain values, for a checkpoint."""
    kind = type(part)
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": part.config()}


def build_part(config: dict[str, Any], base: type[Part]) -> Part:
    """The part that `part_config` described; a checkpoint cannot make us import or call anything else.

    Raises:
        ValueError: the class is not a `base`, or stands in a module that is neither of medclip_dcl nor imported.
    """
    module_name, _, class_name = config["class_path"].rpartition(".")
    if module_name.split(".")[0] == "medclip_dcl":
        importlib.import_module(module_name)
    kind = getattr(sys.modules.get(module_name), class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise UserError(
            f"the checkpoint names {config['class_path']}, which is no known {base.__name__}; "
            f"if it is a class of yours, import {module_name} before loading (from a folder on PYTHONPATH)"
        )
    return kind(**config["init_args"])
