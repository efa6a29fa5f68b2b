"""Families of language models, and texts that they score."""

from __future__ import annotations

from tests.text_models import write_text_model as write  # noqa: F401

MASKED = ("distilbert", "electra", "mpnet", "roberta", "deberta", "deberta-v2", "modernbert")
CAUSAL = ("gpt2",)
TEXTS = [
    "No pneumothorax.",
    "Heart size is normal.",
    "small left pneumothorax, small left effusions.",
    "",
    "heart",
    "Heart size is normal.",
    "Ædema [MASK] <mask> </s>.",
    "pneumothoraces  without effusion",
]
"""Repeats, an empty one, special tokens as text, two spaces, and words of several tokens."""
