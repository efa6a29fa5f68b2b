"""kill -9 of every stage of a preparation: between any two changes of files, and at random moments, workers included."""

from __future__ import annotations

import os
import random
import re
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
from PIL import Image

from data_prep import folder, mimic_cxr, openi
from data_prep.phantom import __main__ as phantom
from medclip_dcl.memory_map import DESCRIPTION, PIXELS
from tests.data_prep.killing import Watch, changes, content, differing, run
from tests.data_prep.small_release import write_release
from tests.data_prep.test_kills import kill_and_finish, outside_images, require_honest, with_boxes_and_map

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


# --- Between any two changes of files ----------------------------------------------------------------------------


def few_images(names: list[str]) -> list[int]:
    """All changes but those of images, of which the first, the second and the last are taken."""
    images = [number for number, name in enumerate(names) if name.startswith("rename images/")]
    taken = range(images[1] + 1) if images else ()
    return [
        number
        for number, name in enumerate(names)
        if number in taken or number in images[-1:] or " images/" not in name
    ]


def test_mimic_cxr_killed_before_every_change(tmp_path: Path) -> None:
    raw = write_release(tmp_path / "raw")

    kills = kill_and_finish(mimic_cxr.main, partial(with_boxes_and_map, raw), tmp_path)
    assert sum(name.startswith("rename images/") for name in kills) == 11
    assert sum(bool(re.fullmatch(r"rename \w+\.parquet", name)) for name in kills) == 6
    print("mimic_cxr", len(kills))


def shades(file: Path, number: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.linspace(0, 20 * number, 21 * 34).reshape(21, 34).astype(np.uint8)).save(file)


@pytest.mark.parametrize("kind", ["images", "text_only"])
def test_folder_killed_before_every_change(kind: str, tmp_path: Path) -> None:
    """A table of ten patients with names, which are numbered in identifiers.csv."""
    rows = [(f"{n}.png", f"Q-{n}", f"Heart is normal. No effusion {n}.", n % 2) for n in range(1, 11)]
    table = pd.DataFrame(rows, columns=["image", "patient", "text", "Edema"])
    table["split"] = ["train"] * 6 + ["validate"] * 2 + ["test"] * 2
    table.to_csv(tmp_path / "table.csv", index=False)
    for number in range(1, 11):
        shades(tmp_path / f"{number}.png", number)
    option = "--text_only" if kind == "text_only" else "--memory_map"

    def arguments(output: Path) -> list[str]:
        options = ["--size", "16", "--workers", "1", option]
        return ["--table", str(tmp_path / "table.csv"), "--output", str(output), *options]

    kills = kill_and_finish(folder.main, arguments, tmp_path, chosen=few_images)
    own = {"text_only": "rename studies.parquet", "images": f"rename {DESCRIPTION}"}
    assert {"rename identifiers.csv", "rename dataset.json", own[kind]} <= set(kills)
    print("folder", kind, len(kills))


def test_openi_killed_before_every_change(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    names = {n: f"{n}_IM-{n:04}-1001.dcm.png" for n in range(20, 40)}
    for number, name in names.items():
        shades(raw / "images/images_normalized" / name, number - 15)
    reports = pd.DataFrame([(n, f"Heart is normal.Nodule {n}.", "") for n in names])
    reports.to_csv(raw / "indiana_reports.csv", index=False, header=["uid", "findings", "impression"])
    views = pd.DataFrame([(n, name, "Frontal") for n, name in names.items()])
    views.to_csv(raw / "indiana_projections.csv", index=False, header=["uid", "filename", "projection"])

    def arguments(output: Path) -> list[str]:
        options = ["--size", "16", "--workers", "1", "--memory_map", "--split_seed", "1"]
        return ["--source", str(raw), "--output", str(output), *options]

    kills = kill_and_finish(openi.main, arguments, tmp_path, chosen=few_images)
    assert {"rename images.parquet", "rename dataset.json", f"rename {PIXELS}"} <= set(kills)
    print("openi", len(kills))
