"""Every file of configs/experiments and configs/unimodal/objective: each level is built and takes two steps.

The command's own parser reads the settings. Then sets, encoders and batches are made small; all else stays.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from itertools import chain, islice
from operator import getitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import Namespace
from pytorch_lightning import Trainer
from torchvision.datasets import CIFAR100

from medclip_dcl.command.config_files import allow_imports, unambiguous_files, with_packaged_files
from medclip_dcl.command.lightning_cli import FinishedRun, MedclipCLI
from medclip_dcl.common.files import write_json
from medclip_dcl.data.identity import describe
from medclip_dcl.data.prepared import PreparedSet, write_table
from medclip_dcl.models.classifier import Classifier
from medclip_dcl.models.trained_model import TrainedModel
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.studies.grid_plan import read_experiment
from medclip_dcl.unimodal.evaluation import UnimodalEvaluation
from tests.objective_steps import built
from tests.program import verb
from tests.unimodal.test_arrays import python_batch, write_class_folders, write_stl10

pytestmark = pytest.mark.slow
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
EXPERIMENTS = sorted((CONFIGS / "experiments").glob("*.yaml"))
OBJECTIVES = [
    *(("digits", file) for file in sorted((CONFIGS / "unimodal/objective").glob("*.yaml"))),
    ("cmc", CONFIGS / "unimodal/objective/cross_view.yaml"),
]
SIDE = 64
"""Of the images of the small set, in pixels."""
QUIET: dict[str, Any] = {
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    "accelerator": "cpu",
}
"""Of a Trainer."""
SMALL = {
    name: Namespace(class_path=f"medclip_dcl.networks.{kind}", init_args=Namespace(dim=16, **options))
    for name, kind, options in (
        ("image_encoder", "ResNetRegions", {"width": 8}),
        ("text_encoder", "TransformersSentences", {}),
        ("similarity", "LSENonLocal", {}),
    )
}
"""Parts of the model that a classifier starts from."""


def write_cifar10(folder: Path) -> None:
    """A class has 20 training images, of which the least fraction keeps one."""
    folder.mkdir()
    images = np.random.default_rng(0).integers(256, size=(40, 3, 32, 32), dtype=np.uint8)
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(python_batch(images, np.arange(40) % 10))


def write_cifar100(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A class has five training images; torchvision verifies the checksums of these files."""
    place = folder / "cifar-100-python"
    place.mkdir(parents=True)
    content: dict[str, Any] = {"meta": {"fine_label_names": [f"class {n}" for n in range(100)]}}
    for name, count in (("train", 500), ("test", 100)):
        images = np.random.default_rng(count).integers(256, size=(count, 3072), dtype=np.uint8)
        content[name] = {"data": images, "fine_labels": [n % 100 for n in range(count)]}
    sums = {}
    for name, one in content.items():
        (place / name).write_bytes(pickle.dumps(one))
        sums[name] = hashlib.md5((place / name).read_bytes()).hexdigest()
    for use in ("train", "test"):
        patch.setattr(CIFAR100, f"{use}_list", [[use, sums[use]]])
    patch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": sums["meta"]})


def write_labels(folder: Path) -> None:
    """Give the small set the findings that NIH's labels have and MIMIC-CXR's lack."""
    tables = {name: PreparedSet(folder).table(name) for name in json_of(folder)["digests"]}
    labels = tables["labels"]
    further = ["Infiltration", "Mass", "Nodule", "Pleural Thickening", "Emphysema", "Fibrosis", "Hernia"]
    labels[further] = labels[["Edema"] * len(further)].to_numpy()
    write_table(labels, folder / "labels.parquet", "labels")
    write_json({**json_of(folder), **describe(folder, tables)}, folder / "dataset.json")


def json_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "dataset.json").read_text(encoding="utf-8"))


