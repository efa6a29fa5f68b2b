"""Find, read and check the tables of MIMIC-CXR-JPG and MS-CXR, and the truth of a phantom in their layout."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from data_prep.sources.source_tables import SPLITS, read_form, read_label_table, read_table, require
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.runs.saved import read_json

_DICOM_ID = r"[0-9a-f]{8}(?:-[0-9a-f]{8}){4}"
_NUMBER = r"[0-9]{8}"
_BOX = ("x", "y", "w", "h", "image_width", "image_height")
_COCO = "the COCO keys images, annotations (image_id, category_id, bbox, label_text) and categories"


@dataclass(frozen=True)
class Release:
    """A release in the layout of MIMIC-CXR-JPG: its name with the version ("mimic-cxr-2.0.0"), and its tables."""

    name: str
    metadata: Path
    split: Path
    labels: Path


def find_release(folder: Path, labeler: str = "chexpert") -> Release:
    """Find the tables of a release in the folder that holds ``files``; `labeler`: chexpert or negbio."""
    tables: dict[str, Path] = {}
    names: set[str] = set()
    for kind in ("metadata", "split", labeler):
        # Of a packed and an unpacked table, the packed one (the original) is used.
        for end in ("csv", "csv.gz"):
            for file in folder.glob(f"mimic-cxr-*-{kind}.{end}"):
                tables[kind] = file
                names.add(file.name.partition(f"-{kind}.csv")[0])
    if len(names) != 1 or len(tables) != 3:
        found = ", ".join(sorted(file.name for file in folder.glob("mimic-cxr-*.csv*"))) or "none"
        raise UserError(
            f"--source {folder}: expected mimic-cxr-2.0.0-{{metadata,split,{labeler}}}.csv.gz (or .csv), of one "
            f"version, found {found}; they are next to the folder 'files' on the download page of MIMIC-CXR-JPG"
        )
    return Release(names.pop(), *tables.values())


def read_images(release: Release) -> pd.DataFrame:
    """Every image of the release, of any view, sorted by patient, study and image.

    Returns:
        dicom_id, subject_id, study_id, view, rows, columns (pixels by the metadata), official_split, path; study_date
        where the metadata have it.
    """
    keys = ["dicom_id", "subject_id", "study_id"]
    metadata = read_table(release.metadata, (*keys, "ViewPosition"), other_columns=("StudyDate",))
    split = read_table(release.split, (*keys, "split"))
    for file, frame in ((release.metadata, metadata), (release.split, split)):
        is_right = frame["dicom_id"].str.fullmatch(_DICOM_ID) & ~frame["dicom_id"].duplicated()
        require(frame["dicom_id"], is_right, "five groups of eight hex digits, each image once", file)
        for column in ("subject_id", "study_id"):
            require(frame[column], frame[column].str.fullmatch(_NUMBER), "eight digits", file)
    require(split["split"], split["split"].isin(SPLITS), " | ".join(SPLITS), release.split)
    images = metadata.merge(split, on=keys, how="outer", indicator="place")
    alone = images[images["place"] != "both"]
    if len(alone):
        raise UserError(
            f"{release.metadata.name} and {release.split.name}: expected the same images, patients and studies, found "
            f"{len(alone):,} rows in one of them only (first: {alone['dicom_id'].iloc[0]}); take both from one download"
        )
    patients = images.groupby("study_id")["subject_id"].transform("nunique")
    require(images["study_id"], patients == 1, "studies of one patient", release.metadata)
    patient, study = images["subject_id"], images["study_id"]
    images["path"] = (
        "files/p" + patient.str[:2] + "/p" + patient + "/s" + study + "/" + images["dicom_id"] + ".jpg"
    )
    images = images.astype({"subject_id": "int64", "study_id": "int64"})
    names = {"ViewPosition": "view", "StudyDate": "study_date", "split": "official_split"}
    images = images.rename(columns=names)
    return images.sort_values(["subject_id", "study_id", "dicom_id"], ignore_index=True)


def read_labels(release: Release) -> pd.DataFrame:
    """The 14 labels of each study: study_id and `CHEXPERT`, 1, 0, -1 (uncertain) or NaN (not mentioned)."""
    frame = read_label_table(release.labels, "study_id", _NUMBER, "eight digits", CHEXPERT)
    return frame.astype({"study_id": "int64"})


def radiologist_table(folder: Path) -> Path:
    """The labels of test studies by a radiologist, which MIMIC-CXR-JPG 2.1.0 has."""
    if files := sorted(folder.glob("mimic-cxr-*-test-set-labeled.csv*")):
        return files[-1]
    raise UserError(
        f"--test_labels radiologist: expected mimic-cxr-2.1.0-test-set-labeled.csv in {folder}, found none; "
        "MIMIC-CXR-JPG 2.1.0 has it beside the other tables"
    )


def with_radiologist(labels: pd.DataFrame, file: Path, tested: Iterable[int]) -> pd.DataFrame:
    """Labels in which those of the studies of the test split are a radiologist's; others of that split have none."""
    names = (*CHEXPERT, "Airspace Opacity")
    read = read_label_table(file, "study_id", _NUMBER, "eight digits", (), names).astype(
        {"study_id": "int64"}
    )
    given = ", ".join(read.columns.drop("study_id")) or "none"
    read = read.rename(columns={"Airspace Opacity": "Lung Opacity"})
    if given == "none" or not read.columns.is_unique:
        raise UserError(f"{file}: expected a column for each finding of CheXpert, found {given}")
    test_studies = {*tested}
    is_tested = read["study_id"].isin(test_studies)
    if not is_tested.any():
        raise UserError(
            f"{file}: expected studies of the official test split, found none; take it from the release of the images"
        )
    missing = ", ".join(name for name in CHEXPERT if name not in read)
    others = f"; rows of other studies, not used: {(~is_tested).sum():,}" if not is_tested.all() else ""
    print(
        f"note: labels of test by {file.name}, which labels {f'all findings but {missing}' if missing else 'all'}: "
        f"{is_tested.sum():,} of {len(test_studies):,} studies, the others have none{others}",
        file=sys.stderr,
    )
    return pd.concat([labels[~labels["study_id"].isin(test_studies)], read[is_tested]], ignore_index=True)


