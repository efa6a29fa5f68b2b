"""Two processes against one: a step of every objective and the classifier, the validation loss, a resumed run."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_fabric.utilities.apply_func import move_data_to_device
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from medclip_dcl.data.by_length import pieces_by_length, rows_of
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.networks.masked_language import masked_places
from medclip_dcl.networks.similarity import LSE, GlobalCosine, LSENonLocal, NonLocal
from medclip_dcl.networks.text_encoder import SentenceEncoder
from medclip_dcl.objectives import (
    ConstantClassProbability,
    DecoupledLoss,
    HardNegatives,
    KnownClassProbability,
    LanguageModelClassProbability,
    NearTexts,
    Negations,
    PosteriorTargets,
    RankedByText,
    RemoveByLabel,
    RemoveByTextSimilarity,
    ResampleByTextSimilarity,
    ReweightByTextSimilarity,
    SigmoidLoss,
    SoftTargets,
    StoppedInfoNCE,
    TrueNegatives,
    WeightedInfoNCE,
)
from tests.common import test_distributed as distributed
from tests.data import machines
from tests.models import test_classifier as classifier
from tests.models import test_image_text as image_text
from tests.models import test_resuming as resuming
from tests.processes import in_processes
from tests.small import GlobalPatches, LinearPatches, RegionsAndGlobal
from tests.unimodal import test_model as unimodal
from tests.unimodal import test_quick_thought as sentences
from tests.unimodal import test_views as views

IMAGES, SENTENCES = (3, 2), (4, 5)
LM = LanguageModelClassProbability(a=0.25, k=0.1)
OBJECTIVES: dict[str, dict[str, Any]] = {
    "infonce": {},
    "dcl_005": {"class_probability": ConstantClassProbability(0.05)},
    "dcl_lm": {"class_probability": LM},
    "dcl_known": {"class_probability": KnownClassProbability()},
    "remove_chex5": {"negative_weights": RemoveByLabel()},
    "remove_chex5_normals": {"negative_weights": RemoveByLabel(normals=True)},
    "remove_text": {"negative_weights": RemoveByTextSimilarity(threshold=0.1)},
    "reweight_text": {"negative_weights": ReweightByTextSimilarity()},
    "resample_text": {"negative_weights": ResampleByTextSimilarity()},
    "hard_negatives": {"negative_weights": HardNegatives(), "class_probability": LM},
    "unbiased": {"negative_weights": TrueNegatives()},
    "ranked_by_text": {"negative_weights": RankedByText(None, k=0.1, c=0.9), "image_to_text": 0.3},
    "ranked_by_text_near": {
        "negative_weights": RankedByText(None, k=0.1, c=0.9),
        "same_text": "ignore",
        "near_texts": NearTexts(0.3),
        "views": 2,
    },
    "ranked_at_random": {
        "negative_weights": RankedByText(None, k=0.0, c=0.4, random_seed=1),
        "image_to_text": 0.3,
        "same_text": "positive",
        "encode_at_once": 1,
    },
    "symmetric": {"image_to_text": 0.5, "class_probability": LM},
    "symmetric_remove_chex5": {"image_to_text": 0.5, "negative_weights": RemoveByLabel()},
    "symmetric_resample_text": {"image_to_text": 0.3, "negative_weights": ResampleByTextSimilarity(draws=3)},
    "symmetric_unbiased": {"image_to_text": 0.3, "negative_weights": TrueNegatives()},
    "same_text_positive": {"same_text": "positive", "class_probability": LM, "image_to_text": 0.3},
    "same_text_ignore": {"same_text": "ignore", "class_probability": LM, "image_to_text": 0.3},
    "near_sentences": {"same_text": "positive", "near_texts": NearTexts(0.3), "class_probability": LM},
    "near_reports": {
        "same_text": "ignore",
        "near_texts": NearTexts(0.1, "reports"),
        "image_to_text": 0.3,
        "views": 2,
    },
    "near_reports_positive": {
        "same_text": "positive",
        "near_texts": NearTexts(0.1, "reports"),
        "image_to_text": 0.3,
    },
    "soft_targets": {"loss": SoftTargets(0.3), "image_to_text": 0.3},
    "soft_targets_same_text": {"loss": SoftTargets(0.3), "same_text": "positive", "views": 2},
    "posterior_targets": {"loss": PosteriorTargets(), "encode_at_once": 1},
    "posterior_targets_removal": {"loss": PosteriorTargets(0.5), "same_text": "ignore", "views": 2},
    "two_views": {"views": 2, "class_probability": LM, "image_to_text": 0.3},
    "three_views_reweight": {"views": 3, "negative_weights": ReweightByTextSimilarity()},
    "encoded_in_parts": {"encode_at_once": 1, "class_probability": LM},
    "biovil": {"image_to_text": 0.5, "masked_language_weight": 0.7, "similarity": GlobalCosine},
    "sigmoid": {"loss": SigmoidLoss(-2.0), "views": 2},
    "sigmoid_lm": {"loss": SigmoidLoss(-2.0), "class_probability": LM, "same_text": "positive"},
    "infonce_weighted": {"loss": WeightedInfoNCE(), "class_probability": LM, "image_to_text": 0.3},
    "infonce_stop": {"loss": StoppedInfoNCE(), "class_probability": LM, "views": 2},
    "class_members": {
        "correction_images": "class",
        "correction_count": 2,
        "class_probability": LM,
        "views": 3,  # behind the own images those of the correction
    },
    "class_members_global_vector": {
        "image_encoder": GlobalPatches,
        "similarity": RegionsAndGlobal,
        "correction_images": "sentence",
        "class_probability": LM,
        "same_text": "ignore",
        "views": 2,
    },
    "decoupled": {"loss": DecoupledLoss(), "image_to_text": 0.3},
    "negations": {"loss": Negations(0.7), "image_to_text": 0.3, "views": 2},
    "negations_in_parts": {"loss": Negations(), "same_text": "ignore", "encode_at_once": 1},
    "lse": {"class_probability": LM, "similarity": LSE},
    "global_vector": {
        "image_encoder": GlobalPatches,
        "similarity": RegionsAndGlobal,
        "image_to_text": 0.3,
        "views": 2,
    },
    "global_vector_in_parts": {
        "image_encoder": GlobalPatches,
        "similarity": GlobalCosine,
        "encode_at_once": 2,
        "class_probability": LM,
    },
    "non_local": {"class_probability": LM, "similarity": partial(NonLocal, dim=8)},
    "labels": {"label_weight": 0.7, "views": 2, "class_probability": LM},
    "labels_in_parts": {"label_weight": 0.7, "views": 2, "class_probability": LM, "encode_at_once": 2},
    "labels_class_members": {
        "label_weight": 0.7,
        "image_encoder": GlobalPatches,
        "similarity": RegionsAndGlobal,
        "correction_images": "class",
        "class_probability": LM,
        "views": 2,
    },
}
OF_BATCH = ("views", "encode_at_once")


class MeanOfTokens(SentenceEncoder):
    """Mean embedding of the tokens: no dropout."""

    def __init__(self, has_masked_language_head: bool) -> None:
        super().__init__()
        self.dim, self.has_masked_language_head = 8, has_masked_language_head
        self.embedding = nn.Embedding(11, 8)

    @property
    def transformer(self) -> nn.Module:
        return self.embedding

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        return self.embedding(tokens).mean(1)

    def masked_language_loss(self, tokens: Tensor, lengths: Tensor, labels: Tensor, places: Tensor) -> Tensor:
        logits = self(tokens, lengths)[:, None] @ self.embedding.weight.T
        at = logits.expand(*labels.shape, -1).flatten(0, 1)[places]
        return cross_entropy(at, labels.flatten()[places], reduction="none")

    def config(self) -> dict[str, Any]:
        return {}


def build(name: str) -> ImageTextModel:
    torch.manual_seed(3)
    options = {key: value for key, value in OBJECTIVES[name].items() if key not in OF_BATCH}
    similarity = options.pop("similarity", partial(LSENonLocal, dim=8))()
    encoder = MeanOfTokens("masked_language_weight" in options)
    # A copy: losses have parameters and a state.
    images = options.pop("image_encoder", LinearPatches)()
    model = ImageTextModel(images, encoder, similarity, **copy.deepcopy(options)).double()
    if model.label_weight:
        model.network.set_label_head(["a", "b", "c"])
        for parameter in model.network.label_head.parameters():  # type: ignore[union-attr]
            torch.nn.init.normal_(parameter)
    for table in (x for name, x in model.objective.named_buffers() if "is_seen" not in name):
        torch.nn.init.uniform_(table, 0.05, 0.1)
    for table in (x for name, x in model.objective.named_buffers() if "is_seen" in name):
        table[::2] = True
    return model


def batch(name: str) -> dict[str, Any]:
    """The whole batch: five images, nine sentences; studies and sentences repeat across the processes."""
    generator = torch.Generator().manual_seed(4)
    texts = torch.Generator().manual_seed(5)
    images, sentences, views = sum(IMAGES), sum(SENTENCES), OBJECTIVES[name].get("views", 1)
    labels = torch.randint(11, (sentences, 6), generator=generator)
    labels[torch.rand(sentences, 6, generator=generator, dtype=torch.float64) < 0.6] = -100
    ranking = torch.randn(sentences, 7, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    whole: dict[str, Any] = {
        "images": torch.rand(images * views, 3, 12, 8, generator=generator, dtype=torch.float64),
        "view_of": torch.arange(images).repeat(views),
        "lengths": torch.full((sentences,), 6),
        "image_index": torch.tensor([2, 0, 1, 0, 4, 4, 3, 4, 3]),  # every image has a sentence
        "sentence_id": torch.tensor([7, 3, 5, 5, 3, 9, 8, 7, 2]),
        "tokens": torch.randint(11, (10, 6), generator=generator)[[7, 3, 5, 5, 3, 9, 8, 7, 2]],
        "study_id": torch.tensor([50, 51, 52, 50, 53]),
        "image_key": torch.tensor([3, 0, 4, 2, 1]),
        "anchor": {
            "log_p": -20 * torch.rand(sentences, generator=generator, dtype=torch.float64),
            "rho": torch.rand(sentences, generator=generator, dtype=torch.float64),
            "class_id": torch.randint(6, (sentences,), generator=generator),
            "sentence_embedding": torch.randn(sentences, 7, generator=texts, dtype=torch.float64),
            "sentence_id": torch.tensor([7, 3, 5, 5, 3, 9, 8, 7, 2]),
            "sentence_ranking": torch.cat([ranking, ranking.new_zeros(sentences, 101)], dim=1),
            "sentence_posterior": torch.cat([ranking, ranking[:, :1] - 1], dim=1),
            "signs": torch.tensor(
                [[-1, 0], [1, 0], [0, 1], [1, -1], [0, 0], [-1, 1], [1, 0], [0, 1], [0, -1]]
            ),
        },
        "candidate": {
            "labels": torch.randint(-1, 2, (images, 14), generator=generator).double(),
            "text_embedding": torch.randn(images, 7, generator=generator, dtype=torch.float64),
            "image_classes": torch.randint(2, (images, 6), generator=generator).to(torch.uint8),
            "report_ranking": torch.randn(images, 7, generator=texts, dtype=torch.float64),
            "report_posterior": torch.randn(images, 7, generator=texts, dtype=torch.float64),
            "image_row": torch.tensor([50, 51, 52, 54, 53]),
            "states": torch.tensor([[1, 0], [0, 1], [0, math.nan], [1, -1], [0, 1]], dtype=torch.float64),
        },
    }
    if "correction_images" in OBJECTIVES[name]:
        whole |= {
            "view_of": torch.arange(images),
            "has_others": torch.tensor([True, False, True, True, False]),
        }
    if "label_weight" in OBJECTIVES[name]:  # the second process has no labelled entry
        nan = float("nan")
        rows = [[1.0, 0.0, nan], [nan, nan, 1.0], [0.0, 1.0, nan], [nan] * 3, [nan] * 3]
        whole["labels"] = torch.tensor(rows, dtype=torch.float64)
    if "encode_at_once" in OBJECTIVES[name]:
        whole["encode_at_once"] = OBJECTIVES[name]["encode_at_once"]
    if "masked_language_weight" in OBJECTIVES[name]:
        whole |= {"masked_tokens": whole["tokens"].roll(1, 0), "masked_labels": labels}
    objective = build(name).objective
    requires = (*objective.requires_of_sentences, *objective.requires_of_images)
    for kind in ("anchor", "candidate"):
        whole[kind] = {field: values for field, values in whole[kind].items() if field in requires}
    return whole


def part_of(whole: dict[str, Any], rank: int) -> dict[str, Any]:
    """The batch that the rank's loader would serve: its images with all their views, and positions among them."""
    first = sum(IMAGES[:rank])
    own = torch.arange(first, first + IMAGES[rank])
    row = slice(sum(SENTENCES[:rank]), sum(SENTENCES[: rank + 1]))
    of_sentences = ("tokens", "lengths", "image_index", "sentence_id", "masked_tokens", "masked_labels")
    part = {key: whole[key][row] if key in of_sentences else whole[key] for key in whole}
    views = len(whole["images"]) // sum(IMAGES)
    part["images"] = torch.cat([whole["images"][own + view * sum(IMAGES)] for view in range(views)])
    part["view_of"] = torch.arange(IMAGES[rank]).repeat(len(whole["view_of"]) // sum(IMAGES))
    if "has_others" in whole:
        part["has_others"] = whole["has_others"][own]
    if "labels" in whole:
        part["labels"] = whole["labels"][own]
    part["image_index"] = part["image_index"] - first
    part["study_id"], part["image_key"] = whole["study_id"][own], whole["image_key"][own]
    part["anchor"] = {key: values[row] for key, values in whole["anchor"].items()}
    part["candidate"] = {key: values[own] for key, values in whole["candidate"].items()}
    return part


def in_pieces(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with what the loader says of its sentences: of equal ones the first is encoded."""
    most = 2 if "encode_at_once" in batch else None
    ids, lengths = batch["sentence_id"].tolist(), batch["lengths"]
    first = torch.tensor([place for place, sentence in enumerate(ids) if ids.index(sentence) == place])
    pieces = [(first[some], longest) for some, longest in pieces_by_length(lengths[first].tolist(), most)]
    rows = rows_of(pieces)
    row_of_sentence = torch.tensor([rows[ids.index(sentence)] for sentence in ids])
    batch = {**batch, "by_length": pieces, "row_of_sentence": row_of_sentence}
    if "masked_labels" in batch:
        every, labels = pieces_by_length(lengths.tolist(), most), batch["masked_labels"]
        batch["masked_by_length"] = [
            (some, longest, masked_places(labels[some, :longest])) for some, longest in every
        ]
    return batch


def step(model: ImageTextModel, batch: dict[str, Any], world: int = 1) -> dict[str, Tensor]:
    """Parameters and buffers after one step of the optimiser; gradients are averaged as by DistributedDataParallel."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss, _, _ = model._losses(move_data_to_device(in_pieces(batch), model.device), step=5)
    loss.backward()
    for parameter in model.parameters():
        if world > 1 and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world)
    gradients = {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    buffers = dict(model.objective.named_buffers(prefix="objective"))
    return {**gradients, **{name: p.detach() for name, p in model.named_parameters()}, **buffers}


def process(rank: int, folder: Path, small_set: Path, small_bert: Path) -> None:
    """One of two processes. They run everything that needs two, because their start takes longer than the rest."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    for name in OBJECTIVES:
        found = step(build(name), part_of(batch(name), rank), world=2)
        if rank == 0:
            torch.save(found, folder / f"{name}.pt")
    classifier.steps_of_two_processes(rank, folder)
    unimodal.steps_of_two_processes(rank, folder)
    distributed.gather_in_two_processes(rank, folder)
    views.steps_of_two_processes(rank, folder)
    sentences.steps_of_two_processes(rank, folder)
    of_two = image_text.validation_loss(folder, small_bert, small_set, devices=2, strategy="ddp")
    if rank == 0:
        (folder / "validation_loss").write_text(repr(of_two))
    machines.find(rank, folder, small_set, small_bert)
    image_text.unused_text_parameters(folder, small_bert, small_set, steps=1, devices=2, strategy="ddp")
    dist.destroy_process_group()


def resumed_process(rank: int, folder: Path, embedded_set: Path, small_bert: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    resuming.in_two_processes(folder, embedded_set, small_bert)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_two_processes(small_set: Path, small_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what two processes found."""
    folder = tmp_path_factory.mktemp("processes")
    in_processes(2, process, folder, small_set, small_bert)
    return folder


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_is_that_of_one_process(of_two_processes, name):
    found = torch.load(of_two_processes / f"{name}.pt", weights_only=True)
    expected = step(build(name), batch(name))
    assert found.keys() == expected.keys()
    assert any(name.endswith("grad") and expected[name].abs().max() > 1e-4 for name in expected)
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-10, atol=1e-12, msg=f"{name}: {key}")


def test_a_classifiers_step_equals_one_processs(of_two_processes):
    classifier.assert_steps_are_those_of_one_process(of_two_processes)


def test_a_step_of_images_equals_one_processs(of_two_processes):
    unimodal.assert_steps_are_those_of_one_process(of_two_processes)


def test_a_step_of_sentences_equals_one_processs(of_two_processes):
    sentences.assert_steps_are_those_of_one_process(of_two_processes)


def test_the_validation_loss_is_that_of_one_process(of_two_processes, small_bert, small_set, tmp_path):
    found = float((of_two_processes / "validation_loss").read_text())
    assert found == pytest.approx(image_text.validation_loss(tmp_path, small_bert, small_set), rel=1e-6)


def test_unused_text_parameters_keep_no_process_waiting(of_two_processes, small_bert, small_set):
    """And one process continues the run."""
    image_text.unused_text_parameters(of_two_processes, small_bert, small_set, steps=2)


def test_a_stale_copy_on_a_second_machine_is_refused(of_two_processes, small_set, small_bert):
    """And of two processes on one machine the first alone looks at the set."""
    machines.check(of_two_processes, small_set, small_bert)


@pytest.mark.slow
def test_a_killed_run_ends_as_the_whole_one(embedded_set, small_bert, tmp_path):
    in_processes(2, resumed_process, tmp_path, embedded_set, small_bert)
    resuming.assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_a_gather_has_the_gradient_of_one_process(of_two_processes):
    distributed.assert_gradients_are_those_of_one_process(of_two_processes)


def test_steps_of_views_equal_one_processs(of_two_processes):
    views.assert_steps_are_those_of_one_process(of_two_processes)


def test_the_objectives_differ():
    """Each option changes the step: none is accepted and ignored."""
    plain = step(build("infonce"), batch("infonce"))["network.image_encoder.map.weight.grad"]
    same = ("infonce", "lse", "non_local", "encoded_in_parts", "two_views", "three_views_reweight")
    for name in OBJECTIVES:
        if name not in same:
            found = step(build(name), batch(name))["network.image_encoder.map.weight.grad"]
            assert (found - plain).abs().max() > 1e-6, name
    for names in (("dcl_lm", "encoded_in_parts"), ("labels", "labels_in_parts")):
        whole, in_parts = (
            step(build(name), batch(name))["network.image_encoder.map.weight.grad"] for name in names
        )
        torch.testing.assert_close(in_parts, whole, rtol=1e-10, atol=1e-12)
