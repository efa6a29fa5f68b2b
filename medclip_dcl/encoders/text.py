"""Sentence encoder: BERT, pooled over its word pieces and projected."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertModel

from medclip_dcl.encoders.masked_language import MaskedLanguageHead, masked_language_losses
from medclip_dcl.encoders.pretrained import (
    ModelFolderError,
    load_bert,
    load_masked_language_model,
    load_tokenizer,
    resolve_folder,
)
from medclip_dcl.errors import UserError
from medclip_dcl.weight_files import (
    WEIGHTS_FILE,
    is_exported,
    read_checkpoint,
    read_exported_config,
    read_state_dict,
)

BERT_BASE = BertConfig().to_dict()
"""What a configuration means where it does not say something."""


class SentenceEncoder(nn.Module):
    """Base class: word pieces of sentences to one embedding each.

    Attributes:
        dim: size of an embedding.
        tokenizer: splits text into word pieces; padding and special tokens are set up.
        has_masked_language_head: True if it can tell hidden word pieces.
    """

    dim: int
    tokenizer: Tokenizer
    has_masked_language_head: bool = False

    @property
    def transformer(self) -> nn.Module:
        """The pretrained part, which may have a learning rate of its own."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """Arguments that build the same encoder again, without its weights."""
        raise NotImplementedError

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Word-piece ids of each text with [CLS] and [SEP], not padded."""
        raise NotImplementedError

    def forward(
        self, tokens: Int[Tensor, "sentence token"], lengths: Int[Tensor, " sentence"]
    ) -> Float[Tensor, "sentence dim"]:
        """Sentence embeddings, not normalised; `tokens` beyond `lengths` are padding."""
        raise NotImplementedError

    def masked_language_loss(
        self,
        tokens: Int[Tensor, "sentence token"],
        lengths: Int[Tensor, " sentence"],
        labels: Int[Tensor, "sentence token"],
    ) -> Float[Tensor, " masked"]:
        """-log P of each hidden word piece; `labels` are -100 where nothing is hidden."""
        raise NotImplementedError

    def freeze_masked_language_head(self) -> None:
        """Take the head out of training."""
        raise NotImplementedError


