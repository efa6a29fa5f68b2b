"""Helpers of the benchmarks: interleaved timing, memory of a process, and the sections of RESULTS.md."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "RESULTS.md"
REAL = Path(os.environ.get("MEDCLIP_DCL_REAL_DATA", HERE.parents[1].parent / "shared" / "data"))


def write_section(title: str, lines: list[str]) -> None:
    """Print this benchmark's section of RESULTS.md, and replace or add it there."""
    print("\n".join(lines))
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.is_file() else "# Benchmarks, as measured\n"
    head = f"\n## {title}\n"
    before, _, rest = text.partition(head)
    _, separator, after = rest.partition("\n## ")
    body = head + "\n" + "\n".join(lines) + "\n"
    RESULTS.write_text(
        before.rstrip("\n") + "\n" + body + (separator + after if separator else ""), encoding="utf-8"
    )


def command() -> str:
    """The command that runs, from the repository's root."""
    return f"python tests/benchmarks/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".rstrip()


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, a GPU's work included, and its value."""
    start = time.perf_counter()
    value = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, value


def medians(methods: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each method over interleaved rounds, after one that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(rounds + 1):
        for name, run in methods.items():
            taken, _ = timed(run)
            if number:
                seconds[name].append(taken)
    return {name: statistics.median(values) for name, values in seconds.items()}


def process_memory() -> dict[str, int]:
    """Resident bytes of this process now (VmRSS) and at its peak (VmHWM).

    `getrusage` inherits the peak of the process that started this one.
    """
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Vm")}


def cpu() -> tuple[str, list[str]]:
    """Name and vector units of the CPU."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = next(line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name"))
    units = [unit for unit in ("avx2", "avx512f", "amx_tile") if f" {unit} " in info.replace("\n", " ")]
    return name, units
