"""Individual temperatures against a loop over the equations, step by step; state, refusals, the divergence."""

from __future__ import annotations

import math

import pytest
import torch

from medclip_dcl.common.errors import UserError
from medclip_dcl.objectives import Anchors, IndividualTemperatures

GAMMA2 = 5.0


class ByLoop:
    """The equations for one table, with plain numbers: dictionaries by key."""

    def __init__(self, loss: IndividualTemperatures) -> None:
        self.of = loss
        self.u: dict[int, float] = {}
        self.v: dict[int, float] = {}
        self.tau: dict[int, float] = {}

    def step(self, cosines, is_positive, weights, keys):
        """Losses, and the gradient of their sum by the cosines."""
        of = self.of
        losses, gradients = [], [[0.0] * len(row) for row in cosines]
        tau = {key: self.tau.get(key, of.temperature) for key in keys}
        h: list[list[float]] = []
        g: list[float] = []
        for row, positive in zip(cosines, is_positive, strict=True):
            own = [c for c, p in zip(row, positive, strict=True) if p]
            h.append([c - sum(own) / len(own) for c in row])
        for i, key in enumerate(keys):
            total = sum(weights[i])
            terms = [w * math.exp(x / tau[key]) for x, w in zip(h[i], weights[i], strict=True)]
            g.append(sum(terms) / total if total else math.nan)
        for key in set(keys):
            rows = [i for i, other in enumerate(keys) if other == key and sum(weights[i])]
            if not rows:
                continue
            mean = sum(g[i] for i in rows) / len(rows)
            step = of.moving_average
            self.u[key] = (1 - step) * self.u[key] + step * mean if key in self.u else mean
            slope = 0.0
            for i in rows:
                terms = [
                    w * math.exp(x / tau[key]) * x / tau[key] for x, w in zip(h[i], weights[i], strict=True)
                ]
                slope += sum(terms) / sum(weights[i]) / len(rows)
            gradient = math.log(self.u[key]) + of.rho - slope / self.u[key]
            m = of.temperature_momentum
            self.v[key] = (1 - m) * self.v.get(key, 0.0) + m * gradient
            moved = tau[key] - of.temperature_rate * self.v[key]
            self.tau[key] = min(max(moved, of.min_temperature), of.max_temperature)
        for i, key in enumerate(keys):
            if not sum(weights[i]):
                losses.append(0.0)
                continue
            losses.append(tau[key] * math.log(self.u[key]) + tau[key] * of.rho)
            n_positive = sum(is_positive[i])
            for j, x in enumerate(h[i]):
                # tau / u * dg/dc of the negative, and the same with the other sign for the positives.
                share = weights[i][j] * math.exp(x / tau[key]) / self.u[key] / sum(weights[i])
                gradients[i][j] += share
                for k, p in enumerate(is_positive[i]):
                    if p:
                        gradients[i][k] -= share / n_positive
        return losses, gradients


def random_anchors(generator, keys, is_of_sentences=True, candidates=6, weights=None):
    cosines = 2 * torch.rand(len(keys), candidates, generator=generator, dtype=torch.float64) - 1
    is_positive = torch.zeros(len(keys), candidates, dtype=torch.bool)
    is_positive[:, 0] = True
    is_positive[1, 3] = True
    is_negative = ~is_positive
    is_negative[0, 5] = False
    if weights is None:
        weights = is_negative.double() * torch.rand(
            len(keys), candidates, generator=generator, dtype=torch.float64
        )
        weights[2] = 0.0  # no negatives
    cosines.requires_grad_()
    anchors = Anchors(
        cosines * GAMMA2, is_positive, is_negative, weights, 0.0, torch.tensor(GAMMA2, dtype=torch.float64),
        torch.tensor(keys), is_of_sentences, {}, {},
    )  # fmt: skip
    return cosines, anchors


