"""Eta of the training reports' sentences, for training and for the command `eta`."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pandas as pd
import torch

from medclip_dcl.data.arrays import Arrays
from medclip_dcl.data.examples import expected_anchors, reported_arrays
from medclip_dcl.data.fields import FieldRows
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
    fields = {
        name: FieldRows(Arrays({"value": np.array(sentences[name].to_list())}))[every]
        for name in rule.requires
    }
    with torch.no_grad():
        # A copy: a rule with parameters stays where it is trained.
        eta = copy.deepcopy(rule).cpu()(**fields)
    if eta.shape != (len(sentences),):
        raise ValueError(
            f"{type(rule).__name__} returned a class probability of shape {tuple(eta.shape)}, expected one for each "
            f"anchor: {(len(sentences),)}"
        )
    return sentences.assign(eta=eta.numpy())


def anchors_of_sentences(prepared: PreparedSet) -> pd.Series:
    """Expected number of anchors of an epoch by sentence_id: training images, each with one sentence of its report."""
    sentences, anchors = expected_anchors(Arrays(reported_arrays(prepared, "train")), draws_one=True)
    return pd.Series(anchors.numpy(), index=sentences)


def shuffled_eta(prepared: PreparedSet, sentences: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Eta dealt anew to the sentences; its distribution over training anchors is kept. A control of a study.

    Anchors are sorted by eta and cut, in a drawn order of the sentences, into stretches as long as each sentence's
    share of the anchors; a sentence gets the mean eta of its stretch. So the mean over anchors is kept exactly, and
    quantiles up to the stretch of a frequent sentence. A sentence of no training report gets the eta of a random
    anchor.

    Args:
        prepared: the set, whose training images and reports say how often a sentence is an anchor.
        sentences: sentence_id and eta of every sentence of the set (`with_eta`).
        seed: of the order.

    Returns:
        sentence_id and eta, for `data.init_args.fields` and KnownClassProbability(share="eta").
    """
    anchors = anchors_of_sentences(prepared).reindex(sentences["sentence_id"], fill_value=0.0).to_numpy()
    mass, eta = np.maximum(anchors / anchors.sum(), 1e-9), sentences["eta"].to_numpy(np.float64)
    by_eta, drawn = np.argsort(eta, kind="stable"), np.random.default_rng(seed).permutation(len(eta))
    until = np.append(0.0, mass[by_eta].cumsum())
    total = np.append(0.0, (mass * eta)[by_eta].cumsum())
    stretches = np.diff(np.interp(np.append(0.0, mass[drawn].cumsum()), until, total))
    dealt = np.empty_like(eta)
    dealt[drawn] = stretches / mass[drawn]
    return pd.DataFrame({"sentence_id": sentences["sentence_id"].to_numpy(), "eta": dealt})
