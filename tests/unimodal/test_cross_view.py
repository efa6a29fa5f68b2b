"""CMC's two views: L and ab of an image, an encoder and a projection of each, the loss between them."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from medclip_dcl.command.cli import main
from medclip_dcl.common.errors import UserError
from medclip_dcl.metrics.linear_probe import fit_linear_probes, standardisation
from medclip_dcl.objectives import ConstantClassProbability, KnownClassProbability
from medclip_dcl.unimodal.cross_view import CrossView
from medclip_dcl.unimodal.curl import Blocks
from medclip_dcl.unimodal.data import UnimodalDataModule
from medclip_dcl.unimodal.encoders import SmallImageResNet
from medclip_dcl.unimodal.evaluation import UnimodalEvaluation, _Images
from medclip_dcl.unimodal.lightness_colour import LightnessColourResNets, rgb_to_lab
from medclip_dcl.unimodal.model import UnimodalModel
from medclip_dcl.unimodal.network import UnimodalNetwork
from medclip_dcl.unimodal.simclr import SimCLR
from tests.models.test_resuming import Kill, Killed
from tests.unimodal.test_arrays import write_class_folders
from tests.unimodal.test_model import assert_same_ends, train

IMAGES = torch.rand(4, 3, 12, 12)


# Colours


def test_lab_is_scikit_images():
    color = pytest.importorskip("skimage.color", reason="pip install -e '.[test]' installs scikit-image")
    every_fifth = torch.arange(0, 256, 5) / 255
    images = torch.cartesian_prod(every_fifth, every_fifth, every_fifth).T.reshape(1, 3, 52, -1)
    expected = torch.from_numpy(color.rgb2lab(images[0].permute(1, 2, 0).double().numpy())).permute(2, 0, 1)
    torch.testing.assert_close(rgb_to_lab(images.double())[0], expected, rtol=0, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = rgb_to_lab(images)
    torch.testing.assert_close(found[0].double(), expected, rtol=0, atol=1e-4)


# Encoders


@torch.no_grad()
def test_features_join_an_encoder_of_lightness_and_one_of_colour():
    encoder = LightnessColourResNets(18, width=2).eval()
    lab = rgb_to_lab(IMAGES) / 100
    for part, channels, name in ((lab[:, :1], 1, "lightness"), (lab[:, 1:], 2, "colour")):
        alone = SmallImageResNet(18, 2, channels).eval()
        alone.load_state_dict(getattr(encoder, name).state_dict())
        place = slice(0, 16) if name == "lightness" else slice(16, 32)
        torch.testing.assert_close(encoder(IMAGES)[:, place], alone(part))
    assert encoder.feature_dim == 32 and encoder.channels == 3


@pytest.mark.parametrize("hidden", [0, 5])
@torch.no_grad()
def test_each_part_has_a_projection_of_its_own(hidden):
    network: Any = UnimodalNetwork(LightnessColourResNets(18, width=2), 3, hidden).eval()
    features, found = network.features(IMAGES), network(IMAGES)
    assert found.shape == (2, 4, 3)
    for part, projection in enumerate((network.projection, *network.other_projections)):
        own = features[:, 16 * part : 16 * part + 16]
        if hidden:
            own = linear(own, projection[0].weight, projection[0].bias).clamp(min=0)
            projection = projection[2]
        torch.testing.assert_close(found[part], linear(own, projection.weight, projection.bias))
    again = UnimodalNetwork.from_config(network.config())
    again.load_state_dict(network.state_dict())
    assert torch.equal(again.eval()(IMAGES), found)


# Loss


def loop(first: Tensor, second: Tensor, eta: list[float], gamma2: float) -> float:
    """Both directions of SSD's equations 7 and 8 with v = x+, in plain numbers."""
    views = [[[x / math.hypot(*row) for x in row] for row in view.tolist()] for view in (first, second)]
    losses = []
    for anchors, others in (views, views[::-1]):
        for image, anchor in enumerate(anchors):
            scores = [gamma2 * math.fsum(a * b for a, b in zip(anchor, x, strict=True)) for x in others]
            negatives = [math.exp(s) for n, s in enumerate(scores) if n != image]
            positive = math.exp(scores[image])
            mean = math.fsum(negatives) / len(negatives)
            g = max((mean - eta[image] * positive) / (1 - eta[image]), math.exp(-gamma2))
            losses.append(-math.log(positive / (positive + len(negatives) * g)))
    return math.fsum(losses) / len(losses)


