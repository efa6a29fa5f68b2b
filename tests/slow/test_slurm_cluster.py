"""The packaged batch files under a real SLURM: two nodes on this machine, gloo, no GPU.

Debian's packages slurm-wlm and munge are needed. MEDCLIP_DCL_SLURM_KILLS=50 kills the training so many times.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from medclip_dcl.common.files import write_json
from medclip_dcl.data.prepared import FORMAT_VERSION, write_table
from tests.slow.slurm_cluster import Cluster, cluster, missing_programs, wait_until
from tests.studies.grids import MODULE, write_grid

ROOT = Path(__file__).resolve().parents[2]
BATCH_FILES = ROOT / "configs/slurm"
KILLS = int(os.environ.get("MEDCLIP_DCL_SLURM_KILLS", "5"))
EPOCHS = 6 if KILLS <= 5 else 12
STEPS = 6 * EPOCHS
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
# One GPU and one process of each of two nodes, on which the cluster's processes use this machine's CPUs.
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1", "--mem=1G")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing_programs()),
        reason=f"SLURM: no {', '.join(missing_programs())}; apt-get install slurm-wlm munge",
    ),
]

# The command of this checkout, whose training steps last as long as a file says.
COMMAND = """#!{python}
import functools, sys, time
from pathlib import Path

from medclip_dcl.__main__ import main

if sys.argv[1] == "fit":
    from medclip_dcl.models.image_text import ImageTextModel

    whole = ImageTextModel.training_step

    @functools.wraps(whole)
    def waiting(*args, **options):
        time.sleep(float(Path({seconds!r}).read_text()))
        return whole(*args, **options)

    ImageTextModel.training_step = waiting
if __name__ == "__main__":  # workers of a study import this file
    main()
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    command = folder / "programs/medclip-dcl"
    command.parent.mkdir()
    step_seconds(folder, 0.0)
    command.write_text(COMMAND.format(python=sys.executable, seconds=str(folder / "step_seconds")))
    command.chmod(0o755)
    environment = {
        # torchrun beside this Python.
        "PATH": f"{command.parent}:{Path(sys.executable).parent}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # Host names of a real cluster can be looked up.
        "MASTER_ADDR": "127.0.0.1",
    }
    with cluster(folder, environment) as one:
        yield one


def step_seconds(folder: Path, seconds: float) -> None:
    """Set how long each step waits from now on."""
    (folder / "step_seconds").write_text(str(seconds))


@pytest.fixture(scope="module")
def options(small_set: Path, small_bert: Path, slurm: Cluster) -> list[str]:
    """Of every training: a network without BatchNorm, on CPUs; last.ckpt after every step."""
    config = {
        "untrained": False,
        "trainer": {
            "max_epochs": EPOCHS,
            "accelerator": "cpu",
            "precision": "32-true",
            "sync_batchnorm": False,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "callbacks": [],
        },
        "model": {
            "init_args": {
                "image_encoder": {
                    "class_path": "tests.small.LinearPatches",
                    "init_args": {"dim": 8, "stride": 16},
                },
                "text_encoder": {"init_args": {"pretrained": str(small_bert), "dim": 8, "dropout": 0.2}},
                "similarity": {"init_args": {"dim": 8}},
                "learning_rate": 1e-3,
                "warmup_steps": 2,
            }
        },
        "data": {
            "init_args": {
                "folder": str(small_set),
                "image_size": 48,
                "crop_size": 32,
                "batch_size": 4,
                "num_workers": 0,
            }
        },
    }
    file = slurm.folder / "small.yaml"
    file.write_text(yaml.safe_dump(config))
    return ["--config", str(file), "--import", "tests.small"]


def submit(slurm: Cluster, run: Path, *words: str) -> str:
    """Submit a training on two nodes."""
    return slurm.submit(*TWO_NODES, BATCH_FILES / "train.sbatch", "objective/dcl_lm", run, *words)


def completed(slurm: Cluster, job: str) -> None:
    slurm.wait(job, *ENDED)
    assert slurm.state(job) == "COMPLETED", slurm.shown(job)


def rows(run: Path) -> int:
    """Rows of metrics.csv so far."""
    file = run / "metrics.csv"
    return len(file.read_text().splitlines()) - 1 if file.is_file() else 0


def has_rows(run: Path, count: int) -> bool:
    return rows(run) >= count


