"""kill -9 at several moments of training and scoring: a rerun of the same command finishes the work.

Preparation is killed in tests/slow/test_preparation_kills.py.
"""

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

from medclip_dcl.common.files import write_json
from medclip_dcl.data.prepared import FORMAT_VERSION, write_table

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def hear_ctrl_c() -> None:
    """For a process that is started: the jobs in the background of a shell ignore SIGINT, and so do theirs."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


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
        preexec_fn=hear_ctrl_c,
    )


def fit_arguments(run: Path, small_set: Path, small_bert: Path, *more: str) -> list[str]:
    """Six epochs of six steps with dropout; last.ckpt after every step."""
    model, data = "--model.init_args.", "--data.init_args."
    return [
        "medclip_dcl", "fit",
        "--config", "demo", "--config", "objective/dcl_lm",
        "--run_folder", str(run), "--checkpoint_minutes", "0",
        "--trainer.max_epochs", "6", "--trainer.check_val_every_n_epoch", "1",
        "--trainer.log_every_n_steps", "1", "--trainer.precision", "32-true",
        "--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu",
        f"{model}text_encoder.init_args.pretrained", str(small_bert),
        f"{model}text_encoder.init_args.dropout", "0.2",
        f"{model}warmup_steps", "2",
        f"{data}folder", str(small_set), f"{data}image_size", "48", f"{data}crop_size", "32", f"{data}batch_size", "4",
        *more,
    ]  # fmt: skip


def rows(run: Path) -> int:
    """Rows of metrics.csv so far."""
    file = run / "metrics.csv"
    return len(file.read_text().splitlines()) - 1 if file.is_file() else 0


def has_rows(run: Path, count: int) -> bool:
    return rows(run) >= count


def signal_when(process: subprocess.Popen[bytes], number: int, is_time: Callable[[], bool]) -> int:
    """Send the signal to all processes of the command as soon as the condition holds; the first one's exit status."""
    for _ in range(60000):
        assert process.poll() is None, "it ended before it could be stopped"
        if is_time():
            os.killpg(process.pid, number)
            return process.wait(timeout=300)
        time.sleep(0.01)
    raise TimeoutError("the command neither ended nor came so far in ten minutes")


def differing(whole: Path, run: Path) -> list[str]:
    """Tensors of the last checkpoint, of weights and of the optimiser, that are not the same bit for bit."""
    a, b = (torch.load(x / "checkpoints/last.ckpt", weights_only=True) for x in (whole, run))
    names = [
        name for name in a["state_dict"] if not torch.equal(a["state_dict"][name], b["state_dict"][name])
    ]
    states = [x["optimizer_states"][0]["state"] for x in (a, b)]
    for index, state in states[0].items():
        names += [f"{key} of {index}" for key in state if not torch.equal(state[key], states[1][index][key])]
    return names


def assert_same_run(whole: Path, run: Path) -> None:
    assert json.loads((run / "fit.json").read_text())["steps"] == 36
    assert differing(whole, run) == []
    clocks = ["time", "train/images_per_second", "train/data_wait"]
    metrics = [pd.read_csv(folder / "metrics.csv").drop(columns=clocks) for folder in (whole, run)]
    pd.testing.assert_frame_equal(metrics[0], metrics[1][metrics[0].columns])
    assert metrics[0]["train/loss"].count() == 36 and metrics[0]["validate/loss"].count() == 6
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names == {"best.ckpt", "last.ckpt", "previous.ckpt", "untrained.ckpt"}, (
        "nothing half written is left"
    )


