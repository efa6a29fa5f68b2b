"""Views of small images: which images, which views, which fields; the same in every process and after a stop."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from medclip_dcl.unimodal.arrays import ImageArrays, read_digits
from medclip_dcl.unimodal.augmentation import uniform_numbers
from medclip_dcl.unimodal.data import (
    UnimodalDataModule,
    ViewsProvided,
    ViewsRequirements,
    class_members,
)
from tests.unimodal.test_arrays import write_stl10

ALL = ("class_id", "rho", "lowest_rho", "highest_rho")
Batch = dict[str, Tensor]


@pytest.fixture(scope="module")
def digits() -> ImageArrays:
    return read_digits()


@pytest.fixture(scope="module")
def stl10(tmp_path_factory) -> str:
    """Ten training images of each of two draws of the classes, five without a label, twelve for the test."""
    return str(write_stl10(tmp_path_factory.mktemp("stl10"))[0])


def module(
    n_views: int = 2, fields: tuple[str, ...] = ALL, stage: str = "fit", members: int = 0, **options: Any
) -> UnimodalDataModule:
    found = UnimodalDataModule(**options)
    found.connect(ViewsRequirements(n_views, fields, members))
    found.load(stage)
    return found


def batches(data: UnimodalDataModule, loader: str = "train", epoch: int = 0) -> list[Batch]:
    """Batches as the model gets them."""
    loading = getattr(data, f"{loader}_dataloader")()
    if loader == "train":
        loading.sampler.set_epoch(epoch)
    return [data.on_after_batch_transfer(batch, 0) for batch in loading]


def joined(parts: list[Batch], name: str) -> Tensor:
    return torch.cat([part[name] for part in parts], dim=1 if parts[0][name].ndim == 5 else 0)


def counts(data: UnimodalDataModule) -> list[int]:
    return data.chosen.train_labels.bincount(minlength=len(data.chosen.classes)).tolist()


def as_set(images: Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


# Which images


@pytest.mark.parametrize("fraction", [0.05, 0.5, 1.0])
def test_the_fraction_of_each_selected_class_is_kept(digits, fraction):
    data = module(fraction=fraction)
    whole = digits.train_labels.bincount().tolist()
    assert counts(data) == whole[:5] + [round(fraction * count) for count in whole[5:]]
    assert torch.equal(data.chosen.test, digits.test), "the test stays whole"
    label_of = {
        image.numpy().tobytes(): int(label)
        for image, label in zip(digits.train, digits.train_labels, strict=True)
    }
    found = [label_of[image.numpy().tobytes()] for image in data.chosen.train]
    assert found == data.chosen.train_labels.tolist()


def test_a_smaller_fraction_lies_within_a_larger_one():
    sets = [as_set(module(fraction=fraction).chosen.train) for fraction in (0.05, 0.1, 0.3, 0.31, 0.9, 1.0)]
    assert all(fewer < more for fewer, more in zip(sets, sets[1:], strict=False))


def test_the_subset_depends_on_its_seed_alone():
    first = module(fraction=0.5)
    assert as_set(module(fraction=0.5, seed=4, batch_size=7).chosen.train) == as_set(first.chosen.train)
    other = module(fraction=0.5, subset_seed=1)
    assert counts(other) == counts(first) and as_set(other.chosen.train) != as_set(first.chosen.train)


def test_subset_of_a_class_ignores_other_classes():
    few = module(fraction=0.2, classes=["6", "1", "8"])
    assert few.chosen.classes == ("1", "6", "8") and few.chosen.selected == ("6", "8")
    whole = module(fraction=0.2)
    for label, name in enumerate(few.chosen.classes):
        own, of_all = (
            data.chosen.train[data.chosen.train_labels == number]
            for data, number in ((few, label), (whole, int(name)))
        )
        assert torch.equal(own, of_all)
    tested = [few.chosen.test[few.chosen.test_labels == label] for label in range(3)]
    for images, name in zip(tested, few.chosen.classes, strict=True):
        assert torch.equal(images, whole.chosen.test[whole.chosen.test_labels == int(name)])
    assert sum(map(len, tested)) == len(few.chosen.test)


def test_the_description_counts_what_is_used():
    data = module(fraction=0.1, classes=["0", "9"], subset_seed=3)
    found = json.loads(json.dumps(data.dataset()))
    assert found.pop("fingerprint") == read_digits().fingerprint(), "of all images of the source"
    assert found == {
        "source": "digits",
        "fraction": 0.1,
        "selected": ["9"],
        "classes": ["0", "9"],
        "subset_seed": 3,
        "image_size": 8,
        "view_size": 8,
        "train_images": {"0": 119, "9": 12},
        "test_images": {"0": 59, "9": 60},
    }
    assert data.provided() == ViewsProvided(1, 128)


# Training batches


def test_shares_are_those_of_ssd(stl10):
    """Ten equal classes, r = .5 of half of them: .2 r / (1 + r) and .2 / (1 + r)."""
    names = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
    data = module(source="stl10", files=stl10, classes=names, fraction=0.5, batch_size=5)
    found = batches(data)
    of_lowest, of_highest = 0.2 * 0.5 / 1.5, 0.2 / 1.5
    assert joined(found, "lowest_rho").tolist() == pytest.approx([of_lowest] * 15)
    assert joined(found, "highest_rho").tolist() == pytest.approx([of_highest] * 15)
    expected = [of_lowest if label >= 5 else of_highest for label in joined(found, "class_id").tolist()]
    assert joined(found, "rho").tolist() == pytest.approx(expected)


def test_views_are_those_of_seed_epoch_and_index():
    data = module(n_views=3, seed=5, batch_size=100)
    table = uniform_numbers(len(data.chosen.train), 3, seed=5, epoch=2)
    found = batches(data, epoch=2)
    assert len(found) == len(data.chosen.train) // 100
    indices = joined(found, "index")
    assert len(set(indices.tolist())) == len(indices) == 1100
    for batch in found:
        assert batch["images"].shape == (3, 100, 1, 8, 8) and batch["images"].dtype == torch.float32
        whole = data.chosen.train[batch["index"]].float() / 255
        for view in range(3):
            expected = data.augmentation(whole, table[batch["index"], view], 8)
            torch.testing.assert_close(batch["images"][view], expected, rtol=0, atol=1e-6)
    assert not torch.equal(found[0]["images"][0], found[0]["images"][1]), "views differ"


def test_members_are_other_images_of_the_class():
    labels = torch.tensor([2, 0, 2, 1, 0, 2, 1, 2])
    drawn = torch.cat([class_members(labels, 3, 4, epoch) for epoch in range(300)], 1)
    rows = torch.arange(8)
    assert (labels[drawn] == labels[:, None]).all() and (drawn != rows[:, None]).all()
    for row, label in enumerate(labels):
        others = rows[(labels == label) & (rows != row)]
        shares = [(drawn[row] == other).double().mean().item() for other in others]
        assert sum(shares) == pytest.approx(1) and min(shares) > 0.8 / len(others)
    more = class_members(labels, 4, 4, 7)
    assert torch.equal(class_members(labels, 3, 4, 7), more[:, :3]), "more members leave the first ones"
    for other in (class_members(labels, 4, 4, 8), class_members(labels, 4, 5, 7)):
        assert not torch.equal(more, other)


def test_last_views_are_those_of_class_members():
    data, own = module(4, members=2, seed=5, fraction=0.1), module(4, seed=5, fraction=0.1)
    table = uniform_numbers(len(data.chosen.train), 4, seed=5, epoch=2)
    drawn = class_members(data.chosen.train_labels, 2, 5, 2)
    for batch, plain in zip(batches(data, epoch=2), batches(own, epoch=2), strict=True):
        assert torch.equal(batch["images"][:2], plain["images"][:2]) and "members" not in batch
        for view in (2, 3):
            images = data.chosen.train[drawn[batch["index"], view - 2]].float() / 255
            expected = data.augmentation(images, table[batch["index"], view], 8)
            torch.testing.assert_close(batch["images"][view], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_see_together_what_one_sees(processes, monkeypatch):
    alone = {
        use: batches(module(fraction=0.3, batch_size=64), use, epoch=1) for use in ("train", "val", "test")
    }
    parts: dict[str, list[list[Batch]]] = {use: [] for use in alone}
    for rank in range(processes):
        for name in ("data.samplers", "unimodal.data"):
            monkeypatch.setattr(f"medclip_dcl.{name}.rank_and_size", lambda rank=rank: (rank, processes))
        data = module(fraction=0.3, batch_size=64)
        for use, found in parts.items():
            found.append(batches(data, use, epoch=1))
    for number, batch in enumerate(alone["train"]):
        of_ranks = [part[number] for part in parts["train"]]
        for name in batch:
            assert torch.equal(joined(of_ranks, name), batch[name]), name
    for use in ("val", "test"):
        whole, shared = alone[use], [batch for part in parts[use] for batch in part]
        order = joined(shared, "index").argsort()
        for name in whole[0]:
            assert torch.equal(joined(shared, name)[order], joined(whole, name)), name


# Evaluation batches


def test_test_loader_serves_every_image_once():
    data = module(fraction=0.2, batch_size=97, stage="test")
    found = batches(data, "test")
    both = torch.cat([data.chosen.train, data.chosen.test])
    assert joined(found, "index").tolist() == list(range(len(both)))
    assert torch.equal(torch.cat([batch["images"] for batch in found]), both.float() / 255)
    assert torch.equal(
        joined(found, "class_id"), torch.cat([data.chosen.train_labels, data.chosen.test_labels])
    )
    assert torch.equal(joined(found, "is_test"), torch.arange(len(both)) >= len(data.chosen.train))


def test_the_monitor_sees_some_training_images():
    data = module(monitor_images=300)
    found = batches(data, "val")
    indices = joined(found, "index")
    assert len(set(indices.tolist())) == 300 and not joined(found, "is_test").any()
    assert len(indices.diff().unique()) > 3, "not the first ones"
    assert torch.equal(
        torch.cat([batch["images"] for batch in found]), data.chosen.train[indices].float() / 255
    )
    assert torch.equal(joined(batches(module(monitor_images=300), "val"), "index"), indices)
    assert not torch.equal(joined(batches(module(monitor_images=300, seed=1), "val"), "index"), indices)
    assert len(joined(batches(module(), "val"), "index")) == len(data.chosen.train)


# Sources


def test_large_images_are_seen_small(stl10):
    data = module(source="stl10", files=stl10, batch_size=8, fields=(), image_size=32)
    large = module(source="stl10", files=stl10, batch_size=8, fields=(), image_size=32, evaluation_size=96)
    assert torch.equal(batches(large)[0]["images"], batches(data)[0]["images"])
    assert large.on_after_batch_transfer(next(iter(large.test_dataloader())), 0)["images"].shape[-1] == 96
    assert (large.dataset()["view_size"], large.dataset()["image_size"]) == (32, 96)
    assert batches(data)[0]["images"].shape == (2, 8, 3, 32, 32)
    images = torch.cat([batch["images"] for batch in batches(data, "test")])
    whole = torch.cat([data.chosen.train[:20], data.chosen.test]).float() / 255
    torch.testing.assert_close(images, tv.resize(whole, [32, 32], antialias=True), rtol=0, atol=2e-6)
    as_they_are = module(source="stl10", files=stl10, batch_size=8, fields=())
    assert torch.equal(torch.cat([batch["images"] for batch in batches(as_they_are, "test")]), whole)


def test_unlabelled_images_are_trained_on_and_not_evaluated(stl10):
    data = module(source="stl10", files=stl10, batch_size=5, fields=())
    assert sorted(joined(batches(data), "class_id").tolist()) == sorted([-1] * 5 + [*range(10)] * 2)
    assert "rho" not in batches(data)[0]
    assert joined(batches(data, "val"), "class_id").tolist() == [*range(10)] * 2
    found = batches(data, "test")
    assert joined(found, "class_id").tolist() == [*range(10)] * 3 + [0, 1]
    assert joined(found, "index").tolist() == list(range(32))
    assert data.dataset()["train_images"]["unlabelled"] == 5
    names = list(data.chosen.classes)
    labelled = module(source="stl10", files=stl10, batch_size=5, classes=names)
    assert len(labelled.chosen.train) == 20 and "rho" in batches(labelled)[0]
