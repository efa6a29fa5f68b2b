"""Similarity of image regions and sentences: LSE, NonLocal, LSE+NL and the global cosine.

LSE+NL is RECONSTRUCTED from its description in Wang et al., MLHC 2023 (SSD); the paper that introduced it (Wang et al.,
IPMI 2023) was not at hand. Every logit s lies in [-gamma^2, gamma^2]. gamma^2 starts at 14 and is learned (SSD, section
3.2); learning log gamma^2 and capping it are choices, not from the paper.

The cosine maps are computed for a few images at a time, in both directions. On a CPU repeated runs are bitwise equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import embedding, interpolate, normalize
from torch.utils.checkpoint import checkpoint

from medclip_dcl.common.errors import check_choice, check_range
from medclip_dcl.pictures.geometry import View

Regions = Float[Tensor, "image region dim"]
Sentences = Float[Tensor, "sentence dim"]
CosineMaps = Float[Tensor, "sentence image region"]
Logits = Float[Tensor, "sentence image"]
Critical = Int[Tensor, "sentence image"]

# Above this number of sentences x images x regions, images are processed in parts that the backward pass computes
# again: 128 MiB for a float32 tensor of that size (choice).
MAP_BUDGET = 2**25

# Elements of a map computed at a time: 1 MiB of float32 stays in a CPU's second-level cache (choice, measured), 16 MiB
# fill another device (choice, not measured).
_BLOCK_ELEMENTS = {"cpu": 2**18}
_BLOCK_ELEMENTS_ELSEWHERE = 2**22


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
    interpolation: str = "bilinear",
) -> Float[Tensor, "height width"]:
    """Resize a heat map of regions to the image that they cover; constant beyond the outermost centres.

    Regions lie in the middle of their cells. `interpolation` is "bilinear" between the centres, or "nearest".
    """
    mode = {"nearest": "nearest-exact", "bilinear": "bilinear"}[interpolation]
    return interpolate(heat_map[None, None], size=(height, width), mode=mode)[0, 0]


def heat_map_in_image(
    regions: Float[Tensor, "region_row region_column"],
    view: View,
    size: tuple[int, int],
    original: tuple[int, int] | None = None,
    interpolation: str = "bilinear",
    smoothing: float = 0.0,
) -> Float[Tensor, "height width"]:
    """Heat map of a whole image of `size` (height, width), an `original` or a resized copy of it; NaN outside the view.

    Smoothing is the sigma of a Gaussian in pixels, cut at 4 sigma; 0 for none.
    """
    seen = view.of(*size, original)
    heat_map = at_image_size(regions, seen.height, seen.width, interpolation)
    if smoothing:
        from scipy.ndimage import gaussian_filter

        smoothed = gaussian_filter(heat_map.cpu().numpy(), smoothing, mode="nearest")
        heat_map = torch.from_numpy(smoothed).to(heat_map.device)
    inside = seen.within(*size)
    heat_map = heat_map[inside.slices_in(seen)]
    if heat_map.shape == size:
        return heat_map
    whole = heat_map.new_full(size, math.nan)
    whole[inside.slices] = heat_map
    return whole


class Similarity(nn.Module):
    """Base class: a score in [-1, 1] for each pair, times gamma^2.

    Args:
        gamma2: initial gamma^2, above 0.
        learn_gamma: False keeps gamma^2 fixed.
        max_gamma2: cap of gamma^2.

    Attributes:
        log_gamma2: the learned parameter.
        map_budget: max sentences x images x regions that are computed at once, in parts of at least one image; None for
            all images at once, which torch.func.grad needs.
        uses_global_vector: True if `scores` takes a vector of each whole image as its third argument.

    Raises:
        ValueError: not 0 < gamma2 <= max_gamma2.
    """

    log_gamma2: Tensor
    map_budget: int | None = MAP_BUDGET
    uses_global_vector: bool = False

    def __init__(self, gamma2: float = 14.0, learn_gamma: bool = True, max_gamma2: float = 100.0) -> None:
        super().__init__()
        check_range("", f"(0, {max_gamma2}]", gamma2=gamma2)
        self._initial = {"gamma2": gamma2, "learn_gamma": learn_gamma, "max_gamma2": max_gamma2}
        self._max_log_gamma2 = math.log(max_gamma2)
        self.log_gamma2 = nn.Parameter(torch.tensor(math.log(gamma2)), requires_grad=learn_gamma)

    @property
    def gamma2(self) -> Float[Tensor, ""]:
        """gamma^2, the largest possible logit; -gamma^2 is the floor of the debiased loss."""
        # A clamp would stop the gradient, and a parameter at the cap could not come back.
        excess = (self.log_gamma2 - self.log_gamma2.clamp(max=self._max_log_gamma2)).detach()
        return (self.log_gamma2 - excess).exp()

    @torch.no_grad()
    def clamp_gamma_(self) -> None:
        """Clamp the parameter to the cap; call after an optimiser step."""
        self.log_gamma2.clamp_(max=self._max_log_gamma2)

    def config(self) -> dict[str, Any]:
        return dict(self._initial)

    def forward_settings(self) -> dict[str, Any]:
        """Settings, in plain values, on which logits depend besides the weights."""
        return {name: x for name, x in self.config().items() if name not in ("gamma2", "learn_gamma")}

    def forward(
        self, regions: Regions, sentences: Sentences, global_vector: Float[Tensor, "image dim"] | None = None
    ) -> Logits:
        """Logits of all pairs, computed in float32 or float64 even under autocast.

        `global_vector`, of each whole image, has a part in them where `uses_global_vector` is true.
        """
        if regions.dim() != 3 or sentences.dim() != 2 or not regions.shape[1]:
            raise ValueError(
                f"{type(self).__name__}: expected regions (image, region, dim) and sentences (sentence, dim), found "
                f"{tuple(regions.shape)} and {tuple(sentences.shape)}"
            )
        with torch.autocast(device_type=regions.device.type, enabled=False):
            sentences, *of_images = self._inputs(regions, sentences, global_vector)
            return self.gamma2 * self._scores_in_parts(sentences, *of_images)

    def paired(
        self,
        regions: Float[Tensor, "sentence m region dim"],
        sentences: Sentences,
        global_vector: Float[Tensor, "sentence m dim"] | None = None,
    ) -> Float[Tensor, "sentence m"]:
        """Logits of each sentence with its own m images: entries of `forward`, without the other pairs."""
        with torch.autocast(device_type=regions.device.type, enabled=False):
            of_one = torch.func.vmap(lambda sentence, *images: self._scores(sentence[None], *images)[0])
            return self.gamma2 * of_one(*self._inputs(regions, sentences, global_vector))

    def _inputs(self, regions: Tensor, sentences: Sentences, global_vector: Tensor | None) -> list[Tensor]:
        """Sentences, regions and, where it is used, the global vector, at least in float32."""
        dtype = torch.promote_types(regions.dtype, torch.float32)
        has_vector = self.uses_global_vector and global_vector is not None
        return [x.to(dtype) for x in (sentences, regions, *((global_vector,) if has_vector else ()))]

    def _scores_in_parts(self, sentences: Sentences, *of_images: Tensor) -> Logits:
        """`scores`, in parts of the images where the maps exceed `map_budget`."""
        images, of_image = len(of_images[0]), len(sentences) * of_images[0].shape[1]
        if self.map_budget is None or images * of_image <= self.map_budget:
            return self._scores(sentences, *of_images)
        size = max(1, self.map_budget // of_image)
        parts = zip(*(tensor.split(size) for tensor in of_images), strict=True)
        if not torch.is_grad_enabled():
            return torch.cat([self._scores(sentences, *part) for part in parts], dim=1)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing is random
        return torch.cat([checkpoint(self._scores, sentences, *part, **options) for part in parts], dim=1)

    def _scores(self, sentences: Sentences, regions: Regions, *global_vector: Tensor) -> Logits:
        return self.scores(regions, sentences, *global_vector)

    def scores(self, regions: Regions, sentences: Sentences) -> Logits:
        """Scores of all pairs in [-1, 1]."""
        raise NotImplementedError


class GlobalCosine(Similarity):
    """Cosine of the sentence with the mean of the projected regions (BioViL, Boecking et al., ECCV 2022).

    With the global vector of the image instead, where its encoder has one: CLIP's cosine (Radford et al., ICML 2021).
    """

    map_budget = None  # no maps are computed
    uses_global_vector = True

    def scores(
        self, regions: Regions, sentences: Sentences, global_vector: Float[Tensor, "image dim"] | None = None
    ) -> Logits:
        return pooled_score(regions if global_vector is None else global_vector[:, None], sentences)


class LSE(Similarity):
    """Log-sum-exp over regions, a soft maximum of the cosines::

        s = gamma^2 * (1/r) * log( (1/R) * sum_n exp(r * c_n) )

    The 1/R keeps ``|s| <= gamma^2`` (choice).

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
        check_range("", "(0, inf)", sharpness=sharpness)
        self.sharpness = sharpness

    def config(self) -> dict[str, Any]:
        return {**super().config(), "sharpness": self.sharpness}

    def scores(self, regions: Regions, sentences: Sentences) -> Logits:
        return soft_maximum(regions, sentences, self.sharpness)[0]


