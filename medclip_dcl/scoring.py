"""How probable a masked language model finds each sentence: exact pseudo-log-likelihood in bulk.

The sum over a sentence's word pieces of log P(piece | sentence with that piece masked) (Salazar et al., ACL 2020,
eq. 1) costs one forward pass for each piece. Sentences with the same word pieces are scored once; the masked copies
of sentences of equal length share batches, so that nothing is padded; `encoders.masked_bert` computes of each copy
what is needed.

`pseudo_log_likelihood` does all of it. A `ScoringPlan` and `score_batches` are its two halves for those who want to
keep what is done: the batches of a plan are fixed by its sentences, not by what is left to do.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from transformers import BertForMaskedLM, BertTokenizer

from medclip_dcl.encoders.masked_bert import MaskedBert, MaskedCopies, masked_bert
from medclip_dcl.encoders.pretrained import word_pieces
from medclip_dcl.errors import UserError

# Word pieces in a batch, [CLS] and [SEP] included, of small and of large models. Measured on CPU: BERT-base is as fast
# from 4,096 on, 4 layers x 256 2% faster at 16,384 than at 4,096, in bfloat16 9%.
_DEFAULT_TOKEN_BUDGET = {"cpu": (16384, 4096), "cuda": (65536, 65536)}
_LARGE_WIDTH = 512
_EDGES = 2  # [CLS] and [SEP]
# Batches that a GPU may have been given before the host waits for the first of them.
_AHEAD = 3
_LINE_EVERY = 60.0
# Columns that the progress bar takes at the size of MIMIC-CXR.
_BAR_WIDTH = 80
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def pseudo_log_likelihood(
    model: BertForMaskedLM,
    tokenizer: BertTokenizer,
    sentences: Sequence[str],
    *,
    token_budget: int | None = None,
    within_word_l2r: bool = False,
    mask_every: int | None = None,
    dtype: torch.dtype | None = None,
    truncate: bool = False,
    per_token: bool = False,
    progress: bool = False,
) -> pd.DataFrame:
    """Pseudo-log-likelihood of each sentence under a masked language model.

    log_p = sum over t of log P(piece t | sentence with piece t masked), natural logarithm, [CLS] and [SEP] excluded
    (Salazar et al., ACL 2020, eq. 1). The model is scored in eval mode on the device where it is, and left in the
    mode in which it was; log-softmax is at least float32, sums are float64. On a CPU each of torch's threads scores
    batches of its own (BERT-base takes about 0.15 GB a thread for that); a plain BERT's values are the same for any
    number of threads.

    Args:
        model: a BERT with its masked-language-model head. One with parts that are not transformers' own BERT is
            scored the slow way, with a warning.
        tokenizer: the model's own. Special tokens that stand in a sentence as text are text.
        sentences: any strings, repeats included: equal word pieces get bitwise equal values.
        token_budget: word pieces in a batch, [CLS] and [SEP] included; at least one copy whatever it is. None:
            4,096 on a CPU (16,384 for models narrower than 512), 65,536 on a GPU. It changes the speed, and the
            values by rounding only.
        within_word_l2r: mask the later pieces of the same word, too (Kauf & Ivanova, ACL 2023, PLL-word-l2r): the
            original over-scores words of several pieces. Choice; the default is the original.
        mask_every: None is exact. k scores every k-th piece in one pass (and k passes score a sentence), an
            APPROXIMATION. Measured on Open-i's 8,604 distinct sentences with a small BERT trained on them, Spearman
            with the exact scores and mean absolute error a piece: k = 8 .9999, .009; k = 4 .9990, .05; k = 2 .990,
            .21. Up to k pieces it is exact.
        dtype: compute in torch.float32 (the reference), torch.bfloat16 or torch.float16 (8 times as precise as
            bfloat16: errors of .0003 and .0028 a piece there; but it may overflow, which is an error); None: in the
            model's own type. The model is not changed.
        truncate: score the first pieces of a sentence that is too long for the model, instead of refusing it;
            adds the column truncated.
        per_token: add the column token_log_p, the addends of log_p as an array for each sentence.
        progress: show sentences, word pieces a second and the time left on standard error.

    Returns:
        One row for each sentence, in order: text; n_tokens (word pieces); log_p; n_unknown ([UNK] among the word
        pieces, which score as easy tokens); truncated, token_log_p if asked for. An empty sentence has n_tokens 0,
        log_p NaN.

    Raises:
        TypeError: a single string, or a sentence that is none.
        ValueError: without `truncate`, a sentence with more word pieces than the model has positions (names its
            index and length); half of a surrogate pair in a sentence; `mask_every` below 1 or together with
            `within_word_l2r`; a `token_budget` that is no whole number; another `dtype`, or one into which the model
            cannot be converted; a word piece that the model does not have.
        NotFiniteError: a score that is not finite.
    """
    sentences = _strings(sentences)
    _check_dtype(dtype)
    plan = ScoringPlan(
        tokenizer,
        sentences,
        positions=int(model.config.max_position_embeddings),
        token_budget=default_token_budget(model) if token_budget is None else token_budget,
        within_word_l2r=within_word_l2r,
        mask_every=mask_every,
        truncate=truncate,
    )
    values = plan.empty_values()
    with scoring_progress(plan, progress) as report:
        for number, found in score_batches(model, plan, range(len(plan.batches)), dtype=dtype):
            values[plan.places(number)] = found
            report(number)
    return plan.table(values, per_token=per_token)


def default_token_budget(model: BertForMaskedLM) -> int:
    """Word pieces in a batch that suit the model and the device on which it is."""
    device = next(model.parameters()).device
    budgets = _DEFAULT_TOKEN_BUDGET.get(device.type, _DEFAULT_TOKEN_BUDGET["cuda"])
    return budgets[model.config.hidden_size >= _LARGE_WIDTH]


class NotFiniteError(UserError):
    """A model gives a sentence no finite log probability.

    Attributes:
        index: of the sentence.
        reason: what may be wrong, and what to do.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.reason = (
            "in float16 the model may overflow (use bfloat16 or float32); in other types its weights are damaged or "
            "hold NaN"
        )
        super().__init__(f"sentence {index} has no finite log probability: {self.reason}")