class BertSentences(SentenceEncoder):
    """BERT (CXR-BERT), pooled last hidden state, projection to `dim`.

    Give either `pretrained`, or `bert` and `tokenizer` as `config` returned them (then weights are random until
    they are loaded).

    Args:
        pretrained: a Hugging Face folder or repository id of a BERT, e.g.
            microsoft/BiomedVLP-CXR-BERT-general, or what configs/language_model.yaml wrote; or a checkpoint or an
            exported folder of an image-text model, whose BERT and tokenizer are taken.
        dim: size of the projected sentences.
        max_tokens: longer sentences are cut to this many word pieces, [CLS] and [SEP] included.
        dropout: dropout of the transformer, in [0, 1); null keeps the model's own.
        final_period: True ends every text with a period if it has no closing mark, so that prompts look like
            the sentences of reports (choice).
        pooling: "cls" takes the hidden state of [CLS] (choice, not from the paper); "mean" the mean over all word
            pieces, [CLS] and [SEP] included, which suits a BERT whose [CLS] was never trained for a task.
        projection: "linear", as in SSD; "mlp" is BioViL's projection (Boecking et al., ECCV 2022): linear map to `dim`,
            GELU, LayerNorm, linear map. Its layers have the names, biases and epsilon of the published
            ``cls_projection_head``. It starts from random weights.
        masked_language_head: True loads the folder's masked-language-model head, too, for `masked_language_loss`
            (BioViL's joint loss). It trains by that loss alone, which then belongs into every training step.
        bert: configuration of the transformer (BertConfig fields).
        tokenizer: content of tokenizer.json.

    Raises:
        ValueError: both or neither source; an unknown pooling or projection; max_tokens above what the model takes;
            a folder that does not fit, or has no head where one is asked for (see encoders.pretrained).
    """

    masked_language_head: MaskedLanguageHead | None

    def __init__(
        self,
        pretrained: str | None = None,
        dim: int = 128,
        max_tokens: int = 128,
        dropout: float | None = None,
        final_period: bool = True,
        pooling: str = "cls",
        projection: str = "linear",
        masked_language_head: bool = False,
        *,
        bert: dict[str, Any] | None = None,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        if (pretrained is None) == (bert is None or tokenizer is None):
            raise UserError(
                "text encoder: give either pretrained (a folder or repository id), or bert and tokenizer"
            )
        if pooling not in ("cls", "mean"):
            raise UserError(f'text encoder: pooling must be "cls" or "mean", got {pooling!r}')
        if projection not in ("linear", "mlp"):
            raise UserError(f'text encoder: projection must be "linear" or "mlp", got {projection!r}')
        trained = None if pretrained is None else read_text_encoder(pretrained)
        if trained is not None:
            bert, tokenizer = trained.bert, trained.tokenizer
        if pretrained is not None and trained is None:
            folder = resolve_folder(pretrained)
            model = load_masked_language_model(folder) if masked_language_head else load_bert(folder)
            self.tokenizer = Tokenizer.from_str(load_tokenizer(folder).backend_tokenizer.to_str())
        else:
            config = BertConfig(**(bert or {}))
            if masked_language_head:
                model = BertForMaskedLM(config)
            else:
                model = BertModel(config, add_pooling_layer=False)
            self.tokenizer = Tokenizer.from_str(str(tokenizer))
        self.bert = model.bert if masked_language_head else model
        self.masked_language_head = MaskedLanguageHead(model) if masked_language_head else None
        self.has_masked_language_head = masked_language_head
        if dropout is not None:
            _set_dropout(self.bert, dropout)
        positions = self.bert.config.max_position_embeddings
        if not 3 <= max_tokens <= positions:
            raise UserError(
                f"max_tokens must lie in [3, {positions}] for this text encoder, got {max_tokens}"
            )
        self.dim, self.max_tokens = dim, max_tokens
        self.final_period, self.pooling, self.projection_kind = final_period, pooling, projection
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(max_tokens)
        # A literal "[SEP]" in a report is text, not the end of the sentence.
        self.tokenizer.encode_special_tokens = True
        self.projection = _projection(projection, self.bert.config.hidden_size, dim)
        if trained is not None:
            trained.give_transformer(self)

    @property
    def transformer(self) -> nn.Module:
        """BERT, with its masked-language-model head if it is there."""
        if self.masked_language_head is None:
            return self.bert
        return nn.ModuleList([self.bert, self.masked_language_head])

    def config(self) -> dict[str, Any]:
        bert = self.bert.config.to_diff_dict()
        for key in ("transformers_version", "model_type", "architectures", "dtype", "_name_or_path"):
            bert.pop(key, None)
        config = {
            "dim": self.dim,
            "max_tokens": self.max_tokens,
            "final_period": self.final_period,
            "pooling": self.pooling,
            "bert": bert,
            "tokenizer": self.tokenizer.to_str(),
        }
        # Unsaid where it is the default, so that a checkpoint from before the option describes the same encoder.
        if self.projection_kind != "linear":
            config["projection"] = self.projection_kind
        if self.masked_language_head is not None:
            config["masked_language_head"] = True
        return config

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        if self.final_period:
            texts = [with_final_period(text) for text in texts]
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]

    def forward(
        self, tokens: Int[Tensor, "sentence token"], lengths: Int[Tensor, " sentence"]
    ) -> Float[Tensor, "sentence dim"]:
        hidden = self._hidden(tokens, lengths)
        if self.pooling == "cls":
            return self.projection(hidden[:, 0])
        total = hidden.masked_fill(~_is_token(tokens, lengths)[..., None], 0.0).sum(dim=1)
        return self.projection(total / lengths[:, None])

    def masked_language_loss(
        self,
        tokens: Int[Tensor, "sentence token"],
        lengths: Int[Tensor, " sentence"],
        labels: Int[Tensor, "sentence token"],
    ) -> Float[Tensor, " masked"]:
        """-log P of each hidden word piece (Devlin et al., NAACL 2019), not reduced, in float32, row by row.

        Args:
            tokens: sentences in which word pieces are masked; beyond `lengths` they are padding.
            lengths: word pieces of each sentence, [CLS] and [SEP] included.
            labels: the word piece that was hidden; -100 where nothing is to be predicted.

        Raises:
            RuntimeError: the encoder was built without its head.
        """
        head = self.masked_language_head
        if head is None:
            raise RuntimeError(
                "text encoder: it has no masked-language-model head; build it with masked_language_head: true"
            )
        words = self.bert.embeddings.word_embeddings.weight
        return masked_language_losses(self._hidden(tokens, lengths), labels, lambda rows: head(rows, words))

    def freeze_masked_language_head(self) -> None:
        if self.masked_language_head is not None:
            self.masked_language_head.requires_grad_(False)

    def _hidden(
        self, tokens: Int[Tensor, "sentence token"], lengths: Int[Tensor, " sentence"]
    ) -> Float[Tensor, "sentence token hidden"]:
        """Last hidden states; what stands at padding means nothing."""
        mask = _is_token(tokens, lengths)
        return self.bert(input_ids=tokens, attention_mask=mask.long()).last_hidden_state