@pytest.mark.parametrize(
    "options",
    [
        {"rho": 0.3, "temperature_rate": 0.05},
        {"moving_average": 1.0, "temperature_momentum": 1.0, "temperature_rate": 0.2, "min_temperature": 0.1},
        {"moving_average": 0.3, "rho": 2.0, "temperature_rate": 0.02, "max_temperature": 0.21},
    ],
)
def test_steps_are_those_of_the_loop(options):
    """Keys repeat within a batch and from batch to batch; a key may have an anchor with and one without negatives."""
    loss = IndividualTemperatures(temperature=0.2, sentences=9, images=4, **options).double()
    for table in (loss.of_sentences, loss.of_images):
        table.temperature.fill_(0.2)  # which float32 had rounded
    loops = {True: ByLoop(loss), False: ByLoop(loss)}
    generator = torch.Generator().manual_seed(2)
    batches: list[tuple[bool, list[int]]] = [
        (True, [3, 8, 3, 1]), (False, [3, 0, 2]), (True, [3, 3, 8]), (True, [1, 0, 0, 3, 8]), (False, [2, 3, 3])
    ]  # fmt: skip
    for is_of_sentences, keys in batches:
        cosines, anchors = random_anchors(generator, keys, is_of_sentences)
        losses = loss(anchors)
        losses.sum().backward()
        loop = loops[is_of_sentences]
        expected, gradient = loop.step(
            cosines.tolist(), anchors.is_positive.tolist(), anchors.weights.tolist(), keys
        )
        assert losses.tolist() == pytest.approx(expected, rel=1e-10)
        torch.testing.assert_close(cosines.grad, torch.tensor(gradient, dtype=torch.float64))
    for is_of_sentences, table in ((True, loss.of_sentences), (False, loss.of_images)):
        loop = loops[is_of_sentences]
        for key in range(table.rows):
            assert table.is_seen[key].item() == (key in loop.u)
            assert table.temperature[key].item() == pytest.approx(loop.tau.get(key, 0.2), rel=1e-10)
            assert table.momentum[key].item() == pytest.approx(loop.v.get(key, 0.0), rel=1e-10)
            assert table.log_u[key].exp().item() == pytest.approx(loop.u.get(key, 1.0), rel=1e-10)
    assert loss.of_sentences.temperature.unique().numel() > 3 or "max_temperature" in options


def test_temperatures_settle_where_the_divergence_is_rho():
    """Of negatives alike in number: a sharper set of cosines gets a higher temperature."""
    generator = torch.Generator().manual_seed(5)
    _, anchors = random_anchors(generator, [0, 1, 2], candidates=40)
    weights = (~anchors.is_positive).double()
    weights[1:, 20:] = 0
    anchors = anchors._replace(
        weights=weights, logits=anchors.logits.detach() * torch.tensor([[1.0], [0.2], [0.5]])
    )
    loss = IndividualTemperatures(
        rho=0.6, temperature_rate=0.02, moving_average=1.0, temperature_momentum=1.0, sentences=3, images=1
    ).double()
    for _ in range(300):
        loss(anchors)
    for i, tau in enumerate(loss.of_sentences.temperature.tolist()):
        is_negative = weights[i] > 0
        softmax = (anchors.logits[i, is_negative] / GAMMA2 / tau).softmax(0)
        divergence = (softmax * (softmax * is_negative.sum()).log()).sum()
        assert divergence.item() == pytest.approx(0.6, abs=1e-5)
    wide, narrow, between = loss.of_sentences.temperature.tolist()
    assert narrow < between < wide
    assert loss.figures(anchors)["divergence"].item() == pytest.approx(0.6, abs=1e-5)
    # An anchor without negatives has no divergence.
    weights[0] = 0
    assert loss.figures(anchors)["divergence"].item() == pytest.approx(0.6, abs=1e-5)


def test_evaluation_is_at_the_initial_temperature():
    loss = IndividualTemperatures(temperature=0.25, rho=0.7, sentences=4, images=3).double()
    generator = torch.Generator().manual_seed(3)
    _, anchors = random_anchors(generator, [0, 1, 2])
    loss(anchors)
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    found = loss.eval()(anchors._replace(keys=torch.tensor([100, 200, 300])))
    c, w = anchors.logits.detach() / GAMMA2, anchors.weights
    positive = (c * anchors.is_positive).sum(1) / anchors.is_positive.sum(1)
    g = (w * ((c - positive[:, None]) / 0.25).exp()).sum(1) / w.sum(1)
    expected = 0.25 * g.log() + 0.25 * 0.7
    expected[2] = 0.0
    torch.testing.assert_close(found, expected)
    assert loss.figures(anchors) == {}
    assert all(torch.equal(value, before[name]) for name, value in loss.state_dict().items())


def test_tables_of_training_set_or_checkpoint():
    trained = IndividualTemperatures()
    trained.prepare(7, 5)
    assert (trained.config()["sentences"], trained.config()["images"]) == (7, 5)
    trained.of_sentences.temperature.uniform_()
    trained.prepare(7, 5)  # keeps what it has
    again = IndividualTemperatures(**trained.config())
    again.load_state_dict(trained.state_dict())
    # A configuration that does not know the training set, as in `test`.
    empty = IndividualTemperatures()
    empty.load_state_dict(trained.state_dict())
    for loss in (again, empty):
        assert torch.equal(loss.of_sentences.temperature, trained.of_sentences.temperature)
    other = IndividualTemperatures()
    other.prepare(8, 5)
    with pytest.raises(UserError, match="temperatures of 7 sentences, the training set has 8; continue with"):
        other.load_state_dict(trained.state_dict())
    with pytest.raises(
        UserError, match="loss.images: expected at least 6, those of the training set, found 5"
    ):
        again.prepare(7, 6)
