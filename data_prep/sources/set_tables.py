"""The tables of a prepared set, from the tables of a release: pure functions, no files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from data_prep.sources.source_tables import FRONTAL_VIEWS
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import CHEX5
from medclip_dcl.data.prepared import SEXES, columns_of, labelled_findings
from medclip_dcl.data.table_checks import USES

Reject = tuple[str, str, str]
"""Kind (image, report, box, mask), id, reason: a row of rejects.csv."""

_CASES = {"yes": 1, "no": 0}
OTHER_SIZE = "drawn on an image of"
"""Beginning of a box's reason: the image of the source is not the one that it was drawn on."""
OF_ITS_IMAGE = "its image "
"""Beginning of a box's reason: its image is not in the set."""
CANNOT_BE_USED = f"{OF_ITS_IMAGE}cannot be used"


def upright_boxes(boxes: pd.DataFrame, images: pd.DataFrame) -> tuple[pd.DataFrame, pd.Series, pd.Series]:
    """Boxes turned with their images, which of them fit either way, and which reach beyond by more than 1% of a side.

    `images` have the size of the upright picture and its Exif orientation. All boxes of one are turned if any fits the
    picture as stored alone: by the image size that the box names, else by where it lies.
    """
    place = boxes[["x", "y", "w", "h", "image_width", "image_height"]].astype("float64")
    turned = place[["y", "x", "h", "w", "image_height", "image_width"]].set_axis(place.columns, axis=1)
    of_image = images.set_index("dicom_id")[["width", "height", "orientation"]]
    wide, high, orientation = (boxes["dicom_id"].map(of_image[name]) for name in of_image)

    def fits(place: pd.DataFrame) -> pd.Series:
        x, y, w, h, width, height = (place[name] for name in place)
        is_whole = (wide / width - high / height).abs() <= 1 / width + 1 / height
        return is_whole.where(width.notna(), (x + w <= 1.01 * wide) & (y + h <= 1.01 * high))

    fits_stored = orientation.between(5, 8) & fits(turned)
    is_turned = (fits_stored & ~fits(place)).groupby(boxes["dicom_id"]).transform("any")
    fits_either_way = fits(place) & (fits_stored | orientation.between(2, 4))
    place = place.mask(is_turned, turned).fillna({"image_width": wide, "image_height": high})
    is_beyond = pd.Series(False, boxes.index)
    for x, w, side, mirrored in (("x", "w", "image_width", (6, 7)), ("y", "h", "image_height", (7, 8))):
        beside = place[side] - place[x] - place[w]
        is_beyond |= np.minimum(place[x], beside) < -0.01 * place[side]
        place[x] = place[x].mask(is_turned & orientation.isin(mirrored), beside)
    return boxes.assign(**place), fits_either_way, is_beyond


