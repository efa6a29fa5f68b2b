"""Exact pseudo-log-likelihood of sentences under a masked language model, or likelihood under a causal one, in bulk.

The sum over a sentence's tokens of log P(token | sentence with that token masked) (Salazar et al., ACL 2020,
eq. 1) costs one forward pass for each token. Sentences with the same tokens are scored once; the masked copies
of sentences of equal length share batches, so that nothing is padded.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor, nn
from transformers import BertForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.journal import Journal, work_through
from medclip_dcl.networks.language_model import is_causal
from medclip_dcl.networks.library_folder import longest_sentence
from medclip_dcl.scoring.masked_bert import MaskedBert, masked_bert
from medclip_dcl.scoring.plan import ScoringPlan
from medclip_dcl.scoring.whole_model import MaskedCopies, WholeModel, check_order

# Tokens in a batch, special tokens included, of small and of large models. Measured on CPU: BERT-base is as fast
# from 4,096 on, 4 layers x 256 2% faster at 16,384 than at 4,096, in bfloat16 9%.
_DEFAULT_TOKEN_BUDGET = {"cpu": (16384, 4096), "cuda": (65536, 65536)}
_LARGE_WIDTH = 512
# Batches that a GPU may have been given before the host waits for the first of them.
_AHEAD = 3
_UNSUITABLE = {
    "xlnet": "is causal only by masks that its class makes in training, and masks no token",
    "nystromformer": "takes sentences of one fixed length",
}
"""Families (model_type) that cannot be scored -> why."""
# Number of sentence ids that a message lists.
_NAMED = 5


def pseudo_log_likelihood(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    sentences: Sequence[str],
    *,
    token_budget: int | None = None,
    within_word_l2r: bool = False,
    dtype: torch.dtype | None = None,
    truncate: bool = False,
    progress: bool = False,
) -> pd.DataFrame:
    """Pseudo-log-likelihood of each sentence under a masked language model, or its likelihood under a causal one.

    log_p = sum over t of log P(token t | sentence with token t masked), natural logarithm, [CLS] and [SEP] excluded
    (Salazar et al., ACL 2020, eq. 1). A causal model: log_p = sum over t of log P(token t | those before), the first
    token after the special token that the tokenizer puts first, else its bos_token, else its eos_token (choice).

    The model is scored in eval mode on its device and returned to the mode it was in; log-softmax is at least float32,
    sums are float64. On a CPU each of torch's threads scores batches of its own (BERT-base takes about 0.15 GB a thread
    for that); a plain BERT's values are the same for any number of threads.

    Args:
        model: any masked or causal language model of transformers. transformers' own BERT is the fastest; one with
            other parts is scored the slow way, with a warning.
        tokenizer: the model's own. Special tokens that stand in a sentence as text are text, except for Unigram's,
            which knows them as pieces.
        sentences: any strings, repeats included: equal tokens get bitwise equal values.
        token_budget: tokens in a batch, special tokens included; at least one copy. None:
            4,096 on a CPU (16,384 for models narrower than 512), 65,536 on a GPU. It changes the speed, and the
            values by rounding only.
        within_word_l2r: mask the later tokens of the same word, too (Kauf & Ivanova, ACL 2023, PLL-word-l2r): the
            original over-scores words of several tokens. A word is what the tokenizer splits a text into before it
            looks for tokens. Choice; the default is the original.
        dtype: compute in torch.float32 (the reference), torch.bfloat16 or torch.float16 (8 times as precise as
            bfloat16, but it may overflow, which is an error); None: in the model's own type. The model is not changed.
        truncate: score the first tokens of a sentence that is too long for the model, instead of refusing it;
            adds the column truncated.
        progress: show a progress bar with the time left on standard error.

    Returns:
        One row for each sentence, in order: text; n_tokens (tokens); log_p; n_unknown ([UNK] among the
        tokens, which score as easy tokens); truncated if asked for. An empty sentence has n_tokens 0, log_p NaN.

    Raises:
        TypeError: a single string, or a sentence that is not a string.
        ValueError: without `truncate`, a sentence with more tokens than the model has positions; a token that the
            model does not have.
        UserError: `within_word_l2r` for a causal model; a score that is not finite; a model that draws random numbers
            in evaluation.
    """
    # The tokenizer would take a tuple for a pair; an iterator would be empty the second time.
    given = [sentences] if isinstance(sentences, str) else list(sentences)
    wrong = [x for x in given if isinstance(sentences, str) or not isinstance(x, str)]
    if wrong:
        raise TypeError(f"sentences: expected a list of strings, found {type(wrong[0]).__name__}")
    options = {"within_word_l2r": within_word_l2r, "truncate": truncate}
    plan = scoring_plan(model, tokenizer, given, token_budget=token_budget, **options)
    values, left = restored(plan, ())
    score_left(model, plan, values, left, dtype=dtype, is_shown=progress)
    return plan.table(values)


def scoring_plan(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    sentences: Sequence[str],
    *,
    token_budget: int | None = None,
    **options: Any,
) -> ScoringPlan:
    """The plan that scores the sentences by the model; options of `ScoringPlan`."""
    family = model.config.model_type
    if family in _UNSUITABLE:
        raise UserError(f"model: a {family} {_UNSUITABLE[family]}; choose another")
    return ScoringPlan(
        tokenizer,
        sentences,
        positions=longest_sentence(model),
        token_budget=default_token_budget(model) if token_budget is None else token_budget,
        is_causal=is_causal(type(model)),
        **options,
    )


def default_token_budget(model: PreTrainedModel) -> int:
    """Default tokens in a batch for the model and its device."""
    device = next(model.parameters()).device
    budgets = _DEFAULT_TOKEN_BUDGET.get(device.type, _DEFAULT_TOKEN_BUDGET["cuda"])
    return budgets[getattr(model.config, "hidden_size", _LARGE_WIDTH) >= _LARGE_WIDTH]


def score_batches(
    model: PreTrainedModel, plan: ScoringPlan, numbers: Iterable[int], *, dtype: torch.dtype | None = None
) -> Generator[tuple[int, Float64[np.ndarray, " query"]], None, None]:
    """Log probabilities of a plan's batches, one batch after the other; they belong to `plan.places(number)`.

    While the iterator runs, the model is in eval mode; at its end (or when it is closed) every module is in the mode
    in which it was.

    Args:
        model: the language model, on its device.
        plan: made with the model's tokenizer.
        numbers: of batches, in the order in which they are wanted; ascending is fastest.
        dtype: as in `pseudo_log_likelihood`.

    Raises:
        UserError: a value that is not finite.
        ValueError: a token that the model does not have.
    """
    special = (plan.mask_id or 0, *plan.before, *plan.after)
    known, largest = model.config.vocab_size, max(plan.pieces.max(initial=0), *special)
    if largest >= known:
        raise ValueError(
            f"the tokenizer has token number {largest:,}, but the model has {known:,} tokens, numbered from "
            "0; load both from one folder"
        )
    device = next(model.parameters()).device
    with ExitStack() as stack:
        stack.enter_context(_evaluating(model))
        scorer = _scorer(model, plan.mask_id, dtype)
        # Of the plan, not of `numbers`: who continues it computes as who did all of it.
        start, ahead = stack.enter_context(_starting(scorer, device, len(plan.batches)))
        length, bucket = -1, torch.empty(0)
        under_way: deque[tuple[int, Callable[[], np.ndarray]]] = deque()
        for number in numbers:
            batch = plan.batches[number]
            if batch.length != length:
                length, bucket = batch.length, torch.from_numpy(plan.bucket(batch.length)).to(device)
            under_way.append((number, start(functools.partial(plan.copies, batch, bucket))))
            if len(under_way) > ahead:
                yield _checked(plan, *under_way.popleft())
        while under_way:
            yield _checked(plan, *under_way.popleft())


# From what makes the copies of a batch to what waits for their log probabilities.
_Start = Callable[[Callable[[], MaskedCopies]], Callable[[], np.ndarray]]


@contextmanager
def _starting(scorer: MaskedBert, device: torch.device, batches: int) -> Iterator[tuple[_Start, int]]:
    """A function that starts a batch, and how many may be under way before the first of them is waited for.

    On a CPU as many threads as torch has score a batch each: on one batch they would wait between operations. Where
    there are fewer batches, several of torch's threads share each.
    """

    # Not around the caller's own code, which must not be in inference mode.
    @torch.inference_mode()
    def scored(make_copies: Callable[[], MaskedCopies]) -> Callable[[], np.ndarray]:
        # A caller's autocast does not reach other threads.
        with torch.autocast(device.type, enabled=False):
            return _on_its_way(scorer.log_probability(make_copies()))

    threads = torch.get_num_threads()
    at_once = min(threads, batches)
    if device.type != "cpu" or not scorer.takes_threads or at_once <= 1:
        # A GPU computes while the host prepares the next batches.
        ahead = _AHEAD if device.type != "cpu" else 0
        yield scored, ahead
        return
    pool = ThreadPoolExecutor(at_once, "scoring", initializer=_compute_with, initargs=(threads // at_once,))
    try:
        # All of them now: what a thread sets for itself becomes the default of those that are new, until it is mended.
        started = threading.Barrier(at_once, timeout=60)
        for waiting in [pool.submit(started.wait) for _ in range(at_once)]:
            waiting.result()
        torch.set_num_threads(threads)
        yield lambda make_copies: pool.submit(lambda: scored(make_copies)()).result, 2 * at_once
    finally:
        pool.shutdown(cancel_futures=True)


def _compute_with(threads: int) -> None:
    torch.get_num_threads()  # the first call in a thread sets the default, which would undo the next line later
    torch.set_num_threads(threads)


@torch.inference_mode()
def _scorer(model: PreTrainedModel, mask_id: int | None, dtype: torch.dtype | None) -> MaskedBert:
    if not isinstance(model, BertForMaskedLM) or model.config.is_decoder:
        check_order(model, mask_id is None)
    is_own = dtype is None or all(
        parameter.dtype == dtype for parameter in model.parameters() if parameter.is_floating_point()
    )
    if not is_own:
        model = copy.deepcopy(model)
        for parameter in model.parameters():
            # Without buffers: rotary frequencies are float32 in every model.
            parameter.data = parameter.data.to(dtype)
    if isinstance(model, BertForMaskedLM) and mask_id is not None:
        return masked_bert(model, mask_id)
    return WholeModel(model, mask_id)


def score_summary(scores: pd.DataFrame, file: Path, ids: pd.Series, id_name: str) -> str:
    """Number and median of the scores, and sentences that deserve a look, by their ids; no texts."""
    lines = [f"{file}: {len(scores):,} sentences, median log p {scores['log_p'].median():.2f}"]
    for chosen, what in (
        (scores["truncated"], "were too long for the model: only their beginning was scored"),
        (scores["n_unknown"] > 0, "contain unknown tokens ([UNK])"),
        (scores["n_tokens"] == 0, "have no tokens and no score (NaN)"),
    ):
        numbers = ids[chosen].tolist()
        if numbers:
            first = ", ".join(map(str, numbers[:_NAMED])) + (", ..." if len(numbers) > _NAMED else "")
            lines.append(f"  {len(numbers):,} sentences {what} ({id_name} {first})")
    return "\n".join(lines)


def _on_its_way(values: Tensor) -> Callable[[], np.ndarray]:
    """What waits for values that travel to the host while the device goes on with the next batches."""
    if values.device.type != "cuda":
        return lambda: values.cpu().numpy().astype(np.float64)
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    on_host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def wait() -> np.ndarray:
        event.synchronize()
        return on_host.numpy().astype(np.float64)

    return wait


def _checked(plan: ScoringPlan, number: int, wait: Callable[[], np.ndarray]) -> tuple[int, np.ndarray]:
    """The batch's values on the host."""
    found = wait()
    if not np.isfinite(found).all():
        place = plan.places(number)[np.flatnonzero(~np.isfinite(found))[0]]
        row = int(np.searchsorted(plan.starts, place, side="right")) - 1
        raise UserError(
            f"sentence {int(np.flatnonzero(plan.row == row)[0])} has no finite log probability: in float16 the model "
            "may overflow (use bfloat16 or float32); in other types its weights are damaged or hold NaN"
        )
    return number, found


