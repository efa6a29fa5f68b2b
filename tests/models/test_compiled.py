"""torch.compile of the encoders: equal losses, few compilations, checkpoints as without it."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch._dynamo.utils import counters

from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.networks.masked_language import MaskedLanguageHead
from tests.models.test_resuming import Case, Kill, build, run, train
from tests.small import PatchRegions

WITHOUT_DROPOUT = {"masked_language_head": True, "dropout": 0.0}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is compiled before; without a C++ compiler the graphs run as they are.

    Checks of shapes, which torch.compile cannot trace, are there in tests alone.
    """
    monkeypatch.setattr(MaskedLanguageHead, "forward", inspect.unwrap(MaskedLanguageHead.forward))
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    if shutil.which("g++") is None:
        real = torch.compile
        monkeypatch.setattr(torch, "compile", lambda *a, **b: real(*a, **{**b, "backend": "aot_eager"}))


def case(compiled: bool, **data: Any) -> Case:
    """Two or four sentences a step, some of which are alone in their piece."""
    return Case(
        {"masked_language_weight": 0.5, "compile": compiled},
        data={"batch_size": 4, "sentences": "all", **data},
        trainer={"max_epochs": 2},
        text=WITHOUT_DROPOUT,
    )


@pytest.mark.slow
@pytest.mark.parametrize("data", [{}, {"contrastive_batch": 8}], ids=["plain", "gradient cache"])
def test_a_compiled_run_is_the_run(data, embedded_set, small_bert, tmp_path, monkeypatch):
    # Dropout would draw other numbers.
    monkeypatch.setattr("tests.models.test_resuming.PatchRegions", lambda dropout: PatchRegions())
    # Pieces of one sentence, too.
    monkeypatch.setattr("medclip_dcl.data.by_length._PASS", 1)
    run(case(False, **data), tmp_path / "eager", embedded_set, small_bert)
    assert not counters["stats"]
    run(case(True, **data), tmp_path / "compiled", embedded_set, small_bert)
    graphs = counters["stats"]["unique_graphs"]
    # Image encoder, transformer and head, and the latter two for one row; the recomputed BatchNorm of GradCache.
    assert 3 <= graphs <= 6
    eager, compiled = (pd.read_csv(tmp_path / x / "metrics.csv") for x in ("eager", "compiled"))
    for name in ("train/loss", "train/masked_language_loss", "validate/loss"):
        assert eager[name].notna().sum() >= 2
        pd.testing.assert_series_equal(compiled[name], eager[name], rtol=1e-4, obj=name)
    before, after = (
        torch.load(tmp_path / x / "checkpoints/last.ckpt", weights_only=True) for x in ("eager", "compiled")
    )
    assert after["state_dict"].keys() == before["state_dict"].keys()
    assert after["objective"] == before["objective"] and after["network"] == before["network"]
    model = ImageTextModel.load_from_checkpoint(tmp_path / "compiled/checkpoints/last.ckpt")
    assert not model.is_compiled
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
def test_a_compiled_run_resumes(embedded_set, small_bert, tmp_path):
    """Its losses up to rounding, with dropout: a graph is made for the shapes of the first step after a start."""
    compiled = Case({"compile": True}, trainer={"max_epochs": 2})
    run(compiled, tmp_path / "whole", embedded_set, small_bert)
    kill = Kill("on_train_batch_end", 1, 2, saved_until=1)
    run(compiled, tmp_path / "killed", embedded_set, small_bert, kill)
    whole, killed = (pd.read_csv(tmp_path / x / "metrics.csv") for x in ("whole", "killed"))
    for name in ("step", "train/loss", "validate/loss"):
        pd.testing.assert_series_equal(killed[name], whole[name], rtol=1e-4, obj=name)
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
def test_a_trained_model_runs_uncompiled(embedded_set, small_bert, tmp_path):
    model, data = build(case(True), embedded_set, small_bert)
    assert isinstance(model, ImageTextModel)
    train(tmp_path, model, data, max_epochs=1)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    for size in range(16, 16 * 12, 16):  # more than torch compiles
        model.network.image_encoder(torch.rand(2, 3, size, size))
    assert counters["stats"]["unique_graphs"] == graphs
