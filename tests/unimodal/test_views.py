"""Unimodal objectives against loops and `simclr_loss`, their configurations, and two processes against one."""

from __future__ import annotations

import inspect
import math
from pathlib import Path

import jsonargparse
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from medclip_dcl.objectives import (
    ClassProbability,
    ConstantClassProbability,
    KnownClassProbability,
    contrastive_statistics,
)
from medclip_dcl.unimodal.cross_view import CrossView
from medclip_dcl.unimodal.curl import Blocks, Supervised
from medclip_dcl.unimodal.simclr import SimCLR, simclr_loss
from medclip_dcl.unimodal.views import ViewsObjective
from tests.unimodal.test_curl import loop_loss

CONFIGS = sorted((Path(__file__).parents[2] / "configs/unimodal/objective").glob("*.yaml"))


class Learned(ClassProbability):
    """A rule of a user, with a parameter that is trained."""

    requires = ("difficulty",)

    def __init__(self, max_eta: float = 0.3) -> None:
        super().__init__(max_eta)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, difficulty: Tensor) -> Tensor:
        return self.max_eta * torch.sigmoid(self.scale * difficulty)


def fields(images: int) -> dict[str, Tensor]:
    class_id = torch.arange(images) % 3
    rho = torch.tensor([0.5, 0.4, 0.1])[class_id]
    return {
        "class_id": class_id,
        "rho": rho,
        "lowest_rho": torch.full((images,), 0.1),
        "highest_rho": torch.full((images,), 0.5),
        "difficulty": torch.linspace(-1, 1, images, dtype=torch.float64),
    }


def known(share: str = "rho", max_eta: float = 0.45) -> KnownClassProbability:
    return KnownClassProbability(share=share, max_eta=max_eta)  # type: ignore[arg-type]


# SimCLR.


@pytest.mark.parametrize(
    ("share", "eta", "m", "gamma2"),
    [
        ("rho", [0.45, 0.4, 0.1, 0.45, 0.4], 1, 9.0),
        ("rho", [0.45, 0.4, 0.1, 0.45, 0.4], 4, 2.0),
        ("lowest_rho", [0.1] * 5, 1, 2.0),
        ("lowest_rho", [0.1] * 5, 2, 9.0),
        ("highest_rho", [0.45] * 5, 2, 2.0),
        ("highest_rho", [0.45] * 5, 4, 9.0),
    ],
)
def test_simclr_is_its_loss_with_each_images_eta(share, eta, m, gamma2):
    views = torch.randn(m + 1, 5, 4, dtype=torch.float64)
    objective = SimCLR(known(share), gamma2=gamma2, n_positives=m)
    assert (objective.n_views, objective.requires) == (m + 1, (share,))
    loss, figures = objective(views, fields(5))
    extra = views[2:] if m > 1 else None
    expected = simclr_loss(*views[:2], gamma2=gamma2, class_probability=torch.tensor(eta), extra_views=extra)
    torch.testing.assert_close(loss, expected)
    assert figures["class_probability"].item() == pytest.approx(sum(eta) / 5)
    assert figures["capped"].item() == pytest.approx(eta.count(0.45) / 5)
    # The figures, from the whole matrix: the positive's column is replaced by the mean over the M positives.
    anchors = normalize(views[:2], dim=2).flatten(0, 1)
    logits = gamma2 * anchors @ anchors.T
    own = (torch.arange(10) + 5) % 10
    of_image = (normalize(views, dim=2).repeat(1, 2, 1) * anchors).sum(2) * gamma2
    of_image[0, :5] = of_image[1, 5:] = -math.inf  # the anchor itself
    logits[torch.arange(10), own] = of_image.logsumexp(0) - math.log(m)
    statistics = contrastive_statistics(
        logits,
        own,
        class_probability=torch.tensor(eta).repeat(2),
        floor=-gamma2,
        weights=1 - torch.eye(10),
    )
    for name, value in statistics._asdict().items():
        torch.testing.assert_close(figures[name], value)


def test_simclr_without_a_class_probability_and_unbiased():
    views = torch.randn(2, 7, 4)
    loss, figures = SimCLR()(views, {})
    assert loss.item() == simclr_loss(*views).item() and figures == {"at_floor": 0}
    of_zero, _ = SimCLR(ConstantClassProbability(0.0))(views, {})
    assert of_zero.item() == loss.item()
    objective = SimCLR(unbiased=True, gamma2=5.0)
    loss, figures = objective(views, fields(7))
    assert (objective.n_views, objective.requires, figures) == (2, ("class_id",), {"at_floor": 0})
    assert loss.item() == simclr_loss(*views, gamma2=5.0, class_id=fields(7)["class_id"]).item()
    objective = SimCLR(known(), unbiased=True)
    loss, _ = objective(views, fields(7))
    assert objective.requires == ("rho", "class_id")
    eta = known()(rho=fields(7)["rho"])
    expected = simclr_loss(
        *views, class_id=fields(7)["class_id"], class_probability=eta, gamma2=objective.gamma2
    )
    assert loss.item() == expected.item()


# CURL's losses.


