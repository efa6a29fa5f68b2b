"""ONNX files of both encoders equal torch at any batch size and token length."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from medclip_dcl.exchange.onnx_files import IMAGE_FILE, TEXT_FILE, TOKENIZER_FILE, export_onnx
from medclip_dcl.networks import GlobalCosine, ImageTextNetwork, TransformersRegions
from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.text_encoder import TransformersSentences
from tests.program import shell
from tests.text_models import write_text_model

main = shell("export")

onnxruntime = pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def folder(network, tmp_path_factory):
    folder = tmp_path_factory.mktemp("onnx") / "exported"
    export_onnx(network, folder)
    return folder


def session(file):
    return onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])


@torch.no_grad()
@pytest.mark.slow
def test_images(network, folder):
    model = session(folder / IMAGE_FILE)
    for size in (1, 3, 7):
        images = torch.rand(size, 3, 48, 48)
        (found,) = model.run(["feature_map"], {"images": images.numpy()})
        expected = network.feature_map(images).numpy()
        assert found.shape == (size, 5, 3, 3) and np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.slow
def test_sentences(network, folder):
    model = session(folder / TEXT_FILE)
    for lengths in ([5], [2, 40, 11], [3, 9, 4, 17, 17, 2, 6]):
        counts = torch.tensor(lengths)
        tokens = torch.randint(5, 60, (len(lengths), max(lengths)))
        mask = torch.arange(max(lengths)) < counts[:, None]
        tokens = tokens * mask
        inputs = {"input_ids": tokens.numpy(), "attention_mask": mask.long().numpy()}
        (found,) = model.run(["sentence_embedding"], inputs)
        expected = network.encode_sentences(tokens, counts).numpy()
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_the_tokenizer_beside_them_serves_the_text_encoder(network, folder):
    texts = ["No pneumothorax.", "Small left pleural effusion."]
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(texts)
    inputs = {
        "input_ids": np.array([one.ids for one in encoded]),
        "attention_mask": np.array([one.attention_mask for one in encoded]),
    }
    (found,) = session(folder / TEXT_FILE).run(None, inputs)
    np.testing.assert_allclose(found, network.embed_texts(texts).numpy(), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["roberta", "modernbert", "deberta-v2", "clip", "siglip"])
def test_any_text_encoder(family, tmp_path):
    pooling: Any = "last" if family == "roberta" else None
    source = write_text_model(family, tmp_path / "source")
    encoder = TransformersSentences(str(source), dim=5, pooling=pooling)
    network = ImageTextNetwork(ResNetRegions(dim=5, stride=16, width=8), encoder, GlobalCosine(), 48).eval()
    export_onnx(network, tmp_path)
    model = session(tmp_path / TEXT_FILE)
    texts = ["No pneumothorax.", "Edema.", "Small left pleural effusion.", "The lungs are clear."]
    for some in (texts, texts[1:2], texts[2:]):
        tokens, lengths = network.tokenize(some)
        mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
        (found,) = model.run(None, {"input_ids": tokens.numpy(), "attention_mask": mask.numpy()})
        np.testing.assert_allclose(found, network.embed_texts(some).numpy(), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_the_files_describe_themselves_without_local_paths(folder):
    described = session(folder / IMAGE_FILE).get_modelmeta()
    settings = {name: json.loads(text) for name, text in described.custom_metadata_map.items()}
    assert settings == {"image_size": 48, "geometry": "stretch", "prepared_size": None, "stride": 16}
    assert "grey levels / 255" in described.description
    settings = session(folder / TEXT_FILE).get_modelmeta().custom_metadata_map
    assert settings == {"max_tokens": "40", "final_period": "true", "tokenizer": '"tokenizer.json"'}
    for name in (IMAGE_FILE, TEXT_FILE):
        assert b".py" not in (folder / name).read_bytes()


def test_a_missing_extra_is_one_line(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(SystemExit) as stopped:
        main([str(run), "--output", str(tmp_path / "out"), "--onnx"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    line = "--onnx needs the package onnxruntime: pip install 'medclip_dcl[onnx]'"
    assert error == f"medclip-dcl export: error: {line}\n"


@pytest.mark.slow
@torch.no_grad()
def test_a_global_vector_is_an_output(network, tmp_path):
    architecture = {"model_type": "siglip_vision_model", "hidden_size": 12, "num_hidden_layers": 1}
    architecture |= {"num_attention_heads": 2, "intermediate_size": 10, "image_size": 24, "patch_size": 8}
    torch.manual_seed(0)
    encoder = TransformersRegions(dim=5, architecture=architecture, global_vector=True)
    own = ImageTextNetwork(encoder, network.text_encoder, GlobalCosine(), image_size=32).eval()
    export_onnx(own, tmp_path)
    images = torch.rand(3, 3, 32, 32)
    found = session(tmp_path / IMAGE_FILE).run(["feature_map", "global_vector"], {"images": images.numpy()})
    for one, expected in zip(found, own.encode(images), strict=True):
        assert expected is not None
        np.testing.assert_allclose(one, expected.numpy(), rtol=0, atol=1e-4)
