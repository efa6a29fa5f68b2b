"""CURL's hinge and logistic losses on margins between inner products, for pairs and for blocks of similar points.

And cross entropy with labels, the supervised training beside which CURL puts them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from medclip_dcl.common.errors import check_range
from medclip_dcl.objectives.contrastive import at_least_float32, reduce_losses
from medclip_dcl.unimodal.views import LossAndFigures, Views, ViewsObjective

Loss = Literal["hinge", "logistic"]
Similar = Literal["views", "class"]
"""Other points of an anchor's class: views of its image, or other images of the class."""


def margin_loss(margins: Float[Tensor, "*batch rival"], loss: str = "logistic") -> Float[Tensor, "*batch"]:
    """Multi-class loss of the margins v by which the right class leads its rivals.

    Saunshi et al., ICML 2019, section 2::

        hinge     max{ 0, 1 + max_i(-v_i) }
        logistic  log2( 1 + sum_i exp(-v_i) )

    Both are convex, fall in every v_i and bound the error: at least 1 where a margin is 0 or below. Times ln 2,
    the logistic loss is softmax cross entropy.

    Example:
        >>> margin_loss(torch.tensor([0.5, 2.0]), "hinge").item()
        0.5
    """
    if loss not in ("hinge", "logistic"):
        raise ValueError(f'loss: expected "hinge" or "logistic", found {loss!r}')
    margins = at_least_float32(margins)
    if loss == "hinge":
        return (1 - margins.amin(-1)).clamp(min=0)
    log_rivals = torch.logsumexp(-margins, -1)
    # logaddexp and not one logsumexp with the 0: the loss of a margin of 50 is exp(-50) and not 0.
    return torch.logaddexp(log_rivals, torch.zeros_like(log_rivals)) / math.log(2)


def k_negative_loss(
    anchors: Float[Tensor, "anchor dim"],
    positives: Float[Tensor, "anchor dim"],
    negatives: Float[Tensor, "anchor negative dim"],
    *,
    loss: str = "logistic",
    reduction: str = "mean",
) -> Float[Tensor, ""] | Float[Tensor, "anchor"]:
    """CURL's unsupervised loss with k negatives (Saunshi et al., ICML 2019, definition 2.3, eq. 5 and 6).

    `margin_loss` of ``v_i = f(x)^T (f(x+) - f(x_i-))``, i = 1..k.

    Args:
        anchors: embeddings f(x), of any norm; half precision is computed in float32.
        positives: f(x+), x+ from the class of x.
        negatives: f(x_i-), from the marginal, the class of x included.
        loss: "hinge" or "logistic".
        reduction: "mean", "sum" or "none".

    Example:
        >>> x, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[[0.0, 1.0]]])
        >>> k_negative_loss(x, x, other, loss="hinge").item()  # the margin is 1
        0.0
    """
    are_fit = negatives.dim() == 3 and negatives.shape[::2] == positives.shape == anchors.shape
    if not (are_fit and negatives.numel()):
        raise ValueError(
            "expected anchors and positives (anchor, dim) and negatives (anchor, negative, dim), none empty, found "
            f"{tuple(anchors.shape)}, {tuple(positives.shape)} and {tuple(negatives.shape)}"
        )
    anchors, positives, negatives = map(at_least_float32, (anchors, positives, negatives))
    # The difference comes first: inner products of large embeddings would cancel. Sums of products and not matrix
    # products: autocast leaves them in float32.
    margins = (anchors[:, None] * (positives[:, None] - negatives)).sum(-1)
    return reduce_losses(margin_loss(margins, loss), reduction)


class Blocks(ViewsObjective):
    """CURL's loss on blocks of b views, b + 1 views of each image (Saunshi et al., ICML 2019, eq. 12, with k blocks).

    Each view is an anchor. Its positive block are the b other views of its image; its negative blocks are as many
    views of each of the k images that follow in the batch, cyclically: a batch is shuffled, so that they are drawn
    from the marginal, the anchor's class included. Embeddings are taken as they are, not normalised. That every view
    is an anchor, and that blocks serve several anchors, are choices.

    Args:
        size: b, at least 1 (2: as the paper has it for CIFAR-100).
        k: negative blocks of an anchor, at least 1.
        loss: "hinge" or "logistic".
        similar: "views" of one image stand for points of a class (choice); with "class" all views but the first are of
            other training images of the image's class, as in the paper: supervised.
    """

    def __init__(
        self, size: int = 2, k: int = 1, loss: Loss = "logistic", similar: Similar = "views"
    ) -> None:
        super().__init__()
        check_range("objective", "[1, inf)", size=size, k=k)
        self.size, self.k, self.loss = size, k, loss
        self.n_views, self.min_images = size + 1, k + 1
        if similar == "class":
            self.n_members, self.requires = size, ("class_id",)

    def loss_of_batch(self, embeddings: Views, fields: Mapping[str, Tensor]) -> LossAndFigures:
        """Mean loss of the views."""
        views, images, _ = embeddings.shape
        blocks = torch.stack(
            [embeddings[[view for view in range(views) if view != own]].mean(0) for own in range(views)]
        )
        following = torch.arange(images)[:, None] + torch.arange(1, self.k + 1)
        negatives = blocks[:, (following % images).to(blocks.device)]
        loss = k_negative_loss(
            embeddings.flatten(0, 1), blocks.flatten(0, 1), negatives.flatten(0, 1), loss=self.loss
        )
        return loss, {}


class Supervised(ViewsObjective):
    """Cross entropy of a linear classifier of the embeddings of one view, trained with the encoder.

    Its weights start at 0, so that no random number is drawn.

    Args:
        embedding_dim: size of the embeddings; without a projection that of the features.
        n_classes: of the training images, at least 2.
    """

    n_views, min_images, requires = 1, 1, ("class_id",)

    def __init__(self, embedding_dim: int, n_classes: int) -> None:
        super().__init__()
        check_range("objective", "[1, inf)", embedding_dim=embedding_dim)
        check_range("objective", "[2, inf)", n_classes=n_classes)
        self.embedding_dim, self.n_classes = embedding_dim, n_classes
        self.weight = nn.Parameter(torch.zeros(n_classes, embedding_dim))
        self.bias = nn.Parameter(torch.zeros(n_classes))

    def loss_of_batch(self, embeddings: Views, fields: Mapping[str, Tensor]) -> LossAndFigures:
        """Mean cross entropy, and the share of images whose class has the highest logit."""
        logits = embeddings[0] @ self.weight.T + self.bias
        labels = fields["class_id"]
        return cross_entropy(logits, labels), {"accuracy": (logits.argmax(1) == labels).float().mean()}
