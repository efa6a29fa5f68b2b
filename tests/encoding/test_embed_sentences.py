"""Embeddings of a prepared set's sentences: those of the frozen encoder, once, under the model's name."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import BertConfig, BertModel

import medclip_dcl.encoding.embed_sentences
from data_prep.text.sentences import passages, split_sentences
from medclip_dcl.data.prepared import (
    PreparedSet,
    TextEmbedding,
    report_embedding,
    write_table,
)
from medclip_dcl.networks.bert_folder import (
    save_language_model,
    weights_fingerprint,
)
from medclip_dcl.networks.image_text import pad_tokens
from medclip_dcl.networks.language_model import load_language_model, load_masked_tokenizer
from medclip_dcl.networks.text_encoder import TransformersSentences
from tests.program import verb
from tests.text_models import write_text_model

main = verb("embed")

ROOT = Path(__file__).resolve().parents[2]
# A budget of which two of the set's sentences that have one length fill no batch.
SMALL_BATCHES = ("--batch_tokens", "14")


@pytest.fixture
def prepared(small_set: Path, tmp_path: Path) -> Path:
    """A set whose sentence table is not in order."""
    folder = Path(shutil.copytree(small_set, tmp_path / "set"))
    sentences = pd.read_parquet(folder / "sentences.parquet")
    write_table(sentences.sample(frac=1, random_state=1), folder / "sentences.parquet", "sentences")
    return folder


@pytest.fixture
def model(small_bert: Path, tmp_path: Path) -> Path:
    """A model whose random weights are large enough that sentences differ, and which a test may break."""
    network = load_language_model(small_bert)[0]
    for parameter in network.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.4)
    save_language_model(network, load_masked_tokenizer(small_bert), tmp_path / "small_bert")
    return tmp_path / "small_bert"


def embed(prepared: Path, model: Path, *options: str) -> Path:
    before = set((prepared / "text_embedding").glob("*"))
    main([str(prepared), "--model", str(model), "--device", "cpu", *options])
    (written,) = set((prepared / "text_embedding").glob("*")) - before
    return written


@torch.no_grad()
def one_by_one(model: Path, texts: list[str], pooling: str = "cls") -> np.ndarray:
    """Plain transformers, a sentence at a time."""
    network = BertModel.from_pretrained(model, add_pooling_layer=False).eval()
    tokenizer = load_masked_tokenizer(model)
    hidden = [network(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in texts]
    return np.stack([(h[0] if pooling == "cls" else h.mean(dim=0)).numpy() for h in hidden])


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_embeddings_are_the_frozen_encoders_sorted_by_id(prepared: Path, model: Path, pooling: str) -> None:
    file = embed(prepared, model, "--pooling", pooling)
    suffix = {"cls": "", "mean": "-mean"}[pooling]
    weights = weights_fingerprint(BertModel.from_pretrained(model, add_pooling_layer=False))
    assert file.name == f"small_bert-{weights[:8]}{suffix}.parquet"
    sentences = PreparedSet(prepared).table("sentences").sort_values("sentence_id")
    found = PreparedSet(prepared).text_embedding()
    assert found.sentence_id.tolist() == list(range(9))
    assert found.embedding.dtype == np.float32
    expected = one_by_one(model, sentences["text"].tolist(), pooling)
    np.testing.assert_allclose(found.embedding, expected, rtol=1e-4, atol=1e-5)
    assert pq.read_schema(file).field("embedding").type == pa.list_(pa.float32(), 32)


@pytest.mark.parametrize(
    ("family", "pooling", "suffix"),
    [
        *(("roberta", None, ""), ("roberta", "mean", "-mean"), ("modernbert", "last", "-last"), ("mpnet", "cls", "")),
        *(("deberta-v2", None, ""), ("clip", None, ""), ("clip", "mean", "-mean"), ("siglip", None, "")),
    ],
)  # fmt: skip
@torch.no_grad()
def test_every_family_and_pooling_is_embedded(
    family, pooling, suffix, prepared: Path, tmp_path: Path
) -> None:
    """Whatever trains as a text encoder; states before the projection, text by text."""
    model = write_text_model(family, tmp_path / family)
    file = embed(prepared, model, *(("--pooling", pooling) if pooling else ()))
    assert file.stem.startswith(f"{family}-") and file.stem.endswith(suffix)
    encoder = TransformersSentences(str(model), pooling=pooling, final_period=False).eval()
    texts = PreparedSet(prepared).table("sentences").sort_values("sentence_id")["text"]
    expected = [encoder.states(*pad_tokens(encoder.tokenize([text])))[0].numpy() for text in texts]
    found = PreparedSet(prepared).text_embedding(file.stem).embedding
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-4, atol=1e-5)


def openi_sentences(real_data: Path, count: int) -> list[str]:
    """Distinct sentences of real reports, in order."""
    with (real_data / "openi" / "openi_reports.csv").open(encoding="utf-8", newline="") as stream:
        findings = [row["findings"] for row in csv.DictReader(stream)]
    found = (
        text for finding in findings for passage in passages(finding) for text in split_sentences(passage)
    )
    return list(dict.fromkeys(text for text in islice(found, 3 * count)))[:count]


@pytest.mark.slow
def test_real_sentences_by_cxr_berts_own_folder(prepared: Path, real_data: Path, tmp_path: Path) -> None:
    """Its config.json and tokenizer files, and small random weights under the published key names."""
    folder = tmp_path / "BiomedVLP-CXR-BERT-specialized"
    shutil.copytree(real_data / "cxr_bert_tokenizer", folder)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    raw = {**json.loads((folder / "config.json").read_text()), **sizes}
    (folder / "config.json").write_text(json.dumps(raw))
    network = BertModel(BertConfig(**sizes, vocab_size=30522), add_pooling_layer=False)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    weights = {f"bert.{name}": value for name, value in network.state_dict().items()}
    weights["cls_projection_head.dense_to_hidden.weight"] = torch.ones(128, 12)
    torch.save(weights, folder / "pytorch_model.bin")
    texts = openi_sentences(real_data, 120)
    table = pd.DataFrame({"sentence_id": range(len(texts)), "text": texts, "n_reports": 1})
    write_table(table, prepared / "sentences.parquet", "sentences")
    together = embed(prepared, folder)
    found = PreparedSet(prepared).text_embedding(together.stem).embedding
    np.testing.assert_allclose(found, one_by_one(folder, texts), rtol=1e-4, atol=1e-5)
    together.unlink()
    embed(prepared, folder, "--batch_tokens", "1")
    alone = PreparedSet(prepared).text_embedding().embedding
    np.testing.assert_allclose(alone, found, rtol=1e-4, atol=1e-5)


def test_second_run_does_nothing(
    prepared: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = embed(prepared, model)
    before = file.stat().st_mtime_ns
    capsys.readouterr()
    monkeypatch.setattr(medclip_dcl.encoding.embed_sentences, "embed_batches", None)
    moved = shutil.copytree(model, model.parent / "elsewhere" / "small_bert")
    main([str(prepared), "--model", f"{moved}/", "--device", "cpu"])
    assert file.stat().st_mtime_ns == before
    said = capsys.readouterr().out
    assert said.endswith("holds the embeddings of all 9 sentences by this model: nothing to do\n")


def test_other_weights_get_their_own_file(prepared: Path, model: Path, tmp_path: Path) -> None:
    first = embed(prepared, model)
    network = load_language_model(model)[0]
    with torch.no_grad():
        network.cls.predictions.bias += 1
    save_language_model(network, load_masked_tokenizer(model), tmp_path / "head" / "small_bert")
    main([str(prepared), "--model", str(tmp_path / "head" / "small_bert"), "--device", "cpu"])
    assert list((prepared / "text_embedding").iterdir()) == [first]
    with torch.no_grad():
        network.bert.encoder.layer[1].output.dense.bias[0] += 1
    save_language_model(network, load_masked_tokenizer(model), tmp_path / "other" / "small_bert")
    second = embed(prepared, tmp_path / "other" / "small_bert")
    assert first.name != second.name
    embeddings = [PreparedSet(prepared).text_embedding(file.stem).embedding for file in (first, second)]
    assert (np.abs(embeddings[0] - embeddings[1]).max(axis=1) > 1e-3).all()


def test_other_texts_settings_or_ids_are_embedded_again(prepared: Path, model: Path) -> None:
    """The weights are the same, so that the file is, too; what it holds is not."""

    def again() -> TextEmbedding:
        main([str(prepared), "--model", str(model), "--device", "cpu"])
        return PreparedSet(prepared).text_embedding()

    before = again().embedding
    sentences = pd.read_parquet(prepared / "sentences.parquet")
    sentences.loc[sentences["sentence_id"] == 5, "text"] = "The lungs are not clear."
    write_table(sentences, prepared / "sentences.parquet", "sentences")
    after = again().embedding
    assert (np.abs(after - before).max(axis=1) > 1e-3).nonzero()[0].tolist() == [5]
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**raw, "hidden_act": "relu"}))
    assert (np.abs(again().embedding - after).max(axis=1) > 1e-4).all()
    sentences.loc[sentences["sentence_id"] == 8, "sentence_id"] = 80
    write_table(sentences, prepared / "sentences.parquet", "sentences")
    reports = pd.read_parquet(prepared / "reports.parquet").replace({"sentence_id": {8: 80}})
    write_table(reports, prepared / "reports.parquet", "reports")
    assert again().sentence_id.tolist() == [*range(8), 80]


class Stopped(Exception):
    """A run that ends in the middle."""


def stop_after(batches: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on embedding ends with an exception after so many batches; sizes of those that were embedded."""
    original = medclip_dcl.encoding.embed_sentences.embed_batches
    sizes: list[int] = []

    def some(*arguments) -> Iterator[np.ndarray]:
        for found in original(*arguments):
            if len(sizes) == batches:
                raise Stopped
            sizes.append(len(found))
            yield found

    monkeypatch.setattr(medclip_dcl.encoding.embed_sentences, "embed_batches", some)
    return sizes