@dataclass(frozen=True)
class TrainedTextEncoder:
    """A `BertSentences` in a model of this program, as its checkpoint or exported folder describes it.

    Attributes:
        bert: configuration of the transformer.
        tokenizer: content of tokenizer.json.
        state: the encoder's tensors.
        source: where they were read.
    """

    bert: dict[str, Any]
    tokenizer: str
    state: dict[str, Tensor]
    source: str

    def give_transformer(self, encoder: BertSentences) -> None:
        """Put the transformer, with the head where the encoder has one, into an encoder of the same configuration."""
        wanted = [name for name in encoder.state_dict() if not name.startswith("projection.")]
        if missing := [name for name in wanted if name not in self.state]:
            raise ModelFolderError(
                f"{self.source}: its text encoder has no {', '.join(missing)}; choose masked_language_head: false, or "
                "a model that was trained with a head"
            )
        encoder.load_state_dict({**encoder.state_dict(), **{name: self.state[name] for name in wanted}})


def read_text_encoder(source: str) -> TrainedTextEncoder | None:
    """The text encoder of a checkpoint or of an exported folder of this program; None for anything else.

    Raises:
        ValueError: a file that is no checkpoint of an image-text model, or has another kind of text encoder.
    """
    path = Path(source).expanduser()
    if path.is_file():
        checkpoint = read_checkpoint(path)
        network, state = checkpoint["network"], checkpoint["state_dict"]
    elif is_exported(path):
        network, state = read_exported_config(path), read_state_dict(path / WEIGHTS_FILE)
    else:
        return None
    arguments = network.get("text_encoder", {}).get("init_args", {})
    if not {"bert", "tokenizer"} <= arguments.keys():
        raise ModelFolderError(f"{source} has no BERT as its text encoder; give a BERT folder (pretrained)")
    own = {name.removeprefix("network."): value for name, value in state.items()}
    own = {
        name.removeprefix("text_encoder."): x for name, x in own.items() if name.startswith("text_encoder.")
    }
    return TrainedTextEncoder(arguments["bert"], arguments["tokenizer"], own, source)


def _is_token(
    tokens: Int[Tensor, "sentence token"], lengths: Int[Tensor, " sentence"]
) -> Bool[Tensor, "sentence token"]:
    """False at padding."""
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]


def _projection(kind: str, hidden_size: int, dim: int) -> nn.Module:
    """From the pooled hidden state to the common space."""
    if kind == "linear":
        return nn.Linear(hidden_size, dim)
    layers = {
        "dense_to_hidden": nn.Linear(hidden_size, dim),
        "activation": nn.GELU(),
        "LayerNorm": nn.LayerNorm(dim, eps=1e-12),
        "dense_to_output": nn.Linear(dim, dim),
    }
    return nn.Sequential(OrderedDict(layers))


def with_final_period(text: str) -> str:
    """The text with a closing period where it has no closing mark of its own."""
    stripped = text.rstrip()
    return stripped if stripped.endswith((".", "?", "!", ":", ";")) else stripped + "."


def _set_dropout(bert: BertModel, dropout: float) -> None:
    """One dropout probability for the whole transformer, in its modules and in its configuration."""
    if not 0 <= dropout < 1:
        raise UserError(f"dropout must lie in [0, 1), got {dropout}")
    bert.config.hidden_dropout_prob = bert.config.attention_probs_dropout_prob = dropout
    for module in bert.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
