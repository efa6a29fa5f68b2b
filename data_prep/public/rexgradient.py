"""ReXGradient-160K (Zhang et al., arXiv 2505.00228): reports with PNG files of a quarter of their side, no labels."""

from __future__ import annotations

from typing import Any

import pandas as pd

from data_prep.public.release_tables import PublicTables, ReleaseFolder, image_id
from data_prep.sources.rows import SPLIT_NAMES
from data_prep.sources.source_tables import is_placeholder, read_form, require

VIEWS = {"AP": "AP", "PA": "PA", "ANTERO_POSTERIOR": "AP", "POSTERO_ANTERIOR": "PA", "AP (KUB)": "AP"}
UNKNOWN = ("UNKNOWN", "N/A", "NAN", "NONE", "MISSING")
_FORM = "studies by id, of PatientID, Findings, Impression and the lists ImagePath and ImageViewPosition"
_TEXTS = ("PatientID", "PatientSex", "PatientAge", "Findings", "Impression")
_COLUMNS = ["image", "study", "view", "patient", "sex", "age", "findings", "impression"]


def read(folder: ReleaseFolder, unknown_views: bool = False) -> PublicTables:
    """metadata/{train,valid,test}_metadata_view_position.json; `unknown_views` takes images of `UNKNOWN` views."""
    names = {
        SPLIT_NAMES[part]: [f"{part}_metadata_view_position.json"] for part in ("train", "valid", "test")
    }
    parts = {split: read_form(file, _FORM, _images) for split, file in folder.tables(names).items()}
    images = pd.concat([rows.assign(split=split) for split, rows in parts.items()], ignore_index=True)
    is_one = images.groupby("study")["split"].transform("nunique") == 1
    require(images["study"], is_one, "each study in one split", folder.taken[-1])
    stated = images["view"]
    view = stated.map(VIEWS | dict.fromkeys(UNKNOWN if unknown_views else (), "FRONTAL"))
    reasons = stated.isin(UNKNOWN).map({True: "its view is unknown", False: "its view is not frontal"})
    taken, left_out = (stated[is_in].value_counts().to_dict() for is_in in (view.notna(), view.isna()))
    of_test = stated[images["split"] == "test"].value_counts().reindex(list(VIEWS), fill_value=0)
    return PublicTables(
        title="ReXGradient-160K",
        images=images.assign(view=view.fillna(stated)),
        left_out=dict(zip(images.loc[view.isna(), "image"], reasons[view.isna()], strict=True)),
        choices=[
            f"views taken as frontal: {taken}; left out: {left_out} (--unknown_views takes {', '.join(UNKNOWN)})",
            f"test images, frontal: {of_test.drop('ANTERO_POSTERIOR').sum():,} without ANTERO_POSTERIOR (published: "
            f"8,083), {of_test['ANTERO_POSTERIOR']:,} with it",
            "reports: findings and impression; the indication is not read. Labels: none",
        ],
    )


def _images(studies: dict[str, Any]) -> pd.DataFrame:
    rows = []
    for study, entry in studies.items():
        paths, views = (entry[name] or [] for name in ("ImagePath", "ImageViewPosition"))
        if not (isinstance(paths, list) and isinstance(views, list)) or len(views) > len(paths):
            raise ValueError(f"study {study}: {len(views)} views of {len(paths)} images, or no lists")
        texts = ["" if entry[name] is None else str(entry[name]).strip() for name in _TEXTS]
        padded = [*views, *[""] * (len(paths) - len(views))]
        named = [
            (image_id(path), str(view).strip().upper()) for path, view in zip(paths, padded, strict=True)
        ]
        rows += [(image, study, view or "MISSING", *texts) for image, view in named]
    images = pd.DataFrame(rows, columns=_COLUMNS)
    return images.assign(
        **{name: images[name].mask(is_placeholder(images[name]), "") for name in _COLUMNS[4:]}
    )
