"""Scores by other families than BERT: equal to one forward of transformers' own model and tokenizer per token."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from medclip_dcl.common.errors import UserError
from medclip_dcl.networks.language_model import load_language_model
from medclip_dcl.networks.library_folder import longest_sentence
from medclip_dcl.scoring import pseudo_log_likelihood, scoring_plan
from medclip_dcl.scoring.whole_model import WholeModel
from tests.scoring.families import CAUSAL, MASKED, TEXTS, write
from tests.text_models import SIZES

SLOW = ("mpnet", "deberta", "distilbert", "electra")
"""Families that compute like another of the quick tests."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: write(family, root / family) for family in (*MASKED, *CAUSAL)}


class Definition:
    """One forward per token with all logits and an attention mask, in double precision, by transformers alone."""

    def __init__(self, folder: Path, kind: Any = AutoModelForMaskedLM) -> None:
        # transformers 5.17 ties a weight that this head lacks.
        untied = {"tie_word_embeddings": False} if folder.name == "deberta-v2" else {}
        self.model = kind.from_pretrained(folder, **untied).eval().double()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def encoded(self, text: str) -> tuple[torch.Tensor, list[int], list[int | None]]:
        """Ids with special tokens, the places of the others, and words; special tokens in a text are text."""
        encoding = self.tokenizer(text, split_special_tokens=True, return_special_tokens_mask=True)
        places = np.flatnonzero(np.array(encoding["special_tokens_mask"]) == 0).tolist()
        return torch.tensor(encoding["input_ids"]), places, encoding.word_ids()

    @torch.no_grad()
    def values(self, text: str, is_word_wise: bool = False) -> list[float]:
        """log P of each token of a masked language model."""
        ids, places, words = self.encoded(text)
        found = []
        for place in places:
            masked = ids.clone()
            masked[place] = self.tokenizer.mask_token_id
            for later in range(place + 1, len(ids) if is_word_wise else 0):
                if words[later] == words[place]:
                    masked[later] = self.tokenizer.mask_token_id
            output = self.model(input_ids=masked[None], attention_mask=torch.ones(1, len(ids)))
            found.append(output.logits[0, place].log_softmax(0)[ids[place]].item())
        return found


def sums(values: list[list[float]]) -> list[float]:
    return [math.fsum(some) if some else math.nan for some in values]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MASKED]
)
def test_equals_one_forward_per_token(folders: dict[str, Path], family: str) -> None:
    model, tokenizer = load_language_model(folders[family])
    assert model.training and model.dtype == torch.float32
    definition = Definition(folders[family])
    expected = [definition.values(text) for text in TEXTS]
    found = pseudo_log_likelihood(model, tokenizer, TEXTS, token_budget=90)
    assert found["n_tokens"].tolist() == [len(values) for values in expected]
    assert found["log_p"].tolist() == pytest.approx(sums(expected), rel=1e-5, nan_ok=True)
    assert found["log_p"][1] == found["log_p"][5] and found["log_p"].nunique() == len(TEXTS) - 2
    word_wise = pseudo_log_likelihood(model, tokenizer, TEXTS, token_budget=90, within_word_l2r=True)["log_p"]
    for number in (2, 7):  # with words of several tokens
        (expected_sum,) = sums([definition.values(TEXTS[number], is_word_wise=True)])
        assert word_wise[number] == pytest.approx(expected_sum, rel=1e-5)
        assert abs(word_wise[number] - found["log_p"][number]) > 1e-3
    assert model.training and WholeModel(model.eval(), tokenizer.mask_token_id).has_head_at_rows


@torch.no_grad()
def test_causal_model_scores_by_its_own_loss(folders: dict[str, Path]) -> None:
    """The mean of transformers' own loss over the tokens, the first after <|endoftext|>."""
    model, tokenizer = load_language_model(folders["gpt2"])
    definition = Definition(folders["gpt2"], AutoModelForCausalLM)
    expected = []
    for text in TEXTS:
        ids, places, _ = definition.encoded(text)
        row = torch.cat([torch.tensor([definition.tokenizer.bos_token_id]), ids.long()])[None]
        loss = definition.model(input_ids=row, labels=row).loss
        expected.append(-len(places) * loss.item() if places else math.nan)
    found = pseudo_log_likelihood(model, tokenizer, TEXTS, token_budget=90)
    assert found["log_p"].tolist() == pytest.approx(expected, rel=1e-5, nan_ok=True)
    plan = scoring_plan(model, tokenizer, TEXTS, token_budget=90)
    assert sum(batch.stop - batch.start for batch in plan.batches) == plan.n_distinct - 1, "each once"
    with pytest.raises(UserError, match="expected a masked language model, found a causal one"):
        pseudo_log_likelihood(model, tokenizer, TEXTS, within_word_l2r=True)


