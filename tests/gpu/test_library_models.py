"""Encoders and language models of transformers and timm on the device, against float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from medclip_dcl import load
from medclip_dcl.networks import TimmRegions, TransformersRegions, TransformersSentences
from medclip_dcl.networks.image_text import pad_tokens
from medclip_dcl.networks.language_model import load_language_model
from medclip_dcl.scoring import pseudo_log_likelihood
from tests.dual_encoders import TEXTS, grey_image, write_dual_encoder
from tests.models.test_lora import build
from tests.models.test_resuming import Kill, Killed, train
from tests.networks import test_pretrained_regions as of_transformers
from tests.networks import test_timm_regions as of_timm
from tests.program import verb
from tests.scoring import families
from tests.text_models import FAMILIES, write_text_model

convert = verb("convert")

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (0.03, 0.1)}
"""Relative error of outputs and of the whole gradient (choice)."""
ON_CPU = torch.device("cpu")


def outputs_and_gradient(
    encoder: nn.Module, run: Callable[[torch.device], Tensor], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Without dropout."""
    encoder.to(device).eval().zero_grad()
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        found = run(device).float()
    (found * torch.linspace(-1, 1, found.numel(), device=device).view_as(found)).sum().backward()
    gradients = [p.grad.flatten().cpu() for p in encoder.parameters() if p.grad is not None]
    assert gradients
    return found.detach().cpu(), torch.cat(gradients)


def assert_alike(
    encoder: nn.Module, run: Callable[[torch.device], Tensor], device: torch.device, dtype: torch.dtype
) -> None:
    expected = outputs_and_gradient(encoder, run, ON_CPU, torch.float32)
    found = outputs_and_gradient(encoder, run, device, dtype)
    for a, b, tolerance in zip(found, expected, TOLERANCE[dtype], strict=True):
        assert (a - b).norm() < tolerance * b.norm()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", [*of_transformers.ARCHITECTURES, *of_timm.SMALL])
def test_regions_are_those_of_the_cpu(name, dtype, device, tmp_path):
    kind: Any = TransformersRegions
    if name in of_transformers.ARCHITECTURES:
        of_transformers.saved(name, tmp_path)
    else:
        of_timm.saved(name, tmp_path)
        kind = TimmRegions
    torch.manual_seed(4)
    encoder = kind(str(tmp_path), dim=5)
    side = 4 * encoder.stride if kind is TransformersRegions else of_timm.sides(encoder, name)[0]
    images = torch.rand(2, 3, side, side)
    assert_alike(encoder, lambda device: encoder(images.to(device)), device, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_sentences_are_those_of_the_cpu(name, dtype, device, tmp_path):
    torch.manual_seed(4)
    encoder = TransformersSentences(str(write_text_model(name, tmp_path)), dim=8)
    inputs = pad_tokens(encoder.tokenize(TEXTS))
    assert_alike(encoder, lambda device: encoder(*(x.to(device) for x in inputs)), device, dtype)


@pytest.mark.parametrize("family", [*families.MASKED, *families.CAUSAL])
def test_scores_are_those_of_the_cpu(family, device, tmp_path):
    folder = families.write(family, tmp_path)
    try:
        (AutoModelForMaskedLM if family in families.MASKED else AutoModelForCausalLM).from_pretrained(folder)
    except AttributeError as error:  # DeBERTa-v2's head without `legacy`, in 5.17
        pytest.skip(f"transformers {transformers.__version__} does not load what it saved ({error})")
    model, tokenizer = load_language_model(folder)
    expected, found = (
        pseudo_log_likelihood(model.to(place), tokenizer, families.TEXTS, token_budget=90)
        for place in (ON_CPU, device)
    )
    assert expected["log_p"].std() > 1
    pd.testing.assert_frame_equal(found, expected, rtol=1e-4)


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_a_converted_model_gives_the_cpus_values(family, device, tmp_path):
    convert([str(write_dual_encoder(family, tmp_path / "source")), "--output", str(tmp_path / "output")])
    of_cpu, found = load(tmp_path / "output"), load(tmp_path / "output", device)
    for image in (grey_image(), grey_image(50)):
        for of_model in (
            lambda model, image=image: model.similarity([image], TEXTS),
            lambda model, image=image: model.heat_map(image, TEXTS[0]),  # NaN outside the middle square
        ):
            a, b = of_model(found), of_model(of_cpu)
            assert np.nanstd(b) > 1e-4
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


def test_killed_run_with_adapters_ends_as_the_whole_one(
    device, accelerator, small_set, small_bert, tmp_path, request
):
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    options = {"accelerator": accelerator, "devices": 1, "max_epochs": 2, "deterministic": "warn"}
    train(tmp_path / "whole", *build(small_set, small_bert), **options)
    with pytest.raises(Killed):
        train(tmp_path / "killed", *build(small_set, small_bert), Kill("on_train_batch_end", 1, 1), **options)
    train(tmp_path / "killed", *build(small_set, small_bert), **options)
    whole, killed = (
        torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for name in ("whole", "killed")
    )
    assert any(".lora_B." in name for name in whole) and whole.keys() == killed.keys()
    for name, value in whole.items():
        torch.testing.assert_close(killed[name], value, rtol=1e-2, atol=1e-4, msg=name)