def parser_of_fit() -> Any:
    """The parser of the command's options: parsing through that of all commands takes twice as long."""
    found = []

    class Kept(MedclipCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            found.append(self._subcommand_parsers["fit"])
            raise FinishedRun

    with suppress(FinishedRun):
        Kept(["fit"])
    return found[0]


class Cells:
    """Settings as the command reads them, on small sets."""

    def __init__(self, folder: Path, embedded_set: Path, bert: Path) -> None:
        self.folder, self.embedded_set, self.bert = folder, embedded_set, bert
        self.labelled_set = Path(shutil.copytree(embedded_set, folder / "labelled"))
        write_labels(self.labelled_set)
        self.first: Namespace | None = None
        self.warm: dict[str, Path] = {}
        self.trained: set[str] = set()
        self.evaluated: dict[str, dict[str, Any]] = {}
        self.parser = parser_of_fit()

    def read(self, *words: str) -> Namespace:
        arguments, _ = with_packaged_files([*words, "--run_folder=run"])
        with unambiguous_files():
            return self.parser.parse_args(arguments)

    def train(self, config: Namespace) -> None:
        """Build what the settings describe and take two steps, unless the same small settings have."""
        self.make_small(config)
        if (parts := str((config.model, config.data))) not in self.trained:
            torch.manual_seed(0)
            run = self.parser.instantiate(config)
            two_steps(run.model, run.data)
            self.trained.add(parts)

    def evaluate(self, config: Namespace) -> dict[str, Any]:
        """Numbers of unimodal features before the first step, as `test` nests them; once for equal evaluations."""
        self.make_small(config)
        key = str((config.trainer.callbacks, config.data.init_args.source))
        if key not in self.evaluated:
            run = self.parser.instantiate(config)
            self.evaluated[key] = numbers_of(run.trainer.callbacks[0], run.model, run.data)
        return self.evaluated[key]

    def make_small(self, run: Namespace) -> None:
        model, data = run.model.init_args, run.data.init_args
        data.seed = 0
        if "source" in data:
            self.make_images_small(model, data)
            return
        data.batch_size = 8
        data.folder = str(self.labelled_set if "label_fraction" in data else self.embedded_set)
        if "tasks" in data:
            data.text_file = None
            model.text_encoder.init_args.update(Namespace(dim=8, word_dim=8))
            return
        data.num_workers, data.image_size = 0, SIDE
        sees_whole = data.crop_size is None if "label_fraction" in data else data.features
        data.crop_size = None if sees_whole else 32
        if model.image_encoder:
            model.image_encoder.init_args.update(Namespace(width=8, weights=None))
        if "text_encoder" in model:
            model.text_encoder.init_args.pretrained = str(self.bert)
        if model.init_from:
            model.init_from = str(self.warm_model(run))

    def make_images_small(self, model: Namespace, data: Namespace) -> None:
        data.subset_seed = 0
        if data.source == "digits":
            return
        data.files = str(self.folder / data.source)
        data.batch_size = 8 + (model.objective.init_args.get("k") or 0)
        data.image_size = 8
        if "embedding_dim" not in model.objective.init_args:  # else it is the number of features
            # With fewer, the gradient of a 1x1 convolution writes beyond its memory without AVX-512 (torch 2.14.1).
            model.image_encoder.init_args.width = 8

    def warm_model(self, run: Namespace) -> Path:
        """An exported model with the networks of the file's first run, whose features the set has."""
        if self.first is None:
            self.first = run.model.init_args.clone()
        parts = {name: (self.first.get(name) or part).clone() for name, part in SMALL.items()}
        if (key := str(parts)) not in self.warm:
            self.warm[key] = self.folder / f"warm_{len(self.warm)}"
            parts["text_encoder"].init_args.pretrained = str(self.bert)
            networks = {name: built(part.as_dict()) for name, part in parts.items()}
            ImageTextNetwork(**networks, image_size=SIDE).save_pretrained(self.warm[key])
        folder = self.warm[key]
        if name := run.data.init_args.get("features"):
            copy = folder / "set"
            if not copy.is_dir():
                shutil.copytree(self.embedded_set, copy)
            if not (copy / "features" / name).is_dir():
                verb("encode")([str(folder), str(copy), "--name", name, "--device", "cpu"])
            run.data.init_args.folder = str(copy)
        return folder


@pytest.fixture(scope="module")
def cells(embedded_set, small_bert, tmp_path_factory) -> Iterator[Cells]:
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        patch.setattr(TrainedModel, "log_training", lambda *_: None)
        write_cifar10(folder / "cifar10")
        write_cifar100(folder / "cifar100", patch)
        write_stl10(folder / "stl10")
        write_class_folders(folder / "class_folders")
        # Made by `make study` before.
        for share in ("0.1", "0.43", "0.6"):
            file = Path(f"runs/phantoms/search_eta/chosen_{share}.yaml")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("model: {init_args: {class_probability: {init_args: {a: 0.1}}}}")
        allow_imports(())
        yield Cells(folder, embedded_set, small_bert)


def two_steps(model: Any, data: Any) -> None:
    """Two steps of the model's own optimiser, with a finite loss and a gradient."""
    if isinstance(model, Classifier):  # which asks the Trainer for features
        trainer = Trainer(max_steps=2, limit_val_batches=0, **QUIET)
        trainer.fit(model, data)
        assert trainer.global_step == 2 and all(p.isfinite().all() for p in model.parameters())
        return
    data.connect(model.requirements())
    data.setup("fit")
    model.use_data(data.provided(), "fit")
    model._trainer = SimpleNamespace(estimated_stepping_batches=100_000, world_size=1, global_step=0)
    optimizer = model.configure_optimizers()
    optimizer = optimizer["optimizer"] if isinstance(optimizer, dict) else optimizer
    model.train()
    loader = data.train_dataloader()
    for step, batch in enumerate(islice(chain(loader, loader), 2)):
        loss = model.training_step(data.on_after_batch_transfer(batch, 0), step)
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert loss.isfinite() and all(x.isfinite().all() for x in gradients)
        assert any(x.any() for x in gradients)
        optimizer.step()
    assert step == 1


@torch.no_grad()
def numbers_of(evaluation: UnimodalEvaluation, model: Any, data: Any) -> dict[str, Any]:
    """Metrics of the section, by probes of one epoch."""
    evaluation.probe["epochs"], evaluation.embedding_map = 1, False
    trainer = Trainer(**QUIET)
    model.eval()
    data.load("test")
    for batch in data.test_dataloader():
        outputs = model.test_step(data.on_after_batch_transfer(batch, 0), 0)
        evaluation.on_test_batch_end(trainer, model, outputs)
    with torch.enable_grad():
        return evaluation._evaluated(evaluation._gathered(), data.dataset())["unimodal"].metrics


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_every_level_trains_two_steps(file, cells):
    experiment = read_experiment(file)
    assert experiment.reference or experiment.choice
    cells.first = None
    # All levels but seeds.
    count = max(len(levels) for axis, levels in experiment.axes.items() if axis != experiment.pairs)
    runs = experiment.covering_runs()[:count]
    for run in runs:
        cells.train(cells.read(*run.arguments))
    paths = [path.split("/") for one in experiment.outcomes.values() for path in one.paths]
    if any(section == "unimodal" for section, *_ in paths):
        found = cells.evaluate(cells.read(*runs[-1].arguments))
        for section, *keys in paths:
            value: Any = reduce(getitem, keys, found) if section == "unimodal" else 0
            assert np.isfinite(value), keys


@pytest.mark.parametrize(("base", "file"), OBJECTIVES, ids=lambda x: getattr(x, "stem", x))
def test_every_unimodal_objective_trains_two_steps(base, file, cells):
    config = cells.read(f"--config=unimodal/{base}", f"--config={file}")
    model = config.model.init_args
    # The features of `digits` for those that name their number.
    model.projection_dim = model.objective.init_args.get("embedding_dim", model.projection_dim)
    cells.train(config)
