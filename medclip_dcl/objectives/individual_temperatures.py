"""Robust contrastive loss with a temperature of each anchor, found by stochastic optimisation (iSogCLR)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from medclip_dcl.common.distributed import gather_with_grad
from medclip_dcl.common.errors import UserError, check_min
from medclip_dcl.objectives.anchor_losses import AnchorLoss, Anchors


class _Inner(NamedTuple):
    """The inner function g of each anchor at its temperature tau, h = (s(x,u) - s(x,x+)) / gamma^2."""

    log_g: Float[Tensor, "anchor"]
    """log mean_n exp(h_n / tau); 0 without a negative."""
    mean_exponent: Float[Tensor, "anchor"]
    """Mean of h_n / tau over the negatives, weighted by exp(h_n / tau)."""
    has_negatives: Bool[Tensor, "anchor"]


class IndividualTemperatures(AnchorLoss):
    """Robust global contrastive loss with individual temperatures (iSogCLR, Qiu et al., ICML 2023; RECONSTRUCTED).

    With c the similarity (a logit over gamma^2), h_n = c(x,u_n) - c(x,x+) and a temperature tau of each anchor::

        g    = mean_n exp(h_n / tau)
        loss = tau log g + tau rho,     minimised over the network and over tau in [min_temperature, max_temperature]

    Tau grows where the softmax over the negatives diverges from equal weights by more than rho (KL). Each step updates
    u, the moving average of g, for the anchors of the batch, then the temperatures::

        u   <- (1 - moving_average) u + moving_average g                           (first visit: u <- g)
        v   <- (1 - temperature_momentum) v + temperature_momentum (log u + rho - mean_n exp(h_n / tau) h_n / (tau u))
        tau <- tau - temperature_rate v, clipped

    and the network's gradient is (tau / u) grad g at the temperature before the step. The positive is not in the
    denominator, and eta has no place: there is no class probability. In evaluation every temperature is the initial
    one, so that validation losses of one run are comparable; cosines and scores do not depend on temperatures.

    An anchor is a sentence's text or a training image (choice: equal sentences share a temperature); g of a sentence
    that a batch has several times is the mean over them. The paper's text was not at hand: equations and the defaults
    that are not marked as choices follow its authors' unimodal public code.

    Args:
        temperature: initial tau (1/14, the inverse of the other losses' gamma^2: choice).
        rho: divergence in nats, above 0; from log N on, for N negatives, every temperature falls to the least.
        moving_average: weight of the batch in u, in (0, 1]; 1 forgets all others.
        temperature_rate: step size of tau; 0 keeps every temperature as it is (0.003: choice).
        temperature_momentum: weight of the batch in tau's gradient, in (0, 1].
        min_temperature: least tau, above 0 (0.01: choice).
        max_temperature: greatest tau (1.0: choice).
        sentences: rows of the table of sentences; null for those of the training set.
        images: rows of the table of images; null likewise.

    """

    uses_class_probability = False
    uses_gamma = False

    def __init__(
        self,
        temperature: float = 1 / 14,
        rho: float = 0.4,
        moving_average: float = 0.8,
        temperature_rate: float = 0.003,
        temperature_momentum: float = 0.5,
        min_temperature: float = 0.01,
        max_temperature: float = 1.0,
        sentences: int | None = None,
        images: int | None = None,
    ) -> None:
        super().__init__()
        if not 0 < min_temperature <= temperature <= max_temperature < math.inf:
            raise UserError(
                "loss: expected 0 < min_temperature <= temperature <= max_temperature, found "
                f"{min_temperature}, {temperature}, {max_temperature}"
            )
        shares = (moving_average, temperature_momentum)
        if not (0 < rho < math.inf and 0 <= temperature_rate < math.inf and all(0 < x <= 1 for x in shares)):
            raise UserError(
                "loss: expected rho above 0, temperature_rate of at least 0, moving_average and temperature_momentum "
                f"in (0, 1], found {rho}, {temperature_rate}, {moving_average}, {temperature_momentum}"
            )
        check_min("loss", {"sentences": (sentences, 1), "images": (images, 1)})
        self.temperature, self.rho, self.moving_average = temperature, rho, moving_average
        self.temperature_rate, self.temperature_momentum = temperature_rate, temperature_momentum
        self.min_temperature, self.max_temperature = min_temperature, max_temperature
        self.sentences, self.images = sentences, images
        self.of_sentences, self.of_images = (_Table(kind, temperature) for kind in ("sentences", "images"))
        self.prepare(sentences or 0, images or 0)

    def config(self) -> dict[str, Any]:
        # A checkpoint's tables have their rows.
        rows = {"sentences": self.of_sentences.rows or None, "images": self.of_images.rows or None}
        return {**super().config(), **rows}

    def prepare(self, sentences: int, images: int) -> None:
        for name, given, needed in (
            ("sentences", self.sentences, sentences),
            ("images", self.images, images),
        ):
            if given is not None and given < needed:
                raise UserError(
                    f"loss.{name}: expected at least {needed}, those of the training set, found {given}"
                )
        self.of_sentences.resize(self.sentences or sentences)
        self.of_images.resize(self.images or images)

    def forward(self, anchors: Anchors) -> Float[Tensor, "anchor"]:
        if not self.training:
            inner = self._inner(anchors, anchors.logits.new_tensor(self.temperature))
            return self.temperature * (inner.log_g + self.rho).where(inner.has_negatives, 0)
        table, keys = self._table(anchors)
        tau = table.temperature[keys].to(anchors.logits.dtype)
        inner = self._inner(anchors, tau)
        self._update(table, keys, inner)
        log_u = table.log_u[keys].to(tau.dtype)
        # The value is the objective's, the gradient (tau / u) grad g.
        through_g = (inner.log_g - log_u).exp()
        losses = tau * (through_g - through_g.detach() + log_u + self.rho)
        return losses.where(inner.has_negatives, 0)

    def figures(self, anchors: Anchors) -> dict[str, Tensor]:
        """Mean, least and greatest temperature of the batch, and the mean divergence, which they bring to rho."""
        if not self.training:
            return {}
        table, keys = self._table(anchors)
        tau = table.temperature[keys].to(anchors.logits.dtype)
        inner = self._inner(anchors, tau)
        divergence = (inner.mean_exponent - inner.log_g).where(inner.has_negatives, 0)
        return {
            "temperature": tau.mean(),
            "temperature_min": tau.amin(),
            "temperature_greatest": tau.amax(),
            "divergence": divergence.sum() / inner.has_negatives.sum().clamp(min=1),
        }

    def _table(self, anchors: Anchors) -> tuple[_Table, Tensor]:
        table = self.of_sentences if anchors.is_of_sentences else self.of_images
        if anchors.keys is None or not table.rows:
            raise UserError(
                f"{type(self).__name__} needs the number of training sentences and images, and image_key in each "
                "batch: train with ImageTextDataModule"
            )
        return table, anchors.keys

    def _inner(self, anchors: Anchors, tau: Float[Tensor, "..."]) -> _Inner:
        exponents = anchors.logits / (anchors.gamma2 * tau.unsqueeze(-1))
        count = anchors.is_positive.sum(1)
        positive = exponents.masked_fill(~anchors.is_positive, 0.0).sum(1) / count
        has_negatives = anchors.weights.sum(1) > 0
        # Rows without a negative take part with equal weights, and are left out of the result.
        weights = anchors.weights.where(has_negatives[:, None], 1.0)
        least = torch.finfo(weights.dtype).min
        is_kept = weights > 0
        log_weights = weights.where(is_kept, 1.0).log().where(is_kept, least)
        weighted = exponents + log_weights
        log_g = weighted.logsumexp(1) - weights.sum(1).log() - positive
        mean = (weighted.detach().softmax(1) * exponents.detach()).sum(1) - positive.detach()
        return _Inner(log_g.where(has_negatives, 0), mean, has_negatives)

    @torch.no_grad()
    def _update(self, table: _Table, keys: Int[Tensor, "anchor"], inner: _Inner) -> None:
        """Update the rows of all processes' anchors: every process has the same tables."""
        keys = gather_with_grad(keys)
        log_g, mean = gather_with_grad(torch.stack([inner.log_g, inner.mean_exponent], dim=1)).unbind(1)
        # Of each anchor those with its key: their results are the same, and which of them is written does not matter.
        is_same = (keys[:, None] == keys) & gather_with_grad(inner.has_negatives)
        count = is_same.sum(1).to(log_g.dtype)
        least = torch.finfo(log_g.dtype).min
        log_g_of_key = log_g.where(is_same, least).logsumexp(1) - count.log()
        log_u, step = log_g_of_key, self.moving_average
        if step < 1:
            kept = table.log_u[keys].to(log_g.dtype) + math.log1p(-step)
            log_u = torch.logaddexp(kept, log_g_of_key + math.log(step)).where(table.is_seen[keys], log_u)
        scaled = (log_g - log_u[:, None]).where(is_same, -math.inf).exp() * mean
        gradient = log_u + self.rho - scaled.sum(1) / count
        momentum = table.momentum[keys].to(log_g.dtype).lerp(gradient, self.temperature_momentum)
        tau = table.temperature[keys].to(log_g.dtype) - self.temperature_rate * momentum
        tau = tau.clamp(self.min_temperature, self.max_temperature)
        table.write(keys, count > 0, log_u=log_u, momentum=momentum, temperature=tau)


class _Table(nn.Module):
    """State of each anchor, by key: log u, tau, the momentum v of tau's gradient, and whether it was ever seen."""

    log_u: Tensor
    temperature: Tensor
    momentum: Tensor
    is_seen: Tensor

    def __init__(self, kind: str, temperature: float) -> None:
        super().__init__()
        self.kind, self.start = kind, temperature
        for name in ("log_u", "temperature", "momentum"):
            self.register_buffer(name, torch.zeros(0))
        self.register_buffer("is_seen", torch.zeros(0, dtype=torch.bool))

    @property
    def rows(self) -> int:
        return len(self.temperature)

    def resize(self, rows: int) -> None:
        """Make all rows anew, unless there are as many."""
        if rows != self.rows:
            for name, buffer in self.named_buffers():
                setattr(self, name, buffer.new_zeros(rows))
            self.temperature.fill_(self.start)

    def write(self, keys: Int[Tensor, "anchor"], is_new: Bool[Tensor, "anchor"], **values: Tensor) -> None:
        """Values of these rows where they are new."""
        for name, value in values.items():
            column = getattr(self, name)
            column[keys] = value.to(column.dtype).where(is_new, column[keys])
        self.is_seen[keys] |= is_new

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        """Take the rows of the state where there are none: evaluation does not know the training set."""
        found = state_dict.get(f"{prefix}temperature")
        if found is not None and not self.rows:
            self.resize(len(found))
        if found is not None and len(found) != self.rows:
            raise UserError(
                f"the checkpoint has temperatures of {len(found):,} {self.kind}, the training set has {self.rows:,}; "
                "continue with the data set that it was trained on"
            )
        super()._load_from_state_dict(state_dict, prefix, *arguments)
