"""Text encoders: equal to the library, exact, self-contained, refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.parts import differing_arguments, part_config
from medclip_dcl.networks import language_model
from medclip_dcl.networks.image_text import ImageTextNetwork, pad_tokens
from medclip_dcl.networks.initial_weights import take_over
from medclip_dcl.networks.pretrained_regions import TransformersRegions
from medclip_dcl.networks.similarity import GlobalCosine
from medclip_dcl.networks.text_encoder import (
    BertSentences,
    SentenceEncoder,
    TransformersSentences,
    with_final_period,
)
from tests.model_folders import edited, with_weights
from tests.small import SENTENCES, PatchRegions
from tests.text_models import FAMILIES, bpe, siglip_tokenizer, write_text_model

TEXTS = [
    "No pneumothorax",
    "There is a patchy opacity in the right lower lung, unchanged: 3.5 cm, na\u00efve.",
    "Mild pulmonary edema.",
]
CLASSES: dict[str, Any] = {"clip": T.CLIPTextModel, "siglip": T.SiglipTextModel}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("text_models")

    def folder(family: str) -> Path:
        there = root / family
        return there if there.is_dir() else write_text_model(family, there)

    return folder


def encoded(encoder: TransformersSentences, texts: list[str]) -> tuple[Tensor, Tensor]:
    return pad_tokens(encoder.tokenize(texts))


def by_the_library(family: str, folder: Path) -> Callable[[list[str]], dict[str, Tensor]]:
    """Pooled states of texts by the library's tokenizer and model, with its own padding."""
    tokenizer = T.AutoTokenizer.from_pretrained(folder)
    model = CLASSES.get(family, T.AutoModel).from_pretrained(folder).eval()
    padding = "max_length" if family == "siglip" else True
    names = ("input_ids",) if family == "siglip" else ("input_ids", "attention_mask")

    def pooled(texts: list[str]) -> dict[str, Tensor]:
        tokens = tokenizer(texts, padding=padding, truncation=True, max_length=40, return_tensors="pt")
        output = model(**{name: tokens[name] for name in names})
        pairs = zip(output.last_hidden_state, tokens["attention_mask"].bool(), strict=True)
        rows = [hidden[mask] for hidden, mask in pairs]
        return {
            "pooler": output.pooler_output if family in CLASSES else torch.empty(0),
            "cls": torch.stack([row[0] for row in rows]),
            "mean": torch.stack([row.mean(dim=0) for row in rows]),
            "last": torch.stack([row[-1] for row in rows]),
        }

    return pooled


UNUSED = {"bert": 0, "longformer": 12, "esm": 2, "luke": 18, "layoutlm": 2}


def of_family(family: str, small_bert: Path, **options: Any) -> TransformersSentences:
    """A small random model with a BERT's tokenizer."""
    tokenizer = BertSentences(str(small_bert)).tokenizer
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {
        "intermediate_size": 24,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 66,
    }
    config = T.AutoConfig.for_model(family, **sizes, pad_token_id=0, mask_token_id=4)
    architecture = {**config.to_diff_dict(), "model_type": family}
    described: dict[str, Any] = {
        "architecture": architecture,
        "tokenizer": tokenizer.to_str(),
        "pad_token_id": 0,
    }
    return TransformersSentences(**described, **{"dim": 5, **options})


