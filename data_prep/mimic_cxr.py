"""Prepare MIMIC-CXR-JPG, or anything in its layout (the digital phantom), for training and evaluation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from data_prep.options import MimicCxr
from data_prep.sources import preparation, releases, set_tables
from data_prep.sources.people import with_patients
from data_prep.sources.preparation import Source
from data_prep.sources.rows import SPLIT_NAMES
from data_prep.sources.source_tables import FRONTAL_VIEWS, SPLITS, require
from data_prep.sources.spellings import find_files
from data_prep.text.reports import find_reports, no_reports, report_places
from medclip_dcl.common.errors import UserError


def prepare(settings: MimicCxr) -> None:
    """Prepare a set, finish a broken one, or say that it is finished."""
    release = releases.find_release(settings.source, settings.labels)
    truth, rates = releases.truth_files(settings.source), releases.phantom_rates(settings.source)
    if settings.ms_cxr_split is not None and settings.ms_cxr is None:
        raise UserError("--ms_cxr_split: expected the file of the boxes, --ms_cxr, found none; add it")
    radiologist = releases.radiologist_table(settings.source) if settings.test_labels is not None else None
    given = [file for file in (settings.ms_cxr, settings.patients, radiologist) if file is not None]
    made_from = preparation.made_from(
        settings,
        f"digital phantom in the layout of {release.name}" if truth else release.name,
        bool(truth),
        [release.metadata, release.split, release.labels, *truth, *given],
        {
            "labels": settings.labels,
            "views": list(FRONTAL_VIEWS),
            "ms_cxr": settings.ms_cxr.name if settings.ms_cxr is not None else None,
            "subset": sorted({*settings.subset}) if settings.subset is not None else None,
            **({"patients": settings.patients.name} if settings.patients is not None else {}),
            **({"phantom": rates} if rates else {}),
            **preparation.given(settings, "resized", "ms_cxr_split", "test_labels"),
        },
    )
    preparation.prepare_set(settings, made_from, lambda: _read(settings, release, radiologist))


def _read(settings: MimicCxr, release: releases.Release, radiologist: Path | None) -> Source:
    images = releases.read_images(release)
    boxes = releases.read_ms_cxr(settings.ms_cxr) if settings.ms_cxr is not None else None
    grounding: frozenset[int] = frozenset()
    if boxes is not None:
        # Every patient of the file, also those whose boxes cannot be used.
        of_images = images.loc[images["dicom_id"].isin(boxes["dicom_id"]), "subject_id"]
        grounding = frozenset([*boxes["subject_id"], *of_images])
        boxes["view"] = boxes["dicom_id"].map(images.set_index("dicom_id")["view"])
        if boxes["view"].isna().all():
            raise UserError(f"{settings.ms_cxr}: none of its images is among those of {release.metadata}")
    counts = _release_counts(images, boxes)
    if boxes is not None:
        of_split = _of_split(boxes, settings)
        if settings.ms_cxr_split is not None:
            counts["boxes_of_other_splits"] = len(boxes) - len(of_split)
        boxes = of_split
    wanted = _subset(images, settings.subset, release)
    frontal = wanted[wanted["view"].isin(FRONTAL_VIEWS)].reset_index(drop=True)
    if frontal.empty:
        raise UserError(f"{release.metadata}: none of {len(wanted):,} images is frontal (AP or PA)")
    if settings.patients is not None:
        frontal = with_patients(frontal, settings.patients)
        if "age" not in frontal:
            print(f"note: {release.metadata} has no StudyDate: no age at the study", file=sys.stderr)
    use = set_tables.decide_use(frontal, grounding, (), ())
    # Before hours of image work; final uses only leave out images. Patients may be in both test and grounding.
    purposes = use.replace("grounding", "test").groupby(frontal["subject_id"]).transform("nunique")
    require(frontal["subject_id"], purposes == 1, "patients in one split", release.split)
    taken = preparation.take_patients(frontal, settings.limit, use)
    if settings.limit is not None:
        wanted = wanted[wanted["subject_id"].isin(taken["subject_id"])]
    if boxes is not None and len(wanted) < len(images):
        # Boxes of images outside the subset are not rejects.
        outside = boxes["view"].notna() & ~boxes["dicom_id"].isin(wanted["dicom_id"])
        counts["boxes_outside_subset"] = int(outside.sum())
        boxes = boxes[~outside]
    _note_unused_boxes(settings)
    labels = releases.read_labels(release)
    if radiologist is not None:
        tested = images.loc[images["official_split"] == "test", "study_id"]
        labels = releases.with_radiologist(labels, radiologist, tested)
    places = report_places(settings.source, settings.reports)
    reports = {
        study: f"p{subject // 1_000_000}/p{subject}/s{study}.txt"
        for study, subject in zip(taken["study_id"].tolist(), taken["subject_id"].tolist(), strict=True)
    }
    files = find_files(taken["path"], settings.source)
    if (is_dicom := files.str.endswith(".dcm")).any():
        raise UserError(
            f"--source {settings.source}: expected the JPEG files of MIMIC-CXR-JPG, found DICOM files for "
            f"{is_dicom.sum():,} of {len(files):,} images (first: {files[is_dicom].iloc[0]}): MIMIC-CXR itself, with "
            "other grey levels; download MIMIC-CXR-JPG"
        )
    return Source(
        images=taken.assign(file=files),
        reports=find_reports(reports, places),
        n_reports=len(reports),
        no_reports=no_reports(reports, places),
        labels=labels,
        boxes=boxes,
        resized=settings.resized,
        grounding_patients=grounding,
        truth=releases.read_truth(settings.source),
        counts={**counts, "images_in_release": len(wanted), "images_not_frontal": len(wanted) - len(taken)},
    )


def _release_counts(images: pd.DataFrame, boxes: pd.DataFrame | None) -> dict[str, Any]:
    """Counts of the whole release; `medclip-dcl check` compares them with the published ones."""
    counts: dict[str, Any] = {
        "release": {
            "images": len(images),
            "studies": int(images["study_id"].nunique()),
            "patients": int(images["subject_id"].nunique()),
            **{split: int((images["official_split"] == split).sum()) for split in SPLITS},
        }
    }
    if boxes is not None:
        counts["ms_cxr"] = {
            "boxes": len(boxes),
            "images": int(boxes["dicom_id"].nunique()),
            "image_sentence_pairs": len(boxes[["dicom_id", "phrase"]].drop_duplicates()),
        }
    return counts


def _of_split(boxes: pd.DataFrame, settings: MimicCxr) -> pd.DataFrame:
    """The boxes to evaluate, by MS-CXR's own split; without the option all, with a note if there is one."""
    split = boxes["split"].str.strip().str.lower().map(SPLIT_NAMES)
    wanted = SPLIT_NAMES.get(settings.ms_cxr_split or "")
    found = ", ".join(f"{name or 'none'} {n:,}" for name, n in boxes["split"].value_counts().items())
    if wanted is None and (boxes["split"] != "").any():
        print(
            f"note: {settings.ms_cxr}: its split ({found} boxes) is not used: all boxes are evaluated; choose some by "
            "--ms_cxr_split",
            file=sys.stderr,
        )
    if wanted is not None and (split.isna().any() or not (split == wanted).any()):
        raise UserError(
            f"--ms_cxr_split {settings.ms_cxr_split}: expected train, val or test in the column split of "
            f"{settings.ms_cxr}, which version 1.1.0 has, and boxes of it, found {found}; take that version, or leave "
            "the option out"
        )
    return boxes if wanted is None else boxes[split == wanted]


def _subset(images: pd.DataFrame, subset: Sequence[str] | None, release: releases.Release) -> pd.DataFrame:
    if subset is None:
        return images
    folder = "p" + (images["subject_id"] // 1_000_000).astype(str)
    if missing := sorted(set(subset) - set(folder)):
        raise UserError(
            f"--subset: {release.metadata} has no patient in {', '.join(missing)}; its folders are "
            f"{', '.join(sorted(set(folder)))}"
        )
    return images[folder.isin(list(subset))].reset_index(drop=True)


def _note_unused_boxes(settings: MimicCxr) -> None:
    unused = sorted(settings.source.glob("MS_CXR_Local_Alignment*"))
    if settings.ms_cxr is None and unused:
        print(
            f"note: {unused[0]} is not used: without --ms_cxr the set has no boxes, and MS-CXR patients may be in "
            "training",
            file=sys.stderr,
        )
