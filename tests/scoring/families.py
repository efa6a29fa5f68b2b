"""Small random language models of many families, each saved by transformers with a tokenizer trained here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "No pneumothorax.",
    "Heart size is normal.",
    "small left pneumothorax, small left effusions.",
    "",
    "heart",
    "Heart size is normal.",
    "Ædema [MASK] <mask> </s>.",
    "pneumothoraces  without effusion",
]
"""Repeats, an empty one, special tokens as text, two spaces, and words of several tokens."""
POSITIONS = 48
"""Tokens that each model takes, special tokens included."""
BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
_SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}


def _word_piece(kind: str, special: list[str], unknown: str = "[UNK]") -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=70, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS[:6], trainer)
    return getattr(transformers, kind)(vocab=tokenizer.get_vocab())


def _byte_pairs(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS[:6], trainer)
    return tokenizer


def _byte_level(kind: str, special: list[str]) -> PreTrainedTokenizerFast:
    model = json.loads(_byte_pairs(special).to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return getattr(transformers, kind)(vocab=model["vocab"], merges=merges)


def _modern() -> PreTrainedTokenizerFast:
    """A tokenizer without a class of its own."""
    tokenizer = _byte_pairs(BERT_TOKENS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    kinds = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict(zip(kinds, BERT_TOKENS, strict=True)))


def _unigram() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=BERT_TOKENS, unk_token="[UNK]", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS[:6], trainer)
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    return transformers.DebertaV2Tokenizer(vocab=[tuple(entry) for entry in vocabulary])


_DISENTANGLED = {
    **_SIZES,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
    "max_position_embeddings": POSITIONS,
}
_Family = tuple[str, dict[str, Any], Callable[[], PreTrainedTokenizerFast]]
MASKED: dict[str, _Family] = {
    "distilbert": (
        "DistilBertForMaskedLM",
        {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 20, "max_position_embeddings": POSITIONS},
        lambda: _word_piece("BertTokenizer", BERT_TOKENS),
    ),
    "electra": (
        "ElectraForMaskedLM",
        {**_SIZES, "embedding_size": 10, "max_position_embeddings": POSITIONS},
        lambda: _word_piece("BertTokenizer", BERT_TOKENS),
    ),
    "mpnet": (
        "MPNetForMaskedLM",
        {**_SIZES, "max_position_embeddings": POSITIONS + 2, "pad_token_id": 1},
        lambda: _word_piece("MPNetTokenizer", [*ROBERTA_TOKENS[:3], "[UNK]", "<mask>"]),
    ),
    "roberta": (
        "RobertaForMaskedLM",
        {**_SIZES, "max_position_embeddings": POSITIONS + 2, "pad_token_id": 1},
        lambda: _byte_level("RobertaTokenizer", ROBERTA_TOKENS),
    ),
    "deberta": ("DebertaForMaskedLM", _DISENTANGLED, lambda: _byte_level("DebertaTokenizer", BERT_TOKENS)),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",
        {**_DISENTANGLED, "position_buckets": 4, "share_att_key": True, "legacy": False},
        _unigram,
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        {
            **_SIZES,
            "max_position_embeddings": POSITIONS,
            "local_attention": 6,
            "global_attn_every_n_layers": 2,
        }
        | {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3},
        _modern,
    ),
}
CAUSAL: dict[str, _Family] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": POSITIONS},
        lambda: _byte_level("GPT2Tokenizer", ["<|endoftext|>"]),
    )
}


def write(family: str, folder: Path, **changes: Any) -> Path:
    """Save a model of the family with large random weights, so that neighbours matter, and its tokenizer."""
    kind, options, make_tokenizer = (MASKED | CAUSAL)[family]
    tokenizer = make_tokenizer()
    model_class = getattr(transformers, kind)
    torch.manual_seed(5)
    config = model_class.config_class(vocab_size=len(tokenizer), **(options | changes))
    model = model_class(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name.lower():
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
