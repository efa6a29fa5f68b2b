"""Time a training step alone and beside a busy neighbour, with the ways in which OpenMP's threads wait; by hand.

    python tests/benchmarks/bench_threads.py --model runs/demo

Threads that wait for each other at the end of a parallel region spin by default: fast while every thread has a core,
slow as soon as another program takes one. OpenMP reads its settings when torch is imported, so that each measurement is
a process of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from results_file import write_section

WAYS: dict[str, dict[str, str]] = {
    "one thread": {"OMP_NUM_THREADS": "1"},
    "all threads, spinning (default)": {},
    "all threads, OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "all threads, GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "all threads, GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "all threads, GOMP_SPINCOUNT=100000": {"GOMP_SPINCOUNT": "100000"},
}
STEP = """
import sys, time, torch
from medclip_dcl import load
from medclip_dcl.objectives import contrastive_loss
torch.manual_seed(0)
network = load(sys.argv[1]).network.train()
images, texts = torch.rand(16, 3, 128, 128), ["No pneumothorax.", "Small left pleural effusion."] * 24
tokens, lengths = network.tokenize(texts)
positives = torch.arange(48) % 16
times = []
for _ in range(int(sys.argv[2])):
    start = time.perf_counter()
    network.zero_grad()
    contrastive_loss(network(images, tokens, lengths), positives).backward()
    times.append(time.perf_counter() - start)
print(sorted(times)[len(times) // 2])
"""


def step_seconds(model: str, steps: int, settings: dict[str, str]) -> float:
    """Median seconds of forward and backward of the demo's batch of 16 images in a process with these settings."""
    names = {name for way in WAYS.values() for name in way}
    plain = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", STEP, model, str(steps)]
    done = subprocess.run(command, env=plain | settings, check=True, capture_output=True, text=True)
    return float(done.stdout)


@contextmanager
def neighbours(number: int) -> Iterator[None]:
    """Busy processes of one thread each."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="run folder, such as runs/demo")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=9, help="steps of a measurement")
    options = parser.parse_args()
    model = str(Path(options.model))
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds):
        for number in (0, 1):
            for way, settings in WAYS.items():
                with neighbours(number):
                    seconds = step_seconds(model, options.steps, settings)
                found.setdefault((way, number), []).append(seconds)
    lines = [
        f"{cpu()}; torch {version('torch')}, float32; forward and backward of `make demo`'s network, 16 images of 128 "
        f"pixels and 48 sentences: median of {options.steps} steps, medians of {options.rounds} interleaved rounds. "
        "`python tests/benchmarks/bench_threads.py --model runs/demo`",
        "",
        "| way | alone, s | beside one busy process, s |",
        "|---|---|---|",
    ]
    for way in WAYS:
        alone, beside = (statistics.median(found[way, number]) for number in (0, 1))
        lines.append(f"| {way} | {alone:.2f} | {beside:.2f} |")
    write_section("Threads that wait", lines)
    print("\n".join(lines))


def cpu() -> str:
    """Name, cores and vector units of the CPU."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = next(line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name"))
    units = [unit for unit in ("avx2", "avx512f", "amx_tile") if f" {unit} " in info.replace("\n", " ")]
    return f"{name}, {os.cpu_count()} cores, {', '.join(units)}"


if __name__ == "__main__":
    main()
