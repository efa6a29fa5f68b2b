"""The phantom's files: the raw layout of MIMIC-CXR-JPG 2.0.0 and MS-CXR v1.0.0, the truth beside it, reruns."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from data_prep.phantom.findings import CATEGORIES
from data_prep.phantom.options import Options
from data_prep.phantom.release import write_phantom
from data_prep.text.sections import study_sections
from data_prep.text.sentences import passages, split_sentences
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import CHEXPERT
from tests.program import verb

main = verb("phantom")

OPTIONS = Options(studies=90, seed=4, size=72)
SMALL = Options(studies=20, seed=0, size=64)
PREFIX = "mimic-cxr-2.0.0"


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phantom") / "raw"
    assert write_phantom(folder, OPTIONS)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phantom") / "small"
    assert write_phantom(folder, SMALL)
    return folder


def _table(folder: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(folder / f"{PREFIX}-{name}.csv.gz", dtype={"dicom_id": str})


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def _frontal_training(folder: Path) -> pd.DataFrame:
    images = _table(folder, "metadata").merge(
        _table(folder, "split"), on=["dicom_id", "study_id", "subject_id"]
    )
    return images[images.ViewPosition.isin(["AP", "PA"]) & (images.split == "train")]


# ------------------------------------------------------------------------------------------------ layout


def test_metadata_describe_the_image_files(phantom: Path) -> None:
    table = _table(phantom, "metadata")
    assert list(table.columns) == [
        *("dicom_id", "subject_id", "study_id", "PerformedProcedureStepDescription", "ViewPosition"),
        *("Rows", "Columns", "StudyDate", "StudyTime", "ProcedureCodeSequence_CodeMeaning"),
        *("ViewCodeSequence_CodeMeaning", "PatientOrientationCodeSequence_CodeMeaning"),
    ]
    for column in ("subject_id", "study_id", "Rows", "Columns", "StudyDate"):
        assert table[column].dtype == np.int64
    assert table.StudyTime.dtype == np.float64
    assert table.StudyDate.between(21000101, 22991231).all()
    assert table.dicom_id.is_unique
    assert table.dicom_id.str.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{8}){4}").all()
    assert {"AP", "PA"} <= set(table.ViewPosition.dropna()) <= {"AP", "PA", "LATERAL", "LL"}
    for row in table.itertuples():
        file = (
            phantom / f"files/p{str(row.subject_id)[:2]}/p{row.subject_id}/s{row.study_id}/{row.dicom_id}.jpg"
        )
        with Image.open(file) as image:
            assert image.format == "JPEG" and image.mode == "L"
            assert image.size == (row.Columns, row.Rows)
    assert len(list(phantom.rglob("*.jpg"))) == len(table)
    assert {f.with_suffix("") for f in phantom.rglob("s*.txt")} == {f.parent for f in phantom.rglob("*.jpg")}
    split = _table(phantom, "split")
    assert list(split.columns) == ["dicom_id", "study_id", "subject_id", "split"]
    assert list(split.dicom_id) == list(table.dicom_id)
    ratios = table.Rows / table.Columns
    assert (ratios > 1.1).any() and (ratios < 0.9).any() and (abs(ratios - 1) < 0.03).any()
    frontal = table[table.ViewPosition.isin(["AP", "PA"])]
    assert len(table) > len(frontal) > OPTIONS.studies
    assert frontal.study_id.nunique() == table.study_id.nunique() == OPTIONS.studies


@pytest.mark.parametrize("labeller", ["chexpert", "negbio"])
def test_labels_have_the_releases_columns_and_values(phantom: Path, labeller: str) -> None:
    table = _table(phantom, labeller)
    assert list(table.columns) == ["subject_id", "study_id", *CHEXPERT]
    assert len(table) == table.study_id.nunique() == OPTIONS.studies
    values = table[list(CHEXPERT)]
    assert (values.dtypes == np.float64).all()
    assert set(np.unique(values.to_numpy()[values.notna()])) == {-1.0, 0.0, 1.0}
    text = gzip.decompress((phantom / f"{PREFIX}-{labeller}.csv.gz").read_bytes()).decode()
    cells = {cell for row in list(csv.reader(text.splitlines()))[1:] for cell in row[2:]}
    assert cells == {"", "1.0", "0.0", "-1.0"}


def test_boxes_lie_inside_test_images(phantom: Path) -> None:
    value = json.loads((phantom / "MS_CXR_Local_Alignment_v1.0.0.json").read_text())
    assert [c["name"] for c in value["categories"]] == list(CATEGORIES)
    images = {image["id"]: image for image in value["images"]}
    metadata = _table(phantom, "metadata").merge(_table(phantom, "split")).set_index("dicom_id")
    for image in images.values():
        row = metadata.loc[image["file_name"].removesuffix(".jpg")]
        assert (image["width"], image["height"]) == (row.Columns, row.Rows)
        assert row.split == "test" and row.ViewPosition in ("AP", "PA")
        assert (phantom / image["path"]).is_file() and image["path"].endswith(image["file_name"])
    assert len(value["annotations"]) > 40
    for annotation in value["annotations"]:
        x, y, w, h = annotation["bbox"]
        image = images[annotation["image_id"]]
        assert 0 <= x < x + w <= image["width"] and 0 <= y < y + h <= image["height"]
    pairs = Counter((a["image_id"], a["label_text"]) for a in value["annotations"])
    assert max(pairs.values()) >= 2

    table = pd.read_csv(phantom / "MS_CXR_Local_Alignment_v1.0.0.csv")
    assert (
        ",".join(table.columns) == "dicom_id,category_name,label_text,path,x,y,w,h,image_width,image_height"
    )
    names = [c["name"] for c in value["categories"]]
    rows = [
        (
            images[a["image_id"]]["file_name"].removesuffix(".jpg"),
            names[a["category_id"]],
            a["label_text"],
            images[a["image_id"]]["path"],
            *a["bbox"],
            images[a["image_id"]]["width"],
            images[a["image_id"]]["height"],
        )
        for a in value["annotations"]
    ]
    assert list(table.itertuples(index=False, name=None)) == rows


def test_phrases_are_wordings_of_true_classes(phantom: Path) -> None:
    class_of = pd.read_csv(phantom / "phantom_truth/sentences.csv").set_index("text").class_id
    holds = pd.read_csv(phantom / "phantom_truth/image_classes.csv")
    pairs = set(zip(holds.dicom_id, holds.class_id, strict=True))
    boxes = pd.read_csv(phantom / "MS_CXR_Local_Alignment_v1.0.0.csv")
    for row in boxes.itertuples():
        assert (row.dicom_id, class_of[f"{row.label_text}."]) in pairs
    reports = "".join(f.read_text() for f in phantom.rglob("s*.txt"))
    unwrapped = " ".join(reports.split())
    assert any(phrase not in unwrapped for phrase in boxes.label_text)


# ------------------------------------------------------------------------------------------------ truth


def test_shares_are_those_of_the_images_and_reports(phantom: Path) -> None:
    truth = phantom / "phantom_truth"
    classes = pd.read_csv(truth / "classes.csv").set_index("class_id")
    assert list(classes.columns) == ["name", "rho", "sentence_share", "mention_share"]
    assert list(classes.index) == list(range(len(classes)))
    holds = pd.read_csv(truth / "image_classes.csv")
    assert not holds.duplicated().any() and (holds.groupby("dicom_id").size() >= 5).all()
    assert set(holds.dicom_id) == set(_table(phantom, "metadata").dicom_id)
    train = _frontal_training(phantom)
    counts = holds[holds.dicom_id.isin(train.dicom_id)].class_id.value_counts()
    np.testing.assert_allclose(
        classes.rho, [counts.get(c, 0) / len(train) for c in classes.index], rtol=1e-12
    )

    class_of = pd.read_csv(truth / "sentences.csv").set_index("text").class_id
    assert class_of.index.is_unique
    said: dict[int, list[int]] = {}
    for row in train.drop_duplicates("study_id").itertuples():
        file = phantom / f"files/p{str(row.subject_id)[:2]}/p{row.subject_id}/s{row.study_id}.txt"
        said[int(str(row.study_id))] = [
            int(class_of[sentence])
            for section in study_sections(file.read_text())
            for passage in passages(section.text)
            for sentence in split_sentences(passage)
        ]
    total = Counter(c for classes_said in said.values() for c in classes_said)
    shares = [total[c] / total.total() for c in classes.index]
    np.testing.assert_allclose(classes.sentence_share, shares, rtol=1e-12)
    mentions = Counter(c for study in train.study_id for c in set(said[int(study)]))
    np.testing.assert_allclose(
        classes.mention_share, [mentions[c] / len(train) for c in classes.index], rtol=1e-12
    )
    assert (classes.mention_share <= classes.rho + 1e-12).all()


def test_plain_phantom_is_that_of_version_1(small: Path) -> None:
    """The demo's phantom, on which results were published, must not change unnoticed."""
    digest, grey = hashlib.sha256(), []
    for name, content in _contents(small).items():
        if name.endswith(".jpg"):
            grey.append(np.asarray(Image.open(small / name)).mean())
        else:
            plain = gzip.decompress(content) if name.endswith(".gz") else content
            digest.update(name.encode() + b"\0" + plain)
    assert digest.hexdigest() == "b995cdf8381c44d0e66947b54fb1b829356086bd205568c74f27b5704ccb74d3"
    # Another version of the JPEG library may round otherwise.
    assert len(grey) == 28 and np.mean(grey) == pytest.approx(114.70, abs=0.05)