def restored(plan: ScoringPlan, entries: Iterable[Mapping[str, Any]]) -> tuple[np.ndarray, list[int]]:
    """Values of a plan by a journal's entries, and the numbers of the batches that are left, or have other entries."""
    values, done = plan.empty_values(), set[int]()
    for entry in entries:
        if len(places := plan.places(entry["batch"])) == len(entry["values"]):
            values[places] = entry["values"]
            done.add(entry["batch"])
    return values, [number for number in range(len(plan.batches)) if number not in done]


def score_left(
    model: PreTrainedModel,
    plan: ScoringPlan,
    values: np.ndarray,
    left: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    kept: Journal | None = None,
    who: str = "",
    is_shown: bool = True,
) -> None:
    """Fill in the values of the batches that are left; a journal keeps them for `restored`.

    The progress bar counts the tokens that go through the model, quadratic in a sentence's length.
    """
    work = {number: plan.work(plan.batches[number]) for number in left}

    def finished() -> Iterator[tuple[int, dict[str, Any]]]:
        for number, found in score_batches(model, plan, left, dtype=dtype):
            values[plan.places(number)] = found
            yield work[number], {"batch": number, "values": found.tolist()}

    shown: dict[str, Any] = {"desc": f"scoring{who}", "unit": " tokens", "unit_scale": True}
    work_through(finished(), kept, total=sum(work.values()), disable=not (is_shown and work), **shown)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every module is in its former mode."""
    was_training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in was_training:
            module.training = training
