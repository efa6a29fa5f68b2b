"""Similarity of image regions and sentences: LSE, NonLocal, LSE+NL and the global cosine.

LSE+NL is RECONSTRUCTED from its description in Wang et al., MLHC 2023; the paper that introduced it (Wang et
al., IPMI 2023) was not at hand. Every logit s lies in [-gamma^2, gamma^2]. gamma^2 starts at 14, is learned in
log space and capped (cap: choice, not from the paper).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize

Regions = Float[Tensor, "image region dim"]
Sentences = Float[Tensor, "sentence dim"]
CosineMaps = Float[Tensor, "sentence image region"]
Logits = Float[Tensor, "sentence image"]


def cosine_maps(regions: Regions, sentences: Sentences) -> CosineMaps:
    """Cosine of every sentence with every region of every image, in [-1, 1]."""
    return torch.einsum("bnd,sd->sbn", normalize(regions, dim=-1), normalize(sentences, dim=-1))


def cosine_heat_maps(
    feature_map: Float[Tensor, "dim region_row region_column"], sentences: Float[Tensor, "sentence dim"]
) -> Float[Tensor, "sentence region_row region_column"]:
    """Cosine of every region of one image with every sentence, in [-1, 1]."""
    regions = feature_map.flatten(1).T[None]
    return cosine_maps(regions, sentences)[:, 0].unflatten(1, feature_map.shape[1:])


def at_image_size(
    heat_map: Float[Tensor, "region_row region_column"], height: int, width: int
) -> Float[Tensor, "height width"]:
    """A heat map of regions at the size of the image that they cover, bilinear."""
    return interpolate(heat_map[None, None], size=(height, width), mode="bilinear", align_corners=False)[0, 0]


class Similarity(nn.Module):
    """Base class: a score in [-1, 1] for each pair, times gamma^2.

    Args:
        gamma2: initial gamma^2, above 0.
        learn_gamma: False keeps gamma^2 as it is.
        max_gamma2: cap of gamma^2.

    Raises:
        ValueError: not 0 < gamma2 <= max_gamma2.
    """

    log_gamma2: Tensor

    def __init__(self, gamma2: float = 14.0, learn_gamma: bool = True, max_gamma2: float = 100.0) -> None:
        super().__init__()
        if not 0 < gamma2 <= max_gamma2:
            raise ValueError(f"gamma2 must lie in (0, max_gamma2 = {max_gamma2}], got {gamma2}")
        self._initial = {"gamma2": gamma2, "learn_gamma": learn_gamma, "max_gamma2": max_gamma2}
        self._max_log_gamma2 = math.log(max_gamma2)
        self.log_gamma2 = nn.Parameter(torch.tensor(math.log(gamma2)), requires_grad=learn_gamma)

    @property
    def gamma2(self) -> Float[Tensor, ""]:
        """gamma^2, the largest possible logit; -gamma^2 is the floor of the debiased loss."""
        # The cap passes the gradient on (a clamp would not), so that a parameter at the cap can come back.
        excess = (self.log_gamma2 - self.log_gamma2.clamp(max=self._max_log_gamma2)).detach()
        return (self.log_gamma2 - excess).exp()

    @torch.no_grad()
    def clamp_gamma_(self) -> None:
        """Pull the parameter back to the cap; call after an optimiser step."""
        self.log_gamma2.clamp_(max=self._max_log_gamma2)

    def config(self) -> dict[str, Any]:
        """Arguments that build the same similarity again."""
        return dict(self._initial)

    def forward(self, regions: Regions, sentences: Sentences) -> Logits:
        """Logits of all pairs; computed in float32 at least, whatever autocast says."""
        with torch.autocast(device_type=regions.device.type, enabled=False):
            if regions.dtype in (torch.float16, torch.bfloat16):
                regions = regions.float()
            return self.gamma2 * self.scores(regions, sentences.to(regions.dtype))

    def scores(self, regions: Regions, sentences: Sentences) -> Logits:
        """Scores of all pairs in [-1, 1]."""
        raise NotImplementedError


class GlobalCosine(Similarity):
    """Cosine of the sentence with the mean of the projected regions (BioViL, Boecking et al., ECCV 2022)."""

    def scores(self, regions: Regions, sentences: Sentences) -> Logits:
        return pooled_score(regions, sentences)


class LSE(Similarity):
    """Log-sum-exp over regions, a soft maximum of the cosines::

        s = gamma^2 * (1/r) * log( (1/R) * sum_n exp(r * c_n) )

    The 1/R keeps |s| <= gamma^2 (METHOD: choice).

    Args:
        sharpness: r > 0; 0+ is the mean, infinity the maximum (5: choice, not from the paper).
    """

    def __init__(
        self,
        sharpness: float = 5.0,
        gamma2: float = 14.0,
        learn_gamma: bool = True,
        max_gamma2: float = 100.0,
    ) -> None:
        super().__init__(gamma2, learn_gamma, max_gamma2)
        self.sharpness = _checked_sharpness(sharpness)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "sharpness": self.sharpness}

    def scores(self, regions: Regions, sentences: Sentences) -> Logits:
        return soft_maximum(cosine_maps(regions, sentences), self.sharpness)


class NonLocal(Similarity):
    """Cosine of the sentence with the region that fits it best, smoothed over regions like it::

        m = argmax_n c_n;  alpha = softmax_n( <q(v_n), q(v_m)> / sqrt(dim) )
        z = sum_n alpha_n v_n;  s = gamma^2 * cos(z, t)

    Args:
        dim: size of the embeddings.
        attention: "critical" as above; "mean": self-attention over the regions, then their mean.
    """

    def __init__(
        self,
        dim: int = 128,
        attention: str = "critical",
        gamma2: float = 14.0,
        learn_gamma: bool = True,
        max_gamma2: float = 100.0,
    ) -> None:
        super().__init__(gamma2, learn_gamma, max_gamma2)
        self.dim = dim
        self.attention = _checked_attention(attention)
        self.q = nn.Linear(dim, dim)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "dim": self.dim, "attention": self.attention}

    def scores(self, regions: Regions, sentences: Sentences) -> Logits:
        smoothed = smoothed_regions(regions, self.q(regions))
        if self.attention == "mean":
            return pooled_score(smoothed, sentences)
        return critical_score(smoothed, sentences, cosine_maps(regions, sentences).argmax(-1))


class LSENonLocal(Similarity):
    """LSE+NL: the mean of the `LSE` and `NonLocal` scores (reconstructed; the mean of the two is a choice).

    Args:
        dim: size of the embeddings.
        sharpness: r of LSE.
        attention: of NonLocal, "critical" or "mean".
    """

    def __init__(
        self,
        dim: int = 128,
        sharpness: float = 5.0,
        attention: str = "critical",
        gamma2: float = 14.0,
        learn_gamma: bool = True,
        max_gamma2: float = 100.0,
    ) -> None:
        super().__init__(gamma2, learn_gamma, max_gamma2)
        self.dim = dim
        self.sharpness = _checked_sharpness(sharpness)
        self.attention = _checked_attention(attention)
        self.q = nn.Linear(dim, dim)

    def config(self) -> dict[str, Any]:
        own = {"dim": self.dim, "sharpness": self.sharpness, "attention": self.attention}
        return {**super().config(), **own}

    def scores(self, regions: Regions, sentences: Sentences) -> Logits:
        cosines = cosine_maps(regions, sentences)
        smoothed = smoothed_regions(regions, self.q(regions))
        if self.attention == "mean":
            non_local = pooled_score(smoothed, sentences)
        else:
            non_local = critical_score(smoothed, sentences, cosines.argmax(-1))
        return (soft_maximum(cosines, self.sharpness) + non_local) / 2


def soft_maximum(cosines: CosineMaps, sharpness: float) -> Logits:
    """(1/r) log mean_n exp(r c_n)."""
    return (torch.logsumexp(sharpness * cosines, dim=-1) - math.log(cosines.shape[-1])) / sharpness


def smoothed_regions(regions: Regions, queries: Regions) -> Regions:
    """Each region replaced by the attention-weighted mean of all: softmax(Q Q^T / sqrt(dim)) V.

    Row m is z of NonLocal for the critical region m, so no (sentence, image, region, dim) tensor is needed.
    """
    attention = queries @ queries.transpose(1, 2) / math.sqrt(queries.shape[-1])
    return attention.softmax(dim=-1) @ regions


def critical_score(
    smoothed: Regions, sentences: Sentences, critical: Int[Tensor, "sentence image"]
) -> Logits:
    """Cosine of each sentence with the smoothed region at its critical region."""
    return cosine_maps(smoothed, sentences).gather(-1, critical[..., None]).squeeze(-1)


def pooled_score(regions: Regions, sentences: Sentences) -> Logits:
    """Cosine of each sentence with the mean region."""
    return normalize(sentences, dim=-1) @ normalize(regions.mean(dim=1), dim=-1).T


def _checked_sharpness(sharpness: float) -> float:
    if not (sharpness > 0 and math.isfinite(sharpness)):
        raise ValueError(f"sharpness must be finite and above 0, got {sharpness}")
    return sharpness


def _checked_attention(attention: str) -> str:
    if attention not in ("critical", "mean"):
        raise ValueError(f'attention must be "critical" or "mean", got {attention!r}')
    return attention
