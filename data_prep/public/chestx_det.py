"""ChestX-Det (Lian et al., arXiv 2104.10326): boxes and polygons of 13 findings on images of NIH under other names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from PIL import Image, ImageDraw

from data_prep.public.release_tables import BOX, MASK, PublicTables, ReleaseFolder, image_id, run_lengths
from data_prep.sources.finding_names import in_common, is_list_of_names, known_names, listed, names_of
from data_prep.sources.source_tables import OWN_FILE, read_form
from medclip_dcl.common.errors import UserError

FINDINGS = names_of("ChestX-Det")
SIDE = 1024


def read(folder: ReleaseFolder) -> PublicTables:
    """ChestX_Det_train.json and ChestX_Det_test.json, either of which may be missing."""
    names = {split: [f"ChestX_Det_{split}.json"] for split in ("train", "test")}
    form = "records of file_name, syms, boxes and polygons"
    tables = folder.tables(names)
    parts = {split: read_form(file, form, _read) for split, file in tables.items()}
    images = pd.concat(
        [images.assign(split=split) for split, (images, _) in parts.items()], ignore_index=True
    )
    regions = pd.concat([regions for _, regions in parts.values()], ignore_index=True)
    where = f"{' and '.join(map(str, tables.values()))}, syms"
    named = known_names(images["syms"], FINDINGS, where)
    if named.empty:
        raise UserError(f"{where}: expected findings, found empty lists alone; {OWN_FILE}")
    labels, choices = listed(named, len(images), FINDINGS)
    regions["category"] = in_common(known_names(regions["category"], FINDINGS, where)).to_numpy()
    return PublicTables(
        title="ChestX-Det",
        images=images[["image", "split"]].join(labels),
        boxes=regions[BOX],
        masks=regions[MASK] if "counts" in regions else None,
        choices=[*choices, "labels: a finding that is not listed counts as absent (choice)"],
        images_of=("NIH ChestX-ray14",),
    )


def _read(records: list[Any]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Images, and boxes with the masks of their polygons, where the records have these."""
    images = pd.DataFrame(records)
    if not images["syms"].map(is_list_of_names).all():
        raise TypeError("syms that are no list of texts")
    images["image"] = [image_id(name) for name in images["file_name"]]
    of_region = ["syms", "boxes", *(["polygons"] if "polygons" in images else [])]
    regions = images[["image", *of_region]].explode(of_region, ignore_index=True)
    regions = regions.dropna(how="all", subset=of_region)
    corners = [(x1, y1, x2 - x1, y2 - y1) for x1, y1, x2, y2 in regions["boxes"]]
    regions[["x", "y", "w", "h"]] = np.array(corners, dtype="float64").reshape(-1, 4)
    regions = regions.assign(category=regions["syms"], reader="", image_width=SIDE, image_height=SIDE)
    if "polygons" in regions:
        regions = regions.assign(height=SIDE, width=SIDE, counts=regions["polygons"].map(_filled))
    return images[["image", "syms"]], regions


def _filled(polygon: Any) -> list[int]:
    """Run lengths of a filled polygon, its outline included."""
    picture = Image.new("1", (SIDE, SIDE))
    ImageDraw.Draw(picture).polygon([tuple(point) for point in polygon], fill=1, outline=1)
    return run_lengths(np.asarray(picture))
