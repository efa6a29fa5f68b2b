"""The text encoder for transformers gives the network's own embeddings."""

from __future__ import annotations

import os
import re
import shutil

import pytest
import torch
from transformers import AutoTokenizer, BertModel

from medclip_dcl.common.errors import UserError
from medclip_dcl.exchange.encoders import export_text_encoder
from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import GlobalCosine
from medclip_dcl.networks.text_encoder import BertSentences, SentenceEncoder, TransformersSentences
from tests.program import shell
from tests.text_models import write_text_model

main = shell("export")

TEXTS = ["No pneumothorax.", "There is a patchy opacity in the right lower lung.", "Edema."]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("bert", {"pooling": "mean"}),
        ("bert", {"projection": "mlp"}),
        ("roberta", {"pooling": "last"}),
        ("modernbert", {"pooling": "mean", "projection": "gelu"}),
        ("clip", {"dim": 12, "projection": "pretrained"}),
        ("siglip", {"dim": 14, "projection": "pretrained"}),
        ("siglip", {"pooling": "mean"}),
    ],
)
def test_readme_of_any_text_encoder_computes_its_embeddings(family, options, tmp_path, monkeypatch):
    source, folder = write_text_model(family, tmp_path / "source"), tmp_path / "text"
    encoder = TransformersSentences(str(source), **{"dim": 5, **options}).eval()
    images = ResNetRegions(dim=encoder.dim, stride=16, width=8)
    network = ImageTextNetwork(images, encoder, GlobalCosine(), 48).eval()
    shutil.rmtree(source)
    export_text_encoder(network, folder)
    (block,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    found: dict = {}
    monkeypatch.chdir(folder)
    exec(compile(re.sub(r"texts = .*", f"texts = {TEXTS!r}", block), "README.md", "exec"), found)
    torch.testing.assert_close(found["embeddings"], network.embed_texts(TEXTS), rtol=1e-5, atol=1e-5)
    again = TransformersSentences(str(folder), dim=5, pooling=options.get("pooling")).eval()
    assert again.tokenize(TEXTS) == encoder.tokenize(TEXTS)
    tokens, lengths = network.tokenize(TEXTS)
    assert torch.equal(again.states(tokens, lengths), encoder.states(tokens, lengths))


def test_transformers_loads_the_text_encoder(network, tmp_path):
    folder = tmp_path / "bert"
    for _ in range(2):  # the second replaces the first
        export_text_encoder(network, folder)
    assert os.listdir(tmp_path) == ["bert"]
    own, encoder = network.text_encoder.model.state_dict(), network.text_encoder
    theirs, info = BertModel.from_pretrained(folder, add_pooling_layer=False, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    state = theirs.state_dict()
    assert state.keys() == own.keys() and all(torch.equal(state[name], own[name]) for name in own)
    texts = [*TEXTS, " ".join(TEXTS * 9)]  # the last is cut
    found = AutoTokenizer.from_pretrained(folder)(texts, truncation=True)["input_ids"]
    assert found == encoder.tokenize(texts)
    again = BertSentences(str(folder), dim=5, max_tokens=40, pooling="mean")
    assert again.tokenize(["no dot"]) == encoder.tokenize(["no dot"])


class OwnSentences(SentenceEncoder):
    def __init__(self, dim: int = 5) -> None:
        super().__init__()
        self.dim = dim


def test_what_has_no_plain_form_is_refused(network, tmp_path):
    own = ImageTextNetwork(network.image_encoder, OwnSentences(), network.similarity)
    with pytest.raises(UserError, match="--text_encoder: expected an encoder of transformers, found a OwnS"):
        export_text_encoder(own, tmp_path / "bert")


def test_other_files_are_left_alone(network, run, tmp_path, capsys):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/config.json").write_text("precious")
    export_text_encoder(network, tmp_path / "bert")
    (tmp_path / "bert/notes.txt").write_text("precious")
    for folder, message in (
        ("out", "another folder"),
        ("thesis", "another folder"),
        ("bert", "holds notes.txt"),
    ):
        with pytest.raises(SystemExit):
            main([str(run), "--output", str(tmp_path / "out"), "--text_encoder", str(tmp_path / folder)])
        assert message in capsys.readouterr().err
    assert (tmp_path / "thesis/config.json").exists() and (tmp_path / "out/model.safetensors").exists()
