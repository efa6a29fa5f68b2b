"""Inodes and random reads of a set in files and in shards; by hand.

    python tests/benchmarks/bench_shards.py --folder SOMEWHERE [--images 377110] [--reads 20000] [--rounds 5]

Inodes: a set with as many images, studies and patients as MIMIC-CXR-JPG, each image a tiny JPEG file in the release's
folders, before and after `medclip-dcl shard`. Reads: as many prepared real radiographs (copies of a few), in random
order, as files and from shards: CPU seconds of the process, user and system, medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image
from results_file import REAL, command, cpu, write_section

from data_prep.sources.prepared_images import Job, prepare_image
from medclip_dcl.__main__ import main as program
from medclip_dcl.common.files import digest, write_json
from medclip_dcl.data.prepared import FORMAT_VERSION, TABLES, PreparedSet, write_table
from medclip_dcl.data.shards import StoredImages

STUDIES, PATIENTS = 227_835 / 377_110, 65_379 / 377_110


def make_set(folder: Path, contents: list[bytes], count: int) -> None:
    """Write images, in turn of these contents, in MIMIC-CXR's folders, and the two tables about them."""
    studies, patients = round(STUDIES * count), round(PATIENTS * count)
    paths, digests = [], [digest(content) for content in contents]
    for number in range(count):
        study = number * studies // count
        patient = 10_000_000 + study * patients // studies * 150
        name = digest(str(number).encode())
        path = f"files/p{patient // 1_000_000}/p{patient}/s{50_000_000 + study}/{name}-{name[::-1]}.jpg"
        (folder / "images" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "images" / path).write_bytes(contents[number % len(contents)])
        paths.append((path, patient, 50_000_000 + study))
    rows = [
        (path[-37:-4], patient, study, "PA", "train", "train", path, 3056, 2544)
        for path, patient, study in paths
    ]
    write_table(pd.DataFrame(rows, columns=list(TABLES["images"])), folder / "images.parquet", "images")
    places = [number % len(contents) for number in range(count)]
    files = [
        (path, len(contents[at]), digests[at], 9) for (path, _, _), at in zip(paths, places, strict=True)
    ]
    write_table(
        pd.DataFrame(files, columns=list(TABLES["image_files"])),
        folder / "image_files.parquet",
        "image_files",
    )
    write_json(
        {"format_version": FORMAT_VERSION, "options": {}, "counts": {}, "digests": {}},
        folder / "dataset.json",
    )


def inodes(folder: Path) -> int:
    return 1 + sum(len(folders) + len(files) for _, folders, files in os.walk(folder))


def cpu_seconds(run: Callable[[], object]) -> float:
    def used() -> float:
        now = resource.getrusage(resource.RUSAGE_SELF)
        return now.ru_utime + now.ru_stime

    before = used()
    run()
    return used() - before


def read(stored: StoredImages, order: list[int]) -> int:
    return sum(len(stored[place]) for place in order)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="new; removed at the end")
    parser.add_argument("--images", type=int, default=377_110)
    parser.add_argument("--reads", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    options.folder.mkdir()
    tiny = options.folder / "tiny.jpg"
    Image.new("L", (16, 16)).save(tiny)
    set_of = options.folder / "inodes"
    make_set(set_of, [tiny.read_bytes()], options.images)
    files, start = inodes(set_of), time.perf_counter()
    seconds = cpu_seconds(lambda: program(["shard", str(set_of)]))
    wall, shards = time.perf_counter() - start, inodes(set_of)
    shutil.rmtree(set_of)

    contents = []
    for number, file in enumerate(sorted((REAL / "real_cxr/files").rglob("*.jpg"))):
        prepare_image(Job(file, options.folder / f"{number}.jpg", 512))
        contents.append((options.folder / f"{number}.jpg").read_bytes())
    reads = options.folder / "reads"
    make_set(reads, contents, options.reads)
    program(["shard", str(reads), "--output", str(options.folder / "sharded")])
    paths = PreparedSet(reads).table("images")["path"].tolist()
    order = np.random.default_rng(0).permutation(len(paths)).tolist()
    forms = {name: PreparedSet(options.folder / name).stored_images(paths) for name in ("reads", "sharded")}
    assert all(forms["reads"][place] == forms["sharded"][place] for place in order)  # and fill the page cache
    taken: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(options.rounds):
        for name, stored in forms.items():
            taken[name].append(cpu_seconds(partial(read, stored, order)))
    of_files, of_shards = (statistics.median(taken[name]) for name in forms)
    shutil.rmtree(options.folder)
    kb = sum(map(len, contents)) / len(contents) / 1e3
    in_full = -(-options.images * int(kb) // 10**6)
    write_section(
        "Images in shards",
        [
            f"{cpu()[0]}, shared (load {os.getloadavg()[0]:.1f}); files in the page cache; medians of {options.rounds} "
            f"interleaved rounds. `{command()}`: {options.images:,} images of 16 x 16 pixels in MIMIC-CXR's folders "
            f"have **{files:,}** inodes in files and **{shards:,}** in a shard; with {kb:.0f} kB an image there would "
            f"be {in_full} shards. `shard` took {seconds:.0f} CPU seconds, {wall:.0f} s in all. {options.reads:,} "
            f"random reads of {kb:.0f} kB take **{of_files:.2f}** CPU seconds from files and **{of_shards:.2f}** from "
            "shards."
        ],
    )


if __name__ == "__main__":
    main()