def test_causal_model_without_bos_begins_after_eos(folders: dict[str, Path]) -> None:
    model, tokenizer = load_language_model(folders["gpt2"])
    expected = pseudo_log_likelihood(model, tokenizer, ["heart"])["log_p"]
    tokenizer.bos_token = None
    assert pseudo_log_likelihood(model, tokenizer, ["heart"])["log_p"].equals(expected)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="expected a bos_token or an eos_token"):
        pseudo_log_likelihood(model, tokenizer, ["heart"])


def test_causal_model_begins_as_its_tokenizer_does(folders: dict[str, Path]) -> None:
    """The one special token that it puts first, before bos and eos."""
    model, tokenizer = load_language_model(folders["gpt2"])
    first = tokenizer.convert_tokens_to_ids("a")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="a $A <|endoftext|>", special_tokens=[("a", first), ("<|endoftext|>", tokenizer.eos_token_id)]
    )
    assert scoring_plan(model, tokenizer, ["heart"]).before == [first] != [tokenizer.bos_token_id]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", tokenizer.eos_token_id)]
    )
    assert scoring_plan(model, tokenizer, ["heart"]).before == [tokenizer.bos_token_id]


SMALL: dict[str, Any] = {**SIZES, "vocab_size": 700}
GEMMA = {**SMALL, "head_dim": 8, "num_key_value_heads": 1}
XLM = {"vocab_size": 700, "emb_dim": 16, "n_layers": 2, "n_heads": 2, "mask_token_id": 4}