class Batch(NamedTuple):
    """Masked copies that go through the model together: of sentences of one length, copies start to stop."""

    length: int
    start: int
    stop: int


class DistinctPieces:
    """A list of sentences as distinct sequences of word pieces, to be looked up by their length.

    Args:
        tokenizer: of the model. Special tokens that stand in a sentence as text are text.
        sentences: any strings, repeats included.
        positions: of the model, [CLS] and [SEP] included.
        truncate: keep the first pieces of a sentence that is too long, instead of refusing it.

    Attributes:
        pieces, starts: the distinct sequences end to end, and where each begins (one more: the end).
        row: (sentence,) which distinct sequence each sentence is.
        is_truncated: (sentence,) True where a sentence was too long.
        rows_by_length: word pieces -> distinct sequences of so many, in the order of the list; the longest first.

    Raises:
        ValueError: without `truncate`, a sentence with more word pieces than the model has positions (names its index
            and length).
    """

    def __init__(
        self, tokenizer: BertTokenizer, sentences: Sequence[str], *, positions: int, truncate: bool = False
    ) -> None:
        self.tokenizer, self.sentences, self.is_truncating = tokenizer, sentences, truncate
        self.is_truncated = np.zeros(len(sentences), dtype=bool)
        self._tokenise(positions - _EDGES)
        lengths = np.diff(self.starts)
        self.rows_by_length = {
            int(length): np.flatnonzero(lengths == length) for length in np.unique(lengths)[::-1]
        }

    def _tokenise(self, longest: int) -> None:
        row_of: dict[bytes, int] = {}
        self.row = np.empty(len(self.sentences), dtype=np.int64)
        parts: list[np.ndarray] = []
        counts: list[int] = []
        for index, ids in enumerate(word_pieces(self.tokenizer, self.sentences)):
            if len(ids) > longest:
                if not self.is_truncating:
                    raise ValueError(
                        f"sentence {index} has {len(ids)} word pieces, the model takes at most {longest} (besides "
                        "[CLS] and [SEP]); split it, leave it out, or pass truncate=True"
                    )
                self.is_truncated[index] = True
                ids = ids[:longest]
            key = np.array(ids, dtype=np.int32)
            row = row_of.setdefault(key.tobytes(), len(row_of))
            if row == len(counts):
                parts.append(key)
                counts.append(len(key))
            self.row[index] = row
        self.pieces = np.concatenate([np.empty(0, np.int32), *parts])
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)

    @property
    def n_distinct(self) -> int:
        """Distinct word-piece sequences, the empty one included."""
        return len(self.starts) - 1

    def bucket(self, length: int) -> Int[np.ndarray, "sentence token"]:
        """Distinct sentences of one length, with [CLS] and [SEP]."""
        rows = self.rows_by_length[length]
        tokens = np.empty((len(rows), length + _EDGES), dtype=np.int64)
        tokens[:, 0], tokens[:, -1] = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        tokens[:, 1:-1] = self.pieces[self.starts[rows][:, None] + np.arange(length)]
        return tokens

    def fingerprint_with(self, *options: object) -> str:
        """16 hexadecimal digits of the word pieces of each sentence, in order, and of what else decides the values."""
        digest = hashlib.sha256(repr(options).encode())
        for part in (self.row, self.starts, self.pieces):
            digest.update(part.tobytes())
        return digest.hexdigest()[:16]


