"""Runs on the device: evaluation against the CPU; training that is stopped and continued."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from medclip_dcl import load
from medclip_dcl.command.cli import main
from medclip_dcl.common.devices import device_name
from tests.command.small_runs import small
from tests.models.test_resuming import CASES, Case, Kill, run
from tests.small import PatchRegions
from tests.unimodal.test_evaluation import words as unimodal_words

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("undrawn")]

KINDS = ("image_text", "unimodal")
WITHOUT_GRADIENT = ("image_encoder.map.0.bias", "attention.self.key.bias")
"""Parameters that change no output, before a BatchNorm and in a softmax: AdamW makes steps of their rounding errors."""


@pytest.fixture(scope="module")
def trained(small_set: Path, small_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of each kind, trained on the CPU."""
    folder = tmp_path_factory.mktemp("trained")
    on_cpu = ["--trainer.accelerator", "cpu", "--trainer.precision", "32-true"]
    main(["fit", *small(folder / "image_text", small_set, small_bert, *on_cpu, resnet=True)])
    main(["fit", *unimodal_words(folder / "unimodal", *on_cpu)])
    return folder


def evaluated(
    trained: Path, folder: Path, accelerator: str
) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
    """Metrics of each evaluation, and its predictions, of a copy of the run."""
    shutil.copytree(trained, folder)
    options = ["--run_folder", str(folder), "--trainer.accelerator", accelerator, "--untrained", "false"]
    main(["test", "--config", str(trained / "config.yaml"), *options])
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    tables = {file.stem: pd.read_parquet(file) for file in (folder / "predictions").glob("*.parquet")}
    return results["metrics"], tables


def assert_close(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_close(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert found == pytest.approx(expected, abs=1e-4), where
    else:
        assert found == (expected if expected is None else pytest.approx(expected, abs=1e-4)), where


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_is_that_of_the_cpu(kind, accelerator, trained, tmp_path):
    expected, of_cpu = evaluated(trained / kind, tmp_path / "cpu", "cpu")
    found, of_device = evaluated(trained / kind, tmp_path / "device", accelerator)
    assert_close(found, expected, kind)
    assert of_device.keys() == of_cpu.keys() and len(of_cpu)
    for name in of_cpu.keys() - {"embedding_map", "unimodal_map"}:  # t-SNE multiplies the last digits
        pd.testing.assert_frame_equal(of_device[name], of_cpu[name], rtol=0, atol=1e-4, obj=name)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("plain", "32-true"),
        ("all_options", "bf16-mixed"),
        ("gradient_cache", "16-mixed"),
        ("language_model", "16-mixed"),
    ],
)
def test_killed_run_ends_as_the_whole_one(
    name, precision, device, accelerator, embedded_set, small_bert, tmp_path, request
):
    """Bit for bit but for operations that sum in any order on a GPU; a CPU takes bfloat16 for mixed float16."""
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    options = {"accelerator": accelerator, "devices": 1, "precision": precision, "deterministic": "warn"}
    options |= {"gradient_clip_val": 1.0}
    kills = [Kill("on_train_batch_end", 0, 1, saved_until=0), Kill("on_validation_batch_end", 1, 0)]
    for folder, stops in ((tmp_path / "whole", []), (tmp_path / "killed", kills)):
        run(CASES[name], folder, embedded_set, small_bert, *stops, **options)
    rows = [pd.read_csv(tmp_path / x / "metrics.csv").drop(columns="time") for x in ("whole", "killed")]
    speeds = [key for key in map(str, rows[0]) if "per_second" in key or "data_wait" in key]
    whole, killed = (table.drop(columns=speeds) for table in rows)
    pd.testing.assert_frame_equal(killed[whole.columns], whole, rtol=1e-3, atol=1e-5)
    states = [
        torch.load(tmp_path / x / "checkpoints/last.ckpt", weights_only=True) for x in ("whole", "killed")
    ]
    assert states[0]["optimizer_states"][0]["state"][0]["exp_avg"].device.type == device.type
    for key, value in states[0]["state_dict"].items():
        if key.endswith(WITHOUT_GRADIENT):
            continue
        torch.testing.assert_close(states[1]["state_dict"][key], value, rtol=1e-2, atol=1e-4, msg=key)


def test_run_of_device_loads_on_the_cpu(device, accelerator, small_set, small_bert, tmp_path):
    options = [
        "--trainer.accelerator",
        accelerator,
        "--trainer.precision",
        "bf16-mixed",
        "--ema_decay",
        "0.5",
    ]
    main(["fit", *small(tmp_path, small_set, small_bert, *options)])
    losses = pd.read_csv(tmp_path / "metrics.csv")["train/loss"].dropna()
    assert len(losses) == 6
    fit = json.loads((tmp_path / "fit.json").read_text(encoding="utf-8"))
    assert fit["device"] == device_name(device)
    model = load(tmp_path)
    assert {p.device.type for p in model.network.parameters()} == {"cpu"}
    assert abs(model.embed_texts("No pneumothorax.")).max() > 0.05


def test_unimodal_models_are_trained_as_on_the_cpu(accelerator, trained, tmp_path):
    main(
        [
            "fit",
            *unimodal_words(tmp_path, "--trainer.accelerator", accelerator, "--trainer.precision", "32-true"),
        ]
    )
    expected, found = (pd.read_csv(x / "metrics.csv") for x in (trained / "unimodal", tmp_path))
    pd.testing.assert_series_equal(found["train/loss"], expected["train/loss"], rtol=1e-3)


def test_a_compiled_run_is_the_run(device, accelerator, embedded_set, small_bert, tmp_path, monkeypatch):
    if device.type == "cpu":
        pytest.skip("tests/models/test_compiled.py compiles for the CPU")
    monkeypatch.setattr("tests.models.test_resuming.PatchRegions", lambda dropout: PatchRegions())
    options = {"accelerator": accelerator, "devices": 1, "precision": "32-true"}
    for name, is_compiled in (("eager", False), ("compiled", True)):
        case = Case({"compile": is_compiled}, trainer={"max_epochs": 1}, text={"dropout": 0.0})
        run(case, tmp_path / name, embedded_set, small_bert, **options)
    eager, compiled = (pd.read_csv(tmp_path / x / "metrics.csv") for x in ("eager", "compiled"))
    pd.testing.assert_series_equal(compiled["train/loss"], eager["train/loss"], rtol=1e-3)
