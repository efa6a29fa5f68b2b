"""kill -9 of every stage of a preparation: between two changes of files, at random moments, and of its workers."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from data_prep.sources.check import check_set
from medclip_dcl.data.prepared import TABLES
from tests.data_prep.killing import Watch, changes, content, differing, run
from tests.data_prep.small_release import write_release
from tests.data_prep.sources.test_growth import public_source
from tests.data_prep.test_kills import at_moments, kill_and_finish, require_honest, with_boxes
from tests.program import verb

SMALL = ["--size", "16", "--workers", "1", "--split_shares", "1,0,0"]
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


def outside_images(names: list[str]) -> list[int]:
    """All changes but those of images, of which one is taken."""
    one = next(number for number, name in enumerate(names) if name.startswith("rename images/"))
    skipped = ("make", "write", "rename images/")
    return [number for number, name in enumerate(names) if not name.startswith(skipped)] + [one]


def test_mimic_cxr_killed_before_every_change(tmp_path: Path) -> None:
    raw = write_release(tmp_path / "raw")

    kills = kill_and_finish(verb("prepare mimic-cxr"), partial(with_boxes, raw), tmp_path)
    assert sum(name.startswith("rename images/") for name in kills) == 11
    renamed = [name.removeprefix("rename ") for name in kills if re.match("rename (?!images/)", name)]
    tables = ["boxes", "images", "image_files", "sentences", "reports", "labels", "cases"]
    assert renamed[:2] == ["unfinished.json", "found.parquet"]
    assert renamed[2:11] == [*(f"{name}.parquet" for name in tables), "rejects.csv", "dataset.json"]


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

    def arguments(output: Path) -> list[str]:
        options = ["--size", "16", "--workers", "1", *(["--text_only"] if kind == "text_only" else [])]
        return ["--table", str(tmp_path / "table.csv"), "--output", str(output), *options]

    kills = kill_and_finish(verb("prepare folder"), arguments, tmp_path, chosen=few_images)
    own = {"text_only": "rename studies.parquet", "images": "rename images.parquet"}
    assert {"rename identifiers.csv", "rename dataset.json", own[kind]} <= set(kills)


def test_completion_killed_before_its_steps(tmp_path: Path) -> None:
    """Until the first image is touched the set of before is whole, from then on there is none."""
    source = public_source(tmp_path)
    later = [file.rename(tmp_path / file.name) for file in source.files[6:]]
    source.main([*source.words, *SMALL, "--output", str(tmp_path / "first")])
    before = content(tmp_path / "first")
    for file in later:
        file.rename(tmp_path / "raw" / file.name)
    source.files[0].rename(later[0])
    source.files[1].rename(source.files[0])
    later[0].rename(source.files[1])
    place = tmp_path / "place"
    place.mkdir()

    def require(folder: Path, expected: dict[str, bytes]) -> None:
        changed = differing(content(folder), before)
        if (folder / "dataset.json").exists() and all("unfinished.json" in name for name in changed):
            assert check_set(folder)[1] == []
        else:
            require_honest(folder, expected)

    def begin(folder: Path) -> None:
        shutil.copytree(tmp_path / "first", folder)

    def arguments(folder: Path) -> list[str]:
        return [*source.words, *SMALL, "--output", str(folder), "--complete"]

    moments = ["rename unfinished.json", "remove dataset.json", "remove images/0.jpg", "rename found.parquet"]
    moments += [
        "rename images/0.jpg",
        "rename images.parquet",
        "rename dataset.json",
        "remove unfinished.json",
    ]
    kill_and_finish(source.main, arguments, place, begin, at_moments(*moments), require)
    done = [name for name in changes(place / "log") if name in moments]
    assert done == moments
    # A completion that was begun is finished without the option as well.
    begin(place / "broken")
    watch = Watch(str(place / "broken"), begin="rename found.parquet", everything=False)
    assert run(source.main, arguments(place / "broken"), place / "said", watch) == -signal.SIGKILL
    assert run(source.main, arguments(place / "broken")[:-1], place / "said") == 0
    assert re.search("fingerprint [0-9a-f]{16} is now [0-9a-f]{16}: runs", (place / "said").read_text())
    assert differing(content(place / "broken"), content(place / "whole")) == []


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
        options = ["--size", "16", "--workers", "1", "--split_seed", "1"]
        return ["--source", str(raw), "--output", str(output), *options]

    kills = kill_and_finish(verb("prepare openi"), arguments, tmp_path, chosen=few_images)
    assert {"rename images.parquet", "rename dataset.json"} <= set(kills)


def command(arguments: list[str], output: Path, watch: Watch | None = None) -> tuple[int, str]:
    """A command in a process group of its own: its exit status, and what it said."""
    variables = watch.environment(output.parent / "watch") if watch is not None else {}
    process = subprocess.Popen(
        [sys.executable, "-m", "medclip_dcl", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, said = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, said


def test_the_phantom_killed_again_and_again(tmp_path: Path) -> None:
    """The way is never completed between two kills, so that each run continues what all before it have left."""
    log, said, whole, broken = (tmp_path / name for name in ("log", "said", "whole", "broken"))
    options = ["--studies", "20", "--seed", "2", "--size", "64", "--workers", "1", "--output"]
    assert run(verb("phantom"), [*options, str(whole)], said, Watch(str(whole), log=str(log))) == 0
    moments = [name for name in changes(log) if re.match("(make|rename) (?!files)", name)]
    images = [name for name in changes(log) if re.match("rename files/.*jpg", name)]
    assert len(moments) > 12 and len(images) > 20
    for name in [*moments[:4], images[7], *moments[4:]]:
        watch = Watch(str(broken), begin=re.escape(name), everything=False)
        assert run(verb("phantom"), [*options, str(broken)], said, watch) == -signal.SIGKILL, (
            name,
            said.read_text(),
        )
    assert run(verb("phantom"), [*options, str(broken)], said) == 0
    assert differing(content(broken), content(whole)) == []
    # With workers, all of which are killed.
    arguments = ["phantom", *options, str(tmp_path / "shared"), "--workers", "2"]
    watch = Watch(str(tmp_path / "shared"), begin="rename files/.*jpg", count=4, everything=True)
    assert command(arguments, tmp_path / "shared", watch)[0] == -signal.SIGKILL
    assert command(arguments, tmp_path / "shared")[0] == 0
    assert differing(content(tmp_path / "shared"), content(whole)) == []


# --- At random moments, with workers -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A phantom of 100 studies."""
    folder = tmp_path_factory.mktemp("release") / "raw"
    options = ["--output", str(folder), "--studies", "100", "--seed", "2", "--size", "96"]
    assert command(["phantom", *options], folder)[0] == 0
    return folder