@pytest.fixture(scope="module")
def whole(small_set, small_bert, tmp_path_factory) -> Path:
    """A run that is never stopped."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert start(fit_arguments(run, small_set, small_bert)).wait() == 0
    return run


@pytest.mark.parametrize("workers", ["0", "2"])
def test_five_kills_end_as_if_never_killed(workers, whole, small_set, small_bert, tmp_path):
    run = tmp_path / "killed"
    arguments = fit_arguments(run, small_set, small_bert, "--data.init_args.num_workers", workers)
    random = np.random.default_rng(int(workers))
    for count in (3, 9, 16, 24, 33):
        delay = random.uniform(0, 0.3)
        process = start(arguments)
        while rows(run) < count:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.01)
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert not (run / "fit.json").exists()
    assert start(arguments).wait() == 0
    assert_same_run(whole, run)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGINT, 130)]
)
def test_training_that_was_asked_to_stop_loses_nothing(
    number, status, whole, small_set, small_bert, tmp_path
):
    run = tmp_path / "stopped"
    options = ("--checkpoint_minutes", "1000", "--data.init_args.num_workers", "2")
    arguments = fit_arguments(run, small_set, small_bert, *options)
    for count in (3, 15):
        assert signal_when(start(arguments), number, partial(has_rows, run, count)) == status
        last = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
        steps = pd.read_csv(run / "metrics.csv")["step"]
        # Only a validation that it would not wait for costs what came before it in the epoch.
        assert last["global_step"] == steps.max() + 1 or last["global_step"] % 6 == 0
    assert start(arguments).wait() == 0
    assert_same_run(whole, run)


def test_slurm_signal_saves_only_into_run_folder(whole, small_set, small_bert, tmp_path, monkeypatch):
    """Lightning's own answer to SIGUSR1 there would save in the middle of a step, queue the job again and go on."""
    names = {"NTASKS": "1", "JOB_ID": "5", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "JOB_NAME": "train"}
    for name, value in {**names, "NODELIST": "localhost"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    run = tmp_path / "slurm"
    arguments = fit_arguments(run, small_set, small_bert)
    assert signal_when(start(arguments), signal.SIGUSR1, lambda: rows(run) >= 9) == 138
    assert not list(run.rglob("hpc_ckpt*"))
    assert start(arguments).wait() == 0
    assert_same_run(whole, run)


def test_two_processes_killed_and_stopped(small_set, small_bert, tmp_path):
    """Each has dropout of its own, and all of them stop where one is asked to."""
    two = ("--trainer.devices", "2", "--trainer.strategy", "ddp", "--data.init_args.num_workers", "1")
    run_of = {name: tmp_path / name for name in ("whole", "killed")}
    assert start(fit_arguments(run_of["whole"], small_set, small_bert, *two)).wait() == 0
    run = run_of["killed"]
    arguments = fit_arguments(run, small_set, small_bert, *two)
    signal_when(start(arguments), signal.SIGKILL, lambda: rows(run) >= 9)
    status = signal_when(start(arguments), signal.SIGTERM, lambda: rows(run) >= 17)
    # Lightning's watch over its processes may end the first one before it has tidied up.
    assert status in (143, -signal.SIGKILL)
    assert start(arguments).wait() == 0
    assert_same_run(run_of["whole"], run)


# The validation after step 24 waits for a signal in the first of its two batches.
WAITS_IN_VALIDATION = """
import os, sys, time
from pathlib import Path
from medclip_dcl.command.cli import main
from medclip_dcl.models.image_text import ImageTextModel

whole = ImageTextModel.validation_step

def waiting(self, batch, batch_index):
    if batch_index == 0 and self.global_step == 24:
        Path(os.environ["PLACE"], os.environ.get("LOCAL_RANK", "0")).write_text(str(os.getpid()))
        time.sleep(3)
    return whole(self, batch, batch_index)

ImageTextModel.validation_step = waiting
main(sys.argv[1:])
"""


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.is_file() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_signal_within_validation_ends_both_processes(small_set, small_bert, tmp_path, monkeypatch):
    """As a user's `kill`, or a batch system that knows of the first alone; the launcher passes it on."""
    two = ("--trainer.devices", "2", "--trainer.strategy", "ddp", "--checkpoint_minutes", "1000")
    # 12 steps an epoch, 2 batches of validation.
    options = (*two, "--data.init_args.batch_size", "2", "--trainer.max_epochs", "3")
    run_of = {name: tmp_path / name for name in ("whole", "stopped")}
    assert start(fit_arguments(run_of["whole"], small_set, small_bert, *options)).wait() == 0
    run = run_of["stopped"]
    arguments = fit_arguments(run, small_set, small_bert, *options)
    script, place = tmp_path / "fit.py", tmp_path / "pids"
    script.write_text(WAITS_IN_VALIDATION)
    place.mkdir()
    monkeypatch.setenv("PLACE", str(place))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments[1:]],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pids: list[int] = []
    deadline = time.monotonic() + 600
    while len(pids) < 2 or not all(pids):
        assert process.poll() is None, "it ended before it validated"
        assert time.monotonic() < deadline, "it did not come to the validation in ten minutes"
        time.sleep(0.02)
        pids = [int(file.read_text() or 0) for file in place.iterdir()]
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=300) in (143, -signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "a process that it started goes on"
        time.sleep(0.1)
    assert not (run / "fit.json").exists()
    last = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == 12, "the end of the epoch before: this one is validated first"
    assert start(arguments).wait() == 0
    assert differing(run_of["whole"], run) == []


def test_a_truncated_last_checkpoint_costs_one_step(whole, small_set, small_bert, tmp_path):
    run = tmp_path / "truncated"
    arguments = fit_arguments(run, small_set, small_bert)
    signal_when(start(arguments), signal.SIGKILL, lambda: rows(run) >= 10)
    os.truncate(run / "checkpoints/last.ckpt", 1000)
    process = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        "last.ckpt cannot be read" in process.stderr and "continues from the one before it" in process.stderr
    )
    (run / "checkpoints/unreadable.ckpt").unlink()
    assert_same_run(whole, run)


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
        options = ["--device", "cpu", "--token_budget", "512"]
        return ["medclip_dcl", "score", str(folder), "--model", str(small_bert), *options]

    whole, killed = prepare(tmp_path / "whole"), prepare(tmp_path / "killed")
    assert start(command(whole)).wait() == 0

    def has_parts(wanted: int) -> bool:
        journals = (killed / "log_p").glob(".*.progress.jsonl")
        return any(file.read_bytes().count(b"\n") > wanted for file in journals)

    def a_moment_after(wanted: int) -> Callable[[], bool]:
        wait, seen = float(random.uniform(0, 0.2)), list[float]()

        def is_time() -> bool:
            if not seen and has_parts(wanted):
                seen.append(time.monotonic())
            return bool(seen) and time.monotonic() - seen[0] >= wait

        return is_time

    for wanted in random.integers(1, 4, size=3).cumsum().tolist():
        signal_when(start(command(killed)), signal.SIGKILL, a_moment_after(wanted))
        assert has_parts(wanted) and not list((killed / "log_p").glob("*.parquet"))
    assert start(command(killed)).wait() == 0
    (expected,), (found,) = ((folder / "log_p").iterdir() for folder in (whole, killed))
    assert found.name == expected.name and found.read_bytes() == expected.read_bytes()
