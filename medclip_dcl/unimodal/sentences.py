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
from medclip_dcl.data.prepared import PreparedSet, labelled_findings
from medclip_dcl.data.samplers import EpochDataModule, EpochSampler, ShardSampler, as_it_is, worker_options
from medclip_dcl.networks.image_text import pad_tokens


@dataclass(frozen=True)
class SentencesRequirements:
    """Token ids of each text, special tokens included."""

    tokenize: Callable[[Sequence[str]], list[list[int]]]


class Task(NamedTuple):
    """Cases to classify: numbers of the texts of each, its class, and its group, which a fold does not divide."""

    texts: list[np.ndarray]
    label: np.ndarray
    group: np.ndarray


class SentencesDataModule(LinkedDataModule[SentencesRequirements], EpochDataModule):
    """Documents, whose sentences stand in their order: training reports of a prepared set, or paragraphs of a file.

    A training batch has whole documents of two sentences or more: tokens (text, token), padded, and lengths (text,) of
    its distinct texts; row (sentence,), the text of each sentence; document and position (sentence,).

    The test serves the texts of all tasks: tokens, lengths, and index (text,), the text's number. Tasks are the files
    of `tasks`, and labels 1 and 0 of the set's reports outside training: a case is a report, a group a patient.

    Args:
        folder: a prepared set with reports; null for none.
        text_file: UTF-8, a sentence a line, an empty line between documents; null for a prepared set.
        tasks: name: CSV file with columns text and label, whose classes are told apart.
        batch_size: documents per step, of all processes together.
        seed: of the order.
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
        check_min("data", {"batch_size": (batch_size, 1), "seed": (seed, 0)})
        self.folder, self.text_file, self.task_files = folder, text_file, tasks or {}
        self.batch_size, self.seed = batch_size, seed
        self.tasks: dict[str, Task] = {}
        self.texts: list[str] = []  # distinct ones of the stage
        self._documents: list[np.ndarray] = []

    def load(self, stage: str) -> None:
        texts = self._load_documents() if stage == "fit" else self._load_tasks()
        number = {text: place for place, text in enumerate(dict.fromkeys(texts.explode()))}
        self.texts = list(number)
        numbers = [np.array([number[text] for text in case]) for case in texts]
        if stage == "fit":
            self._documents = numbers
            return
        places = pd.Series(range(len(texts)), texts.index)
        for name, cases in places.groupby(level="task", sort=False):
            group = np.unique(cases.index.get_level_values("group"), return_inverse=True)[1]
            label = cases.index.get_level_values("label").to_numpy()
            self.tasks[str(name)] = Task([numbers[place] for place in cases], label, group)

    def provided(self) -> list[str]:
        return self.texts

    def dataset(self) -> dict[str, Any]:
        """Description of the data for results.json."""
        source = Path(str(self.folder or self.text_file))
        content = PreparedSet(source).fingerprint if self.folder else digest_of_file(source)
        tasks = {name: digest_of_file(Path(file)) for name, file in self.task_files.items()}
        return {"source": source.name, "fingerprint": content, "tasks": tasks}

    def _load_documents(self) -> pd.Series:
        if self.folder is not None:
            prepared = PreparedSet(self.folder)
            prepared.require_separate_patients()
            found = _reports(prepared, prepared.studies("train"))
        else:
            paragraphs = read_text(Path(str(self.text_file))).replace("\r\n", "\n").split("\n\n")
            found = pd.Series([[x.strip() for x in one.splitlines() if x.strip()] for one in paragraphs])
        documents = found[found.str.len() > 1]
        if documents.empty:
            raise UserError(
                f"data: {self.folder or self.text_file}: expected documents of two sentences to train on, found none"
            )
        rank_zero_info(
            f"data: {len(documents):,} documents of {documents.str.len().sum():,} sentences; left out are "
            f"{(found.str.len() == 1).sum():,} of one sentence"
        )
        return documents

    def _load_tasks(self) -> pd.Series:
        """Texts of each case, by task, label and group."""
        tables = [_labelled_texts(name, file) for name, file in self.task_files.items()]
        if self.folder is not None:
            reports = _labelled_reports(PreparedSet(self.folder))
            if both := sorted(
                {str(table["task"].iat[0]) for table in reports if len(table)} & {*self.task_files}
            ):
                raise UserError(
                    f"data.tasks.{both[0]}: expected another name than of a finding that {self.folder} labels"
                )
            tables += reports
        if not tables:
            raise UserError(
                "data.tasks: expected a file to test on, found none; name a CSV file of texts and labels"
            )
        return pd.concat(tables).set_index(["task", "label", "group"])["texts"]

    # Loaders

    def train_dataloader(self) -> DataLoader:
        sampler = _DocumentSampler(len(self._documents), self.batch_size, self.seed)
        documents = _Documents(self.requirements.tokenize(self.texts), self._documents)
        size = self.batch_size // sampler.num_replicas
        return self.training_loader(documents, sampler, batch_size=size, drop_last=True, collate_fn=as_it_is)

    def test_dataloader(self) -> DataLoader:
        texts, sampler = _Texts(self.requirements.tokenize(self.texts)), ShardSampler(range(len(self.texts)))
        return DataLoader(texts, 256, sampler=sampler, collate_fn=as_it_is, **worker_options(0))


class _DocumentSampler(EpochSampler):
    unit = "documents"


class _Texts(Dataset):
    """Whole batches of texts by number."""

    def __init__(self, tokens: Sequence[Any]) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitems__(self, keys: Sequence[Any]) -> dict[str, Tensor]:
        tokens, lengths = pad_tokens([self.tokens[key] for key in keys])
        return {"tokens": tokens, "lengths": lengths, "index": torch.tensor(keys)}


class _Documents(_Texts):
    """Whole batches of documents by (epoch, number)."""

    def __init__(self, tokens: Sequence[Any], documents: list[np.ndarray]) -> None:
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


def _reports(prepared: PreparedSet, studies: pd.Series) -> pd.Series:
    """Sentences of each report, in their order, by study_id."""
    reports = prepared.table("reports")
    reports = reports[reports["study_id"].isin(studies)].sort_values(["study_id", "position"], kind="stable")
    texts = prepared.table("sentences").set_index("sentence_id")["text"]
    return reports["sentence_id"].map(texts).groupby(reports["study_id"]).agg(list)


def _labelled_reports(prepared: PreparedSet) -> list[pd.DataFrame]:
    """Task, texts, label and group of the reports outside training, for each finding that they label."""
    if not prepared.has("labels"):
        return []
    people = prepared.table("studies" if prepared.has("studies") else "images")
    people = people[people["use"].isin(("validate", "test", "grounding"))].drop_duplicates("study_id")
    patient = people.set_index("study_id")["subject_id"].drop(prepared.studies("train"), errors="ignore")
    labels, found = prepared.table("labels").set_index("study_id").sort_index(), []
    texts = _reports(prepared, patient.index.to_series())
    for name in labelled_findings(prepared.table("labels")):
        known = labels.loc[labels.index.isin(texts.index) & labels[name].isin((0, 1)), name]
        table = pd.DataFrame({"texts": texts[known.index], "label": known.map({0: "0", 1: "1"})})
        found.append(table.assign(task=name, group=patient[known.index]))
    return found


def _labelled_texts(name: str, file: str) -> pd.DataFrame:
    """Task, texts, label and group of the rows of a CSV file; equal texts are one group."""
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
