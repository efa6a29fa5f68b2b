"""Visual grounding: the heat map of a phrase against the radiologist's box (SSD, section 3.2 and table 4)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from medclip_dcl.common.errors import UserError, check_choice, check_min
from medclip_dcl.data.image_text import EvaluationTables
from medclip_dcl.evaluation.base import (
    EvaluationCallback,
    EvaluationResult,
    FeatureMaps,
    embed_texts,
    subject_ids,
)
from medclip_dcl.evaluation.heat_maps import (
    Example,
    example_figures,
    image_sizes,
    seen_heat_map,
    whole_heat_map,
)
from medclip_dcl.metrics import Agreement, BoxedHeatMap, Rectangle, box_bounds, summaries
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import cosine_heat_maps
from medclip_dcl.pictures.geometry import View

COLUMNS = (
    ["dicom_id", "subject_id", "category", "phrase", "box", "x", "y", "w", "h"]
    + ["cnr", "cnr_signed", "miou", "pair_cnr_signed", "pair_miou"]
)  # fmt: skip
"""Columns of the predictions; pair_*: of the union of the phrase's boxes on the image, repeated for each of them."""

NO_BOXES = (
    "the set has no boxes with phrases: grounding, and retrieval of boxes and phrases, are not measured (these boxes "
    "come with data_prep.mimic_cxr --ms_cxr FILE)"
)


class Box(NamedTuple):
    """A row of ``EvaluationTables.boxes``, in pixels of the original image; ``row`` is its number there."""

    row: int
    category: str
    phrase: str
    x: float
    y: float
    w: float
    h: float


