"""Eta of the training reports' sentences, for training and for the command `eta`."""

from __future__ import annotations

import copy
from typing import Any

import pandas as pd
import torch

from medclip_dcl.data.fields import FieldRows, values_of
from medclip_dcl.data.prepared import PreparedSet

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def training_sentences(prepared: PreparedSet) -> pd.DataFrame:
    """The table "sentences", of the training reports alone, with their number in the column train_reports."""
    reports = prepared.table("reports")
    reports = reports[reports["study_id"].isin(prepared.studies("train"))]
    counts = reports.groupby("sentence_id")["study_id"].nunique().rename("train_reports")
    return prepared.table("sentences").join(counts, on="sentence_id", how="inner").reset_index(drop=True)


def with_eta(sentences: pd.DataFrame, rule: Any) -> pd.DataFrame:
    """The table with the column eta, by a `ClassProbability`, which reads its fields from the other columns."""
    every = range(len(sentences))
    fields = {name: FieldRows({"value": values_of(sentences[name])})[every] for name in rule.requires}
    with torch.no_grad():
        # A copy: a rule with parameters stays where it is trained.
        eta = copy.deepcopy(rule).cpu()(**fields)
    if eta.shape != (len(sentences),):
        raise ValueError(
            f"{type(rule).__name__} returned a class probability of shape {tuple(eta.shape)}, expected one for each "
            f"anchor: {(len(sentences),)}"
        )
    return sentences.assign(eta=eta.numpy())
