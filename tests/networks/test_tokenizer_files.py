"""Folders whose tokenizer.json and tokenizer_config.json state two tokenizers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers as T

from medclip_dcl.networks.bert_folder import ModelFolderError
from medclip_dcl.networks.language_model import load_language_model
from medclip_dcl.networks.text_encoder import BertSentences, TransformersSentences
from tests.dual_encoders import TEXTS, write_dual_encoder
from tests.model_folders import edited
from tests.program import verb
from tests.text_models import write_text_model

convert = verb("convert")

Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def source_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, written = tmp_path_factory.mktemp("sources"), dict[str, Path]()

    def source(family: str) -> Path:
        if family not in written:
            written[family] = write_text_model(family, root / family)
        return written[family]

    return source


def settings(**changes: Any) -> Change:
    return lambda folder: edited(folder, "tokenizer_config.json", **changes)


def tokenizer(old: str, new: str) -> Change:
    def change(folder: Path) -> None:
        file = folder / "tokenizer.json"
        assert old in (text := file.read_text())
        file.write_text(text.replace(old, new))

    return change


def encoder(family: str, folder: Path) -> BertSentences | TransformersSentences:
    kind = BertSentences if family == "bert" else TransformersSentences
    return kind(str(folder), dim=8, max_tokens=40 if family == "siglip" else 20, pooling="mean")


LOWER, CASED = '"lowercase": true', '"lowercase": false'


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("bert", settings(do_lower_case=False), "lowercase true in tokenizer.json .*false in BertTokenizer of t"),
        ("bert", settings(strip_accents=False), "normalizer.strip_accents null in .*strip_accents false in"),
        ("bert", settings(tokenize_chinese_chars=False), "handle_chinese_chars true in"),
        ("bert", tokenizer(LOWER, CASED), "lowercase false in tokenizer.json .*lowercase true in BertTokenizer"),
        ("distilbert", settings(do_lower_case=False), "lowercase true in tokenizer.json"),
        ("mpnet", tokenizer(LOWER, CASED), "lowercase false in tokenizer.json .* in MPNetTokenizer"),
        ("roberta", settings(add_prefix_space=True), "pre_tokenizer.add_prefix_space false in tokenizer.json"),
        ("deberta-v2", settings(do_lower_case=True), "normalizer.* in .*Lowercase"),
        ("gpt2", settings(add_prefix_space=True), "add_prefix_space true in GPT2Tokenizer"),
        ("siglip", settings(tokenizer_class="Siglip2Tokenizer"), "Replace.* in Siglip2Tokenizer"),
        ("clip", tokenizer('"Lowercase"', '"NFKC"'), "NFKC.* in tokenizer.json and .*Lowercase.* in CLIPTokenizer"),
    ],
)  # fmt: skip
def test_two_tokenizers_are_refused_by_their_settings(family, change, words, source_of, tmp_path) -> None:
    folder = shutil.copytree(source_of(family), tmp_path / family)
    change(folder)
    loaders: list[Callable[[], Any]] = [lambda: encoder(family, folder)] * (family != "gpt2")
    loaders += [lambda: load_language_model(folder)] * (family not in ("clip", "siglip"))
    for load_folder in loaders:
        with pytest.raises(
            ModelFolderError, match=f"expected files that state one tokenizer, .*{words}"
        ) as error:
            load_folder()
        assert "\n" not in str(error.value)
    # Either remedy.
    plain = shutil.copytree(folder, tmp_path / "plain")
    settings(tokenizer_class=None)(plain)
    if family not in ("gpt2", "siglip"):
        encoder(family, plain)
    if family != "siglip":  # whose pieces are not of that class
        T.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
        for load_folder in loaders:
            load_folder()


def test_the_files_that_name_a_class_are_named(source_of, tmp_path) -> None:
    folder = shutil.copytree(source_of("bert"), tmp_path / "bert")
    settings(tokenizer_class=None, do_lower_case=False)(folder)
    edited(folder, tokenizer_class="BertTokenizer")
    with pytest.raises(ModelFolderError, match=r"in BertTokenizer of config.json; .* out of config.json$"):
        encoder("bert", folder)
    settings(tokenizer_class="BertTokenizer")(folder)
    with pytest.raises(ModelFolderError, match="out of config.json and tokenizer_config.json$"):
        encoder("bert", folder)


def test_a_class_that_lacks_a_package_has_a_remedy(source_of, tmp_path) -> None:
    folder = shutil.copytree(source_of("roberta"), tmp_path / "roberta")
    settings(tokenizer_class="BertJapaneseTokenizer")(folder)
    with pytest.raises(
        ModelFolderError, match="or take tokenizer_class out of tokenizer_config.json to read"
    ):
        encoder("roberta", folder)
    settings(tokenizer_class=None)(folder)
    encoder("roberta", folder)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "change",
    [
        settings(),
        settings(tokenizer_class=None, do_lower_case=False),
        settings(auto_map=["tokenization.OwnTokenizer", None], do_lower_case=False),
        settings(auto_map={"AutoTokenizer": ["x.Own", None]}, do_lower_case=False),
        settings(tokenizer_class="TokenizerOfNobody", do_lower_case=False),
        settings(tokenizer_class="BertTokenizerFast"),
    ],
)
def test_one_statement_is_read_in_silence(change: Change, source_of, tmp_path) -> None:
    folder = shutil.copytree(source_of("bert"), tmp_path / "bert")
    change(folder)
    texts = ["No EDEMA."]
    assert encoder("bert", folder).tokenize(texts) == encoder("bert", source_of("bert")).tokenize(texts)


@pytest.mark.parametrize(("family", "name"), [("bert", "BertJapaneseTokenizer"), ("mpnet", "ByT5Tokenizer")])
def test_a_class_that_cannot_be_tried_is_said(family, name, source_of, tmp_path) -> None:
    folder = shutil.copytree(source_of(family), tmp_path / family)
    settings(tokenizer_class=name)(folder)
    with pytest.warns(UserWarning, match=f"files are read without {name}, which .*: compare some texts"):
        encoder(family, folder)


def test_a_whole_model_is_split_as_its_library(tmp_path, capsys) -> None:
    folder = write_dual_encoder("clip", tmp_path / "source")
    tokenizer('"Lowercase"', '"NFKC"')(folder)
    convert([str(folder), "--output", str(tmp_path / "output")])
    said = capsys.readouterr().out
    assert "texts are split as by transformers' CLIPTokenizer, with normalizer" in said
    assert "split as by" in (tmp_path / "output/README.md").read_text()
    described = json.loads((tmp_path / "output/config.json").read_text())["text_encoder"]
    texts = [*TEXTS, "EDEMA  \u00e9"]
    own = T.AutoTokenizer.from_pretrained(folder)(texts)["input_ids"]
    assert TransformersSentences(**described["init_args"]).tokenize(texts) == own
