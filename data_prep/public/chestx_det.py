"""ChestX-Det (Lian et al., arXiv 2104.10326): boxes and polygons of 13 findings on images of NIH under other names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image, ImageDraw

from data_prep.public.tables import (
    BOX,
    MASK,
    PublicTables,
    ReleaseFolder,
    image_id,
    in_common,
    listed,
    run_lengths,
    text_of,
)
from data_prep.sources.releases import ReleaseError

FINDINGS = (
    *(
        "Atelectasis",
        "Calcification",
        "Cardiomegaly",
        "Consolidation",
        "Diffuse Nodule",
        "Effusion",
        "Emphysema",
    ),
    *("Fibrosis", "Fracture", "Mass", "Nodule", "Pleural Thickening", "Pneumothorax"),
)
SIDE = 1024


def read(folder: ReleaseFolder) -> PublicTables:
    """ChestX_Det_train.json and ChestX_Det_test.json, either of which may be missing."""
    files = {split: folder.optional(f"ChestX_Det_{split}.json") for split in ("train", "test")}
    given = {split: file for split, file in files.items() if file is not None}
    if not given:
        folder.table("ChestX_Det_train.json", "ChestX_Det_test.json")
    images, boxes, masks = [], [], []
    for split, file in given.items():
        for record in _records(file):
            image = image_id(record["file_name"])
            images.append((image, split, record["syms"]))
            regions = zip(
                record["syms"], record["boxes"], record.get("polygons", record["boxes"]), strict=True
            )
            for finding, (x1, y1, x2, y2), polygon in regions:
                region = (image, finding, "")
                boxes.append((*region, x1, y1, x2 - x1, y2 - y1, SIDE, SIDE))
                if "polygons" in record:
                    masks.append((*region, SIDE, SIDE, _filled(polygon)))
    table = pd.DataFrame(images, columns=["image", "split", "found"])
    labels, choices = listed(table["image"], table["found"], FINDINGS)
    tables = [pd.DataFrame(boxes, columns=BOX), pd.DataFrame(masks, columns=MASK)]
    drawn, filled = (rows.assign(category=in_common(rows["category"])) for rows in tables)
    people = dict.fromkeys(("view", "sex", "age"), "")
    return PublicTables(
        title="ChestX-Det",
        files=list(given.values()),
        images=table.assign(patient=table["image"], study=table["image"], **people)
        .drop(columns="found")
        .join(labels),
        boxes=drawn,
        masks=filled if masks else None,
        choices=[*choices, "labels: a finding that is not listed counts as absent (choice)"],
        names_patients=False,
        images_of=("NIH ChestX-ray14",),
    )


def _records(file: Path) -> list[Mapping[str, Any]]:
    try:
        records = json.loads(text_of(file))
        for record in records:
            lengths = {len(record[name]) for name in ("syms", "boxes", "polygons") if name in record}
            if len(lengths) != 1 or any(len(box) != 4 for box in record["boxes"]):
                raise ValueError(f"{record['file_name']}: not one box and one polygon for each of syms")
            if not isinstance(record["file_name"], str) or not all(
                isinstance(s, str) for s in record["syms"]
            ):
                raise ValueError(f"{record['file_name']!r}: a name that is no text")
            np.asarray(record["boxes"], dtype="float64")
            for polygon in record.get("polygons", ()):
                if np.asarray(polygon, dtype="float64").shape != (len(polygon), 2) or len(polygon) < 2:
                    raise ValueError(f"{record['file_name']}: a polygon that is not a list of points")
        return list(records)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReleaseError(
            f"{file}: expected records of file_name, syms, boxes and polygons, found another form ({error})"
        ) from error


def _filled(polygon: Any) -> list[int]:
    """Run lengths of a filled polygon, its outline included."""
    picture = Image.new("1", (SIDE, SIDE))
    ImageDraw.Draw(picture).polygon([tuple(point) for point in polygon], fill=1, outline=1)
    return run_lengths(np.asarray(picture))
