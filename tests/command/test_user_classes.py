"""A bug in a user's own class shows where it is; a class that cannot be found is named in one line."""

from __future__ import annotations

import importlib
import shutil
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from medclip_dcl.command.cli import main
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences
from tests.command.small_runs import refused, small
from tests.program import shell

ROOT = Path(__file__).resolve().parents[2]
MODULE = """
import torch
from pytorch_lightning import Callback
from medclip_dcl.objectives import ClassProbability, contrastive_loss
from tests.small import PatchRegions

class Fifth(ClassProbability):
    requires = ("log_p",)

    def forward(self, log_p):
        return torch.full_like(log_p, 0.2)

    def config(self):
        return {}

class Mine(PatchRegions):
    pass

class WrongShape(Fifth):
    def forward(self, log_p):
        return torch.zeros(len(log_p) + 1)

class WrongCall(Fifth):
    def __init__(self):
        super().__init__()
        contrastive_loss(torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64))

class Raises(Fifth):
    def __init__(self, eta: float = 0.1):
        super().__init__()
        raise ValueError("eta of mine")

class Looks(Fifth):
    def __init__(self):
        super().__init__()
        torch.nothing_of_this_name

class Listens(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        float("abc")

class Builds(Callback):
    def __init__(self):
        {}["absent"]
"""


@pytest.fixture
def module(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder with a user's module users_classes, on the path."""
    (tmp_path / "users_classes.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("users_classes", None)


@pytest.fixture
def arguments(small_set, small_bert, tmp_path):
    """Arguments of a run of one step with two images."""
    short = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "1", "--trainer.callbacks", "[]"]
    return small(tmp_path / "run", small_set, small_bert, *short, "--data.init_args.batch_size", "2")


PROBABILITY, CALLBACK = "--model.init_args.class_probability", "--trainer.callbacks+"


@pytest.mark.parametrize(
    ("option", "name", "kind", "words", "line"),
    [
        (PROBABILITY, "WrongShape", ValueError, "WrongShape returned a class probability of shape", None),
        pytest.param(
            PROBABILITY,
            "WrongCall",
            ValueError,
            "positives: expected",
            "contrastive_loss(torch.zeros(2, 3)",
            marks=pytest.mark.slow,
        ),
        (PROBABILITY, "Raises", ValueError, "eta of mine", 'raise ValueError("eta of mine")'),
        pytest.param(
            PROBABILITY,
            "Looks",
            AttributeError,
            "nothing_of_this_name",
            "torch.nothing_of_this_name",
            marks=pytest.mark.slow,
        ),
        (CALLBACK, "Listens", ValueError, "could not convert string to float", 'float("abc")'),
        pytest.param(CALLBACK, "Builds", KeyError, "absent", '{}["absent"]', marks=pytest.mark.slow),
    ],
)
def test_a_bug_of_the_users_keeps_its_traceback(option, name, kind, words, line, module, arguments):
    with pytest.raises(kind, match=words) as error:
        main(["fit", *arguments, option, f"users_classes.{name}"])
    shown = "".join(traceback.format_exception(error.value))
    assert line is None or line in shown
    assert "Union subtypes" not in shown, "the parser repeats the whole configuration"


def test_a_missing_module_of_a_run_is_named(module, arguments, capsys):
    main(["fit", *arguments, PROBABILITY, "users_classes.Fifth"])
    run = module / "run"
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]["class_probability"] == {
        "class_path": "users_classes.Fifth",
        "init_args": {"max_eta": 0.3},
    }
    (module / "users_classes.py").unlink()
    shutil.rmtree(module / "__pycache__", ignore_errors=True)
    del sys.modules["users_classes"]
    for command in ("test", "predict"):
        said = refused(capsys, [command, "--config", str(run / "config.yaml")])
        assert len(said.splitlines()) == 1
        for words in ("model.init_args.class_probability", "users_classes.Fifth", "no module users_classes"):
            assert words in said
    from medclip_dcl.models.image_text import ImageTextModel

    with pytest.raises(ValueError, match=r"users_classes\.Fifth.*import users_classes before loading"):
        ImageTextModel.load_from_checkpoint(run / "checkpoints/last.ckpt")


def test_an_own_encoder_is_known_by_import(module, small_bert, tmp_path, capsys):
    mine = importlib.import_module("users_classes").Mine()
    parts = mine, BertSentences(str(small_bert), 16), LSENonLocal(16)
    ImageTextNetwork(*parts, image_size=64).save_pretrained(tmp_path / "model")
    del sys.modules["users_classes"]
    arguments = [str(tmp_path / "model"), "--output", str(tmp_path / "exported")]
    with pytest.raises(SystemExit) as error:
        shell("export")(arguments)
    said = capsys.readouterr().err
    assert error.value.code == 2 and "names users_classes.Mine" in said
    assert "add --import users_classes" in said
    shell("export")([*arguments, "--import", "users_classes"])
    assert (tmp_path / "exported/model.safetensors").is_file()


def test_a_callback_is_added_to_the_list(module, arguments, tmp_path, capsys):
    """In a second file by `callbacks+:`, on the command line by `--trainer.callbacks+=`."""
    (tmp_path / "more.yaml").write_text("trainer: {callbacks+: {class_path: users_classes.Builds}}")
    demo = yaml.safe_load((ROOT / "configs/demo.yaml").read_text())["trainer"]["callbacks"]
    several = [item for item in arguments if item not in ("--trainer.callbacks", "[]")]
    in_a_file = ["--config", str(tmp_path / "more.yaml"), "--import", "users_classes"]
    for more in (in_a_file, ["--trainer.callbacks+=users_classes.Builds"]):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main(["fit", *several, *more, "--print_config"])
        found = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
        added = [*(one["class_path"] for one in demo), "users_classes.Builds"]
        assert [one["class_path"] for one in found] == added
