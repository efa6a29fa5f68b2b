"""Masked copies through a plain BERT: short cuts give what the whole model gives, also where numbers are large."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM
from transformers.activations import GELUActivation

import medclip_dcl.scoring.masked_bert as masked_bert
from medclip_dcl.scoring.masked_bert import SharedMaskedBert
from medclip_dcl.scoring.whole_model import MaskedCopies, WholeModel

MASK = 3
LENGTH = 9
VOCABULARY = 50


def random_bert(**options: object) -> BertForMaskedLM:
    """Random weights and biases in float64; sizes that no register fits."""
    torch.manual_seed(5)
    sizes: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 21,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 17,
        "max_position_embeddings": LENGTH,
    }
    config = BertConfig(**(sizes | options))
    network = BertForMaskedLM(config).eval().double()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return network.requires_grad_(False)


@pytest.fixture
def network() -> BertForMaskedLM:
    return random_bert()


@pytest.fixture
def copies() -> MaskedCopies:
    """Every piece of three sentences masked once, and a copy with two masks."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, VOCABULARY, (3, LENGTH), generator=generator)
    position = torch.arange(1, LENGTH - 1).repeat(3)
    is_masked = torch.nn.functional.one_hot(position, LENGTH).bool()
    is_masked[4, 7] = True
    return MaskedCopies(
        tokens=tokens,
        sentence=torch.arange(3).repeat_interleave(LENGTH - 2),
        is_masked=is_masked,
        query_copy=None,
        query_position=position,
    )


def both(network: BertForMaskedLM, copies: MaskedCopies) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probabilities by the short cuts, which change no weight, and by the whole model."""
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with torch.inference_mode():
        found = SharedMaskedBert(network, MASK).log_probability(copies)
        expected = WholeModel(network, MASK).log_probability(copies)
    assert all(
        value.equal(before[name]) or value.isnan().any() for name, value in network.state_dict().items()
    )
    return found, expected


@pytest.mark.parametrize("is_on_host", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"hidden_act": "relu"}, {"hidden_act": "gelu_new"}, {"num_hidden_layers": 1}]
)
def test_short_cuts_equal_the_whole_model(
    copies: MaskedCopies, monkeypatch: pytest.MonkeyPatch, is_on_host: bool, options: dict[str, object]
) -> None:
    """The path that a GPU takes, too."""
    monkeypatch.setattr(masked_bert, "is_on_host", lambda tensor: is_on_host)
    found, expected = both(random_bert(**options), copies)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("copies_at_a_time", [1, 4, 7, 21])
def test_parts_of_a_batch_equal_the_whole(
    network: BertForMaskedLM,
    copies: MaskedCopies,
    monkeypatch: pytest.MonkeyPatch,
    copies_at_a_time: int,
) -> None:
    """Parts begin and end within a sentence."""
    expected, whole = both(network, copies)
    sizes = [len(part.sentence) for part in copies.split(copies_at_a_time)]
    assert sum(sizes) == 21 and max(sizes) == copies_at_a_time
    monkeypatch.setattr(masked_bert, "LAYERS_TOKENS", copies_at_a_time * LENGTH + 1)
    original, calls = SharedMaskedBert._rows, []

    def counted(self: SharedMaskedBert, part: MaskedCopies) -> torch.Tensor:
        calls.append(len(part.sentence))
        return original(self, part)

    monkeypatch.setattr(SharedMaskedBert, "_rows", counted)
    found, _ = both(network, copies)
    assert calls == sizes
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=0)


def test_certain_piece_has_at_most_probability_one() -> None:
    """Rounding would give half of these rows a little more."""
    torch.manual_seed(0)
    decoder = torch.nn.Linear(21, VOCABULARY)
    torch.nn.init.normal_(decoder.weight)
    torch.nn.init.zeros_(decoder.bias)
    with torch.inference_mode():
        hidden = torch.randn(200, 21) * 0.5 + decoder.weight[7] * 2
        found = masked_bert._Head(decoder).log_probability(hidden, torch.full((200,), 7))
    assert (found <= 0).all() and (found > -1e-5).all()


class Clipped(GELUActivation):
    """An activation that only looks like the usual one."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).clamp(max=0.1)


def test_an_activation_of_ones_own_is_respected(network: BertForMaskedLM, copies: MaskedCopies) -> None:
    usual, _ = both(network, copies)
    for layer in network.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = Clipped()
    found, expected = both(network, copies)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert not torch.allclose(found, usual, rtol=1e-3)


def test_bfloat16_is_as_precise_as_the_whole_model(network: BertForMaskedLM, copies: MaskedCopies) -> None:
    """Mean errors against float64; what the short cuts round and what the whole model rounds differ a little."""
    expected, _ = both(network, copies)
    found, whole = ((values - expected).abs().mean() for values in both(network.bfloat16(), copies))
    assert found < 1.5 * whole
    assert 1e-4 < whole < 0.2


@pytest.mark.parametrize("trouble", ["bias of a piece", "distant logits", "distant logits, high before low"])
def test_vocabulary_in_blocks_where_numbers_are_large(
    network: BertForMaskedLM, copies: MaskedCopies, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """In float32, where exponentials overflow at 88."""
    monkeypatch.setattr(masked_bert, "_HEAD_COLUMNS", 8)
    decoder = network.cls.predictions.decoder
    if trouble == "bias of a piece":
        decoder.bias[20] = 500.0
    else:
        first = slice(0, 8) if "high" in trouble else slice(8, None)
        decoder.weight[first] *= 300
    found, expected = both(network.float(), copies)
    assert found.isfinite().all() and expected.abs().max() > 100
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("what", ["bias", "logits"])
def test_exponentials_that_all_but_vanish(network: BertForMaskedLM, copies: MaskedCopies, what: str) -> None:
    """exp(-100) has hardly a digit in float32."""
    predictions = network.cls.predictions
    if what == "bias":
        predictions.decoder.bias -= 100
    else:
        predictions.transform.LayerNorm.bias[0] += 5
        predictions.decoder.weight[:, 0] -= 21
    found, expected = both(network.float(), copies)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def test_blocks_of_the_vocabulary_equal_the_whole(
    network: BertForMaskedLM, copies: MaskedCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked_bert, "_HEAD_COLUMNS", 8)
    at_once = []
    monkeypatch.setattr(masked_bert._Head, "_at_once", lambda *arguments: at_once.append(arguments))
    found, expected = both(network, copies)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert not at_once


def test_a_number_that_is_none_stays_none(network: BertForMaskedLM, copies: MaskedCopies) -> None:
    network.cls.predictions.decoder.weight[7, 0] = torch.nan
    found, _ = both(network, copies)
    assert found.isnan().all()
