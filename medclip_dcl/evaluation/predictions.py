"""Output of `predict`: embeddings and zero-shot scores, or a classifier's probabilities, as Parquet or CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from medclip_dcl.common.distributed import gather_objects
from medclip_dcl.common.files import write_parquet, write_text
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.data.link import trainer_data
from medclip_dcl.evaluation.base import embed_anew, evaluation_data, forget_texts
from medclip_dcl.evaluation.classification import ZeroShotClassification
from medclip_dcl.models.classifier import Classifier
from medclip_dcl.models.image_text import ImageTextModel


def write_predictions(table: pd.DataFrame, file: Path) -> None:
    """Write a table as Parquet, or, by the file's suffix, as CSV with a column for each element of a vector.

    Deletes the same table in the other format, written by an earlier command.
    """
    file.with_suffix(".csv" if file.suffix == ".parquet" else ".parquet").unlink(missing_ok=True)
    if file.suffix == ".parquet":
        write_parquet(table, file)
        return
    vectors = [name for name in table if table[name].map(lambda value: isinstance(value, np.ndarray)).any()]
    for name in vectors:
        wide = pd.DataFrame(np.stack(table[name].tolist()), index=table.index).add_prefix(f"{name}_")
        table = pd.concat([table.drop(columns=name), wide], axis=1)
    write_text(table.to_csv(index=False), file)


def _with_patient_and_study(table: pd.DataFrame, trainer: Trainer) -> pd.DataFrame:
    """The table with subject_id and study_id beside its dicom_id."""
    images = evaluation_data(trainer).prepared.table("images")
    found = table.merge(images[["dicom_id", "subject_id", "study_id"]], on="dicom_id", how="left")
    first = ["dicom_id", "subject_id", "study_id"]
    return found[[*first, *(name for name in table if name not in first)]]


class PredictionWriter(Callback):
    """Writes predictions/ of the run folder for the images of `predict`.

    image_embeddings: dicom_id, subject_id, study_id, embedding (mean of the projected regions). finding_scores:
    dicom_id, subject_id, study_id, finding, score_negative, score_positive (similarities in [-1, 1]) by the prompts of
    the run's ZeroShotClassification, else CheX5's. sentence_embeddings: sentence_id, embedding of the sentences of the
    images' reports.

    Args:
        suffix: of the files, "parquet" or "csv".
    """

    def __init__(self, suffix: str = "parquet") -> None:
        self.suffix = suffix
        self._parts: list[tuple[list[str], np.ndarray, np.ndarray]] = []
        self._zero_shot = ZeroShotClassification()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._parts = []
        if isinstance(pl_module, ImageTextModel):
            given = (x for x in trainer.callbacks if isinstance(x, ZeroShotClassification))  # type: ignore[attr-defined]
            self._zero_shot = next(given, self._zero_shot)
            forget_texts(pl_module.network)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        if not isinstance(pl_module, ImageTextModel):
            return
        feature_map = outputs["feature_map"].float()
        scores = self._zero_shot.scores(pl_module.network, feature_map)
        embeddings = pl_module.network.regions(feature_map).mean(1)
        self._parts.append((outputs["dicom_id"], embeddings.cpu().numpy(), scores.T.numpy()))

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        datamodule = trainer_data(trainer)
        if not (isinstance(pl_module, ImageTextModel) and isinstance(datamodule, ImageTextDataModule)):
            return
        parts = [part for parts in gather_objects(self._parts) for part in parts]
        if not trainer.is_global_zero:
            return
        ids = [dicom_id for part in parts for dicom_id in part[0]]
        folder = Path(trainer.default_root_dir) / "predictions"
        embeddings = np.concatenate([part[1] for part in parts])
        images = pd.DataFrame({"dicom_id": ids, "embedding": list(embeddings)}).sort_values("dicom_id")
        images = _with_patient_and_study(images, trainer)
        write_predictions(images, folder / f"image_embeddings.{self.suffix}")
        findings = list(self._zero_shot.prompts)
        scores = np.concatenate([part[2] for part in parts]).reshape(len(ids), 2, len(findings))
        rows = [
            (dicom_id, finding, float(negative), float(positive))
            for dicom_id, of_image in zip(ids, scores, strict=True)
            for finding, negative, positive in zip(findings, *of_image, strict=True)
        ]
        columns = ["dicom_id", "finding", "score_negative", "score_positive"]
        long = pd.DataFrame(rows, columns=columns).sort_values(["dicom_id", "finding"])
        write_predictions(_with_patient_and_study(long, trainer), folder / f"finding_scores.{self.suffix}")
        sentences = _sentence_embeddings(pl_module, datamodule, ids)
        write_predictions(sentences, folder / f"sentence_embeddings.{self.suffix}")


class FindingPredictionWriter(Callback):
    """Writes predictions/finding_probabilities of a classifier's run.

    Columns: dicom_id, subject_id, study_id, finding, logit, probability (the logit's sigmoid, uncalibrated).

    Args:
        suffix: of the file, "parquet" or "csv".
    """

    def __init__(self, suffix: str = "parquet") -> None:
        self.suffix = suffix
        self._logits: dict[str, list[float]] = {}

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logits = {}

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        if isinstance(pl_module, Classifier):
            logits = outputs["logits"].float().cpu().tolist()
            self._logits.update(zip(outputs["dicom_id"], logits, strict=True))

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, Classifier):
            return
        logits = {dicom_id: row for part in gather_objects(self._logits) for dicom_id, row in part.items()}
        if not trainer.is_global_zero:
            return
        wide = pd.DataFrame.from_dict(logits, orient="index", columns=list(pl_module.findings)).sort_index()
        long = (
            wide.rename_axis("dicom_id")
            .reset_index()
            .melt("dicom_id", var_name="finding", value_name="logit")
        )
        long["probability"] = torch.tensor(long["logit"].to_numpy()).sigmoid().numpy()
        folder = Path(trainer.default_root_dir) / "predictions"
        long = _with_patient_and_study(long.sort_values(["dicom_id", "finding"], ignore_index=True), trainer)
        write_predictions(long, folder / f"finding_probabilities.{self.suffix}")


def _sentence_embeddings(
    model: ImageTextModel, data: ImageTextDataModule, dicom_ids: list[str]
) -> pd.DataFrame:
    images = data.prepared.table("images")
    studies = images.loc[images["dicom_id"].isin(dicom_ids), "study_id"]
    reports = data.prepared.table("reports")
    ids = reports.loc[reports["study_id"].isin(studies), "sentence_id"].unique()
    sentences = data.prepared.table("sentences")
    sentences = sentences[sentences["sentence_id"].isin(ids)]
    embeddings = embed_anew(model.network, sentences["text"].tolist()).cpu().numpy()
    return pd.DataFrame({"sentence_id": sentences["sentence_id"].to_numpy(), "embedding": list(embeddings)})
