"""Views of small images: which images, which views, which fields; the same in every process and after a stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from medclip_dcl.common.errors import UserError
from medclip_dcl.data.link import ViewsProvided, ViewsRequirements
from medclip_dcl.unimodal.arrays import ImageArrays, read_digits
from medclip_dcl.unimodal.augmentation import Augmentation, uniform_numbers
from medclip_dcl.unimodal.data import ImageOnlyDataModule
from tests.unimodal.test_arrays import write_batches, write_stl10

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
    n_views: int = 2, fields: tuple[str, ...] = ALL, stage: str = "fit", **options: Any
) -> ImageOnlyDataModule:
    found = ImageOnlyDataModule(**options)
    found.connect(ViewsRequirements(n_views, fields))
    found.load(stage)
    return found


def batches(data: ImageOnlyDataModule, loader: str = "train", epoch: int = 0) -> list[Batch]:
    """Batches as the model gets them."""
    loading = getattr(data, f"{loader}_dataloader")()
    if loader == "train":
        loading.sampler.set_epoch(epoch)
    return [data.on_after_batch_transfer(batch, 0) for batch in loading]


def joined(parts: list[Batch], name: str) -> Tensor:
    return torch.cat([part[name] for part in parts], dim=1 if parts[0][name].ndim == 5 else 0)


def counts(data: ImageOnlyDataModule) -> list[int]:
    return data.chosen.train_labels.bincount(minlength=len(data.chosen.classes)).tolist()


def as_set(images: Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


# Which images


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])
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


def test_the_subset_of_a_class_does_not_depend_on_the_other_classes():
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


def test_other_classes_may_be_selected(digits):
    whole = digits.train_labels.bincount().tolist()
    assert counts(module(fraction=0.25, selected=["0"])) == [round(whole[0] / 4), *whole[1:]]


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
        "train_images": {"0": 119, "9": 12},
        "test_images": {"0": 59, "9": 60},
    }
    assert data.provided() == ViewsProvided(1, 8, ("0", "9"), 128)


# Training batches


def test_fields_are_shares_of_the_training_images():
    data = module(fraction=0.1, batch_size=66)
    of_class = counts(data)
    for batch in batches(data):
        for position, index in enumerate(batch["index"].tolist()):
            label = int(data.chosen.train_labels[index])
            assert int(batch["class_id"][position]) == label
            assert float(batch["rho"][position]) == pytest.approx(of_class[label] / sum(of_class))
            assert float(batch["lowest_rho"][position]) == pytest.approx(min(of_class) / sum(of_class))
            assert float(batch["highest_rho"][position]) == pytest.approx(max(of_class) / sum(of_class))


def test_shares_are_those_of_ssd(stl10):
    """Ten equal classes, r = .5 of half of them: .2 r / (1 + r) and .2 / (1 + r)."""
    names = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
    data = module(source="stl10", folder=stl10, classes=names, fraction=0.5, batch_size=5)
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


def test_more_views_leave_the_first_ones_as_they_are():
    two, five = (batches(module(n_views=n_views))[0]["images"] for n_views in (2, 5))
    assert torch.equal(two, five[:2])


def test_epochs_and_seeds_have_other_views():
    first = batches(module())
    for found in (batches(module(), epoch=1), batches(module(seed=1))):
        assert not torch.equal(joined(found, "index"), joined(first, "index"))
        by_index = [
            {
                index: views
                for batch in part
                for index, views in zip(batch["index"].tolist(), batch["images"].unbind(1), strict=True)
            }
            for part in (found, first)
        ]
        both = by_index[0].keys() & by_index[1].keys()
        # Small digits have few crops.
        same = [i for i in both if torch.equal(by_index[0][i], by_index[1][i])]
        assert len(both) > 900 and len(same) < 5


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


class Seen(LightningModule):
    """Remembers the training batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches: dict[tuple[int, int], Batch] = {}
        self.provided: ViewsProvided | None = None

    def requirements(self) -> ViewsRequirements:
        return ViewsRequirements(2, ("rho",))

    def use_data(self, data: ViewsProvided, stage: str) -> None:
        self.provided = data

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        self.batches[self.current_epoch, batch_index] = batch
        return self.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class SaveAt(Callback):
    """Saves the run after a step."""

    def __init__(self, step: int, file: Path) -> None:
        self.step, self.file = step, file

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.file)


