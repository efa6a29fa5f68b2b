"""Masked sentences: which reports are read, what is masked, and that nothing depends on who does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from medclip_dcl.common.files import write_json
from medclip_dcl.data.link import ReportsRequirements
from medclip_dcl.data.masking import SPECIAL_TOKENS, Masking
from medclip_dcl.data.prepared import FORMAT_VERSION, write_table
from medclip_dcl.data.reports import LengthSampler, ReportsDataModule, train_word_pieces
from medclip_dcl.networks.masked_language import IGNORED

TEXTS = [
    "No pneumothorax.",  # 0: studies 1, 2, 3 (train) and 11 (validate); twice in study 1
    "Heart size is normal.",  # 1: studies 1, 2
    "Small left pleural effusion.",  # 2: study 3
    "Moderate cardiomegaly is seen today.",  # 3: study 11 (validate)
    "Secret of the test patients.",  # 4: study 21 (test)
    "Secret of grounding.",  # 5: study 31 (grounding)
]
REPORTS = [(1, 0), (1, 1), (1, 0), (2, 0), (2, 1), (3, 0), (3, 2), (11, 0), (11, 3), (21, 4), (31, 5)]
USE = {1: "train", 2: "train", 3: "train", 11: "validate", 21: "test", 31: "grounding"}


def write_set(folder: Path, uses: dict[int, str] = USE, patients: dict[int, int] | None = None) -> Path:
    """A prepared set of reports without pictures; study 1 has two images."""
    studies = [*uses, 1]
    images = pd.DataFrame(
        {
            "dicom_id": [f"image{row}" for row in range(len(studies))],
            "subject_id": [(patients or {}).get(study, study) for study in studies],
            "study_id": studies,
            "view": "PA",
            "official_split": "train",
            "use": [uses[study] for study in studies],
            "path": "none.jpg",
            "height": 9,
            "width": 7,
        }
    )
    reports = pd.DataFrame(REPORTS, columns=["study_id", "sentence_id"])
    reports.insert(1, "section", "findings")
    reports.insert(2, "position", reports.groupby("study_id").cumcount())
    sentences = pd.DataFrame({"sentence_id": range(len(TEXTS)), "text": TEXTS, "n_reports": 1})
    for name, table in (("images", images), ("reports", reports), ("sentences", sentences)):
        write_table(table, folder / f"{name}.parquet", name)
    write_json({"format_version": FORMAT_VERSION, "phantom": True}, folder / "dataset.json")
    return folder


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    return write_set(tmp_path / "set")


def set_up(folder: Path, pretrained: str | None = None, **options: Any) -> ReportsDataModule:
    """A datamodule attached to a trainer whose model starts from `pretrained`."""
    arguments: dict[str, Any] = {"batch_size": 2, "vocabulary_size": 90, **options}
    data = ReportsDataModule(str(folder), **arguments)
    data.connect(ReportsRequirements(pretrained))
    data.setup("fit")
    return data


def originals(data: ReportsDataModule, batch: dict[str, torch.Tensor]) -> list[str]:
    """Texts of a batch with the masked word pieces put back."""
    tokens = torch.where(batch["labels"] == IGNORED, batch["tokens"], batch["labels"])
    rows = zip(tokens.tolist(), batch["lengths"].tolist(), strict=True)
    return [data.tokenizer.decode(row[1 : length - 1]) for row, length in rows]


def epoch(data: ReportsDataModule, number: int) -> list[dict[str, torch.Tensor]]:
    loader = data.train_dataloader()
    loader.sampler.set_epoch(number)  # type: ignore[attr-defined]
    return list(loader)


def lowered(*sentence_ids: int) -> list[str]:
    return sorted(TEXTS[i].lower() for i in sentence_ids)


# Study 1 has two images and says sentence 0 twice: two mentions, not four.
def test_each_mention_is_served(prepared: Path) -> None:
    data = set_up(prepared, batch_size=1)
    served = [text for batch in epoch(data, 0) for text in originals(data, batch)]
    assert sorted(served) == lowered(0, 0, 0, 0, 1, 1, 2)


def test_validation_is_the_validate_reports_alone(prepared: Path) -> None:
    data = set_up(prepared, vocabulary_size=120)
    first, second = (list(data.val_dataloader()) for _ in range(2))
    served = [text for batch in first for text in originals(data, batch)]
    assert len(served) == 2 and lowered(0)[0] in served
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(first, second, strict=True))


def test_vocabulary_is_of_the_training_sentences_alone(prepared: Path) -> None:
    data = set_up(prepared, vocabulary_size=300)
    assert data.tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 4]) == list(SPECIAL_TOKENS)
    vocabulary = data.tokenizer.get_vocab()
    assert "pneumothorax" in vocabulary and "effusion" in vocabulary
    assert not {"cardiomegaly", "secret", "grounding", "today"} & set(vocabulary)


def test_batches_say_which_sentences_they_hold(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("Lungs are clear.\n\n  No pneumothorax.\n", encoding="utf-8")
    data = set_up(prepared, batch_size=1, extra_text=str(tmp_path / "more.txt"))
    pairs = [
        (sentence, text)
        for batch in epoch(data, 0)
        for sentence, text in zip(batch["sentence_id"].tolist(), originals(data, batch), strict=True)
    ]
    known = [(sentence, TEXTS[sentence].lower()) for sentence in (0, 0, 0, 0, 1, 1, 2)]
    assert sorted(pairs) == sorted([*known, (-1, "lungs are clear."), (-1, lowered(0)[0])])
    assert all(batch["sentence_id"].min() >= 0 for batch in data.val_dataloader())


def test_masking_follows_seed_epoch_sentence(prepared: Path) -> None:
    def batches(number: int, **options: Any) -> list[list]:
        found = epoch(set_up(prepared, **options), number)
        return [[value.tolist() for value in batch.values()] for batch in found]

    assert batches(3) == batches(3)
    assert batches(3) == batches(3, num_workers=1)
    assert batches(3) != batches(4)
    assert batches(3) != batches(3, seed=1)


def vocabulary(size: int) -> dict[str, int]:
    """The special tokens and ordinary ones, of consecutive ids."""
    return {piece: i for i, piece in enumerate([*SPECIAL_TOKENS, *map(str, range(5, size))])}


def test_masking_shares_are_berts() -> None:
    """15% chosen; of these 80% [MASK], 10% random (ordinary pieces only), 10% kept; never [CLS] or [SEP]."""
    generator = np.random.default_rng(0)
    masking = Masking(vocabulary(1000), 0.15)
    tokens = np.array([2, *range(5, 205), 3])
    masked, labels = zip(*(masking(tokens, generator) for _ in range(400)), strict=True)
    tokens, masked, labels = np.tile(tokens, (400, 1)), np.array(masked), np.array(labels)
    chosen = labels != IGNORED
    assert (chosen.sum(axis=1) == 30).all()
    assert not chosen[:, [0, -1]].any()
    assert (labels[chosen] == tokens[chosen]).all() and (masked[~chosen] == tokens[~chosen]).all()
    assert (masked[chosen] == 4).mean() == pytest.approx(0.8, abs=0.01)
    assert (masked[chosen] == tokens[chosen]).mean() == pytest.approx(0.1, abs=0.01)
    others = masked[chosen & (masked != 4) & (masked != tokens)]
    assert others.min() >= 5 and len(np.unique(others)) > 400
    assert chosen[:, 1:-1].any(axis=0).all()  # every position has its turn


def test_a_sentence_of_one_word_piece_is_masked() -> None:
    masked, labels = Masking(vocabulary(9), 0.15)(np.array([2, 7, 3]), np.random.default_rng(1))
    assert labels.tolist() == [IGNORED, 7, IGNORED]
    assert masked[[0, 2]].tolist() == [2, 3]


def test_long_sentences_are_cut(prepared: Path) -> None:
    data = set_up(prepared, max_tokens=4, batch_size=1)
    batches = epoch(data, 0)
    assert {batch["lengths"].item() for batch in batches} == {4}
    assert {batch["tokens"][0, -1].item() for batch in batches} == {3}


class _OfRank(LengthSampler):
    """One rank of several, without processes."""

    def __init__(self, rank: int, size: int, lengths: np.ndarray, batch_size: int) -> None:
        super().__init__(lengths, batch_size, seed=5)
        self.rank, self.num_replicas = rank, size


def test_batches_ignore_the_number_of_processes() -> None:
    lengths = np.random.default_rng(2).integers(3, 50, size=1003)
    whole = list(_OfRank(0, 1, lengths, 12))
    parts = [list(_OfRank(rank, 3, lengths, 12)) for rank in range(3)]
    assert len(whole) == 1003 // 12 == len(parts[1])
    for (_, batch), *shares in zip(whole, *parts, strict=True):
        assert sorted(batch) == sorted(index for _, share in shares for index in share)
        assert {len(share) for _, share in shares} == {4}


def test_every_sentence_once_in_batches_of_like_length() -> None:
    lengths = np.random.default_rng(2).integers(3, 50, size=1000)
    sampler = LengthSampler(lengths, 10, seed=0)
    batches = [batch for _, batch in sampler]
    assert sorted(index for batch in batches for index in batch) == list(range(1000))
    padded = sum(len(batch) * lengths[batch].max() for batch in batches)
    assert padded < 1.1 * lengths.sum()
    sampler.set_epoch(1)
    assert [batch for _, batch in sampler] != batches
    # Not sorted over the epoch: the first half is as long as the second.
    means = [lengths[batch].mean() for batch in batches]
    assert abs(np.mean(means[:50]) - np.mean(means[50:])) < 6


def test_trained_vocabulary_is_the_same_every_time() -> None:
    """The trainer's own numbering changes from call to call where two pairs are equally frequent."""
    words = [f"{a}{b}{c}" for a in "abcdefgh" for b in "ijkl" for c in "mnop"]
    texts = [" ".join(words[i : i + 8]) + " ümlaut Grüße" for i in range(0, len(words), 8)]
    found = [train_word_pieces(texts, 150) for _ in range(6)]
    assert all(vocabulary == found[0] for vocabulary in found)
    assert len(found[0]) == 150 and sorted(found[0].values()) == list(range(150))