def test_broken_run_continues_to_the_same_bytes(
    prepared: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = embed(prepared, model, *SMALL_BATCHES)
    whole = expected.read_bytes()
    expected.unlink()
    with monkeypatch.context() as patch:
        first = stop_after(3, patch)
        with pytest.raises(Stopped):
            embed(prepared, model, *SMALL_BATCHES)
        assert not expected.exists()
    with monkeypatch.context() as patch:
        second = stop_after(10**9, patch)
        main([str(prepared), "--model", str(model), "--device", "cpu", *SMALL_BATCHES])
    assert len(first) == 3 and sum(first) + sum(second) == 9
    assert expected.read_bytes() == whole
    assert f"continuing: {sum(first)} of 9 sentences were done before" in capsys.readouterr().out
    assert [path.name for path in (prepared / "text_embedding").iterdir()] == [expected.name]


def test_sentences_too_long_or_empty_are_embedded(
    prepared: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentences = pd.read_parquet(prepared / "sentences.parquet")
    for number, words in ((2, 126), (4, 300), (3, 0)):  # 126 and [CLS] and [SEP] just fit
        sentences.loc[sentences["sentence_id"] == number, "text"] = "no " * words
    write_table(sentences, prepared / "sentences.parquet", "sentences")
    embed(prepared, model)
    found = PreparedSet(prepared).text_embedding().embedding
    assert np.array_equal(found[2], found[4])
    np.testing.assert_allclose(found[3:4], one_by_one(model, [""]), rtol=1e-4, atol=1e-5)
    assert (
        "1 sentences were too long for the model: only their beginning was embedded"
        in capsys.readouterr().out
    )


def test_report_embedding_is_its_distinct_sentences_mean() -> None:
    sentences = TextEmbedding(np.array([2, 3, 7]), np.array([[1, 0], [0, 1], [5, 5]], dtype=np.float32))
    rows = [
        (30, "findings", 0, 2),
        (30, "impression", 1, 2),
        (30, "impression", 2, 3),
        (10, "findings", 0, 7),
    ]
    reports = pd.DataFrame(rows, columns=["study_id", "section", "position", "sentence_id"])
    studies, embedding = report_embedding(sentences, reports)
    assert studies.tolist() == [10, 30]
    assert embedding.tolist() == [[5, 5], [0.5, 0.5]] and embedding.dtype == np.float32
