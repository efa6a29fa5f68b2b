"""MaskedLanguageModel: trains the language model that scores sentences and starts the text encoder."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

from medclip_dcl.common.distributed import global_mean
from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.common.find_model import LANGUAGE_MODEL
from medclip_dcl.common.formats import CHECKPOINT
from medclip_dcl.common.weight_files import load_exactly, read_model
from medclip_dcl.data.link import ReportsRequirements, TokenizedSentences, trainer_data
from medclip_dcl.models.optimisation import adamw_warmup_cosine, parameter_groups
from medclip_dcl.models.trained_model import TrainedModel
from medclip_dcl.networks.bert_folder import resolve_folder, save_language_model
from medclip_dcl.networks.language_model import language_model_class, load_language_model
from medclip_dcl.networks.library_folder import longest_sentence
from medclip_dcl.networks.masked_language import head_at, masked_language_losses
from medclip_dcl.networks.transformer import avoid_host_reads, run

_WEIGHTS_PREFIX = "language_model."


def _described(checkpoint: Any, source: str) -> dict[str, Any]:
    """The language model's part of a checkpoint, in this program's format."""
    if not isinstance(checkpoint, dict) or "language_model" not in checkpoint:
        raise UserError(f"{source} is not of a language model: it has no description of one")
    CHECKPOINT.check(checkpoint, source)
    return checkpoint["language_model"]


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    avoid_host_reads(model)
    return model.train()


@dataclass(frozen=True)
class BertArchitecture:
    """Size of a BERT that is trained from scratch; its vocabulary is the tokenizer's.

    Args:
        layers: transformer layers.
        hidden_size: width of the hidden states, a multiple of attention_heads.
        attention_heads: heads per layer.
        intermediate_size: width of the feed-forward layer.
        max_positions: longest input in tokens, [CLS] and [SEP] included.
        dropout: of hidden states and attention, in [0, 1).
    """

    layers: int = 2
    hidden_size: int = 128
    attention_heads: int = 2
    intermediate_size: int = 512
    max_positions: int = 512
    dropout: float = 0.1

    def __post_init__(self) -> None:
        # Torch takes 1, and trains on zeros.
        check_range("model.architecture", "[0, 1)", dropout=self.dropout)


class MaskedLanguageModel(TrainedModel):
    """A masked language model trained on report sentences (Devlin et al., NAACL 2019).

    SSD (section 2.4) states that sentence scores get better when the language model is fine-tuned on the reports: this
    is that step. When fit ends, the weights that were best on validate are written to RUN/language_model as a plain
    Hugging Face folder (RUN = trainer.default_root_dir), which the text encoder and the sentence scorer load.

    Args:
        pretrained: a Hugging Face folder or repository id to start from, of a masked language model of any family
            (BERT, RoBERTa, DeBERTa, ModernBERT, ...), e.g. microsoft/BiomedVLP-CXR-BERT-general; null to start from
            scratch.
        architecture: size of the BERT where it starts from scratch; null with `pretrained`.
        learning_rate: of AdamW after the warm-up.
        weight_decay: on weight matrices only.
        warmup_steps: optimiser steps of linear warm-up; cosine decay to 0 follows.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        architecture: BertArchitecture | None = None,
        learning_rate: float = 5e-5,
        weight_decay: float = 0.01,
        warmup_steps: int = 1000,
    ) -> None:
        super().__init__()
        if (pretrained is None) == (architecture is None):
            raise UserError(
                "model: give either pretrained (a folder or repository id) or architecture (to start from scratch), "
                f"got pretrained {pretrained!r} and architecture {architecture}"
            )
        check_range("model", "(0, inf)", learning_rate=learning_rate)
        check_range("model", "[0, inf)", weight_decay=weight_decay, warmup_steps=warmup_steps)
        self.pretrained, self.architecture = pretrained, architecture
        self.learning_rate, self.weight_decay, self.warmup_steps = learning_rate, weight_decay, warmup_steps
        self.language_model: PreTrainedModel | None = None
        self.tokenizer: PreTrainedTokenizerFast  # the datamodule's, after `setup`

    def use_data(self, data: TokenizedSentences, stage: str) -> None:
        """Take the tokenizer, and build the model for its vocabulary."""
        self.tokenizer = data.tokenizer
        if self.language_model is None:
            self.language_model = self._build()
        positions = longest_sentence(self.language_model)
        if data.max_tokens > positions:
            raise UserError(
                f"data.max_tokens {data.max_tokens} is more than the {positions} positions of the model"
            )

    def requirements(self) -> ReportsRequirements:
        return ReportsRequirements(self.pretrained)

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        losses = self._losses(batch)
        loss = global_mean(losses)
        self.log_training(loss, len(losses))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        losses = self._losses(batch)
        self.add_validation_loss(losses.sum(), len(losses))

    def log_validation_loss(self, mean: Tensor) -> None:
        super().log_validation_loss(mean)
        self.log("validate/perplexity", mean.exp().float())

    def configure_optimizers(self) -> Any:
        total = self.trainer.estimated_stepping_batches
        groups = parameter_groups(self._model.parameters(), self.weight_decay)
        return adamw_warmup_cosine(groups, self.learning_rate, self.warmup_steps, total)

    def description(self) -> dict[str, Any]:
        architecture = None if self.architecture is None else asdict(self.architecture)
        names = ("pretrained", "learning_rate", "weight_decay", "warmup_steps")
        options = {**{name: getattr(self, name) for name in names}, "architecture": architecture}
        return {
            "language_model": {
                "config": json.dumps(self._model.config.to_diff_dict()),
                "tokenizer": self._tokenizer_json(),
                "options": options,
            }
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the model from the checkpoint alone, or compare the run's tokenizer with the checkpoint's."""
        stored = _described(checkpoint, "the checkpoint")
        if self.language_model is None:
            kind, config = language_model_class(json.loads(stored["config"]), "checkpoint")
            self.language_model = _ready(kind(config))
        elif stored["tokenizer"] != self._tokenizer_json():
            raise UserError(
                "the checkpoint was trained with another tokenizer than this run's: the training sentences or "
                "data.vocabulary_size have changed; start a new run folder"
            )

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path, map_location: Any = "cpu"
    ) -> MaskedLanguageModel:
        checkpoint = read_model(checkpoint_path, map_location).checkpoint
        options = dict(_described(checkpoint, str(checkpoint_path))["options"])
        size = options.pop("architecture", None)
        model = cls(architecture=None if size is None else BertArchitecture(**size), **options)
        model.on_load_checkpoint(checkpoint)
        load_exactly(model, checkpoint["state_dict"], str(checkpoint_path))
        return model.eval()

    def next_command(self, run: Path) -> str:
        data: Any = trainer_data(self.trainer)
        return f"medclip-dcl score {data.folder} --model {run / LANGUAGE_MODEL}"

    def on_fit_end(self) -> None:
        """Write the weights that were best on validate, also for a run that is resumed after its last step."""
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self.trainer.is_global_zero:
            folder = Path(self.trainer.default_root_dir) / LANGUAGE_MODEL
            save_language_model(self._best(), self.tokenizer, folder)
        self.trainer.strategy.barrier("language model exported")

    def _best(self) -> PreTrainedModel:
        """A model with the weights of the best checkpoint (ModelCheckpoint remembers it when a run resumes)."""
        for callback in self.trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.monitor and callback.best_model_path:
                # A run folder that was moved resumes with the path of its old place.
                file = Path(callback.dirpath or "", Path(callback.best_model_path).name)
                if file.is_file():
                    state = read_model(file).state.items()
                    best = copy.deepcopy(self._model)
                    best.load_state_dict({name.removeprefix(_WEIGHTS_PREFIX): x for name, x in state})
                    return best
        warnings.warn("no checkpoint was selected: the last weights are exported, not the best", stacklevel=2)
        return self._model

    def _build(self) -> PreTrainedModel:
        if self.pretrained is not None:
            return _ready(load_language_model(resolve_folder(self.pretrained))[0])
        size = self.architecture or BertArchitecture()
        config = BertConfig(
            vocab_size=len(self.tokenizer),
            hidden_size=size.hidden_size,
            num_hidden_layers=size.layers,
            num_attention_heads=size.attention_heads,
            intermediate_size=size.intermediate_size,
            max_position_embeddings=size.max_positions,
            hidden_dropout_prob=size.dropout,
            attention_probs_dropout_prob=size.dropout,
        )
        return _ready(BertForMaskedLM(config))

    def _losses(self, batch: dict[str, Tensor]) -> Float[Tensor, " masked"]:
        with head_at(self._model, batch["places"]):
            logits = run(self._model, batch["tokens"], batch["lengths"]).logits[:, 0]
        return masked_language_losses(logits, batch["labels"], batch["places"])

    @property
    def _model(self) -> PreTrainedModel:
        if self.language_model is None:
            raise UserError("a language model needs a datamodule with a tokenizer, such as ReportsDataModule")
        return self.language_model

    def _tokenizer_json(self) -> str:
        return str(self.tokenizer.backend_tokenizer.to_str())
