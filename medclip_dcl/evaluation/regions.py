"""Heat maps of texts against regions of images, boxes or masks: shared by `Grounding` and `Localisation`."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from torch import Tensor

from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.data.image_text import EvaluationTables
from medclip_dcl.evaluation.callback import EvaluationCallback, FeatureMaps, embed_texts
from medclip_dcl.metrics import Rectangle, box_bounds
from medclip_dcl.metrics.localisation import filled_runs, resized_mask
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import cosine_heat_maps, heat_map_in_image
from medclip_dcl.pictures.figure import draw_heat_maps
from medclip_dcl.pictures.geometry import Seen, View

Size: TypeAlias = tuple[int, int]
"""(height, width) in pixels."""


class Mask(NamedTuple):
    """COCO run lengths of a mask of this size; filled while its image is measured, since a mask takes megabytes."""

    runs: np.ndarray
    height: int
    width: int


class Region(NamedTuple):
    """A mask of any size, or a box in pixels of the original image; `row` is the box's number in its table.

    `reader` drew it; "" if the set names none.
    """

    row: int = -1
    box: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    mask: Mask | None = None
    reader: str = ""

    def pixels(self, original: Size, size: Size) -> Rectangle:
        """Pixels of a box on the image enlarged or reduced to `size`."""
        down, across = size[0] / original[0], size[1] / original[1]
        x, y, w, h = self.box
        return box_bounds(
            x * across, y * down, w * across, h * down, image_height=size[0], image_width=size[1]
        )

    def inside(self, size: Size) -> Bool[np.ndarray, "height width"]:
        """Pixels of the region on the original image."""
        if self.mask is not None:
            return resized_mask(filled_runs(*self.mask), *size)
        found = np.zeros(size, dtype=bool)
        top, bottom, left, right = self.pixels(size, size)
        found[top:bottom, left:right] = True
        return found

    def extent(self, size: Size) -> list[float]:
        """x, y, w, h around the region, in pixels of the original image."""
        if self.mask is None:
            return list(self.box)
        rows, columns = np.nonzero(self.inside(size))
        return [float(x) for x in (columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1)]


Regions: TypeAlias = dict[str, dict[str, list[Region]]]
"""dicom_id -> name of a case, a phrase or a finding -> its regions."""


class RegionEvaluation(EvaluationCallback):
    """Compare the heat map of a text with the regions of an image that belong to it.

    The heat map holds the cosine of each region with the text, enlarged to the size of the image. A subclass reads the
    regions, and computes the numbers of one heat map.

    Attributes:
        name: column of the predictions with the name of a case.
        unit: noun for a row of the predictions.

    Args:
        examples: number of heat maps drawn of each of the best, the median and the worst cases by signed CNR.
    """

    stages = ("test",)
    name: ClassVar[str]
    unit: ClassVar[str]
    interpolation: str = "bilinear"
    smoothing: float = 0.0

    def __init__(self, examples: int) -> None:
        super().__init__()
        check_range(type(self).__name__, "[0, inf)", examples=examples)
        self.examples = examples
        self._view = View()
        self._regions: Regions = {}
        self._sizes: dict[str, Size] = {}
        self._maps: Mapping[str, Mapping[str, Mapping[str, Any]]] = {}

    @abstractmethod
    def regions(self, tables: EvaluationTables) -> Regions:
        """Regions of all images, checked."""

    @abstractmethod
    def compared(
        self, heat_map: Float[Tensor, "height width"], regions: Sequence[Region], original: Size, seen: Seen
    ) -> dict[str, Any]:
        """Numbers of a heat map, NaN outside the part `seen`, with the regions of an image of `original` size."""

    def text(self, name: str) -> str:
        """Text whose heat map is compared with the regions of a case."""
        return name

    def evaluated_size(self, network: ImageTextNetwork, grid: Size, original: Size) -> Size:
        """Size at which the heat map of an image is compared; `grid`: of its regions."""
        return original

    def prepare(self, tables: EvaluationTables, stage: str) -> set[str]:
        self._regions = self.regions(tables)
        self._sizes, self._view = image_sizes(tables), tables.view
        return set(self._regions)

    def measure(
        self, network: ImageTextNetwork, feature_map: FeatureMaps, dicom_ids: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        """By image and name: the numbers, the heat map of the regions (map), and its size in pixels when compared."""
        # Together at the first batch, and kept: each by itself would take ten times as long.
        embed_texts(network, [self.text(name) for of_image in self._regions.values() for name in of_image])
        return {
            dicom_id: self._measured(network, feature_map[index], dicom_id)
            for index, dicom_id in enumerate(dicom_ids)
            if dicom_id in self._regions
        }

    def _measured(
        self,
        network: ImageTextNetwork,
        feature_map: Float[Tensor, "dim region_row region_column"],
        dicom_id: str,
    ) -> dict[str, Any]:
        original = self._sizes[dicom_id]
        size = self.evaluated_size(network, (feature_map.shape[1], feature_map.shape[2]), original)
        seen = self._view.of(*size, original).within(*size)
        found = {}
        for name, regions in self._regions[dicom_id].items():
            rough = cosine_heat_maps(feature_map, embed_texts(network, [self.text(name)]))[0]
            if rough.device.type == "mps":
                # MPS has no float64.
                rough = rough.cpu()
            heat_map = self._in_image(rough, size, original)
            numbers = self.compared(heat_map, regions, original, seen)
            found[name] = {"map": rough.cpu().numpy(), "size": size, **numbers}
        return found

    def _in_image(self, rough: Tensor, size: Size, original: Size) -> Float[Tensor, "height width"]:
        return heat_map_in_image(rough, self._view, size, original, self.interpolation, self.smoothing)

    def figures(self, load_image: Any) -> Iterator[tuple[str, Figure]]:
        """Best, median and worst cases by signed CNR: the best alone would mislead."""
        cases = self.results[self.section].predictions
        for group, place, row in chosen_examples(cases["cnr_signed"], self.examples):
            case = cases.iloc[row]
            dicom_id, name = case["dicom_id"], "\n".join(filter(None, (case[self.name], case.get("reader"))))
            measured, original = self._maps[dicom_id][name], self._sizes[dicom_id]
            heat_map = self._in_image(torch.from_numpy(measured["map"]), measured["size"], original).numpy()
            own_first = sorted(
                self._regions[dicom_id][name], key=lambda region: region.row != case.get("box")
            )
            figure = draw_heat_maps(
                load_image(dicom_id),
                [heat_map],
                [self.text(name)],
                limits=(float(np.nanmin(heat_map)), float(np.nanmax(heat_map))),
                size=original,
                boxes=[region.extent(original) for region in own_first],
                note=f"{group} {place + 1} of {len(cases)} {self.unit} by signed CNR: {case['category']}, "
                f"signed CNR {case['cnr_signed']:.2f}, mIoU {case['miou']:.2f}",
            )
            yield f"{self.section}_{group}_{place + 1}", figure


def image_sizes(tables: EvaluationTables) -> dict[str, Size]:
    """Size of each original image."""
    images = tables.images
    columns = (images["dicom_id"], images["height"], images["width"])
    return {dicom_id: (int(height), int(width)) for dicom_id, height, width in zip(*columns, strict=True)}


def boxes_by_case(tables: EvaluationTables, boxes: pd.DataFrame, name: str) -> Regions:
    """Boxes by image and by the column `name`, each of which must cover a pixel of its image."""
    sizes, found = image_sizes(tables), Regions()
    readers = boxes["reader"] if "reader" in boxes else [""] * len(boxes)
    columns = (boxes[column] for column in ("dicom_id", name, "x", "y", "w", "h"))
    for row, reader, dicom_id, case, *box in zip(boxes.index, readers, *columns, strict=True):
        x, y, w, h = map(float, box)
        region = Region(int(row), (x, y, w, h), reader=reader)
        try:
            region.pixels(sizes[dicom_id], sizes[dicom_id])
        except ValueError as error:
            advice = "correct the file of boxes and prepare the set again"
            raise UserError(f"image {dicom_id}: {error}; {advice}") from error
        found.setdefault(dicom_id, {}).setdefault(case, []).append(region)
    return found


def masks_by_case(tables: EvaluationTables) -> Regions:
    """Masks by image and finding."""
    found: Regions = {}
    names = ["dicom_id", "category", "reader", "height", "width", "counts"]
    for dicom_id, finding, reader, height, width, counts in tables.masks[names].itertuples(index=False):
        mask = Mask(np.array(counts.split(), dtype=np.int64), height, width)
        if mask.runs.sum() != height * width or (mask.runs < 0).any():
            raise UserError(
                f"image {dicom_id}, mask of {finding}: expected run lengths of {height} x {width} pixels, found "
                f"{mask.runs.sum():,}; prepare the set again"
            )
        found.setdefault(dicom_id, {}).setdefault(finding, []).append(Region(mask=mask, reader=reader))
    return found


def chosen_examples(signed_cnr: pd.Series, count: int) -> list[tuple[str, int, int]]:
    """(group, place, row) of the best, median and worst rows, none of them twice; NaN is never chosen."""
    order = [
        int(i) for i in np.argsort(-signed_cnr.to_numpy(), kind="stable") if math.isfinite(signed_cnr.iloc[i])
    ]
    count = min(count, len(order) // 3) if len(order) >= 3 else min(count, 1 if order else 0)
    middle = (len(order) - count) // 2
    groups = {"best": order[:count]}
    if len(order) >= 3:
        groups["median"] = order[middle : middle + count]
        groups["worst"] = order[::-1][:count]
    return [(group, place, row) for group, rows in groups.items() for place, row in enumerate(rows)]