@pytest.mark.filterwarnings("ignore:.*no `validation_step`", "ignore:.*LeafSpec")
def test_a_run_that_is_resumed_in_an_epoch_sees_the_same_batches(tmp_path):
    quiet: dict[str, Any] = {
        name: False
        for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    }
    models = []
    for checkpoint in (None, tmp_path / "middle.ckpt"):
        trainer = Trainer(
            accelerator="cpu", max_epochs=3, callbacks=[SaveAt(10, tmp_path / "middle.ckpt")], **quiet
        )
        models.append(Seen())
        data = ImageOnlyDataModule(fraction=0.2, batch_size=100)
        trainer.fit(models[-1], data, ckpt_path=checkpoint, weights_only=True)
    whole, resumed = models
    assert whole.provided == ViewsProvided(1, 8, tuple("0123456789"), 100)
    assert len(whole.batches) == 3 * 7 and list(resumed.batches) == list(whole.batches)[10:]
    for position, batch in resumed.batches.items():
        for name, values in whole.batches[position].items():
            assert torch.equal(batch[name], values), (position, name)


# Evaluation batches


def test_batches_for_a_gpu_are_in_pinned_memory(monkeypatch):
    """A copy from other memory waits for the GPU's work so far."""
    data = module(classes=["0", "1"], batch_size=64)
    for is_there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        for loader in (data.train_dataloader(), data.test_dataloader()):
            assert loader.pin_memory == is_there


def test_the_test_serves_every_image_once_as_it_is():
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


def test_each_source_has_its_usual_augmentation(tmp_path, stl10):
    assert module().augmentation == Augmentation(0.4, 0.0, (0.0,) * 4, 0.8, 0.0, 0.0)
    cifar10 = module(source="cifar10", folder=str(write_batches(tmp_path, "binary")), batch_size=4)
    assert cifar10.augmentation == Augmentation(0.08, 0.5, (0.4, 0.4, 0.4, 0.1), 0.8, 0.2, 0.0)
    assert cifar10.side == 32
    assert batches(cifar10)[0]["images"].shape == (2, 4, 3, 32, 32)
    of_stl10 = module(source="stl10", folder=stl10, batch_size=5, fields=())
    assert of_stl10.augmentation == Augmentation(0.08, 0.5, (0.4, 0.4, 0.4, 0.1), 0.8, 0.2, 0.5)
    assert of_stl10.side == 32
    given: dict[str, Any] = {
        "crop_scale": 0.3,
        "flip": 0.1,
        "jitter_probability": 0.5,
        "grey": 0.4,
        "blur": 0.6,
    }
    found = module(jitter=[0.1, 0.2, 0.3, 0.4], **given).augmentation
    assert found == Augmentation(jitter=(0.1, 0.2, 0.3, 0.4), **given)


def test_large_images_are_seen_small(stl10):
    data = module(source="stl10", folder=stl10, batch_size=8, fields=())
    assert batches(data)[0]["images"].shape == (2, 8, 3, 32, 32)
    images = torch.cat([batch["images"] for batch in batches(data, "test")])
    whole = torch.cat([data.chosen.train[:20], data.chosen.test]).float() / 255
    torch.testing.assert_close(images, tv.resize(whole, [32, 32], antialias=True), rtol=0, atol=2e-6)
    as_they_are = module(source="stl10", folder=stl10, batch_size=8, fields=(), image_size=96)
    assert torch.equal(torch.cat([batch["images"] for batch in batches(as_they_are, "test")]), whole)


def test_unlabelled_images_are_trained_on_and_not_evaluated(stl10):
    data = module(source="stl10", folder=stl10, batch_size=5, fields=())
    assert sorted(joined(batches(data), "class_id").tolist()) == sorted([-1] * 5 + [*range(10)] * 2)
    assert "rho" not in batches(data)[0]
    assert joined(batches(data, "val"), "class_id").tolist() == [*range(10)] * 2
    found = batches(data, "test")
    assert joined(found, "class_id").tolist() == [*range(10)] * 3 + [0, 1]
    assert joined(found, "index").tolist() == list(range(32))
    assert data.dataset()["train_images"]["unlabelled"] == 5
    names = list(data.chosen.classes)
    labelled = module(source="stl10", folder=stl10, batch_size=5, classes=names)
    assert len(labelled.chosen.train) == 20 and "rho" in batches(labelled)[0]