def read_ms_cxr(file: Path) -> pd.DataFrame:
    """The boxes of MS-CXR 1.0.0 or 1.1.0, from its JSON (COCO) or CSV file, one row each, not yet compared with images.

    Returns:
        box_id (text, unique), dicom_id, subject_id (0 where the file does not say), split (as 1.1.0 says it, else ""),
        category, phrase, x, y, w, h (pixels of the original image; NaN where the file has no number), image_width,
        image_height.
    """
    frame = read_form(file, _COCO, _ms_cxr_json) if file.suffix == ".json" else _ms_cxr_csv(file)
    for column in _BOX:
        frame[column] = pd.to_numeric(frame[column], errors="coerce").astype("float64")
    for column in ("dicom_id", "category", "phrase"):
        # JSON's null must not become the phrase "None".
        frame[column] = frame[column].map(
            lambda text: " ".join(text.split()) if isinstance(text, str) else ""
        )
    # Version 1.1.0 names the patient; 1.0.0 only has them in the image's path.
    in_path = pd.to_numeric(frame["path"].astype(str).str.extract(r"/p(\d{8})/", expand=False))
    named = pd.to_numeric(frame["subject_id"], errors="coerce").where(
        lambda number: number.between(1, 99_999_999)
    )
    frame["subject_id"] = named.fillna(in_path).fillna(0).astype("int64")
    return frame.drop(columns="path")


def _ms_cxr_csv(file: Path) -> pd.DataFrame:
    columns = ("dicom_id", "category_name", "label_text", *_BOX)
    frame = read_table(file, columns, other_columns=("path", "subject_id", "split"))
    frame = frame.rename(columns={"category_name": "category", "label_text": "phrase"})
    frame["box_id"] = [f"row {row} {dicom_id}" for row, dicom_id in enumerate(frame["dicom_id"], start=1)]
    return frame.assign(**{name: "" for name in ("path", "subject_id", "split") if name not in frame})


def _ms_cxr_json(content: Any) -> pd.DataFrame:
    images = {image["id"]: image for image in content["images"]}
    categories = {category["id"]: category["name"] for category in content["categories"]}
    rows = []
    for box in content["annotations"]:
        image, (x, y, w, h) = images[box["image_id"]], box["bbox"]
        dicom_id = Path(image["file_name"]).stem
        rows.append(
            {
                "box_id": f"annotation {box['id']} {dicom_id}",
                "dicom_id": dicom_id,
                "path": image.get("path", ""),
                "subject_id": image.get("subject_id", ""),
                "split": str(image.get("split") or box.get("split") or ""),
                "category": categories[box["category_id"]],
                "phrase": box["label_text"],
                **dict(zip(_BOX, (x, y, w, h, image["width"], image["height"]), strict=True)),
            }
        )
    columns = ("box_id", "dicom_id", "path", "subject_id", "split", "category", "phrase", *_BOX)
    return pd.DataFrame(rows, columns=list(columns))


def truth_files(folder: Path) -> list[Path]:
    """The files of the phantom's truth below a release, for real releases none."""
    truth = folder / "phantom_truth"
    names = ("phantom.json", "sentences.csv", "classes.csv", "image_classes.csv")
    return [truth / name for name in names] if truth.is_dir() else []


def phantom_rates(folder: Path) -> dict[str, Any]:
    """Options by which a phantom's rates are not the catalogue's, as its marker names them; {} for all others."""
    file = folder / "phantom_truth" / "phantom.json"
    if not file.is_file():
        return {}
    marker = read_json(file, "generate the phantom again")
    return {name: marker[name] for name in ("false_negatives", "rare_findings") if name in marker}


def read_truth(folder: Path) -> dict[str, pd.DataFrame] | None:
    """The true classes of the phantom's images and sentences; None for a real release.

    Returns:
        "sentences" (text, class_id), "classes" (class_id, rho, sentence_share), "image_classes" (dicom_id, class_id).
    """
    columns = {
        "sentences": {"text": "object", "class_id": "int64"},
        "classes": {"class_id": "int64", "rho": "float64", "sentence_share": "float64"},
        "image_classes": {"dicom_id": "object", "class_id": "int64"},
    }
    files = truth_files(folder)[1:]
    found = {file.stem: read_table(file, columns[file.stem]).astype(columns[file.stem]) for file in files}
    return found or None
