"""ImageTextModel in two processes has the gradient of one process with the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from medclip_dcl.encoders.image import RegionEncoder
from medclip_dcl.encoders.text import SentenceEncoder
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.objectives import LanguageModelClassProbability
from medclip_dcl.similarity import LSENonLocal

IMAGES, SENTENCES = (3, 2), (4, 5)


class LinearRegions(RegionEncoder):
    """Patches of 4 x 4 pixels, mapped linearly: no BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.dim, self.stride = 8, 4
        self.map = nn.Conv2d(3, 8, kernel_size=4, stride=4)

    def forward(self, images: Tensor) -> Tensor:
        return self.map(images)

    def config(self) -> dict[str, Any]:
        return {}


class MeanOfTokens(SentenceEncoder):
    """Mean embedding of the tokens: no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dim = 8
        self.embedding = nn.Embedding(11, 8)

    @property
    def transformer(self) -> nn.Module:
        return self.embedding

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        return self.embedding(tokens).mean(1)

    def config(self) -> dict[str, Any]:
        return {}


def build(image_to_text: float) -> ImageTextModel:
    torch.manual_seed(3)
    rule = LanguageModelClassProbability(a=0.25, k=0.1)
    parts = (LinearRegions(), MeanOfTokens(), LSENonLocal(dim=8), rule)
    return ImageTextModel(*parts, image_to_text=image_to_text).double()


def batch() -> dict[str, Any]:
    torch.manual_seed(4)
    positives = torch.tensor([2, 0, 1, 0, 1, 1, 0, 1, 0])  # every image has a sentence
    return {
        "images": torch.rand(sum(IMAGES), 3, 12, 8, dtype=torch.float64),
        "tokens": torch.randint(11, (sum(SENTENCES), 6)),
        "lengths": torch.full((sum(SENTENCES),), 6),
        "image_index": positives,
        "anchor": {"log_p": -20 * torch.rand(sum(SENTENCES), dtype=torch.float64)},
    }


def part_of(whole: dict[str, Any], rank: int) -> dict[str, Any]:
    """What the rank's loader would serve: its images, and positions among them."""
    image = slice(sum(IMAGES[:rank]), sum(IMAGES[: rank + 1]))
    row = slice(sum(SENTENCES[:rank]), sum(SENTENCES[: rank + 1]))
    mine = {name: whole[name][row] for name in ("tokens", "lengths", "image_index")}
    return {**mine, "images": whole["images"][image], "anchor": {"log_p": whole["anchor"]["log_p"][row]}}


def process(rank: int, folder: str, image_to_text: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    model = build(image_to_text)
    loss, _, _ = model._losses(part_of(batch(), rank))
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(2)  # what DistributedDataParallel does
    if rank == 0:
        torch.save({name: p.grad for name, p in model.named_parameters()}, Path(folder) / "gradients.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("image_to_text", [0.0, 0.3])
def test_gradients_agree(tmp_path, image_to_text):
    mp.spawn(process, (str(tmp_path), image_to_text), nprocs=2)
    found = torch.load(tmp_path / "gradients.pt", weights_only=True)
    model, whole = build(image_to_text), batch()
    # In the whole batch the second rank's positives stand behind the first rank's images.
    second = torch.arange(sum(SENTENCES)) >= SENTENCES[0]
    whole["image_index"] = whole["image_index"] + IMAGES[0] * second
    loss, _, _ = model._losses(whole)
    loss.backward()
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)
