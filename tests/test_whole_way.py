"""The whole way by the README's commands at small size: on real chest X-rays, and on the phantom."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from medclip_dcl import load
from medclip_dcl.command.cli import main
from medclip_dcl.report.report import write_report
from tests.program import verb

pytestmark = pytest.mark.slow
write_phantom = verb("phantom")

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"


def go(source: Path, folder: Path) -> Path:
    """Preparation, language model, scores, (a, k), training, test and report; returns the run folder."""
    data, language_model, run = folder / "set", folder / "language_model_run", folder / "run"
    boxes = source / "MS_CXR_Local_Alignment_v1.0.0.json"
    verb("prepare mimic-cxr")(
        ["--source", str(source), "--output", str(data), "--ms_cxr", str(boxes), "--size", "64"]
        + ["--workers", "1"]
    )
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.log_every_n_steps", "1"]
    main(
        ["fit", "--config", str(CONFIGS / "language_model_small.yaml"), "--run_folder", str(language_model)]
        + ["--data.init_args.folder", str(data), "--trainer.max_epochs", "1"]
        + ["--model.init_args.warmup_steps", "2", *quiet]
    )
    model = language_model / "language_model"
    verb("score")([str(data), "--model", str(model)])
    fitted = data / "eta" / "class_probability.yaml"
    # SSD's values do not fit this little training.
    verb("eta")([str(data), "--a", "0.1", "--k", "0.03"])
    main(
        ["fit", "--config", str(CONFIGS / "demo.yaml"), "--config", str(CONFIGS / "objective/dcl_lm.yaml")]
        + ["--config", str(fitted), "--run_folder", str(run), "--data.init_args.folder", str(data)]
        + ["--model.init_args.text_encoder.init_args.pretrained", str(model)]
        + ["--data.init_args.image_size", "64", "--data.init_args.crop_size", "48"]
        + ["--model.init_args.warmup_steps", "1", "--trainer.max_epochs", "1"]
        + ["--trainer.check_val_every_n_epoch", "1", *quiet]
    )
    (run / "checkpoints/untrained.ckpt").unlink()  # one evaluation is enough
    main(["test", "--config", str(run / "config.yaml")])
    write_report(run)
    return run


@pytest.fixture(scope="module")
def real_run(real_data, tmp_path_factory) -> Path:
    return go(real_data / "real_cxr", tmp_path_factory.mktemp("real"))


def test_real_x_rays_are_evaluated_in_full(real_run):
    results = json.loads((real_run / "results.json").read_text())
    assert results["dataset"]["phantom"] is False
    assert results["counts"]["grounding"]["boxes"] == 138
    for name in ("cnr", "cnr_signed", "miou"):
        assert np.isfinite(results["metrics"]["grounding"][name])
    boxes = pd.read_parquet(real_run / "predictions/grounding.parquet")
    assert len(boxes) == 138 and boxes["miou"].between(0, 1).all()
    assert results["metrics"]["classification"]["auc"] is None
    notes = " ".join(results["notes"]["classification"])
    assert "Pneumonia: no AUC and accuracy from 5 positive and 0 negative cases" in notes
    html = (real_run / "report.html").read_text(encoding="utf-8")
    assert "patient data" in html and "phantom numbers are not patient numbers" not in html.lower()


def test_the_checkpoint_answers_about_a_real_image(real_run, real_data):
    model = load(real_run / "checkpoints/best.ckpt")
    image = sorted((real_data / "real_cxr/files").rglob("*.jpg"))[0]
    assert model.classify(image).shape == (1, 5)
    heat_map = model.heat_map(image, "There is no pleural effusion.")
    with Image.open(image) as opened:
        assert heat_map.shape == (opened.height, opened.width)


@pytest.fixture(scope="module")
def phantom_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("phantom")
    arguments = ["--output", str(folder / "raw"), "--studies", "160", "--seed", "1", "--size", "96"]
    arguments += ["--workers", "1"]
    write_phantom(arguments)
    return go(folder / "raw", folder)


def test_phantom_goes_same_way_with_its_truth(phantom_run):
    results = json.loads((phantom_run / "results.json").read_text())
    assert results["dataset"]["phantom"] is True
    assert results["metrics"]["classification"]["n_findings"] >= 1
    truth = pd.read_parquet(phantom_run / "class_probability.parquet")
    assert truth["rho"].between(0, 1).all() and truth["eta"].between(0, 0.3).all()
    html = (phantom_run / "report.html").read_text(encoding="utf-8").lower()
    assert "phantom numbers are not patient numbers" in html
