"""CheXpert (Irvin et al., AAAI 2019) and masks of CheXlocalize (Saporta et al., Nature Machine Intelligence 2022)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd

from data_prep.public.tables import (
    MASK,
    PublicTables,
    ReleaseFolder,
    in_common,
    read_csv,
    renamed,
    text_of,
    uncompressed,
    with_numbers,
)
from data_prep.sources.releases import ReleaseError
from medclip_dcl.common.findings import CHEXPERT

_TABLES = {
    "train": ("train.csv",),
    "validate": ("valid.csv", "val_labels.csv"),
    "test": ("test.csv", "test_labels.csv", "groundtruth.csv"),
}
_MASKS = ("gt_segmentations_val.json", "gt_segmentations_test.json")
_ID = re.compile(r"(patient\d+)/(study\d+)/(view\d+_[a-z]+)(?:\.\w+)?$")


def read(folder: ReleaseFolder) -> PublicTables:
    """train.csv, valid.csv; of CheXlocalize val_labels.csv, test_labels.csv and gt_segmentations_*.json."""
    files = {
        split: found for split, names in _TABLES.items() if (found := folder.optional(*names)) is not None
    }
    if not files:
        folder.table("train.csv", "valid.csv", "test_labels.csv")
    parts = [_images(file, split) for split, file in files.items()]
    images = pd.concat(parts, ignore_index=True)
    is_frontal = images["view"].isin(("AP", "PA", "FRONTAL"))
    choices = [
        "labels of train: mined from reports, -1 uncertain, empty not labelled; of validate and test: by radiologists"
    ]
    masks, mask_files = [], [found for name in _MASKS if (found := folder.optional(name)) is not None]
    for file in mask_files:
        masks.append(_masks(file))
    return PublicTables(
        title="CheXpert",
        files=[*files.values(), *mask_files],
        images=images,
        masks=pd.concat(masks, ignore_index=True) if masks else None,
        left_out=dict.fromkeys(images.loc[~is_frontal, "image"], "its view is not frontal"),
        choices=choices,
    )


def name_of(file: Path) -> str:
    """Image id of a file of the release: patient00001_study1_view1_frontal, as CheXlocalize has it."""
    return _id(file.as_posix())


def _id(path: str) -> str:
    found = _ID.search(path)
    return "_".join(found.groups()) if found else path


def _images(file: Path, split: str) -> pd.DataFrame:
    table = read_csv(
        file, ("Path",), (*CHEXPERT, "Sex", "Age", "Frontal/Lateral", "AP/PA", "Airspace Opacity")
    )
    given = [name for name in table if name in (*CHEXPERT, "Airspace Opacity")]
    if not given:
        raise ReleaseError(
            f"{file}: expected CheXpert's columns of findings, found {', '.join(table.columns)}"
        )
    image = table["Path"].map(_id)
    if (wrong := ~image.str.contains(r"^patient\d+_study")).any():
        raise ReleaseError(
            f"{file}, column Path: expected .../patient00001/study1/view1_frontal.jpg, found "
            f"{table.loc[wrong, 'Path'].iloc[0][:80]!r}"
        )
    labels, _ = renamed(with_numbers(table, given, file)[given])
    if not labels.isin((1.0, 0.0, -1.0)).where(labels.notna(), True).all(axis=None):
        raise ReleaseError(f"{file}: expected labels of 1, 0, -1 or empty, found others; download it again")
    parts = image.str.split("_")
    # test_labels.csv of CheXlocalize names neither view nor patient's sex and age: the path says frontal or lateral.
    is_frontal = image.str.endswith("_frontal")
    projection = table.get("AP/PA", pd.Series("", index=table.index))
    rows: dict[str, Any] = {
        "image": image,
        "patient": parts.str[0],
        "study": parts.str[0] + "_" + parts.str[1],
        "view": projection.where(projection.isin(("AP", "PA")), "FRONTAL").where(is_frontal, "LATERAL"),
        "split": split,
        "sex": table.get("Sex", ""),
        "age": table.get("Age", ""),
    }
    return pd.DataFrame(rows).join(labels)


def _masks(file: Path) -> pd.DataFrame:
    """A mask for each image and category; one without any pixel inside says that the finding is absent."""
    try:
        content = json.loads(text_of(file))
        rows = [
            (image, category, "", *mask["size"], uncompressed(mask["counts"]))
            for image, of_image in content.items()
            for category, mask in of_image.items()
        ]
        for image, category, _, height, width, counts in rows:
            if min(height, width) < 1 or sum(counts) != height * width:
                raise ValueError(f"{image}, {category}: the runs do not fill a mask of {height} x {width}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReleaseError(
            f"{file}: expected image -> category -> size and counts (compressed COCO), found another form ({error})"
        ) from error
    masks = pd.DataFrame(rows, columns=MASK)
    return masks.assign(category=in_common(masks["category"]))