class ScoringPlan(DistinctPieces):
    """What has to be computed for a list of sentences: their distinct word pieces, in batches that the list fixes.

    Args:
        tokenizer, sentences, token_budget, within_word_l2r, mask_every, truncate: as in `pseudo_log_likelihood`.
        positions: of the model, [CLS] and [SEP] included.

    Attributes:
        batches: every masked copy of every distinct sentence once; the longest sentences first.
        fingerprint: of what is scored: the word pieces of each sentence, in order, and the options that give the
            values another meaning. The token budget is not among them.

    Raises:
        ValueError: as `pseudo_log_likelihood`.
    """

    def __init__(
        self,
        tokenizer: BertTokenizer,
        sentences: Sequence[str],
        *,
        positions: int,
        token_budget: int,
        within_word_l2r: bool = False,
        mask_every: int | None = None,
        truncate: bool = False,
    ) -> None:
        if mask_every is not None and (
            not isinstance(mask_every, (int, np.integer)) or mask_every < 1 or within_word_l2r
        ):
            raise ValueError(
                f"mask_every must be a whole number, at least 1, and cannot go with within_word_l2r, got mask_every "
                f"{mask_every}, within_word_l2r {within_word_l2r}"
            )
        if not isinstance(token_budget, (int, np.integer)):
            raise ValueError(f"token_budget must be a whole number of word pieces, got {token_budget}")
        super().__init__(tokenizer, sentences, positions=positions, truncate=truncate)
        self.mask_every = mask_every
        self.continues_word = _continuations(tokenizer) if within_word_l2r else None
        # An empty sentence has no copies, and so no batch.
        self.batches = [
            Batch(length, start, min(start + step, copies))
            for length, rows in self.rows_by_length.items()
            for copies in [len(rows) * self.copies_of(length)]
            for step in [max(1, token_budget // (length + _EDGES))]
            for start in range(0, copies, step)
        ]
        special = (tokenizer.mask_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id)
        self.fingerprint = self.fingerprint_with(within_word_l2r, mask_every, special)

    def copies_of(self, length: int) -> int:
        """Masked copies of a sentence of so many word pieces."""
        return length if self.mask_every is None else min(self.mask_every, length)

    def work(self, batch: Batch) -> int:
        """Word pieces of the batch that go through the model; over all batches quadratic in the lengths."""
        return (batch.stop - batch.start) * (batch.length + _EDGES)

    def empty_values(self) -> Float64[np.ndarray, " piece"]:
        """Room for the log probability of every distinct sentence's every piece; NaN."""
        return np.full(len(self.pieces), math.nan, dtype=np.float64)

    def places(self, number: int) -> Int[np.ndarray, " query"]:
        """Where the values of a batch stand among all values."""
        sentence, position, _ = self._queries(self.batches[number])
        rows = self.rows_by_length[self.batches[number].length]
        return self.starts[rows[sentence]] + position

    def copies(self, batch: Batch, bucket: Int[Tensor, "sentence token"]) -> MaskedCopies:
        """What the model is asked for a batch; `bucket` is that of its length, on the device."""
        sentence, position, query_copy = self._queries(batch)
        first = batch.start // self.copies_of(batch.length)
        last = (batch.stop - 1) // self.copies_of(batch.length)
        tokens = bucket[first : last + 1]
        n_copies = batch.stop - batch.start
        of_copy = np.empty(n_copies, dtype=np.int64)
        of_copy[query_copy] = sentence - first
        is_masked = np.zeros((n_copies, batch.length + _EDGES), dtype=bool)
        is_masked[query_copy, position + 1] = True

        def on_device(values: np.ndarray) -> Tensor:
            tensor = torch.from_numpy(values)
            if bucket.device.type == "cuda":
                tensor = tensor.pin_memory()
            return tensor.to(bucket.device, non_blocking=True)

        masked, copy_sentence, query_position = (
            on_device(is_masked),
            on_device(of_copy),
            on_device(position + 1),
        )
        if self.continues_word is not None:
            masked = masked | self._later_pieces(tokens[copy_sentence], query_position)
        is_one_each = self.mask_every is None
        return MaskedCopies(
            tokens=tokens,
            sentence=copy_sentence,
            is_masked=masked,
            query_copy=None if is_one_each else on_device(query_copy),
            query_position=query_position,
        )

    def _queries(self, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(sentence of the bucket, piece, copy of the batch) of each value that the batch gives."""
        stride = self.copies_of(batch.length)
        copies = np.arange(batch.start, batch.stop)
        sentence, first = copies // stride, copies % stride
        position = first[:, None] + stride * np.arange(-(-batch.length // stride))
        copy_number, which = np.nonzero(position < batch.length)
        return sentence[copy_number], position[copy_number, which], copy_number

    def _later_pieces(
        self, tokens: Int[Tensor, "copy token"], position: Int[Tensor, " copy"]
    ) -> Bool[Tensor, "copy token"]:
        """The pieces of the scored piece's word that follow it."""
        assert self.continues_word is not None
        word = (~self.continues_word.to(tokens.device)[tokens]).cumsum(dim=1)
        is_same_word = word == word.gather(1, position[:, None])
        return is_same_word & (torch.arange(tokens.shape[1], device=tokens.device) > position[:, None])

    def table(self, values: Float64[np.ndarray, " piece"], *, per_token: bool = False) -> pd.DataFrame:
        """The scores of the sentences, in order, from the values of all batches (see `pseudo_log_likelihood`)."""
        lengths = np.diff(self.starts)
        is_unknown = self.pieces == self.tokenizer.unk_token_id
        # A piece more, so that an empty sentence at the end has a place to start from.
        sums = np.add.reduceat(np.append(values, 0.0), self.starts)[:-1]
        unknown = np.add.reduceat(np.append(is_unknown, False).astype(np.int64), self.starts)[:-1]
        columns = {
            "text": pd.Series(list(self.sentences), dtype=object),
            "n_tokens": pd.Series(lengths[self.row], dtype="int64"),
            "log_p": pd.Series(np.where(lengths > 0, sums, math.nan)[self.row], dtype="float64"),
            "n_unknown": pd.Series(np.where(lengths > 0, unknown, 0)[self.row], dtype="int64"),
        }
        if self.is_truncating:
            columns["truncated"] = pd.Series(self.is_truncated, dtype=bool)
        if per_token:
            of_rows = np.split(values, self.starts[1:-1]) if self.n_distinct else []
            columns["token_log_p"] = pd.Series([of_rows[row].copy() for row in self.row], dtype=object)
        return pd.DataFrame(columns)


def score_batches(
    model: BertForMaskedLM, plan: ScoringPlan, numbers: Iterable[int], *, dtype: torch.dtype | None = None
) -> Generator[tuple[int, Float64[np.ndarray, " query"]], None, None]:
    """Log probabilities of a plan's batches, one batch after the other; they belong to `plan.places(number)`.

    While the iterator runs, the model is in eval mode; at its end (or when it is closed) every module is in the mode
    in which it was.

    Args:
        model: the masked language model, on its device.
        plan: made with the model's tokenizer.
        numbers: of batches, in the order in which they are wanted; ascending is fastest.
        dtype: as in `pseudo_log_likelihood`.

    Raises:
        NotFiniteError: a value that is not finite.
        ValueError: a word piece that the model does not have; a `dtype` that is none of those.
    """
    _check_dtype(dtype)
    special = (plan.tokenizer.mask_token_id, plan.tokenizer.cls_token_id, plan.tokenizer.sep_token_id)
    known, largest = model.config.vocab_size, max(plan.pieces.max(initial=0), *special)
    if largest >= known:
        raise ValueError(
            f"the tokenizer has word piece number {largest:,}, but the model has {known:,} word pieces, numbered from "
            "0; load both from one folder"
        )
    device = next(model.parameters()).device
    scorer = _scorer(model, plan.tokenizer.mask_token_id, dtype)
    # Of the plan, not of `numbers`: who continues it computes as who did all of it.
    with _evaluating(model), _starting(scorer, device, len(plan.batches)) as start:
        length, bucket = -1, torch.empty(0)
        under_way: deque[tuple[int, Callable[[], np.ndarray]]] = deque()
        for number in numbers:
            batch = plan.batches[number]
            if batch.length != length:
                length, bucket = batch.length, torch.from_numpy(plan.bucket(batch.length)).to(device)
            under_way.append((number, start.batch(functools.partial(plan.copies, batch, bucket))))
            if len(under_way) > start.ahead:
                yield _checked(plan, *under_way.popleft())
        while under_way:
            yield _checked(plan, *under_way.popleft())


class _Start(NamedTuple):
    """Starts the scoring of a batch.

    Attributes:
        ahead: batches that may be under way before the first of them is waited for.
        batch: from what makes the copies to what waits for their log probabilities.
    """

    ahead: int
    batch: Callable[[Callable[[], MaskedCopies]], Callable[[], np.ndarray]]


@contextmanager
def _starting(scorer: MaskedBert, device: torch.device, batches: int) -> Iterator[_Start]:
    """On a CPU as many threads as torch has score a batch each: on one batch they would wait between operations.

    Where there are fewer batches, several of torch's threads share each.
    """

    # Not around the caller's own code, which must not be in inference mode.
    @torch.inference_mode()
    def scored(make_copies: Callable[[], MaskedCopies]) -> _OnItsWay:
        # A caller's autocast does not reach other threads.
        with torch.autocast(device.type, enabled=False):
            return _OnItsWay(scorer.log_probability(make_copies()))

    threads = torch.get_num_threads()
    at_once = min(threads, batches)
    if device.type != "cpu" or not scorer.takes_threads or at_once <= 1:
        # A GPU computes while the host prepares the next batches.
        ahead = _AHEAD if device.type != "cpu" else 0
        yield _Start(ahead, lambda make_copies: scored(make_copies).wait)
        return
    pool = ThreadPoolExecutor(at_once, "scoring", initializer=_compute_with, initargs=(threads // at_once,))
    try:
        # All of them now: what a thread sets for itself becomes the default of those that are new, until it is mended.
        started = threading.Barrier(at_once, timeout=60)
        for waiting in [pool.submit(started.wait) for _ in range(at_once)]:
            waiting.result()
        torch.set_num_threads(threads)
        yield _Start(2 * at_once, lambda make_copies: pool.submit(lambda: scored(make_copies).wait()).result)
    finally:
        scorer.stop()
        pool.shutdown(cancel_futures=True)


def _compute_with(threads: int) -> None:
    torch.get_num_threads()  # the first call in a thread sets the default, which would undo the next line later
    torch.set_num_threads(threads)


@torch.inference_mode()
def _scorer(model: BertForMaskedLM, mask_id: int, dtype: torch.dtype | None) -> MaskedBert:
    is_own = dtype is None or all(
        parameter.dtype == dtype for parameter in model.parameters() if parameter.is_floating_point()
    )
    patched = [name or "the model" for name, module in model.named_modules() if "forward" in vars(module)]
    if patched and not is_own:
        raise ValueError(
            f"{patched[0]} has a forward of its own, which may belong to this very model and not to a copy of it in "
            f"{dtype}; convert the model itself (model.to({dtype})) and leave dtype out"
        )
    return masked_bert(model if is_own else copy.deepcopy(model).to(dtype), mask_id)


class _OnItsWay:
    """A result that travels to the host while the device goes on with the next batches."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.event = values, None
        if values.device.type == "cuda":
            self.values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.values.copy_(values, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def wait(self) -> np.ndarray:
        if self.event is not None:
            self.event.synchronize()
        return self.values.cpu().numpy().astype(np.float64)


def _checked(plan: ScoringPlan, number: int, wait: Callable[[], np.ndarray]) -> tuple[int, np.ndarray]:
    """The batch's values on the host."""
    found = wait()
    if not np.isfinite(found).all():
        place = plan.places(number)[np.flatnonzero(~np.isfinite(found))[0]]
        row = int(np.searchsorted(plan.starts, place, side="right")) - 1
        raise NotFiniteError(int(np.flatnonzero(plan.row == row)[0]))
    return number, found


@dataclass
class _Rate:
    """How much of the work was done in how long."""

    total: int
    done: int = 0
    since: float = 0.0

    def left(self) -> float:
        """Seconds until the end at the rate so far; something must be done."""
        passed = time.monotonic() - self.since
        return passed * (self.total - self.done) / self.done

    def a_second(self) -> float:
        """Work done in a second."""
        return self.done / max(1e-9, time.monotonic() - self.since)


def _short(number: int | float) -> str:
    """Three significant digits: 950, 12.3k, 198M."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:,.0f}T"


@contextmanager
def scoring_progress(
    plan: ScoringPlan, is_shown: bool, numbers: Sequence[int] | None = None, who: str = ""
) -> Iterator[_Report]:
    """Progress on standard error; what it gives is called with the number of each batch that is done.

    On a terminal of 80 columns or more a bar, elsewhere a line a minute. Time is estimated by word pieces through the
    model, of which a sentence needs a number quadratic in its length.

    Args:
        plan: what is being scored.
        is_shown: False shows nothing.
        numbers: batches that will be done; None: all.
        who: does these batches, where others do the rest.
    """
    batches = plan.batches if numbers is None else [plan.batches[number] for number in numbers]
    report = _Report(plan, batches, is_shown and bool(batches), who)
    try:
        yield report
    finally:
        report.close()


class _Report:
    def __init__(self, plan: ScoringPlan, batches: Sequence[Batch], is_shown: bool, who: str) -> None:
        self.plan, self.who = plan, f"{who}: " if who else ""
        self.rate = _Rate(sum(map(plan.work, batches)), since=time.monotonic())
        self.sentences = 0.0
        self.all_sentences = sum(self._sentences(batch) for batch in batches)
        self.last_line = time.monotonic()
        console = Console(stderr=True)
        self.is_line = is_shown and (not sys.stderr.isatty() or console.width < _BAR_WIDTH)
        self.bar: Progress | None = None
        self.task = TaskID(0)
        if is_shown and not self.is_line:
            columns = [] if who else [BarColumn(bar_width=6)]
            texts = (TextColumn("{task.description}"), TimeRemainingColumn(), TextColumn("left"))
            self.bar = Progress(*columns, *texts, console=console)
            self.task = self.bar.add_task("scoring", total=self.rate.total)
            self.bar.start()

    def _sentences(self, batch: Batch) -> float:
        return (batch.stop - batch.start) / self.plan.copies_of(batch.length)

    def __call__(self, number: int) -> None:
        batch = self.plan.batches[number]
        self.rate.done += self.plan.work(batch)
        self.sentences += self._sentences(batch)
        if self.bar is not None:
            self.bar.update(self.task, completed=self.rate.done, description=self._short_text())
        elif self.is_line and time.monotonic() - self.last_line >= _LINE_EVERY:
            self._line()

    def _short_text(self) -> str:
        done, total, a_second = map(_short, (self.rate.done, self.rate.total, self.rate.a_second()))
        sentences = f"{self.sentences:,.0f}/{self.all_sentences:,.0f} sentences"
        return f"{self.who}{sentences} {done}/{total} pieces {a_second}/s"

    def _line(self) -> None:
        self.last_line = time.monotonic()
        text = (
            f"scoring: {self.who}{self.sentences:,.0f} of {self.all_sentences:,.0f} sentences, "
            f"{self.rate.done:,} of {self.rate.total:,} word pieces"
        )
        if self.rate.done:
            text += f", {self.rate.a_second():,.0f}/s, {self.rate.left() / 60:.1f} min left"
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif self.is_line:
            self._line()


def _strings(sentences: Iterable[object]) -> list[str]:
    if isinstance(sentences, str):
        raise TypeError("sentences must be a sequence of strings, got a single string; wrap it in a list")
    found: list[str] = []
    for row, sentence in enumerate(sentences):
        if not isinstance(sentence, str):
            raise TypeError(f"sentence {row} must be a string, got {type(sentence).__name__}")
        try:
            sentence.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"sentence {row} holds half of a surrogate pair at character {error.start}, which is no text; read it "
                "anew in its right encoding, or replace such characters"
            ) from error
        found.append(sentence)
    return found


def _check_dtype(dtype: object) -> None:
    if dtype is not None and dtype not in _DTYPES:
        names = ", ".join(map(str, _DTYPES))
        raise ValueError(f"dtype must be one of {names} or None, got {dtype!r}")


def _continuations(tokenizer: BertTokenizer) -> Bool[Tensor, " piece"]:
    """True for word pieces that continue a word."""
    vocabulary = tokenizer.get_vocab()
    continues = torch.zeros(max(vocabulary.values()) + 1, dtype=torch.bool)
    for piece, number in vocabulary.items():
        continues[number] = piece.startswith("##") and len(piece) > 2
    return continues


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every sub-module is in the mode in which it was."""
    was_training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in was_training:
            module.training = training
