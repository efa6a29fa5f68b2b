"""Localisation of findings that have boxes or masks and no phrases, by a prompt for each finding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from medclip_dcl.common.errors import check_range
from medclip_dcl.common.findings import CHEX5, read_prompts
from medclip_dcl.data.image_text import EvaluationTables
from medclip_dcl.evaluation.callback import EvaluationResult, Results, Values, subject_ids
from medclip_dcl.evaluation.regions import (
    Region,
    RegionEvaluation,
    Regions,
    Size,
    boxes_by_case,
    masks_by_case,
)
from medclip_dcl.metrics import contrast_to_noise_ratio, default_thresholds, summaries
from medclip_dcl.metrics.grounding import overlaps
from medclip_dcl.metrics.localisation import between_readers, iou_of_masks, pointing_hit, segmentation, within
from medclip_dcl.metrics.table import SECTIONS
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.pictures.geometry import Seen

_MEASURED = ("curves", "hit_within", "normalised")
NORMALISED_THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Of maps that are scaled to [0, 1]: those that CheXlocalize's code tries."""
NO_REGIONS = "the set has no boxes or masks: localisation is not measured"
COLUMNS = ["dicom_id", "subject_id", "category", "n_regions", *SECTIONS["localisation"].names]
"""Columns of the predictions, a row for each image and finding; area: share inside, of what the model sees."""


