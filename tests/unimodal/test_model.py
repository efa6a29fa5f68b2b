"""The unimodal model: initial weights, steps, checkpoints, resuming, two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
import yaml
from jsonargparse import ArgumentParser
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from medclip_dcl.common.errors import UserError
from medclip_dcl.data.samplers import EpochDataModule
from medclip_dcl.objectives import KnownClassProbability
from medclip_dcl.runs.checkpoint_files import find_readable
from medclip_dcl.runs.loggers import MetricsFile
from medclip_dcl.runs.run_folder import RunFolder
from medclip_dcl.training.last_checkpoint import AtomicCheckpointIO, LastCheckpoint, LastEpoch
from medclip_dcl.training.record import RunRecord
from medclip_dcl.unimodal.data import UnimodalDataModule
from medclip_dcl.unimodal.encoders import SmallConvNet, SmallImageEncoder
from medclip_dcl.unimodal.evaluation import UnimodalEvaluation, _Images
from medclip_dcl.unimodal.model import UnimodalModel
from medclip_dcl.unimodal.simclr import SimCLR
from tests.models.test_resuming import Kill, Killed, assert_same

CONFIGS = Path(__file__).parents[2] / "configs/unimodal"
OBJECTIVES = sorted(path.stem for path in (CONFIGS / "objective").glob("*.yaml"))


def true_eta() -> SimCLR:
    return SimCLR(KnownClassProbability(max_eta=0.9))


def model(**options: Any) -> UnimodalModel:
    """With two drawn members of the class in the correction, beside the two views of each image."""
    torch.manual_seed(3)
    objective = SimCLR(KnownClassProbability(max_eta=0.9), n_positives=2, correction_images="class")
    return UnimodalModel(SmallConvNet(4), objective, **{"projection_dim": 8, **options})


def data(**options: Any) -> UnimodalDataModule:
    """Three classes of digits: 361 training images, of which two classes are thinned."""
    few: dict[str, Any] = {
        "classes": ["1", "5", "8"],
        "fraction": 0.5,
        "batch_size": 40,
        "monitor_images": 50,
    }
    return UnimodalDataModule(**{**few, **options})


# Initial weights


def configured(objective: str) -> UnimodalModel:
    """The model of the digits' configuration with an objective's, built as the command line does, under one seed."""
    settings: dict[str, Any] = {}
    for name in ("digits", f"objective/{objective}"):
        of_file = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))["model"]
        settings = {
            **settings,
            **of_file,
            "init_args": {**settings.get("init_args", {}), **of_file["init_args"]},
        }
    # As if the objective stood first in a file.
    settings["init_args"] = dict(reversed(settings["init_args"].items()))
    parser = ArgumentParser()
    parser.add_subclass_arguments(LightningModule, "model")
    parsed = parser.parse_object({"model": settings})
    torch.manual_seed(11)
    return parser.instantiate_classes(parsed).model


def test_every_objective_starts_from_the_same_weights():
    models = {name: configured(name) for name in OBJECTIVES}
    assert {"cl", "dcl_low", "dcl_high", "dcl_true"} <= models.keys()
    for name, one in models.items():
        assert_same(one.network.state_dict(), models["cl"].network.state_dict(), name)


# Steps


def views(images: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    rho = torch.linspace(0.1, 0.4, images, dtype=torch.float64)
    return {
        "images": torch.rand(2, images, 1, 8, 8, generator=generator, dtype=torch.float64),
        "index": torch.arange(images),
        "class_id": torch.arange(images) % 3,
        "rho": rho,
        "lowest_rho": rho.min().expand(images),
        "highest_rho": rho.max().expand(images),
    }


# Checkpoints and resuming


def train(folder: Path, one: LightningModule, data: EpochDataModule, *callbacks: Callback) -> None:
    """Fit into a run folder as the command line does, from its last checkpoint if there is one."""
    found = find_readable(folder / "checkpoints")
    evaluation = [UnimodalEvaluation(k=5)] if isinstance(one, UnimodalModel) else []
    trainer = Trainer(
        max_epochs=3,
        default_root_dir=folder,
        logger=[MetricsFile(folder)],
        plugins=[AtomicCheckpointIO()],
        callbacks=[*callbacks, *evaluation, RunRecord(RunFolder(folder)), LastEpoch()],
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accelerator="cpu",
    )
    trainer.callbacks.append(LastCheckpoint(folder / "checkpoints", 0.0))  # type: ignore[attr-defined]
    trainer.fit(one, data, ckpt_path=None if found is None else str(found), weights_only=True)


def assert_same_ends(whole: Path, killed: Path) -> int:
    """Returns the number of steps."""
    a, b = (torch.load(x / "checkpoints/last.ckpt", weights_only=True) for x in (whole, killed))
    for part in ("state_dict", "optimizer_states", "epoch", "global_step"):
        assert_same(a[part], b[part], part)
    return a["global_step"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(folder, model(), data())
    return folder


@pytest.mark.slow
def test_killed_runs_end_as_the_whole_one(whole, tmp_path):
    stops = (
        Kill("on_train_batch_end", 0, 3),
        Kill("on_validation_batch_end", 1, 0),
        Kill("on_train_batch_start", 2, 2, saved_until=1),
    )
    for stop in stops:
        with pytest.raises(Killed):
            train(tmp_path, model(), data(), stop)
        torch.rand(5)  # another process has other random numbers
    train(tmp_path, model(), data())
    assert_same_ends(whole, tmp_path)
    rows = [pd.read_csv(x / "metrics.csv").drop(columns="time") for x in (whole, tmp_path)]
    pd.testing.assert_frame_equal(rows[0], rows[1][rows[0].columns])
    columns = ("train/loss", "train/class_probability", "validate/knn_accuracy")
    assert all(rows[0][name].notna().any() for name in columns)


@pytest.mark.parametrize(
    "changed, message",
    [({"projection_dim": 9}, "another projection_dim"), ({"batch_norm": True}, "another batch_norm")],
)
def test_weights_of_another_network_are_refused(whole, changed, message):
    checkpoint = torch.load(whole / "checkpoints/last.ckpt", weights_only=True)
    with pytest.raises(UserError, match=message):
        model(**changed).on_load_checkpoint(checkpoint)
    with pytest.raises(UserError, match="expected kind unimodal, found none$"):
        model().on_load_checkpoint({"network": {"image_encoder": {}}})


# Two processes


class Patches(SmallImageEncoder):
    """Without BatchNorm, which normalises the images of each process by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.feature_dim, self.channels = 5, 1
        self.map = nn.Conv2d(1, 5, 4, stride=4)

    def forward(self, images: Tensor) -> Tensor:
        return self.map(images).tanh().mean((2, 3))

    def config(self) -> dict[str, Any]:
        return {}


