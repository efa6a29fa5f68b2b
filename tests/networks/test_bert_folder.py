"""Loading and writing folders of transformers: CXR-BERT's exact files, complete or refused by name."""

from __future__ import annotations

import math
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertForPreTraining

from medclip_dcl.common.errors import UserError
from medclip_dcl.networks import bert_folder as pretrained
from medclip_dcl.networks.bert_folder import (
    resolve_folder,
    save_language_model,
    weights_fingerprint,
    word_pieces,
)
from medclip_dcl.networks.language_model import load_language_model, load_masked_tokenizer
from medclip_dcl.networks.text_encoder import TransformersSentences
from tests.model_folders import edited, with_weights

SMALL: dict[str, Any] = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
}
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "no", "##rmal", "heart", "size", "."]


def cxr_bert_weights(config: BertConfig, is_specialized: bool) -> dict[str, Tensor]:
    """Random weights under the published checkpoints' key names (older versions' position_ids among them)."""
    model = BertForPreTraining(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    del state["cls.seq_relationship.weight"], state["cls.seq_relationship.bias"]
    state["bert.embeddings.position_ids"] = torch.arange(config.max_position_embeddings)[None]
    if is_specialized:
        for part, shape in (("dense_to_hidden", (128, config.hidden_size)), ("dense_to_output", (128, 128))):
            state[f"cls_projection_head.{part}.weight"] = torch.randn(shape)
            state[f"cls_projection_head.{part}.bias"] = torch.randn(128)
        state["cls_projection_head.LayerNorm.weight"] = torch.randn(128)
        state["cls_projection_head.LayerNorm.bias"] = torch.randn(128)
    return state


@pytest.fixture(params=["general-bin", "specialized-safetensors"])
def cxr_bert(request: pytest.FixtureRequest, real_data: Path, tmp_path: Path) -> Path:
    """A folder in CXR-BERT's format: its own config.json (smaller layers) and tokenizer, random weights."""
    kind, file_format = request.param.split("-")
    folder = tmp_path / f"cxr-bert-{kind}"
    folder.mkdir()
    for file in (real_data / "cxr_bert_tokenizer").iterdir():
        shutil.copyfile(file, folder / file.name)
    for name in ("configuration_cxrbert.py", "modeling_cxrbert.py"):  # named by auto_map
        (folder / name).write_text("raise AssertionError('the code of the folder ran')")
    edited(folder, **SMALL)
    config = BertConfig(**SMALL, vocab_size=30522, max_position_embeddings=512)
    weights = cxr_bert_weights(config, kind == "specialized")
    if file_format == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A plain language model folder with a vocabulary of 18 pieces."""
    return write_small(tmp_path / "small")


def write_small(folder: Path) -> Path:
    config = BertConfig(**SMALL, vocab_size=len(PIECES), max_position_embeddings=9)
    model = BertForMaskedLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return folder


def stored(folder: Path) -> dict[str, Tensor]:
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    return torch.load(folder / "pytorch_model.bin", weights_only=True)


def test_cxr_bert_encoder_and_head_hold_file_values(cxr_bert: Path) -> None:
    state = stored(cxr_bert)
    encoder, language_model = TransformersSentences(str(cxr_bert)).model, load_language_model(cxr_bert)[0]
    assert encoder.training and language_model.training
    assert encoder.pooler is None
    assert encoder.config.hidden_dropout_prob == 0.25
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, state[f"bert.{name}"]), name
    for name, value in language_model.state_dict().items():
        assert torch.equal(value, state[name]), name
    tokenizer = load_masked_tokenizer(cxr_bert)  # of a class that is remote code
    assert tokenizer.tokenize("No Pneumothorax.") == ["no", "pneumothorax", "."]
    assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.mask_token_id) == (30522, 0, 4)


def test_word_pieces_are_those_of_the_tokenizer_itself(
    real_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole reports of Open-i and odd texts, whatever the tokenizer was used for before."""
    tokenizer = load_masked_tokenizer(real_data / "cxr_bert_tokenizer")
    reports = pd.read_csv(real_data / "openi" / "openi_reports.csv")["findings"].dropna()[:300]
    odd = ["", " ", "a [SEP] b[MASK]", "[CLS]", "XXXX ___ caf\u00e9 \u4e00 \x00\t\n", "a" * 300, "no " * 700]
    texts = [*reports, *odd]
    expected = tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)
    tokenizer(texts[:3], truncation=True, max_length=4, padding="max_length")
    monkeypatch.setattr(pretrained, "_TOKENISED_AT_ONCE", 100)
    assert list(word_pieces(tokenizer, texts)) == expected["input_ids"]
    assert list(word_pieces(tokenizer, [])) == []
    # As it was for whoever uses it afterwards.
    assert tokenizer("a [SEP]", add_special_tokens=False)["input_ids"][-1] == tokenizer.sep_token_id


def test_fingerprint_is_of_the_values_only(small: Path, tmp_path: Path) -> None:
    rounded = {key: value.half() for key, value in load_file(small / "model.safetensors").items()}
    prints = []
    for name, state in (
        ("half", rounded),
        ("single", {key: value.float() for key, value in rounded.items()}),
    ):
        shutil.copytree(small, tmp_path / name)
        save_file(state, tmp_path / name / "model.safetensors")
        prints.append(weights_fingerprint(load_language_model(tmp_path / name)[0]))
    assert prints[0] == prints[1]
    model = load_language_model(small)[0]
    assert len(prints[0]) == 16 and weights_fingerprint(model) != prints[0]
    before = weights_fingerprint(model)
    with torch.no_grad():
        model.cls.predictions.bias[3] += 1e-6
    assert weights_fingerprint(model) != before


