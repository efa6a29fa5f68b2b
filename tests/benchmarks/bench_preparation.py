"""Speed of the image stage of preparation, against the bare loop: decode with PIL and resize, nothing else.

    python tests/benchmarks/bench_preparation.py [--images 24] [--rounds 7] [--workers 2]

Run by hand, never in CI. Grey JPEG files of 2544 x 3056 pixels, the size of MIMIC-CXR's: the real chest X-rays of
MEDCLIP_DCL_REAL_DATA enlarged, with the noise of a detector. The rounds of all methods are interleaved and medians are
compared, so that a noisy machine is fair to each; seconds of CPU are what a core needs, whoever else wants it. Prints
the tables and replaces the section of this file in RESULTS.md.

- bare loop: PIL's decoder and antialiased resize to 512 x 512.
- preparation: the same, and all that makes a prepared set of it (checks, JPEG of quality 95, atomic write).
- draft mode: the bare loop with PIL's decoder at half the resolution, which preparation does not use.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from PIL import Image
from results_file import REAL, command, write_section

from data_prep.command import worker_processes
from data_prep.sources.prepared_images import Job, prepare_image
from medclip_dcl.common.command_line import available_cores

TITLE = "Preparation of images"
WIDTH, HEIGHT, SIZE = 2544, 3056, 512
ASKED = 1.15


def radiographs(folder: Path, count: int) -> list[Path]:
    """Grey JPEG files of full size."""
    random, sources = np.random.default_rng(0), sorted((REAL / "real_cxr" / "files").rglob("*.jpg"))
    if not sources:
        sys.exit(f"no real chest X-rays under {REAL} (set MEDCLIP_DCL_REAL_DATA)")
    files = []
    for number in range(count):
        with Image.open(sources[number % len(sources)]) as image:
            large = image.convert("L").resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        noisy = np.asarray(large) + random.normal(0, 2, (HEIGHT, WIDTH))
        files.append(folder / f"{number}.jpg")
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(files[-1], quality=90)
    return files


def bare(file: Path) -> Image.Image:
    """Decode and resize; the files are grey, and a conversion would copy them for nothing."""
    with Image.open(file) as image:
        return image.resize((SIZE, SIZE), Image.Resampling.BILINEAR)


def bare_and_nothing(job: Job) -> None:
    """`bare`, without sending the picture back."""
    bare(job.source)


def draft(file: Path) -> Image.Image:
    """Decode at half the resolution, and resize."""
    with Image.open(file) as image:
        image.draft("L", (2 * SIZE, 2 * SIZE))
        return image.resize((SIZE, SIZE), Image.Resampling.BILINEAR)


def one_core(jobs: Sequence[Job], rounds: int) -> dict[str, float]:
    """Median seconds of CPU an image, of each method."""
    methods: dict[str, Callable[[Job], Any]] = {
        "bare loop": lambda job: bare(job.source),
        "preparation": prepare_image,
        "draft mode": lambda job: draft(job.source),
    }
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(rounds):
        for place, job in enumerate(jobs):
            # Image by image, so that a slow moment of the machine hits all of them; who comes first finds cold caches.
            for name, method in _rotated(methods, number + place):
                job.target.unlink(missing_ok=True)
                start = time.process_time()
                method(job)
                if number:
                    seconds[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _rotated(methods: dict[str, Any], turns: int) -> list[tuple[str, Any]]:
    """The methods, another one first at each turn."""
    items = list(methods.items())
    first = turns % len(items)
    return items[first:] + items[:first]


def all_cores(jobs: Sequence[Job], rounds: int, pool: Executor) -> dict[str, float]:
    """Median images a second of wall time, of the bare loop and of preparation in the same pool."""
    rates: dict[str, list[float]] = {"bare loop": [], "preparation": []}
    for number in range(rounds):
        for name, method in _rotated({"bare loop": bare_and_nothing, "preparation": prepare_image}, number):
            for job in jobs:
                job.target.unlink(missing_ok=True)
            start = time.perf_counter()
            list(pool.map(method, jobs, chunksize=2))
            if number:
                rates[name].append(len(jobs) / (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in rates.items()}


def reading(jobs: Sequence[Job]) -> float:
    """Milliseconds to read a prepared image."""
    start = time.process_time()
    for _ in range(20):
        for job in jobs:
            np.asarray(Image.open(job.target))
    return 1e3 * (time.process_time() - start) / (20 * len(jobs))


def largest_difference(files: Sequence[Path]) -> int:
    """Grey levels by which draft mode is off."""
    pairs = ((np.asarray(bare(file)).astype(int), np.asarray(draft(file))) for file in files)
    return max(int(np.abs(exact - other).max()) for exact, other in pairs)


def measured(images: int, rounds: int, workers: int) -> list[str]:
    """The section's lines."""
    folder = Path(tempfile.mkdtemp())
    try:
        files = radiographs(folder, images)
        jobs = [Job(file, folder / "set" / file.name, SIZE) for file in files]
        cpu = one_core(jobs, rounds)
        with worker_processes(max(2, workers)) as pool:
            assert pool is not None
            rate = all_cores(jobs, rounds, pool)
        for job in jobs:
            prepare_image(job)
        from_file = reading(jobs)
        off = largest_difference(files)
        disk = statistics.mean(job.target.stat().st_size for job in jobs)
    finally:
        shutil.rmtree(folder)
    ratio, wall = cpu["preparation"] / cpu["bare loop"], rate["bare loop"] / rate["preparation"]
    return [
        "| method | ms of CPU an image, one core | x bare loop | "
        f"images/s of wall time, {max(2, workers)} workers | x bare loop |",
        "|---|---|---|---|---|",
        f"| bare loop | {1e3 * cpu['bare loop']:.1f} | 1.00 | {rate['bare loop']:.1f} | 1.00 |",
        f"| preparation | {1e3 * cpu['preparation']:.1f} | **{ratio:.3f}** | {rate['preparation']:.1f} | {wall:.3f} |",
        f"| draft mode (not used) | {1e3 * cpu['draft mode']:.1f} | {cpu['draft mode'] / cpu['bare loop']:.2f} | | |",
        "",
        f"Asked for: at most {ASKED} x. 377,110 images are {377_110 * cpu['preparation'] / 3600:.1f} core-hours. Draft "
        f"mode is up to {off} grey levels off: the same picture as PNG or DICOM, or given to `load()`, would look "
        f"different, for {377_110 * (cpu['bare loop'] - cpu['draft mode']) / 3600:.1f} core-hours saved once. A "
        f"prepared file has {disk / 1e3:.0f} kB ({234_073 * disk / 1e9:.0f} GB for 234,073 images); reading it takes "
        f"{from_file:.2f} ms.",
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Benchmark of the image stage of preparation.")
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7, help="one more is not counted")
    parser.add_argument("--workers", type=int, default=available_cores())
    options = parser.parse_args()
    lines = [
        f"{available_cores()} CPU cores, {platform.machine()}; Pillow {PIL.__version__}; {options.images} grey JPEG "
        f"files of {WIDTH} x {HEIGHT} pixels (real chest X-rays, enlarged, with noise); medians of {options.rounds} "
        f"interleaved rounds. `{command()}`",
        "",
        *measured(options.images, options.rounds + 1, options.workers),
    ]
    write_section(TITLE, lines)


if __name__ == "__main__":
    main()
