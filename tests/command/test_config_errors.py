"""Errors of the configuration are one line: the key, what was expected, what was found, the nearest key."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import get_args
from urllib.error import URLError

import pytest

from medclip_dcl.command import lightning_cli
from medclip_dcl.common.errors import UserError
from tests.command.small_runs import refused, small

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DEMO = str(CONFIGS / "demo.yaml")
OF_DEMO = ["--config", DEMO]
MODEL, DATA = "--model.init_args.", "--data.init_args."
BERT = "model.init_args.text_encoder.init_args"


def said(capsys, *arguments: str) -> str:
    """Standard error of `fit`, which ends with status 2."""
    error = refused(capsys, ["fit", *arguments])
    (line,) = (line for line in error.splitlines() if "warning" not in line)
    assert line.startswith("medclip-dcl fit: error: ")
    return line


NO_KEY = "there is no such key; did you mean"
MISTAKES: list[tuple[list[str] | str, list[str]]] = [
    # Unknown keys, on the command line and in a file.
    (["--modle", "3"], [f"modle: {NO_KEY} model?"]),
    (["--trainer.max_epoch", "3"], [f"trainer.max_epoch: {NO_KEY} trainer.max_epochs?"]),
    ([f"{MODEL}learning_rat", "3"], [f"model.init_args.learning_rat: {NO_KEY} learning_rate?", "ImageTextModel"]),
    ([f"{DATA}batch_sise", "3"], [f"data.init_args.batch_sise: {NO_KEY} batch_size?"]),
    ([f"--{BERT}.poolin", "mean"], [f"{BERT}.poolin: {NO_KEY} pooling?"]),
    ("modle: 3", [f"modle: {NO_KEY} model?"]),
    ("trainer: {max_epoch: 3}", [f"trainer.max_epoch: {NO_KEY} trainer.max_epochs?"]),
    ("model: {init_args: {text_encoder: {init_args: {poolin: mean}}}}", [f"{BERT}.poolin: {NO_KEY} pooling?"]),
    (
        "trainer: {callbacks: [{class_path: medclip_dcl.evaluation.Grounding, init_args: {exampels: 3}}]}",
        ["trainer.callbacks", f"exampels: {NO_KEY} examples?", "Grounding"],
    ),
    # Values of a wrong type, and words that are not a choice.
    ([f"{DATA}batch_size", "abc"], ["data.init_args.batch_size: expected int, found abc"]),
    (["--trainer.max_epochs", "abc"], ["trainer.max_epochs: expected int, null, found abc"]),
    ([f"{DATA}cache_images", "7"], ["data.init_args.cache_images: expected bool, found 7"]),
    ([f"{MODEL}learning_rate=[1]"], ["model.init_args.learning_rate: expected float, found [1]"]),
    ([f"{MODEL}learning_rate", "null"], ["learning_rate: expected float, found null"]),
    ("trainer: {max_steps: null}", ["trainer.max_steps: expected int, found null"]),
    ("model: {init_args: {similarity: {init_args: {sharpness: abc}}}}", ["sharpness: expected float, found abc"]),
    ([f"{DATA}sentences", "both"], ["data.init_args.sentences: expected one, all, found both"]),
    ([f"{MODEL}image_encoder.init_args.depth", "19"], ["depth: expected 18, 34, 50, found 19"]),
    (["--prediction_format", "xls"], ["prediction_format: expected parquet, csv, found xls"]),
    (["--checkpoint.mode", "mix"], ["checkpoint.mode: expected min, max, null, found mix"]),
    *(
        (["--trainer.precision", kind], ["precision: expected 16-mixed, 32-true, bf16-mixed, null", f"found {kind}"])
        for kind in ("17", "bf16-true", "16-true", "64-true", "transformer-engine")
    ),
    # Last parts of names, and words of other programs.
    (["--lr", "3"], ["lr: there", "mean model.init_args.learning_rate?"]),
    ([f"{MODEL}lr", "3"], ["model.init_args.lr", "mean learning_rate?"]),
    (["--epochs", "3"], ["epochs: there", "mean trainer.max_epochs?"]),
    (["--batchsize", "3"], ["batchsize: there", "mean data.init_args.batch_size?"]),
    # Classes, files and commands.
    ([f"{MODEL}similarity", "medclip_dcl.networks.LSEE"], ["model.init_args.similarity", "LSEE", "mean LSE?"]),
    ([f"{MODEL}image_encoder", "TimRegions"], ["model.init_args.image_encoder: no class is known as TimRegions"]),
    ([f"{MODEL}similarity", "medclip_dcl.similarty.LSE"], ["similarty", "medclip_dcl.similarty.LSE"]),
    ([f"{MODEL}class_probability", "nowhere.Mine"], ["no module nowhere", "nowhere.Mine", "PYTHONPATH"]),
    ([f"{MODEL}similarity", "torch.nn.Linear"], ["model.init_args.similarity", "Similarity", "torch.nn.Linear"]),
    (["--trainer.callbacks+=medclip_dcl.evaluation.Retrieva"], ["trainer.callbacks", "mean Retrieval?"]),
    (["--config", "nowhere.yaml"], ["config", "nowhere.yaml"]),
    ([f"{DATA}folder", "nowhere"], ["prepared data set nowhere does not exist"]),
    ("model: [3", ["more.yaml is not readable YAML", "line 1"]),
]  # fmt: skip


@pytest.mark.parametrize(("given", "named"), MISTAKES, ids=lambda x: str(x)[:60])
def test_a_mistake_is_named_in_one_line(given, named, tmp_path, capsys):
    if isinstance(given, str):
        (tmp_path / "more.yaml").write_text(given)
        given = ["--config", str(tmp_path / "more.yaml")]
    line = said(capsys, *OF_DEMO, *given)
    assert all(words in line for words in named), line


UNWORKABLE: list[tuple[list[str], list[str]]] = [
    (["--prompts", "chexpert15"], ["expected a file", "did you mean chexpert14?"]),
    (["--ema_decay", "1.5"], ["ema_decay: expected a number in (0, 1)", "found 1.5"]),
    (["--checkpoint.mode", "max"], ["checkpoint.mode: expected min for validate/loss, found max"]),
    (["--trainer.val_check_interval", "99"], ["`val_check_interval` (99) must be less than or equal"]),
    (["--trainer.accelerator", "cpuu"], ["accelerator='cpuu'", "Available names"]),
]
MORE_UNWORKABLE: list[tuple[list[str], list[str]]] = [
    ([f"{MODEL}init_from", "runs/gone/last.ckpt"], ["init_from: no file", "runs/gone/last.ckpt"]),
    ([f"--{BERT}.pretrained", "runs/a/b"], ["runs/a/b", "no file or folder"]),
    (["--checkpoint_minutes", "-1"], ["checkpoint_minutes: expected at least 0, found -1"]),
    (["--checkpoint.monitor", "loss"], ["checkpoint.mode: expected min or max for loss"]),
    (["--trainer.max_epochs", "-1"], ["trainer.max_epochs -1: the learning rate decays to the last step"]),
    (["--checkpoint.save_top_k", "-3"], ["save_top_k=-3"]),
    (["--seed_everything", str(2**32)], ["4294967296 is not in bounds"]),
    (["--trainer.max_time", "5h"], ["duration='5h'", "DD:HH:MM:SS"]),
]  # fmt: skip
"""Of the same checks, and of Lightning's: slow."""


