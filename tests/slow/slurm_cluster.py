"""A SLURM cluster on this machine: munge, a controller and two nodes, each a slurmd, all below one folder."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
# Debian keeps daemons where the path of a user does not look.
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

_CONFIGURATION = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job waits until the credentials of its last start have expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
# Lightning takes its port from the last four digits, which two clusters at once must not share.
FirstJobId={first_job}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2
# What the batch files ask for, whatever this machine has.
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=10
KillWait=5
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={n1} CPUs=64 RealMemory=500000 Gres=gpu:4
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={n2} CPUs=64 RealMemory=500000 Gres=gpu:4
PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""


def missing_programs() -> list[str]:
    """Programs of SLURM and munge that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


def wait_until(is_so: Callable[[], bool], what: Callable[[], str], seconds: float = 600) -> None:
    """Wait for a condition; the error says what was the case instead."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what()}"
        time.sleep(0.05)


class Cluster:
    """The running cluster.

    Attributes:
        environment: of the commands that use it, and so of its jobs.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = {**os.environ, **environment, "PATH": f"{environment.get('PATH', '')}:{_PATH}"}
        self.environment["SLURM_CONF"] = str(folder / "slurm.conf")
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, *words: str | Path, **environment: str) -> str:
        """Run a command of SLURM; its output."""
        done = subprocess.run(
            [*map(str, words)],
            cwd=self.folder,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *words: str | Path, **environment: str) -> str:
        """Submit a batch file, with options of sbatch before it; the number of its job."""
        return self.run("sbatch", "--parsable", *words, **environment).strip()

    def state(self, job: str) -> str:
        """State of a job, such as RUNNING."""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        """One field of what SLURM shows of a job."""
        shown = self.run("scontrol", "show", "--oneliner", "job", job).split()
        return next(word.partition("=")[2] for word in shown if word.startswith(f"{name}="))

    def wait(self, job: str, *states: str) -> None:
        """Wait until a job is in one of these states."""
        wait_until(lambda: self.state(job) in states, lambda: f"{states}, but\n{self.shown(job)}")

    def shown(self, job: str) -> str:
        """What is known of a job, for an error."""
        logs = [file.read_text(errors="replace")[-3000:] for file in self.folder.glob("*.log")]
        return "\n".join([self.run("scontrol", "show", "job", job), *logs])

    def processes(self, job: str = "", rank: int | None = None) -> list[int]:
        """Running processes of the cluster, or of a job, or of one of its tasks; its daemons are not among them."""
        wanted = [f"SLURM_CONF={self.environment['SLURM_CONF']}"]
        wanted += [f"SLURM_JOB_ID={job}"] if job else []
        wanted += [f"SLURM_PROCID={rank}", "SLURM_STEP_ID=0"] if rank is not None else []
        daemons = {daemon.pid for daemon in self.daemons.values()}
        found = []
        for place in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                is_one = {*wanted} <= {*place.read_bytes().decode(errors="replace").split("\0")}
                if is_one and int(place.parent.name) not in daemons:
                    found.append(int(place.parent.name))
        return found

    def start(self, name: str, *words: str | Path) -> None:
        """Start a daemon in the foreground."""
        with (self.folder / f"{name}.out").open("ab") as output:
            self.daemons[name] = subprocess.Popen(
                [str(shutil.which(str(words[0]), path=_PATH)), *map(str, words[1:])],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def start_node(self, node: str) -> None:
        """Start a node, which may have been killed."""
        self.start(node, "slurmd", "-D", "-N", node)

    def stop(self) -> None:
        """End all jobs and daemons; nothing of the cluster runs afterwards."""
        with suppress(AssertionError):  # where the controller has ended
            self.run("scancel", "--full", "--signal=KILL", f"--user={getpass.getuser()}")
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(timeout=60)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        wait_until(lambda: not self.processes(), lambda: f"processes {self.processes()} are left", 60)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def cluster(folder: Path, environment: dict[str, str]) -> Iterator[Cluster]:
    """A cluster whose files, keys and sockets are in the folder."""
    ports = dict(zip(("controller", *NODES), _free_ports(3), strict=True))
    first_job = 1 + os.getpid() % 900 * 10
    text = _CONFIGURATION.format(folder=folder, user=getpass.getuser(), first_job=first_job, **ports)
    (folder / "slurm.conf").write_text(text)
    # Four GPUs a node, for SLURM's book-keeping.
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-3]\n")
    for place in [folder / f"gpu{number}" for number in range(4)]:
        place.touch()
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    one = Cluster(folder, environment)
    try:
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        own = [f"--{name}={folder}/munge.{suffix}" for name, suffix in files.items()]
        # By force: the folder of a test is closed to other users.
        one.start("munged", "munged", "--foreground", "--force", f"--key-file={key}", *own)
        wait_until((folder / "munge.socket").exists, lambda: (folder / "munged.out").read_text(), 60)
        one.start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            one.start_node(node)

        def is_idle() -> bool:
            with suppress(AssertionError):  # until the controller answers
                return one.run("sinfo", "--noheader", "--format=%T %D").split() == ["idle", str(len(NODES))]
            return False

        outputs = [folder / f"{name}.out" for name in ("slurmctld", *NODES)]
        wait_until(is_idle, lambda: "\n".join(file.read_text() for file in outputs), 120)
        yield one
    finally:
        one.stop()