@pytest.mark.parametrize(
    ("kind", "config", "words"),
    [
        ("RobertaForCausalLM", transformers.RobertaConfig(**SMALL), "a RobertaForCausalLM whose early words see the"),
        ("RobertaForCausalLM", transformers.RobertaConfig(**SMALL, is_decoder=True), ""),
        ("RobertaForMaskedLM", transformers.RobertaConfig(**SMALL), ""),
        ("RobertaForMaskedLM", transformers.RobertaConfig(**SMALL, is_decoder=True), "early words do not see the last"),
        ("BertForMaskedLM", transformers.BertConfig(**SMALL, is_decoder=True), "early words do not see the last"),
        ("Gemma3ForCausalLM", transformers.Gemma3TextConfig(**GEMMA), ""),
        ("Gemma3ForCausalLM", transformers.Gemma3TextConfig(**GEMMA, use_bidirectional_attention=True), "causal"),
        ("XLMWithLMHeadModel", transformers.XLMConfig(**XLM), ""),
        ("XLMWithLMHeadModel", transformers.XLMConfig(**XLM, causal=True), "expected a masked .* found a XLMWithLMH"),
        ("XLNetLMHeadModel", transformers.XLNetConfig(vocab_size=700, d_model=16, n_layer=1, n_head=2), "a xlnet is"),
        ("NystromformerForMaskedLM", transformers.NystromformerConfig(**SMALL), "a nystromformer takes sentences of"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*slow way")
def test_order_of_words_is_tried(folders: dict[str, Path], kind: str, config: Any, words: str) -> None:
    """Weights of the libraries' own beginning, by which words hardly see each other."""
    torch.manual_seed(0)
    model, (_, tokenizer) = getattr(transformers, kind)(config), load_language_model(folders["roberta"])
    for dtype in (None, torch.bfloat16):
        if not words:
            assert pseudo_log_likelihood(model, tokenizer, TEXTS[:2], dtype=dtype)["log_p"].notna().all()
            continue
        with pytest.raises(UserError, match=f"model: .*{words}"):
            pseudo_log_likelihood(model, tokenizer, TEXTS[:2], dtype=dtype)


@pytest.mark.parametrize("family", [*MASKED, *CAUSAL])
def test_longest_sentence_is_scored_longer_is_refused(folders: dict[str, Path], family: str) -> None:
    """RoBERTa and MPNet number positions from behind that of padding."""
    model, tokenizer = load_language_model(folders[family])
    positions = SIZES["max_position_embeddings"] - (2 if family in ("roberta", "mpnet") else 0)
    assert longest_sentence(model) == positions
    longest = positions - (1 if family in CAUSAL else 2)
    text = ", ".join(["heart"] * 100)
    with pytest.raises(ValueError, match=f"sentence 1 has .* the model takes at most {longest} "):
        pseudo_log_likelihood(model, tokenizer, ["heart", text])
    found = pseudo_log_likelihood(model, tokenizer, ["heart", text], truncate=True)
    assert found["truncated"].tolist() == [False, True] and found["log_p"].notna().all()
    assert found["n_tokens"][1] == longest


def test_a_model_that_draws_numbers_is_refused(folders: dict[str, Path]) -> None:
    """As Reformer does, whose hashing is random in evaluation, too."""
    model, tokenizer = load_language_model(folders["roberta"])
    model.get_submodule("lm_head.layer_norm").register_forward_hook(lambda *given: given[2] + torch.rand(1))
    with pytest.raises(UserError, match="found a RobertaForMaskedLM, which draws random numbers"):
        pseudo_log_likelihood(model, tokenizer, TEXTS)


def test_head_across_tokens_is_computed_whole(folders: dict[str, Path]) -> None:
    """A head that mixes tokens gives the same as by definition, if at more cost."""
    model, tokenizer = load_language_model(folders["roberta"])

    class Mixing(torch.nn.Module):
        def __init__(self, head: torch.nn.Module) -> None:
            super().__init__()
            self.head = head

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.head(hidden + hidden.mean(dim=1, keepdim=True))

    model.lm_head = Mixing(model.lm_head)
    assert not WholeModel(model.eval(), tokenizer.mask_token_id).has_head_at_rows
    definition = Definition(folders["roberta"])
    definition.model.lm_head = Mixing(definition.model.lm_head)
    for budget in (None, 40):
        found = pseudo_log_likelihood(model, tokenizer, TEXTS, token_budget=budget)
        expected = sums([definition.values(text) for text in TEXTS])
        assert found["log_p"].tolist() == pytest.approx(expected, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("family", ["modernbert", "deberta-v2", "gpt2"])
def test_half_precision_differs_by_its_rounding(folders: dict[str, Path], family: str) -> None:
    model, tokenizer = load_language_model(folders[family])
    exact = pseudo_log_likelihood(model, tokenizer, TEXTS)
    found = pseudo_log_likelihood(model, tokenizer, TEXTS, dtype=torch.bfloat16)
    error = ((found["log_p"] - exact["log_p"]) / exact["n_tokens"]).abs().dropna()
    assert 1e-5 < error.max() < 0.1 and {parameter.dtype for parameter in model.parameters()} == {
        torch.float32
    }


def test_words_need_a_tokenizer_that_splits(folders: dict[str, Path]) -> None:
    """Otherwise a whole sentence would count as a word."""
    model, tokenizer = load_language_model(folders["roberta"])
    tokenizer.backend_tokenizer.pre_tokenizer = None
    with pytest.raises(UserError, match="within_word_l2r: expected a tokenizer that splits words"):
        pseudo_log_likelihood(model, tokenizer, ["heart"], within_word_l2r=True)


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rename_mask(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<mask>", "<musk>"))


def remove_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize(
    ("family", "damage", "message"),
    [
        ("roberta", lambda x: change_config(x, model_type="unheard_of", auto_map={"AutoModel": "code.X"}),
         r"config\.json: model_type: expected an encoder or .* found 'unheard_of' with code of its own, code.py"),
        ("roberta", lambda x: change_config(x, is_decoder=True), "expected an encoder .* found 'roberta'"),
        ("roberta", lambda x: change_config(x, num_hidden_layers=1), r"unexpected .*encoder\.layer\.1\."),
        ("roberta", lambda x: change_config(x, num_hidden_layers=3), r"missing .*encoder\.layer\.2\."),
        ("roberta", rename_mask, "tokenizer does not fit the weights: it has no mask token"),
        ("roberta", remove_tokenizer, "no tokenizer: none of tokenizer.json"),
        ("electra", lambda x: change_config(x, embedding_size=12), "of another shape .*word_embeddings"),
        ("deberta-v2", lambda x: change_config(x, legacy=True), 'missing .*cls.* under "legacy": false'),
    ],
)  # fmt: skip
def test_folders_that_do_not_fit_are_refused(
    folders: dict[str, Path], tmp_path: Path, family: str, damage: object, message: str
) -> None:
    folder = shutil.copytree(folders[family], tmp_path / family)
    assert callable(damage)
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        load_language_model(folder)
    assert "\n" not in str(caught.value)


def test_missing_head_and_other_heads(folders: dict[str, Path], tmp_path: Path) -> None:
    """A discriminator has no language model's head; a classifier's head beside one does no harm."""
    config = transformers.AutoConfig.from_pretrained(folders["electra"])
    transformers.ElectraForPreTraining(config).save_pretrained(tmp_path)
    shutil.copy(folders["electra"] / "tokenizer.json", tmp_path)
    shutil.copy(folders["electra"] / "tokenizer_config.json", tmp_path)
    with pytest.raises(UserError, match="missing .*generator_predictions.*architectures in config.json"):
        load_language_model(tmp_path)
    model, _ = load_language_model(folders["electra"])
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model.classifier = torch.nn.Linear(3, 3)
    model.save_pretrained(tmp_path)
    found = load_language_model(tmp_path)[0].state_dict()
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)
