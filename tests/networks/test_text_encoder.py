"""The sentence encoder: BERT's pooled hidden states, whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertModel

from medclip_dcl.networks.image_text import pad_tokens
from medclip_dcl.networks.text_encoder import BertSentences, SentenceEncoder, with_final_period
from tests.text_models import bpe, siglip_tokenizer


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@torch.no_grad()
def test_equals_transformers_and_ignores_padding(small_bert, pooling):
    encoder = BertSentences(str(small_bert), dim=8, pooling=pooling).eval()
    reference = BertModel.from_pretrained(small_bert, add_pooling_layer=False).eval()
    ids = encoder.tokenize(["No pneumothorax.", "Small left pleural effusion, unchanged from ___."])
    tokens, lengths = pad_tokens(ids)
    found = encoder(tokens, lengths)
    for row, pieces in enumerate(ids):
        hidden = reference(torch.tensor([pieces])).last_hidden_state[0]
        pooled = hidden[0] if pooling == "cls" else hidden.mean(dim=0)
        torch.testing.assert_close(found[row], encoder.projection(pooled), rtol=1e-4, atol=1e-5)


def test_starts_in_train_mode_with_dropout(small_bert):
    encoder = BertSentences(str(small_bert), dropout=0.4)
    assert encoder.training and encoder.bert.training
    tokens, lengths = pad_tokens(encoder.tokenize(["No pneumothorax."]))
    assert not torch.equal(encoder(tokens, lengths), encoder(tokens, lengths))
    assert {m.p for m in encoder.modules() if isinstance(m, torch.nn.Dropout)} == {0.4}


def test_texts_and_prompts_end_alike(small_bert):
    encoder = BertSentences(str(small_bert))
    assert encoder.tokenize(["No pneumothorax"]) == encoder.tokenize(["no PNEUMOTHORAX. "])
    assert with_final_period("Why?") == "Why?"
    plain = BertSentences(str(small_bert), final_period=False)
    assert len(plain.tokenize(["No pneumothorax"])[0]) == len(encoder.tokenize(["No pneumothorax"])[0]) - 1


def test_special_tokens_are_text_long_texts_are_cut(small_bert):
    encoder = BertSentences(str(small_bert), max_tokens=12)
    (ids,) = encoder.tokenize(["clear [SEP] clear"])
    assert ids.count(3) == 1 and ids[-1] == 3
    (ids,) = encoder.tokenize(["clear " * 100])
    assert len(ids) == 12 and ids[0] == 2 and ids[-1] == 3
    cut = encoder.truncated_share(["clear", "clear " * 10, "clear " * 9])
    assert cut == "1 of 3 sentences (33.33%) are longer than max_tokens: their end is cut off"
    assert encoder.truncated_share(["clear"]) == ""


@pytest.mark.parametrize(
    ("text", "of_word_pieces", "of_unigram"),
    [
        ("肺炎", True, True),
        ("肺炎。", True, True),
        ("肺炎, (左) .", True, True),
        ("плеврит", True, True),
        ("🫁", True, True),
        ("右肺炎x。", True, True),
        ("右肺炎 clear", False, False),
        ("肺 clear", False, False),
        ("Large", False, False),
        ("...", False, False),
        ("", False, False),
    ],
)
def test_texts_of_unknown_words_are_told(small_bert, text, of_word_pieces, of_unigram):
    """Bytes are always known."""
    assert BertSentences(str(small_bert)).are_unknown([text, "clear"]) == [of_word_pieces, False]
    vocabulary, merges = bpe([])
    byte_level = Tokenizer(models.BPE(vocabulary, merges))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizers = {siglip_tokenizer().backend_tokenizer: of_unigram, byte_level: False}
    for tokenizer, expected in tokenizers.items():
        encoder = SentenceEncoder()
        encoder.tokenizer = tokenizer
        assert encoder.are_unknown([text]) == [expected]
    assert SentenceEncoder().are_unknown([text]) == [False]


@torch.no_grad()
def test_config_rebuilds_without_the_folder(small_bert):
    options: dict[str, Any] = {"pooling": "mean", "projection": "mlp"}
    first = BertSentences(str(small_bert), dim=8, max_tokens=20, dropout=0.4, **options).eval()
    second = BertSentences(**first.config()).eval()
    second.load_state_dict(first.state_dict())
    texts = ["Mild pulmonary edema.", "unseen wörd"]
    assert first.tokenize(texts) == second.tokenize(texts)
    tokens, lengths = pad_tokens(first.tokenize(texts))
    assert torch.equal(first(tokens, lengths), second(tokens, lengths))
    assert second.bert.config.hidden_dropout_prob == 0.4


@torch.no_grad()
def test_mlp_is_biovils_two_layers(small_bert):
    encoder = BertSentences(str(small_bert), dim=3, projection="mlp").eval()
    shapes = {name: tuple(value.shape) for name, value in encoder.projection.state_dict().items()}
    assert shapes == {
        **{"dense_to_hidden.weight": (3, 32), "dense_to_hidden.bias": (3,)},
        **{"LayerNorm.weight": (3,), "LayerNorm.bias": (3,)},
        **{"dense_to_output.weight": (3, 3), "dense_to_output.bias": (3,)},
    }
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    encoder.projection.load_state_dict(weights)
    tokens, lengths = pad_tokens(encoder.tokenize(["No pneumothorax.", "Small left pleural effusion."]))
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    for row, pooled in enumerate(encoder.bert(tokens, attention_mask=mask).last_hidden_state[:, 0]):
        hidden = weights["dense_to_hidden.weight"] @ pooled + weights["dense_to_hidden.bias"]
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
        hidden = (hidden - hidden.mean()) / (hidden.var(unbiased=False) + 1e-12).sqrt()
        hidden = hidden * weights["LayerNorm.weight"] + weights["LayerNorm.bias"]
        expected = weights["dense_to_output.weight"] @ hidden + weights["dense_to_output.bias"]
        torch.testing.assert_close(encoder(tokens, lengths)[row], expected, rtol=1e-4, atol=1e-5)
