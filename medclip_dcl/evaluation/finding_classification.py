"""Classification of findings by a trained classifier: linear probes and fine-tuned networks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from medclip_dcl.data.labelled import LabelledImages
from medclip_dcl.errors import UserError
from medclip_dcl.evaluation.base import (
    EvaluationCallback,
    Findings,
    check_choice,
    finding_key,
    subject_ids,
)
from medclip_dcl.evaluation.figures import roc_figure
from medclip_dcl.metrics import FindingMetrics, finding_metrics
from medclip_dcl.networks.classifier import FindingNetwork

COLUMNS = ["dicom_id", "subject_id", "finding", "label", "logit"]
NUMBERS = ("auc", "average_precision", "acc")
BLANK = {"ignore": "no case", "zeros": "a negative case"}
"""What no mention of a finding is taken for -> what results.json says."""


class FindingClassification(EvaluationCallback):
    """AUC, average precision and accuracy of each finding, and their averages, on validate and test images.

    A case is an image and a finding that the labeller calls present or absent, whatever the training took uncertain and
    blank labels for, so that runs of other policies are tested alike; with ``blank: ignore`` the cases of CheX5's
    findings are those of the zero-shot classification. The predicted label is positive where the logit is above 0.

    Logs ``<stage>/auc``, ``<stage>/average_precision`` and ``<stage>/acc`` (averages; on validate NaN where no finding
    has enough cases, so that a checkpoint may monitor them) and each of them with ``_<finding>`` (lower case,
    underscores) for each finding that has enough cases.

    Args:
        min_cases: positive and negative cases, each, that a finding needs; with fewer it gets no number and a
            warning says so (choice).
        blank: "ignore": a finding that the report does not mention is no case; "zeros": a negative case. Findings of
            which the labeller never says that they are absent, such as Support Devices, need "zeros".

    Raises:
        ValueError: ``min_cases`` below 1, another choice of ``blank``.
    """

    section = "finding_classification"
    stages = ("validate", "test")
    network_class = FindingNetwork
    measured = "logits"

    def __init__(self, min_cases: int = 5, blank: Literal["ignore", "zeros"] = "ignore") -> None:
        super().__init__()
        if min_cases < 1:
            raise UserError(f"FindingClassification: min_cases must be at least 1: found {min_cases}")
        check_choice("FindingClassification", "blank", blank, BLANK)
        self.min_cases, self.blank = min_cases, blank

    def prepare(self, tables: LabelledImages, stage: str) -> set[str]:
        return set(self._labelled(tables)["dicom_id"])

    def measure(
        self, network: FindingNetwork, output: Float[Tensor, "image finding"], dicom_ids: Sequence[str]
    ) -> dict[str, list[float]]:
        """The logits of each image."""
        return dict(zip(dicom_ids, output.cpu().tolist(), strict=True))

    def summarise(
        self, network: FindingNetwork, values: Mapping[str, Any], tables: LabelledImages
    ) -> Findings:
        cases = self._cases(network.findings, values, tables)
        by_finding = {}
        for finding in network.findings:
            rows = cases[cases["finding"] == finding]
            logits = torch.tensor(rows["logit"].to_numpy(dtype="float64"))
            labels = torch.tensor(rows["label"].to_numpy(dtype="int64"))
            by_finding[finding] = finding_metrics(logits, labels, self.min_cases)
        numbers = {
            finding: {name: getattr(found, name) for name in NUMBERS} for finding, found in by_finding.items()
        }
        evaluable = {finding: found for finding, found in numbers.items() if found["auc"] is not None}
        averages = {name: _mean([found[name] for found in evaluable.values()]) for name in NUMBERS}
        scalars = {name: math.nan if value is None else value for name, value in averages.items()}
        for finding, found in evaluable.items():
            scalars |= {f"{name}_{finding_key(finding)}": value for name, value in found.items()}
        return Findings(
            metrics={**averages, "n_findings": len(evaluable), "by_finding": numbers},
            scalars=scalars,
            protocol={
                "view": str(tables.view),
                "score": "logit of the finding",
                "acc": "positive where the logit is above 0",
                "blank_labels": BLANK[self.blank],
                "uncertain_labels": "no case",
                "min_cases": self.min_cases,
                "average": "over the findings with enough cases",
            },
            counts={
                "images": int(cases["dicom_id"].nunique()),
                "patients": int(cases["subject_id"].nunique()),
                "by_finding": {
                    finding: {"positives": found.positives, "negatives": found.negatives}
                    for finding, found in by_finding.items()
                },
            },
            notes=self._notes(by_finding, set(tables.labels["finding"])),
            predictions=cases,
        )

    def figures(self, load_image: Any) -> Iterator[tuple[str, Figure]]:
        """ROC curves of the findings that have enough cases."""
        assert self.found is not None
        aucs = {name: found["auc"] for name, found in self.found.metrics["by_finding"].items()}
        if any(auc is not None for auc in aucs.values()):
            yield "roc", roc_figure(self.found.predictions, aucs)

    def _notes(self, by_finding: Mapping[str, FindingMetrics], labelled: Collection[str]) -> list[str]:
        return [
            f"{finding}: no number from {found.positives} positive and {found.negatives} negative cases; at least"
            f" {self.min_cases} of each are needed (min_cases)"
            if finding in labelled
            else f"{finding}: no number: the data set does not label it"
            for finding, found in by_finding.items()
            if found.auc is None
        ]

    def _labelled(self, tables: LabelledImages) -> pd.DataFrame:
        """dicom_id, finding and label (1 / 0) of each case."""
        labels = tables.labels
        if self.blank == "zeros":
            labels = labels.assign(label=labels["label"].fillna(0.0))
        return labels[labels["label"].isin([0.0, 1.0])]

    def _cases(
        self, findings: Sequence[str], values: Mapping[str, Any], tables: LabelledImages
    ) -> pd.DataFrame:
        """A row for each case, finding by finding."""
        order = {finding: position for position, finding in enumerate(findings)}
        cases = self._labelled(tables)
        cases = cases[cases["dicom_id"].isin(values)]
        rank = cases["finding"].map(order)
        cases = cases.assign(
            subject_id=subject_ids(tables, cases["dicom_id"]),
            label=cases["label"].astype("int64"),
            logit=[values[d][order[f]] for d, f in zip(cases["dicom_id"], cases["finding"], strict=True)],
            _rank=rank,
        )
        cases = cases.sort_values(["_rank", "dicom_id"])
        return cases[COLUMNS].astype({"logit": "float64"}).reset_index(drop=True)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