def loop_of_blocks(views, k, loss):
    """Every view of every image against the following k images of the batch, in plain numbers."""
    count, images, dim = views.shape
    values = views.tolist()

    def mean_without(own, image):
        others = [values[view][image % images] for view in range(count) if view != own]
        return [math.fsum(x[d] for x in others) / len(others) for d in range(dim)]

    anchors = [(view, image) for view in range(count) for image in range(images)]
    negatives = [[mean_without(view, image + step) for step in range(1, k + 1)] for view, image in anchors]
    positives = [mean_without(*anchor) for anchor in anchors]
    of_anchors = [values[view][image] for view, image in anchors]
    return loop_loss(of_anchors, positives, negatives, loss).mean().item()


@pytest.mark.parametrize(
    "size, images, dim, k, loss",
    [
        (1, 2, 3, 1, "hinge"),
        (2, 2, 3, 1, "logistic"),
        (1, 5, 1, 3, "logistic"),
        (5, 5, 1, 3, "hinge"),
        (2, 7, 4, 6, "hinge"),
        (5, 7, 4, 6, "logistic"),
    ],
)
def test_blocks_equal_the_loop(size, images, dim, k, loss):
    views = torch.randn(size + 1, images, dim, dtype=torch.float64)
    objective = Blocks(size, k, loss)
    assert (objective.n_views, objective.requires) == (size + 1, ())
    found, figures = objective(views, {})
    assert found.item() == pytest.approx(loop_of_blocks(views, k, loss)) and figures == {}
    of_class = Blocks(size, k, loss, similar="class")  # the views are others', the loss is the same
    assert (of_class.n_views, of_class.n_members, of_class.requires) == (size + 1, size, ("class_id",))
    assert of_class(views, fields(images))[0].item() == found.item()


def supervised(dim: int = 4) -> Supervised:
    """With weights unlike the first ones, of which the encoder gets no gradient."""
    objective = Supervised(dim, 3).double()
    torch.nn.init.normal_(objective.weight, generator=torch.Generator().manual_seed(0))
    return objective


def test_supervised_is_cross_entropy_with_the_labels():
    views, objective = torch.randn(1, 7, 4, dtype=torch.float64), supervised()
    loss, figures = objective(views, fields(7))
    logits = views[0] @ objective.weight.T
    torch.testing.assert_close(loss, cross_entropy(logits, fields(7)["class_id"]))
    assert figures["accuracy"].item() == pytest.approx(
        (logits.argmax(1) == fields(7)["class_id"]).double().mean()
    )
    assert Supervised(4, 3).double()(views, fields(7))[0].item() == pytest.approx(math.log(3))


# All of them.


def built(file: Path, *arguments: str) -> ViewsObjective:
    """The objective of a configuration, as the command line builds it."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--model.init_args.objective", type=ViewsObjective)
    config = parser.parse_args(["--config", str(file), *arguments])
    return parser.instantiate(config).model.init_args.objective


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_configurations_are_complete(file):
    objective = built(file)
    text = file.read_text()
    for kind in (type(objective), *[type(x) for x in objective.children()]):
        for argument in set(inspect.signature(kind).parameters):
            assert f"{argument}:" in text, f"no {argument} of {kind.__name__}"
    for line in text.splitlines():
        assert "#" in line or "class_path" in line or line.rstrip().endswith(":"), f"no explanation: {line}"
    views = torch.randn(objective.n_views, 7, getattr(objective, "embedding_dim", 4))
    loss, _ = objective(views, fields(7))
    assert loss.isfinite()


# Two processes; tests/models/test_two_processes.py has the processes in which this runs.

COUNTS = (3, 4)
OBJECTIVES = {
    "cl": SimCLR(),
    "true": SimCLR(known()),
    "learned_m3": SimCLR(Learned(), n_positives=3),
    "unbiased": SimCLR(unbiased=True),
    "hinge": Blocks(1, 4, "hinge"),
    "blocks": Blocks(2, 5),
    "supervised": supervised(),
    "cross_view": CrossView(known(), 9.0),
}


def step(objective: ViewsObjective, own: slice, world: int = 1) -> dict[str, Tensor]:
    """Loss and gradients with these images of the batch; averaged as DistributedDataParallel does."""
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(objective.n_views, sum(COUNTS), 6, dtype=torch.float64, generator=generator)
    encoder = torch.randn(6, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    objective.zero_grad()
    of_images = {name: values[own] for name, values in fields(sum(COUNTS)).items()}
    loss, figures = objective(images[:, own] @ encoder, of_images)
    loss.backward()
    found = {"loss": loss.detach(), **figures}
    for name, parameter in {"encoder": encoder, **dict(objective.named_parameters())}.items():
        assert parameter.grad is not None
        if world > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world)
        found[name] = parameter.grad.clone()
    return found


def steps_of_two_processes(rank: int, folder: Path) -> None:
    """A step of every objective, saved by each rank."""
    own = slice(sum(COUNTS[:rank]), sum(COUNTS[: rank + 1]))
    torch.save(
        {name: step(objective, own, 2) for name, objective in OBJECTIVES.items()}, folder / f"views{rank}.pt"
    )


def assert_steps_are_those_of_one_process(folder: Path) -> None:
    for rank in range(2):
        found = torch.load(folder / f"views{rank}.pt", weights_only=True)
        for name, objective in OBJECTIVES.items():
            expected = step(objective, slice(None))
            assert expected["encoder"].abs().max() > 1e-4
            assert found[name].keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(
                    found[name][key], value, rtol=1e-10, atol=1e-12, msg=f"{name}: {key}"
                )
