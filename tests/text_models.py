"""Folders of small text models with random weights and their tokenizers, saved by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as T
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.small import SENTENCES

FAMILIES = (
    *("bert", "distilbert", "roberta", "mpnet", "modernbert", "deberta", "deberta-v2"),
    *("clip", "siglip"),
)

SIZES: dict[str, Any] = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
    "max_position_embeddings": 40,
}
VISION = {**SIZES, "num_hidden_layers": 1, "image_size": 32, "patch_size": 16}
del VISION["max_position_embeddings"]
DEBERTA: dict[str, Any] = {
    **{"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False},
    # Farther than any two tokens here: at this distance the bucket of DeBERTa-v2 hangs on the last digit of a
    # logarithm, which a GPU rounds otherwise.
    "max_relative_positions": 48,
}


def bpe(first: list[str], end_of_word: str = "") -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a BPE over bytes, special tokens first."""
    suffix: dict[str, Any] = {"end_of_word_suffix": end_of_word} if end_of_word else {}
    tokenizer = Tokenizer(models.BPE(**suffix))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {
        "vocab_size": 640,
        "show_progress": False,
        "initial_alphabet": sorted(alphabet),
    }
    tokenizer.train_from_iterator(SENTENCES, trainers.BpeTrainer(special_tokens=first, **options, **suffix))
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = dict(model["vocab"])
    if end_of_word:
        for letter in sorted(alphabet):
            vocabulary.setdefault(letter + end_of_word, len(vocabulary))
    return vocabulary, [tuple(merge) for merge in model["merges"]]


def word_pieces(first: list[str]) -> dict[str, int]:
    letters = list("abcdefghijklmnopqrstuvwxyz_.")
    words = sorted({word for text in SENTENCES for word in text.lower().replace(".", " . ").split()})
    pieces = [*first, *letters, *(f"##{x}" for x in letters), *words]
    return {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}


def unigram(first: list[str]) -> list[tuple[str, float]]:
    """Pieces and scores of a Unigram over words that begin with the mark of a space."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=first, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return [(piece, score) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]]


BERTS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTAS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def fast(tokenizer: Tokenizer, start: str, end: str, **special: str) -> T.PreTrainedTokenizerFast:
    """A tokenizer without a class of its own, as ModernBERT's."""
    ids = {piece: tokenizer.token_to_id(piece) for piece in (start, end) if piece}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}".strip(), special_tokens=list(ids.items())
    )
    return T.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def modern_bert_tokenizer() -> T.PreTrainedTokenizerFast:
    vocabulary, merges = bpe(BERTS)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return fast(tokenizer, "[CLS]", "[SEP]", **special)


def siglip_tokenizer() -> T.PreTrainedTokenizerFast:
    """Of SigLIP 2's kind: no class of its own is needed, the end and padding are two tokens."""
    tokenizer = Tokenizer(models.Unigram(unigram(["<pad>", "<eos>", "<unk>"]), unk_id=2))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return fast(tokenizer, "", "<eos>", pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def write_text_model(family: str, folder: Path) -> Path:
    """Write a small model of the family, with the head or the image tower that it is published with."""
    torch.manual_seed(0)
    tokenizer: Any
    if family in ("bert", "distilbert", "electra"):
        tokenizer = T.BertTokenizer(vocab=word_pieces(BERTS))
    elif family == "mpnet":
        tokenizer = T.MPNetTokenizer(vocab=word_pieces([*ROBERTAS[:4], "[UNK]", "<mask>"]))
    elif family == "modernbert":
        tokenizer = modern_bert_tokenizer()
    elif family == "deberta-v2":
        tokenizer = T.DebertaV2Tokenizer(
            vocab=unigram(["[PAD]", "[CLS]", "[SEP]", "[UNK]", "<unk>", "[MASK]"])
        )
    elif family == "gpt2":
        vocabulary, merges = bpe(["<|endoftext|>"])
        tokenizer = T.GPT2Tokenizer(vocab=vocabulary, merges=merges)
    elif family == "siglip":
        tokenizer = siglip_tokenizer()
    elif family == "clip":
        vocabulary, merges = bpe([], "</w>")
        tokenizer = T.CLIPTokenizer(
            vocab={**vocabulary, "<|startoftext|>": len(vocabulary), "<|endoftext|>": len(vocabulary) + 1},
            merges=merges,
        )
    else:
        vocabulary, merges = bpe(ROBERTAS if family == "roberta" else BERTS)
        kind = T.RobertaTokenizer if family == "roberta" else T.DebertaTokenizer
        tokenizer = kind(vocab=vocabulary, merges=merges)
    sizes = {**SIZES, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    model = _model(family, sizes, tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():  # the libraries' own are so small that all sentences are alike
            parameter.normal_(std=0.6)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _model(family: str, sizes: dict[str, Any], tokenizer: Any) -> Any:
    if family == "bert":
        return T.BertForPreTraining(T.BertConfig(**sizes))
    if family == "distilbert":
        own: dict[str, Any] = {
            "dim": 16,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 24,
            "max_position_embeddings": 40,
        }
        config = T.DistilBertConfig(vocab_size=sizes["vocab_size"], **own)
        return T.DistilBertForMaskedLM(config)
    if family == "electra":
        return T.ElectraForMaskedLM(T.ElectraConfig(**sizes, embedding_size=10))
    if family == "gpt2":
        small = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40}
        return T.GPT2LMHeadModel(T.GPT2Config(vocab_size=sizes["vocab_size"], **small))
    if family == "roberta":
        return T.RobertaForMaskedLM(T.RobertaConfig(**sizes, type_vocab_size=1))
    if family == "mpnet":
        return T.MPNetForMaskedLM(T.MPNetConfig(**sizes))
    if family == "modernbert":
        return T.ModernBertForMaskedLM(T.ModernBertConfig(**sizes, local_attention=4))
    if family == "deberta":
        return T.DebertaForMaskedLM(T.DebertaConfig(**sizes, **DEBERTA))
    if family == "deberta-v2":
        own = {
            "type_vocab_size": 0,
            "position_buckets": 4,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "legacy": False,
        }
        return T.DebertaV2ForMaskedLM(T.DebertaV2Config(**sizes, **DEBERTA, **own))
    if family == "clip":
        text = {**sizes, "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        return T.CLIPModel(T.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=12))
    text = {**sizes, "projection_size": 14, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    return T.SiglipModel(T.SiglipConfig(text_config=text, vision_config=VISION))
