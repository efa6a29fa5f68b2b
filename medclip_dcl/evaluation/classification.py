"""Zero-shot classification of findings by a pair of prompts (SSD, section 3.2 and tables 2, 3)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pytorch_lightning import LightningModule, Trainer

from medclip_dcl.common.errors import check_range
from medclip_dcl.common.findings import Ensemble, require_labelled
from medclip_dcl.data.image_text import EvaluationTables
from medclip_dcl.data.images import EvaluatedImages
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.evaluation.callback import (
    EvaluationCallback,
    EvaluationResult,
    Results,
    Values,
    embed_texts,
    evaluation_data,
    subject_ids,
)
from medclip_dcl.metrics import summaries
from medclip_dcl.metrics.table import BANDS, band_of
from medclip_dcl.networks.described import Encoded
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.zero_shot import ZeroShot
from medclip_dcl.pictures.plots import roc_figure

NO_CASES = "no image has a label of these findings: zero-shot classification is not measured"
COLUMNS = ["dicom_id", "subject_id", "finding", "label", "score_positive", "score_negative"]


class Classification(EvaluationCallback):
    """Base class of the classifications: an evaluation whose cases have a finding and a label."""

    _bands: dict[str, str] | None = None
    """Band of each finding of the set, on test; empty without train patients."""

    def __init__(self, min_cases: int, bands: tuple[float, float]) -> None:
        super().__init__()
        check_range(type(self).__name__, "[1, inf)", min_cases=min_cases)
        if not 0 < bands[1] <= bands[0] < 1:
            raise ValueError(f"{type(self).__name__}: bands: expected 1 > head >= tail > 0, found {bands}")
        self.min_cases, self.bands = min_cases, list(bands)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._bands = bands_of_findings(evaluation_data(trainer).prepared, *self.bands)

    def figures(self, load_image: Any) -> Iterator[tuple[str, Figure]]:
        """ROC curves of the findings that have enough cases."""
        result = self.results[self.section]
        aucs = {name: found["auc"] for name, found in result.metrics["by_finding"].items()}
        if any(auc is not None for auc in aucs.values()):
            yield "roc", roc_figure(result.predictions, aucs)


class ZeroShotClassification(Classification):
    """AUC and accuracy of each finding, and their average, on validate and test images.

    The predicted label is the prompt with the higher image-sentence score; the AUC is that of score(positive) -
    score(negative) (choice, not from the paper). POS is the AUC of score(positive), NEG that of score(negative) for
    absence. Of several prompts a side, a test keeps the score of each (section prompts).

    Logs the averages ``<stage>/auc`` and ``<stage>/acc`` (on validate NaN where no finding has enough cases) and, for
    each finding with enough cases, ``<stage>/auc_<finding>`` and ``<stage>/acc_<finding>`` (lower case, underscores).

    Args:
        prompts: finding -> (negative, positive), for any finding that the data set labels; each is a prompt or a list
            of prompts, an ensemble. Or a YAML file of such pairs, or a packaged one by its name (chexpert14). null for
            CheX5's five pairs, of which the set may label any or none.
        ensemble: "scores" or "embeddings", see `medclip_dcl.networks.zero_shot.ZeroShot`.
        min_cases: positive and negative cases, each, that a finding needs; with fewer it gets no number and a
            warning says so (choice, not from the paper).
        bands: shares of the set's train patients above which a finding is of the head, and below which of the tail
            (choice).

    Raises:
        ValueError: an option out of its range; when a run begins, a finding that the data set does not label.
    """

    section = "classification"
    measures_images = True
    options = ("min_cases", "bands")
    keeps_prompts = False

    def __init__(
        self,
        prompts: Mapping[str, tuple[str | list[str], str | list[str]]] | str | None = None,
        min_cases: int = 5,
        ensemble: Ensemble = "scores",
        bands: tuple[float, float] = (0.1, 0.01),
    ) -> None:
        super().__init__(min_cases, bands)
        self.is_default = prompts is None
        self.zero_shot = ZeroShot(prompts, ensemble, "ZeroShotClassification")
        self.prompts = self.zero_shot.prompts

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A misspelt finding should not wait for the first validation.
        if not self.is_default:
            labelled = evaluation_data(trainer).evaluation("validate").labelled
            require_labelled(self.prompts, labelled, "ZeroShotClassification: prompts")

    def prepare(self, tables: EvaluationTables, stage: str) -> set[str]:
        # A data set without labels is still tested for grounding and retrieval.
        if not self.is_default and tables.labelled:
            require_labelled(self.prompts, tables.labelled, "ZeroShotClassification: prompts")
        self.keeps_prompts = stage == "test" and len(self.zero_shot.texts) > 2 * len(self.prompts)
        return set(tables.cases.loc[tables.cases["finding"].isin(self.prompts), "dicom_id"])

    def measure(self, network: ImageTextNetwork, encoded: Encoded, dicom_ids: Sequence[str]) -> Values:
        prompts = embed_texts(network, self.zero_shot.texts)
        scores = self.zero_shot.scores(network, encoded, prompts).tolist()
        if self.keeps_prompts:
            by_prompt = network.scores(encoded, prompts).T.tolist()
            scores = [[*sides, each] for sides, each in zip(scores, by_prompt, strict=True)]
        return dict(zip(dicom_ids, scores, strict=True))

    def summarise(self, network: ImageTextNetwork, values: Values, tables: EvaluationTables) -> Results:
        cases = measured_cases(tables.cases, list(self.prompts), values, tables)
        rows = [(values[d], place) for d, place in zip(cases["dicom_id"], cases["place"], strict=True)]
        cases = cases.assign(
            score_positive=[sides[1][place] for sides, place in rows],
            score_negative=[sides[0][place] for sides, place in rows],
        )
        cases = cases[COLUMNS].astype({"score_positive": "float64", "score_negative": "float64"})
        how = self.min_cases, tables.labelled, self._bands
        found = classification_result(cases, list(self.prompts), *how)
        if cases.empty:
            others = f"; the set labels {', '.join(tables.labelled)} (--prompts)" if tables.labelled else ""
            found.notes = [f"{NO_CASES}{others}"]
        for finding, pair in self.prompts.items():
            if any(network.text_encoder.are_truncated([*pair[0], *pair[1]])):
                found.notes.append(
                    f"{finding}: a prompt is longer than the text encoder takes: its end is cut off"
                )
        found.protocol["prompts"] = {
            finding: {"negative": _one_or_all(pair[0]), "positive": _one_or_all(pair[1])}
            for finding, pair in self.prompts.items()
        }
        found.protocol["blank"] = tables.blank
        found.protocol["ensemble"] = self.zero_shot.identity()["ensemble"]
        results = {self.section: found}
        if self.keeps_prompts:
            measured = {one for one, x in found.metrics["by_finding"].items() if x["auc"] is not None}
            results["prompts"] = self._by_prompt(cases[cases["finding"].isin(measured)], values)
        return results

    def _by_prompt(self, cases: pd.DataFrame, values: Mapping[str, Any]) -> EvaluationResult:
        """Score of each case by each single prompt of its finding."""
        parts = []
        for place, (side, finding, text) in enumerate(self.zero_shot.wordings):
            its = cases[cases["finding"] == finding].assign(side=("negative", "positive")[side], prompt=text)
            parts.append(its.assign(score=[values[d][2][place] for d in its["dicom_id"]]))
        table = pd.concat(parts, ignore_index=True)
        metrics = summaries.values_of(summaries.prompts(table, summaries.once(table)))
        return EvaluationResult(metrics, predictions=table.drop(columns=COLUMNS[-2:]))


def bands_of_findings(prepared: PreparedSet, head: float, tail: float) -> dict[str, str]:
    """Band of each labelled finding by the share of train patients with at least one 1; empty without any."""
    images = prepared.rows("images", ["study_id", "subject_id"], use=["train"])
    labels = prepared.rows("labels").set_index("study_id").eq(1)
    of_images = labels.reindex(images["study_id"], fill_value=False)
    shares = of_images.groupby(images["subject_id"].to_numpy()).any().mean()
    return {str(finding): band_of(share, head, tail) for finding, share in shares.dropna().items()}


def measured_cases(
    labels: pd.DataFrame, findings: Sequence[str], values: Mapping[str, Any], tables: EvaluatedImages
) -> pd.DataFrame:
    """Cases of the measured images, finding by finding, with subject_id and the finding's `place` in the list."""
    places = {finding: place for place, finding in enumerate(findings)}
    cases = labels[labels["finding"].isin(places) & labels["dicom_id"].isin(values)]
    cases = cases.assign(
        subject_id=subject_ids(tables, cases["dicom_id"]),
        label=cases["label"].astype("int64"),
        place=cases["finding"].map(places),
    )
    return cases.sort_values(["place", "dicom_id"]).reset_index(drop=True)


