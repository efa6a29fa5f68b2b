"""Keeps each training sentence's eta in the run folder, and says when its scale looks wrong."""

from __future__ import annotations

import warnings
from pathlib import Path

import pandas as pd
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_info

from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.prepared import write_parquet
from medclip_dcl.run_folder import CLASS_PROBABILITY_FILE

LEAST_MEDIAN, GREATEST_MEDIAN = 1e-4, 0.5


class ClassProbabilityTable(Callback):
    """Writes class_probability.parquet when training starts: sentence_id, text, n_reports, log_p, eta.

    On the phantom rho and sentence_share stand beside them. Prints the quantiles of eta over the training reports'
    sentences and warns where the median is below 1e-4 or above 0.5: then (a, k) belong to another language model.
    A constant eta writes nothing.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        datamodule = getattr(trainer, "datamodule", None)
        if not (isinstance(pl_module, ImageTextModel) and isinstance(datamodule, ImageTextDataModule)):
            return
        if pl_module.class_probability.requires and trainer.is_global_zero:
            table = class_probability_table(pl_module, datamodule)
            if not trainer.fast_dev_run:  # type: ignore[attr-defined]
                write_parquet(table, Path(trainer.default_root_dir) / CLASS_PROBABILITY_FILE)
            _report_quantiles(table["eta"])


def class_probability_table(model: ImageTextModel, data: ImageTextDataModule) -> pd.DataFrame:
    """Eta of every distinct sentence of the training reports, with what it was computed from."""
    prepared = data.prepared
    train = prepared.table("images").query("use == 'train'")["study_id"]
    reports = prepared.table("reports")
    ids = reports.loc[reports["study_id"].isin(train), "sentence_id"].unique()
    sentences = prepared.table("sentences")
    table = sentences[sentences["sentence_id"].isin(ids)].reset_index(drop=True)
    requires = model.class_probability.requires
    names = set(requires) | ({"rho", "sentence_share"} if prepared.has("classes") else set())
    for name, column in data.sentence_fields(sorted(names)).items():
        table[name] = column.reindex(table["sentence_id"]).to_numpy()
    fields = {name: torch.tensor(table[name].to_numpy()) for name in requires}
    fields = {name: x.float() if x.is_floating_point() else x for name, x in fields.items()}
    with torch.no_grad():
        eta = model.class_probability.cpu()(**fields)
    if eta.shape != (len(table),):
        raise ValueError(
            f"{type(model.class_probability).__name__} returned a class probability of shape {tuple(eta.shape)}, "
            f"expected one for each anchor: {(len(table),)}"
        )
    table["eta"] = eta.numpy()
    return table


def _report_quantiles(eta: pd.Series) -> None:
    quantiles = {f"{q:.0%}": float(eta.quantile(q)) for q in (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)}
    rank_zero_info(
        f"eta of {len(eta)} training sentences: "
        + ", ".join(f"{q} {value:.3g}" for q, value in quantiles.items())
    )
    if not LEAST_MEDIAN <= quantiles["50%"] <= GREATEST_MEDIAN:
        warnings.warn(
            f"the median eta, {quantiles['50%']:.3g}, lies outside [{LEAST_MEDIAN:g}, {GREATEST_MEDIAN:g}]: (a, k) "
            "do not belong to this language model's scale; estimate them with data_prep.eta_report",
            stacklevel=2,
        )
