"""Output of `predict`: embeddings and zero-shot scores, or a classifier's probabilities, as Parquet or CSV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from medclip_dcl.common.distributed import gather_objects
from medclip_dcl.common.files import write_parquet, write_text
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.data.link import trainer_data
from medclip_dcl.evaluation.callback import embed_anew, embed_texts, evaluation_data, forget_texts, is_part
from medclip_dcl.evaluation.classification import ZeroShotClassification
from medclip_dcl.models.classifier import Classifier
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.networks.described import Encoded
from medclip_dcl.networks.zero_shot import ZeroShot
from medclip_dcl.runs.run_folder import PART


class PredictionWriter(Callback):
    """Writes predictions/ of the run folder for the images of `predict`.

    Of an image-text model: image_embeddings: dicom_id, subject_id, study_id, embedding (the encoder's global vector,
    else the mean of the projected regions).
    finding_scores: dicom_id, subject_id, study_id, finding, score_negative, score_positive (similarities in [-1, 1]) by
    the prompts of the run's ZeroShotClassification, else CheX5's; in Parquet the attribute `ensemble` says how several
    were combined. sentence_embeddings: sentence_id, embedding of the
    sentences of the images' reports.

    Of a classifier: finding_probabilities: dicom_id, subject_id, study_id, finding, logit, probability (the logit's
    sigmoid, uncalibrated).

    Args:
        suffix: of the files, "parquet" or "csv".

    Attributes:
        folder: where the last predictions were written: predictions/, or that of `PART` for those that leave out
            batches and would replace earlier ones.
    """

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix
        self.folder: Path | None = None
        self._values: dict[str, Any] = {}
        self._zero_shot = ZeroShot()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._values = {}
        if isinstance(pl_module, ImageTextModel):
            callbacks = trainer.callbacks  # type: ignore[attr-defined]
            given = (x.zero_shot for x in callbacks if isinstance(x, ZeroShotClassification))
            self._zero_shot = next(given, self._zero_shot)
            forget_texts(pl_module.network)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        rows: Iterable[Any] = ()
        if isinstance(pl_module, Classifier):
            rows = outputs["logits"].float().cpu().numpy()
        elif isinstance(pl_module, ImageTextModel):
            network = pl_module.network
            encoded = Encoded(outputs["feature_map"], outputs.get("global_vector")).each(Tensor.float)
            embeddings = network.image_vectors(encoded).cpu().numpy()
            prompts = embed_texts(network, self._zero_shot.texts)
            rows = zip(embeddings, self._zero_shot.scores(network, encoded, prompts).numpy(), strict=True)
        self._values.update(zip(outputs["dicom_id"], rows, strict=True))

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = {dicom_id: value for part in gather_objects(self._values) for dicom_id, value in part.items()}
        if not found or not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        values = dict(sorted(found.items()))
        tables: dict[str, pd.DataFrame] = {}
        if isinstance(pl_module, Classifier):
            logits = _by_finding(
                values, pl_module.findings, ["logit"], [row[None] for row in values.values()]
            )
            probabilities = torch.tensor(logits["logit"].to_numpy()).sigmoid().numpy()
            tables["finding_probabilities"] = logits.assign(probability=probabilities)
        elif isinstance(pl_module, ImageTextModel):
            embeddings, scores = zip(*values.values(), strict=True)
            tables["image_embeddings"] = pd.DataFrame(
                {"dicom_id": list(values), "embedding": list(embeddings)}
            )
            findings = tuple(self._zero_shot.prompts)
            columns = ["score_negative", "score_positive"]
            tables["finding_scores"] = _by_finding(values, findings, columns, scores)
            tables["finding_scores"].attrs["ensemble"] = self._zero_shot.identity()["ensemble"]
        images = evaluation_data(trainer).prepared.table("images").set_index("dicom_id")
        folder = Path(trainer.default_root_dir)
        files = [folder / f"predictions/{name}.{suffix}" for name in tables for suffix in ("parquet", "csv")]
        if is_part(trainer) and any(file.exists() for file in files):
            rank_zero_info(
                f"these predictions leave out batches; those in {folder} stay, these go to {folder / PART}"
            )
            folder /= PART
        self.folder = folder / "predictions"
        for name, table in tables.items():
            for place, column in enumerate(("subject_id", "study_id"), start=1):
                table.insert(place, column, images[column].loc[table["dicom_id"]].to_numpy())
            self._write(table, self.folder / name)
        datamodule = trainer_data(trainer)
        if isinstance(pl_module, ImageTextModel) and isinstance(datamodule, ImageTextDataModule):
            sentences = _sentence_embeddings(pl_module, datamodule, list(values))
            self._write(sentences, self.folder / "sentence_embeddings")

    def _write(self, table: pd.DataFrame, name: Path) -> None:
        """Write a table, in CSV with a column for each number of an embedding; delete that in the other format."""
        file = name.with_name(f"{name.name}.{self.suffix}")
        file.with_suffix(".csv" if self.suffix == "parquet" else ".parquet").unlink(missing_ok=True)
        if self.suffix == "parquet":
            return write_parquet(table, file)
        if "embedding" in table:
            wide = pd.DataFrame(np.stack(table["embedding"].tolist()), index=table.index)
            table = pd.concat([table.drop(columns="embedding"), wide.add_prefix("embedding_")], axis=1)
        write_text(table.to_csv(index=False), file)


def _by_finding(
    dicom_ids: Iterable[str],
    findings: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Float[np.ndarray, "column finding"]],
) -> pd.DataFrame:
    """A row for each image and finding, in the order of both."""
    rows = [
        (dicom_id, finding, *map(float, of_finding))
        for dicom_id, of_image in zip(dicom_ids, values, strict=True)
        for finding, of_finding in zip(findings, of_image.T, strict=True)
    ]
    table = pd.DataFrame(rows, columns=["dicom_id", "finding", *columns])
    return table.sort_values(["dicom_id", "finding"], ignore_index=True)


def _sentence_embeddings(
    model: ImageTextModel, data: ImageTextDataModule, dicom_ids: list[str]
) -> pd.DataFrame:
    studies = data.prepared.rows("images", ["study_id"], dicom_id=dicom_ids)["study_id"]
    ids = data.prepared.rows("reports", ["sentence_id"], study_id=studies)["sentence_id"].unique()
    sentences = data.prepared.rows("sentences", sentence_id=ids)
    embeddings = embed_anew(model.network, sentences["text"].tolist()).cpu().numpy()
    return pd.DataFrame({"sentence_id": sentences["sentence_id"].to_numpy(), "embedding": list(embeddings)})
