"""Speed of `medclip-dcl prepare public nih` on real images, against the bare loop: decode with PIL and resize.

    python tests/benchmarks/bench_public.py [--images 1860] [--png 1860] [--rounds 5]

Run by hand, never in CI. The images of MEDCLIP_DCL_REAL_DATA twice: as they lie there (JPEG of 512 pixels), and as the
release has them (PNG of 1024 pixels, enlarged with as much noise as gives the release's 0.4 MB a file). One worker; the
rounds of all methods are interleaved, and medians compared. Prints the table and replaces the section of this file in
RESULTS.md.

- bare loop: PIL's decoder and antialiased resize to 512 x 512.
- with a JPEG encoder: the same, and the JPEG of quality 95 in memory, which no preparation can do without.
- command: all of `medclip-dcl prepare public nih`, from the official tables of 112,120 rows to the finished set.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import PIL
from PIL import Image
from results_file import REAL, command, write_section

from data_prep.sources.prepared_images import QUALITY
from medclip_dcl.common.command_line import available_cores
from tests.program import verb

prepare = verb("prepare public")

TITLE = "A public set"
SIDE, SIZE, NOISE = 1024, 512, 1.0
RELEASE = 112_120
ASKED = 1.15


def with_images(folder: Path, files: Sequence[Path], as_release: bool) -> Path:
    """A folder with NIH's tables and these images."""
    (folder / "images").mkdir(parents=True)
    for table in (REAL / "nih").glob("*.*"):
        shutil.copyfile(table, folder / table.name)
    random = np.random.default_rng(0)
    for file in files:
        if not as_release:
            shutil.copyfile(file, folder / "images" / file.name)
            continue
        with Image.open(file) as image:
            large = np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.BICUBIC))
        noisy = (large + random.normal(0, NOISE, large.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / "images" / f"{file.stem}.png")
    return folder


def bare(source: Path, encode: bool = False) -> None:
    for file in sorted((source / "images").iterdir()):
        with Image.open(file) as image:
            resized = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        if encode:
            resized.save(io.BytesIO(), format="JPEG", quality=QUALITY)


def whole(source: Path) -> None:
    output = Path(tempfile.mkdtemp(dir=source.parent))
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        prepare(["nih", "--source", str(source), "--output", str(output), "--workers", "1"])
    shutil.rmtree(output)


def seconds_of(source: Path, rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds of CPU and of wall time of each method, after a round that is not counted."""
    one = with_images(source.parent / "one" / "NIH", sorted((source / "images").iterdir())[:1], False)
    methods: dict[str, Callable[[], None]] = {
        "bare loop": lambda: bare(source),
        "with a JPEG encoder": lambda: bare(source, encode=True),
        "command": lambda: whole(source),
        "command, one image": lambda: whole(one),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for number in range(rounds + 1):
        for name, run in methods.items():
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            if number:
                taken[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return {
        name: (statistics.median(cpu for cpu, _ in values), statistics.median(wall for _, wall in values))
        for name, values in taken.items()
    }


def measured(files: Sequence[Path], n_png: int, rounds: int) -> list[str]:
    """The section's lines."""
    rows, ratios = [], []
    folder = Path(tempfile.mkdtemp())
    try:
        for name, chosen in (("JPEG of 512", files), ("PNG of 1024", files[:n_png])):
            source = with_images(folder / name / "NIH", chosen, name.startswith("PNG"))
            size = statistics.mean(file.stat().st_size for file in (source / "images").iterdir()) / 1e6
            found = seconds_of(source, rounds)
            loop, loop_wall = found["bare loop"]
            rows += [
                f"| {len(chosen):,} {name}, {size:.2f} MB | {method} | {cpu:.2f} | {cpu / loop:.2f} | "
                f"{wall:.2f} | {wall / loop_wall:.2f} |"
                for method, (cpu, wall) in found.items()
            ]
            whole, once = found["command"][0], found["command, one image"][0]
            by_image, of_loop = (whole - once) / (len(chosen) - 1), loop / len(chosen)
            encoding = (found["with a JPEG encoder"][0] - loop) / len(chosen)
            of_release = (by_image + once / RELEASE) / of_loop
            ratios.append(
                f"{name}: **{whole / loop:.2f}** ({len(chosen) / whole:,.0f} images/s against "
                f"{len(chosen) / loop:,.0f}); a further image takes {1e3 * by_image:.2f} ms, {1e3 * encoding:.2f} of "
                f"them the JPEG encoder, against {1e3 * of_loop:.2f} ms ({by_image / of_loop:.2f} x), so that all "
                f"{RELEASE:,} images would take **{of_release:.2f} x**"
            )
    finally:
        shutil.rmtree(folder)
    return [
        "| images | method | s of CPU | x bare loop | s of wall time | x bare loop |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        f"Asked for: at most {ASKED} x. Found, by CPU: {'. '.join(ratios)}. `command, one image` is what the tables of "
        f"{RELEASE:,} rows take, whatever part of the images is there. The rest of an image's time are files, checks, "
        "and the digests by which a rerun and `test` know an image.",
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Benchmark of the preparation of NIH.")
    parser.add_argument("--images", type=int, default=1860)
    parser.add_argument("--png", type=int, default=1860, help="of them as PNG, which take minutes to make")
    parser.add_argument("--rounds", type=int, default=5, help="one more is not counted")
    options = parser.parse_args()
    files = sorted((REAL / "nih/images").glob("*.*"))[: options.images]
    if not files:
        sys.exit(f"no images of NIH under {REAL} (set MEDCLIP_DCL_REAL_DATA)")
    lines = [
        f"{available_cores()} CPU cores, shared (load {os.getloadavg()[0]:.1f}), {platform.machine()}; Pillow "
        f"{PIL.__version__}; {len(files):,} images of NIH, as PNG enlarged and with noise, one worker; "
        f"medians of {options.rounds} interleaved rounds. `{command()}`",
        "",
        *measured(files, options.png, options.rounds),
    ]
    write_section(TITLE, lines)


if __name__ == "__main__":
    main()
