"""Positives of the debiased loss's correction: training images that carry a sentence's class, or have the sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from medclip_dcl.common.errors import UserError
from medclip_dcl.data.arrays import Arrays
from medclip_dcl.data.features import Features
from medclip_dcl.data.images import Images
from medclip_dcl.data.prepared import PreparedSet


class CorrectionImages:
    """Training images by group: by class, or by sentence.

    Args:
        arrays: those of `correction_arrays`.
        reported: the training images (`reported_arrays`).
        images: their grey levels, or features.
        count: number of images that are drawn for an anchor, with replacement.

    Raises:
        UserError: no group has images of two studies.
    """

    def __init__(self, arrays: Arrays, reported: Arrays, images: Images | Features, count: int) -> None:
        self.arrays, self.reported, self.images, self.count = arrays, reported, images, count
        is_same_group = np.diff(arrays["group"]) == 0
        if not (is_same_group & (np.diff(reported["study_id"][arrays["image"]]) != 0)).any():
            raise UserError(
                "model.correction_images: no class or sentence has images of two training studies; set "
                "model.init_args.correction_images: own"
            )

    def draw(self, sentence: int, study: int, generator: np.random.Generator) -> np.ndarray:
        """Rows of `count` training images of other studies; empty where no such image has the sentence's group."""
        groups = self.arrays["group_of_sentence"][slice(*_span(self.arrays["sentence"], sentence))]
        images = (
            self.arrays["image"][slice(*_span(self.arrays["group"], groups[0]))] if len(groups) else groups
        )
        images = images[self.reported["study_id"][images] != study]
        return images[generator.integers(len(images), size=self.count)] if len(images) else images


def correction_arrays(prepared: PreparedSet, kind: str, training: Arrays) -> dict[str, Any]:
    """Arrays of `CorrectionImages`.

    sentence, group_of_sentence: sentences, ascending, and the group of each; group, image: each pair of a group and the
    row of an image in `training`, those of `reported_arrays`, by group.
    """
    if kind == "class":
        group_of = prepared.table("classes").sort_values("sentence_id").set_index("sentence_id")["class_id"]
        row_of = pd.Series(range(len(training["study_id"])), index=training["dicom_id"][:])
        pairs = prepared.table("image_classes").rename(columns={"class_id": "group"})
        pairs = pairs[pairs["dicom_id"].isin(row_of.index)]
        pairs = pairs.assign(image=pairs["dicom_id"].map(row_of))
    else:
        sentences = training["sentences"]
        rows = np.arange(len(sentences)).repeat(sentences.lengths)
        pairs = pd.DataFrame({"group": sentences.flat, "image": rows})
        group_of = pd.Series(ids := np.unique(pairs["group"]), index=ids)
    pairs = pairs.sort_values(["group", "image"])
    return {
        "sentence": group_of.index.to_numpy(np.int64),
        "group_of_sentence": group_of.to_numpy(np.int64),
        **{name: pairs[name].to_numpy(np.int64) for name in ("group", "image")},
    }


def _span(ascending: np.ndarray, value: int) -> list[int]:
    return np.searchsorted(ascending, [value, value + 1]).tolist()
