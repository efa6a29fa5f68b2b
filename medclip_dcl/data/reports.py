"""Masked report sentences for training a language model, and a WordPiece tokenizer trained on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from pytorch_lightning.utilities import rank_zero_warn
from tokenizers import Tokenizer, normalizers, pre_tokenizers, trainers
from tokenizers.models import WordPiece
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import BertTokenizer, PreTrainedTokenizerFast

from medclip_dcl.common.distributed import gather_objects
from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.common.files import digest, digest_of_file, read_text
from medclip_dcl.data.arrays import Arrays, as_lists
from medclip_dcl.data.link import PreparedDataModule, ReportsRequirements, TokenizedSentences
from medclip_dcl.data.masking import SPECIAL_TOKENS, Masking
from medclip_dcl.data.prepared import PreparedDataError
from medclip_dcl.data.samplers import EpochDataModule, ShardSampler, TrainingOrder, worker_options
from medclip_dcl.networks.bert_folder import resolve_folder, word_pieces
from medclip_dcl.networks.language_model import load_masked_tokenizer, special_tokens_around
from medclip_dcl.networks.masked_language import IGNORED, masked_places
from medclip_dcl.networks.text_encoder import share_of_truncated

# Batches are cut from this many batches' worth of sentences, sorted by length: little padding, yet random.
_POOL = 32
_NO_SENTENCE = -1


class ReportsDataModule(PreparedDataModule[ReportsRequirements], EpochDataModule):
    """Sentences of the training and validate reports with masked tokens.

    Only reports of images whose use is train or validate are read: never those of test or grounding patients.

    A batch is a dict: tokens (sentence, token), masked and padded; lengths (sentence,), special tokens included;
    labels (sentence, token), the masked token, -100 elsewhere; places (masked,), of the masked ones in
    labels.flatten(); sentence_id (sentence,), -1 of `extra_text`.
    What is masked in training is a function of (seed, epoch, sentence), on validate of (seed, sentence), whatever
    the number of processes or workers.

    The tokenizer is the model's own where the model starts from a pretrained folder; else it is trained here, on the
    training sentences alone, in lower case.

    Args:
        folder: the prepared data set.
        batch_size: sentences per batch, of all processes together.
        max_tokens: longer sentences are cut to this many tokens, special ones included.
        mask_probability: share of a sentence's tokens that are to be predicted, at least one, in (0, 1).
        vocabulary_size: tokens of the tokenizer that is trained here, special tokens included; null for a
            model that brings its own.
        extra_text: a text file with further training sentences, one a line (UTF-8); null for none.
        num_workers: loader processes; 0 masks in the training process.
        seed: of the order and the masking.
    """

    accepts = ReportsRequirements

    def __init__(
        self,
        folder: str,
        batch_size: int = 64,
        max_tokens: int = 128,
        mask_probability: float = 0.15,
        vocabulary_size: int | None = None,
        extra_text: str | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_range("data", "(0, 1)", mask_probability=mask_probability)
        check_range("data", "[1, inf)", batch_size=batch_size)
        check_range("data", "[3, inf)", max_tokens=max_tokens)
        check_range("data", "[0, inf)", num_workers=num_workers, seed=seed)
        self.folder = folder
        self.batch_size, self.max_tokens = batch_size, max_tokens
        self.mask_probability = mask_probability
        self.vocabulary_size, self.extra_text = vocabulary_size, extra_text
        self.num_workers, self.seed = num_workers, seed
        self.tokenizer: PreTrainedTokenizerFast  # by `load`
        self._examples: dict[str, _MaskedSentences] = {}
        self._made_with: object = None

    def provided(self) -> TokenizedSentences:
        return TokenizedSentences(self.tokenizer, self.max_tokens)

    def load(self, stage: str) -> None:
        if self._examples and self._made_with == self._requirements:
            return
        self._made_with = self._requirements
        self.of_machine(self.prepared.require_separate_patients)
        self.tokenizer = self._load_or_train()
        self._examples = {use: self._masked(use) for use in ("train", "validate")}
        self.prepared.forget_tables()

    def train_dataloader(self) -> DataLoader:
        examples = self._examples["train"]
        sampler = LengthSampler(examples.lengths, self.batch_size, self.seed)
        return self.training_loader(examples, sampler, **self._loader_options())

    def val_dataloader(self) -> DataLoader:
        examples = self._examples["validate"]
        by_length = np.argsort(examples.lengths, kind="stable").tolist()
        batches = [by_length[i : i + self.batch_size] for i in range(0, len(by_length), self.batch_size)]
        sampler = ShardSampler([(0, batch) for batch in batches])
        return DataLoader(examples, sampler=sampler, **self._loader_options())

    def _sentences(self, use: str) -> list[tuple[int, str]]:
        """(sentence_id, text) of the use's reports, each mention, so that eta follows how common a statement is.

        Those of training are followed by `extra_text`.
        """
        studies = self.prepared.studies(use)
        reports = self.prepared.table("reports")
        mentions = reports.loc[reports["study_id"].isin(studies), "sentence_id"].sort_values()
        text_of = self.prepared.table("sentences").set_index("sentence_id")["text"]
        pairs = zip(mentions.tolist(), text_of.loc[mentions].tolist(), strict=True)
        found = [(sentence, text) for sentence, text in pairs if text.strip()]
        if not found:
            raise PreparedDataError(
                f"{self.folder} has no {use} sentences ({len(studies)} studies of use {use}); the language model "
                "needs reports in training and in validate"
            )
        if use == "train" and self.extra_text is not None:
            lines = read_text(Path(self.extra_text)).splitlines()
            found += [(_NO_SENTENCE, line.strip()) for line in lines if line.strip()]
        return found

    def _load_or_train(self) -> PreTrainedTokenizerFast:
        pretrained = self.requirements.pretrained
        if (pretrained is None) == (self.vocabulary_size is None):
            raise UserError(
                "data.vocabulary_size must be given for a model from scratch, and be null for a pretrained one, "
                f"which has its vocabulary; got vocabulary_size {self.vocabulary_size}, pretrained {pretrained!r}"
            )
        if self.vocabulary_size is None:
            return load_masked_tokenizer(resolve_folder(str(pretrained)))
        # One process decides for all.
        size = self.vocabulary_size
        trained = self.of_machine(
            lambda: train_word_pieces([text for _, text in self._sentences("train")], size)
        )
        return BertTokenizer(vocab=gather_objects(trained)[0])

    def _masked(self, use: str) -> _MaskedSentences:
        tokenizer = self.tokenizer
        before, after = special_tokens_around(tokenizer)
        extra = use == "train" and self.extra_text is not None and digest_of_file(Path(str(self.extra_text)))
        if extra:
            self.made_of["extra_text"] = extra
        what = {
            **{"of": "masked sentences", "use": use, "extra_text": extra},
            "tokenizer": digest(tokenizer.backend_tokenizer.to_str().encode()),
            "tokens": [self.max_tokens, before, after],
        }
        arrays = self.arrays(what, lambda: self._arrays_of(use))
        if cut := share_of_truncated(int(arrays["truncated"][0]), len(arrays["tokens"])):
            rank_zero_warn(f"data: {use}: {cut}")
        special, around = tokenizer.all_special_tokens, (len(before), len(after))
        masking = Masking(
            tokenizer.get_vocab(), self.mask_probability, special, str(tokenizer.mask_token), around
        )
        stream = [self.seed] if use == "train" else [self.seed, 1]
        return _MaskedSentences(arrays, masking, stream, int(tokenizer.pad_token_id))

    def _arrays_of(self, use: str) -> dict[str, Any]:
        """Arrays of `_MaskedSentences`; truncated: number of sentences that were cut."""
        tokenizer, sentences = self.tokenizer, self._sentences(use)
        number = {text: index for index, text in enumerate(dict.fromkeys(text for _, text in sentences))}
        pieces = list(word_pieces(tokenizer, list(number)))
        before, after = special_tokens_around(tokenizer)
        longest = self.max_tokens - len(before) - len(after)
        tokens = [[*before, *ids[:longest], *after] for ids in pieces]
        lengths = np.array([len(row) for row in tokens])
        values = np.fromiter(itertools.chain.from_iterable(tokens), np.int64, int(lengths.sum()))
        shown = [(number[text], sentence) for sentence, text in sentences if pieces[number[text]]]
        mentions, sentence_ids = np.array(shown, dtype=np.int64).reshape(-1, 2).T
        return {
            "tokens": as_lists(values, lengths),
            **{"mentions": mentions.astype(np.int32), "sentence_ids": sentence_ids},
            "truncated": np.array([sum(len(ids) > longest for ids in pieces)]),
        }

    def _loader_options(self) -> dict[str, Any]:
        # The sampler's elements are whole batches: Lightning would break up a batch sampler on several devices.
        return {"batch_size": None, **worker_options(self.num_workers)}


class LengthSampler(TrainingOrder):
    """Training order: (epoch, indices of a batch), the same on any number of processes, sentences of like length.

    Sentences are shuffled by (seed, epoch), sorted by length within pools of 32 batches, cut into global batches, and
    the batches are shuffled; each rank takes an equal slice of each.
    """

    unit = "sentences"

    def __init__(self, lengths: Int[np.ndarray, " sentence"], batch_size: int, seed: int) -> None:
        super().__init__(len(lengths), batch_size, seed)
        self.lengths = lengths

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        generator = np.random.default_rng([self.seed, self.epoch])
        order = generator.permutation(len(self.lengths))[: len(self) * self.batch_size]
        pool = self.batch_size * _POOL
        pools = [order[start : start + pool] for start in range(0, len(order), pool)]
        by_length = np.concatenate([some[np.argsort(self.lengths[some], kind="stable")] for some in pools])
        batches = generator.permutation(by_length.reshape(len(self), self.batch_size))[self.trained_on :]
        # Every n-th sentence: the ranks get like lengths.
        return iter([(self.epoch, batch[self.rank :: self.num_replicas].tolist()) for batch in batches])


@dataclass(eq=False)
class _MaskedSentences(Dataset):
    """Batches of masked sentences by (epoch, indices); an index is a mention of a sentence.

    arrays: tokens of distinct sentences; mentions, sentence_ids (mention,): which of these, and its number.
    """

    arrays: Arrays
    masking: Masking
    stream: list[int]
    pad_id: int

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each mention."""
        return self.arrays["tokens"].lengths[self.arrays["mentions"]]

    def __getitem__(self, key: tuple[int, list[int]]) -> dict[str, Tensor]:
        epoch, indices = key
        rows = self.arrays["tokens"][self.arrays["mentions"][indices]]
        lengths = np.array([len(row) for row in rows])
        tokens = np.full((len(indices), lengths.max()), self.pad_id)
        labels = np.full_like(tokens, IGNORED)
        for row, index in enumerate(indices):
            generator = np.random.default_rng([*self.stream, epoch, index])
            masked, hidden = self.masking(rows[row], generator)
            tokens[row, : len(masked)], labels[row, : len(masked)] = masked, hidden
        return {
            "tokens": torch.from_numpy(tokens),
            "lengths": torch.from_numpy(lengths),
            "labels": torch.from_numpy(labels),
            "places": masked_places(torch.from_numpy(labels)),
            "sentence_id": torch.from_numpy(self.arrays["sentence_ids"][indices]),
        }


def train_word_pieces(texts: Sequence[str], vocabulary_size: int) -> dict[str, int]:
    """Vocabulary of a lower-case WordPiece tokenizer: word piece -> id, special tokens first.

    The same texts give the same vocabulary: the trainer of `tokenizers` numbers characters in the order of a hash
    table and breaks ties by these numbers, so all characters are given to it in a fixed order.
    """
    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    words = (
        word for text in set(texts) for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))
    )
    characters = sorted(set("".join(words)))
    first = [*SPECIAL_TOKENS, *characters, *(f"##{character}" for character in characters)]
    if vocabulary_size < len(first):
        raise UserError(
            f"data.vocabulary_size {vocabulary_size} is too small: special tokens and the {len(characters)} "
            f"characters of the training sentences take {len(first)}"
        )
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    trainer = trainers.WordPieceTrainer(vocab_size=vocabulary_size, special_tokens=first, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.get_vocab()