def select_boxes(
    boxes: pd.DataFrame, images: pd.DataFrame, resized: str | None
) -> tuple[pd.DataFrame, list[Reject], int]:
    """Boxes that lie on usable frontal images, clipped to them, and a reject for each of the others.

    `boxes` have the views of their images, NaN for one that is not in the release; `images` are the prepared ones, with
    height and width of the source's files in pixels. A box on a resized copy is scaled with it, if the copy kept the
    proportions up to a pixel or `resized` says how it got others. The boxes keep the file's order, except that those of
    one phrase are adjacent. Boxes of a source without phrases have none; those without the size of the image that they
    were drawn on are in its own pixels; those of 1 x 1 are shares. Returns the number of scaled boxes as well.
    """
    # Without the column all are on chosen images.
    view = boxes["view"] if "view" in boxes else pd.Series(FRONTAL_VIEWS[0], index=boxes.index)
    found = boxes.merge(images[["dicom_id", "height", "width"]], on="dicom_id", how="left").set_axis(
        boxes.index
    )
    needs_phrase = "phrase" in found
    if not needs_phrase:
        sides = {f"image_{side}": found[f"image_{side}"].fillna(found[side]) for side in ("width", "height")}
        found = found.assign(phrase="", **sides)
    wide, high = found["width"] / found["image_width"], found["height"] / found["image_height"]
    # Either side may have been rounded by a pixel.
    is_share = (found["image_width"] == 1) & (found["image_height"] == 1)
    is_whole = is_share | ((wide - high).abs() <= 1 / found["image_width"] + 1 / found["image_height"])
    if resized in ("pad", "crop"):
        one = (np.minimum if resized == "pad" else np.maximum)(wide, high)
        wide, high = wide.where(is_whole, one), high.where(is_whole, one)
    x = found["x"] * wide + (found["width"] - found["image_width"] * wide) / 2
    y = found["y"] * high + (found["height"] - found["image_height"] * high) / 2
    left, top = x.clip(lower=0), y.clip(lower=0)
    right = (x + found["w"] * wide).clip(upper=found["width"])
    bottom = (y + found["h"] * high).clip(upper=found["height"])
    has_area = (found["w"] > 0) & (found["h"] > 0) & (left < right) & (top < bottom)
    is_unusable, is_frontal = found["width"].isna(), view.isin(FRONTAL_VIEWS)
    # The first that holds.
    reasons: dict[str, pd.Series] = {
        "its image is not in the release": view.isna(),
        CANNOT_BE_USED: is_unusable & is_frontal,
        "its image is not frontal (view {view})": is_unusable,
        "it has no category or no phrase": (found["category"] == "")
        | (needs_phrase & (found["phrase"] == "")),
        "a coordinate is not a finite number": ~found[["x", "y", "w", "h"]].apply(np.isfinite).all(axis=1),
        f"{OTHER_SIZE} {{image_width:g}} x {{image_height:g}} pixels, the release's image has {{width:g}} x "
        "{height:g} (width x height)": ~(is_whole | (resized is not None)),
        "it has no area within its image": ~has_area,
    }
    found["reason"] = np.select(list(reasons.values()), list(reasons), "")
    found["view"] = view.replace("", "unknown")
    bad = found[found["reason"] != ""].to_dict("records")
    rejects = [("box", str(row["box_id"]), row["reason"].format_map(row)) for row in bad]
    clipped = found.assign(x=left, y=top, w=right - left, h=bottom - top)
    table = typed(clipped[found["reason"] == ""], "boxes")
    # Several boxes of one phrase are one region: they follow the first of them.
    phrase = table.groupby(["dicom_id", "category", "phrase"], sort=False).ngroup()
    is_resized = (found["width"] != found["image_width"]) | (found["height"] != found["image_height"])
    table = table.loc[phrase.sort_values(kind="stable").index].reset_index(drop=True)
    return table, rejects, int((is_resized & ~is_share & (found["reason"] == "")).sum())


def select_masks(masks: pd.DataFrame, images: pd.DataFrame) -> tuple[pd.DataFrame, list[Reject]]:
    """Masks of usable images, and a reject for each of the others; those of no pixel are left out.

    A mask may have another size than its image, if the proportions are the same up to a pixel.
    """
    found = masks.merge(images[["dicom_id", "height", "width"]], "left", "dicom_id", suffixes=("", "_image"))
    wide, high = found["width_image"] / found["width"], found["height_image"] / found["height"]
    is_whole = (wide - high).abs() <= 1 / found["width"] + 1 / found["height"]
    reason = (
        f"{OTHER_SIZE} " + found["width"].astype("str") + " x " + found["height"].astype("str") + " pixels"
    )
    found["reason"] = reason.mask(found["width_image"].isna(), CANNOT_BE_USED)
    bad = found.loc[~is_whole, ["dicom_id", "category", "reason"]].to_numpy().tolist()
    rejects = [("mask", f"{dicom_id} {category}", reason) for dicom_id, category, reason in bad]
    has_pixels = found["counts"].map(lambda runs: any(map(int, runs.split()[1::2]))).astype(bool)
    return typed(found[is_whole & has_pixels], "masks"), rejects


def decide_use(
    images: pd.DataFrame,
    grounding_patients: Collection[int],
    boxed_images: Collection[str],
    studies_without_text: Collection[int],
) -> pd.Series:
    """The use of each image, given the numbers of patients and studies, and the images in the table "boxes".

    A patient of the MS-CXR file is `grounding` regardless of the official split, except that an image of the official
    test split which carries no box stays `test`. An image without any sentence is `excluded`, unless it carries a box
    (grounding needs the box's phrase only). The rest follow the official split.
    """
    use = images["official_split"].copy()
    has_box = images["dicom_id"].isin(list(boxed_images))
    is_grounding = images["subject_id"].isin(list(grounding_patients))
    use[is_grounding & ((images["official_split"] != "test") | has_box)] = "grounding"
    use[images["study_id"].isin(list(studies_without_text)) & ~has_box] = "excluded"
    return use.rename("use")