@pytest.mark.parametrize(("images", "dim", "gamma2"), [(2, 1, 2.0), (5, 3, 1 / 0.07), (7, 4, 9.0)])
def test_cross_view_loss_equals_the_loop(images, dim, gamma2):
    first, second = views = torch.randn(2, images, dim, dtype=torch.float64)
    rho = torch.linspace(0.05, 0.6, images, dtype=torch.float64)
    known, constant = KnownClassProbability(max_eta=0.5), ConstantClassProbability(0.01)
    of_known = rho.clamp(max=0.5).tolist()
    of_rules: list[tuple[Any, list[float]]]
    of_rules = [(known, of_known), (constant, [0.01] * images), (None, [0.0] * images)]
    for rule, eta in of_rules:
        found, figures = CrossView(rule, gamma2)(views, {"rho": rho})
        assert found.item() == pytest.approx(loop(first, second, eta, gamma2), rel=1e-10)
        if rule is not None:
            assert figures["class_probability"].item() == pytest.approx(sum(eta) / images, rel=1e-6)
    swapped, _ = CrossView(known, gamma2)(views.flip(0), {"rho": rho})
    assert swapped.item() == pytest.approx(loop(first, second, of_known, gamma2), rel=1e-10)


def test_figures_are_means_over_both_directions():
    """The directions differ in their number of anchors at the floor."""
    first = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]])
    second = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, -0.8]])
    gamma2, eta = 2.0, 0.3
    _, figures = CrossView(ConstantClassProbability(eta), gamma2)(torch.stack([first, second]), {})
    at_floor, shares = [], []
    for logits in (gamma2 * first @ second.T, gamma2 * second @ first.T):
        for image in range(3):
            mean = (logits[image].exp().sum() - logits[image, image].exp()) / 2
            share = eta * logits[image, image].exp() / mean
            at_floor.append(((1 - share) * mean / (1 - eta) <= math.exp(-gamma2)).item())
            shares.append(min(share.item(), 1.0))
    assert sum(at_floor[:3]) != sum(at_floor[3:])
    assert figures["at_floor"].item() == pytest.approx(sum(at_floor) / 6)
    assert figures["corrected_share"].item() == pytest.approx(sum(shares) / 6)
    assert figures.keys() == {"at_floor", "class_probability", "corrected_share", "capped"}


# Model


def test_an_augmented_image_is_two_views():
    torch.manual_seed(0)
    model = UnimodalModel(LightnessColourResNets(18, width=2), CrossView(), 3).double()
    assert model.requirements().n_views == 1
    images = torch.rand(1, 6, 3, 8, 8, dtype=torch.float64)
    loss, _ = model._loss({"images": images})
    lightness, colour = model.network(images[0])
    expected, _ = CrossView()(torch.stack([lightness, colour]), {})
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    # Of SimCLR's four views the first two are L and ab of the first crop.
    both = torch.rand(2, 6, 3, 8, 8, dtype=torch.float64)
    simclr = SimCLR(ConstantClassProbability(0.1), n_positives=3)
    model = UnimodalModel(LightnessColourResNets(18, width=2), simclr, 3).double().eval()
    of_crops = [model.network(crop) for crop in both]
    assert model._loss({"images": both})[0].item() == pytest.approx(simclr(torch.cat(of_crops), {})[0].item())
    of_three = SimCLR(ConstantClassProbability(0.1), n_positives=2)
    model = UnimodalModel(LightnessColourResNets(18, width=2), of_three, 3).double()
    with pytest.raises(ValueError, match="SimCLR: expected 3 views .*, found 2 of 6"):
        model._loss({"images": both[:1]})
    of_class = UnimodalModel(LightnessColourResNets(18, width=2), Blocks(1, similar="class"), 3)
    with pytest.raises(
        UserError, match="expected multiples of 2, .* found 2 views, 1 of them of other images"
    ):
        of_class.requirements()


# Runs


def two_views() -> UnimodalModel:
    torch.manual_seed(3)
    objective = CrossView(KnownClassProbability(max_eta=0.9))
    return UnimodalModel(LightnessColourResNets(18, 2, large_stem=True), objective, 4, hidden=0)


