"""The estimate with which `make demo` starts counts the steps that its configuration makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from medclip_dcl import demo_time
from medclip_dcl.command_line import in_words

ROOT = Path(__file__).resolve().parents[1]
TRAINING_IMAGES = 1952


def test_it_counts_the_steps_of_the_demo_and_times_its_batch():
    demo = yaml.safe_load((ROOT / "configs/demo.yaml").read_text())
    data, image = demo["data"]["init_args"], demo["model"]["init_args"]["image_encoder"]["init_args"]
    language_model = yaml.safe_load((ROOT / "configs/language_model_small.yaml").read_text())
    text = language_model["model"]["init_args"]["architecture"]
    steps = TRAINING_IMAGES // data["batch_size"] * demo["trainer"]["max_epochs"]
    assert steps == demo_time.STEPS
    assert (data["batch_size"], data["crop_size"]) == (demo_time._IMAGES, demo_time._SIDE)
    assert (image["depth"], image["stride"], image["width"]) == (18, 16, 32)
    assert (text["layers"], text["attention_heads"]) == (2, 2)
    assert demo["model"]["init_args"]["text_encoder"]["init_args"]["dropout"] == 0


@pytest.mark.parametrize(
    ("precision", "whole"),
    [
        ("32-true", 0.2 * (demo_time.STEPS + demo_time.OTHER_STAGES)),
        ("bf16-mixed", 0.1 * demo_time.STEPS + 0.2 * demo_time.OTHER_STAGES),
    ],
)
def test_it_says_a_duration(precision, whole, monkeypatch, capsys):
    monkeypatch.setattr(demo_time, "best_precision", lambda accelerator: precision)
    monkeypatch.setattr(demo_time, "step_seconds", {"32-true": 0.2, "bf16-mixed": 0.1}.__getitem__)
    demo_time.main()
    assert capsys.readouterr().out.startswith(f"make demo: about {in_words(whole)} on this machine")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_times_a_step(precision, monkeypatch):
    monkeypatch.setattr(demo_time, "_TIMED", 1)
    assert 0 < demo_time.step_seconds(precision) < 60
