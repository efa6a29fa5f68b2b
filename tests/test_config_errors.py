"""Errors of the configuration are one line: the key, what was found, the nearest key that there is."""

from __future__ import annotations

from pathlib import Path
from urllib.error import URLError

import pytest

from medclip_dcl.cli import main

DEMO = str(Path(__file__).resolve().parent.parent / "configs/demo.yaml")
MODEL, DATA = "--model.init_args.", "--data.init_args."
BERT = "model.init_args.text_encoder.init_args"


def said(capsys, *arguments: str) -> str:
    """What `fit` writes to standard error; it ends with status 2."""
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
        (["--trainer.max_epochs", "abc"], ["trainer.max_epochs: expected int, found abc"]),
        (["--ema_decay", "1.5"], ["ema_decay", "v<1", "found 1.5"]),
        ([f"{MODEL}similarity", "medclip_dcl.similarity.LSEE"], ["model.init_args.similarity", "LSEE", "mean LSE?"]),
        ([f"{MODEL}similarity", "medclip_dcl.similarty.LSE"], ["similarty", "mean similarity?"]),
        ([f"{MODEL}class_probability", "nowhere.Mine"], ["no module nowhere", "nowhere.Mine", "PYTHONPATH"]),
        ([f"{MODEL}similarity", "torch.nn.Linear"], ["model.init_args.similarity", "Similarity", "torch.nn.Linear"]),
        (["--config", "nowhere.yaml"], ["config", "nowhere.yaml"]),
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
    weights = f"{MODEL}image_encoder.init_args.weights"
    line = said(
        capsys, "--run_folder", str(tmp_path / "run"), f"{DATA}folder", str(small_set), weights, "imagenet"
    )
    for words in ("imagenet", "no network", "null", ".pth"):
        assert words in line


@pytest.mark.parametrize("command", [[], ["fit"]])
def test_help_names_the_program(command, capsys):
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    out = capsys.readouterr().out
    assert out.startswith("usage: medclip-dcl") and "Lightning Trainer command line tool" not in out
    assert command or "chest radiographs" in out
