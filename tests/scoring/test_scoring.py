"""Pseudo-log-likelihood: equal to the definition, whatever the batching."""

from __future__ import annotations

import copy
import inspect
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertTokenizer

from medclip_dcl.common.errors import UserError
from medclip_dcl.scoring import (
    ScoringPlan,
    pseudo_log_likelihood,
    score_batches,
    score_left,
)
from medclip_dcl.scoring.masked_bert import SharedMaskedBert
from medclip_dcl.scoring.whole_model import MaskedCopies

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["no", "pneumo", "##thorax", "##thor", "##ax", "heart", "size", "normal", "is", ".", ",", "[", "]"]
PIECES = [*SPECIAL, *WORDS, "sep", "mask", "small", "left", "effusion", "##s", "1", "2"]
POSITIONS = 23
SENTENCES = [
    "No pneumothorax.",
    "Heart size is normal.",
    "small left pneumothorax, small left effusions.",
    "no pneumothorax .",  # the same word pieces as the first
    "",
    "heart",
    "Heart size is normal.",
    "a word it does not know.",
    "1 2, 1 2, 1 2 pneumothoraxs, normal normal is no.",
]


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return BertTokenizer(vocab={piece: number for number, piece in enumerate(PIECES)})


@pytest.fixture(scope="module")
def model() -> BertForMaskedLM:
    """Random weights large enough that neighbours matter; odd sizes; dropout that would show in train mode."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=len(PIECES),
        hidden_size=21,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=17,
        max_position_embeddings=POSITIONS,
        hidden_dropout_prob=0.3,
        attention_probs_dropout_prob=0.3,
    )
    network = BertForMaskedLM(config)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return network.eval()


def naive(model: BertForMaskedLM, tokenizer: BertTokenizer, ids: list[int], hidden: Callable) -> float:
    """The definition, one masked copy at a time, all logits; `hidden(t)` are the positions masked for piece t."""
    row = [tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]
    total = 0.0
    for target in range(1, len(row) - 1):
        copy = [tokenizer.mask_token_id if at in hidden(target) else piece for at, piece in enumerate(row)]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([copy])).logits[0, target]
        total += logits.log_softmax(0)[row[target]].item()
    return total


def by_definition(model: BertForMaskedLM, tokenizer: BertTokenizer, sentences: list[str]) -> list[float]:
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in sentences]
    return [naive(model, tokenizer, row, lambda t: {t}) if row else math.nan for row in ids]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_equals_the_definition(
    model: BertForMaskedLM, tokenizer: BertTokenizer, dtype: torch.dtype, tolerance: float
) -> None:
    network = model.to(dtype)
    try:
        found = pseudo_log_likelihood(network, tokenizer, SENTENCES)
        expected = by_definition(network, tokenizer, SENTENCES)
    finally:
        model.float()
    assert found["log_p"].tolist() == pytest.approx(expected, rel=tolerance, nan_ok=True)
    log_p = found["log_p"]
    assert log_p[0] == log_p[3] and log_p[1] == log_p[6] and log_p.nunique() == len(SENTENCES) - 3
    assert found["text"].tolist() == SENTENCES
    assert found["n_tokens"].tolist() == [4, 5, 10, 4, 0, 1, 5, 7, 17]
    assert found["n_unknown"].tolist() == [0, 0, 0, 0, 0, 0, 0, 6, 0]
    assert list(found.dtypes.astype(str)) == ["object", "int64", "float64", "int64"]


@pytest.mark.parametrize("budget", [7, 50, *(pytest.param(x, marks=pytest.mark.slow) for x in (-1, None))])
def test_batches_change_nothing_but_rounding(
    model: BertForMaskedLM, tokenizer: BertTokenizer, budget: int | None
) -> None:
    """-1 and 7 split every sentence by masked position, 50 some; other sentences change nothing."""
    reference = [pseudo_log_likelihood(model, tokenizer, [text])["log_p"][0] for text in SENTENCES]
    found = pseudo_log_likelihood(model, tokenizer, SENTENCES[::-1], token_budget=budget)["log_p"][::-1]
    assert found.tolist() == pytest.approx(reference, rel=1e-5, nan_ok=True)


def test_budget_bounds_the_batches(model: BertForMaskedLM, tokenizer: BertTokenizer) -> None:
    plan = ScoringPlan(tokenizer, SENTENCES, positions=POSITIONS, token_budget=30)
    assert max(map(plan.work, plan.batches)) <= 30
    sizes = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    with pytest.warns(UserWarning, match="module BertForMaskedLM has a forward hook"):
        pseudo_log_likelihood(model, tokenizer, SENTENCES, token_budget=30)
    hook.remove()
    assert max(rows * length for rows, length in sizes) <= 30
    # Six distinct sentences with word pieces; each piece once; no padding.
    assert sum(rows for rows, _ in sizes) == 4 + 5 + 10 + 1 + 7 + 17
    assert {length for _, length in sizes} == {3, 6, 7, 9, 12, 19}


def test_within_word_l2r_masks_rest_of_word(model: BertForMaskedLM, tokenizer: BertTokenizer) -> None:
    # [CLS] no pneumo ##thor ##ax ##s . heart effusion ##s [SEP]
    ids = [
        tokenizer.convert_tokens_to_ids(piece)
        for piece in ["no", "pneumo", "##thor", "##ax", "##s", ".", "heart"]
    ]
    ids += [tokenizer.convert_tokens_to_ids(piece) for piece in ["effusion", "##s"]]
    hidden = {1: {1}, 2: {2, 3, 4, 5}, 3: {3, 4, 5}, 4: {4, 5}, 5: {5}, 6: {6}, 7: {7}, 8: {8, 9}, 9: {9}}
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    vocabulary["##never"] = vocabulary.pop("##thorax")  # so that pneumothorax is three pieces
    without_thorax = BertTokenizer(vocab=vocabulary)
    text = "no pneumothoraxs. heart effusions"
    assert without_thorax(text, add_special_tokens=False)["input_ids"] == ids
    found = pseudo_log_likelihood(model, without_thorax, [text, "heart"], within_word_l2r=True)["log_p"]
    assert found[0] == pytest.approx(naive(model, tokenizer, ids, hidden.__getitem__), rel=1e-5)
    original = pseudo_log_likelihood(model, without_thorax, [text, "heart"])["log_p"]
    assert abs(found[0] - original[0]) > 1e-3
    assert found[1] == original[1]


def test_model_is_left_in_its_modes_and_type(model: BertForMaskedLM, tokenizer: BertTokenizer) -> None:
    expected = pseudo_log_likelihood(model, tokenizer, SENTENCES)
    mixed = copy.deepcopy(model).train().bfloat16()
    mixed.bert.encoder.float()
    mixed.bert.embeddings.eval()
    of_type = copy.deepcopy(mixed).bfloat16()
    rough = pseudo_log_likelihood(of_type, tokenizer, SENTENCES)["log_p"]
    assert rough.tolist() == pytest.approx(expected["log_p"].tolist(), rel=0.05, nan_ok=True)
    assert rough.tolist() != pytest.approx(expected["log_p"].tolist(), rel=1e-6, nan_ok=True)
    found = pseudo_log_likelihood(mixed, tokenizer, SENTENCES, dtype=torch.bfloat16)["log_p"]
    assert found.equals(rough) and mixed.bert.encoder.layer[0].output.dense.weight.dtype == torch.float32
    with pytest.raises(ValueError):
        pseudo_log_likelihood(mixed, tokenizer, ["heart " * 50])
    assert mixed.training and mixed.bert.encoder.training and not mixed.bert.embeddings.training


def test_float16_that_overflows_is_an_error(model: BertForMaskedLM, tokenizer: BertTokenizer) -> None:
    large = copy.deepcopy(model)
    with torch.no_grad():
        large.bert.encoder.layer[1].attention.output.LayerNorm.weight.mul_(5000)
        large.bert.encoder.layer[1].intermediate.dense.weight.mul_(50)
    sentences = ["", "Heart size is normal."]
    assert pseudo_log_likelihood(large, tokenizer, sentences)["log_p"].notna().tolist() == [False, True]
    with pytest.raises(UserError, match="sentence 1 has no finite log probability: in float16"):
        pseudo_log_likelihood(large, tokenizer, sentences, dtype=torch.float16)


def test_a_tokenizer_of_another_model_is_refused(model: BertForMaskedLM) -> None:
    larger = BertTokenizer(vocab={piece: i for i, piece in enumerate([*PIECES, "edema"])})
    pseudo_log_likelihood(model, larger, ["no effusion"])
    message = f"token number {len(PIECES)}, but the model has {len(PIECES)} tokens, numbered from 0"
    with pytest.raises(ValueError, match=message):
        pseudo_log_likelihood(model, larger, ["no edema"])
    other = {piece: i + 100 * (piece == "[SEP]") for i, piece in enumerate(PIECES)}
    with pytest.raises(ValueError, match="token number 103, but"):
        pseudo_log_likelihood(model, BertTokenizer(vocab=other), ["no effusion"])


def test_order_of_batches_does_not_matter(model: BertForMaskedLM, tokenizer: BertTokenizer) -> None:
    plan = ScoringPlan(tokenizer, SENTENCES, positions=POSITIONS, token_budget=30)
    values = plan.empty_values()
    order = list(range(len(plan.batches)))[::-1]
    for number, found in score_batches(model, plan, order):
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        values[plan.places(number)] = found
    assert order and not any(map(math.isnan, values))
    expected = pseudo_log_likelihood(model, tokenizer, SENTENCES, token_budget=30)
    pd.testing.assert_frame_equal(plan.table(values), expected)
    other = ScoringPlan(tokenizer, SENTENCES[::-1], positions=POSITIONS, token_budget=30)
    assert other.fingerprint != plan.fingerprint


class ScaledLinear(torch.nn.Linear):
    """A projection that is more than a linear layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 1.5 * super().forward(input)


