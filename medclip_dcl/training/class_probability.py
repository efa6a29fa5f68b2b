"""Table of each training sentence's eta in the run folder, and a warning if its scale looks wrong."""

from __future__ import annotations

import warnings
from pathlib import Path

import pandas as pd
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_info

from medclip_dcl.common.files import write_parquet
from medclip_dcl.data.eta import QUANTILES, training_sentences, with_eta
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.data.link import trainer_data
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.objectives.class_probability import unusual_median
from medclip_dcl.runs.run_folder import CLASS_PROBABILITY_FILE


class ClassProbabilityTable(Callback):
    """Writes class_probability.parquet when training starts: sentence_id, text, n_reports, log_p, eta.

    n_reports counts the reports of the whole set, evaluation included. On the phantom rho and sentence_share stand
    beside them. Prints the quantiles of eta over the training reports' distinct sentences and warns where their median
    is unusual (`objectives.class_probability.unusual_median`). A constant eta writes nothing.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        datamodule = trainer_data(trainer)
        if not (isinstance(pl_module, ImageTextModel) and isinstance(datamodule, ImageTextDataModule)):
            return
        if pl_module.class_probability.requires and trainer.is_global_zero:
            table = class_probability_table(pl_module, datamodule)
            if not trainer.fast_dev_run:  # type: ignore[attr-defined]
                write_parquet(table, Path(trainer.default_root_dir) / CLASS_PROBABILITY_FILE)
            _report_quantiles(table["eta"], "log_p" in table)


def class_probability_table(model: ImageTextModel, data: ImageTextDataModule) -> pd.DataFrame:
    """Eta of every distinct sentence of the training reports, with what it was computed from."""
    table = training_sentences(data.prepared).drop(columns="train_reports")
    rule = model.class_probability
    names = {*rule.requires} | ({"rho", "sentence_share"} if data.prepared.has("classes") else set())
    for name, rows in data.sentence_fields(sorted(names)).items():
        values = rows.exact(table["sentence_id"].to_numpy())
        table[name] = list(values) if values.ndim > 1 else values
    data.prepared.forget_tables()
    return with_eta(table, rule).drop(columns="sentence_embedding", errors="ignore")


def _report_quantiles(eta: pd.Series, is_of_scores: bool) -> None:
    quantiles = ", ".join(f"{q:.0%} {eta.quantile(q):.3g}" for q in QUANTILES)
    rank_zero_info(f"eta of {len(eta)} training sentences: {quantiles}")
    if problem := unusual_median(eta.to_numpy()):
        advice = (
            "; (a, k) do not fit these sentence scores: SSD's (0.2, 0.35) belong to CXR-BERT, medclip-dcl eta "
            "says whether other values fit, and a constant (--config objective/dcl_005) needs no scores"
        )
        warnings.warn(problem + advice * is_of_scores, stacklevel=2)
