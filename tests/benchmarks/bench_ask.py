"""Benchmark `medclip-dcl ask`: cold start to a heat map, scores a second, memory; by hand.

    python tests/benchmarks/bench_ask.py --model runs/demo --images FOLDER

Goals: under 5 s beyond importing torch to the first heat map; at least 0.8 of the images a second of the bare encoder,
whose inputs lie in memory; memory that does not grow with the number of images.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from results_file import HERE, command, write_section

from medclip_dcl import load
from medclip_dcl.pictures.inputs import as_grey, network_input
from medclip_dcl.use.loading import image_files_in
from tests.program import shell

TITLE = "Ask"
BATCH = 32
START, SHARE = 5.0, 0.8
_PEAK = (
    "import sys; sys.path.insert(0, sys.argv[3]); from results_file import process_memory;"
    "from medclip_dcl import load; from pathlib import Path;"
    "files = sorted(Path(sys.argv[2]).rglob('*.jpg')); load(sys.argv[1]).classify(files);"
    "print(process_memory()['VmHWM'] / 2**20)"
)


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Wall time, and CPU time of this process without its loader processes."""
    wall, own = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - own


def process_seconds(*words: str) -> tuple[float, float]:
    """Wall time and CPU time of a Python process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    wall = time.perf_counter() - wall
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cold_start(model: str, image: Path, rounds: int, folder: Path) -> list[str]:
    """From the start of Python to a written heat map, beyond `import torch`."""
    asked = ("-m", "medclip_dcl", "ask", model, str(image), "--text", "Cardiomegaly.")
    found = [
        (
            process_seconds("-c", "import torch"),
            process_seconds(*asked, "--output", str(folder / "heat_maps")),
        )
        for _ in range(rounds)
    ]
    torch_wall, torch_own = (statistics.median(first[i] for first, _ in found) for i in (0, 1))
    wall, own = (statistics.median(second[i] for _, second in found) for i in (0, 1))
    beyond = statistics.median(second[1] - first[1] for first, second in found)
    return [
        f"| cold start to the first heat map | {wall:.1f} s, of which importing torch {torch_wall:.1f} s; CPU time "
        f"{own:.1f} s and {torch_own:.1f} s: **{beyond:.1f} s** beyond torch | under {START:.0f} s |"
    ]


def throughput(model: str, files: list[Path], rounds: int, folder: Path) -> list[str]:
    """`--classify` with one loader process against the encoder alone."""
    network = load(model).image_text
    inputs = np.stack([network_input(as_grey(file), network.view) for file in files])
    batches = (
        torch.from_numpy(inputs).float().div(255)[:, None].expand(-1, 3, -1, -1).contiguous().split(BATCH)
    )

    @torch.inference_mode()
    def bare() -> None:
        for batch in batches:
            network.feature_map(batch)

    def classify() -> None:
        table = folder / "scores.csv"
        for file in (table, folder / "scores.csv.json"):
            file.unlink(missing_ok=True)
        options = ["--classify", "--workers", "1", "--batch_size", str(BATCH), "--output", str(table)]
        shell("ask")([model, str(folder / "copies"), *options])

    bare()
    found = [(seconds(bare), seconds(classify)) for _ in range(rounds)]
    n = len(files)
    wall = [statistics.median(n / times[i][0] for times in found) for i in (0, 1)]
    own = [statistics.median(n / times[i][1] for times in found) for i in (0, 1)]
    share = statistics.median(times[0][1] / times[1][1] for times in found)
    share_wall = statistics.median(times[0][0] / times[1][0] for times in found)
    return [
        f"| `--classify` of {n:,} files, loading the model included, against the bare encoder on inputs in memory | "
        f"{own[1]:.0f} against {own[0]:.0f} images per second of the command's own CPU time, **{share:.2f}**; by the "
        f"clock {wall[1]:.0f} against {wall[0]:.0f}, {share_wall:.2f} | {SHARE} |"
    ]


def memory(model: str, few: Path, many: Path) -> list[str]:
    """Peak of `load(...).classify(files)`."""
    peaks = []
    for folder in (few, many):
        done = subprocess.run(
            [sys.executable, "-c", _PEAK, model, str(folder), str(HERE)],
            check=True,
            capture_output=True,
            text=True,
        )
        peaks.append((len(image_files_in(folder)), float(done.stdout)))
    text = ", ".join(f"{peak:,.0f} MiB at {n:,} images" for n, peak in peaks)
    return [f"| peak resident memory of `load(...).classify(files)` | {text} | flat |"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--images", type=Path, required=True, help="folder of image files")
    parser.add_argument("--copies", type=int, default=5, help="of each image")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    files = image_files_in(options.images)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for copy in range(options.copies):
            for place, file in enumerate(files):
                (folder / "copies" / str(copy)).mkdir(parents=True, exist_ok=True)
                shutil.copy(file, folder / "copies" / str(copy) / f"{place}{file.suffix}")
        rows = [
            *cold_start(options.model, files[0], options.rounds, folder),
            *throughput(options.model, image_files_in(folder / "copies"), options.rounds, folder),
            *memory(options.model, folder / "copies/0", folder / "copies"),
        ]
    view = load(options.model).image_text.view
    write_section(
        TITLE,
        [
            f"CPU, 1 thread and 1 loader process, on a shared machine (load {os.getloadavg()[0]:.1f} on "
            f"{os.cpu_count()} cores at the end); torch {torch.__version__}; the demo's model ({view}, {view.size} "
            f"pixels), {options.copies} copies of each of {len(files)} real chest X-rays (JPEG), CheX5's prompts, "
            f"batches of {BATCH}; medians of {options.rounds} interleaved rounds. "
            f"`{command()}`",
            "",
            "| what | measured | asked for |",
            "|---|---|---|",
            *rows,
        ],
    )


if __name__ == "__main__":
    main()