def study_labels(images: pd.DataFrame, labels: pd.DataFrame) -> pd.DataFrame:
    """One row of labels for each study of the images, empty where the release has none."""
    studies = pd.DataFrame({"study_id": sorted(set(images["study_id"]))}, dtype="int64")
    return typed(studies.merge(labels, on="study_id", how="left"), "labels")


def sentence_tables(sentences: Mapping[int, Sequence[tuple[str, str]]]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The tables "sentences", numbered by their text, and "reports" from study_id -> (section, sentence) in order."""
    rows = [
        (study_id, section, position, text)
        for study_id in sorted(sentences)
        for position, (section, text) in enumerate(sentences[study_id])
    ]
    reports = pd.DataFrame(rows, columns=["study_id", "section", "position", "text"])
    texts = sorted(set(reports["text"]))
    reports["sentence_id"] = reports["text"].map({text: number for number, text in enumerate(texts)})
    n_reports = reports.groupby("text")["study_id"].nunique()
    distinct = pd.DataFrame(
        {"sentence_id": range(len(texts)), "text": texts, "n_reports": n_reports.reindex(texts).to_numpy()}
    )
    return typed(distinct, "sentences"), typed(reports, "reports")


def class_tables(
    truth: Mapping[str, pd.DataFrame], sentences: pd.DataFrame, images: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The phantom's truth, by the numbers of this set: tables "classes" and "image_classes"."""
    known = truth["sentences"].drop_duplicates()
    classes = sentences.merge(known, on="text", how="left").merge(truth["classes"], on="class_id", how="left")
    unknown = classes[classes["rho"].isna()]
    if len(unknown):
        raise UserError(
            f"phantom_truth: {len(unknown):,} of {len(sentences):,} sentences have no known class (first: "
            f"{unknown['text'].iloc[0]!r}); the truth belongs to another phantom, or the reports were cut into other "
            "sentences than those that the phantom wrote: generate it again"
        )
    image_classes = truth["image_classes"]
    image_classes = image_classes[image_classes["dicom_id"].isin(images["dicom_id"])]
    return typed(classes, "classes"), typed(
        image_classes.sort_values(["dicom_id", "class_id"]), "image_classes"
    )


def count(written: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    """Numbers that describe a set, for dataset.json and for the user."""
    images = written["images"]
    reports = written.get("reports", pd.DataFrame(columns=["study_id", "section"]))
    people = written.get("studies", images)
    cases = written["cases"].groupby(["use", "finding", "label"]).size()
    findings = dict.fromkeys([*CHEX5, *labelled_findings(written["labels"])])
    studies_by_use, images_by_use = (
        {use: int((frame["use"] == use).sum()) for use in USES} for frame in (people, images)
    )
    return {
        **({"studies_by_use": studies_by_use} if "studies" in written else {}),
        "images": len(images),
        "images_by_use": images_by_use,
        "patients": int(people["subject_id"].nunique()),
        **({"images_by_sex": {s: int((images["sex"] == s).sum()) for s in SEXES}} if "sex" in images else {}),
        **({"images_without_age": int(images["age"].isna().sum())} if "age" in images else {}),
        "patients_grounding": int(images.loc[images["use"] == "grounding", "subject_id"].nunique()),
        "studies": int(people["study_id"].nunique()),
        "reports": int(reports["study_id"].nunique()),
        "reports_by_section": {
            str(section): int(studies.nunique())
            for section, studies in reports.groupby("section")["study_id"]
        },
        "report_sentences": len(reports),
        "sentences": len(written.get("sentences", ())),
        "boxes": len(written["boxes"]) if "boxes" in written else 0,
        **({"masks": len(written["masks"])} if "masks" in written else {}),
        "cases": {
            use: {
                finding: {name: int(cases.get((use, finding, label), 0)) for name, label in _CASES.items()}
                for finding in findings
            }
            for use in ("validate", "test")
        },
    }


def typed(frame: pd.DataFrame, table: str) -> pd.DataFrame:
    """The frame with exactly the columns and types that the format has for a table, rows counted from 0.

    All columns of "labels" stay: they are findings. Of the optional columns those stay that the frame has.
    """
    columns = columns_of(table, frame)
    types = {name: "object" if kind == "str" else kind for name, kind in columns.items()}
    return frame[list(columns)].astype(types).reset_index(drop=True)