def test_saved_folder_loads_here_and_with_plain_transformers(cxr_bert: Path, tmp_path: Path) -> None:
    model, tokenizer = load_language_model(cxr_bert)[0], load_masked_tokenizer(cxr_bert)
    folder = tmp_path / "out" / "language_model"
    for _ in range(2):  # the second replaces the first
        save_language_model(model, tokenizer, folder)
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [entry.name for entry in folder.parent.iterdir()] == ["language_model"]
    assert "auto_map" not in (folder / "tokenizer_config.json").read_text()
    theirs, info = BertForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert weights_fingerprint(theirs) == weights_fingerprint(model)
    assert weights_fingerprint(load_language_model(folder)[0]) == weights_fingerprint(model)
    text = "Naïve ___ HEART size, 3.5cm"
    for again in (AutoTokenizer.from_pretrained(folder), load_masked_tokenizer(folder)):
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_an_untied_decoder_is_kept(small: Path, tmp_path: Path) -> None:
    edited(small, tie_word_embeddings=False)
    untie(small)
    model = load_language_model(small)[0]
    with torch.no_grad():
        model.cls.predictions.decoder.bias += 1
    save_language_model(model, load_masked_tokenizer(small), tmp_path / "saved")
    tokens = torch.tensor([[2, 7, 4, 3]])
    expected = model.eval()(tokens).logits
    assert torch.equal(load_language_model(tmp_path / "saved")[0].eval()(tokens).logits, expected)
    assert torch.equal(BertForMaskedLM.from_pretrained(tmp_path / "saved").eval()(tokens).logits, expected)


def test_saving_refuses_to_replace_another_folder(small: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("precious")
    with pytest.raises(FileExistsError, match="thesis also holds chapter.tex; move it away"):
        save_language_model(load_language_model(small)[0], load_masked_tokenizer(small), tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.tex").exists()


def without(start: str) -> Callable[[Path], None]:
    def change(state: dict[str, Tensor]) -> None:
        for name in [name for name in state if name.startswith(start)]:
            del state[name]

    return lambda folder: with_weights(folder, change)


def weights(**changes: Tensor) -> Callable[[Path], None]:
    return lambda folder: with_weights(
        folder, lambda state: state.update({f"cls.predictions.{name}": x for name, x in changes.items()})
    )


def untie(folder: Path) -> None:
    def change(state: dict[str, Tensor]) -> None:
        state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"] + 1
        state["cls.predictions.decoder.bias"] = state["cls.predictions.bias"].clone()

    with_weights(folder, change)


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def pickled_code(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"run": print}, file, protocol=2)


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edited(folder, **changes)


def pieces(*lines: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "vocab.txt").write_text("\n".join(lines))

    return change


EIGHT_BITS = torch.ones(12, 12, dtype=torch.int8)


def broken_settings(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")


@pytest.mark.parametrize(
    ("load", "damage", "words"),
    [
        (load_language_model, untie, "says it is tied"),
        (load_language_model, weights(**{"decoder.bias": torch.ones(18)}), "says it is tied"),
        (load_language_model, weights(bias=torch.full((18,), math.nan)), "NaN or infinite in .*cls.predictions.bias"),
        (load_language_model, weights(**{"transform.dense.weight": EIGHT_BITS}), "quantised .*dense.weight"),
        (load_language_model, weights(**{"x.weight": EIGHT_BITS.to(torch.float8_e4m3fn)}), "quantised .*x.weight"),
        (load_language_model, without("cls."), "missing .*cls.predictions.bias.*--config language_model"),
        (load_language_model, truncate, r"\(Error while deserializing"),
        (load_language_model, pickled_code, r"\(Weights only load failed\).*Python objects are not opened"),
        (load_language_model, removed("model.safetensors"), "no file named model.safetensors"),
        (load_masked_tokenizer, pieces(*PIECES, "extra"), "19 tokens, but 18 embedding rows"),
        (load_masked_tokenizer, pieces(*(f"piece{i}" for i in range(18))), "23 tokens, but 18 embedding rows"),
        (load_masked_tokenizer, pieces(*PIECES[1:5], "[PAD]", *PIECES[5:]), r"\[PAD\] has id 4, config\.json says 0"),
        (load_masked_tokenizer, broken_settings, "tokenizer_config.json: not readable as JSON"),
    ],
)  # fmt: skip
def test_folders_that_do_not_fit_are_refused(
    small: Path, load: Callable[[Path], object], damage: Callable[[Path], None], words: str
) -> None:
    damage(small)
    with pytest.raises(UserError, match=words):
        load(small)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_loaded_model_does_not_change_with_file(small: Path, name: str) -> None:
    if name == "pytorch_model.bin":
        torch.save(load_file(small / "model.safetensors"), small / name)
        (small / "model.safetensors").unlink()
    model = load_language_model(small)[0]
    before = weights_fingerprint(model)
    with (small / name).open("r+b") as file:
        file.write(bytes((small / name).stat().st_size))
    assert weights_fingerprint(model) == before


def test_folder_or_repository(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_folder(str(small)) == small
    run = tmp_path / "run"
    (run / "language_model").mkdir(parents=True)
    assert resolve_folder(run) == run / "language_model"
    asked = []

    def snapshot_download(repository: str, allow_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_folder("microsoft/BiomedVLP-CXR-BERT-general") == tmp_path
    assert [("model*.safetensors" in found, "pytorch_model*.bin" in found) for _, found in asked] == [
        (True, False),
        (True, True),
    ]
    assert not any(name.endswith((".py", "*")) for _, patterns in asked for name in patterns)