@pytest.mark.parametrize("family", UNUSED)
def test_unused_parameters_alone_are_frozen(family: str, small_bert: Path) -> None:
    encoder = of_family(family, small_bert)
    encoder.projection.eval()
    tokens, lengths = encoded(encoder, TEXTS)
    modes, state = [x.training for x in encoder.modules()], torch.get_rng_state()
    frozen = encoder.freeze_unused()
    assert [x.training for x in encoder.modules()] == modes and torch.equal(torch.get_rng_state(), state)
    assert len(frozen) == UNUSED[family] and all(p.grad is None for p in encoder.parameters())
    encoder(tokens, lengths).square().sum().backward()
    assert frozen.keys() == {x for x, p in encoder.named_parameters() if not p.requires_grad}
    assert frozen.keys() == {x for x, p in encoder.named_parameters() if p.grad is None}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_states_equal_the_librarys(family, folder_of):
    library = by_the_library(family, folder_of(family))
    tokenizer = T.AutoTokenizer.from_pretrained(folder_of(family))
    encoder = TransformersSentences(str(folder_of(family)), dim=8, final_period=False).eval()
    ids = encoder.tokenize(TEXTS)
    assert ids == tokenizer(TEXTS, truncation=True, max_length=encoder.max_tokens)["input_ids"]
    expected, expected_alone = library(TEXTS), [library([text]) for text in TEXTS]
    for pooling in (encoder.pooling, "mean", "last"):
        encoder.pooling = pooling
        together = encoder.states(*pad_tokens(ids))
        assert torch.pdist(together).min() > 0.01
        torch.testing.assert_close(together, expected[pooling], rtol=1e-5, atol=1e-5)
        for place, row in enumerate(ids):
            alone = encoder.states(*pad_tokens([row]))
            torch.testing.assert_close(alone, together[place][None], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(alone, expected_alone[place][pooling], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["roberta", "mpnet"])
@torch.no_grad()
def test_a_models_own_pooler_is_used_where_it_has_weights(family, folder_of, tmp_path):
    T.AutoModel.from_pretrained(folder_of(family)).save_pretrained(tmp_path / family)
    T.AutoTokenizer.from_pretrained(folder_of(family)).save_pretrained(tmp_path / family)
    encoder = TransformersSentences(str(tmp_path / family), pooling="pooler", final_period=False).eval()
    tokens = T.AutoTokenizer.from_pretrained(tmp_path / family)(TEXTS, padding=True, return_tensors="pt")
    expected = T.AutoModel.from_pretrained(tmp_path / family).eval()(**tokens).pooler_output
    torch.testing.assert_close(encoder.states(*encoded(encoder, TEXTS)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["mpnet", "modernbert", "deberta-v2", "clip", "siglip"])
@torch.no_grad()
def test_a_description_rebuilds_without_the_folder(family, folder_of, tmp_path):
    folder = shutil.copytree(folder_of(family), tmp_path / family)
    first = TransformersSentences(str(folder), dim=8, max_tokens=40 if family == "siglip" else 20).eval()
    shutil.rmtree(folder)
    second = TransformersSentences(**json.loads(json.dumps(first.config()))).eval()
    assert second.config() == first.config()
    second.load_state_dict(first.state_dict())
    assert second.tokenize([*TEXTS, "</s> [SEP]"]) == first.tokenize([*TEXTS, "</s> [SEP]"])
    tokens, lengths = encoded(first, TEXTS)
    assert torch.equal(second(tokens, lengths), first(tokens, lengths))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_trains_all_and_reads_nothing(family, folder_of):
    """On the meta device every read on the host is an error."""
    encoder = TransformersSentences(str(folder_of(family)), dim=8)
    assert encoder.training
    tokens, lengths = encoded(encoder, TEXTS)
    encoder.to("meta")(tokens.to("meta"), lengths.to("meta")).square().sum().backward()
    assert all(p.grad is not None and p.requires_grad for p in encoder.parameters())


@pytest.mark.parametrize("family", ["modernbert", "deberta", "clip"])
@torch.no_grad()
def test_dropout_is_set_everywhere(family, folder_of):
    encoder = TransformersSentences(str(folder_of(family)), dim=8, dropout=0.5)
    tokens, lengths = encoded(encoder, TEXTS)
    assert not torch.equal(encoder(tokens, lengths), encoder(tokens, lengths))
    own = TransformersSentences(str(folder_of(family)), dim=8, dropout=0.0)
    torch.testing.assert_close(encoder.eval().states(tokens, lengths), own.states(tokens, lengths))
    assert own.transformer_settings() == encoder.transformer_settings()


def test_siglips_head_is_not_trained_where_unused(folder_of):
    encoder = TransformersSentences(str(folder_of("siglip")), dim=8, pooling="mean")
    encoder(*encoded(encoder, TEXTS)).square().sum().backward()
    without = {name for name, p in encoder.named_parameters() if p.grad is None}
    assert without == {name for name, p in encoder.named_parameters() if not p.requires_grad}
    assert without == {"model.head.weight", "model.head.bias"}


def test_clips_own_projection_gives_its_text_embeddings(folder_of):
    folder = folder_of("clip")
    encoder = TransformersSentences(str(folder), dim=12, projection="pretrained", final_period=False).eval()
    options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": 40, "return_tensors": "pt"}
    tokens = T.AutoTokenizer.from_pretrained(folder)(TEXTS, **options)
    with torch.no_grad():
        expected = T.CLIPModel.from_pretrained(folder).eval().get_text_features(**tokens).pooler_output
        torch.testing.assert_close(encoder(*encoded(encoder, TEXTS)), expected, rtol=1e-5, atol=1e-5)


def test_a_trained_encoder_can_be_taken_over(folder_of, tmp_path):
    def network(source: Path, **options: Any) -> ImageTextNetwork:
        return ImageTextNetwork(
            PatchRegions(8), TransformersSentences(str(source), dim=8, **options), GlobalCosine()
        )

    trained, mine = (network(folder_of("roberta"), dropout=x) for x in (0.3, None))
    trained.save_pretrained(tmp_path / "net")
    take_over(mine, tmp_path / "net")
    expected, found = trained.text_encoder.state_dict(), mine.text_encoder.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    other = changed(folder_of("roberta"), tmp_path / "other", hidden_act="relu")
    with pytest.raises(UserError, match=r"another model, with .*hidden_act: gelu \(configured: relu\)"):
        take_over(network(other), tmp_path / "net")
    with pytest.raises(UserError, match="another model, .*another tokenizer"):
        take_over(network(folder_of("deberta")), tmp_path / "net")
    sides = [part_config(mine.text_encoder), part_config(mine.text_encoder)]
    tokenizer = json.loads(sides[1]["init_args"]["tokenizer"])
    tokenizer["truncation"]["direction"] = "Left"
    sides[1]["init_args"]["tokenizer"] = json.dumps({**tokenizer, "padding": None})
    assert differing_arguments(*sides) == {"init_args.truncation_side": ("Right", "Left")}


@pytest.mark.parametrize("has_head", [False, True])
def test_random_weights_are_drawn_in_one_order(has_head, folder_of):
    """Only the projection's where the model is read; first the model's, then the projection's, where it is not."""
    torch.manual_seed(3)
    first = TransformersSentences(str(folder_of("bert")), dim=8, masked_language_head=has_head)
    torch.manual_seed(3)
    assert torch.equal(torch.nn.Linear(16, 8).weight, first.state_dict()["projection.weight"])
    torch.manual_seed(5)
    found = TransformersSentences(**first.config())
    torch.manual_seed(5)
    kind, options = (T.BertForMaskedLM, {}) if has_head else (T.BertModel, {"add_pooling_layer": False})
    expected = kind(first.model.config, **options)
    for one, other in zip(found.transformer.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(torch.nn.Linear(16, 8).weight, found.state_dict()["projection.weight"])


def test_rounded_vocabularies_and_short_sentences_are_taken(folder_of, tmp_path):
    folder = changed(folder_of("bert"), tmp_path / "bert", vocab_size=6400)
    splitter = Tokenizer.from_file(str(folder / "tokenizer.json"))
    splitter.add_tokens([f"more{i}" for i in range(6270 - splitter.get_vocab_size())])
    splitter.save(str(folder / "tokenizer.json"))
    words = {"bert.embeddings.word_embeddings.weight": torch.rand(6400, 16)}
    with_weights(folder, lambda state: state.update(words))
    assert TransformersSentences(str(folder), max_tokens=3).max_tokens == 3


@pytest.mark.parametrize("family", ["distilbert", "mpnet"])
def test_a_cased_tokenizer_stays_cased(family, folder_of, tmp_path):
    """transformers' classes take the vocabulary of tokenizer.json, but not its treatment of case."""
    folder = changed(folder_of(family), tmp_path / family)
    (folder / "tokenizer_config.json").unlink()
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"lowercase": true', '"lowercase": false'))
    encoder = TransformersSentences(str(folder))
    tokens = encoder.tokenizer.encode("edema EDEMA").tokens
    assert tokens[1] == "edema" and tokens[2] == "[UNK]"


@torch.no_grad()
def test_deberta_computes_under_autocast(folder_of):
    encoder = TransformersSentences(str(folder_of("deberta")), dim=8).eval()
    tokens, lengths = encoded(encoder, TEXTS)
    with torch.autocast("cpu", torch.bfloat16):
        found = encoder.states(tokens, lengths)
    torch.testing.assert_close(found, encoder.states(tokens, lengths))


def changed(source: Path, folder: Path, **settings: Any) -> Path:
    edited(shutil.copytree(source, folder), **settings)
    return folder


def without(name: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for file in folder.glob(name):
            file.unlink()

    return remove


def without_a_norm(folder: Path) -> None:
    with_weights(folder, lambda state: state.pop("roberta.embeddings.LayerNorm.weight"))


def of_t5(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "t5"}')


def of_vit(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "vit"}')


def of_fnet(folder: Path) -> None:
    """It mixes all places, padding included, and knows no mask."""
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "intermediate_size": 24,
        "max_position_embeddings": 40,
    }
    vocabulary = T.AutoTokenizer.from_pretrained(folder)
    T.FNetModel(T.FNetConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)


CODE = {"AutoConfig": "conf.NomicConfig", "AutoModel": "some/where--modeling_nomic.NomicModel"}


@pytest.mark.parametrize(
    ("family", "change", "options", "words"),
    [
        ("roberta", {}, {"max_tokens": 39}, r"max_tokens: expected a number in \[3, 38\] for this .*, found 39"),
        ("clip", {}, {"max_tokens": 77}, r"max_tokens: expected a number in \[3, 40\] for this .*, found 77"),
        ("siglip", {}, {"max_tokens": 20}, r"max_tokens: expected a number in \[40, 40\] for this .*, found 20"),
        ("distilbert", {}, {"pooling": "pooler"}, "pooling: expected one of cls, mean, last, found 'pooler'"),
        ("clip", {}, {"pooling": "cls"}, "pooling: expected mean or last for a causal model, .* found cls"),
        ("bert", {}, {"projection": "pretrained"}, "projection: expected linear for a bert with pooling cls"),
        ("siglip", {}, {"projection": "pretrained"}, "dim: expected 14, the size of the pretrained .*, found 8"),
        ("roberta", {}, {"masked_language_head": True}, "masked_language_head: expected false for a roberta"),
        ("bert", {}, {"masked_language_head": True, "pooling": "pooler"}, "pooling: expected one of cls, mean, last, "),
        ("bert", {"position_embedding_type": "relative_key"}, {}, "expected 'absolute', found 'relative_key'"),
        ("bert", {"num_attention_heads": None}, {}, "config.json: .*num_attention_heads"),
        ("roberta", {}, {"dropout": 1.5}, r"dropout: expected a number in \[0, 1\), found 1.5"),
        ("roberta", {"num_hidden_layers": 1}, {}, r"unexpected \['roberta.encoder.layer.1.*give the folder of a rob"),
        ("roberta", {"hidden_size": 20}, {}, "of another shape"),
        ("roberta", {"vocab_size": 64}, {}, "tokenizer does not fit the weights: .* but 64 embedding rows"),
        ("roberta", without_a_norm, {}, r"missing \['embeddings.LayerNorm.weight'\]"),
        ("roberta", {}, {"pooling": "pooler"}, "missing .*pooler.*set what is missing otherwise .pooling"),
        ("modernbert", without("token*"), {}, "no tokenizer: none of tokenizer.json, vocab.txt"),
        ("roberta", {"model_type": "nomic", "auto_map": CODE}, {}, "'nomic' with code .*conf.py, modeling_nomic.py"),
        ("roberta", {"is_decoder": True}, {}, "pooling: expected mean or last for a causal model, .* found cls"),
        ("roberta", of_vit, {}, "model_type: expected an encoder of transformers .*, found 'vit'; give"),
        ("bert", of_fnet, {}, "fnet cannot encode|padding does not change, found a fnet"),
        ("roberta", of_t5, {}, "model_type: expected an encoder of transformers .*, found 't5'; give"),
        ("roberta", {"layer_norm_eps": "small"}, {}, "config.json: .*layer_norm_eps"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(
    family: str,
    change: dict[str, Any] | Callable[[Path], None],
    options: dict[str, Any],
    words: str,
    folder_of: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = changed(folder_of(family), tmp_path / family, **(change if isinstance(change, dict) else {}))
    if not isinstance(change, dict):
        change(folder)
    with pytest.raises(UserError, match=words) as error:
        TransformersSentences(str(folder), **{"dim": 8, **options})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_no_folder_names_code_to_run(name, folder_of, tmp_path):
    """transformers would download a kernel of that name, and run it."""
    kernel: dict[str, Any] = {name: "somebody/kernel"}
    text = json.loads((folder_of("clip") / "config.json").read_text())["text_config"]
    folders = [
        changed(folder_of("bert"), tmp_path / "bert", **kernel),
        changed(folder_of("roberta"), tmp_path / "roberta", **kernel),
        changed(folder_of("clip"), tmp_path / "clip", **kernel, text_config={**text, **kernel}),
    ]
    for folder in folders:
        encoder = TransformersSentences(str(folder))
        described = encoder.config()
        described["architecture"] |= kernel
        for built in (encoder, TransformersSentences(**described)):
            assert built.model.config._attn_implementation == "sdpa_without_host_reads"
    vision = json.loads((folder_of("clip") / "config.json").read_text())["vision_config"]
    image = TransformersRegions(architecture={**vision, **kernel})
    assert image.backbone.config._attn_implementation == "sdpa"


def test_a_sentencepiece_file_names_its_extra(folder_of, tmp_path, monkeypatch):
    folder = changed(folder_of("siglip"), tmp_path / "siglip")
    without("token*")(folder)
    (folder / "spiece.model").write_bytes(b"pieces")

    def from_pretrained(*arguments: Any, **options: Any) -> None:
        raise ImportError("SentencePieceExtractor requires the SentencePiece library\nbut it was not found")

    monkeypatch.setattr(T.AutoTokenizer, "from_pretrained", from_pretrained)
    monkeypatch.setattr(language_model, "is_sentencepiece_available", lambda: False)
    with pytest.raises(
        UserError, match=r"it needs the package sentencepiece, and protobuf: pip .*\[models\]"
    ):
        TransformersSentences(str(folder))


def test_siglips_sentencepiece_splits_as_the_library(folder_of, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = changed(folder_of("siglip"), tmp_path / "siglip")
    without("token*")(folder)
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(folder / "spiece"),
        vocab_size=64,
        minloglevel=2,
        **ids,
    )
    own = T.SiglipTokenizer(str(folder / "spiece.model"))
    own.save_pretrained(folder)
    encoder = TransformersSentences(str(folder), final_period=False)
    texts = [
        *SENTENCES,
        "",
        "  No\t EDEMA!  (mild)",
        "\u2581a \u2581",
        "na\u00efve \ufb01ne \u00bd",
        "</s> <unk>",
        "...",
    ]
    expected = own(texts, split_special_tokens=True)["input_ids"]
    assert encoder.tokenize(texts) == expected and len({len(row) for row in expected}) > 3
    rebuilt = TransformersSentences(**encoder.config())
    assert rebuilt.tokenize(texts) == expected


def test_an_own_attention_that_asks_by_name_is_eager(small_bert):
    """As LayoutLM's of transformers 5.17; the model's attention weights are those of its file's function."""
    model = T.AutoModel.from_pretrained(small_bert).eval()
    outputs = []
    for name in ("eager", "eager_without_host_reads"):
        model.config._attn_implementation = name
        mask = torch.tensor([[1, 1, 1, 0]])
        outputs.append(model(torch.tensor([[2, 7, 3, 0]]), mask, output_attentions=True))
    assert torch.equal(outputs[0].last_hidden_state, outputs[1].last_hidden_state)
    assert torch.equal(outputs[0].attentions[0], outputs[1].attentions[0])


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
    for row, pooled in enumerate(encoder.model(tokens, attention_mask=mask).last_hidden_state[:, 0]):
        hidden = weights["dense_to_hidden.weight"] @ pooled + weights["dense_to_hidden.bias"]
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
        hidden = (hidden - hidden.mean()) / (hidden.var(unbiased=False) + 1e-12).sqrt()
        hidden = hidden * weights["LayerNorm.weight"] + weights["LayerNorm.bias"]
        expected = weights["dense_to_output.weight"] @ hidden + weights["dense_to_output.bias"]
        torch.testing.assert_close(encoder(tokens, lengths)[row], expected, rtol=1e-4, atol=1e-5)
