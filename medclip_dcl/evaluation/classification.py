"""Zero-shot classification of findings by a pair of prompts (SSD, section 3.2 and tables 2, 3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor
from torch.nn.functional import normalize

from medclip_dcl.data.image_text import EvaluationTables
from medclip_dcl.errors import UserError
from medclip_dcl.evaluation.base import (
    EvaluationCallback,
    Findings,
    check_choice,
    embed_texts,
    evaluation_tables,
    finding_key,
    punctuation,
    scores,
    subject_ids,
)
from medclip_dcl.evaluation.figures import roc_figure
from medclip_dcl.findings import CHEX5, read_prompts, require_labelled
from medclip_dcl.metrics import mean_over_findings, zero_shot_metrics
from medclip_dcl.networks.image_text import ImageTextNetwork

NO_CASES = "no image has a label of these findings: zero-shot classification is not measured"
COLUMNS = ["dicom_id", "subject_id", "finding", "label", "score_positive", "score_negative"]
ENSEMBLES = {
    "scores": "mean of the prompts' scores",
    "embeddings": "score of the mean of the prompts' embeddings of length 1",
}
"""How several prompts speak together -> what results.json says."""


class ZeroShotClassification(EvaluationCallback):
    """AUC and accuracy of each finding, and their average, on validate and test images.

    The predicted label is the prompt with the higher image-sentence score; the AUC is that of score(positive) -
    score(negative) (choice, not from the paper).

    Logs ``<stage>/auc``, ``<stage>/acc`` (averages; on validate NaN where no finding has enough cases, so that a
    checkpoint may monitor them) and, for each finding that has enough cases, ``<stage>/auc_<finding>`` and
    ``<stage>/acc_<finding>`` (lower case, underscores).

    Args:
        prompts: finding -> (negative, positive), for any finding that the data set labels; each is a prompt, or a
            list of several that speak together. Or a YAML file of such pairs (configs/prompts/chexpert14.yaml).
            null for CheX5's five pairs, of which the set may label any or none.
        ensemble: how several prompts speak together. "scores": the mean of their scores, which is defined for every
            similarity; "embeddings": the score of the mean of their embeddings of length 1, as CLIP has it (choice,
            not from the paper). A single prompt is the same by both.
        min_cases: positive and negative cases, each, that a finding needs; with fewer it gets no number and a
            warning says so (choice, not from the paper).

    Raises:
        ValueError: ``min_cases`` below 1; another ensemble; prompts that `medclip_dcl.findings.read_prompts` refuses;
            when a run begins, a finding of `prompts` that the data set does not label.
    """

    section = "classification"
    stages = ("validate", "test")

    def __init__(
        self,
        prompts: Mapping[str, tuple[str | list[str], str | list[str]]] | str | None = None,
        min_cases: int = 5,
        ensemble: Literal["scores", "embeddings"] = "scores",
    ) -> None:
        super().__init__()
        if min_cases < 1:
            raise UserError(f"ZeroShotClassification: min_cases must be at least 1: found {min_cases}")
        check_choice("ZeroShotClassification", "ensemble", ensemble, ENSEMBLES)
        self.is_default = prompts is None
        self.prompts = read_prompts(CHEX5 if prompts is None else prompts, "ZeroShotClassification")
        self.min_cases, self.ensemble = min_cases, ensemble
        self._labelled: set[str] = set()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A misspelt finding should not wait for the first validation.
        if not self.is_default:
            labelled = evaluation_tables(trainer, "validate").labelled
            require_labelled(self.prompts, labelled, "ZeroShotClassification: prompts")

    def prepare(self, tables: EvaluationTables, stage: str) -> set[str]:
        # A set without any label, as many hospitals', is tested in the rest.
        if not self.is_default and tables.labelled:
            require_labelled(self.prompts, tables.labelled, "ZeroShotClassification: prompts")
        asked = tables.cases["finding"].isin(self.prompts)
        self._labelled = set(tables.cases.loc[asked, "dicom_id"])
        return self._labelled

    def measure(
        self,
        network: ImageTextNetwork,
        feature_map: Float[Tensor, "image dim region_row region_column"],
        dicom_ids: Sequence[str],
    ) -> dict[str, list[float]]:
        """Scores of all negative prompts, then of all positive prompts, for each image that has a label."""
        by_image = self.scores(network, feature_map).T.tolist()
        return {
            dicom_id: row
            for dicom_id, row in zip(dicom_ids, by_image, strict=True)
            if dicom_id in self._labelled
        }

    def scores(
        self,
        network: ImageTextNetwork,
        feature_map: Float[Tensor, "image dim region_row region_column"],
    ) -> Float[Tensor, "prompt image"]:
        """Scores of each finding's negative prompts, then of each one's positive prompts."""
        negative, positive = zip(*self.prompts.values(), strict=True)
        return self._scores(network, feature_map, [*negative, *positive])

    def _scores(
        self,
        network: ImageTextNetwork,
        feature_map: Float[Tensor, "image dim region_row region_column"],
        ensembles: Sequence[tuple[str, ...]],
    ) -> Float[Tensor, "ensemble image"]:
        """One score for each ensemble of prompts and image."""
        embeddings = embed_texts(network, [text for texts in ensembles for text in texts])
        sizes = [len(texts) for texts in ensembles]
        if self.ensemble == "embeddings":
            together = [
                part if len(part) == 1 else normalize(part, dim=-1).mean(dim=0, keepdim=True)
                for part in embeddings.split(sizes)
            ]
            return scores(network, feature_map, torch.cat(together))
        found = scores(network, feature_map, embeddings)
        return torch.stack([part.mean(dim=0) for part in found.split(sizes)])

    def summarise(
        self, network: ImageTextNetwork, values: Mapping[str, Any], tables: EvaluationTables
    ) -> Findings:
        cases = self._cases(values, tables)
        by_finding = {}
        for finding in self.prompts:
            rows = cases[cases["finding"] == finding]
            by_finding[finding] = zero_shot_metrics(
                torch.tensor(rows["score_positive"].to_numpy(dtype="float64")),
                torch.tensor(rows["score_negative"].to_numpy(dtype="float64")),
                torch.tensor(rows["label"].to_numpy(dtype="int64")),
                self.min_cases,
            )
        average = mean_over_findings(by_finding.values())
        nan = float("nan")
        scalars = {
            "auc": nan if average.auc is None else average.auc,
            "acc": nan if average.acc is None else average.acc,
        }
        notes = []
        if cases.empty:
            others = f"; the set labels {', '.join(tables.labelled)} (--prompts)" if tables.labelled else ""
            notes.append(f"{NO_CASES}{others}")
        for finding, found in by_finding.items():
            if finding not in tables.labelled and not cases.empty:
                notes.append(f"{finding}: no AUC and accuracy: the data set does not label it")
                continue
            if found.auc is None or found.acc is None:
                if cases.empty:
                    continue
                notes.append(
                    f"{finding}: no AUC and accuracy from {found.positives} positive and {found.negatives} negative"
                    f" cases; at least {self.min_cases} of each are needed (min_cases)"
                )
                continue
            key = finding_key(finding)
            scalars[f"auc_{key}"], scalars[f"acc_{key}"] = found.auc, found.acc
        return Findings(
            metrics={
                "auc": average.auc,
                "acc": average.acc,
                "n_findings": sum(found.auc is not None for found in by_finding.values()),
                "by_finding": {
                    finding: {"auc": found.auc, "acc": found.acc} for finding, found in by_finding.items()
                },
            },
            scalars=scalars,
            protocol={
                "view": str(tables.view),
                "prompts": {
                    finding: {"negative": _in_words(pair[0]), "positive": _in_words(pair[1])}
                    for finding, pair in self.prompts.items()
                },
                "prompt_ensemble": (
                    ENSEMBLES[self.ensemble]
                    if any(len(texts) > 1 for pair in self.prompts.values() for texts in pair)
                    else "none"
                ),
                "prompt_punctuation": punctuation(network),
                "score": "similarity logit / gamma^2",
                "auc": "of score(positive) - score(negative)",
                "acc": "label of the prompt with the higher score, negative where they tie",
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
            notes=notes,
            predictions=cases,
        )

    def figures(self, load_image: Any) -> Iterator[tuple[str, Figure]]:
        """ROC curves of the findings that have enough cases."""
        assert self.found is not None
        aucs = {name: found["auc"] for name, found in self.found.metrics["by_finding"].items()}
        if any(auc is not None for auc in aucs.values()):
            yield "roc", roc_figure(self.found.predictions, aucs)

    def _cases(self, values: Mapping[str, Any], tables: EvaluationTables) -> pd.DataFrame:
        """A row for each image and finding with a label, in the order of the prompts."""
        order = {finding: position for position, finding in enumerate(self.prompts)}
        cases = tables.cases[tables.cases["finding"].isin(order) & tables.cases["dicom_id"].isin(values)]
        cases = cases.assign(
            subject_id=subject_ids(tables, cases["dicom_id"]),
            label=cases["label"].astype("int64"),
            score_negative=[
                values[d][order[f]] for d, f in zip(cases["dicom_id"], cases["finding"], strict=True)
            ],
            score_positive=[
                values[d][order[f] + len(order)]
                for d, f in zip(cases["dicom_id"], cases["finding"], strict=True)
            ],
        )
        rank = cases["finding"].map(order)
        cases = cases.assign(_rank=rank).sort_values(["_rank", "dicom_id"])
        return (
            cases[COLUMNS]
            .astype({"score_positive": "float64", "score_negative": "float64"})
            .reset_index(drop=True)
        )


def _in_words(texts: tuple[str, ...]) -> str | list[str]:
    return texts[0] if len(texts) == 1 else list(texts)
