"""Prepare a public set with labels, boxes or masks, of which few have reports."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import pandas as pd

from data_prep.options import PrepareReports, Public
from data_prep.public import chestx_det, chexpert, nih, padchest, rsna, siim, vindr
from data_prep.public.chexpert_plus import read as read_chexpert_plus
from data_prep.public.padchest_gr import read as read_padchest_gr
from data_prep.public.release_tables import PublicTables, ReleaseFolder
from data_prep.public.rexgradient import read as read_rexgradient
from data_prep.sources import preparation
from data_prep.sources.growth import files_of_set
from data_prep.sources.preparation import Source
from data_prep.sources.rows import NO_REPORT, TEXTS, TableCheck, label_columns, rows_source
from data_prep.sources.splits import draw_split
from data_prep.text.reports import cut_sentences
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import PromptEnsembles, read_prompts
from medclip_dcl.common.packaged import find_configuration

READERS = {
    "nih": nih.read,
    "nih_relabelled": nih.read_relabels,
    "chexpert": chexpert.read,
    "rsna": rsna.read,
    "vindr": vindr.read,
    "siim": siim.read,
    "padchest": padchest.read,
    "chestx_det": chestx_det.read,
    "padchest_gr": read_padchest_gr,
    "chexpert_plus": read_chexpert_plus,
    "rexgradient": read_rexgradient,
}
_OPTIONS = {"language": "padchest_gr", "unknown_views": "rexgradient"}  # the only set that has it


@dataclass(frozen=True, kw_only=True)
class _WithReports(Public, PrepareReports):
    """Sentences are cut from reports, or templates read like these."""


def prepare(settings: Public) -> None:
    """Prepare a set, finish a broken one, or say that it is finished."""
    folder = ReleaseFolder(settings.source)
    own = {option: getattr(settings, option) for option, name in _OPTIONS.items() if name == settings.name}
    for option in _OPTIONS.keys() - own.keys():
        if getattr(settings, option) != getattr(Public, option):
            raise UserError(f"--{option}: only for {_OPTIONS[option]}, not {settings.name}; leave it out")
    tables = READERS[settings.name](folder, **own)
    files = [*dict.fromkeys(folder.taken)]
    if settings.official_validate_as_test:
        if {*tables.rows["split"]} != {"train", "validate"}:
            raise UserError("--official_validate_as_test: the release has other parts; leave it out")
        tables = replace(tables, images=tables.images.replace({"split": {"validate": "test"}}))
        settings = replace(settings, split_shares=settings.split_shares or (0.99, 0.01, 0.0))
    if {*tables.rows["split"]} == {"train"}:  # such as Kaggle's VinDr-CXR, whose test images have no labels
        tables = replace(tables, images=tables.images.assign(split=""))
    splits = set(tables.rows["split"])
    if settings.redraw_test and "test" not in splits:
        raise UserError("--redraw_test: the tables have no official test patients; leave it out")
    # Split whose patients are drawn: "" where none is official, None for no draw. By the tables: a part of the images
    # may lack a split that is official.
    can_draw = "train" in splits and "validate" not in splits and sum(settings.shares[:2]) > 0
    drawn = "" if splits == {""} else "test" if settings.redraw_test else "train" if can_draw else None
    if drawn is None and (settings.split_shares is not None or settings.split_seed is not None):
        raise UserError("--split_shares and --split_seed: the split is official; leave them out")
    choices = [*tables.choices]
    if drawn is not None:
        shares = ", ".join(f"{share:.3g}" for share in _shares(settings, drawn))
        by = f"drawn by {shares}, seed {settings.seed} (choice)"
        choices.append(f"split: {_DRAWN[drawn]} {by}")
    if not tables.names_patients:
        choices.append(
            "patients: the release names none; each image counts as one, and intervals are by image"
        )
    templates = settings.templates
    if templates is not None:  # a packaged one has a name
        templates = find_configuration(str(templates), "prompts", "--templates").path
    if settings.reports:
        if templates is not None or "report" not in tables.images:
            raise UserError("--reports: expected padchest with a column Report, and no --templates")
        tables = replace(tables, images=tables.images.rename(columns={"report": "text"}))
    has_texts = bool({*TEXTS} & {*tables.images})
    if templates is not None:
        if has_texts or tables.sentences is not None:
            raise UserError(f"--templates: {settings.name} has reports; leave it out")
        tables = _with_sentences(tables, read_prompts(templates, "--templates"))
        choices.append(f"sentences: none of reports, but templates of the labels ({templates.name})")
    if templates is not None or has_texts:
        settings = _WithReports(**vars(settings))
    for choice in choices:
        print(f"{tables.title}: {choice}", file=sys.stderr)
    options = {
        "split": {"official": splits != {""}, "shares": list(settings.shares), "seed": settings.seed},
        "redraw_test": settings.redraw_test,
        **preparation.given(settings, "official_validate_as_test"),
        **own,
        **({"reports": True, "language": tables.language} if settings.reports else {}),
        "choices": choices,
        "names_patients": tables.names_patients,
        "images_of": list(tables.images_of),
    }
    files += [] if templates is None else [templates]
    made_from = preparation.made_from(settings, tables.title, False, files, options)
    preparation.prepare_set(settings, made_from, lambda: _source(settings, folder, tables, drawn))
    if splits == {"train", "validate"}:
        print(
            "no official test images: --official_validate_as_test, to another --output, takes those of validate"
        )


def _with_sentences(tables: PublicTables, prompts: PromptEnsembles) -> PublicTables:
    """The tables with a sentence for each label of an image that has prompts, as its findings."""
    labels = tables.images[[finding for finding in label_columns(tables.images) if finding in prompts]]
    if labels.empty:
        raise UserError(
            f"--templates: expected prompts of {', '.join(label_columns(tables.images))}, found none"
        )
    said = pd.Series("", index=labels.index)
    for finding in map(str, labels):
        negative, positive = prompts[finding]
        said += labels[finding].map({1.0: f"{positive[0]}. ", 0.0: f"{negative[0]}. "}).fillna("")
    return replace(tables, images=tables.images.assign(findings=said.str.strip()))


_DRAWN = {
    "": "no test part is official; train, validate and test patients are",
    "test": "not the official one: the official test patients are, anew for train, validate and test,",
    "train": "official, but validate patients are, from those of train,",
}


def _source(settings: Public, folder: ReleaseFolder, tables: PublicTables, drawn: str | None) -> Source:
    """Find the images, complete the split, and pass boxes and masks on."""
    rows = tables.rows
    is_used = ~rows["image"].isin(tables.left_out)
    kept = {
        path.removesuffix(".jpg"): folder.folder / name
        for path, name in files_of_set(settings.output).items()
    }
    found = kept | folder.images(rows.loc[is_used, "image"], tables.other_endings)
    is_there = rows["image"].isin(found)
    counts = {
        "images_in_release": len(rows),
        "images_not_frontal": sum("not frontal" in reason for reason in tables.left_out.values()),
        "images_not_there": int((is_used & ~is_there).sum()),
    }
    print(
        f"{tables.title}: {len(rows):,} images in the table, {len(tables.left_out):,} left out by it, "
        f"{counts['images_not_there']:,} without a file below {folder.folder}",
        file=sys.stderr,
    )
    if not is_used.any():
        first = rows["image"].iloc[0]
        raise UserError(f"{folder.taken[0]}: all images are left out; {first}: {tables.left_out[first]}")
    if not is_there.any():
        raise UserError(
            f"--source {folder.folder}: expected image files by the names of the table, such as "
            f"{rows['image'].iloc[0]}, found none"
        )
    rows = rows[is_there].reset_index(drop=True)
    rows = rows.assign(file=rows["image"].map(found).map(str), split=_splits(rows, settings, drawn))
    if texts := [name for name in TEXTS if name in rows]:
        reason = "its report is empty" if settings.templates is None else "it has no label with a prompt"
        rows[NO_REPORT] = (rows[texts] == "").all(axis=1).map({True: reason, False: ""})
    check = TableCheck(folder.taken[0])
    check.rejects += [("image", image, reason) for image, reason in tables.left_out.items()]
    source = rows_source(rows, settings, check, counts)
    for kind, regions in (("boxes", tables.boxes), ("masks", tables.masks)):
        if regions is not None and (n_others := int((~regions["image"].isin(tables.rows["image"])).sum())):
            print(
                f"{tables.title}: {kind} of images that the table does not have: {n_others:,}",
                file=sys.stderr,
            )
    boxes, masks = (
        None
        if regions is None
        else regions[regions["image"].isin(source.images["dicom_id"])].rename(columns={"image": "dicom_id"})
        for regions in (tables.boxes, tables.masks)
    )
    if boxes is not None:
        is_dicom = boxes["dicom_id"].map(lambda image: found[image].suffix.lower() in (".dcm", ".dicom"))
        if (boxes["image_width"].isna() & ~is_dicom.astype(bool)).any():
            raise UserError(
                f"{tables.title}: boxes are in pixels of the DICOM files; for pictures add a table of the DICOM files' "
                "sizes, sizes.csv: image_id, width, height"
            )
        box_id = [f"{row} {image}" for row, image in zip(boxes.index, boxes["dicom_id"], strict=True)]
        boxes = boxes.assign(box_id=box_id).reset_index(drop=True)
    if masks is not None:
        counts_text = masks["counts"].map(lambda runs: " ".join(map(str, runs)))
        masks = masks.assign(phrase="", reader="", counts=counts_text).reset_index(drop=True)
    if tables.sentences is not None:
        study_of = zip(source.images["dicom_id"], source.images["study_id"], strict=True)
        of_study = {study: tables.sentences.get(image, ()) for image, study in study_of}
        source = replace(source, reports=cut_sentences(of_study, tables.language))
    return replace(source, boxes=boxes, masks=masks, language=tables.language if settings.reports else "en")


def _splits(rows: pd.DataFrame, settings: Public, drawn: str | None) -> pd.Series:
    """The official split, with the patients of `drawn` drawn anew; "" where all is drawn later."""
    split = rows["split"]
    if not drawn:
        return split
    return split.mask(split == drawn, draw_split(rows["patient"], _shares(settings, drawn), settings.seed))


def _shares(settings: Public, drawn: str) -> tuple[float, float, float]:
    """Shares of train, validate and test among the patients that are drawn: those of train alone give no test."""
    train, validate, _ = settings.shares
    n = train + validate
    return (train / n, validate / n, 0.0) if drawn == "train" else settings.shares
