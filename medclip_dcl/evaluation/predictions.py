"""What `predict` writes: embeddings and zero-shot scores, or a classifier's probabilities, as Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.distributed import gather_objects
from medclip_dcl.evaluation.base import forget_texts
from medclip_dcl.evaluation.classification import ZeroShotClassification
from medclip_dcl.models.classifier import Classifier
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.prepared import write_parquet


class PredictionWriter(Callback):
    """Writes, under predictions/ of the run folder, for the images that `predict` was given:

    image_embeddings.parquet (dicom_id, embedding: mean of the projected regions), finding_scores.parquet (dicom_id,
    finding, score_negative, score_positive: similarities in [-1, 1], by the prompts of the run's ZeroShotClassification
    or else CheX5's) and sentence_embeddings.parquet (sentence_id, embedding) of the sentences of their reports.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[list[str], np.ndarray, np.ndarray]] = []
        self._zero_shot = ZeroShotClassification()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._parts = []
        if isinstance(pl_module, ImageTextModel):
            given = (x for x in trainer.callbacks if isinstance(x, ZeroShotClassification))  # type: ignore[attr-defined]
            self._zero_shot = next(given, self._zero_shot)
            forget_texts(pl_module.network)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not isinstance(pl_module, ImageTextModel):
            return
        feature_map = outputs["feature_map"].float()
        scores = self._zero_shot.scores(pl_module.network, feature_map)
        embeddings = pl_module.network.regions(feature_map).mean(1)
        self._parts.append((outputs["dicom_id"], embeddings.cpu().numpy(), scores.T.numpy()))

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        datamodule = getattr(trainer, "datamodule", None)
        if not (isinstance(pl_module, ImageTextModel) and isinstance(datamodule, ImageTextDataModule)):
            return
        parts = [part for parts in gather_objects(self._parts) for part in parts]
        if not trainer.is_global_zero:
            return
        ids = [dicom_id for part in parts for dicom_id in part[0]]
        folder = Path(trainer.default_root_dir) / "predictions"
        embeddings = np.concatenate([part[1] for part in parts])
        images = pd.DataFrame({"dicom_id": ids, "embedding": list(embeddings)}).sort_values("dicom_id")
        write_parquet(images, folder / "image_embeddings.parquet")
        findings = list(self._zero_shot.prompts)
        scores = np.concatenate([part[2] for part in parts]).reshape(len(ids), 2, len(findings))
        rows = [
            (dicom_id, finding, float(negative), float(positive))
            for dicom_id, of_image in zip(ids, scores, strict=True)
            for finding, negative, positive in zip(findings, *of_image, strict=True)
        ]
        columns = ["dicom_id", "finding", "score_negative", "score_positive"]
        write_parquet(
            pd.DataFrame(rows, columns=columns).sort_values(["dicom_id", "finding"]),
            folder / "finding_scores.parquet",
        )
        write_parquet(
            _sentence_embeddings(pl_module, datamodule, ids), folder / "sentence_embeddings.parquet"
        )


class FindingPredictionWriter(Callback):
    """Writes predictions/finding_probabilities.parquet of a classifier's run: dicom_id, finding, logit, probability.

    Probabilities are the logits' sigmoids, not calibrated on other images than those of the training.
    """

    def __init__(self) -> None:
        self._logits: dict[str, list[float]] = {}

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logits = {}

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
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
        write_parquet(
            long.sort_values(["dicom_id", "finding"], ignore_index=True),
            folder / "finding_probabilities.parquet",
        )


def _sentence_embeddings(
    model: ImageTextModel, data: ImageTextDataModule, dicom_ids: list[str]
) -> pd.DataFrame:
    images = data.prepared.table("images")
    studies = images.loc[images["dicom_id"].isin(dicom_ids), "study_id"]
    reports = data.prepared.table("reports")
    ids = reports.loc[reports["study_id"].isin(studies), "sentence_id"].unique()
    sentences = data.prepared.table("sentences")
    sentences = sentences[sentences["sentence_id"].isin(ids)]
    embeddings = model.network.embed_texts(sentences["text"].tolist()).float().cpu().numpy()
    return pd.DataFrame({"sentence_id": sentences["sentence_id"].to_numpy(), "embedding": list(embeddings)})
