"""The estimate with which `make demo` starts counts the steps that its configuration makes."""

from __future__ import annotations

from pathlib import Path

import yaml

from medclip_dcl import demo_time

ROOT = Path(__file__).resolve().parents[1]
TRAINING_IMAGES = 1952


def test_it_counts_the_steps_of_the_demo_and_times_its_batch():
    demo = yaml.safe_load((ROOT / "configs/demo.yaml").read_text())
    data, image = demo["data"]["init_args"], demo["model"]["init_args"]["image_encoder"]["init_args"]
    steps = TRAINING_IMAGES // data["batch_size"] * demo["trainer"]["max_epochs"]
    assert steps == demo_time.STEPS
    assert (data["batch_size"], data["crop_size"]) == (demo_time._IMAGES, demo_time._SIDE)
    assert (image["depth"], image["stride"], image["width"]) == (18, 16, 32)


def test_it_says_a_duration(monkeypatch, capsys):
    monkeypatch.setattr(demo_time, "step_seconds", lambda: 0.1)
    demo_time.main()
    assert capsys.readouterr().out.startswith("make demo: about 4 min on this machine")


def test_it_times_a_step(monkeypatch):
    monkeypatch.setattr(demo_time, "_TIMED", 1)
    assert 0 < demo_time.step_seconds() < 60