def is_stopped(slurm: Cluster, job: str, starts: int) -> bool:
    """True once a job has ended, or waits to be started again."""
    return slurm.state(job) in ENDED or int(slurm.field(job, "Restarts")) > starts


def last(run: Path) -> dict:
    return torch.load(run / "checkpoints/last.ckpt", weights_only=True)


def assert_same_training(whole: Path, run: Path) -> None:
    """Weights, moments and metrics are equal bit for bit."""
    assert json.loads((run / "fit.json").read_text())["steps"] == STEPS
    a, b = last(whole), last(run)
    torch.testing.assert_close(b["state_dict"], a["state_dict"], rtol=0, atol=0)
    moments = [x["optimizer_states"][0]["state"] for x in (a, b)]
    assert moments[0].keys() == moments[1].keys() and len(moments[0]) > 10
    for index in moments[0]:
        torch.testing.assert_close(moments[1][index], moments[0][index], rtol=0, atol=0)
    clocks = ["time", "train/images_per_second", "train/data_wait"]
    metrics = [pd.read_csv(folder / "metrics.csv").drop(columns=clocks) for folder in (whole, run)]
    pd.testing.assert_frame_equal(metrics[1][metrics[0].columns], metrics[0])


@pytest.fixture(scope="module")
def whole(slurm: Cluster, options: list[str]) -> Path:
    """A training on two nodes that is never stopped."""
    run = slurm.folder / "whole"
    step_seconds(slurm.folder, 0.0)
    completed(slurm, submit(slurm, run, *options))
    return run


def test_two_nodes_train_as_one_process(slurm, options):
    runs = {name: slurm.folder / name for name in ("one", "two")}
    # Dropout is drawn by each process.
    options = [*options, "--model.init_args.text_encoder.init_args.dropout", "0", "--trainer.max_epochs", "4"]
    step_seconds(slurm.folder, 0.0)
    job = submit(slurm, runs["two"], *options)
    words = ["fit", "--config", "mimic_cxr", "--config", "objective/dcl_lm", "--run_folder", runs["one"]]
    slurm.run("medclip-dcl", *words, *options)
    completed(slurm, job)
    log = (slurm.folder / f"medclip_dcl-{job}.log").read_text()
    assert "MEMBER: 2/2" in log and "distributed_backend=gloo" in log
    one, two = (last(run) for run in runs.values())
    assert one["global_step"] == two["global_step"] == 24
    # The bias of keys changes no attention: its gradient is rounding errors, which AdamW scales up.
    names = [name for name in one["state_dict"] if not name.endswith("key.bias")]
    for name in names:
        torch.testing.assert_close(
            two["state_dict"][name], one["state_dict"][name], rtol=1e-5, atol=2e-6, msg=name
        )
    losses = [pd.read_csv(run / "metrics.csv")["train/loss"].dropna().to_numpy() for run in runs.values()]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert len(losses[0]) == 24 and losses[0][-6:].mean() < 0.9 * losses[0][:6].mean(), "it has learned"


def kill_step(slurm: Cluster, job: str, rank: int) -> None:
    slurm.run("scancel", "--signal=KILL", f"{job}.0")


def kill_task(slurm: Cluster, job: str, rank: int) -> None:
    for pid in slurm.processes(job, rank):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def requeue(slurm: Cluster, job: str, rank: int) -> None:
    slurm.run("scontrol", "requeue", job)


def test_kills_at_random_moments_change_no_parameter(slurm, options, whole):
    run, random = slurm.folder / "killed", np.random.default_rng(KILLS)
    step_seconds(slurm.folder, 0.2)
    job = submit(slurm, run, *options, "--checkpoint_minutes", "0")
    for number, count in enumerate(np.linspace(2, STEPS - 10, KILLS).astype(int)):
        slurm.wait(job, "RUNNING")
        wait_until(lambda: all(slurm.processes(job, rank) for rank in (0, 1)), lambda: slurm.shown(job))
        # Every third time while it starts, and where it has come so far already.
        n_before, seconds = rows(run), 0.4
        if number % 3 == 2 or has_rows(run, int(count)):
            seconds = 5.0
        else:
            wait_until(partial(has_rows, run, int(count)), lambda: slurm.shown(job))
        time.sleep(random.uniform(0, seconds))
        kill = (kill_step, kill_task, requeue)[random.integers(3)]
        n_rows, starts = rows(run), int(slurm.field(job, "Restarts"))
        kill(slurm, job, int(random.integers(2)))
        wait_until(partial(is_stopped, slurm, job, starts), lambda: slurm.shown(job))
        assert not (run / "fit.json").exists(), f"it ended before kill {number}"
        state = slurm.state(job)
        if state in ENDED:
            slurm.run("scontrol", "requeue", job)
        moment = "training" if n_rows > n_before else "starting"
        print(f"kill {number + 1}: {kill.__name__} while {moment}, row {n_rows}: {state}", flush=True)
    completed(slurm, job)
    assert int(slurm.field(job, "Restarts")) == KILLS
    assert_same_training(whole, run)