def prepare(raw: Path, output: Path, watch: Watch | None = None, workers: int = 2) -> tuple[int, str]:
    options = ["--ms_cxr", str(raw / "MS_CXR_Local_Alignment_v1.0.0.json"), "--size", "96"]
    options += ["--workers", str(workers)]
    return command(
        ["prepare", "mimic-cxr", "--source", str(raw), "--output", str(output), *options], output, watch
    )


@pytest.fixture(scope="module")
def whole(raw: Path) -> Path:
    """Never killed; beside it the times at which two workers, or none, touched its files."""
    for workers in (1, 2):
        output = raw.parent / f"whole_{workers}"
        watch = Watch(str(output), log=str(raw.parent / f"log_{workers}"))
        status, said = prepare(raw, output, watch, workers)
        assert status == 0, said
    assert differing(content(raw.parent / "whole_1"), content(output)) == []
    return output


def test_each_table_of_a_phantom_killed(raw: Path, tmp_path: Path) -> None:
    """A phantom, whose set also has the truth."""

    def arguments(output: Path) -> list[str]:
        boxes = str(raw / "MS_CXR_Local_Alignment_v1.0.0.json")
        return [
            *("--source", str(raw), "--output", str(output)),
            *("--ms_cxr", boxes, "--size", "32", "--workers", "1"),
        ]

    kills = kill_and_finish(verb("prepare mimic-cxr"), arguments, tmp_path, chosen=outside_images)
    tables = {match[1] for name in kills if (match := re.fullmatch(r"rename (?!found)(\w+)\.parquet", name))}
    assert tables == set(TABLES) - {"studies", "log_p", "masks"}


