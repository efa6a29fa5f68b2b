"""A release of 20,000 studies is prepared in little memory, and in hardly more than a release of 2,000."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from medclip_dcl.data.prepared import PreparedSet

ROOT = Path(__file__).resolve().parents[2]
GIGABYTE = 2**30

pytestmark = pytest.mark.slow


def run(*arguments: str) -> int:
    """Run a command; returns the greatest resident memory in bytes of it and its workers together."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "medclip_dcl", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, resident(process.pid))
        time.sleep(0.1)
    assert process.returncode == 0
    return peak


def resident(group: int) -> int:
    """Resident bytes of all processes of a group; pages that they share are counted for each.

    A process that its parent has just made, and that has not yet begun its own program, is the parent's memory seen
    twice, and is left out.
    """
    total = 0
    try:
        command = (Path("/proc") / str(group) / "cmdline").read_bytes()
    except OSError:
        return 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            if os.getpgid(int(folder.name)) != group:
                continue
            # The command before the size: between the two it may begin its program, after which it is small.
            if folder.name == str(group) or (folder / "cmdline").read_bytes() != command:
                total += int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            pass  # it has ended
    return total


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small pictures and reports, of which the releases are made."""
    folder = tmp_path_factory.mktemp("phantom") / "raw"
    run("phantom", "--output", str(folder), "--studies", "200", "--seed", "3", "--size", "64")
    return folder


def write_release(phantom: Path, folder: Path, studies: int) -> None:
    """A release in which the phantom's studies come again and again, under other numbers, as links."""
    metadata, split, labels = (
        pd.read_csv(phantom / f"mimic-cxr-2.0.0-{name}.csv.gz") for name in ("metadata", "split", "chexpert")
    )
    images = metadata.merge(split[["dicom_id", "split"]], on="dicom_id")
    sources = [(study, of_study.to_dict("records")) for study, of_study in images.groupby("study_id")]
    labels_of = {row["study_id"]: row for row in labels.to_dict("records")}
    image_rows: list[dict] = []
    label_rows: list[dict] = []
    for number in range(studies):
        old, of_study = sources[number % len(sources)]
        # Two or three studies a patient; all of the same split.
        patient, study = (
            10_000_000 + number // len(sources) // 3 * 1000 + number % len(sources),
            50_000_000 + number,
        )
        parent = folder / "files" / f"p{str(patient)[:2]}" / f"p{patient}"
        (parent / f"s{study}").mkdir(parents=True)
        old_patient = of_study[0]["subject_id"]
        old_parent = phantom / "files" / f"p{str(old_patient)[:2]}" / f"p{old_patient}"
        os.link(old_parent / f"s{old}.txt", parent / f"s{study}.txt")
        for row in of_study:
            dicom_id = f"{len(image_rows):08x}{row['dicom_id'][8:]}"
            os.link(
                old_parent / f"s{old}" / f"{row['dicom_id']}.jpg", parent / f"s{study}" / f"{dicom_id}.jpg"
            )
            image_rows.append({**row, "dicom_id": dicom_id, "subject_id": patient, "study_id": study})
        label_rows.append({**labels_of[old], "subject_id": patient, "study_id": study})
    images = pd.DataFrame(image_rows)
    tables = {
        "metadata": images.drop(columns="split"),
        "split": images[["dicom_id", "study_id", "subject_id", "split"]],
        "chexpert": pd.DataFrame(label_rows),
    }
    for name, table in tables.items():
        content = gzip.compress(table.to_csv(index=False).encode())
        (folder / f"mimic-cxr-2.0.0-{name}.csv.gz").write_bytes(content)


def test_twenty_thousand_studies_take_little_memory(phantom: Path, tmp_path: Path) -> None:
    peaks = {}
    for studies in (2_000, 20_000):
        raw, folder = tmp_path / f"raw_{studies}", tmp_path / f"set_{studies}"
        raw.mkdir()
        write_release(phantom, raw, studies)
        options = ["--size", "64", "--workers", "2"]
        peaks[studies] = run("prepare", "mimic-cxr", "--source", str(raw), "--output", str(folder), *options)
        assert PreparedSet(folder).info["counts"]["studies"] == studies
    print(", ".join(f"{n:,} studies: {peak / GIGABYTE:.2f} GiB" for n, peak in peaks.items()))
    assert peaks[20_000] < 2e9
    # MIMIC-CXR has eleven times as many: 10 KB a study is 2 GB.
    assert peaks[20_000] - peaks[2_000] < 10_000 * 18_000