def test_time_limit_saves_and_requeues(slurm, options, whole):
    """The batch file asks for SIGUSR1 300 s before the limit, which SLURM compares every 30 s."""
    run = slurm.folder / "limited"
    step_seconds(slurm.folder, 1.5)
    job = submit(slurm, run, *options, "--checkpoint_minutes", "1000")
    wait_until(lambda: rows(run) >= 2, lambda: slurm.shown(job))
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=5")
    wait_until(lambda: slurm.field(job, "Restarts") == "1", lambda: slurm.shown(job))
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    step_seconds(slurm.folder, 0.0)
    n_steps = last(run)["global_step"]
    log = (slurm.folder / f"medclip_dcl-{job}.log").read_text()
    assert f"SIGUSR1 at step {n_steps}: training stops here" in log and 2 <= n_steps < STEPS
    completed(slurm, job)
    assert_same_training(whole, run)


def test_array_of_scoring_jobs_gives_the_bytes_of_one(slurm, small_bert):
    random = np.random.default_rng(5)
    words = "no heart size normal small left right effusion pneumothorax lung is clear edema mild"
    vocabulary = words.split()
    texts = {" ".join(random.choice(vocabulary, size=random.integers(4, 40))) for _ in range(800)}
    table = pd.DataFrame({"sentence_id": range(len(texts)), "text": sorted(texts), "n_reports": 1})
    folders = {name: slurm.folder / name for name in ("scored_by_one", "scored_by_array")}
    for folder in folders.values():
        write_table(table, folder / "sentences.parquet", "sentences")
        write_json({"format_version": FORMAT_VERSION, "phantom": True}, folder / "dataset.json")
    one, shared = folders.values()
    options = ["--device", "cpu", "--token_budget", "256"]
    job = slurm.submit("--array=0-2", BATCH_FILES / "score.sbatch", shared, small_bert, *options)
    killed = f"{job}_1"

    def n_entries() -> int:
        journals = (shared / "log_p").glob(".*.1_of_3_0.progress.jsonl")
        return sum(file.read_bytes().count(b"\n") for file in journals)

    wait_until(lambda: n_entries() >= 2, lambda: slurm.shown(job))
    kill_task(slurm, slurm.field(killed, "JobId"), 0)
    for task in range(3):
        slurm.wait(f"{job}_{task}", *ENDED)
    assert slurm.state(killed) == "FAILED" and not list((shared / "log_p").glob("*.parquet"))
    slurm.run("scontrol", "requeue", killed)
    slurm.run("medclip-dcl", "score", one, "--model", small_bert, *options)
    for task in range(3):
        completed(slurm, f"{job}_{task}")
    (expected,), (found,) = ((folder / "log_p").iterdir() for folder in (one, shared))
    assert found.name == expected.name and found.read_bytes() == expected.read_bytes()
    logs = "".join(file.read_text() for file in slurm.folder.glob("medclip_dcl_score-*.log"))
    assert logs.count("has done its share;") == 2 and logs.count("continuing: ") == 1


def test_array_of_a_study_trains_each_run_once(slurm):
    noise = {"set": "data.init_args.noise", "values": [0.1, 1]}
    changes = {"axes": {"noise": noise}, "pairs": None, "compare": None, "plots": None}
    file = write_grid(slurm.folder / "study", **changes, outcomes={"error": "tiny/error"})
    words = (BATCH_FILES / "experiments.sbatch", file, "--import", MODULE, "--device", "cpu")
    job = slurm.submit("--array=0-1", *words)
    for task in range(2):
        completed(slurm, f"{job}_{task}")
    logs = [(slurm.folder / f"medclip_dcl_experiments-{job}-{task}.log").read_text() for task in range(2)]
    assert all("grid: 1 runs, 0 of them done" in log and "; 1 of 1 done" in log for log in logs), logs
    assert len([*(file.parent / "grid").rglob("results.json")]) == 2
