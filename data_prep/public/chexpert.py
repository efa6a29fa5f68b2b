"""CheXpert (Irvin et al., AAAI 2019) and masks of CheXlocalize (Saporta et al., Nature Machine Intelligence 2022)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from data_prep.public.release_tables import MASK, PublicTables, ReleaseFolder, image_id, uncompressed
from data_prep.sources.finding_names import in_common, known_names, renamed
from data_prep.sources.source_tables import labels_of, read_form, read_table
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import CHEXPERT

_TABLES = {
    "train": ("train.csv",),
    "validate": ("valid.csv", "val_labels.csv"),
    "test": ("test.csv", "test_labels.csv"),
}
_MASKS = ("gt_segmentations_val.json", "gt_segmentations_test.json")


def read(folder: ReleaseFolder) -> PublicTables:
    """train.csv, valid.csv; of CheXlocalize val_labels.csv, test_labels.csv and gt_segmentations_*.json."""
    parts = [_images(file, split) for split, file in folder.tables(_TABLES).items()]
    images = pd.concat(parts, ignore_index=True)
    files = [file for name in _MASKS if (file := folder.optional(name)) is not None]
    form = "image -> category -> size and counts (compressed COCO)"
    masks = [read_form(file, form, partial(_masks, file=file)) for file in files]
    return PublicTables(
        title="CheXpert",
        images=images,
        masks=pd.concat(masks, ignore_index=True) if masks else None,
        left_out=dict.fromkeys(images.loc[images["view"] == "LATERAL", "image"], "its view is not frontal"),
        choices=[
            "labels of train: mined from reports, -1 uncertain, empty not labelled; of validate and test: by "
            "radiologists",
            *(
                f"labels of {part['split'].iloc[0]}: none of {', '.join(lost)}, which its table does not have"
                for part in parts
                if (lost := [finding for finding in CHEXPERT if finding not in part])
            ),
        ],
    )


def _images(file: Path, split: str) -> pd.DataFrame:
    table = read_table(
        file, ("Path",), (*CHEXPERT, "Sex", "Age", "Frontal/Lateral", "AP/PA", "Airspace Opacity")
    )
    given = [name for name in table if name in (*CHEXPERT, "Airspace Opacity")]
    if not given:
        raise UserError(f"{file}: expected CheXpert's columns of findings, found {', '.join(table.columns)}")
    labels, _ = renamed(table[given].apply(labels_of, file=file))
    return image_rows(table, file).assign(split=split).join(labels)


def image_rows(table: pd.DataFrame, file: Path) -> pd.DataFrame:
    """Image, patient, study, view, sex and age of the rows of a table with a column Path."""
    image = table["Path"].map(image_id)
    if (wrong := ~image.str.contains(r"^patient\d+_study")).any():
        raise UserError(
            f"{file}, column Path: expected .../patient00001/study1/view1_frontal.jpg, found "
            f"{table.loc[wrong, 'Path'].iloc[0][:80]!r}"
        )
    parts = image.str.split("_")
    # test_labels.csv of CheXlocalize names neither view nor patient's sex and age: the path says frontal or lateral.
    is_frontal = image.str.endswith("_frontal")
    projection = table.get("AP/PA", pd.Series("", index=table.index))
    return pd.DataFrame().assign(
        image=image,
        patient=parts.str[0],
        study=parts.str[0] + "_" + parts.str[1],
        view=projection.where(projection.isin(("AP", "PA")), "FRONTAL").where(is_frontal, "LATERAL"),
        sex=table.get("Sex", ""),
        # Of adults: 0 is unknown.
        age=table.get("Age", pd.Series("", index=table.index)).replace(["0", "0.0"], ""),
    )


def _masks(content: Any, file: Path) -> pd.DataFrame:
    """A mask for each image and category; one without any pixel inside says that the finding is absent."""
    rows = [
        (image, category, *mask["size"], uncompressed(mask["counts"]))
        for image, of_image in content.items()
        for category, mask in of_image.items()
    ]
    for image, category, height, width, counts in rows:
        if min(height, width) < 1 or min(counts, default=0) < 0 or sum(counts) != height * width:
            raise ValueError(f"{image}, {category}: the runs do not fill a mask of {height} x {width}")
    masks = pd.DataFrame(rows, columns=MASK)
    return masks.assign(category=in_common(known_names(masks["category"], CHEXPERT, str(file))))