def classification_result(
    cases: pd.DataFrame,
    findings: Sequence[str],
    min_cases: int,
    labelled: Collection[str],
    bands: Mapping[str, str] | None = None,
) -> EvaluationResult:
    """Numbers of each finding and their averages, with a note for each finding that has too few cases.

    Cases are predictions by two prompts or by logits; some findings may have none, others may not be `labelled` at all.
    `bands` of the findings: empty for a set without train patients, None outside a test.
    """
    if bands:
        cases = cases.assign(band=cases["finding"].map(bands).astype("object"))
    # results.json holds these numbers in single precision.
    numbers = summaries.classification(
        cases, summaries.once(cases), min_cases, findings=findings, dtype=np.float32
    )
    by_finding = summaries.values_of(numbers.pop("by_finding"))
    averages = summaries.values_of(numbers)
    of_all = {name: value for name, value in averages.items() if name not in BANDS}
    scalars = {name: math.nan if value is None else value for name, value in of_all.items()}
    counts, notes = {}, []
    if bands is not None and not bands:
        notes.append(f"no means over {', '.join(BANDS)} of the findings: the set has no train patients")
    for finding, found in by_finding.items():
        labels = cases.loc[cases["finding"] == finding, "label"]
        positives, negatives = int((labels == 1).sum()), int((labels == 0).sum())
        counts[finding] = {"positives": positives, "negatives": negatives}
        if found["auc"] is not None:
            key = finding.lower().replace(" ", "_")
            scalars |= {f"{name}_{key}": value for name, value in found.items()}
        elif finding in labelled:
            notes.append(
                f"{finding}: no AUC and accuracy from {positives} positive and {negatives} negative cases; at least"
                f" {min_cases} of each are needed (min_cases)"
            )
        else:
            notes.append(f"{finding}: no AUC and accuracy: the data set does not label it")
    n_findings = sum(found["auc"] is not None for found in by_finding.values())
    return EvaluationResult(
        metrics={**averages, "n_findings": n_findings, "by_finding": by_finding},
        scalars=scalars,
        counts={
            "images": int(cases["dicom_id"].nunique()),
            "patients": int(cases["subject_id"].nunique()),
            "by_finding": counts,
            "bands": {finding: bands[finding] for finding in findings if finding in bands} if bands else {},
        },
        notes=notes,
        predictions=cases,
    )


def _one_or_all(texts: tuple[str, ...]) -> str | list[str]:
    return texts[0] if len(texts) == 1 else list(texts)