# Mistakes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fraction": 0.0}, ["data.fraction", "(0, 1]", "0.0"]),
        ({"fraction": 1.5}, ["data.fraction", "(0, 1]", "1.5"]),
        ({"fraction": float("nan")}, ["data.fraction", "nan"]),
        ({"fraction": 0.001}, ["data.fraction 0.001 keeps none of the 121 training images of class 5"]),
        ({"fraction": 0.5, "selected": []}, ["data.fraction 0.5", "data.selected"]),
        ({"fraction": 0.5, "classes": ["0", "1"]}, ["data.fraction 0.5", "name some of 0, 1 in data.selected"]),
        ({"classes": ["0", "10", "frog"]}, ["data.classes: digits has no class 10, frog", "it has 0, 1"]),
        ({"classes": ["3"]}, ["data.classes", "at least two", "got ['3']"]),
        ({"classes": ["3", "3"]}, ["data.classes", "at least two", "got ['3', '3']"]),
        ({"classes": []}, ["data.classes", "at least two", "got []"]),
        ({"selected": ["truck"]}, ["data.selected: digits has no class truck"]),
        ({"selected": ["7"], "classes": ["3", "4"]}, ["data.selected", "data.classes ['3', '4']", "got ['7']"]),
        ({"folder": "here"}, ["data.folder", "come with scikit-learn", "here"]),
        ({"source": "cifar10"}, ["data.folder", "cifar10", "null"]),
        ({"source": "stl10", "folder": "nowhere"}, ["data.folder: no folder nowhere"]),
        ({"batch_size": 0}, ["data.batch_size", "at least 1"]),
        ({"batch_size": 1199}, ["1198 training images", "batch of 1199"]),
        ({"image_size": 2}, ["data.image_size", "at least 3"]),
        ({"crop_scale": 0.0}, ["data.crop_scale", "(0, 1]"]),
        ({"flip": 1.1}, ["data.flip", "[0, 1]"]),
        ({"grey": -0.1}, ["data.grey", "[0, 1]"]),
        ({"blur": 2.0}, ["data.blur", "[0, 1]"]),
        ({"jitter_probability": -1.0}, ["data.jitter_probability", "[0, 1]"]),
        ({"jitter": [0.4, 0.4, 0.4]}, ["data.jitter", "four strengths", "[0.4, 0.4, 0.4]"]),
        ({"jitter": [0.4, 0.4, 0.4, 0.6]}, ["data.jitter", "at most 0.5"]),
        ({"jitter": [0.4, -0.4, 0.4, 0.1]}, ["data.jitter", "at least 0"]),
        ({"monitor_images": 0}, ["data.monitor_images", "at least 1"]),
        ({"seed": -1}, ["data.seed", "at least 0"]),
        ({"subset_seed": -1}, ["data.subset_seed", "at least 0"]),
        ({"fields": ("rho", "log_p")}, ["requires log_p of an image", "class_id, rho, lowest_rho"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_it(options, words):
    with pytest.raises(UserError) as error:
        module(**options)
    assert all(part in str(error.value) for part in words), error.value
    assert "\n" not in str(error.value)


def test_shares_of_images_without_labels_are_refused(stl10):
    with pytest.raises(
        UserError, match=r"requires rho, but 5 of the training images of stl10 have no label; .*classes"
    ):
        module(source="stl10", folder=stl10, batch_size=5, fields=("rho",))


def test_files_of_one_class_alone_are_refused(tmp_path):
    folder = write_batches(tmp_path / "cifar10", "binary")
    for file in folder.glob("*.bin"):
        images = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, 3073).copy()
        images[:, 0] = 3  # the label of each image
        file.write_bytes(images.tobytes())
    with pytest.raises(
        UserError, match="cifar10 has no training image of class airplane, automobile, bird, deer"
    ):
        module(source="cifar10", folder=str(folder), batch_size=4)
    folder, _ = write_stl10(tmp_path / "stl10")
    (folder / "class_names.txt").write_text("airplane\n")
    for use in ("train", "test"):
        (folder / f"{use}_y.bin").write_bytes(bytes([1]) * len((folder / f"{use}_y.bin").read_bytes()))
    with pytest.raises(UserError, match="stl10 has one class, airplane"):
        module(source="stl10", folder=str(folder), batch_size=5, fields=())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fraction": 0.0}, ["data.fraction", "(0, 1]"]),
        ({"source": "cifar10"}, ["data.folder", "cifar10"]),
        ({"folder": "here"}, ["come with scikit-learn"]),
        ({"classes": ["1"]}, ["data.classes", "at least two", "got ['1']"]),
        ({"selected": ["dog"], "classes": ["cat", "ship"]}, ["data.selected", "got ['dog']"]),
        ({"jitter": [0.4, 0.4]}, ["data.jitter", "four strengths"]),
        ({"flip": 2.0}, ["data.flip"]),
        ({"monitor_images": 0}, ["data.monitor_images", "at least 1"]),
    ],
)
def test_mistakes_are_refused_by_the_constructor(settings, words):
    with pytest.raises(UserError) as found:
        ImageOnlyDataModule(**settings)
    assert all(part in str(found.value) for part in words), found.value
