"""SIIM-ACR Pneumothorax Segmentation: DICOM files and a table of run lengths; part of its images are NIH's."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from data_prep.public.release_tables import MASK, PublicTables, ReleaseFolder
from data_prep.sources.source_tables import OWN_FILE, read_table
from medclip_dcl.common.errors import UserError

FINDING = "Pneumothorax"
SIDE = 1024


def read(folder: ReleaseFolder) -> PublicTables:
    """stage_2_train.csv: ImageId, EncodedPixels ("-1" without pneumothorax); several rows an image.

    train-rle.csv, of the first stage, has its training images alone; torchxrayvision's file is as long as stage 2.
    """
    file = folder.table("stage_2_train.csv", "siim-pneumothorax-train-rle.csv", "train-rle.csv")
    table = read_table(file, ("ImageId", "EncodedPixels")).drop_duplicates()
    is_none = table["EncodedPixels"].isin(("-1", ""))
    drawn = table[~is_none]
    rows = [
        (image, FINDING, SIDE, SIDE, _counts(runs, image, file))
        for image, runs in drawn.itertuples(index=False)
    ]
    images = pd.DataFrame({"image": table["ImageId"].unique()})
    both = set(table.loc[is_none, "ImageId"]) & set(drawn["ImageId"])
    return PublicTables(
        title="SIIM-ACR pneumothorax",
        images=images.assign(**{FINDING: images["image"].isin(drawn["ImageId"]).astype("float64")}),
        masks=pd.DataFrame(rows, columns=MASK),
        left_out=dict.fromkeys(both, "one row has a mask and another one says that there is none"),
        choices=["labels: a mask is a pneumothorax, no mask its absence (choice)"],
        images_of=("NIH ChestX-ray14",),
    )


def _counts(text: str, image: str, file: Path) -> list[int]:
    """COCO run lengths: the table's numbers, each start counted from the end of the run before, and what is left."""
    numbers = [int(number) if number.isdecimal() else -1 for number in text.split()]
    left = SIDE * SIDE - sum(numbers)
    if len(numbers) % 2 or min(numbers, default=-1) < 0 or left < 0:
        raise UserError(
            f"{file}, EncodedPixels of {image[:80]}: expected pairs of a distance from the last run and a length, "
            f"within {SIDE} x {SIDE} pixels; {OWN_FILE}"
        )
    return [*numbers, left] if left else numbers
