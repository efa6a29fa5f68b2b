"""Errors of the configuration are one line: the key, what was found, the nearest key that there is."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import get_args
from urllib.error import URLError

import pytest
from pytorch_lightning.cli import LightningCLI

from medclip_dcl.command import lightning_cli
from medclip_dcl.command.cli import main
from medclip_dcl.command.config_keys import TOP, check_arguments
from medclip_dcl.command.lightning_cli import MedclipCLI
from medclip_dcl.common.errors import UserError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DEMO = str(CONFIGS / "demo.yaml")
OF_DEMO = ("--config", DEMO)
MODEL, DATA = "--model.init_args.", "--data.init_args."
BERT = "model.init_args.text_encoder.init_args"


@pytest.fixture(autouse=True)
def sources_are_there(tmp_path, monkeypatch):
    """A missing prepared set or language model would be named before what only the parser finds."""
    for name in ("phantom", "mimic_cxr"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "dataset.json").touch()
    (tmp_path / "runs/demo_language_model/language_model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


def said(capsys, *arguments: str) -> str:
    """Standard error of `fit`, which ends with status 2."""
    with pytest.raises(SystemExit) as error:
        main(["fit", "--config", DEMO, *arguments])
    captured = capsys.readouterr()
    assert error.value.code == 2 and not captured.out
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--modle", "3"], ["modle", "mean model?"]),
        (["--trainer.max_epoch", "3"], ["trainer.max_epoch:", "mean trainer.max_epochs?"]),
        ([f"{MODEL}learning_rat", "3"], ["model.init_args.learning_rat:", "mean learning_rate?", "ImageTextModel"]),
        ([f"{DATA}batch_sise", "3"], ["data.init_args.batch_sise:", "mean batch_size?"]),
        ([f"--{BERT}.poolin", "mean"], [f"{BERT}.poolin:", "mean pooling?"]),
        ([f"{DATA}batch_size", "abc"], ["data.init_args.batch_size: expected int, found abc"]),
        (["--trainer.max_epochs", "abc"], ["trainer.max_epochs: expected int or null, found abc"]),
        (["--ema_decay", "1.5"], ["ema_decay", "below 1", "found 1.5"]),
        ([f"{MODEL}similarity", "medclip_dcl.networks.LSEE"], ["model.init_args.similarity", "LSEE", "mean LSE?"]),
        ([f"{MODEL}similarity", "medclip_dcl.similarty.LSE"], ["similarty", "medclip_dcl.similarty.LSE"]),
        ([f"{MODEL}class_probability", "nowhere.Mine"], ["no module nowhere", "nowhere.Mine", "PYTHONPATH"]),
        ([f"{MODEL}similarity", "torch.nn.Linear"], ["model.init_args.similarity", "Similarity", "torch.nn.Linear"]),
        (["--config", "nowhere.yaml"], ["config", "nowhere.yaml"]),
        ([f"{DATA}folder", "nowhere"], ["prepared data set nowhere does not exist"]),
        ([f"{DATA}folder", "nowhere", "--prompts", "chexpert14"], ["chexpert14: no such file", "configs/prompts"]),
        (["--trainer.callbacks+=medclip_dcl.evaluation.Retrieva"], ["trainer.callbacks", "mean Retrieval?"]),
    ],
)  # fmt: skip
def test_an_error_of_the_command_line_is_one_line(options, named, capsys):
    line = said(capsys, *options)
    assert all(words in line for words in named), line


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("modle: 3", ["modle", "mean model?"]),
        ("trainer: {max_epoch: 3}", ["trainer.max_epoch:", "mean trainer.max_epochs?"]),
        ("model: {init_args: {text_encoder: {init_args: {poolin: mean}}}}", [f"{BERT}.poolin:", "mean pooling?"]),
        ("model: {init_args: {similarity: {init_args: {sharpness: abc}}}}", ["sharpness: expected float, found abc"]),
        (
            "trainer: {callbacks: [{class_path: medclip_dcl.evaluation.Grounding, init_args: {exampels: 3}}]}",
            ["trainer.callbacks", "exampels", "mean examples?", "Grounding"],
        ),
        ("model: [3", ["parsing", "line 1"]),
        ("run_folder: null", ["run_folder"]),
    ],
)  # fmt: skip
def test_an_error_of_a_file_is_one_line(text, named, tmp_path, capsys):
    (tmp_path / "more.yaml").write_text(text)
    line = said(capsys, "--config", str(tmp_path / "more.yaml"))
    assert all(words in line for words in named), line


def test_imagenet_weights_that_cannot_be_downloaded_are_one_line(capsys, monkeypatch, small_set, tmp_path):
    def refuse(*_arguments, **_options):
        raise URLError("no network")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)
    encoder = f"{MODEL}image_encoder.init_args."
    imagenet = [f"{encoder}weights", "imagenet", f"{encoder}width", "64"]
    line = said(capsys, "--run_folder", str(tmp_path / "run"), f"{DATA}folder", str(small_set), *imagenet)
    for words in ("imagenet", "no network", "null", ".pth"):
        assert words in line


def test_options_that_lightning_refuses_are_one_line(capsys, small_set, small_bert, tmp_path):
    bert = ["--model.init_args.text_encoder.init_args.pretrained", str(small_bert)]
    folders = ["--run_folder", str(tmp_path / "run"), f"{DATA}folder", str(small_set), *bert]
    intervals = ["--trainer.check_val_every_n_epoch", "null", "--trainer.val_check_interval", "0.5"]
    line = said(capsys, *folders, *intervals)
    assert "trainer: " in line and "val_check_interval" in line


FULL = "model: {class_path: medclip_dcl.models.ImageTextModel, init_args: {similarity: %s}}"
OTHER = "{class_path: medclip_dcl.networks.LSE, init_args: {attention: mean}}"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("modle: 3", []),
        ("trainer: {max_epoch: 3}", []),
        ("model: {init_args: {text_encoder: {init_args: {poolin: mean}}}}", []),
        (FULL % OTHER, []),
        ("seed_everything: 1", ["--config", "nowhere.yaml"]),
        ("seed_everything: 1", [f"{DATA}batch_sise=3"]),
        (
            "trainer: {callbacks: [{class_path: medclip_dcl.evaluation.Retrieval, init_args: {centres: cell}}]}",
            [],
        ),
        ("seed_everything: 1", ["--trainer.gradient_clip_val", "abc"]),
        ("seed_everything: 1", [f"{DATA}cache_images", "7"]),
        ("seed_everything: 1", [f"{MODEL}learning_rate=[1]"]),
        ("seed_everything: 1", [f"{DATA}sentences", "both"]),
        ("seed_everything: 1", [f"{MODEL}image_encoder.init_args.depth=19"]),
        ("run_folder: nowhere", [f"{DATA}folder", "nowhere"]),
    ],
)
def test_a_mistake_is_refused_before_lightning_is_imported_in_the_parsers_words(
    text, options, tmp_path, capsys, monkeypatch
):
    (tmp_path / "more.yaml").write_text(text)
    arguments = ["--config", str(tmp_path / "more.yaml"), *options]
    line = said(capsys, *arguments)
    with pytest.raises(UserError) as mistake:
        check_arguments(["fit", "--config", DEMO, *arguments])
    assert line == f"medclip_dcl: error: {mistake.value}"
    monkeypatch.setattr("medclip_dcl.command.cli.check_arguments", lambda arguments: None)
    assert said(capsys, *arguments) == line


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([f"{DATA}sentences", "both"], ["data.init_args.sentences: expected all or one, found both"]),
        ([f"{MODEL}image_encoder.init_args.depth", "19"], ["depth: expected 18, 34 or 50, found 19"]),
        ([f"{MODEL}similarity.init_args.attention", "max"], ["attention: expected critical or mean"]),
        (["--trainer.devices", "0"], ["trainer.devices", "at least 1"]),
        (["--trainer.max_epochs", "-5"], ["trainer.max_epochs: expected a number of epochs", "found -5"]),
        ([f"{MODEL}learning_rate", "null"], ["learning_rate: expected float, found null"]),
        (["--trainer.max_steps", "null"], ["trainer.max_steps: expected int, found null"]),
        (["--trainer.max_time", "5h"], ["trainer.max_time: expected days:hours", "found 5h"]),
        (["--trainer.max_time", "12:00:00"], ["trainer.max_time: expected days:hours", "found 12:00:00"]),
        (["--seed_everything", str(2**32)], ["seed_everything: expected an integer", "found 4294967296"]),
        (["--trainer.val_check_interval", "often"], ["val_check_interval: expected a share", "found often"]),
        (["--trainer.fast_dev_run", "-1"], ["trainer.fast_dev_run: expected true, false", "found -1"]),
        (["--trainer.num_nodes", "1,2"], ["trainer.num_nodes: expected int, found 1,2"]),
        (["--trainer.accelerator", "3"], ["trainer.accelerator: expected auto, cpu,", "found 3"]),
        (["--trainer.logger", "board"], ["trainer.logger: expected true, false", "found board"]),
        (["--checkpoint.mode", "mix"], ["checkpoint.mode: expected min or max, found mix; did you mean m"]),
        (["--checkpoint.save_top_k", "-3"], ["checkpoint.save_top_k", "found -3"]),
        (
            ["--checkpoint.monitr", "x"],
            ["checkpoint.monitr: there is no such key", "mean checkpoint.monitor?"],
        ),
        (["--checkpoint.monitor", "loss"], ["checkpoint.monitor", "validate/loss", "found loss"]),
        (["--seed_everything", "-3"], ["seed_everything: expected an integer", "found -3"]),
        (["--trainer.limit_val_batches", "1.5"], ["limit_val_batches: expected a share", "found 1.5"]),
        ([f"{MODEL}init_from", "runs/gone/last.ckpt"], ["init_from: no file or folder runs/gone/last.ckpt"]),
        ([f"--{BERT}.pretrained", "runs/a/b"], ["pretrained: no file or folder runs/a/b"]),
        (["--checkpoint_minutes", "-1"], ["checkpoint_minutes", "at least 0"]),
        (["--prediction_format", "xls"], ["prediction_format: expected csv or parquet, found xls"]),
        (["--trainer.accelerator", "cpuu"], ["trainer.accelerator: expected auto, cpu,", "mean cpu?"]),
        (["--trainer.gradient_clip_algorithm", "nrm"], ["expected norm or value, found nrm", "mean norm?"]),
        (["--trainer.strategy", "nonsense"], ["trainer.strategy: expected auto, ddp,"]),
        *(
            (["--trainer.precision", kind], ["trainer.precision: expected 16,", f"found {kind}"])
            for kind in ("17", "bf16-true", "16-true", "64-true", "transformer-engine")
        ),
        (["--run_folder", "run"], ["run already holds another run", "differs in data.init_args.seed;"]),
    ],
)
def test_a_value_that_is_refused_later_is_refused_before_lightning_is_imported(options, named):
    Path("run").mkdir()
    Path("run/config.yaml").write_text(
        "run_folder: elsewhere\nmodel: {init_args: {learning_rate: 0.0005}}\ndata: {init_args: {seed: 1}}\n"
    )
    with pytest.raises(UserError) as error:
        check_arguments(["fit", "--config", DEMO, *options])
    assert all(words in str(error.value) for words in named), error.value


@pytest.mark.parametrize(
    "options",
    [
        *(["--config", DEMO, "--config", str(file)] for file in sorted((CONFIGS / "objective").glob("*.yaml"))),
        *(["--config", str(file)] for file in sorted(CONFIGS.glob("language_model*.yaml"))),
        ["--config", str(CONFIGS / "mimic_cxr.yaml"), "--config", str(CONFIGS / "small_machine.yaml")],
        ["--config", str(CONFIGS / "finetune.yaml"), "--config", str(CONFIGS / "linear_probe.yaml")],
        # Another class, whose own setting it is; one whose module is not looked into; a short name; a short way.
        [*OF_DEMO, f"{MODEL}similarity=medclip_dcl.networks.LSE", f"{MODEL}similarity.init_args.gamma2", "8"],
        [*OF_DEMO, f"{MODEL}similarity", "users.Similarity", f"{MODEL}similarity.init_args.mine", "8"],
        [*OF_DEMO, f"{MODEL}similarity", "LSE", f"{MODEL}similarity.init_args.dim", "8"],
        [*OF_DEMO, "--model.learning_rate", "3"],
        [*OF_DEMO, "--trainer.strategy", "DDPStrategy", "--trainer.accelerator", "CPUAccelerator"],
        [*OF_DEMO, "--trainer.strategy=ddp_find_unused_parameters_true", "--trainer.precision", "16"],
        # Values as they may be written.
        *([*OF_DEMO, f"{MODEL}learning_rate", number] for number in ("1e-3", "1", ".5")),
        *([*OF_DEMO, f"{DATA}{setting}"] for setting in ("cache_images=yes", "evaluation_crop=null")),
        *([*OF_DEMO, "--trainer.devices", devices] for devices in ("0,", "1, 3,", "0,1", "[10]", "[0, 11]")),
        *([*OF_DEMO, "--trainer.max_time", time] for time in ("1:00:00:00", "00:12:00:00", "{hours: 2}")),
        *([*OF_DEMO, "--seed_everything", seed] for seed in ("2026112301", str(2**32 - 1))),
        [*OF_DEMO, "--trainer.gradient_clip_val", ".inf"],
        [*OF_DEMO, f"{DATA}brightness=.nan"],
        [*OF_DEMO, "--trainer.fast_dev_run", "--trainer.max_epochs", "3"],
        [*OF_DEMO, f"{MODEL}class_probability", "medclip_dcl.objectives.ConstantClassProbability"],
        [*OF_DEMO, "--trainer.callbacks+=medclip_dcl.evaluation.Retrieval", "--trainer.callbacks.init_args.x", "1"],
    ],
    ids=lambda options: Path(options[-1]).name,
)  # fmt: skip
def test_what_may_be_right_is_left_to_the_parser(options):
    check_arguments(["fit", *options, "--print_config"])  # whose data set need not be there


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ({"gpus": 0}, ["trainer.accelerator", "sees no gpu device", "--trainer.accelerator cpu"]),
        ({"gpus": 1}, ["trainer.devices: PyTorch sees 1 on this machine, found 2"]),
        ({"gpus": 2}, []),
    ],
)
def test_devices_that_are_not_there_are_refused_before_lightning_is_imported(devices, words, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices["gpus"])
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    arguments = ["fit", "--config", DEMO, "--trainer.accelerator", "gpu", "--trainer.devices", "2"]
    try:
        check_arguments([*arguments, f"{DATA}folder", "nowhere"])
    except UserError as error:
        found = str(error)
    assert all(part in found for part in words or ["nowhere"])


def test_the_command_comes_before_its_options():
    with pytest.raises(UserError, match=r"give the command first, fit \| validate"):
        check_arguments(["--config", DEMO, "fit", "--run_folder", "x"])


def test_the_top_level_keys_are_those_of_all_commands(monkeypatch):
    cli = object.__new__(MedclipCLI)
    monkeypatch.setattr(
        LightningCLI, "parse_arguments", lambda self, *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        MedclipCLI.__init__(cli)
    names = {
        name.lstrip("-").split(".")[0]
        for parser in cli._subcommand_parsers.values()
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--")
    }
    assert set(TOP) == names


@pytest.mark.parametrize("command", [[], ["fit"]])
def test_help_names_the_program(command, capsys):
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    out = capsys.readouterr().out
    assert out.startswith("usage: medclip-dcl") and "Lightning Trainer command line tool" not in out
    assert command or "chest radiographs" in out


def test_one_batch_is_not_all_batches():
    """Whichever order of int and float `typing` has cached from other packages."""
    for name in ("limit_test_batches", "overfit_batches"):
        assert get_args(signature(lightning_cli.Trainer).parameters[name].annotation)[0] is int