@pytest.mark.slow
def test_a_killed_run_of_two_views_ends_as_the_whole_one(tmp_path):
    images = str(write_class_folders(tmp_path / "images"))

    def data() -> UnimodalDataModule:
        return UnimodalDataModule("class_folders", images, batch_size=8, image_size=16, monitor_images=12)

    train(tmp_path / "whole", two_views(), data())
    for stop in (Kill("on_train_batch_end", 0, 1), Kill("on_train_batch_start", 2, 2, saved_until=0)):
        with pytest.raises(Killed):
            train(tmp_path / "killed", two_views(), data(), stop)
        torch.rand(5)  # another process has other random numbers
    train(tmp_path / "killed", two_views(), data())
    assert assert_same_ends(tmp_path / "whole", tmp_path / "killed") == 9


def test_five_highest_logits_of_more_than_ten_classes():
    generator = torch.Generator().manual_seed(2)
    class_id = torch.arange(12).repeat(6)
    features = torch.randn(12, 5, generator=generator)[class_id] + torch.randn(72, 5, generator=generator)
    is_test = torch.arange(72) >= 48
    names = [f"class {n}" for n in range(12)]
    counts = {"train_images": dict.fromkeys(names, 4), "test_images": dict.fromkeys(names, 2)}
    callback = UnimodalEvaluation(k=3, probe_epochs=20, probe_learning_rate=0.05, top_k=[1, 5])
    found = callback._evaluated(
        _Images(features, torch.arange(72), class_id, is_test), {"classes": names, "selected": [], **counts}
    )["unimodal"].metrics["classifiers"]["linear_probe"]
    shift, scale = standardisation(features[:48])
    whole = torch.arange(48)[None]
    probe = fit_linear_probes(
        (features[:48] - shift) / scale, class_id[:48], whole, 12, seed=0, **callback.probe
    )
    logits = (features[48:] - shift) / scale @ probe.weight[0] + probe.bias[0]
    ranks = [(row > row[label]).sum().item() for row, label in zip(logits, class_id[48:], strict=True)]
    assert found["top_5"] == pytest.approx(sum(rank < 5 for rank in ranks) / 24)
    assert found["top_1"] == pytest.approx(sum(rank < 1 for rank in ranks) / 24) and found["top_1"] < 1


@pytest.mark.slow
def test_two_views_of_the_real_cifar10_by_the_command_line(real_data, tmp_path):
    """A tenth of the training images of three classes: the commands of the page, end to end."""
    if not (real_data / "cifar10").is_dir():
        pytest.skip(f"no {real_data / 'cifar10'}")
    names = ["airplane", "frog", "ship"]
    words = [
        *("--config", "unimodal/cmc", "--config", "unimodal/objective/cross_view"),
        *("--run_folder", str(tmp_path / "run"), "--untrained", "false", "--trainer.max_epochs", "3"),
        *(
            "--trainer.accelerator",
            "cpu",
            "--trainer.precision",
            "32-true",
            "--trainer.log_every_n_steps",
            "1",
        ),
        *("--data.init_args.source", "cifar10", "--data.init_args.files", str(real_data / "cifar10")),
        *("--data.init_args.classes", json.dumps(names), "--data.init_args.selected", json.dumps(names)),
        *("--data.init_args.fraction", "0.1", "--data.init_args.image_size", "32"),
        *("--model.init_args.image_encoder.init_args.depth", "18"),
        *("--model.init_args.image_encoder.init_args.width", "8"),
    ]
    main(["fit", *words])
    main(["test", "--config", str(tmp_path / "run/config.yaml")])
    results = json.loads((tmp_path / "run/results.json").read_text(encoding="utf-8"))
    assert results["counts"]["unimodal"]["training_images"] == 1500
    assert results["metrics"]["unimodal"]["linear_probe"]["1.0"]["accuracy"] > 0.5
    rows = pd.read_csv(tmp_path / "run/metrics.csv")
    assert rows["train/class_probability"].dropna().sub(0.01).abs().max() < 1e-6
    assert rows["train/loss"].dropna().iloc[-5:].mean() < rows["train/loss"].dropna().iloc[:5].mean()
