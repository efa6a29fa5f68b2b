"""Documents of sentences to learn from, and labelled texts and reports to evaluate encoders of sentences on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from medclip_dcl.common.errors import UserError, check_min
from medclip_dcl.common.files import digest_of_file, read_text
from medclip_dcl.data.link import LinkedDataModule
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet, labelled_findings
from medclip_dcl.data.samplers import EpochDataModule, EpochSampler, ShardSampler, as_it_is, worker_options

_AT_ONCE = 256
"""Evaluated texts in a batch."""


@dataclass(frozen=True)
class SentencesRequirements:
    """Token ids of each text, special tokens included."""

    tokenize: Callable[[Sequence[str]], list[list[int]]]


@dataclass(frozen=True)
class SentencesProvided:
    """Distinct sentences of the training, or of the test."""

    texts: Sequence[str]


class Task(NamedTuple):
    """Cases to classify, each by the mean of its texts."""

    texts: list[np.ndarray]
    """Numbers of each case's texts."""
    label: np.ndarray
    """Class of each case, a text."""
    group: np.ndarray
    """Cases of one group, such as a patient's reports, are in one fold."""


class SentencesDataModule(LinkedDataModule[SentencesRequirements], EpochDataModule):
    """Documents whose sentences stand in their order: training reports of a prepared set, or paragraphs of a file.

    A training batch has whole documents, as a dict: tokens (text, token), padded, and lengths (text,) of its distinct
    texts; row (sentence,), the text of each sentence; document (sentence,), a number for each; position (sentence,) in
    it. A document of one sentence teaches nothing and is left out.

    The test serves the texts of all tasks: tokens, lengths, and index (text,), the text's number. Tasks are the files
    in `tasks`, and of a prepared set the labels 1 and 0 of its reports that are not of training, where a case is a
    report and folds keep a patient's reports together.

    Args:
        folder: a prepared set with reports; null for none.
        text_file: UTF-8, a sentence a line, an empty line between documents; null for a prepared set.
        tasks: name: CSV file with columns text and label, whose classes are told apart. "" leaves out a name of
            another configuration.
        batch_size: documents per step, of all processes together.
        max_sentences: longer documents are cut into documents of this many sentences (choice).
        seed: of the order.
    """

    accepts = SentencesRequirements

    def __init__(
        self,
        folder: str | None = None,
        text_file: str | None = None,
        tasks: dict[str, str] | None = None,
        batch_size: int = 64,
        max_sentences: int = 50,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if (folder is None) == (text_file is None):
            raise UserError(
                f"data: expected either folder, a prepared set, or text_file, found {folder} and {text_file}"
            )
        check_min(
            "data", {"batch_size": (batch_size, 1), "max_sentences": (max_sentences, 2), "seed": (seed, 0)}
        )
        self.folder, self.text_file, self.task_files = folder, text_file, tasks or {}
        self.batch_size, self.max_sentences, self.seed = batch_size, max_sentences, seed
        self.tasks: dict[str, Task] = {}
        self.texts: list[str] = []  # distinct ones of the stage
        self._documents: list[np.ndarray] = []

    def load(self, stage: str) -> None:
        if stage == "fit":
            self._load_documents()
        else:
            self._load_tasks()

    def provided(self) -> SentencesProvided:
        return SentencesProvided(self.texts)

    def dataset(self) -> dict[str, Any]:
        """Description of the data for results.json."""
        content = (
            {"fingerprint": PreparedSet(self.folder).fingerprint}
            if self.folder
            else {"sha256": digest_of_file(Path(str(self.text_file)))}
        )
        tasks = {name: digest_of_file(Path(file)) for name, file in self.task_files.items() if file}
        return {"source": Path(str(self.folder or self.text_file)).name, **content, "tasks": tasks}

    def _load_documents(self) -> None:
        if self.folder is not None:
            prepared = PreparedSet(self.folder)
            prepared.require_separate_patients()
            reports = _sentences_of(prepared, prepared.studies("train"))
            found = [texts.tolist() for _, texts in reports.groupby("study_id")["text"]]
        else:
            paragraphs = read_text(Path(str(self.text_file))).replace("\r\n", "\n").split("\n\n")
            found = [[x.strip() for x in one.splitlines() if x.strip()] for one in paragraphs]
        pieces = [
            one[start : start + self.max_sentences]
            for one in found
            for start in range(0, len(one), self.max_sentences)
        ]
        documents = [one for one in pieces if len(one) > 1]
        rank_zero_info(
            f"data: {len(documents):,} documents of {sum(map(len, documents)):,} sentences; left out are "
            f"{len(pieces) - len(documents):,} of one sentence"
        )
        self.texts, numbers = _distinct([text for one in documents for text in one])
        self._documents = np.split(numbers, np.cumsum([len(one) for one in documents])[:-1])

    def _load_tasks(self) -> None:
        texts: list[str] = []
        cases: dict[str, tuple[list[int], np.ndarray, np.ndarray]] = {}  # texts of a case, labels, groups
        for name, file in self.task_files.items():
            if file:
                table = _labelled_texts(name, Path(file))
                texts += table["text"].tolist()
                cases[name] = ([1] * len(table), table["label"].to_numpy(), table["text"].to_numpy())
        if self.folder is not None:
            for name, (sentences, labels, patients) in _labelled_reports(PreparedSet(self.folder)).items():
                texts += sentences["text"].tolist()
                cases[name] = (sentences.groupby("study_id").size().tolist(), labels, patients)
        if not cases:
            raise UserError(
                "data.tasks: expected a file to test on, found none; name a CSV file of texts and labels"
            )
        self.texts, numbers = _distinct(texts)
        ends = np.cumsum([sum(counts) for counts, _, _ in cases.values()])[:-1]
        for (name, (counts, label, group)), own in zip(cases.items(), np.split(numbers, ends), strict=True):
            self.tasks[name] = Task(
                np.split(own, np.cumsum(counts)[:-1]), label, np.unique(group, return_inverse=True)[1]
            )

    # Loaders

    def train_dataloader(self) -> DataLoader:
        sampler = _DocumentSampler(len(self._documents), self.batch_size, self.seed)
        return self.training_loader(
            _Documents(self._tokens(), self._documents),
            sampler,
            batch_size=self.batch_size // sampler.num_replicas,
            drop_last=True,
            collate_fn=as_it_is,
        )

    def test_dataloader(self) -> DataLoader:
        texts = _Texts(self._tokens())
        sampler = ShardSampler(range(len(self.texts)))
        return DataLoader(texts, _AT_ONCE, sampler=sampler, collate_fn=as_it_is, **worker_options(0))

    def _tokens(self) -> list[np.ndarray]:
        return [np.array(ids, dtype=np.int32) for ids in self.requirements.tokenize(self.texts)]


class _DocumentSampler(EpochSampler):
    unit = "documents"


class _Texts(Dataset):
    """Whole batches of texts by number."""

    def __init__(self, tokens: list[np.ndarray]) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitems__(self, keys: Sequence[Any]) -> dict[str, Tensor]:
        rows = [self.tokens[key] for key in keys]
        lengths = np.array([len(row) for row in rows])
        tokens = np.zeros((len(rows), lengths.max()), dtype=np.int64)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = ids
        return {
            "tokens": torch.from_numpy(tokens),
            "lengths": torch.from_numpy(lengths),
            "index": torch.tensor(keys),
        }


class _Documents(_Texts):
    """Whole batches of documents by (epoch, number)."""

    def __init__(self, tokens: list[np.ndarray], documents: list[np.ndarray]) -> None:
        super().__init__(tokens)
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def __getitems__(self, keys: Sequence[Any]) -> dict[str, Tensor]:
        numbers = [number for _, number in keys]
        counts = torch.tensor([len(self.documents[number]) for number in numbers])
        texts = np.concatenate([self.documents[number] for number in numbers])
        distinct, row = np.unique(texts, return_inverse=True)
        batch = {**super().__getitems__(distinct.tolist()), "row": torch.from_numpy(row)}
        document = torch.tensor(numbers).repeat_interleave(counts)
        position = torch.cat([torch.arange(int(count)) for count in counts])
        return {**batch, "document": document, "position": position}


def _distinct(texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """The distinct texts, and the number of each text among them."""
    number = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    return list(number), np.array([number[text] for text in texts], dtype=np.int64)


def _sentences_of(prepared: PreparedSet, studies: pd.Series) -> pd.DataFrame:
    """study_id and text of the sentences of some reports, in their order."""
    reports = prepared.table("reports")
    reports = reports[reports["study_id"].isin(studies)].sort_values(["study_id", "position"], kind="stable")
    texts = prepared.table("sentences").set_index("sentence_id")["text"]
    if reports.empty:
        raise PreparedDataError(
            f"{prepared.folder}: expected reports of the uses that are needed, found none"
        )
    return pd.DataFrame(
        {"study_id": reports["study_id"].to_numpy(), "text": texts.loc[reports["sentence_id"]].to_numpy()}
    )


def _labelled_reports(prepared: PreparedSet) -> dict[str, tuple[pd.DataFrame, np.ndarray, np.ndarray]]:
    """Sentences by report, label of each report and its patient, for each labelled finding; none of training."""
    if not prepared.has("labels"):
        return {}
    people = prepared.table("studies" if prepared.has("studies") else "images")
    people = people[people["use"].isin(("validate", "test", "grounding"))]
    patient = people.drop_duplicates("study_id").set_index("study_id")["subject_id"]
    patient = patient[~patient.index.isin(prepared.studies("train"))]
    labels, sentences = (
        prepared.table("labels").set_index("study_id"),
        _sentences_of(prepared, patient.index.to_series()),
    )
    found = {}
    for name in labelled_findings(prepared.table("labels")):
        known = labels.loc[
            labels.index.isin(sentences["study_id"]) & labels[name].isin((0, 1)), name
        ].sort_index()
        if len(known):
            own = sentences[sentences["study_id"].isin(known.index)]
            found[name] = (own, known.map({0: "0", 1: "1"}).to_numpy(), patient.loc[known.index].to_numpy())
    return found


def _labelled_texts(name: str, file: Path) -> pd.DataFrame:
    """Columns text and label of a CSV file."""
    try:
        table = pd.read_csv(file, usecols=["text", "label"], dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise UserError(f"data.tasks.{name}: {file}: {error}") from error
    if (table == "").any(axis=None):
        raise UserError(
            f"data.tasks.{name}: {file}: expected a text and a label in each row, found an empty one"
        )
    return table
