"""Command lines of runs of seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from medclip_dcl.command.cli import main

ROOT = Path(__file__).resolve().parents[2]
DEMO = "demo"
CLASSIFICATION = ["--trainer.callbacks", '[{"class_path": "medclip_dcl.evaluation.ZeroShotClassification"}]']


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Standard error of a command that ends with status 2, without the origins of packaged files.

    Lightning's logger says these to the standard error that it found when it was imported, which tests before decide.
    """
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    lines = capsys.readouterr().err.splitlines(keepends=True)
    return "".join(line for line in lines if "packaged with" not in line)


def small(
    run: Path,
    small_set: Path,
    small_bert: Path,
    *more: str,
    objective: str = "dcl_lm",
    resnet: bool = False,
    heads: bool = False,
) -> list[str]:
    """Arguments of a run of seconds: the demo's configuration with a small set, network and image.

    ``resnet``: with the demo's image encoder; its optimiser and checkpoints take most of such a run's time.
    ``heads``: with --config heads, and the sizes of the images that its features were computed of.
    """
    model, data = "--model.init_args.", "--data.init_args."
    patches = [
        f"{model}image_encoder", "tests.small.PatchRegions",
        f"{model}image_encoder.init_args.dim", "128",
    ]  # fmt: skip
    sizes = [f"{data}image_size", "48", f"{data}crop_size", "32"]
    return [
        "--config", DEMO,
        *(["--config", "heads"] if heads else sizes),
        "--config", f"objective/{objective}",
        "--run_folder", str(run),
        "--trainer.max_epochs", "2",
        "--trainer.check_val_every_n_epoch", "1",
        "--trainer.enable_progress_bar", "false",
        "--trainer.log_every_n_steps", "1",
        "--trainer.precision", "32-true",
        f"{model}text_encoder.init_args.pretrained", str(small_bert),
        f"{model}warmup_steps", "2",
        f"{data}folder", str(small_set),
        f"{data}batch_size", "8",
        *([] if resnet else patches),
        *more,
    ]  # fmt: skip
