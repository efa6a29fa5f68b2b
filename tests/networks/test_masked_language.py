"""The sentence encoder's vocabulary head: transformers' values, tied for good, and saved once."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import BertForMaskedLM

from medclip_dcl.common.weight_files import load_exactly
from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.image_text import ImageTextNetwork, pad_tokens
from medclip_dcl.networks.language_model import load_language_model
from medclip_dcl.networks.masked_language import masked_places
from medclip_dcl.networks.similarity import GlobalCosine
from medclip_dcl.networks.text_encoder import BertSentences
from tests.model_folders import edited, with_weights

TEXTS = ["Small left pleural effusion, unchanged.", "No pneumothorax.", "The lungs are clear."]
WORDS = "bert.embeddings.word_embeddings.weight"


@pytest.fixture(params=["tied", "untied"])
def folder(request: pytest.FixtureRequest, small_bert: Path, tmp_path: Path) -> Path:
    """A language model with weights large enough to matter; its decoder is tied, or one of its own."""
    folder = Path(shutil.copytree(small_bert, tmp_path / "small_bert"))

    def change(state: dict[str, Tensor]) -> None:
        state.update({name: torch.randn_like(value) * 0.4 for name, value in state.items()})
        if request.param == "untied":
            state["cls.predictions.decoder.weight"] = torch.randn_like(state[WORDS]) * 0.4
            state["cls.predictions.decoder.bias"] = state["cls.predictions.bias"].clone()

    with_weights(folder, change)
    edited(folder, tie_word_embeddings=request.param == "tied")
    return folder


def masked_batch(encoder: BertSentences) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three padded sentences; two, none and one word pieces are hidden."""
    tokens, lengths = pad_tokens(encoder.tokenize(TEXTS))
    labels = torch.full_like(tokens, -100)
    for place in ((0, 2), (0, 4), (2, 1)):
        labels[place], tokens[place] = tokens[place], 4
    return tokens, lengths, labels, masked_places(labels)


@torch.no_grad()
def test_losses_are_those_of_transformers(folder: Path) -> None:
    encoder = BertSentences(str(folder), masked_language_head=True).eval()
    reference = BertForMaskedLM.from_pretrained(folder).eval()
    tokens, lengths, labels, places = masked_batch(encoder)
    assert lengths[1] < lengths[0] == tokens.shape[1]
    found = encoder.masked_language_loss(tokens, lengths, labels, places)
    expected = []
    for row, column in ((0, 2), (0, 4), (2, 1)):
        logits = reference(tokens[row : row + 1, : lengths[row]]).logits[0, column]
        expected.append(-logits.log_softmax(0)[labels[row, column]])
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)
    assert found.dtype == torch.float32 and found.std() > 0.01


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_cpu_training_below_float32_avoids_fused_attention(small_bert: Path, precision) -> None:
    """Its backward pass is several times slower there."""
    encoder = BertSentences(str(small_bert), dropout=0.0)
    assert "FlashAttention" in names_of_graph(encoder.double()(*pad_tokens(encoder.tokenize(TEXTS))))
    encoder.float()
    batch = pad_tokens(encoder.tokenize(TEXTS))
    expected = encoder(*batch)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        found = encoder(*batch)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.02 * expected.abs().max().item())
    assert ("FlashAttention" in names_of_graph(found)) == (precision == torch.float32)


def names_of_graph(value: Tensor) -> str:
    """Names of all functions of the gradient's graph."""
    seen, waiting = set(), [value.grad_fn]
    while waiting:
        function = waiting.pop()
        if function is not None and function not in seen:
            seen.add(function)
            waiting += [before for before, _ in function.next_functions]
    return " ".join(function.name() for function in seen)


def test_gradients_are_those_of_transformers(folder: Path) -> None:
    """The word embeddings get theirs from both ends."""
    encoder = BertSentences(str(folder), masked_language_head=True, dropout=0.0)
    reference = load_language_model(folder)[0].eval()
    tokens, lengths, labels, places = masked_batch(encoder)
    encoder.masked_language_loss(tokens, lengths, labels, places).mean().backward()
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    logits = reference(tokens, attention_mask=mask).logits
    cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    for mine, theirs in (
        (encoder.model.get_input_embeddings().weight, reference.get_input_embeddings().weight),
        (encoder.masked_language_head.bias, reference.cls.predictions.decoder.bias),  # type: ignore[union-attr]
    ):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)
        assert mine.grad.abs().max() > 1e-3


def test_the_head_runs_at_masked_positions_only(small_bert: Path) -> None:
    encoder = BertSentences(str(small_bert), masked_language_head=True)
    shapes = []
    assert encoder.masked_language_head is not None
    encoder.masked_language_head.register_forward_hook(lambda module, given, out: shapes.append(out.shape))
    tokens, lengths, labels, places = masked_batch(encoder)
    encoder.masked_language_loss(tokens, lengths, labels, places)
    nothing = encoder.masked_language_loss(tokens, lengths, torch.full_like(labels, -100), places[:0])
    vocabulary = encoder.model.config.vocab_size
    assert shapes == [(3, vocabulary), (0, vocabulary)] and nothing.shape == (0,)


@torch.no_grad()
def test_the_tie_survives_copying_and_loading(small_bert: Path) -> None:
    first = BertSentences(str(small_bert), masked_language_head=True).eval()
    loaded = BertSentences(**first.config()).eval()
    loaded.load_state_dict(first.state_dict())
    copied = copy.deepcopy(first)
    tokens, lengths, labels, places = masked_batch(first)
    expected = first.masked_language_loss(tokens, lengths, labels, places)
    for other in (loaded, copied):
        assert torch.equal(other.masked_language_loss(tokens, lengths, labels, places), expected)
        # A word piece that stands in no sentence: only the decoder can see its embedding change.
        absent = (set(range(5, 40)) - set(tokens.flatten().tolist()) - set(labels.flatten().tolist())).pop()
        other.model.get_input_embeddings().weight[absent, 0] += 1
        assert (other.masked_language_loss(tokens, lengths, labels, places) != expected).all()
    assert torch.equal(first.masked_language_loss(tokens, lengths, labels, places), expected)


@torch.no_grad()
def test_an_exported_network_keeps_its_head(folder: Path, tmp_path: Path) -> None:
    text = BertSentences(str(folder), dim=16, masked_language_head=True)
    network = ImageTextNetwork(
        ResNetRegions(dim=16, stride=16, width=8), text, GlobalCosine(), image_size=64
    ).eval()
    network.save_pretrained(tmp_path / "export")
    stored = load_file(tmp_path / "export" / "model.safetensors")
    words = text.model.get_input_embeddings().weight
    sizes = [name for name, value in stored.items() if value.shape == words.shape]
    is_tied = text.model.config.tie_word_embeddings
    own = [] if is_tied else ["text_encoder.masked_language_head.weight"]
    assert sorted(sizes) == sorted([f"text_encoder.model.{WORDS.removeprefix('bert.')}", *own])
    loaded = ImageTextNetwork.from_pretrained(tmp_path / "export")
    load_exactly(loaded, stored, "export")
    assert loaded.config() == network.config()
    again = loaded.text_encoder
    assert isinstance(again, BertSentences) and not again.training
    batch = masked_batch(text)
    assert torch.equal(again.masked_language_loss(*batch), text.masked_language_loss(*batch))
    assert torch.equal(loaded.embed_texts(TEXTS), network.embed_texts(TEXTS))
