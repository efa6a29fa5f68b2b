"""Class probability eta(x): the chance that a random candidate image also fits sentence x.

Each class declares in `requires` the fields of its anchors that it is called with, by keyword.
"""

from __future__ import annotations

import warnings
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from medclip_dcl.common.errors import UserError, check_choice, check_range
from medclip_dcl.objectives.contrastive import checked
from medclip_dcl.objectives.part import ObjectivePart

USUAL_MEDIAN = (1e-4, 0.5)
"""Usual range of the median eta; below it the loss is close to InfoNCE, above it anchors are at the floor."""

Share = Literal["rho", "sentence_share", "lowest_rho", "highest_rho", "eta"]
"""Fields that hold a known class probability."""


def unusual_median(eta: np.ndarray) -> str:
    """Warning about the median eta of the distinct training sentences; "" if it is in the usual range."""
    median = float(np.median(eta))
    low, high = USUAL_MEDIAN
    if low <= median <= high:
        return ""
    effect = "most of them are hardly corrected" if median < low else "most of them will be at the floor"
    return (
        f"the median eta of {len(eta):,} distinct training sentences, {median:.3g}, lies outside "
        f"[{low:g}, {high:g}]: {effect}"
    )


class ClassProbability(ObjectivePart):
    """Base class: a rule that gives each anchor its eta, capped at `max_eta`.

    Your own rule may require any numeric column of the tables sentences, classes and log_p of the prepared set, or of
    the Parquet file in `data.init_args.fields`; its parameters are trained with the network (docs/contributing.md).

    `capped` is a clamp, without a gradient where it acts: a learned eta needs another bound.

    Args:
        max_eta: cap of eta, in [0, 1). 1/(1 - eta) explodes near 1, and anchors at the floor do not train
            (choice, not from the paper, whose a = 0.2 caps eta implicitly).

    Attributes:
        requires: names of the anchor fields that `forward` takes by keyword.
        share_capped: share of the last call's anchors that the cap changed, a scalar tensor; 0 before any call.
    """

    requires: tuple[str, ...] = ()

    def __init__(self, max_eta: float = 0.3) -> None:
        super().__init__()
        check_range("class_probability", "[0, 1)", max_eta=max_eta)
        self.max_eta = max_eta
        self.share_capped: float | Tensor = 0.0

    def capped(self, eta: Float[Tensor, "anchor"]) -> Float[Tensor, "anchor"]:
        """Eta, at most `max_eta`; records the share of anchors above it."""
        self.share_capped = (eta.detach() > self.max_eta).float().mean() if eta.numel() else 0.0
        return eta.clamp(max=self.max_eta)


class ConstantClassProbability(ClassProbability):
    """The same eta for every anchor; 0 is no correction.

    In the contrastive loss 0 is InfoNCE; 0.05 and 0.1 are SSD's constant rows (DCL).

    Args:
        eta: in [0, 1).
        max_eta: cap of eta; exceeding it gives a warning.
    """

    def __init__(self, eta: float = 0.0, max_eta: float = 0.3) -> None:
        super().__init__(max_eta)
        check_range("class_probability", "[0, 1)", eta=eta)
        if eta > max_eta:
            warnings.warn(
                f"eta {eta} is capped at max_eta {max_eta}; raise max_eta if this is intended", stacklevel=2
            )
            self.share_capped = 1.0
        self.eta = min(eta, max_eta)

    def forward(self) -> float:
        return self.eta


class LanguageModelClassProbability(ClassProbability):
    """eta_LM(x) = a * p_LM(x)^k from the sentence's masked-LM pseudo-likelihood (Wang et al., MLHC 2023, section 2.4).

    (0.2, 0.35), from SSD's grid search (section 3.2), suit the scores of CXR-BERT; `medclip-dcl eta` says what
    eta they give with those of another language model, or that its scores do not predict eta.

    Args:
        a: 0 <= a < 1, eta of a sentence whose probability is 1.
        k: exponent of the sentence's probability, at least 0.
        max_eta: cap of eta.

    Raises:
        ValueError: a or k out of range; when called: NaN or positive log probabilities.
    """

    requires = ("log_p",)

    def __init__(self, a: float = 0.2, k: float = 0.35, max_eta: float = 0.3) -> None:
        super().__init__(max_eta)
        check_range("class_probability", "[0, 1)", a=a)
        check_range("class_probability", "[0, inf)", k=k)
        self.a, self.k = a, k

    def forward(self, log_p: Float[Tensor, "anchor"]) -> Float[Tensor, "anchor"]:
        """Eta of anchors with these natural-log pseudo-likelihoods."""
        is_wrong = ~(log_p <= 1e-4)

        def error() -> UserError:
            wrong = log_p[is_wrong]
            return UserError(
                f"log_p: expected natural logarithms of probabilities, found {wrong[0].item():g} (one of {len(wrong)} "
                f"of {len(log_p)} anchors); an empty sentence has no score: leave it out, or score the sentences again"
            )

        return self.capped(self.a * torch.exp(self.k * checked(log_p, is_wrong, error)))


class KnownClassProbability(ClassProbability):
    """Eta from the truth, where it is known (CIFAR10-r, the phantom), or from a file.

    With "lowest_rho" or "highest_rho" it is a constant, the share of the rarest or commonest class (SSD, section 3.1:
    DCL-eta_Low, DCL-eta_High).

    Args:
        share: field of the anchors: "rho" (share of images that match, mentioned or not), "sentence_share" (share of
            sentences that say it), or the least or greatest rho of any class, "lowest_rho" or "highest_rho"; or "eta",
            a column of the Parquet file in `data.init_args.fields`.
        max_eta: cap of eta.

    Raises:
        ValueError: an unknown `share`; when called: shares outside [0, 1].
    """

    def __init__(self, share: Share = "rho", max_eta: float = 0.3) -> None:
        super().__init__(max_eta)
        check_choice("class_probability.share", share, get_args(Share))
        self.share = share
        self.requires = (share,)

    def forward(self, **fields: Shaped[Tensor, "anchor"]) -> Float[Tensor, "anchor"]:
        """Eta of anchors with these shares, under their name."""
        shares = fields[self.share]
        error = UserError("class_probability: expected shares in [0, 1] of all anchors, found others or NaN")
        return self.capped(checked(shares, ~((shares >= 0) & (shares <= 1)), lambda: error))
