"""The batch files under stand-ins for srun and scontrol: a job that must go is queued again, options are passed on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Tells its process, waits, and answers SIGUSR1 as the command does: it saves (here: a file) and ends with 138.
SRUN = """#!/bin/bash
trap 'sleep 0.3; touch "$FOLDER/saved"; {finish}exit {status}' USR1
echo "$@" > "$FOLDER/arguments"
touch "$FOLDER/started"
{body}
"""


def submit(folder: Path, body: str, status: int = 138, finish: str = "") -> subprocess.Popen[bytes]:
    """The batch file, with programs of its own on its path."""
    tools = folder / "tools"
    tools.mkdir()
    scripts = {
        "srun": SRUN.format(body=body, status=status, finish=finish),
        "scontrol": '#!/bin/bash\necho "$@" > "$FOLDER/requeued"\n',
    }
    for name, text in scripts.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "FOLDER": str(folder),
        "SLURM_NNODES": "1",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_JOB_ID": "77",
    }
    script = shutil.copy(ROOT / "configs/slurm/train.sbatch", folder)
    words = ["objective/dcl_lm", str(folder / "run"), "--data.init_args.seed", "3"]
    return subprocess.Popen(["bash", str(script), *words], env=environment, start_new_session=True)


def wait_for(file: Path) -> None:
    for _ in range(500):
        if file.exists():
            return
        time.sleep(0.02)
    raise TimeoutError(file)


WAITING = "for _ in $(seq 300); do sleep 0.1; done"


def test_job_at_its_time_limit_is_queued_again(tmp_path):
    job = submit(tmp_path, WAITING)
    wait_for(tmp_path / "started")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=20) == 138
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"
    arguments = (tmp_path / "arguments").read_text()
    assert "--data.init_args.seed 3" in arguments
    # A further --config may have a run folder of its own.
    assert arguments.rstrip().endswith(f"--run_folder {tmp_path / 'run'}")


def test_job_finished_at_last_moment_is_not_queued(tmp_path):
    (tmp_path / "run").mkdir()
    job = submit(tmp_path, WAITING, status=0, finish='touch "$FOLDER/run/fit.json"; ')
    wait_for(tmp_path / "started")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=20) == 0 and not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("status", [0, 1, 2])
def test_job_that_ends_is_not_queued_again(status, tmp_path):
    assert submit(tmp_path, f"exit {status}").wait(timeout=20) == status
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(
    "file, words, options",
    [
        ("score", ["data/set", "model"], ["--dtype", "float16"]),
        ("evaluate", ["runs/one"], ["--prompts", "my prompts.yaml"]),
    ],
)
def test_further_arguments_reach_the_first_command_alone(file, words, options, tmp_path):
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$@" > "$FOLDER/$(date +%s%N)"\n')
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "said").mkdir()
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "FOLDER": str(tmp_path / "said"),
    }
    script = ROOT / f"configs/slurm/{file}.sbatch"
    subprocess.run(["bash", str(script), *words, *options], env=environment, check=True)
    first, *others = [said.read_text().splitlines() for said in sorted((tmp_path / "said").iterdir())]
    assert first[-2:] == options
    assert not any(set(options) & set(said) for said in others)
