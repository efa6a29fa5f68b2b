"""The examples of docs/own_loop.md, run as they stand with small models of the libraries."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from torch.nn.functional import normalize
from transformers import CLIPConfig, CLIPModel

PAGE = Path(__file__).resolve().parents[2] / "docs/own_loop.md"
LOG_P = torch.tensor([-0.5, -2.0, -8.0, -30.0])
SIDE, LENGTH, VOCABULARY = 32, 12, 60


def example(title: str) -> dict[str, Any]:
    """The names that the code of a section defines."""
    section = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    text = next(part for part in section if part.startswith(title))
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(code.splitlines()) <= 40
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def texts() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(1, VOCABULARY - 2, (len(LOG_P), LENGTH), generator=generator)
    found[:, -1] = VOCABULARY - 1
    return found


@pytest.fixture
def clip() -> Any:
    torch.manual_seed(0)
    vision = {"layers": 2, "width": 32, "head_width": 16, "patch_size": 16, "image_size": SIDE}
    text = {"context_length": LENGTH, "vocab_size": VOCABULARY, "width": 32, "heads": 2, "layers": 2}
    return open_clip.CLIP(16, vision, text)


def test_the_loss_is_clip_loss_without_eta(clip) -> None:
    names = example("open_clip")
    generator = torch.Generator().manual_seed(1)
    image, text = (normalize(torch.randn(4, 16, generator=generator), dim=-1) for _ in range(2))
    scale = torch.tensor(14.0)
    expected = open_clip.ClipLoss()(image, text, scale)
    corrected = names["debiased_clip_loss"](image, text, scale, LOG_P)
    names["eta_of"].a = 0.0
    torch.testing.assert_close(names["debiased_clip_loss"](image, text, scale, LOG_P), expected)
    assert corrected != expected


def test_a_loop_of_open_clip_learns(clip) -> None:
    names = example("open_clip")
    images = torch.rand(len(LOG_P), 3, SIDE, SIDE)
    losses = list(names["train"](clip, [(images, texts(), LOG_P)] * 12, 1e-3))
    assert losses[-1] < losses[0] / 2
    with torch.no_grad():
        clip.logit_scale.fill_(7.0)
    list(names["train"](clip, [(images, texts(), LOG_P)], 1e-3))
    assert clip.logit_scale.exp().item() == pytest.approx(100)


def test_a_loop_of_transformers_learns() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {**sizes, "image_size": SIDE, "patch_size": 16}
    text = {
        **sizes,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
        "eos_token_id": VOCABULARY - 1,
        "bos_token_id": 0,
    }
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    images = torch.randn(len(LOG_P), 3, SIDE, SIDE)
    batches = [{"pixel_values": images, "input_ids": texts(), "log_p": LOG_P} for _ in range(40)]
    losses = list(example("transformers")["train"](model, batches, 1e-3))
    assert losses[-1] < losses[0] / 2
    with torch.no_grad():
        model.logit_scale.fill_(7.0)
    list(example("transformers")["train"](model, [{**batches[0], "log_p": LOG_P}], 1e-3))
    assert model.logit_scale.exp().item() == pytest.approx(100)
