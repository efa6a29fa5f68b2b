"""The program runs with the oldest versions that setup.cfg allows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.command.small_runs import small

ROOT = Path(__file__).resolve().parents[2]
PRESENT = ("torch", "torchvision")
"""Several GB: the installed versions, whose bounds setup.cfg states for its users."""


def lower_bounds() -> dict[str, str]:
    """Package with its extras -> the oldest version that setup.cfg allows."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].splitlines()
    return dict(re.split(">=", line.split(",")[0]) for line in lines if line and not line.startswith("#"))


@pytest.mark.slow
def test_it_runs_with_the_oldest_versions(tmp_path, small_set, small_bert):
    bounds = {name: oldest for name, oldest in lower_bounds().items() if name not in PRESENT}
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    python = tmp_path / "bin/python"
    (site,) = tmp_path.glob("lib/python*/site-packages")
    # After its own packages: torch, and what the tests need.
    (site / "present.pth").write_text(sysconfig.get_paths()["purelib"])
    pins = [f"{name}=={oldest}" for name, oldest in bounds.items()]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *pins], check=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [python, *arguments], env=environment, capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    names = [name.partition("[")[0] for name in bounds]
    found = run("-c", f"from importlib.metadata import version\nfor x in {names}: print(version(x))").split()
    assert all(map(str.startswith, found, bounds.values())), dict(zip(names, found, strict=True))
    demo = str(ROOT / "configs/demo.yaml")
    one_batch = ("--trainer.limit_test_batches", "1")
    shown = run("-m", "medclip_dcl", "fit", "--config", demo, *one_batch, "--print_config")
    assert "limit_test_batches: 1\n" in shown and "monitor: validate/loss" in shown
    run("-m", "medclip_dcl", "fit", *small(tmp_path / "run", small_set, small_bert, resnet=True))
    run("-m", "medclip_dcl", "test", "--config", str(tmp_path / "run/config.yaml"))
    run("-m", "medclip_dcl", "report", str(tmp_path / "run"))
    assert (tmp_path / "run/report.html").is_file()
    # Of this project's parts, and of transformers' encoders, whose configurations have other entries.
    script = (
        "import sys, medclip_dcl; print([medclip_dcl.load(x).network.fingerprint() for x in sys.argv[1:]])"
    )
    folders = [str(tmp_path / "run"), str(_transformers_model(tmp_path))]
    here = subprocess.run([sys.executable, "-c", script, *folders], capture_output=True, text=True, cwd=ROOT)
    assert run("-c", script, *folders) == here.stdout


def _transformers_model(folder: Path) -> Path:
    from medclip_dcl.networks import TransformersRegions, TransformersSentences
    from medclip_dcl.networks.image_text import ImageTextNetwork
    from medclip_dcl.networks.similarity import GlobalCosine
    from tests.networks.test_pretrained_regions import ARCHITECTURES
    from tests.text_models import write_text_model

    images = TransformersRegions(architecture=ARCHITECTURES["siglip_vision_model"], dim=8)
    texts = TransformersSentences(str(write_text_model("modernbert", folder / "texts")), dim=8)
    ImageTextNetwork(images, texts, GlobalCosine(), image_size=24).save_pretrained(folder / "model")
    return folder / "model"