class ScaledLogits(BertForMaskedLM):
    """A model whose own forward does more than its parts."""

    def forward(self, **inputs: Any) -> Any:
        output = super().forward(**inputs)
        output.logits = output.logits / 2
        return output


def _own_forward(output: Any) -> None:
    plain = output.forward
    output.forward = lambda *tensors: 1.5 * plain(*tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda bert, _: setattr(bert, "__class__", ScaledLogits), "the model is a ScaledLogits"),
        (lambda bert, _: setattr(bert.bert.encoder, "layer", torch.nn.ModuleList()), "the model has no layers"),
        (lambda _, part: setattr(part.dense, "__class__", ScaledLinear), r"1\.output\.dense is a ScaledLinear, which"),
        (lambda _, part: setattr(part, "LayerNorm", torch.nn.LayerNorm(21, bias=False)), "LayerNorm has no bias"),
        (lambda _, part: _own_forward(part), r"module bert\.encoder\.layer\.1\.output has a forward of its own"),
    ],
)  # fmt: skip
def test_other_models_are_scored_the_slow_way(
    model: BertForMaskedLM, tokenizer: BertTokenizer, change: Callable, message: str
) -> None:
    other = copy.deepcopy(model)
    change(other, other.bert.encoder.layer[1].output)
    with pytest.warns(UserWarning, match=message) as caught:
        found = pseudo_log_likelihood(other, tokenizer, SENTENCES, token_budget=20)["log_p"]
    assert sum("whole model" in str(warning.message) for warning in caught) == 1
    expected = by_definition(other, tokenizer, SENTENCES)
    assert found.tolist() == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert expected[0] != pytest.approx(by_definition(model, tokenizer, SENTENCES[:1])[0], rel=1e-3)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of torch's threads, which is as before afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def threads_of_a_new_thread() -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


