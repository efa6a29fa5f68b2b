"""Documents of sentences to learn from, and labelled texts and reports to evaluate encoders of sentences on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.common.files import digest_of_file, read_text
from medclip_dcl.data.link import LinkedDataModule
from medclip_dcl.data.prepared import PreparedSet, labelled_findings
from medclip_dcl.data.samplers import EpochDataModule, EpochSampler, ShardSampler, as_it_is, worker_options
from medclip_dcl.networks.image_text import pad_tokens

_PUBLISHED = {
    "train_5500.label": ("TREC_10.label", "latin-1", r"(\w+):\S+ (.+)", "CLASS:subclass question"),
    "msr_paraphrase_train.txt": (
        *("msr_paraphrase_test.txt", "utf-8-sig", r"([01])(?:\t[^\t]*){2}\t([^\t]+)\t([^\t]+)"),
        "5 columns between tabs: 0 or 1, two ids, two sentences",
    ),
}
"""Training file of a published split (TREC, MSRP) -> its test file, encoding, form of a line, and the form in words."""


@dataclass(frozen=True)
class SentencesRequirements:
    """Token ids of each text, special tokens included."""

    tokenize: Callable[[Sequence[str]], list[list[int]]]


class SentencesDataModule(LinkedDataModule[SentencesRequirements], EpochDataModule):
    """Documents, whose sentences stand in their order: training reports of a prepared set, or paragraphs of a file.

    A batch has whole documents, in training of two sentences or more: tokens (text, token), padded, and lengths (text,)
    of its distinct texts; row (sentence,), the text of each sentence; document and position (sentence,).

    The test serves each text of all tasks as a document of its own. Tasks are the files of `tasks`, and labels 1 and 0
    of the set's reports outside training: a case is a report, its group the patient. TREC (`train_5500.label`, six
    classes) and MSRP (`msr_paraphrase_train.txt`) have a published split, with the test file beside that file.

    Args:
        folder: a prepared set with reports; null for none.
        text_file: UTF-8, a sentence a line, an empty line between documents; null for a prepared set.
        tasks: name: CSV file with columns text and label, whose classes are told apart; or one of these files.
        batch_size: documents per step, of all processes together.
        seed: of the order.

    Attributes:
        texts: distinct ones of the stage.
        tasks: by name, a table of cases: texts (numbers of the case's texts), label, and group, or use ("train" or
            "test") where the split is published, in which two texts are a pair.
    """

    accepts = SentencesRequirements

    def __init__(
        self,
        folder: str | None = None,
        text_file: str | None = None,
        tasks: dict[str, str] | None = None,
        batch_size: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if (folder is None) == (text_file is None):
            raise UserError(f"data: expected either folder or text_file, found {folder} and {text_file}")
        check_range("data", "[1, inf)", batch_size=batch_size)
        check_range("data", "[0, inf)", seed=seed)
        self.folder, self.text_file, self.task_files = folder, text_file, tasks or {}
        self.batch_size, self.seed = batch_size, seed
        self.texts: list[str] = []
        self.tasks: dict[str, pd.DataFrame] = {}
        self._documents: list[np.ndarray] = []

    def load(self, stage: str) -> None:
        cases = self._load_documents() if stage == "fit" else self._load_tasks()
        numbers, texts = pd.factorize(cases["texts"].explode())
        self.texts = texts.tolist()
        by_case: Any = np.split(numbers, cases["texts"].str.len().to_numpy().cumsum()[:-1])
        cases["texts"] = by_case
        if stage == "fit":
            self.made_of = (
                {} if self.text_file is None else {"text_file": digest_of_file(Path(self.text_file))}
            )
            self._documents = by_case
        else:
            self._documents = [*np.arange(len(texts))[:, None]]
            by_task = cases.groupby("task", sort=False)
            self.tasks = {str(name): task.dropna(axis=1, how="all") for name, task in by_task}

    def provided(self) -> list[str]:
        return self.texts

    def dataset(self) -> dict[str, Any]:
        """Description of the data for results.json."""
        source = Path(str(self.folder or self.text_file))
        content = PreparedSet(source).fingerprint if self.folder else digest_of_file(source)
        tasks = {name: " ".join(map(digest_of_file, _files(file))) for name, file in self.task_files.items()}
        return {"source": source.name, "fingerprint": content, "tasks": tasks}

    def _load_documents(self) -> pd.DataFrame:
        if self.folder is not None:
            prepared = PreparedSet(self.folder)
            prepared.require_separate_patients()
            found = _reports(prepared, prepared.studies("train"))
        else:
            lines = map(str.strip, read_text(Path(str(self.text_file))).splitlines())
            found = pd.Series([[*paragraph] for has_text, paragraph in groupby(lines, bool) if has_text])
        documents = found[found.str.len() > 1]
        if documents.empty:
            raise UserError(
                f"data: {self.folder or self.text_file}: expected documents of two sentences to train on, found none"
            )
        rank_zero_info(
            f"data: {len(documents):,} documents of {documents.str.len().sum():,} sentences; left out are "
            f"{(found.str.len() == 1).sum():,} of one sentence"
        )
        return pd.DataFrame({"texts": documents})

    def _load_tasks(self) -> pd.DataFrame:
        """Task, texts, label and group of each case."""
        tables = [_labelled_texts(name, file) for name, file in self.task_files.items()]
        if self.folder is not None and (prepared := PreparedSet(self.folder)).has("labels"):
            tables.append(reports := _labelled_reports(prepared))
            if both := sorted({*reports["task"]} & {*self.task_files}):
                raise UserError(
                    f"data.tasks.{both[0]}: expected another name than of a finding that {self.folder} labels"
                )
        if "mean" in self.task_files:
            raise UserError(
                "data.tasks.mean: expected another name: results have the mean over tasks as mean"
            )
        if not (tables := [table for table in tables if len(table)]):
            raise UserError(
                "data.tasks: expected a file to test on, found none; name a CSV file of texts and labels"
            )
        return pd.concat(tables, ignore_index=True)

    # Loaders

    def train_dataloader(self) -> DataLoader:
        sampler = _DocumentSampler(len(self._documents), self.batch_size, self.seed)
        size = self.batch_size // sampler.num_replicas
        return self.training_loader(
            self._batches(), sampler, batch_size=size, drop_last=True, collate_fn=as_it_is
        )

    def test_dataloader(self) -> DataLoader:
        sampler = ShardSampler([(0, number) for number in range(len(self._documents))])
        return DataLoader(self._batches(), 256, sampler=sampler, collate_fn=as_it_is, **worker_options(0))

    def _batches(self) -> _Documents:
        return _Documents(self.requirements.tokenize(self.texts), self._documents)


class _DocumentSampler(EpochSampler):
    unit = "documents"


class _Documents(Dataset):
    """Whole batches of documents by (epoch, number)."""

    def __init__(self, tokens: Sequence[Any], documents: list[np.ndarray]) -> None:
        self.tokens, self.documents = tokens, documents

    def __len__(self) -> int:
        return len(self.documents)

    def __getitems__(self, keys: Sequence[Any]) -> dict[str, Tensor]:
        numbers = [number for _, number in keys]
        counts = [len(self.documents[number]) for number in numbers]
        distinct, row = np.unique(
            np.concatenate([self.documents[number] for number in numbers]), return_inverse=True
        )
        tokens, lengths = pad_tokens([self.tokens[text] for text in distinct])
        return {
            "tokens": tokens,
            "lengths": lengths,
            "row": torch.from_numpy(row),
            "document": torch.tensor(numbers).repeat_interleave(torch.tensor(counts)),
            "position": torch.cat([torch.arange(count) for count in counts]),
        }


def _reports(prepared: PreparedSet, studies: pd.Series) -> pd.Series:
    """Sentences of each report, in their order, by study_id."""
    reports = prepared.table("reports")
    reports = reports[reports["study_id"].isin(studies)].sort_values(["study_id", "position"], kind="stable")
    texts = prepared.table("sentences").set_index("sentence_id")["text"]
    return reports["sentence_id"].map(texts).groupby(reports["study_id"]).agg(list)


def _labelled_reports(prepared: PreparedSet) -> pd.DataFrame:
    """Task, texts, label and group of the reports outside training, a row for each finding that they label."""
    people = prepared.table("studies" if prepared.has("studies") else "images")
    people = people[people["use"].isin(("validate", "test", "grounding"))].drop_duplicates("study_id")
    patient = people.set_index("study_id")["subject_id"].drop(prepared.studies("train"), errors="ignore")
    texts, labels = _reports(prepared, patient.index.to_series()), prepared.table("labels")
    known = labels[labels["study_id"].isin(texts.index)].sort_values("study_id")
    cases = known.melt("study_id", labelled_findings(labels), "task", "label")
    cases = cases[cases["label"].isin((0, 1))]
    study = cases["study_id"]
    return cases.assign(
        texts=study.map(texts), label=cases["label"].map({0: "0", 1: "1"}), group=study.map(patient)
    )


def _labelled_texts(name: str, file: str) -> pd.DataFrame:
    """Task, texts, label, and group or use of the cases of a file; equal texts of a CSV file are one group."""
    if Path(file).name in _PUBLISHED:
        return _published_cases(name, file)
    try:
        table = pd.read_csv(file, usecols=["text", "label"], dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise UserError(f"data.tasks.{name}: {file}: {error}") from error
    if (table == "").any(axis=None):
        raise UserError(
            f"data.tasks.{name}: {file}: expected a text and a label in each row, found an empty one"
        )
    table["texts"] = [[text] for text in table["text"]]
    return table.rename(columns={"text": "group"}).assign(task=name)


def _files(task: str) -> list[Path]:
    """The file of a task, and the one with the test cases of a published split."""
    file, published = Path(task), _PUBLISHED.get(Path(task).name)
    return [file, file.with_name(published[0])] if published else [file]


def _published_cases(name: str, task: str) -> pd.DataFrame:
    """Task, use, label and texts of the cases of a published split, read line by line: quotes are part of a text."""
    _, encoding, pattern, form = _PUBLISHED[Path(task).name]
    cases = []
    for use, file in zip(("train", "test"), _files(task), strict=True):
        for number, line in enumerate(read_text(file, encoding).split("\n"), 1):
            if not line.strip() or (number == 1 and line.startswith("Quality\t")):
                continue
            if not (found := re.fullmatch(pattern, line.strip())):
                where, columns = f"data.tasks.{name}: {file}, line {number}", line.strip().count("\t") + 1
                raise UserError(f"{where}: expected {form}; found another form, in {columns} column(s)")
            cases.append((name, use, found[1], [*found.groups()[1:]]))
    return pd.DataFrame(cases, columns=["task", "use", "label", "texts"])
