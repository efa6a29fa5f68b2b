"""Preparation of a release, from raw files to the prepared set."""

from __future__ import annotations

import errno
import fcntl
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from data_prep.mimic_cxr import prepare
from data_prep.options import MimicCxr
from data_prep.sources import preparation, releases, set_tables
from data_prep.sources.check import check_set
from data_prep.sources.prepared_images import size_of
from data_prep.sources.releases import find_release
from medclip_dcl.common.errors import UserError
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet, write_table
from medclip_dcl.pictures.image_file import read_grey
from tests.data_prep.killing import content
from tests.data_prep.small_release import (
    HEIGHT,
    IMAGES,
    TITLE,
    WIDTH,
    dicom,
    image_path,
    report_path,
    table,
    write_release,
)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A release of twelve images of seven patients, with MS-CXR's file beside it."""
    return write_release(tmp_path / "raw")


def settings(raw: Path, **changed: Any) -> MimicCxr:
    return MimicCxr(
        **{"source": raw, "output": raw.parent / "set", "ms_cxr": raw / "boxes.json", "size": 16, **changed}
    )


def made(raw: Path, **changed: Any) -> PreparedSet:
    chosen = settings(raw, **changed)
    prepare(chosen)
    return PreparedSet(chosen.output)


def edit_boxes(raw: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((raw / "boxes.json").read_text())
    edit(content)
    (raw / "boxes.json").write_text(json.dumps(content))


def rejects(folder: Path) -> list[list[str]]:
    return pd.read_csv(folder / "rejects.csv", dtype=str).to_numpy().tolist()


def test_the_prepared_set_of_a_small_release(raw: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared = made(raw)

    images = prepared.table("images").set_index("dicom_id")
    assert dicom(2) not in images.index
    assert images["use"].to_dict() == {
        dicom(n): use
        for use, numbers in {
            "train": (1, 3, 4, 12),
            "validate": (5,),
            # A test patient's image without a box stays in the test set.
            "test": (6, 10),
            # Whatever the official split says, with a box or without.
            "grounding": (7, 8, 9, 11),
        }.items()
        for n in numbers
    }
    assert (images["height"] == HEIGHT).all()
    assert (images["width"] == WIDTH).all()
    for path in images["path"]:
        with prepared.open_image(path) as image:
            assert (image.size, image.mode) == ((16, 16), "L")

    sentences = prepared.table("sentences")
    assert sentences["text"].tolist() == sorted(sentences["text"])
    n_reports = sentences.set_index("text")["n_reports"]
    # Twice in one report counts once; in which number it stood in a list does not matter.
    assert n_reports["No effusion."] == 2
    assert n_reports["Heart size is normal."] == 8
    assert n_reports["Lungs are clear."] == 1
    reports = prepared.table("reports").merge(sentences, on="sentence_id")
    reports = reports.sort_values(["study_id", "position"])
    first = reports[reports["study_id"] == 50000001]
    assert first[["section", "position", "text"]].to_numpy().tolist() == [
        ["findings", 0, "Heart size is normal."],
        ["findings", 1, "No effusion."],
        ["impression", 2, "No effusion."],
    ]
    assert reports.loc[reports["study_id"] == 50000010, "section"].tolist() == ["last_paragraph"]

    assert prepared.table("boxes").to_numpy().tolist() == [
        [dicom(7), "Pleural Effusion", "effusion 7", 1, 2, 10, 5],
        # Clipped at the left and at the bottom.
        [dicom(9), "Pleural Effusion", "effusion 9", 0, 15, 16, 6],
        [dicom(11), "Pleural Effusion", "effusion 11", 0, 0, 34, 21],
    ]

    labels = prepared.table("labels").set_index("study_id")
    assert set(labels.index) == {study for _, study, view, _ in IMAGES.values() if view != "LATERAL"}
    assert labels.loc[50000004, "Edema"] == -1
    assert labels.loc[50000002].isna().all()
    cases = prepared.table("cases")
    # Exact labels only; neither training images nor the validate patient who serves grounding.
    assert cases.to_numpy().tolist() == [
        [dicom(5), "Cardiomegaly", 1, "validate"],
        [dicom(6), "Cardiomegaly", 0, "test"],
        [dicom(9), "Cardiomegaly", 1, "test"],
        [dicom(10), "Cardiomegaly", 0, "test"],
        [dicom(5), "Edema", 0, "validate"],
        [dicom(10), "Edema", 1, "test"],
    ]
    assert rejects(prepared.folder) == []
    counts = prepared.info["counts"]
    assert (counts["images"], counts["images_not_frontal"], counts["sentences_without_letter"]) == (11, 1, 1)
    assert not prepared.is_phantom
    assert not prepared.has("classes")
    assert not (prepared.folder / "unfinished.json").exists()
    said = capsys.readouterr()
    assert "train 4, validate 1, test 2, grounding 4, excluded 0" in said.out
    assert re.search(r"images: 100%.* images/s", said.err) and "sentences: 100%" in said.err
    assert "Heart size" not in said.out + said.err


def test_deleted_or_changed_images_are_made_again(raw: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(settings(raw))
    before = content(raw.parent / "set")
    deleted, changed, *_ = (raw.parent / "set").rglob("*.jpg")
    deleted.unlink()
    with Image.open(changed) as opened:
        inverted = opened.point(lambda grey: 255 - grey)
    inverted.save(changed)  # with the comment of before
    prepare(settings(raw))
    assert "prepared images missing or changed\n" in capsys.readouterr().out
    assert content(raw.parent / "set") == before


@pytest.mark.slow
def test_finished_set_broken_off_again_is_unfinished(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of two runs beside the older description would pass for a finished set."""
    output = raw.parent / "set"
    prepare(settings(raw))
    # Without its original the image becomes a reject: the tables change.
    (output / "images" / image_path(Path(), 3)).unlink()
    image_path(raw, 3).unlink()

    def write_until_images(frame: pd.DataFrame, file: Path, name: str) -> None:
        write_table(frame, file, name)
        if name == "images":
            raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(preparation, "write_table", write_until_images)
        with pytest.raises(KeyboardInterrupt):
            prepare(settings(raw))
    prepare(settings(raw))
    assert check_set(output, full=True)[1] == []
    assert len(PreparedSet(output).table("images")) == 10


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """As by another process; also a host that shares the folder sees a lock of a file opened for writing."""
    with (output / ".lock").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.slow
def test_second_process_is_kept_off_a_set(raw: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = raw.parent / "set"
    output.mkdir()
    (output / ".lock").touch()
    with locked(output), pytest.raises(UserError, match="is being written by another process; wait"):
        prepare(settings(raw))
    # The left file alone locks nothing.
    prepare(settings(raw))
    before = {file: file.stat().st_mtime_ns for file in output.rglob("*")}
    capsys.readouterr()
    # A whole set needs no lock.
    with locked(output):
        prepare(settings(raw))
    assert "nothing to do" in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in output.rglob("*")} == before


@pytest.mark.slow
def test_without_locks_temporary_files_stay(
    raw: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    other = raw.parent / "set" / ".images.parquet.1.tmp"
    other.parent.mkdir()
    other.write_bytes(b"half")
    prepare(settings(raw))
    assert "set cannot be locked (No locks available): see that no other" in capsys.readouterr().out
    assert other.exists()
    monkeypatch.undo()
    (raw.parent / "set/images" / image_path(Path(), 3)).unlink()
    prepare(settings(raw))
    assert not other.exists()


@pytest.mark.slow
def test_set_finished_meanwhile_is_left_alone(
    raw: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = raw.parent / "set"
    found: dict[Path, int] = {}

    def finish(*_: object) -> pd.DataFrame:
        monkeypatch.undo()
        prepare(settings(raw))
        found.update({file: file.stat().st_mtime_ns for file in output.rglob("*")})
        return releases.read_labels(find_release(raw))

    monkeypatch.setattr(releases, "read_labels", finish)
    prepare(settings(raw))
    assert "nothing to do" in capsys.readouterr().out and output / "dataset.json" in found
    assert {file: file.stat().st_mtime_ns for file in output.rglob("*")} == found


def test_set_made_differently_is_not_overwritten(raw: Path) -> None:
    prepare(settings(raw))
    before = content(raw.parent / "set")
    changes: list[tuple[dict[str, Any], str]] = [
        ({"size": 24}, r"size: 16 there, 24 now\); choose another --output, or delete this folder"),
        ({"sections": ("impression",)}, r"\(sections: findings,impression there, impression now\)"),
        ({"ms_cxr": None}, r"\(ms_cxr: boxes\.json there, none now; content of boxes\.json: .* there, none"),
    ]
    for changed, message in changes:
        with pytest.raises(PreparedDataError, match=message):
            prepare(settings(raw, **changed))
    edit_boxes(raw, lambda content: content["annotations"].pop())
    with pytest.raises(PreparedDataError, match=r"\(content of boxes\.json: "):
        prepare(settings(raw))
    assert content(raw.parent / "set") == before
    file = raw.parent / "set" / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": 99}))
    with pytest.raises(PreparedDataError, match="format_version: 99 there"):
        prepare(settings(raw))


def test_unfinished_set_continues_only_with_its_options(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report_path(raw, 50000003).rename(raw / "away")
    report_path(raw, 50000004).rename(raw / "away too")
    with pytest.raises(UserError, match="2 of 10 reports cannot be used, more than 1%"):
        prepare(settings(raw))
    assert [row[0] for row in rejects(raw.parent / "set")] == ["report", "report"]
    # No image was made yet: the options may still change.
    (raw / "away").rename(report_path(raw, 50000003))
    monkeypatch.setattr(preparation, "write_table", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare(settings(raw, size=24))
    monkeypatch.undo()
    with pytest.raises(PreparedDataError, match=r"holds a partly prepared set .* \(size: 24 there, 16 now\)"):
        prepare(settings(raw))


def test_unusable_image_is_left_out_with_reason(raw: Path) -> None:
    image_path(raw, 4).unlink()
    prepared = made(raw)
    assert rejects(prepared.folder) == [["image", dicom(4), "image file is missing"]]
    assert dicom(4) not in set(prepared.table("images")["dicom_id"])
    # The study has no other image: nothing of it remains.
    for name in ("reports", "labels"):
        assert 50000002 not in set(prepared.table(name)["study_id"])
    assert prepared.table("sentences").set_index("text")["n_reports"]["No effusion."] == 1


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (None, "report file is missing"),
        (TITLE + " FINDINGS:  ___.\n", "report has no findings or impression"),
        (TITLE + " FINDINGS:  Cl\0ear.\n", "report has zero bytes: no text"),
    ],
)
def test_study_without_text_is_excluded_with_reason(raw: Path, report: str | None, reason: str) -> None:
    file = report_path(raw, 50000001)
    file.unlink()
    if report is not None:
        file.write_text(report)
    prepared = made(raw)
    assert rejects(prepared.folder) == [["report", "50000001", reason]]
    use = prepared.table("images").set_index("dicom_id")["use"]
    assert use[[dicom(1), dicom(3)]].tolist() == ["excluded", "excluded"]
    assert (use == "excluded").sum() == 2


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_reports_in_utf_16_are_read(raw: Path, encoding: str) -> None:
    report_path(raw, 50000002).write_text(TITLE + " IMPRESSION:  Größe normal.\n", encoding=encoding)
    assert "Größe normal." in {*made(raw).table("sentences")["text"]}


def test_a_set_without_chosen_sections_is_refused(raw: Path) -> None:
    for study in {study for _, study, *_ in IMAGES.values()}:
        report_path(raw, study).write_text(TITLE + " FINDINGS:  Clear.\n")
    words = {"sections": ("impression",), "ms_cxr": None}
    with pytest.raises(UserError, match="10 of 10 reports .* more than 50% .*choose other --sections"):
        prepare(settings(raw, **words))
    with pytest.raises(UserError, match="nothing is left .*excluded 11"):
        prepare(settings(raw, **words, rejected_share=1.0))
    for study in (50000001, 50000002, 50000003, 50000004):
        report_path(raw, study).write_text(TITLE + " IMPRESSION:  Clear.\n")
    with pytest.raises(UserError, match="6 of 10 reports"):
        prepare(settings(raw, **words, rejected_share=0.55))
    assert len(made(raw, **words, rejected_share=0.6).table("reports")) == 4


def test_a_chosen_section_is_the_only_one(raw: Path) -> None:
    prepared = made(raw, sections=("findings",), geometry="shortest")
    assert set(prepared.table("reports")["section"]) == {"findings", "last_paragraph"}
    reason = "report has none of the chosen sections (findings)"
    assert rejects(prepared.folder) == [["report", "50000002", reason]]
    assert prepared.fitting == ("shortest", 16)
    with prepared.open_image(prepared.table("images")["path"].iloc[0]) as image:
        assert image.size == (25, 16)  # of 34 x 21
    assert prepared.table("boxes")[["x", "y", "w", "h"]].iloc[0].tolist() == [1, 2, 10, 5]


@pytest.mark.slow
def test_the_release_of_images_has_no_reports(raw: Path) -> None:
    moved = raw.parent / "reports"
    for study in {study for _, study, _, _ in IMAGES.values()}:
        file = report_path(raw, study)
        target = moved / "mimic-cxr-reports" / file.relative_to(raw)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.rename(target)
    with pytest.raises(UserError) as error:
        prepare(settings(raw))
    for part in (
        "no report was found: p10/p10000001/s50000001.txt and the reports of the other 9 studies",
        f"{raw}/mimic-cxr-reports/files, {raw}/files",
        "MIMIC-CXR-JPG comes without reports: download mimic-cxr-reports.zip",
        "the folder that holds files/pXX/pXXXXXXXX/sXXXXXXXX.txt, by --reports",
    ):
        assert part in str(error.value)
    with pytest.raises(UserError, match=f"studies are in none of .*{raw}/nowhere; MIMIC-CXR-JPG"):
        prepare(settings(raw, reports=raw / "nowhere"))
    # Either layout below the given folder, the folder "files" itself, or the reports put into the source.
    prepare(settings(raw, output=raw.parent / "0", reports=moved))
    prepare(settings(raw, output=raw.parent / "1", reports=moved / "mimic-cxr-reports" / "files"))
    (moved / "mimic-cxr-reports").rename(raw / "mimic-cxr-reports")
    prepare(settings(raw))
    assert content(raw.parent / "set") == content(raw.parent / "0") == content(raw.parent / "1")


def zip_reports(raw: Path, archive: Path, prefix: str) -> None:
    """Move the reports of the release into an archive."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.mkdir(prefix or "files")
        for file in sorted((raw / "files").rglob("*.txt")):
            packed.write(file, prefix + str(file.relative_to(raw)))
            file.unlink()


@pytest.mark.slow
def test_reports_are_read_from_their_archive(raw: Path) -> None:
    prepare(settings(raw))
    archive = raw / "mimic-cxr-reports.zip"
    zip_reports(raw, archive, "mimic-cxr-reports/")
    prepare(settings(raw, output=raw.parent / "packed", workers=2))
    assert content(raw.parent / "packed") == content(raw.parent / "set")
    assert list(raw.rglob("*.txt")) == []
    # Elsewhere, under another name; a report that lies unpacked beside it wins.
    report_path(raw, 50000002).write_text(" IMPRESSION:  Unpacked.\n")
    moved = archive.rename(raw.parent / "reports.zip")
    prepare(settings(raw, output=raw.parent / "moved", reports=moved))
    assert content(raw.parent / "moved") == content(raw.parent / "set")
    moved.rename(archive)
    prepare(settings(raw, output=raw.parent / "both"))
    assert "Unpacked." in set(PreparedSet(raw.parent / "both").table("sentences")["text"])


def test_a_damaged_report_archive_is_named(raw: Path) -> None:
    archive = raw / "mimic-cxr-reports.zip"
    zip_reports(raw, archive, "")
    whole = archive.read_bytes()
    archive.write_bytes(whole[:-40])
    with pytest.raises(
        UserError, match="mimic-cxr-reports.zip cannot be read .File is not a zip file.; expected"
    ):
        prepare(settings(raw))
    # A byte within the packed text of one report: its checksum no longer fits.
    place = whole.index(b"s50000002.txt") + 30
    archive.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
    prepare(settings(raw))
    [[kind, name, reason]] = rejects(raw.parent / "set")
    assert (kind, name) == ("report", "50000002")
    assert reason.startswith("report cannot be read from mimic-cxr-reports.zip: ")


def test_a_report_of_absurd_size_is_left_out(raw: Path) -> None:
    report_path(raw, 50000002).write_text(" IMPRESSION:  " + "Clear. " * 1_000_000)
    zip_reports(raw, raw / "mimic-cxr-reports.zip", "")
    prepare(settings(raw))
    assert rejects(raw.parent / "set") == [["report", "50000002", "report has more than 4,194,304 bytes"]]


def test_source_of_links_is_never_written_to(raw: Path) -> None:
    prepare(settings(raw))
    # As on a cluster: the release elsewhere, read-only, each folder and each table a link.
    linked = raw.parent / "linked"
    linked.mkdir()
    for entry in raw.iterdir():
        (linked / entry.name).symlink_to(entry)
    before = {file: file.stat().st_mtime_ns for file in [raw, *raw.rglob("*")]}
    for path in before:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        prepare(settings(linked, output=raw.parent / "from links"))
    finally:
        for path in before:
            path.chmod(0o755)
    assert content(raw.parent / "from links") == content(raw.parent / "set")
    assert {file: file.stat().st_mtime_ns for file in [raw, *raw.rglob("*")]} == before


def test_a_subset_holds_the_patients_of_its_folders(raw: Path) -> None:
    # As after downloading nothing but files/p10.
    shutil.rmtree(raw / "files" / "p20")
    edit_boxes(raw, lambda content: content["images"][0].update(file_name=f"{dicom(12)}.jpg"))
    prepared = made(raw, subset=("p10",))
    images = prepared.table("images")
    assert set(images["subject_id"]) == {10000000 + n for n in (1, 2, 3, 4, 5, 6)}
    # A box outside the subset is no reject, and counted.
    assert rejects(prepared.folder) == []
    counts = prepared.info["counts"]
    assert (counts["boxes"], counts["boxes_outside_subset"]) == (2, 1)
    # "In the release" is what was asked for; the release itself stands under its own name.
    assert (counts["images_in_release"], counts["release"]["images"]) == (11, 12)
    with pytest.raises(UserError, match=r"--subset: .* has no patient in p11; its folders are p10, p20"):
        prepare(settings(raw, output=raw.parent / "other", subset=("p10", "p11")))
    with pytest.raises(PreparedDataError, match=r"\(subset: p10 there, none now\)"):
        prepare(settings(raw))


def test_a_limit_takes_whole_patients_of_each_use(raw: Path) -> None:
    prepared = made(raw, limit=1)
    use = prepared.table("images").set_index("dicom_id")["use"]
    # The first patient of each use with all images; 10000005 has both a box and a test image, and is no test patient.
    assert use.to_dict() == {
        **{dicom(n): "train" for n in (1, 3, 4)},
        dicom(5): "validate",
        dicom(6): "test",
        **{dicom(n): "grounding" for n in (7, 8)},
    }
    assert prepared.table("boxes")["phrase"].tolist() == ["effusion 7"]
    assert rejects(prepared.folder) == []
    assert prepared.info["counts"]["boxes_outside_subset"] == 2


def test_patients_of_mimic_iv_give_sex_and_age(raw: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(settings(raw))
    before = content(raw.parent / "set")
    assert "patients" not in json.loads(before["dataset.json"])["options"]
    metadata = raw / "mimic-cxr-2.0.0-metadata.csv.gz"
    table(metadata, pd.read_csv(metadata).assign(StudyDate="21500607"))
    rows = pd.DataFrame({"subject_id": [10000001, 10000002, 10000003], "gender": ["F", "M", "X"]})
    rows = rows.assign(anchor_age=["52", "33", ""], anchor_year=2148)
    table(raw / "patients.csv.gz", rows)
    with_patients = settings(raw, output=raw.parent / "with", patients=raw / "patients.csv.gz")
    prepare(with_patients)
    prepared = PreparedSet(raw.parent / "with")
    images = prepared.table("images").set_index("dicom_id")
    assert list(images.columns[-2:]) == ["sex", "age"]
    assert (images["sex"] == "unknown").sum() == 7 and len(images) == 11
    sex, age = images["sex"].to_dict(), images["age"].to_dict()
    assert (sex[dicom(1)], age[dicom(1)]) == ("F", 54.0)
    assert (sex[dicom(5)], age[dicom(5)]) == ("M", 35.0)
    assert sex[dicom(6)] == "unknown" and np.isnan(age[dicom(6)])
    counts = prepared.info["counts"]
    assert counts["images_by_sex"] == {"F": 3, "M": 1, "unknown": 7}
    assert counts["images_without_age"] == 7
    assert "F 3, M 1, unknown 7, age unknown 7 (images)" in capsys.readouterr().out
    after = content(raw.parent / "with")
    assert {name for name in after if after[name] != before.get(name)} == {"images.parquet", "dataset.json"}
    # The same release without the option is the set of before, though its metadata have dates.
    prepare(settings(raw, output=raw.parent / "again"))
    again = content(raw.parent / "again")
    assert {name for name in again if again[name] != before[name]} == {"dataset.json"}
    fingerprints = [json.loads(one["dataset.json"])["fingerprint"] for one in (before, again, after)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    with pytest.raises(PreparedDataError, match="patients: patients.csv.gz there, none now"):
        prepare(settings(raw, output=raw.parent / "with"))


def test_every_labelled_finding_has_its_cases(raw: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = raw / "mimic-cxr-2.0.0-chexpert.csv.gz"
    labels = pd.read_csv(file)
    labels.loc[labels["study_id"].isin([50000004, 50000007]), "Fracture"] = 1
    labels.loc[labels["study_id"].isin([50000003, 50000001, 50000008]), "Fracture"] = (
        0  # validate, train, test
    )
    labels.loc[labels["study_id"] == 50000009, "Fracture"] = -1
    table(file, labels)
    prepared = made(raw)
    assert prepared.findings == ["Cardiomegaly", "Edema", "Fracture"]
    cases = prepared.table("cases").query("finding == 'Fracture'").drop(columns="finding")
    fracture = {dicom(6): 1, dicom(9): 1, dicom(10): 0}
    assert cases.to_numpy().tolist() == [
        [dicom(5), 0, "validate"],
        *([name, label, "test"] for name, label in fracture.items()),
    ]
    assert "others     test (yes/no): Fracture 2/1" in capsys.readouterr().out
    # Balanced: as many positives as negatives, and none of a finding of one sign only, as in validate.
    prepared = made(raw, output=raw.parent / "balanced", cases="balanced")
    cases = prepared.table("cases").query("finding == 'Fracture'")
    balanced = cases.set_index("dicom_id")["label"].to_dict()
    assert sorted(balanced.values()) == [0, 1] and balanced.items() < fracture.items()
    assert set(cases["use"]) == {"test"}
    assert prepared.info["counts"]["cases"]["test"]["Fracture"] == {"yes": 1, "no": 1}


def test_unusable_boxes_are_left_out_with_reasons(raw: Path) -> None:
    def edit(content: dict[str, Any]) -> None:
        for number, name in ((2, dicom(2)), (90, dicom(90))):
            content["images"].append(
                {"id": number, "file_name": f"{name}.jpg", "width": WIDTH, "height": HEIGHT}
            )
        content["images"].append({**content["images"][0], "id": 91, "width": 2 * WIDTH})
        box = content["annotations"][0]
        content["annotations"] += [
            {**box, "id": 100, "bbox": [WIDTH, 0, 5, 5]},
            {**box, "id": 101, "bbox": [3, 3, 0, 5]},
            {**box, "id": 102, "bbox": [3, "many", 2, 5]},
            {**box, "id": 103, "image_id": 2},
            {**box, "id": 104, "image_id": 90},
            {**box, "id": 105, "image_id": 91},
            {**box, "id": 106, "label_text": " "},
            {**box, "id": 107, "label_text": None},
            # Another region of a phrase; the same words on another image are another phrase.
            {**content["annotations"][1], "id": 108, "label_text": box["label_text"]},
            {**box, "id": 109, "bbox": [20, 2, 5, 5]},
        ]

    edit_boxes(raw, edit)
    report_path(raw, 50000005).unlink()
    prepared = made(raw, rejected_share=0.3)  # 3 of 13 boxes reach beyond their image
    drawn = "drawn on an image of 68 x 21 pixels, the release's image has 34 x 21 (width x height)"
    assert prepared.table("boxes")[["dicom_id", "phrase", "x"]].to_numpy().tolist() == [
        [dicom(7), "effusion 7", 1],
        [dicom(7), "effusion 7", 20],
        [dicom(9), "effusion 9", 0],
        [dicom(11), "effusion 11", 0],
        [dicom(9), "effusion 7", 0],
    ]
    assert rejects(prepared.folder) == [
        ["report", "50000005", "report file is missing"],
        ["box", f"annotation 100 {dicom(7)}", "it has no area within its image"],
        ["box", f"annotation 101 {dicom(7)}", "it has no area within its image"],
        ["box", f"annotation 102 {dicom(7)}", "a coordinate is not a finite number"],
        ["box", f"annotation 103 {dicom(2)}", "its image is not frontal (view LATERAL)"],
        ["box", f"annotation 104 {dicom(90)}", "its image is not in the release"],
        ["box", f"annotation 105 {dicom(7)}", drawn],
        ["box", f"annotation 106 {dicom(7)}", "it has no category or no phrase"],
        ["box", f"annotation 107 {dicom(7)}", "it has no category or no phrase"],
    ]
    # A patient of the MS-CXR file stays out of training, even if no box of theirs can be used.
    use = prepared.table("images").set_index("dicom_id")["use"]
    assert use[[dicom(1), dicom(3), dicom(4)]].tolist() == ["grounding"] * 3
    # A box serves grounding without a report.
    assert use[dicom(7)] == "grounding"


def test_the_decoded_size_is_trusted(raw: Path) -> None:
    with Image.open(image_path(raw, 7)) as image:
        image.resize((50, 41)).save(image_path(raw, 7))
    prepared = made(raw)
    images = prepared.table("images")
    assert images.loc[images["dicom_id"] == dicom(7), ["height", "width"]].to_numpy().tolist() == [[41, 50]]
    # A box that was drawn on other pixels is not silently put elsewhere.
    assert [row[0] for row in rejects(prepared.folder)] == ["box"]


@pytest.mark.parametrize(
    ("size", "resized", "expected"),
    [
        ((60, 41), None, [6, 8.2, 12, 10.25]),
        ((15, 10), "crop", [1.5, 2, 3, 2.5]),
        ((30, 30), "stretch", [3, 6, 6, 7.5]),
        ((30, 30), "pad", [3, 9, 6, 5]),
        ((30, 30), "crop", [0, 6, 6, 7.5]),
    ],
)
def test_boxes_follow_their_resized_image(
    size: tuple[int, int], resized: str | None, expected: list[float]
) -> None:
    boxes = pd.DataFrame({"dicom_id": ["a"], "category": "Edema", "phrase": "edema", "box_id": "1"})
    boxes = boxes.assign(view="PA", x=3.0, y=4.0, w=6.0, h=5.0, image_width=30.0, image_height=20.0)
    images = pd.DataFrame({"dicom_id": ["a"], "width": size[0], "height": size[1]})
    found, rejects, scaled = set_tables.select_boxes(boxes, images, resized)
    assert found[["x", "y", "w", "h"]].to_numpy().tolist() == [pytest.approx(expected)]
    assert (rejects, scaled) == ([], 1)


def test_boxes_written_as_corners_are_refused(raw: Path) -> None:
    corners = {7: [20, 10, 30, 15], 9: [20, 12, 33, 20], 11: [-9, 1, 12, 3]}
    edit_boxes(
        raw, lambda content: [box.update(bbox=corners[box["image_id"]]) for box in content["annotations"]]
    )
    with pytest.raises(UserError, match="3 of 3 boxes .* more than 5% .* beyond its image.*not corners"):
        prepare(settings(raw))
    prepare(settings(raw, rejected_share=1.0))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("times", [1, 2, None])
def test_boxes_are_turned_with_their_picture(tmp_path: Path, orientation: int, times: int | None) -> None:
    pixels, exif = np.zeros((37, 50), np.uint8), Image.Exif()
    pixels[4:13, 38:45], exif[274] = 255, orientation
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    width, height, _ = size = size_of(tmp_path / "a.png")
    rows, columns = np.nonzero(np.asarray(read_grey(tmp_path / "a.png")))
    place = dict(zip("xywh", np.array([38, 4, 7, 9]) * (times or 1), strict=True))
    sides = {"image_width": times and 50 * times, "image_height": times and 37 * times}
    box = pd.DataFrame({"dicom_id": ["a"], "box_id": "1", "category": "Edema", **place, **sides})
    images = pd.DataFrame([["a", *size]], columns=["dicom_id", "width", "height", "orientation"])
    turned, fits_either_way, _ = set_tables.upright_boxes(box, images)
    found = set_tables.select_boxes(turned, images, None)[0][["x", "y", "w", "h"]].to_numpy().tolist()
    is_known = orientation in (1, 5, 6, 7, 8)
    assert fits_either_way.tolist() == [not is_known]
    assert (width, height) == ((50, 37) if orientation < 5 else (37, 50))
    drawn = [columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1] if is_known else [38, 4, 7, 9]
    assert found == [drawn]
    # Drawn on the upright picture, or on a square one: as it is.
    upright = box.assign(
        x=3, y=30 if orientation > 4 else 4, w=2, h=2, image_width=width, image_height=height
    )
    assert set_tables.upright_boxes(upright, images)[0]["x"].tolist() == [3]
    square = upright.assign(image_width=9, image_height=9), images.assign(width=20, height=20)
    assert set_tables.upright_boxes(*square)[1].tolist() == [orientation > 1]


def test_boxes_of_distorted_images_need_an_explanation(raw: Path) -> None:
    for number in (7, 9, 11):
        with Image.open(image_path(raw, number)) as image:
            image.resize((20, 20)).save(image_path(raw, number))
    with pytest.raises(UserError, match="3 of 3 boxes cannot be used.* or say --resized, or allow"):
        prepare(settings(raw))
    assert not (raw.parent / "set" / "images").exists()
    prepare(settings(raw, resized="stretch"))
    assert PreparedSet(raw.parent / "set").info["counts"]["boxes_scaled"] == 3
    prepare(settings(raw, output=raw.parent / "without", rejected_share=1.0))
    page, problems = check_set(raw.parent / "without")
    assert problems == [] and "  3 box     drawn on an image of n x n pixels" in page


def _with_splits(raw: Path, **split_of: str) -> dict[str, Any]:
    """Splits of MS-CXR 1.1.0 for the boxes of images 7, 9 and 11."""
    edit_boxes(
        raw, lambda content: [row.update(split=split_of[f"n{row['id']}"]) for row in content["images"]]
    )
    return {"ms_cxr_split": "val"}


@pytest.mark.slow
def test_boxes_of_one_split_of_mscxr(raw: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = made(raw, output=raw.parent / "before")
    assert "split" not in capsys.readouterr().err
    _with_splits(raw, n7="train", n9="test", n11="val")
    every = made(raw, output=raw.parent / "every")
    said = "its split (train 1, test 1, val 1 boxes) is not used: all boxes are evaluated; choose some by --ms_cxr"
    assert said in capsys.readouterr().err
    assert every.table("boxes").equals(before.table("boxes"))
    _with_splits(raw, n7="fold 1", n9="fold 2", n11="fold 2")
    made(raw, output=raw.parent / "folds")
    assert "its split (fold 2 2, fold 1 1 boxes) is not used" in capsys.readouterr().err
    _with_splits(raw, n7="train", n9="test", n11="val")
    chosen = made(raw, ms_cxr_split="val")
    assert chosen.table("boxes")["dicom_id"].tolist() == [dicom(11)]
    assert (
        chosen.info["counts"]["boxes_of_other_splits"] == 2
        and chosen.info["options"]["ms_cxr_split"] == "val"
    )
    # No patient of the file is in training, with a box or without; an image of the test split is tested without one.
    uses = chosen.table("images").set_index("dicom_id")["use"]
    assert uses[[dicom(n) for n in (1, 7, 8, 9, 10, 11)]].tolist() == [
        "train",
        *["grounding"] * 2,
        *["test"] * 2,
        "grounding",
    ]
    assert check_set(chosen.folder)[1] == []
    with pytest.raises(PreparedDataError, match="ms_cxr_split: val there, test now"):
        prepare(settings(raw, ms_cxr_split="test"))


def test_labels_of_test_by_a_radiologist(raw: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Study 50000001 is not of the test split, 50000099 not of this release.
    (raw / "mimic-cxr-2.1.0-test-set-labeled.csv").write_text(
        "study_id,Airspace Opacity,Edema\n50000008,1.0,-1.0\n50000004,0,\n50000001,0,0\n50000099,1,1\n"
    )
    before = made(raw, output=raw.parent / "before").table("labels").set_index("study_id")
    prepared = made(raw, test_labels="radiologist")
    labels = prepared.table("labels").set_index("study_id")
    assert labels.loc[[50000008, 50000004], ["Lung Opacity", "Edema"]].to_numpy().tolist()[0] == [1, -1]
    assert labels.loc[50000004, "Lung Opacity"] == 0 and labels.loc[50000004].count() == 1
    assert before.loc[50000007].any() and labels.loc[50000007].isna().all()
    others = ~labels.index.isin([50000004, 50000007, 50000008])
    assert labels[others].equals(before[others])
    said = capsys.readouterr().err
    assert (
        "labels of test by mimic-cxr-2.1.0-test-set-labeled.csv, which labels all findings but Atelec" in said
    )
    assert "2 of 3 studies, the others have none; rows of other studies, not used: 2\n" in said
    assert check_set(prepared.folder)[1] == []


def write_truth(raw: Path, texts: dict[str, int]) -> None:
    truth = raw / "phantom_truth"
    truth.mkdir(exist_ok=True)
    (truth / "phantom.json").write_text("{}")
    pd.DataFrame(texts.items(), columns=["text", "class_id"]).to_csv(truth / "sentences.csv", index=False)
    classes = pd.DataFrame({"class_id": sorted(set(texts.values()))})
    classes["name"], classes["rho"] = "class", classes["class_id"] / 10
    classes["sentence_share"], classes["mention_share"] = classes["class_id"] / 100, 0.5
    classes.to_csv(truth / "classes.csv", index=False)
    of_images = pd.DataFrame({"dicom_id": [dicom(3), dicom(1), dicom(2)], "class_id": [1, 2, 1]})
    of_images.to_csv(truth / "image_classes.csv", index=False)


def test_the_truth_of_a_phantom_is_carried_over(raw: Path) -> None:
    for study in {study for _, study, _, _ in IMAGES.values()}:
        report_path(raw, study).write_text(f" FINDINGS:  Lungs\n clear.  Big heart{study % 2}.\n")
    texts = {"Lungs clear.": 1, "Big heart0.": 2, "Big heart1.": 2, "Never said.": 3}
    write_truth(raw, texts)
    prepared = made(raw)
    assert prepared.is_phantom
    assert prepared.info["source"] == "digital phantom in the layout of mimic-cxr-2.0.0"
    classes = prepared.table("sentences").merge(prepared.table("classes"), on="sentence_id")
    assert classes[["text", "class_id", "rho", "sentence_share"]].to_numpy().tolist() == [
        ["Big heart0.", 2, 0.2, 0.02],
        ["Big heart1.", 2, 0.2, 0.02],
        ["Lungs clear.", 1, 0.1, 0.01],
    ]
    # The lateral view is not in the set.
    assert prepared.table("image_classes").to_numpy().tolist() == [[dicom(1), 2], [dicom(3), 1]]


def _in_split(raw: Path, number: int, split: str) -> dict[str, Any]:
    """Without the boxes, or patient 10000005 would serve grounding with all images outside the test split."""
    file = raw / "mimic-cxr-2.0.0-split.csv.gz"
    frame = pd.read_csv(file)
    frame.loc[frame["dicom_id"] == dicom(number), "split"] = split
    table(file, frame)
    return {"ms_cxr": None}


def _lateral(raw: Path) -> None:
    file = raw / "mimic-cxr-2.0.0-metadata.csv.gz"
    table(file, pd.read_csv(file).assign(ViewPosition="LL"))


def _with_boxes(raw: Path, part: str, **changed: str) -> None:
    edit_boxes(raw, lambda content: [row.update(changed) for row in content[part]])


def _labelled(raw: Path, text: str | None) -> dict[str, Any]:
    if text is not None:
        (raw / "mimic-cxr-2.1.0-test-set-labeled.csv").write_text(text)
    return {"test_labels": "radiologist"}


def _dicom(raw: Path) -> None:
    for file in raw.rglob("*.jpg"):
        file.rename(file.with_suffix(".dcm"))


def _file(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    return file


def _other_truth(raw: Path) -> None:
    for study in {study for _, study, _, _ in IMAGES.values()}:
        report_path(raw, study).write_text(f" FINDINGS:  Lungs clear.  Big heart{study % 2}.\n")
    write_truth(raw, {"Lungs clear.": 1, "Big heart0.": 2})


BOTH = "split.csv.gz, column subject_id: expected patients in one split, found '{}'.*; take the release's own"
REFUSED: list[tuple[Callable[[Path], dict[str, Any] | None], str]] = [
    (lambda raw: _in_split(raw, 4, "test"), BOTH.format(IMAGES[4][0])),
    (lambda raw: _in_split(raw, 10, "validate"), BOTH.format(IMAGES[10][0])),
    (_lateral, "none of 12 images is frontal"),
    (lambda raw: _with_boxes(raw, "images", file_name="a.jpg"), r"boxes\.json: none of its images is among those of"),
    (lambda raw: _with_boxes(raw, "annotations", label_text=""), "3 of 3 boxes .*no phrase.*; download the file of"),
    (_other_truth, r"1 of 3 sentences have no known class \(first: 'Big heart1\.'\)"),
    (lambda raw: {"ms_cxr": raw / "none.json"}, "none.json cannot be read .No such file"),
    (lambda raw: {"reports": _file(raw / "mimic_cxr_sectioned.csv", b"study,findings")}, "not a zip file.; expected"),
    (_dicom, r"found DICOM files for 11 of 11 images \(first: .*\.dcm\): MIMIC-CXR itself"),
    (lambda raw: {"patients": raw / "none.csv"}, "none.csv cannot be read .No such file"),
    (lambda raw: {"ms_cxr_split": "val"}, "--ms_cxr_split val: expected .*, found none 3; take that version, or leave"),
    (lambda raw: {"ms_cxr_split": "val", "ms_cxr": None}, "--ms_cxr_split: expected the file of the boxes"),
    (
        lambda raw: _with_splits(raw, n7="train", n9="test", n11="train"),
        "and boxes of it, found train 2, test 1",
    ),
    (lambda raw: _labelled(raw, None), "--test_labels radiologist: expected mimic-cxr-2.1.0-test-set-labeled.csv in"),
    (lambda raw: _labelled(raw, "study_id,Edema\n50000099,1\n"), "labeled.csv: expected studies of the official test"),
    (lambda raw: _labelled(raw, "study_id,Edma\n50000004,1\n"), "labeled.csv: expected a column for each .*found none"),
    (lambda raw: _labelled(raw, "study_id,Edema\n50000004,2\n"), "column Edema: expected 1, 0, -1 or empty, found '2'"),
    (
        lambda raw: _labelled(raw, "study_id,Lung Opacity,Airspace Opacity\n50000004,1,0\n"),
        "a column for each finding of CheXpert, found Lung Opacity, Airspace Opacity",
    ),
    (lambda raw: {"output": raw}, "neither empty nor a prepared set; choose another --output"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [pytest.param(*x, marks=[pytest.mark.slow] * (place % 3 > 0)) for place, x in enumerate(REFUSED)],
)
def test_unusable_sources_and_outputs_are_refused(
    raw: Path, change: Callable[[Path], dict[str, Any] | None], message: str
) -> None:
    changed = change(raw) or {}
    with pytest.raises((UserError, PreparedDataError), match=message):
        prepare(settings(raw, **changed))
    assert not (raw.parent / "set" / "dataset.json").exists()


def test_error_is_one_line_and_needs_no_torch(raw: Path) -> None:
    (raw / "mimic-cxr-2.0.0-split.csv.gz").unlink()
    code = (
        "import runpy, sys\n"
        "try: runpy.run_module('medclip_dcl', run_name='__main__')\n"
        "finally: print(sorted({'torch', 'transformers', 'pytorch_lightning'} & set(sys.modules)))"
    )
    arguments = ["prepare", "mimic-cxr", "--source", str(raw), "--output", str(raw.parent / "set")]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert (result.returncode, result.stdout) == (2, "[]\n")
    assert result.stderr.startswith(
        f"medclip-dcl prepare mimic-cxr: error: --source {raw}: expected mimic-cxr-2.0.0-{{metadata,split,chexpert}}"
    )
    assert result.stderr.count("\n") == 1