@pytest.mark.parametrize(
    ("options", "named"),
    [*UNWORKABLE, *(pytest.param(*x, marks=pytest.mark.slow) for x in MORE_UNWORKABLE)],
)
def test_settings_that_cannot_work_are_one_line(options, named, small_set, small_bert, tmp_path, capsys):
    line = said(capsys, *small(tmp_path / "run", small_set, small_bert, *options))
    assert all(words in line for words in named), line
    assert not (tmp_path / "run").exists()


def test_missing_imagenet_weights_are_one_line(capsys, monkeypatch, small_set, small_bert, tmp_path):
    def refuse(*_arguments, **_options):
        raise URLError("no network")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)
    encoder = f"{MODEL}image_encoder.init_args."
    imagenet = [f"{encoder}weights", "imagenet", f"{encoder}width", "64"]
    line = said(capsys, *small(tmp_path / "run", small_set, small_bert, *imagenet, resnet=True))
    for words in ("imagenet", "no network", "null", ".pth"):
        assert words in line


RIGHT = [
    *(["--config", DEMO, "--config", str(file)] for file in sorted((CONFIGS / "objective").glob("*.yaml"))),
    *(["--config", str(file)] for file in sorted(CONFIGS.glob("language_model*.yaml"))),
    [
        item
        for name in ("mimic_cxr", "laptop", "text_encoder_small")
        for item in ("--config", str(CONFIGS / f"{name}.yaml"))
    ],
    ["--config", str(CONFIGS / "finetune.yaml"), "--config", str(CONFIGS / "laptop.yaml")],
    ["--config", str(CONFIGS / "finetune.yaml"), "--config", str(CONFIGS / "linear_probe.yaml")],
    # Another class, whose own setting it is; a short name; a short way.
    [*OF_DEMO, f"{MODEL}similarity=medclip_dcl.networks.LSE", f"{MODEL}similarity.init_args.gamma2", "8"],
    [*OF_DEMO, f"{MODEL}similarity", "LSE"],
    [*OF_DEMO, "--model.learning_rate", "3"],
    [*OF_DEMO, "--trainer.strategy", "DDPStrategy", "--trainer.accelerator", "CPUAccelerator"],
    # Values as they may be written.
    *([*OF_DEMO, f"{MODEL}learning_rate", number] for number in ("1e-3", "1", ".5")),
    *([*OF_DEMO, f"{DATA}{setting}"] for setting in ("cache_images=yes", "evaluation_crop=null")),
    *([*OF_DEMO, "--trainer.max_time", time] for time in ("1:00:00:00", "{hours: 2}")),
    [*OF_DEMO, "--trainer.gradient_clip_val", ".inf"],
    [*OF_DEMO, "--trainer.callbacks+=medclip_dcl.evaluation.Retrieval"],
]