class Grounding(EvaluationCallback):
    """Contrast-to-noise ratio and mean IoU of each box, averaged over boxes, and over image-phrase pairs.

    The heat map holds the cosine of each region with the phrase, enlarged to the size of the image, without min-max
    scaling (choices, not from the paper). Where the model sees a part of the image only, the pixels of that part count;
    a box outside it has a mIoU of 0 and no CNR.

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

    section = "grounding"
    stages = ("test",)
    options = ("heat_map_size", "interpolation", "smoothing")

    def __init__(
        self,
        examples: int = 3,
        heat_map_size: Literal["original", "model"] = "original",
        interpolation: Literal["bilinear", "nearest"] = "bilinear",
        smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        check_min("Grounding", {"examples": (examples, 0), "smoothing": (smoothing, 0)})
        self.examples = examples
        check_choice("Grounding.heat_map_size", heat_map_size, ("original", "model"))
        check_choice("Grounding.interpolation", interpolation, ("bilinear", "nearest"))
        self.heat_map_size, self.interpolation = heat_map_size, interpolation
        self.smoothing = float(smoothing)
        self._view = View()
        self._boxes: dict[str, list[Box]] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        self._maps: dict[str, dict[str, np.ndarray]] = {}
        self._evaluated_sizes: dict[str, tuple[int, int]] = {}

    def prepare(self, tables: EvaluationTables, stage: str) -> set[str]:
        self._boxes = boxes_by_image(tables)
        self._sizes = image_sizes(tables)
        self._view = tables.view
        return set(self._boxes)

    def measure(
        self, network: ImageTextNetwork, feature_map: FeatureMaps, dicom_ids: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        # Together at the first batch, and kept: each by itself would take ten times as long.
        embed_texts(network, [box.phrase for boxes in self._boxes.values() for box in boxes])
        return {
            dicom_id: self._measure_image(network, feature_map[index], dicom_id)
            for index, dicom_id in enumerate(dicom_ids)
            if dicom_id in self._boxes
        }

    def _measure_image(
        self,
        network: ImageTextNetwork,
        feature_map: Float[Tensor, "dim region_row region_column"],
        dicom_id: str,
    ) -> dict[str, Any]:
        boxes = self._boxes[dicom_id]
        height, width = self._evaluated_size(network, feature_map, dicom_id)
        square = self._view.of(height, width, self._sizes[dicom_id])
        part = square.within(height, width)
        advice = 'evaluate with heat_map_size: "original"'
        seen = {
            box.row: _pixels(box, dicom_id, self._sizes[dicom_id], (height, width), advice).within(*part)
            for box in boxes
        }
        maps, of_boxes, of_pairs = {}, {}, {}
        for phrase in dict.fromkeys(box.phrase for box in boxes):
            regions = cosine_heat_maps(feature_map, embed_texts(network, [phrase]))[0]
            maps[phrase] = regions.cpu().numpy()
            if regions.device.type == "mps":
                # MPS has no float64.
                regions = regions.cpu()
            boxed = BoxedHeatMap(seen_heat_map(regions, square, part, self.interpolation, self.smoothing))
            rows = [box.row for box in boxes if box.phrase == phrase]
            for row in rows:
                of_boxes[row] = _agreement(boxed, [seen[row]])
            # The pair of a single box is that box.
            is_single = len(rows) == 1
            of_pairs[phrase] = of_boxes[rows[0]] if is_single else _agreement(boxed, [seen[r] for r in rows])
        return {
            "boxes": of_boxes,
            "pairs": of_pairs,
            "maps": maps,
            "size": (height, width),
            "unseen": sum(box is None for box in seen.values()),
        }

    def _evaluated_size(
        self,
        network: ImageTextNetwork,
        feature_map: Float[Tensor, "dim region_row region_column"],
        dicom_id: str,
    ) -> tuple[int, int]:
        """(height, width) at which the heat map of an image is evaluated."""
        if self.heat_map_size == "original":
            return self._sizes[dicom_id]
        rows, columns = feature_map.shape[1:]
        # Size of the whole image, of which the regions may cover a part; padding is not a part of it.
        down, across = (
            count * network.stride * self._view.size / self._view.seen for count in (rows, columns)
        )
        shown = self._view.shown(*self._sizes[dicom_id], sizes=(down, across))
        return shown.height, shown.width

    def summarise(
        self, network: ImageTextNetwork, values: Mapping[str, Any], tables: EvaluationTables
    ) -> dict[str, EvaluationResult]:
        self._maps = {dicom_id: value["maps"] for dicom_id, value in values.items()}
        self._evaluated_sizes = {dicom_id: value["size"] for dicom_id, value in values.items()}
        by_box = {box: found for value in values.values() for box, found in value["boxes"].items()}
        boxes = tables.boxes[tables.boxes.index.isin(by_box)]
        pairs = zip(boxes["dicom_id"], boxes["phrase"], strict=True)
        of_boxes = np.array([by_box[box] for box in boxes.index]).reshape(-1, 2)
        of_pairs = np.array([values[dicom_id]["pairs"][phrase] for dicom_id, phrase in pairs]).reshape(-1, 2)
        cases = boxes.assign(
            subject_id=subject_ids(tables, boxes["dicom_id"]),
            box=boxes.index.astype("int64"),
            cnr_signed=of_boxes[:, 0],
            cnr=np.abs(of_boxes[:, 0]),
            miou=of_boxes[:, 1],
            pair_cnr_signed=of_pairs[:, 0],
            pair_miou=of_pairs[:, 1],
        )[COLUMNS].reset_index(drop=True)
        metrics = summaries.values_of(summaries.grounding(cases, summaries.once(cases)))
        scalars = {name: metrics[name] for name in summaries.GROUNDING}
        scalars |= {f"pair_{name}": value for name, value in metrics["by_pair"].items()}
        n_undefined = int((~np.isfinite(cases["cnr_signed"])).sum())
        n_unseen = sum(value["unseen"] for value in values.values())
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
        sizes = sorted(set(self._evaluated_sizes.values()))
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
                "phrases": int(cases["phrase"].nunique()),
                "boxes_by_category": {
                    str(name): int(n) for name, n in cases["category"].value_counts().sort_index().items()
                },
            },
            notes=notes,
            predictions=cases,
        )
        return {self.section: result}

    def figures(self, load_image: Any) -> Iterator[tuple[str, Figure]]:
        """Best, median and worst boxes by signed CNR."""
        cases = self.results[self.section].predictions

        def example(case: pd.Series) -> Example:
            dicom_id, phrase = case["dicom_id"], case["phrase"]
            same = (cases["dicom_id"] == dicom_id) & (cases["phrase"] == phrase)
            others = cases.loc[same & (cases["box"] != case["box"]), ["x", "y", "w", "h"]].astype(float)
            boxes = [case[["x", "y", "w", "h"]].astype(float).tolist(), *others.to_numpy().tolist()]
            return Example(self._shown(dicom_id, phrase), phrase, self._sizes[dicom_id], boxes)

        yield from example_figures(self.section, cases, self.examples, "boxes", example, load_image)

    def _shown(self, dicom_id: str, phrase: str) -> Float[np.ndarray, "map_height map_width"]:
        """The evaluated heat map."""
        regions = torch.from_numpy(self._maps[dicom_id][phrase])
        sizes = self._evaluated_sizes[dicom_id], self._sizes[dicom_id]
        return whole_heat_map(regions, self._view, *sizes, self.interpolation, self.smoothing).numpy()


def boxes_by_image(tables: EvaluationTables) -> dict[str, list[Box]]:
    """The boxes of each image, each of which must cover a pixel of it."""
    sizes = image_sizes(tables)
    found: dict[str, list[Box]] = {}
    columns = (tables.boxes[name] for name in ("dicom_id", *Box._fields[1:]))
    for row, dicom_id, *values in zip(tables.boxes.index, *columns, strict=True):
        box = Box(int(row), *values[:2], *(float(value) for value in values[2:]))
        size = sizes[dicom_id]
        _pixels(box, dicom_id, size, size, "correct the MS-CXR file and prepare the set again")
        found.setdefault(dicom_id, []).append(box)
    return found


def _pixels(
    box: Box, dicom_id: str, original: tuple[int, int], evaluated: tuple[int, int], advice: str
) -> Rectangle:
    """Pixels of a box on the image enlarged or reduced to the `evaluated` (height, width)."""
    down, across = evaluated[0] / original[0], evaluated[1] / original[1]
    x, y, w, h = box.x * across, box.y * down, box.w * across, box.h * down
    try:
        return box_bounds(x, y, w, h, image_height=evaluated[0], image_width=evaluated[1])
    except ValueError as error:
        raise UserError(f"image {dicom_id}: {error}; {advice}") from error


def _agreement(boxed: BoxedHeatMap, boxes: Sequence[Rectangle | None]) -> Agreement:
    """Agreement with the union of boxes; None stands for a box outside the view."""
    seen = [box for box in boxes if box is not None]
    return boxed.agreement(seen) if seen else Agreement(math.nan, 0.0)