def step(batch: dict[str, Tensor], world: int = 1) -> dict[str, Tensor]:
    """Loss, and parameters after a step; gradients are averaged as DistributedDataParallel does."""
    torch.manual_seed(5)
    one = UnimodalModel(Patches(), true_eta(), 4).double()
    optimizer = torch.optim.Adam(one.parameters(), lr=0.01)
    loss, _ = one._loss(batch)
    loss.backward()
    for parameter in one.parameters():
        if world > 1 and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world)
    optimizer.step()
    return {"loss": loss.detach(), **{name: p.detach() for name, p in one.named_parameters()}}


def evaluated() -> dict[str, Tensor]:
    """Outputs of evaluation steps on 11 images, of which two are served twice."""
    generator = torch.Generator().manual_seed(8)
    index = torch.tensor([6, 0, 10, 3, 2, 9, 1, 8, 4, 7, 5, 0, 6])
    features = torch.randn(11, 3, generator=generator)
    return {"features": features[index], "index": index, "class_id": index % 4, "is_test": index > 6}


def gathered(outputs: dict[str, Tensor]) -> _Images:
    callback = UnimodalEvaluation()
    for some in torch.arange(len(outputs["index"])).split(3):
        callback._parts.append(_Images(*(values[some] for values in outputs.values())))
    return callback._gathered()


def steps_of_two_processes(rank: int, folder: Path) -> None:
    """Called in each of two processes by tests/models/test_two_processes.py."""
    own = slice(0, 4) if rank == 0 else slice(4, 6)
    batch = {name: x[:, own] if name == "images" else x[own] for name, x in views().items()}
    found = step(batch, world=2)
    part = slice(0, 5) if rank == 0 else slice(5, 13)
    images = gathered({name: values[part] for name, values in evaluated().items()})
    torch.save({"step": found, "images": images._asdict()}, folder / f"unimodal{rank}.pt")


def assert_steps_are_those_of_one_process(folder: Path) -> None:
    expected, images = step(views()), gathered(evaluated())._asdict()
    assert images["place"].tolist() == list(range(11)) and images["is_test"].sum() == 4
    for rank in range(2):
        found = torch.load(folder / f"unimodal{rank}.pt", weights_only=True)
        for name, value in expected.items():
            torch.testing.assert_close(found["step"][name], value, rtol=1e-12, atol=1e-14, msg=name)
        assert_same(found["images"], images)
