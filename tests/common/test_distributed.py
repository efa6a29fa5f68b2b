"""The gather in one process; tests/models/test_two_processes.py has the processes in which the rest of it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from medclip_dcl.common.distributed import gather_objects, gather_with_grad, global_mean, local_offset
from medclip_dcl.objectives import contrastive_loss

COUNTS = (3, 5)
SENTENCES = (7, 4)


def test_outside_a_process_group_nothing_changes():
    rows = torch.randn(3, 2)
    assert gather_with_grad(rows) is rows
    assert gather_objects("a") == ["a"]
    assert local_offset(4) == 0
    assert global_mean(torch.tensor([1.0, 3.0])).item() == 2.0


def _data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(sum(COUNTS), 4, dtype=torch.float64, generator=generator)
    sentences = torch.randn(sum(SENTENCES), 4, dtype=torch.float64, generator=generator)
    # Positives of each rank's sentences are images of the same rank.
    owner = torch.cat(
        [torch.arange(SENTENCES[0]) % COUNTS[0], COUNTS[0] + torch.arange(SENTENCES[1]) % COUNTS[1]]
    )
    return images, sentences, owner


def _model() -> torch.nn.ParameterDict:
    generator = torch.Generator().manual_seed(6)
    return torch.nn.ParameterDict(
        {
            "image": torch.randn(4, 3, dtype=torch.float64, generator=generator),
            "text": torch.randn(4, 3, dtype=torch.float64, generator=generator),
        }
    )


def gather_in_two_processes(rank: int, folder: Path) -> None:
    """Check the gathers inside a process group of two; rank 0 saves the gradients of both in the folder."""
    images, sentences, owner = _data()
    first_image, first_sentence = sum(COUNTS[:rank]), sum(SENTENCES[:rank])
    mine = images[first_image : first_image + COUNTS[rank]]
    rows = slice(first_sentence, first_sentence + SENTENCES[rank])
    model = _model()
    offset = local_offset(COUNTS[rank])
    assert offset == first_image
    candidates = gather_with_grad(mine @ model["image"])
    logits = sentences[rows] @ model["text"] @ candidates.T
    positives = owner[rows] - first_image + offset
    loss = global_mean(
        contrastive_loss(logits, positives, class_probability=0.1, floor=-14.0, reduction="none")
    )
    loss.backward()
    for parameter in model.values():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2  # what DistributedDataParallel does
    assert gather_objects(rank) == [0, 1]
    assert gather_objects([rank] * rank) == [[], [1]]
    squared = (gather_with_grad(leaf := torch.ones(2, requires_grad=True)) ** 2).sum()
    (first,) = torch.autograd.grad(squared, leaf, create_graph=True)
    for unsupported in (
        first.sum().backward,
        lambda: torch.func.grad(lambda rows: gather_with_grad(rows).sum())(torch.ones(2)),
        lambda: torch.func.vmap(gather_with_grad)(torch.ones(2, 1)),
    ):
        with pytest.raises(RuntimeError, match="once_differentiable|setup_context"):
            unsupported()
    if rank == 0:
        torch.save({name: p.grad for name, p in model.items()}, folder / "gathered.pt")


def assert_gradients_are_those_of_one_process(folder: Path) -> None:
    found = torch.load(folder / "gathered.pt", weights_only=True)
    images, sentences, owner = _data()
    model = _model()
    logits = sentences @ model["text"] @ (images @ model["image"]).T
    contrastive_loss(logits, owner, class_probability=0.1, floor=-14.0).backward()
    for name, parameter in model.items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-12)