class Localisation(RegionEvaluation):
    """Agreement of a finding's heat map with the union of its boxes or masks on an image.

    The heat map holds the cosine of each region with the finding's prompt, enlarged to the size of the image. A case is
    an image and a finding that it has a region of. Masks stand in place of boxes of the same image and finding. Metrics
    are means over cases by finding, and over findings: pointing game (hit) beside its chance, the area of the regions;
    signed CNR; mIoU over 41 thresholds; and IoU and Dice at the cosine with the best mean IoU on validate cases of the
    finding. CheXlocalize's mIoU is the mean of an IoU at one threshold, as `iou`, on maps that it scales one by one
    (`normalised`). Without enough validate cases a finding has no threshold, IoU and Dice. Where
    several readers drew a finding, their mean pairwise IoU and Dice are the ceiling.

    Args:
        prompts: finding -> (negative, positive), or a YAML file; the first positive prompt is the phrase (choice). null
            for CheX5's. A finding without a prompt has its name as phrase.
        min_cases: validate cases that the choice of a threshold needs (choice).
        examples: number of heat maps drawn of each of the best, the median and the worst cases by signed CNR.
        normalised: adds `iou_normalised`, the mIoU of CheXlocalize's code: each map scaled to [0, 1], then "otsu", its
            threshold, or "tuned", that of .2, .3, ..., .8 with the best mean IoU on validate cases of the finding.
        tolerance: adds `hit_within`: the max lies inside or less than so many pixels of the original image away, as
            in TorchRay's pointing game (15), on which the chance is larger than `area`.
    """

    section, name, unit = "localisation", "category", "cases"
    options = ("min_cases", "normalised", "tolerance")

    def __init__(
        self,
        prompts: Mapping[str, tuple[str | list[str], str | list[str]]] | str | None = None,
        min_cases: int = 5,
        examples: int = 2,
        normalised: Literal["otsu", "tuned"] | None = None,
        tolerance: int | None = None,
    ) -> None:
        super().__init__(examples)
        check_range("Localisation", "[1, inf)", min_cases=min_cases, tolerance=tolerance)
        self.normalised, self.tolerance, self.min_cases = normalised, tolerance, min_cases
        read = read_prompts(CHEX5 if prompts is None else prompts, "Localisation")
        self.phrases = {finding: positive[0] for finding, (_, positive) in read.items()}

    def text(self, name: str) -> str:
        return self.phrases.get(name, name)

    def regions(self, tables: EvaluationTables) -> Regions:
        """Masks where an image has masks of the finding, else boxes."""
        masks, boxes = masks_by_case(tables), boxes_by_case(tables, tables.regions, "category")
        return {dicom_id: boxes.get(dicom_id, {}) | masks.get(dicom_id, {}) for dicom_id in (masks | boxes)}

    def compared(
        self, heat_map: Float[Tensor, "height width"], regions: Sequence[Region], original: Size, seen: Seen
    ) -> dict[str, Any]:
        """Numbers of a finding's regions together."""
        heat_map = heat_map.cpu()
        drawn = [region.inside(original) for region in regions]
        inside = torch.from_numpy(np.logical_or.reduce(drawn))
        iou, dice = overlaps(heat_map, inside)
        is_seen = ~heat_map.isnan()
        others: dict[str, Any] = {}
        if self.tolerance is not None:
            near = torch.from_numpy(within(inside.numpy(), self.tolerance))
            others["hit_within"] = float(pointing_hit(heat_map, near))
        if self.normalised is not None:
            levels = NORMALISED_THRESHOLDS if self.normalised == "tuned" else [None]
            found = [segmentation(heat_map.numpy(), level) for level in levels]
            others["normalised"] = [iou_of_masks(one, (inside & is_seen).numpy()) for one in found]
        return {
            "n_regions": len(regions),
            "area": float(inside[is_seen].float().mean()),
            "hit": float(pointing_hit(heat_map, inside)),
            "cnr_signed": float(contrast_to_noise_ratio(heat_map, inside, signed=True)),
            "miou": float(iou.mean()),
            **between_readers([region.reader for region in regions], drawn),
            "curves": np.stack([iou.numpy(), dice.numpy()]),
            **others,
        }

    def summarise(self, network: ImageTextNetwork, values: Values, tables: EvaluationTables) -> Results:
        found = pd.DataFrame(
            [
                {"dicom_id": dicom_id, "category": finding, **numbers}
                for dicom_id, of_image in values.items()
                for finding, numbers in of_image.items()
            ],
            columns=["dicom_id", "category", *(set(COLUMNS) - {"dicom_id", "category"}), *_MEASURED],
        )
        is_tuning = found["dicom_id"].isin(tables.tuning)
        thresholds = self._thresholds(found[is_tuning])
        cases = found[~is_tuning].sort_values(["category", "dicom_id"], ignore_index=True)
        self._maps = values
        for name, place in (("iou", 0), ("dice", 1)):
            cases[name] = [
                float(curves[place, thresholds[finding]]) if finding in thresholds else math.nan
                for finding, curves in zip(cases["category"], cases["curves"], strict=True)
            ]
        names = [*SECTIONS["localisation"].names, *(["hit_within"] if self.tolerance is not None else [])]
        tuned: dict[str, int] = {}
        if self.normalised is not None:
            names.append("iou_normalised")
            if self.normalised == "tuned":
                tuned = self._thresholds(
                    found[is_tuning].assign(curves=found["normalised"].map(lambda x: [x]))
                )
            cases["iou_normalised"] = [
                curve[tuned.get(finding, 0)] if self.normalised == "otsu" or finding in tuned else math.nan
                for finding, curve in zip(cases["category"], cases["normalised"], strict=True)
            ]
        cases["subject_id"] = subject_ids(tables, cases["dicom_id"])
        columns = list(dict.fromkeys([*COLUMNS, *names]))
        cases = cases[columns].astype(dict.fromkeys(names, "float64"))
        metrics = summaries.values_of(summaries.localisation(cases, summaries.once(cases)))
        without = sorted(set(cases["category"]) - set(thresholds))
        notes = [NO_REGIONS] if cases.empty else []
        if without:
            notes.append(
                f"localisation: no IoU and Dice at a threshold of {', '.join(without)}: fewer than {self.min_cases} "
                "validate cases to choose it on (min_cases)"
            )
        if n_unseen := int((cases["area"] == 0).sum()):
            notes.append(
                f"localisation: {n_unseen} of {len(cases)} cases lie outside what the model sees: hit and IoU 0"
            )
        levels = default_thresholds().tolist()
        normalised = {name: NORMALISED_THRESHOLDS[place] for name, place in tuned.items()}
        result = EvaluationResult(
            metrics=metrics,
            scalars={
                f"{self.section}_{name}": metrics[name] for name in names if metrics.get(name) is not None
            },
            protocol={
                "phrases": {finding: self.text(finding) for finding in cases["category"].unique()},
                "thresholds": {finding: round(levels[place], 2) for finding, place in thresholds.items()},
                **({"thresholds_normalised": normalised} if normalised else {}),
            },
            counts={
                "cases": len(cases),
                "images": int(cases["dicom_id"].nunique()),
                "patients": int(cases["subject_id"].nunique()),
                "by_category": cases["category"].value_counts().sort_index().to_dict(),
            },
            notes=notes,
            predictions=cases,
        )
        return {self.section: result}

    def _thresholds(self, cases: pd.DataFrame) -> dict[str, int]:
        """Finding -> place of the threshold with the best mean IoU, the lowest of equals."""
        return {
            str(finding): int(np.argmax(np.nanmean([curves[0] for curves in rows["curves"]], axis=0)))
            for finding, rows in cases.groupby("category")
            if len(rows) >= self.min_cases
        }
