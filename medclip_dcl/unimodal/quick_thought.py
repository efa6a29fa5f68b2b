"""Quick-Thought: sentence encoders trained by the sentences around each sentence, debiased (DCL, section 5.3)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.functional import normalize
from torch.optim import Adam, Optimizer
from transformers import PreTrainedTokenizerFast

from medclip_dcl.common.distributed import gather_with_grad
from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.common.weight_files import SENTENCES
from medclip_dcl.models.trained_model import NetworkModel
from medclip_dcl.networks.bert_folder import save_language_model
from medclip_dcl.networks.described import DescribedNetwork
from medclip_dcl.networks.text_encoder import SentenceEncoder, TransformersSentences
from medclip_dcl.objectives.contrastive import (
    ContrastiveStatistics,
    at_least_float32,
    contrastive_loss,
    contrastive_statistics,
)
from medclip_dcl.unimodal.gru import GruSentences
from medclip_dcl.unimodal.sentences import SentencesRequirements

TEXT_ENCODER = "text_encoder"
"""Folder of the trained encoder in the run folder, where it is a model of transformers."""


def quick_thought_loss(
    anchors: Float[Tensor, "sentence dim"],
    candidates: Float[Tensor, "sentence dim"],
    document: Int[Tensor, " sentence"],
    position: Int[Tensor, " sentence"],
    *,
    context: int | None = 1,
    n_positives: int | None = None,
    gamma2: float | None = None,
    class_probability: float = 0.0,
) -> tuple[Float[Tensor, ""], ContrastiveStatistics]:
    """Contrastive loss between a sentence and those around it in its document, and its statistics.

    Each other sentence of the document within `context` is x+ in turn; an anchor's loss is the mean over them (both
    neighbours for 1, the targets of Logeswaran & Lee, ICLR 2018; the text of Chuang et al., NeurIPS 2020, does not say
    whether one or both). The v_m of the correction are x+, then the nearest to the anchor, the preceding one of two, up
    to M; fewer where there are fewer. Negatives are the other sentences of the batch, without the anchor itself and its
    other positives (choice: Quick-Thought's code has these in the denominator, the anchor with a score of 0).

    Args:
        anchors: f(s), of any norm.
        candidates: g(s) of the same sentences.
        document: number of each sentence's document.
        position: of the sentence in it.
        context: sentences on each side; None: the whole document.
        n_positives: M, at least 1; None: all positives. 1 is the case v = x+.
        gamma2: factor of the cosine, the floor is -gamma^2; None: inner products without a floor.
        class_probability: tau+ in [0, 1).

    Raises:
        ValueError: tau+ outside [0, 1), no document with two sentences.
    """
    anchors, candidates = at_least_float32(anchors), at_least_float32(candidates)
    if gamma2 is not None:
        anchors, candidates = gamma2 * normalize(anchors, dim=1), normalize(candidates, dim=1)
    after = position - position[:, None]
    is_around = (document == document[:, None]) & (after != 0)
    if context is not None:
        is_around &= after.abs() <= context
    anchor, positive = is_around.nonzero().T
    with torch.autocast(device_type=anchors.device.type, enabled=False):
        logits = (anchors @ candidates.T)[anchor]
    is_around, after = is_around[anchor], after[anchor]
    is_own = anchor[:, None] == torch.arange(len(document), device=logits.device)
    correction = None
    if n_positives != 1 and len(anchor):
        # Half a step nearer where it precedes.
        distance = (after.abs() - 0.5 * (after < 0)).masked_fill(~is_around, math.inf)
        distance.scatter_(1, positive[:, None], -1)
        max_positives = int(is_around.sum(1).max())
        nearest = distance.topk(min(n_positives or max_positives, max_positives), largest=False)
        is_there = nearest.values.isfinite()
        # The mean over those that are there: the others have no weight.
        share = math.log(is_there.shape[1]) - is_there.sum(1, keepdim=True).to(logits.dtype).log()
        correction = (logits.gather(1, nearest.indices) + share).masked_fill(~is_there, -math.inf)
    options: dict[str, Any] = {
        "class_probability": class_probability,
        "floor": -math.inf if gamma2 is None else -gamma2,
        "weights": (~(is_around | is_own)).to(logits.dtype),
        "correction_logits": correction,
    }
    losses = contrastive_loss(logits, positive, reduction="none", **options)
    count = is_around.sum(1)
    return (losses / count).sum() / len(anchor.unique()), contrastive_statistics(logits, positive, **options)


class SentenceNetwork(DescribedNetwork):
    """An encoder of sentences alone, as a network that describes and rebuilds itself."""

    kind = SENTENCES
    parts = {"text_encoder": SentenceEncoder}

    def __init__(self, text_encoder: SentenceEncoder) -> None:
        super().__init__()
        self.text_encoder = text_encoder


class QuickThought(NetworkModel):
    """Contrastive training of a sentence encoder by the sentences around each sentence: `quick_thought_loss`.

    f and g of `GruSentences` are two encoders. Any other encoder is both: the loss sees its projection, its features
    are the states before it (choice), and one of transformers is written to RUN/text_encoder for
    `embed` and `pretrained`.

    Args:
        text_encoder: sentences to features.
        context: sentences on each side that are positives (Quick-Thought: 1); null: all others of the document.
        n_positives: M of the correction: 1 is x+ alone, null all positives (DCL: M = 2 of context 1).
        class_probability: tau+ in [0, 1) (DCL: 0.005 and 0.01); 0 is Quick-Thought without a correction.
        gamma2: factor of the cosine; null: inner products, as Quick-Thought's code, without a floor.
        learning_rate: of Adam, constant (Quick-Thought's code: 5e-4).
    """

    network: SentenceNetwork
    kind = SENTENCES
    tests_untrained = True
    parts = ("text_encoder",)

    def __init__(
        self,
        text_encoder: SentenceEncoder,
        context: int | None = 1,
        n_positives: int | None = None,
        class_probability: float = 0.0,
        gamma2: float | None = 10.0,
        learning_rate: float = 5e-4,
    ) -> None:
        super().__init__()
        check_range("model", "[1, inf)", context=context, n_positives=n_positives)
        check_range("model", "(0, inf)", learning_rate=learning_rate, gamma2=gamma2)
        check_range("model", "[0, 1)", class_probability=class_probability)
        if context is not None and (n_positives or 1) > 2 * context:
            raise UserError(
                f"model.n_positives: expected at most {2 * context}, twice the context, found {n_positives}"
            )
        self.network = SentenceNetwork(text_encoder)
        self.options: dict[str, Any] = {
            "context": context,
            "n_positives": n_positives,
            "gamma2": gamma2,
            "class_probability": class_probability,
        }
        self.learning_rate = learning_rate

    def requirements(self) -> SentencesRequirements:
        return SentencesRequirements(self.network.text_encoder.tokenize)

    def use_data(self, data: list[str], stage: str) -> None:
        """Let a GRU without a vocabulary take the words of the training sentences; warn of sentences that are cut."""
        encoder = self.network.text_encoder
        if isinstance(encoder, GruSentences):
            encoder.take_words(data)
        if cut := encoder.truncated_share(data):
            rank_zero_warn(f"data: {cut}")

    def training_step(self, batch: dict[str, Any], batch_index: int) -> Tensor:
        loss, statistics = self._loss(batch)
        self.log_training(loss, len(batch["row"]), statistics._asdict())
        return loss

    def _loss(self, batch: dict[str, Any]) -> tuple[Tensor, ContrastiveStatistics]:
        """Loss of the sentences of all processes, each of which computes all of it."""
        embeddings = self.network.text_encoder(batch["tokens"], batch["lengths"])[batch["row"]]
        embeddings, document, position = (
            gather_with_grad(x) for x in (embeddings, batch["document"], batch["position"])
        )
        is_pair = isinstance(self.network.text_encoder, GruSentences)
        anchors, candidates = embeddings.chunk(2, dim=1) if is_pair else (embeddings, embeddings)
        return quick_thought_loss(anchors, candidates, document, position, **self.options)

    def test_step(self, batch: dict[str, Any], batch_index: int) -> dict[str, Any]:
        """Features for `SentenceEvaluation`."""
        states = self.network.text_encoder.states(batch["tokens"], batch["lengths"])
        return {**batch, "features": states[batch["row"]]}

    def configure_optimizers(self) -> Optimizer:
        return Adam([p for p in self.parameters() if p.requires_grad], lr=self.learning_rate)

    def on_fit_end(self) -> None:
        encoder = self.network.text_encoder
        if self.trainer.fast_dev_run or not isinstance(encoder, TransformersSentences):  # type: ignore[attr-defined]
            return
        if self.trainer.is_global_zero:
            folder = Path(self.trainer.default_root_dir) / TEXT_ENCODER
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=encoder.tokenizer)
            save_language_model(encoder.model, tokenizer, folder)
            command = f"medclip-dcl embed SET --model {folder} --pooling {encoder.pooling}"
            rank_zero_info(f"{folder}: the trained encoder; {command}")
        self.trainer.strategy.barrier("text encoder exported")