TABLE = r"rename (?!found)\w+[.]parquet"
# The command itself touches no image where workers do: for it the images end, and have begun, with the first table.
IMAGE_OR_TABLE = rf"(read|make|write|rename) images(/|$)|{TABLE}"
# Stage: what is touched when it begins, how many times for the last of them, what ends it, workers.
STAGES = {
    "reports and sentences": ("rename unfinished.json", IMAGE_OR_TABLE, 2),
    "images": (IMAGE_OR_TABLE, TABLE, 2),
    "splits, boxes, labels, CheX5": ("read images/", TABLE, 1),
    "tables": (TABLE, "rename dataset.json", 2),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_killed_five_times_at_random_moments(
    stage: str, raw: Path, whole: Path, tmp_path: Path
) -> None:
    begin, end, workers = STAGES[stage]
    lines = [line.split(" ", 1) for line in (whole.parent / f"log_{workers}").read_text().splitlines()]
    times = [(float(moment), name) for moment, name in sorted(lines)]
    ended = next(moment for moment, name in times if re.match(end, name))
    began = [moment for moment, name in times if re.match(begin, name) and moment < ended]
    # Where nothing marks a stage's begin but the last image.
    count = len(began) if stage.startswith("splits") else 1
    seed = time.time_ns()
    moments = [random.Random(seed + number).uniform(0, ended - began[count - 1]) for number in range(5)]
    print(
        f"{stage}: killed {', '.join(f'{moment:.3f}' for moment in moments)} s after its begin; seed {seed}"
    )
    broken, expected = tmp_path / "broken", content(whole)
    for moment in moments:
        watch = Watch(str(broken), begin=begin, count=count, seconds=moment, end=end, everything=True)
        status, said = prepare(raw, broken, watch, workers)
        assert status == -signal.SIGKILL, (seed, said)
        assert not (broken / "dataset.json").exists(), seed
        require_honest(broken, expected)
        for file in (broken / "images").rglob("[!.]*.jpg"):
            assert file.read_bytes() == expected[str(file.relative_to(broken))], "what has its name is whole"
    status, said = prepare(raw, broken)
    assert status == 0, (seed, said)
    assert differing(content(broken), expected) == [], seed


# Stage: what workers alone touch: below which folder, what, and how many times before the kill.
WORKERS = {
    "reports": ("raw", "read files/.*txt", 3),
    "images": ("set", "rename images", 5),
}


@pytest.mark.parametrize("stage", WORKERS)
def test_killed_worker_is_explained(stage: str, raw: Path, whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "set"
    of, begin, count = WORKERS[stage]
    watch = Watch(str(raw if of == "raw" else output), begin=begin, count=count, everything=False)
    status, said = prepare(raw, output, watch)
    assert status == 2 and "Traceback" not in said, said
    assert "was killed" in said and "with fewer --workers" in said
    require_honest(output, content(whole))
    assert prepare(raw, output)[0] == 0
    assert differing(content(output), content(whole)) == []


@pytest.mark.parametrize("stage", ["reports and sentences", "images"])
def test_workers_whose_command_was_killed_spoil_nothing(
    stage: str, raw: Path, whole: Path, tmp_path: Path
) -> None:
    """Only the command itself is killed; the next one starts while its workers may still be at work."""
    lines = [line.split(" ", 1) for line in (whole.parent / "log_2").read_text().splitlines()]
    moment_of = {name: float(moment) for moment, name in reversed(lines)}
    images = [moment for name, moment in moment_of.items() if name.startswith("rename images/")]
    until = min(images) if stage.startswith("reports") else sum(images) / len(images)
    seconds = (until - moment_of["rename unfinished.json"]) * (0.5 if stage.startswith("reports") else 1)
    output = tmp_path / "set"
    watch = Watch(str(output), begin="rename unfinished.json", seconds=seconds, end=TABLE, everything=False)
    assert prepare(raw, output, watch)[0] == -signal.SIGKILL
    assert not (output / "dataset.json").exists()
    assert prepare(raw, output)[0] == 0
    assert differing(content(output), content(whole)) == []