def scoring_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("scoring")]


def test_number_of_threads_changes_no_bit(
    model: BertForMaskedLM,
    tokenizer: BertTokenizer,
    threads: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches that are done out of order come in order."""
    plan = ScoringPlan(tokenizer, SENTENCES, positions=POSITIONS, token_budget=20)
    numbers = range(len(plan.batches))
    assert len(numbers) > 10
    threads(1)
    expected = dict(score_batches(model, plan, numbers))
    original, seen = SharedMaskedBert.log_probability, set()

    def late(self: SharedMaskedBert, copies: MaskedCopies) -> torch.Tensor:
        is_own = threading.current_thread() in scoring_threads()
        seen.add((is_own, torch.get_num_threads(), torch.is_inference_mode_enabled()))
        time.sleep(random.random() / 100)
        return original(self, copies)

    monkeypatch.setattr(SharedMaskedBert, "log_probability", late)
    threads(3)
    found = list(score_batches(model, plan, numbers))
    assert [number for number, _ in found] == list(numbers)
    assert all(np.array_equal(values, expected[number]) for number, values in found)
    assert seen == {(True, 1, True)}


@pytest.mark.parametrize(("count", "expected"), [(1, (False, 5)), (2, (True, 2)), (5, (True, 1))])
def test_few_batches_share_all_threads(
    model: BertForMaskedLM,
    tokenizer: BertTokenizer,
    threads: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    expected: tuple[bool, int],
) -> None:
    """Fewer batches than threads leave none idle; who does some of a plan computes as who does all."""
    plan = ScoringPlan(tokenizer, SENTENCES, positions=POSITIONS, token_budget=20)
    plan.batches = plan.batches[:count]
    original, seen = SharedMaskedBert.log_probability, set()

    def watched(self: SharedMaskedBert, copies: MaskedCopies) -> torch.Tensor:
        seen.add((threading.current_thread() in scoring_threads(), torch.get_num_threads()))
        return original(self, copies)

    monkeypatch.setattr(SharedMaskedBert, "log_probability", watched)
    threads(5)
    whole = dict(score_batches(model, plan, range(count)))
    (last,) = score_batches(model, plan, [count - 1])
    assert seen == {expected}
    assert np.array_equal(last[1], whole[count - 1])
    assert torch.get_num_threads() == threads_of_a_new_thread() == 5


def test_threads_end_and_leave_torchs_number(
    model: BertForMaskedLM,
    tokenizer: BertTokenizer,
    threads: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads(3)
    plan = ScoringPlan(tokenizer, SENTENCES, positions=POSITIONS, token_budget=20)
    batches = score_batches(model, plan, range(len(plan.batches)))
    next(batches)
    assert len(scoring_threads()) == 3 and threads_of_a_new_thread() == 3
    batches.close()
    assert not scoring_threads() and threads_of_a_new_thread() == 3

    def broken(self: SharedMaskedBert, copies: MaskedCopies) -> torch.Tensor:
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(SharedMaskedBert, "log_probability", broken)
    with pytest.raises(RuntimeError, match="out of memory, say"):
        list(score_batches(model, plan, range(len(plan.batches))))
    assert not scoring_threads() and threads_of_a_new_thread() == 3


def test_an_autocast_of_the_callers_changes_nothing(
    model: BertForMaskedLM, tokenizer: BertTokenizer, threads: Callable[[int], None]
) -> None:
    expected = pseudo_log_likelihood(model, tokenizer, SENTENCES)
    threads(3)
    with torch.autocast("cpu", torch.bfloat16):
        pd.testing.assert_frame_equal(pseudo_log_likelihood(model, tokenizer, SENTENCES), expected)


def test_a_hook_for_all_modules_is_respected(model, tokenizer, threads: Callable[[int], None]) -> None:
    """In one thread."""
    seen, expected = set(), pseudo_log_likelihood(model, tokenizer, SENTENCES)["log_p"].tolist()

    def softened(module: torch.nn.Module, _: Any, output: Any) -> Any:
        seen.add(threading.current_thread())
        return output * 1.1 if isinstance(module, torch.nn.LayerNorm) else None

    threads(3)
    handle = torch.nn.modules.module.register_module_forward_hook(softened)
    try:
        with pytest.warns(UserWarning, match="there is a forward hook for all modules"):
            found = pseudo_log_likelihood(model, tokenizer, SENTENCES)["log_p"]
    finally:
        handle.remove()
    assert seen == {threading.current_thread()} and abs(found[0] - expected[0]) > 1e-3


def test_nothing_and_only_empty_sentences(model: BertForMaskedLM, tokenizer: BertTokenizer) -> None:
    none = pseudo_log_likelihood(model, tokenizer, [])
    assert list(none.columns) == ["text", "n_tokens", "log_p", "n_unknown"] and len(none) == 0
    empty = pseudo_log_likelihood(model, tokenizer, ["", "  "])
    assert empty["n_tokens"].tolist() == [0, 0] and empty["log_p"].isna().all()


def test_a_single_string_is_refused(model: BertForMaskedLM, tokenizer: BertTokenizer) -> None:
    # A string is a sequence of strings: each letter would get a score.
    with pytest.raises(TypeError, match="expected a list of strings, found tuple"):
        inspect.unwrap(pseudo_log_likelihood)(model, tokenizer, [("a", "b")])  # not as a pair
    with pytest.raises(TypeError, match="expected a list of strings, found str"):
        inspect.unwrap(pseudo_log_likelihood)(model, tokenizer, "heart")
    found = inspect.unwrap(pseudo_log_likelihood)(model, tokenizer, iter(["heart", "lungs"]))
    assert len(found) == 2


def test_progress_on_standard_error_shows_no_text(
    model: BertForMaskedLM, tokenizer: BertTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    pseudo_log_likelihood(model, tokenizer, ["heart size", "heart", "heart"], progress=True)
    captured = capsys.readouterr()
    assert captured.out == "" and "heart" not in captured.err
    assert "11.0/11.0" in captured.err
    plan = ScoringPlan(tokenizer, ["heart size"], positions=POSITIONS, token_budget=64)
    for is_shown, numbers in ((True, []), (False, [0])):
        score_left(model, plan, plan.empty_values(), numbers, is_shown=is_shown)
    assert capsys.readouterr().err == ""
