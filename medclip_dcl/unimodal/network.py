"""Unimodal network: an encoder and a projection in one nn.Module that describes and rebuilds itself."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.common.weight_files import UNIMODAL
from medclip_dcl.networks.described import DescribedNetwork
from medclip_dcl.unimodal.encoders import SmallImageEncoder


class UnimodalNetwork(DescribedNetwork):
    """Features of images, and their projection into the space of the contrastive loss (SimCLR).

    Args:
        image_encoder: images to features.
        projection_dim: size of the embeddings (SSD and DCL: 128); None for the features themselves.
        hidden: size of the projection's hidden layer; None for that of the features, 0 for a linear projection.
        batch_norm: True puts BatchNorm before the ReLU of the projection.
    """

    kind = UNIMODAL
    parts = {"image_encoder": SmallImageEncoder}

    def __init__(
        self,
        image_encoder: SmallImageEncoder,
        projection_dim: int | None = 128,
        hidden: int | None = None,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        check_range("model", "[1, inf)", projection_dim=projection_dim)
        check_range("model", "[0, inf)", hidden=hidden)
        if hidden == 0 and batch_norm:
            raise UserError("model.batch_norm: expected false for a linear projection (hidden 0), found true")
        self.image_encoder = image_encoder
        self.projection_dim, self.hidden, self.batch_norm = projection_dim, hidden, batch_norm
        dims = [image_encoder.feature_dim // image_encoder.n_parts] * image_encoder.n_parts
        self.projection, *others = map(self._projection, dims)
        self.other_projections = nn.ModuleList(others)

    def _projection(self, features: int) -> nn.Module:
        if self.projection_dim is None:
            return nn.Identity()
        if self.hidden == 0:
            return nn.Linear(features, self.projection_dim)
        inner = features if self.hidden is None else self.hidden
        return nn.Sequential(
            # BatchNorm has a bias of its own.
            nn.Linear(features, inner, bias=not self.batch_norm),
            *([nn.BatchNorm1d(inner)] if self.batch_norm else []),
            nn.ReLU(inplace=True),
            nn.Linear(inner, self.projection_dim),
        )

    def features(self, images: Float[Tensor, "image channel height width"]) -> Float[Tensor, "image feature"]:
        """Features of images in [0, 1], which linear probes use."""
        return self.image_encoder(images)

    def forward(self, images: Float[Tensor, "image channel height width"]) -> Float[Tensor, "part image dim"]:
        """Embeddings, not normalised to length 1, of each part of the features; most encoders have one part."""
        parts = self.features(images).chunk(self.image_encoder.n_parts, dim=1)
        projections = (self.projection, *self.other_projections)
        return torch.stack([project(part) for project, part in zip(projections, parts, strict=True)])

    def config(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("projection_dim", "hidden", "batch_norm")}
        return {**super().config(), **own}
