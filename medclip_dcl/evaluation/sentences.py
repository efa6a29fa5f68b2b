"""Zero-shot classification of images by sentences: is the sentence true of the image?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from torch import Tensor

from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.common.files import digest_of_file
from medclip_dcl.data.image_text import EvaluationTables
from medclip_dcl.evaluation.callback import (
    EvaluationCallback,
    EvaluationResult,
    Results,
    Values,
    embed_anew,
    subject_ids,
)
from medclip_dcl.metrics import summaries
from medclip_dcl.metrics.table import RHO_BANDS
from medclip_dcl.networks.described import Encoded
from medclip_dcl.networks.image_text import ImageTextNetwork


class SentenceClassification(EvaluationCallback):
    """AUC and precision at 10 of the images that a sentence is true of, by class of sentences, on validate and test.

    The score is the image-sentence score. Sentences of one class say the same in other words; a class counts with the
    mean over its sentences. Means over classes are of all, and of those that are true of fewer than 0.1 of the images
    (rare: by rho), of fewer than 0.4 (middle), and of more (common). On a phantom the truth decides, also on what a
    report leaves out. Elsewhere `file` gives sentences of labelled findings, which are in no band; else nothing is
    measured.

    Logs ``<stage>/sentences_auc``, ``<stage>/sentences_precision_at_10`` and both of each band with classes, such as
    ``<stage>/sentences_common_auc``.

    Args:
        file: CSV file of sentences in place of the truth: columns sentence, finding (that the set labels) and sign (+
            says that the finding is present, - that it is absent). A finding and a sign are a class; images without a
            label are no cases. null: the truth.
        min_cases: images of which a class is true, and of which it is false, each, that it needs (choice).
    """

    section = "sentences"
    measures_images = True
    options = ("min_cases",)

    def __init__(self, file: str | None = None, min_cases: int = 10) -> None:
        super().__init__()
        check_range("SentenceClassification", "[1, inf)", min_cases=min_cases)
        self.file, self.min_cases = file, min_cases
        self._given = None if file is None else read_sentences(Path(file), "SentenceClassification.file")
        self._embedded: Tensor | None = None

    def prepare(self, tables: EvaluationTables, stage: str) -> set[str]:
        self._embedded, self._states = None, None if self.file else tables.sentence_states
        of_stage = tables.sentences if stage == "validate" else tables.images
        images = pd.Index(of_stage["dicom_id"].unique()).difference(list(tables.tuning))
        if self._given is None:
            self._sentences = tables.sentence_classes.rename(columns={"class_id": "class"})
            labels = _is_true(tables.image_classes, images, pd.Index(self._sentences["class"].unique()))
        else:
            self._sentences = self._given
            if unknown := sorted({*self._given["finding"]} - {*tables.labelled}):
                raise UserError(
                    f"SentenceClassification: {self.file}: the set labels no finding {unknown[0]}; it labels"
                    f" {', '.join(tables.labelled) or 'none'}"
                )
            present = tables.cases.pivot(index="dicom_id", columns="finding", values="label").reindex(images)
            labels = pd.concat([present.add_suffix(" +"), (1 - present).add_suffix(" -")], axis=1)
            labels = labels[[name for name in labels if name in {*self._given["class"]}]]
        self._labels = self._counting(labels)
        self._n_classes = self._sentences["class"].nunique()
        is_used = self._sentences["class"].isin(self._labels)
        self._sentences = self._sentences[is_used].sort_values("sentence_id")
        return set(self._labels.index) if len(self._sentences) else set()

    def _counting(self, labels: pd.DataFrame) -> pd.DataFrame:
        """The classes (columns; 1, 0, NaN: not known) that enough images have and lack."""
        is_enough = ((labels == 1).sum() >= self.min_cases) & ((labels == 0).sum() >= self.min_cases)
        return labels.loc[:, is_enough]

    def measure(self, network: ImageTextNetwork, encoded: Encoded, dicom_ids: Sequence[str]) -> Values:
        """Scores of all sentences for each image."""
        rows = [row for row, dicom_id in enumerate(dicom_ids) if dicom_id in self._expected]
        if not rows:
            return {}
        if self._embedded is None:
            texts, ids = (self._sentences[x].tolist() for x in ("text", "sentence_id"))
            self._embedded = embed_anew(network, texts, self._states and self._states(ids))
        some = encoded.each(lambda tensor: tensor[rows])
        by_image = network.scores(some, self._embedded).T.contiguous().numpy()
        return {dicom_ids[row]: scores for row, scores in zip(rows, by_image, strict=True)}

    def summarise(self, network: ImageTextNetwork, values: Values, tables: EvaluationTables) -> Results:
        labels = self._counting(self._labels.loc[list(values)])
        is_used = self._sentences["class"].isin(labels).to_numpy()
        sentences = self._sentences[is_used]
        of_sentences = labels[sentences["class"]].to_numpy("float64").T
        sentence, image = np.nonzero(~np.isnan(of_sentences))
        scores = np.stack([*values.values()], axis=1)[is_used] if values else np.empty((0, 0), np.float32)
        dicom_ids = pd.Series(labels.index, dtype=object)
        cases = sentences[["sentence_id", "class", "rho"]].iloc[sentence].reset_index(drop=True)
        cases = cases.assign(
            dicom_id=dicom_ids.to_numpy()[image],
            subject_id=subject_ids(tables, dicom_ids).to_numpy()[image],
            label=of_sentences[sentence, image].astype("int64"),
            score=scores[sentence, image],
        )
        metrics = summaries.values_of(summaries.sentences(cases, summaries.once(cases)))
        scalars = {
            f"sentences_{path[1:].replace('/', '_')}": value
            for path, value in summaries.by_path(metrics, "")
            if value is not None
        }
        bands = summaries.bands_of(cases)
        note = ""
        if not self._n_classes:
            note = "the set has no truth (it is no phantom); give SentenceClassification a file of sentences"
        elif not len(bands):
            needed = f"true of {self.min_cases} images and false of {self.min_cases} (min_cases)"
            note = f"none of {self._n_classes} classes is {needed}"
        result = EvaluationResult(
            metrics=metrics,
            scalars=scalars,
            protocol={} if self.file is None else {"file": digest_of_file(Path(self.file))},
            counts={
                "images": len(labels) if len(cases) else 0,
                "patients": int(cases["subject_id"].nunique()),
                "sentences": len(sentences),
                "classes": len(bands),
                **{f"{band}_classes": int((bands == band).sum()) for band in RHO_BANDS},
            },
            notes=[f"sentences are not classified: {note}"] if note else [],
            predictions=cases,
        )
        return {self.section: result}


def _is_true(image_classes: pd.DataFrame, images: pd.Index, classes: pd.Index) -> pd.DataFrame:
    """1 where a class (column) is true of an image, else 0."""
    of_images = image_classes[image_classes["dicom_id"].isin(images)]
    found = pd.crosstab(of_images["dicom_id"], of_images["class_id"])
    return found.reindex(index=images, columns=classes, fill_value=0).clip(upper=1)


def read_sentences(file: Path, owner: str) -> pd.DataFrame:
    """sentence_id, text, finding, class and rho (NaN) of the sentences in a CSV file; `owner` names it in an error."""
    columns = ["sentence", "finding", "sign"]
    try:
        table = pd.read_csv(file, usecols=columns, dtype=str, keep_default_na=False)[columns]
    except (OSError, ValueError) as error:
        raise UserError(f"{owner}: {file}: {error}") from error
    for row, sign in enumerate(table["sign"], 1):
        if sign not in ("+", "-"):
            raise UserError(f"{owner}: {file}: expected the sign + or -, found {sign!r} in row {row}")
    table["class"] = table["finding"] + " " + table.pop("sign")
    return table.rename(columns={"sentence": "text"}).assign(sentence_id=range(len(table)), rho=np.nan)
