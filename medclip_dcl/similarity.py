"""Similarity of image regions and sentences: LSE, NonLocal, LSE+NL and the global cosine.

LSE+NL is RECONSTRUCTED from its description in Wang et al., MLHC 2023; the paper that introduced it (Wang et
al., IPMI 2023) was not at hand. Every logit s lies in [-gamma^2, gamma^2]. gamma^2 starts at 14, is learned in
log space and capped (cap: choice, not from the paper).

No (sentence, image, region) tensor is held: the maps are made for a few images at a time, in both directions. On a
CPU all of it is bitwise the same from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import embedding, interpolate, normalize
from torch.utils.checkpoint import checkpoint

from medclip_dcl.errors import UserError

Regions = Float[Tensor, "image region dim"]
Sentences = Float[Tensor, "sentence dim"]
CosineMaps = Float[Tensor, "sentence image region"]
Logits = Float[Tensor, "sentence image"]
Critical = Int[Tensor, "sentence image"]

# More sentences x images x regions than this, and the images are taken in parts that are computed again in the
# backward pass: 128 MiB for each tensor of float32 of that size (choice).
MAP_BUDGET = 2**25

# Elements of a map that are made at a time. On a CPU they should stay in the second-level cache: 1 MiB of float32
# (choice, measured). Elsewhere they should fill the device (choice, not measured).
_BLOCK_ELEMENTS = {"cpu": 2**18}
_BLOCK_ELEMENTS_ELSEWHERE = 2**22

INTERPOLATIONS = ("bilinear", "nearest")


def cosine_maps(regions: Regions, sentences: Sentences) -> CosineMaps:
    """Cosine of every sentence with every region of every image, in [-1, 1]."""
    return _map(normalize(sentences, dim=-1), normalize(regions, dim=-1))


def cosine_heat_maps(
    feature_map: Float[Tensor, "dim region_row region_column"], sentences: Float[Tensor, "sentence dim"]
) -> Float[Tensor, "sentence region_row region_column"]:
    """Cosine of every region of one image with every sentence, in [-1, 1]."""
    regions = feature_map.flatten(1).T[None]
    return cosine_maps(regions, sentences)[:, 0].unflatten(1, feature_map.shape[1:])


def at_image_size(
    heat_map: Float[Tensor, "region_row region_column"],
    height: int,
    width: int,
    region_centre: float = 0.5,
    interpolation: str = "bilinear",
) -> Float[Tensor, "height width"]:
    """A heat map of regions at the size of the image that they cover; constant beyond the outermost centres.

    With regions in the middle of their cells this is torch's ``interpolate`` with ``align_corners=False`` (or
    ``nearest-exact``), which has no argument for another place.

    Args:
        heat_map: one value a region.
        height: of the image, pixels; ``width`` likewise.
        region_centre: where a region lies in its cell, see ``RegionEncoder.region_centre``.
        interpolation: "bilinear" between the regions' centres, or "nearest" centre.

    Raises:
        ValueError: another interpolation.
    """
    if interpolation not in INTERPOLATIONS:
        raise ValueError(f"interpolation must be one of {INTERPOLATIONS}, got {interpolation!r}")
    if region_centre == 0.5:
        options = (
            {"mode": "nearest-exact"}
            if interpolation == "nearest"
            else {"mode": "bilinear", "align_corners": False}
        )
        return interpolate(heat_map[None, None], size=(height, width), **options)[0, 0]
    # Columns first: there are few rows yet.
    across = _along_rows(heat_map.T, width, region_centre, interpolation).T
    return _along_rows(across, height, region_centre, interpolation)


def _along_rows(
    values: Float[Tensor, "region column"], size: int, region_centre: float, interpolation: str
) -> Float[Tensor, "size column"]:
    """Values at the centres of `size` pixels that cover the regions."""
    n_regions = len(values)
    # In regions, from the first one's centre.
    places = (torch.arange(size, dtype=torch.float64) + 0.5) * (n_regions / size) - region_centre
    if interpolation == "nearest":
        return values[(places + 0.5).floor().long().clamp(0, n_regions - 1).to(values.device)]
    places = places.clamp(0, n_regions - 1)
    before = places.long()
    share = (places - before).to(values)[:, None]
    before = before.to(values.device)
    after = (before + 1).clamp(max=n_regions - 1)
    # lerp of equal values is exactly that value: a constant map stays constant.
    return torch.lerp(values[before], values[after], share)


class Similarity(nn.Module):
    """Base class: a score in [-1, 1] for each pair, times gamma^2.

    Args:
        gamma2: initial gamma^2, above 0.
        learn_gamma: False keeps gamma^2 as it is.
        max_gamma2: cap of gamma^2.

    Attributes:
        map_budget: the images are taken in parts of at most so many sentences x images x regions, but of one image
            at least; null for all images at once.

    Raises:
        ValueError: not 0 < gamma2 <= max_gamma2.
    """

    log_gamma2: Tensor
    map_budget: int | None = MAP_BUDGET

    def __init__(self, gamma2: float = 14.0, learn_gamma: bool = True, max_gamma2: float = 100.0) -> None:
        super().__init__()
        if not 0 < gamma2 <= max_gamma2:
            raise UserError(f"gamma2 must lie in (0, max_gamma2 = {max_gamma2}], got {gamma2}")
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
        """Logits of all pairs; computed in float32 at least, whatever autocast says.

        Raises:
            ValueError: shapes that do not fit each other or the similarity.
        """
        dim = getattr(self, "dim", "dim")
        fits = regions.dim() == 3 and sentences.dim() == 2 and regions.shape[2] == sentences.shape[1]
        if not fits or dim not in ("dim", regions.shape[2]) or not regions.shape[1]:
            raise ValueError(
                f"{type(self).__name__} takes regions (image, region, {dim}) and sentences (sentence, {dim}), got the "
                f"shapes {tuple(regions.shape)} and {tuple(sentences.shape)}"
            )
        with torch.autocast(device_type=regions.device.type, enabled=False):
            if regions.dtype in (torch.float16, torch.bfloat16):
                regions = regions.float()
            return self.gamma2 * self._scores_in_parts(regions, sentences.to(regions.dtype))

    def _scores_in_parts(self, regions: Regions, sentences: Sentences) -> Logits:
        """`scores`, in parts of the images where `map_budget` asks for it."""
        images, of_image = len(regions), len(sentences) * regions.shape[1]
        if self.map_budget is None or images * of_image <= self.map_budget:
            return self.scores(regions, sentences)
        parts = regions.split(max(1, self.map_budget // of_image))
        if not torch.is_grad_enabled():
            return torch.cat([self.scores(part, sentences) for part in parts], dim=1)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing is random
        try:
            return torch.cat([checkpoint(self.scores, part, sentences, **options) for part in parts], dim=1)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise RuntimeError(
                f"{images * of_image:,} cosines exceed map_budget = {self.map_budget:,}, and torch.func.grad does not "
                f"support the parts that are computed again: set {type(self).__name__}.map_budget = None"
            ) from error

    def scores(self, regions: Regions, sentences: Sentences) -> Logits:
        """Scores of all pairs in [-1, 1]."""
        raise NotImplementedError


class GlobalCosine(Similarity):
    """Cosine of the sentence with the mean of the projected regions (BioViL, Boecking et al., ECCV 2022)."""

    map_budget = None  # it makes no maps

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
        return soft_maximum(regions, sentences, self.sharpness)[0]


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
        attention: Literal["critical", "mean"] = "critical",
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
        return critical_score(smoothed, sentences, critical_regions(regions, sentences))


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
        attention: Literal["critical", "mean"] = "critical",
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
        soft, critical = soft_maximum(regions, sentences, self.sharpness)
        smoothed = smoothed_regions(regions, self.q(regions))
        if self.attention == "mean":
            non_local = pooled_score(smoothed, sentences)
        else:
            non_local = critical_score(smoothed, sentences, critical)
        return (soft + non_local) / 2


class _SoftMaximum(torch.autograd.Function):
    """log sum_n exp(r c_n) of unit vectors, and argmax_n c_n; the maps are made again in the backward pass.

    They are made whole only where the gradient is itself to be differentiated.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(sentences: Tensor, regions: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
        found = []
        for _, exponents in _maps_in_blocks(sharpness * sentences, regions):
            largest, critical = exponents.max(-1)
            found.append((exponents.sub_(largest[..., None]).exp_().sum(-1).log_().add_(largest), critical))
        log_sum, critical = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        return log_sum, critical

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        sentences, regions, ctx.sharpness = inputs
        log_sum, critical = output
        ctx.save_for_backward(sentences, regions, log_sum)
        ctx.save_for_forward(sentences, regions, log_sum)
        ctx.mark_non_differentiable(critical)

    @staticmethod
    def jvp(ctx: Any, of_sentences: Tensor, of_regions: Tensor, _: None) -> tuple[Tensor, None]:
        sentences, regions, log_sum = ctx.saved_tensors
        of_map = _map(of_sentences, regions) + _map(sentences, of_regions)
        softmax = _softmax_over_regions(sentences, regions, log_sum, ctx.sharpness)
        return ctx.sharpness * (softmax * of_map).sum(-1), None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
        sentences, regions, log_sum = ctx.saved_tensors
        with torch.autocast(device_type=regions.device.type, enabled=False):
            gradient = ctx.sharpness * gradient
            if torch.is_grad_enabled():
                softmax = _softmax_over_regions(sentences, regions, log_sum, ctx.sharpness)
                whole = (softmax * gradient[..., None]).flatten(1)
                of_regions = (whole.T @ sentences).unflatten(0, regions.shape[:2])
                return whole @ regions.flatten(0, 1), of_regions, None
            of_sentences, of_regions = torch.zeros_like(sentences), regions.new_empty(regions.shape)
            for images, exponents in _maps_in_blocks(ctx.sharpness * sentences, regions):
                softmax = exponents.sub_(log_sum[:, images, None]).exp_()
                of_map = softmax.mul_(gradient[:, images, None]).flatten(1)
                of_sentences.addmm_(of_map, regions[images].flatten(0, 1))
                torch.mm(of_map.T, sentences, out=of_regions[images].flatten(0, 1))
        return of_sentences, of_regions, None


def _softmax_over_regions(
    sentences: Sentences, regions: Regions, log_sum: Logits, sharpness: float
) -> CosineMaps:
    """Softmax of r times the cosines, in operations that can be differentiated again."""
    return (_map(sharpness * sentences, regions) - log_sum[..., None]).exp()


def soft_maximum(regions: Regions, sentences: Sentences, sharpness: float) -> tuple[Logits, Critical]:
    """(1/r) log mean_n exp(r c_n) over the cosines c, and the critical region, argmax_n c_n."""
    log_sum, critical = _SoftMaximum.apply(
        normalize(sentences, dim=-1), normalize(regions, dim=-1).contiguous(), sharpness
    )
    return (log_sum - math.log(regions.shape[1])) / sharpness, critical


@torch.no_grad()
def critical_regions(regions: Regions, sentences: Sentences) -> Critical:
    """The region whose cosine with the sentence is highest."""
    blocks = _maps_in_blocks(normalize(sentences, dim=-1), normalize(regions, dim=-1))
    return torch.cat([cosines.argmax(-1) for _, cosines in blocks], dim=1)


def _maps_in_blocks(sentences: Sentences, regions: Regions) -> Iterator[tuple[slice, CosineMaps]]:
    """Maps of a few images at a time, from unit vectors, and which images they are."""
    elements = _BLOCK_ELEMENTS.get(regions.device.type, _BLOCK_ELEMENTS_ELSEWHERE)
    block = max(1, elements // max(1, len(sentences) * regions.shape[1]))
    for start in range(0, max(1, len(regions)), block):
        images = slice(start, start + block)
        yield images, _map(sentences, regions[images])


def _map(sentences: Sentences, regions: Regions) -> CosineMaps:
    """Products of all sentences and regions, as one product of two matrices."""
    return (sentences @ regions.flatten(0, 1).T).unflatten(1, regions.shape[:2])


def smoothed_regions(regions: Regions, queries: Regions) -> Regions:
    """Each region replaced by the attention-weighted mean of all: softmax(Q Q^T / sqrt(dim)) V.

    Row m is z of NonLocal for the critical region m, so no (sentence, image, region, dim) tensor is needed.
    """
    attention = queries / math.sqrt(queries.shape[-1]) @ queries.transpose(1, 2)
    return attention.softmax(dim=-1) @ regions


def critical_score(smoothed: Regions, sentences: Sentences, critical: Critical) -> Logits:
    """Cosine of each sentence with the smoothed region at its critical region."""
    images, regions, dim = smoothed.shape
    if dim > regions:  # the map is smaller than the regions picked from it
        return cosine_maps(smoothed, sentences).gather(-1, critical[..., None]).squeeze(-1)
    rows = critical + regions * torch.arange(images, device=critical.device)
    # Not indexing: the backward pass of an embedding sums in a fixed order.
    picked = embedding(rows, normalize(smoothed, dim=-1).flatten(0, 1))
    return (picked @ normalize(sentences, dim=-1)[..., None]).squeeze(-1)


def pooled_score(regions: Regions, sentences: Sentences) -> Logits:
    """Cosine of each sentence with the mean region."""
    return normalize(sentences, dim=-1) @ normalize(regions.mean(dim=1), dim=-1).T


def _checked_sharpness(sharpness: float) -> float:
    if not (sharpness > 0 and math.isfinite(sharpness)):
        raise UserError(f"sharpness must be finite and above 0, got {sharpness}")
    return sharpness


def _checked_attention(attention: str) -> str:
    if attention not in ("critical", "mean"):
        raise UserError(f'attention must be "critical" or "mean", got {attention!r}')
    return attention
