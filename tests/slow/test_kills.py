"""kill -9 at several moments of training, preparation and scoring: a rerun of the same command finishes the work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from medclip_dcl.prepared import FORMAT_VERSION, write_json, write_table

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    """A command in a process group of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def kill_when(process: subprocess.Popen[bytes], is_time: Callable[[], bool]) -> bool:
    """Kill the command's whole group as soon as the condition holds; False if it ended before."""
    for _ in range(6000):
        if process.poll() is not None:
            return False
        if is_time():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.02)
    raise TimeoutError("the command neither ended nor came so far in two minutes")


def fit_arguments(run: Path, small_set: Path, small_bert: Path) -> list[str]:
    model, data = "--model.init_args.", "--data.init_args."
    return [
        "medclip_dcl", "fit",
        "--config", "configs/demo.yaml", "--config", "configs/objective/dcl_lm.yaml",
        "--run_folder", str(run),
        "--trainer.max_epochs", "6", "--trainer.check_val_every_n_epoch", "1",
        "--trainer.log_every_n_steps", "1", "--trainer.precision", "32-true",
        "--trainer.enable_progress_bar", "false",
        f"{model}text_encoder.init_args.pretrained", str(small_bert),
        f"{model}text_encoder.init_args.dropout", "0.0",
        f"{model}warmup_steps", "2",
        f"{data}folder", str(small_set), f"{data}image_size", "48", f"{data}crop_size", "32", f"{data}batch_size", "8",
    ]  # fmt: skip


def has_rows(run: Path, count: int) -> bool:
    file = run / "metrics.csv"
    return file.is_file() and len(file.read_text().splitlines()) > count


def test_training_killed_twice_ends_as_if_never_killed(small_set, small_bert, tmp_path):
    whole = tmp_path / "whole"
    assert start(fit_arguments(whole, small_set, small_bert)).wait() == 0
    run = tmp_path / "killed"
    for count in (3, 13):
        process = start(fit_arguments(run, small_set, small_bert))
        assert kill_when(process, partial(has_rows, run, count)), "it ended before it could be killed"
        assert not (run / "fit.json").exists()
    assert start(fit_arguments(run, small_set, small_bert)).wait() == 0
    assert json.loads((run / "fit.json").read_text())["steps"] == 18
    a = torch.load(whole / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    b = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    for name in a:
        assert torch.equal(a[name], b[name]), name
    metrics = [pd.read_csv(folder / "metrics.csv") for folder in (whole, run)]
    columns = ["step", "train/loss", "validate/loss"]
    pd.testing.assert_frame_equal(metrics[0][columns], metrics[1][columns])
    leftovers = [path.name for path in run.rglob("*") if path.name.endswith(".tmp")]
    assert leftovers == [], "what a killed run was writing is gone"


def test_preparation_killed_in_the_images_ends_with_the_same_set(tmp_path):
    raw = tmp_path / "raw"
    phantom = ["data_prep.phantom", "--output", str(raw), "--studies", "300", "--seed", "2", "--size", "256"]
    killed = start(phantom)
    assert kill_when(killed, lambda: len(list(raw.rglob("*.jpg"))) > 40)
    assert start(phantom).wait() == 0

    def prepare(folder: Path) -> list[str]:
        boxes = raw / "MS_CXR_Local_Alignment_v1.0.0.json"
        return ["data_prep.mimic_cxr", "--source", str(raw), "--output", str(folder), "--ms_cxr", str(boxes)]

    assert start(prepare(tmp_path / "whole")).wait() == 0
    broken = tmp_path / "broken"
    assert kill_when(start(prepare(broken)), lambda: len(list(broken.rglob("*.jpg"))) > 20)
    assert not (broken / "dataset.json").exists()
    assert start(prepare(broken)).wait() == 0

    def content(folder: Path) -> dict[str, bytes]:
        return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}

    assert content(tmp_path / "whole") == content(broken)


def test_scoring_killed_three_times_gives_the_same_bytes(small_bert, tmp_path):
    random = np.random.default_rng(5)
    words = [
        "no",
        "heart",
        "size",
        "normal",
        "small",
        "left",
        "right",
        "effusion",
        "pneumothorax",
        "lung",
        "is",
        "clear",
        "edema",
        "mild",
    ]
    texts = {" ".join(random.choice(words, size=random.integers(4, 40))) for _ in range(1500)}
    table = pd.DataFrame({"sentence_id": range(len(texts)), "text": sorted(texts), "n_reports": 1})

    def prepare(folder: Path) -> Path:
        write_table(table, folder / "sentences.parquet", "sentences")
        write_json({"format_version": FORMAT_VERSION, "phantom": True}, folder / "dataset.json")
        return folder

    def command(folder: Path) -> list[str]:
        options = ["--device", "cpu", "--token_budget", "512", "--keep_every", "0.2"]
        return ["data_prep.score_sentences", "--data", str(folder), "--model", str(small_bert), *options]

    whole, killed = prepare(tmp_path / "whole"), prepare(tmp_path / "killed")
    assert start(command(whole)).wait() == 0

    def has_parts(wanted: int) -> bool:
        return len(list((killed / "log_p").glob(".*.parts/*.npz"))) >= wanted

    for wanted in random.integers(1, 4, size=3).cumsum().tolist():
        assert kill_when(start(command(killed)), partial(has_parts, wanted)), (
            "it ended before it could be killed"
        )
        assert has_parts(wanted) and not list((killed / "log_p").glob("*.parquet"))
    assert start(command(killed)).wait() == 0
    (expected,), (found,) = ((folder / "log_p").iterdir() for folder in (whole, killed))
    assert found.name == expected.name and found.read_bytes() == expected.read_bytes()