class NonLocal(Similarity):
    """Cosine of the sentence with its best-matching region, smoothed over similar regions::

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
        check_range("similarity", "[1, inf)", dim=dim)
        self.dim = dim
        check_choice("similarity.attention", attention, ("critical", "mean"))
        self.attention = attention
        self.q = nn.Linear(dim, dim)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "dim": self.dim, "attention": self.attention}

    def scores(self, regions: Regions, sentences: Sentences, critical: Critical | None = None) -> Logits:
        smoothed = smoothed_regions(regions, self.q(regions))
        if self.attention == "mean":
            return pooled_score(smoothed, sentences)
        if critical is None:
            critical = critical_regions(regions, sentences)
        return critical_score(smoothed, sentences, critical)


class LSENonLocal(NonLocal):
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
        super().__init__(dim, attention, gamma2, learn_gamma, max_gamma2)
        check_range("", "(0, inf)", sharpness=sharpness)
        self.sharpness = sharpness

    def config(self) -> dict[str, Any]:
        return {**super().config(), "sharpness": self.sharpness}

    def scores(self, regions: Regions, sentences: Sentences, critical: Critical | None = None) -> Logits:
        soft, critical = soft_maximum(regions, sentences, self.sharpness)
        return (soft + super().scores(regions, sentences, critical)) / 2


class _LogSumExp(torch.autograd.Function):
    """log sum_n exp(r c_n) over the cosines of unit vectors, and argmax_n c_n; backward makes the maps again.

    Autograd would keep the (sentence, image, region) map: 1.5 times the time at 512 x 64 x 225 on a CPU.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(sentences: Tensor, regions: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
        found = []
        for part in _blocks(regions, len(sentences)):
            exponents = _map(sharpness * sentences, part)
            largest, critical = exponents.max(-1)
            # In place: half the time of logsumexp and argmax.
            total = exponents.sub_(largest[..., None]).exp_().sum(-1)
            found.append((total.log_().add_(largest), critical))
        log_sum, critical = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        return log_sum, critical

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        sentences, regions, ctx.sharpness = inputs
        ctx.save_for_backward(sentences, regions, output[0])
        ctx.save_for_forward(sentences, regions, output[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def jvp(ctx: Any, of_sentences: Tensor, of_regions: Tensor, _: None) -> tuple[Tensor, None]:
        sentences, regions, log_sum = ctx.saved_tensors
        softmax = (_map(ctx.sharpness * sentences, regions) - log_sum[..., None]).exp()
        of_map = _map(of_sentences, regions) + _map(sentences, of_regions)
        return ctx.sharpness * (softmax * of_map).sum(-1), None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
        sentences, regions, log_sum = ctx.saved_tensors
        with torch.autocast(device_type=regions.device.type, enabled=False):
            scaled, gradient = ctx.sharpness * sentences, ctx.sharpness * gradient
            of_sentences, of_regions, start = torch.zeros_like(sentences), [], 0
            for part in _blocks(regions, len(sentences)):
                images = slice(start, start := start + len(part))
                softmax = _map(scaled, part).sub_(log_sum[:, images, None]).exp_()
                of_map = (softmax * gradient[:, images, None]).flatten(1)
                of_sentences = torch.addmm(of_sentences, of_map, part.flatten(0, 1))
                of_regions.append((of_map.T @ sentences).unflatten(0, part.shape[:2]))
        return of_sentences, torch.cat(of_regions), None


def soft_maximum(regions: Regions, sentences: Sentences, sharpness: float) -> tuple[Logits, Critical]:
    """(1/r) log mean_n exp(r c_n) over the cosines c, and the critical region, argmax_n c_n."""
    # Contiguous first: a transposed feature map takes half as long again.
    unit = normalize(regions.contiguous(), dim=-1)
    log_sum, critical = _LogSumExp.apply(normalize(sentences, dim=-1), unit, sharpness)
    return (log_sum - math.log(regions.shape[1])) / sharpness, critical


@torch.no_grad()
def critical_regions(regions: Regions, sentences: Sentences) -> Critical:
    """The region with the highest cosine to the sentence."""
    unit = normalize(sentences, dim=-1)
    blocks = _blocks(normalize(regions, dim=-1), len(sentences))
    return torch.cat([_map(unit, part).argmax(-1) for part in blocks], dim=1)


def _blocks(regions: Regions, n_sentences: int) -> tuple[Tensor, ...]:
    """The regions of a few images at a time, whose maps fit a cache."""
    elements = _BLOCK_ELEMENTS.get(regions.device.type, _BLOCK_ELEMENTS_ELSEWHERE)
    return regions.split(max(1, elements // max(1, n_sentences * regions.shape[1])))


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
    if dim > regions:  # the map is smaller than the gathered regions
        return cosine_maps(smoothed, sentences).gather(-1, critical[..., None]).squeeze(-1)
    rows = critical + regions * torch.arange(images, device=critical.device)
    # Unlike indexing, an embedding's backward pass sums in a fixed order.
    picked = embedding(rows, normalize(smoothed, dim=-1).flatten(0, 1))
    return (picked @ normalize(sentences, dim=-1)[..., None]).squeeze(-1)


def mean_directions(sentences: Sentences, sizes: Sequence[int]) -> Float[Tensor, "group dim"]:
    """One embedding for each group of so many sentences: the mean of the normalised ones, or the only one."""
    groups = sentences.split(list(sizes))
    means = [x if len(x) == 1 else normalize(x, dim=-1).mean(dim=0, keepdim=True) for x in groups]
    return torch.cat(means)


def pooled_score(regions: Regions, sentences: Sentences) -> Logits:
    """Cosine of each sentence with the mean region."""
    return normalize(sentences, dim=-1) @ normalize(regions.mean(dim=1), dim=-1).T
