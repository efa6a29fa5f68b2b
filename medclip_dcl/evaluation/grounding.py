"""Visual grounding: the heat map of a phrase against the radiologist's box (SSD, section 3.2 and table 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from medclip_dcl.common.errors import check_choice, check_range
from medclip_dcl.data.image_text import EvaluationTables
from medclip_dcl.evaluation.callback import EvaluationResult, Results, Values, subject_ids
from medclip_dcl.evaluation.regions import Region, RegionEvaluation, Regions, Size, boxes_by_case, image_sizes
from medclip_dcl.metrics import Agreement, BoxedHeatMap, Rectangle, summaries
from medclip_dcl.metrics.localisation import between_readers
from medclip_dcl.metrics.table import SECTIONS
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.pictures.geometry import Seen

COLUMNS = (
    ["dicom_id", "subject_id", "category", "phrase", "box", "x", "y", "w", "h"]
    + ["cnr", "cnr_signed", "miou", "pair_cnr_signed", "pair_miou", "hit", "area", "pair_hit", "pair_area"]
)  # fmt: skip
"""Columns of the predictions; pair_*: of the union of the phrase's boxes on the image, repeated for each of them. A set
that names readers also has `reader`, of whose boxes pair_* is the union, reader_iou and reader_dice."""

NO_BOXES = (
    "the set has no boxes with phrases: grounding, and retrieval of boxes and phrases, are not measured (these boxes "
    "come with medclip-dcl prepare mimic-cxr --ms_cxr FILE, and prepare public padchest_gr)"
)


class Grounding(RegionEvaluation):
    """Contrast-to-noise ratio, mean IoU and pointing game of each box, as means over boxes and image-phrase pairs.

    The heat map holds the cosine of each region with the phrase, enlarged to the size of the image, without min-max
    scaling (choices, not from the paper). Where the model sees a part of the image only, the pixels of that part count;
    a box outside it has a mIoU of 0 and no CNR. A pair of several readers is the mean over those who drew it, each with
    the union of their boxes (`by_reader`). Hit and area are those of `Localisation`.

    Logs ``test/cnr``, ``test/cnr_signed``, ``test/miou`` (over boxes) and ``test/pair_cnr``,
    ``test/pair_cnr_signed``, ``test/pair_miou`` (over image-phrase pairs, each with the union of its boxes).

    Args:
        examples: number of heat maps drawn of each of the best, the median and the worst boxes by signed CNR.
        heat_map_size: "original" evaluates in pixels of the original image; "model" in pixels of the model's input,
            to which the boxes are scaled (choice, not from the paper).
        interpolation: "bilinear" between the regions' centres, or "nearest" centre.
        smoothing: sigma of a Gaussian over the enlarged map, in its pixels; cut at 4 sigma, the map continued by its
            edge values. 0 for none.

    Raises:
        ValueError: an option out of its range; on test a box that covers no pixel.
    """

    section, name, unit = "grounding", "phrase", "boxes"
    options = ("heat_map_size", "interpolation", "smoothing")

    def __init__(
        self,
        examples: int = 3,
        heat_map_size: Literal["original", "model"] = "original",
        interpolation: Literal["bilinear", "nearest"] = "bilinear",
        smoothing: float = 0.0,
    ) -> None:
        super().__init__(examples)
        check_range("Grounding", "[0, inf)", smoothing=smoothing)
        check_choice("Grounding.heat_map_size", heat_map_size, ("original", "model"))
        check_choice("Grounding.interpolation", interpolation, ("bilinear", "nearest"))
        self.heat_map_size, self.interpolation = heat_map_size, interpolation
        self.smoothing = float(smoothing)

    def regions(self, tables: EvaluationTables) -> Regions:
        return boxes_by_case(tables, tables.boxes.assign(case=_names(tables.boxes)), "case")

    def text(self, name: str) -> str:
        return name.partition("\n")[0]

    def compared(
        self, heat_map: Float[Tensor, "height width"], regions: Sequence[Region], original: Size, seen: Seen
    ) -> dict[str, Any]:
        """Agreement with each box by its row, and with all; `unseen`: number of boxes outside the view."""
        boxed = BoxedHeatMap(heat_map[seen.slices])
        size = heat_map.shape[0], heat_map.shape[1]
        boxes = [region.pixels(original, size).within(*seen) for region in regions]
        of_boxes = [_agreement(boxed, [box]) for box in boxes]
        return {
            "boxes": {region.row: found for region, found in zip(regions, of_boxes, strict=True)},
            # The pair of a single box is that box.
            "pair": of_boxes[0] if len(boxes) == 1 else _agreement(boxed, boxes),
            "unseen": boxes.count(None),
        }

    def evaluated_size(self, network: ImageTextNetwork, grid: Size, original: Size) -> Size:
        if self.heat_map_size == "original":
            return original
        # Size of the whole image, of which the regions may cover a part; padding is not a part of it.
        down, across = (count * network.stride * self._view.size / self._view.seen for count in grid)
        shown = self._view.shown(*original, sizes=(down, across))
        return shown.height, shown.width

    def summarise(self, network: ImageTextNetwork, values: Values, tables: EvaluationTables) -> Results:
        self._maps = values
        of_phrases = [found for of_image in values.values() for found in of_image.values()]
        by_box = {row: agreement for found in of_phrases for row, agreement in found["boxes"].items()}
        boxes = tables.boxes[tables.boxes.index.isin(by_box)]
        pairs = zip(boxes["dicom_id"], _names(boxes), strict=True)
        of_pairs = [values[dicom_id][name]["pair"] for dicom_id, name in pairs]
        numbers = {
            f"{of}{name}": column
            for of, found in (("", [by_box[box] for box in boxes.index]), ("pair_", of_pairs))
            for name, column in zip(Agreement._fields, np.array(found).reshape(-1, 4).T, strict=True)
        }
        own = {} if "reader" not in boxes else _of_readers(boxes, image_sizes(tables))
        cases = boxes.assign(
            subject_id=subject_ids(tables, boxes["dicom_id"]),
            box=boxes.index.astype("int64"),
            cnr=np.abs(numbers["cnr_signed"]),
            **numbers,
            **own,
        )[[*COLUMNS, *own]].reset_index(drop=True)
        metrics = summaries.values_of(summaries.grounding(cases, summaries.once(cases)))
        scalars = {name: metrics[name] for name in SECTIONS["grounding"].names}
        scalars |= {f"pair_{name}": value for name, value in metrics["by_pair"].items()}
        n_undefined = int((~np.isfinite(cases["cnr_signed"])).sum())
        n_unseen = sum(found["unseen"] for found in of_phrases)
        notes = [NO_BOXES] if cases.empty else []
        if n_unseen:
            notes.append(
                f"{n_unseen} of {len(cases)} boxes lie outside the {self._view} that the model sees: mIoU 0, no CNR"
            )
        if n_undefined:
            notes.append(
                f"{n_undefined} of {len(cases)} boxes have no CNR (constant heat map, or a box that covers all or "
                "nothing of what the model sees)"
            )
        sizes = sorted({found["size"] for found in of_phrases})
        result = EvaluationResult(
            metrics=metrics,
            scalars={name: value for name, value in scalars.items() if value is not None},
            # Of the original size they are the images' own.
            protocol={} if self.heat_map_size == "original" else {"pixels": [list(size) for size in sizes]},
            counts={
                "boxes": len(cases),
                "boxes_without_cnr": n_undefined,
                "images": int(cases["dicom_id"].nunique()),
                "patients": int(cases["subject_id"].nunique()),
                "pairs": len(cases.drop_duplicates(["dicom_id", "phrase"])),
                **(_drawn(cases.drop_duplicates(["dicom_id", "phrase", "reader"])) if own else {}),
                "phrases": int(cases["phrase"].nunique()),
                "boxes_by_category": cases["category"].value_counts().sort_index().to_dict(),
            },
            notes=notes,
            predictions=cases,
        )
        return {self.section: result}


def _drawn(cases: pd.DataFrame) -> dict[str, Any]:
    """Number of pairs that each reader drew, and of those that one reader alone drew."""
    n_alone = (~cases.duplicated(["dicom_id", "phrase"], keep=False)).sum()
    return {"by_reader": cases["reader"].value_counts().to_dict(), "pairs_of_one_reader": int(n_alone)}


def _names(boxes: pd.DataFrame) -> list[str]:
    """Name of each box's case: its phrase, and on a line of its own the reader, if the set names one."""
    readers = boxes["reader"] if "reader" in boxes else [""] * len(boxes)
    return ["\n".join(filter(None, names)) for names in zip(boxes["phrase"], readers, strict=True)]


def _of_readers(boxes: pd.DataFrame, sizes: Mapping[str, Size]) -> dict[str, Any]:
    """The reader of each box, and the readers' agreement on its phrase."""
    found: dict[Any, dict[str, float]] = {}
    pair: Any
    for pair, rows in boxes.groupby(["dicom_id", "phrase"]):
        several = rows if rows["reader"].nunique() > 1 else rows[:0]
        masks = [Region(box=box).inside(sizes[pair[0]]) for box in several[[*"xywh"]].itertuples(index=False)]
        found[pair] = between_readers(several["reader"], masks)
    of_boxes = [found[pair] for pair in zip(boxes["dicom_id"], boxes["phrase"], strict=True)]
    return {"reader": boxes["reader"], **pd.DataFrame(of_boxes, boxes.index, ["reader_iou", "reader_dice"])}


def _agreement(boxed: BoxedHeatMap, boxes: Sequence[Rectangle | None]) -> Agreement:
    """Agreement with the union of boxes; None stands for a box outside the view."""
    seen = [box for box in boxes if box is not None]
    return boxed.agreement(seen) if seen else Agreement(math.nan, 0.0, 0.0, 0.0)