# ------------------------------------------------------------------------------------------------ patients


def test_patients_have_sex_and_plausible_ages(phantom: Path) -> None:
    patients = pd.read_csv(phantom / "patients.csv.gz").set_index("subject_id")
    images = _table(phantom, "metadata")
    assert set(patients.index) == set(images.subject_id) and patients.index.is_unique
    assert set(patients.gender) == {"F", "M"}
    of_patient = patients.loc[images.subject_id]
    ages = of_patient.anchor_age.to_numpy() + images.StudyDate // 10_000 - of_patient.anchor_year.to_numpy()
    assert ages.between(18, 110).all() and ages.std() > 15
    assert (images.StudyDate // 10_000 >= of_patient.anchor_year.to_numpy()).all()


def test_only_test_images_of_the_degraded_sex_differ(small: Path, tmp_path: Path) -> None:
    degraded = Options(SMALL.studies, SMALL.seed, SMALL.size, "F")
    write_phantom(tmp_path / "raw", degraded)
    one, other = _contents(small), _contents(tmp_path / "raw")
    assert one.keys() == other.keys()
    images = _table(small, "metadata").merge(_table(small, "split")[["dicom_id", "split"]])
    patients = pd.read_csv(small / "patients.csv.gz")
    images = images.merge(patients, on="subject_id")
    worse = images[(images.split == "test") & (images.gender == "F")]
    assert 0 < len(worse) < (images.split == "test").sum()
    truth = {f"phantom_truth/{name}.json" for name in ("options", "phantom")}
    differing = {Path(name).stem for name in one if one[name] != other[name] and name not in truth}
    assert differing == set(worse.dicom_id)
    assert '"degraded_sex": "F"' in (tmp_path / "raw/phantom_truth/phantom.json").read_text()
    assert "degraded" not in (small / "phantom_truth/phantom.json").read_text()


# ------------------------------------------------------------------------------------------------ reruns


@pytest.mark.slow
def test_phantom_is_alike_for_any_workers(small: Path, tmp_path: Path) -> None:
    options = {"--output": tmp_path / "again", "--workers": 2}
    options |= {"--studies": SMALL.studies, "--seed": SMALL.seed, "--size": SMALL.size}
    words = [str(word) for pair in options.items() for word in pair]
    subprocess.run([sys.executable, "-m", "medclip_dcl", "phantom", *words], check=True)
    assert _contents(tmp_path / "again") == _contents(small)


def test_another_seed_keeps_the_language(small: Path, phantom: Path) -> None:
    one, other = _contents(small), _contents(phantom)
    assert {name for name in one if name.endswith(".jpg")}.isdisjoint(other)
    assert one["phantom_truth/sentences.csv"] == other["phantom_truth/sentences.csv"]


def test_an_interrupted_run_is_completed(small: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small, tmp_path / "raw"))
    before = _contents(folder)
    images = sorted(folder.rglob("*.jpg"))
    images[0].unlink()
    images[3].write_bytes(images[3].read_bytes()[:-300])
    images[5].write_bytes(b"")
    sorted(folder.rglob("s*.txt"))[2].unlink()
    (folder / "phantom_truth/phantom.json").unlink()
    (folder / f"{PREFIX}-split.csv.gz").unlink()
    kept = images[7].stat().st_mtime_ns
    assert write_phantom(folder, SMALL)
    assert _contents(folder) == before
    assert images[7].stat().st_mtime_ns == kept


def test_a_finished_phantom_is_left_alone(small: Path) -> None:
    before = {f: f.stat().st_mtime_ns for f in small.rglob("*")}
    assert not write_phantom(small, SMALL)
    for other in (Options(SMALL.studies, 7, 65), Options(SMALL.studies, SMALL.seed, SMALL.size, "F")):
        with pytest.raises(
            UserError, match=r"expected a phantom with .*, found one with .*'seed': 0, 'size': 64}"
        ):
            write_phantom(small, other)
    assert {f: f.stat().st_mtime_ns for f in small.rglob("*")} == before


def test_an_unfinished_phantom_of_other_options_is_refused(small: Path, tmp_path: Path) -> None:
    shutil.copytree(small, tmp_path / "raw")
    (tmp_path / "raw/phantom_truth/phantom.json").unlink()
    with pytest.raises(UserError, match=r"'studies': 21, .* found one with .*'studies': 20,"):
        write_phantom(tmp_path / "raw", Options(21, SMALL.seed, SMALL.size))


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("chapter one")
    with pytest.raises(UserError, match="expected a new or empty folder, or a phantom; found other files"):
        write_phantom(tmp_path, SMALL)
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.tex"]
