"""Unimodal contrastive loss of views (SimCLR), debiased or unbiased."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from medclip_dcl.common.errors import UserError, check_choice, check_range
from medclip_dcl.objectives.anchor_losses import Anchors
from medclip_dcl.objectives.class_probability import ClassProbability, ConstantClassProbability
from medclip_dcl.objectives.contrastive import (
    AnchorLogits,
    at_least_float32,
    losses_of_rows,
    reduce_losses,
    statistics_of_rows,
)
from medclip_dcl.objectives.controls import DecoupledLoss, StoppedInfoNCE, WeightedInfoNCE
from medclip_dcl.unimodal.views import LossAndFigures, Views, ViewsObjective

CorrectionImages = Literal["own", "class"]
"""Positives of the correction: views of the anchor's image, or of other training images of its class."""


def simclr_loss(
    first: Float[Tensor, "image dim"],
    second: Float[Tensor, "image dim"],
    *,
    gamma2: float = 2.0,
    class_probability: float | Tensor = 0.0,
    extra_views: Float[Tensor, "view image dim"] | None = None,
    own_positive: bool = True,
    class_id: Int[Tensor, "image"] | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Contrastive loss between two views of each image, corrected for false negatives.

    The 2B views are the anchors, first views before second ones; the other view of the image is the positive x+,
    the views of all other images are the N = 2B - 2 negatives u_n (Chuang et al., NeurIPS 2020, eq. 7 and 8; Wang et
    al., MLHC 2023, section 3.1). It is `contrastive_loss` of the (2B, 2B) matrix of s = gamma^2 * cosine without its
    diagonal, with floor -gamma^2. Computed in float32 or float64.

    The M positives v_m of the correction are x+ and the image's extra views, which are neither anchors nor negatives:
    N and the numerator do not depend on M (figure 3 there). Without `own_positive` they are the extra views alone, for
    which other images of the class may stand: the derivation draws v_m apart from x+ (docs/theory.md).

    With `class_id` the views of other classes alone are negatives, weighted to count N: with eta = 0 the unbiased loss
    (eq. 2 there, Q = N). Another eta then corrects for false negatives that are not there.

    Args:
        first: embeddings of the first views, of any norm.
        second: of the second views.
        gamma2: one over the temperature; above 0 (2: SSD and DCL).
        class_probability: eta in [0, 1): one number, (image,) or (2 * image,).
        extra_views: M - 1 further views of each image, for the correction alone.
        own_positive: False leaves x+ out of the correction, whose positives are then M extra views.
        class_id: equal for images of a class, for the unbiased loss.
        reduction: "mean", "sum" or "none".

    Returns:
        A scalar, or (2 * image,) with reduction "none". An anchor without negatives costs 0.

    Raises:
        ValueError: eta of another shape or outside [0, 1), an unknown reduction, no positive of the correction.

    Example:
        >>> first = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> round(simclr_loss(first, first).item(), 4)
        0.2395
    """
    eta = _of_views(class_probability, len(first))
    with torch.autocast(device_type=first.device.type, enabled=False):
        rows = _rows_of_views(first, second, extra_views, own_positive, class_id, gamma2)
        return reduce_losses(losses_of_rows(rows, eta, -gamma2), reduction)


class SimCLR(ViewsObjective):
    """SimCLR's loss, debiased: `simclr_loss` as an objective, with a fixed gamma.

    Args:
        class_probability: eta of each image; None for 0, which is SimCLR without a correction.
        gamma2: gamma^2, one over the temperature; above 0 (2: SSD and DCL).
        n_positives: M, at least 1.
        correction_images: positives v of the correction: "own" views of the image, x+ and M - 1 further ones (DCL); or
            M other training images of its "class", drawn with replacement, without x+ (an oracle, which knows the
            classes). These M views are encoded in the step, too: M + 2 views of an image instead of 2.
        loss: a control arm in place of the debiased loss; it has no further views.
        unbiased: True leaves out the negatives of the anchor's class, `class_id`: supervised, and without a class
            probability the unbiased loss (DCL, eq. 2). With one it shows the cost of a correction without a cause.
    """

    def __init__(
        self,
        class_probability: ClassProbability | None = None,
        gamma2: float = 2.0,
        n_positives: int = 1,
        unbiased: bool = False,
        correction_images: CorrectionImages = "own",
        loss: StoppedInfoNCE | WeightedInfoNCE | DecoupledLoss | None = None,
    ) -> None:
        super().__init__()
        check_choice("SimCLR.correction_images", correction_images, get_args(CorrectionImages))
        check_range("objective", "(0, inf)", gamma2=gamma2)
        check_range("objective", "[1, inf)", n_positives=n_positives)
        is_own = correction_images == "own"
        self.n_members = 0 if is_own else n_positives
        self.n_views = n_positives + (1 if is_own else 2)
        if self.n_views > 2 and (class_probability is None or loss is not None):
            raise UserError(
                f"SimCLR: expected class_probability and no loss for n_positives {n_positives} and correction_images "
                f"{correction_images}, found {class_probability} and {loss}: further views are in the correction alone"
            )
        if loss is not None:
            if unbiased:
                raise UserError(f"SimCLR: expected unbiased: false with a loss, found true and {loss}")
            loss.check_options(class_probability or ConstantClassProbability(0.0), None, 0.0)
        self.class_probability, self.gamma2, self.loss = class_probability, gamma2, loss
        self.n_positives, self.unbiased = n_positives, unbiased
        of_rule = () if class_probability is None else class_probability.requires
        of_classes = ("class_id",) if unbiased or self.n_members else ()
        self.requires = tuple(dict.fromkeys((*of_rule, *of_classes)))

    def loss_of_batch(self, embeddings: Views, fields: Mapping[str, Tensor]) -> LossAndFigures:
        """Loss; share of anchors at the floor, mean eta and corrected share, share of capped etas; or a loss's own."""
        first, second, *_ = embeddings
        eta: float | Tensor = 0.0
        # Without a correction, or a loss that stops, no anchor is at a floor.
        figures: dict[str, Tensor] = {"at_floor": embeddings.new_zeros(())}
        if self.class_probability is not None:
            known = {name: fields[name] for name in self.class_probability.requires}
            eta = _of_views(self.class_probability(**known), len(first))
            figures["class_probability"] = torch.as_tensor(eta).mean()
            figures["capped"] = torch.as_tensor(self.class_probability.share_capped)
        if self.loss is not None:
            anchors = _anchors_of_views(first, second, self.gamma2, eta)
            loss = self.loss(anchors).mean()
            with torch.no_grad():
                return loss, figures | self.loss.figures(anchors)
        extra = embeddings[2:] if self.n_views > 2 else None
        class_id = fields["class_id"] if self.unbiased else None
        rows = _rows_of_views(first, second, extra, not self.n_members, class_id, self.gamma2)
        if self.class_probability is not None:
            figures |= statistics_of_rows(rows, eta, -self.gamma2)._asdict()
        return losses_of_rows(rows, eta, -self.gamma2).mean(), figures


def _of_views(class_probability: float | Tensor, images: int) -> float | Tensor:
    """Eta of the 2 * image anchors, or one number."""
    if isinstance(class_probability, Tensor) and class_probability.shape == (images,):
        return class_probability.repeat(2)
    return class_probability


def _anchors_of_views(first: Tensor, second: Tensor, gamma2: float, eta: float | Tensor) -> Anchors:
    """The 2 * image anchors with all views as candidates."""
    views = normalize(at_least_float32(torch.cat([first, second])), dim=1)
    is_own = torch.eye(len(first), dtype=torch.bool, device=views.device).repeat(2, 2)
    logits = views @ (gamma2 * views.T)
    return Anchors(
        logits,
        is_positive=is_own & ~torch.eye(len(views), dtype=torch.bool, device=views.device),
        is_negative=~is_own,
        weights=(~is_own).to(logits.dtype),
        class_probability=eta,
        gamma2=logits.new_tensor(gamma2),
        is_of_sentences=False,
        of_anchors={},
        of_candidates={},
    )


def _rows_of_views(
    first: Tensor,
    second: Tensor,
    extra_views: Tensor | None,
    own_positive: bool,
    class_id: Tensor | None,
    gamma2: float,
) -> AnchorLogits:
    """Statistics of the logits of the 2 * image anchors."""
    images = len(first)
    views = normalize(at_least_float32(torch.cat([first, second])), dim=1)
    positive = (gamma2 * (views[:images] * views[images:]).sum(1)).repeat(2)
    log_count = positive.new_full((2 * images,), 2 * images - 2).log()
    log_mean_positive = None
    if extra_views is None and not own_positive:
        raise ValueError("simclr_loss: expected extra_views with own_positive=False, found none")
    if extra_views is not None:
        extra = normalize(at_least_float32(extra_views), dim=2).repeat(1, 2, 1)
        logits = gamma2 * (views * extra).sum(2)
        if own_positive:
            logits = torch.cat([positive[None], logits])
        log_mean_positive = logits.logsumexp(0) - math.log(len(logits))
    is_same = torch.eye(images, dtype=torch.bool, device=views.device)
    if class_id is not None:
        is_same = class_id[:, None] == class_id
    logits = (views @ (gamma2 * views.T)).masked_fill_(is_same.repeat(2, 2), -math.inf)
    log_sum_negative = logits.logsumexp(1)
    if class_id is not None:
        # The sum over the negatives that are left, scaled to N of them.
        left = (2 * (~is_same).sum(1)).to(log_count.dtype).repeat(2)
        log_sum_negative = log_sum_negative + (log_count - left.log()).where(left > 0, 0)
        log_count = log_count.where(left > 0, -math.inf)
    return AnchorLogits(
        log_sum_negative=log_sum_negative,
        log_count=log_count,
        positive_logits=positive[:, None],
        n_positive=torch.ones_like(positive),
        log_mean_positive=log_mean_positive,
    )
