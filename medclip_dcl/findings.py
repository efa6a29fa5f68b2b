"""The findings that the project speaks about: CheXpert's label columns and the five prompts pairs of CheX5."""

from __future__ import annotations

from typing import NamedTuple

CHEXPERT: tuple[str, ...] = (
    "Atelectasis",
    "Cardiomegaly",
    "Consolidation",
    "Edema",
    "Enlarged Cardiomediastinum",
    "Fracture",
    "Lung Lesion",
    "Lung Opacity",
    "No Finding",
    "Pleural Effusion",
    "Pleural Other",
    "Pneumonia",
    "Pneumothorax",
    "Support Devices",
)
"""Label columns of ``mimic-cxr-2.0.0-chexpert.csv.gz``, in the release's order."""


class Prompts(NamedTuple):
    """A pair of sentences, one of which is true of an image (zero-shot classification)."""

    negative: str
    positive: str


CHEX5: dict[str, Prompts] = {
    "Cardiomegaly": Prompts("Heart size normal", "Cardiomegaly"),
    "Edema": Prompts("No pulmonary edema", "Pulmonary edema"),
    "Pleural Effusion": Prompts("No pleural effusions", "Pleural effusions"),
    "Pneumonia": Prompts("No signs of pneumonia", "Findings suggesting pneumonia"),
    "Pneumothorax": Prompts("No pneumothorax", "Pneumothorax"),
}
"""Prompts of Wang et al., MLHC 2023, table 2, keyed by CheXpert column, in the order of their table 3."""
