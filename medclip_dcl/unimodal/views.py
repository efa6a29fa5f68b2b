"""Unimodal objectives: the loss of several augmented views of each image of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from medclip_dcl.common.distributed import gather_with_grad
from medclip_dcl.objectives.contrastive import at_least_float32

Views: TypeAlias = Float[Tensor, "view image dim"]
LossAndFigures: TypeAlias = tuple[Float[Tensor, ""], dict[str, Tensor]]


class ViewsObjective(nn.Module):
    """Base class: the loss of a batch of images, of which each has `n_views` views.

    A subclass implements `loss_of_batch` on the images of all processes, which every process computes alike: it costs
    little beside an encoder. Under DistributedDataParallel gradients are those of one process with the whole batch.

    Attributes:
        n_views: views of each image that `forward` takes.
        n_members: how many of them, the last ones, are views of other training images of the image's class.
        requires: names of the images' fields, (image,) each, that it takes.
        min_images: images that a batch must have (2: those of others are the negatives).
    """

    n_views: int = 2
    n_members: int = 0
    min_images: int = 2
    requires: tuple[str, ...] = ()

    def forward(self, embeddings: Views, fields: Mapping[str, Tensor]) -> LossAndFigures:
        """Loss, and statistics to log, from this process's images; each the same on all processes."""
        with torch.autocast(device_type=embeddings.device.type, enabled=False):
            embeddings = at_least_float32(embeddings)
            embeddings = gather_with_grad(embeddings.transpose(0, 1)).transpose(0, 1)
            if len(embeddings) != self.n_views or embeddings.shape[1] < self.min_images:
                raise ValueError(
                    f"{type(self).__name__}: expected {self.n_views} views of {self.min_images}+ images, found "
                    f"{len(embeddings)} of {embeddings.shape[1]}"
                )
            required = {name: gather_with_grad(fields[name]) for name in self.requires}
            return self.loss_of_batch(embeddings, required)

    def loss_of_batch(self, embeddings: Views, fields: Mapping[str, Tensor]) -> LossAndFigures:
        """Mean loss of the images of all processes, and figures to log."""
        raise NotImplementedError