@pytest.mark.slow
def test_right_configurations_are_taken():
    lightning_cli.check({" ".join(options): ["fit", *options, "--run_folder=run"] for options in RIGHT})


SOURCES = ("data.init_args.folder", "model.init_args.init_from", f"{BERT}.pretrained")


@pytest.mark.parametrize("option", SOURCES)
def test_sources_that_are_gone_are_named(option, small_set, small_bert, tmp_path):
    there = {SOURCES[0]: small_set, SOURCES[2]: small_bert, option: tmp_path / "gone/x"}
    run = ["fit", "--config", DEMO, "--run_folder=run", *(f"--{key}={value}" for key, value in there.items())]
    with pytest.raises(UserError, match=f"^cell: {option}: no file or folder .*gone/x"):
        lightning_cli.check({"cell": run}, needs_sources=True)


def test_a_check_downloads_no_model(small_set, small_bert, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    values = (small_set, "somebody/model", small_bert)
    run = [f"--{key}={value}" for key, value in zip(SOURCES, values, strict=True)]
    lightning_cli.check({"cell": ["fit", "--config", DEMO, "--run_folder=run", *run]}, needs_sources=True)


def test_one_batch_is_not_all_batches():
    """Whichever order of int and float `typing` has cached from other packages."""
    for name in ("limit_test_batches", "overfit_batches"):
        assert get_args(signature(lightning_cli.Trainer).parameters[name].annotation)[0] is int
