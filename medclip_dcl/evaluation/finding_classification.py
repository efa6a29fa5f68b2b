"""Classification of findings by a trained classifier: linear probes and fine-tuned networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor

from medclip_dcl.common.errors import check_choice
from medclip_dcl.data.images import EvaluatedImages
from medclip_dcl.data.labelled import LabelledImages
from medclip_dcl.evaluation.callback import Results, Values
from medclip_dcl.evaluation.classification import Classification, classification_result, measured_cases
from medclip_dcl.networks.classifier import FindingNetwork

COLUMNS = ["dicom_id", "subject_id", "finding", "label", "logit"]


class FindingClassification(Classification):
    """AUC, average precision and accuracy of each finding, and their averages, on validate and test images.

    A case is an image and a finding that the labeller calls present or absent, whatever the training's policy for
    uncertain and blank labels. The predicted label is positive where the logit is above 0.

    Logs the averages ``<stage>/auc``, ``<stage>/average_precision`` and ``<stage>/acc`` (on validate NaN where no
    finding has enough cases) and each with ``_<finding>`` (lower case, underscores) for each finding with enough cases.

    Args:
        min_cases: positive and negative cases, each, that a finding needs; with fewer it gets no number and a
            warning says so (choice).
        blank: "ignore": a finding that the report does not mention is not a case; "zeros": a negative case. Findings
            that the labeller never calls absent, such as Support Devices, need "zeros".
        bands: as in :class:`medclip_dcl.evaluation.ZeroShotClassification`.
    """

    section = "finding_classification"
    network_class = FindingNetwork
    measured = "logits"
    options = ("min_cases", "blank", "bands")

    def __init__(
        self,
        min_cases: int = 5,
        blank: Literal["ignore", "zeros"] = "ignore",
        bands: tuple[float, float] = (0.1, 0.01),
    ) -> None:
        super().__init__(min_cases, bands)
        check_choice("FindingClassification.blank", blank, ("ignore", "zeros"))
        self.blank = blank

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and isinstance(network := self._network(pl_module), FindingNetwork):
            network.blank = self.blank  # a calibration counts the same cases

    def prepare(self, tables: LabelledImages, stage: str) -> set[str]:
        return set(labelled_cases(tables, self.blank)["dicom_id"])

    def measure(
        self, network: FindingNetwork, output: Float[Tensor, "image finding"], dicom_ids: Sequence[str]
    ) -> dict[str, list[float]]:
        return dict(zip(dicom_ids, output.cpu().tolist(), strict=True))

    def summarise(self, network: FindingNetwork, values: Values, tables: LabelledImages) -> Results:
        cases = logit_cases(labelled_cases(tables, self.blank), network.findings, values, tables)
        labelled = set(tables.labels["finding"])
        how = self.min_cases, labelled, self._bands
        return {self.section: classification_result(cases, network.findings, *how)}


def labelled_cases(tables: LabelledImages, blank: str) -> pd.DataFrame:
    """dicom_id, finding and label (1 / 0) of each case; `blank` as in FindingClassification."""
    labels = tables.labels
    if blank == "zeros":
        labels = labels.assign(label=labels["label"].fillna(0.0))
    return labels[labels["label"].isin([0.0, 1.0])]


def logit_cases(
    labels: pd.DataFrame, findings: Sequence[str], values: Mapping[str, Any], tables: EvaluatedImages
) -> pd.DataFrame:
    """Cases with the logits of their images, from the logits of each image by finding."""
    cases = measured_cases(labels, findings, values, tables)
    logits = [values[d][place] for d, place in zip(cases["dicom_id"], cases["place"], strict=True)]
    return cases.assign(logit=np.array(logits, dtype="float64"))[COLUMNS]
