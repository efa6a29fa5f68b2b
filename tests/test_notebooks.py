"""Notebooks: each runs on a small phantom and a run of seconds, and is kept with its outputs."""

from __future__ import annotations

import base64
import io
import json
import logging
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from medclip_dcl import evaluate
from medclip_dcl.command.cli import main
from medclip_dcl.common.findings import CHEX5
from medclip_dcl.data.prepared import case_table, write_table
from medclip_dcl.metrics.calibration import CALIBRATION_FILE
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.report.draws import TestedRun
from medclip_dcl.studies.benchmark_page import place_of
from tests.command.small_runs import small
from tests.small import SENTENCES, platt_calibration

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ASK, ETA, OBJECTIVES, LABELS, FOLDER = (
    next(file for file in NOTEBOOKS if file.name.startswith(number))
    for number in ("01", "02", "03", "04", "05")
)
SHORT = ["--trainer.enable_progress_bar", "false", "--trainer.precision", "32-true"]
SHORT += ["--trainer.log_every_n_steps", "1", "--data.init_args.num_workers", "0"]
SHORT += ["--data.init_args.batch_size", "8"]
EVALUATIONS = [
    {"class_path": "medclip_dcl.evaluation.ZeroShotClassification"},
    {"class_path": "medclip_dcl.evaluation.Grounding", "init_args": {"examples": 0}},
    {"class_path": "medclip_dcl.evaluation.Retrieval"},
]
"""The demo's, without heat maps."""
MAX_LINES = 15
MAX_BYTES = 1_500_000


def cells(file: Path, kind: str) -> list[dict[str, Any]]:
    """Cells of a kind, "code" or "markdown", with their source as one text."""
    found = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in found if cell["cell_type"] == kind]


def execute(file: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """Run a notebook's code cells in one namespace, with the parameters after the cell that is tagged so."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for place, cell in enumerate(cells(file, "code")):
        exec(compile(cell["source"], f"{file.name}, code cell {place + 1}", "exec"), names)
        if "parameters" in cell["metadata"].get("tags", []):
            missing = parameters.keys() - names.keys()
            assert not missing, f"{file.name} has no parameter {missing}"
            names |= parameters
    return names


@pytest.fixture(scope="module")
def phantom(small_set, tmp_path_factory) -> Path:
    """`small_set` with 18 test images, all of them with a box, and an (a, k) of its scores."""
    folder = shutil.copytree(small_set, tmp_path_factory.mktemp("notebooks") / "set")
    images = pd.read_parquet(folder / "images.parquet")
    images["use"] = ["train"] * 18 + ["validate"] * 6 + ["grounding"] * 18
    images["official_split"] = images["use"].replace("grounding", "test")
    write_table(images, folder / "images.parquet", "images")
    cases = case_table(images, pd.read_parquet(folder / "labels.parquet"))
    write_table(cases, folder / "cases.parquet", "cases")
    boxes = pd.concat([pd.read_parquet(folder / "boxes.parquet").head(1)] * 18, ignore_index=True)
    boxes["dicom_id"] = images["dicom_id"].tail(18).to_numpy()
    boxes["category"] = np.resize(["Edema", "Pneumothorax", "Lung Opacity"], 18)
    boxes["phrase"] = np.resize(SENTENCES[:4], 18)
    write_table(boxes, folder / "boxes.parquet", "boxes")
    (folder / "eta").mkdir()
    rule = (ROOT / "configs/objective/dcl_lm.yaml").read_text(encoding="utf-8")
    (folder / "eta/class_probability.yaml").write_text(rule)
    return folder


@pytest.fixture(scope="module")
def run(phantom, small_bert, undrawn, tmp_path_factory) -> Path:
    """A tested and calibrated run of two steps."""
    run = tmp_path_factory.mktemp("runs") / "demo"
    short = ["--trainer.max_epochs", "1", "--trainer.callbacks", json.dumps(EVALUATIONS)]
    main(["fit", *small(run, phantom, small_bert, *short, resnet=True)])
    main(["test", "--config", str(run / "config.yaml")])
    network = ImageTextNetwork.from_pretrained(run / "checkpoints/best.ckpt")
    platt_calibration(network).write(run / CALIBRATION_FILE)
    return run


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch) -> None:
    """The working folder is empty: files of the checkout are out of reach, as with the wheel alone."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Figures are drawn into memory; what a notebook sets for its kernel does not outlive the test."""
    logger, backend = logging.getLogger("pytorch_lightning.utilities.rank_zero"), matplotlib.get_backend()
    level = logger.level
    plt.switch_backend("Agg")
    yield
    plt.close("all")
    plt.switch_backend(backend)
    logger.setLevel(level)


@pytest.mark.slow
def test_the_model_is_asked(run, phantom):
    found = execute(ASK, {"RUN": run, "DATA": phantom})
    assert found["similarity"].shape == (3, 3)
    scale = json.loads((run / CALIBRATION_FILE).read_text())["scale"]
    assert found["probabilities"].to_numpy() == pytest.approx(
        1 / (1 + np.exp(-(scale * found["scores"].to_numpy() / 0.5 - 1))), abs=1e-5
    )
    assert list(found["table"]["positive from"]) == list(CHEX5)
    # The original has 60 x 50 pixels, the prepared image 40 x 40.
    drawn, box = found["figure"].axes[1].patches[0], found["box"]
    assert drawn.get_xy() == pytest.approx((box["x"] * 40 / 50, box["y"] * 40 / 60))
    assert (drawn.get_width(), drawn.get_height()) == pytest.approx((box["w"] * 40 / 50, box["h"] * 40 / 60))


def test_eta_is_compared_with_the_truth(phantom):
    found = execute(ETA, {"DATA": phantom})
    sentences = found["sentences"]
    expected = np.minimum(0.2 * np.exp(0.35 * sentences["log_p"]), 0.3)
    assert sentences["η"].to_numpy() == pytest.approx(expected.to_numpy(), rel=1e-5)
    assert found["correlations"]["ρ"]["Spearman's correlation with log p"] == pytest.approx(-1)
    # At the true class probability the loss is that of true negatives.
    place = int(np.argmin(np.abs(found["etas"] - 0.2)))
    assert found["losses"][place] == pytest.approx(found["aim"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_objectives_are_compared(run, phantom, tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    folders = {"RUN": run, "DATA": phantom, "OUTPUT": tmp_path / "runs"}
    parameters = {**folders, "OBJECTIVES": ["infonce", "dcl_lm"]}
    small_images = ["--data.init_args.image_size", "48", "--data.init_args.crop_size", "32"]
    short = ["--trainer.max_epochs", "1", "--trainer.callbacks", json.dumps(EVALUATIONS), *SHORT]
    found = execute(OBJECTIVES, {**parameters, "SETTINGS": [*small_images, *short]})
    assert [name for name in found["rows"] if "−" in name] == ["start − infonce", "dcl_lm − infonce"]
    assert not [warned for warned in recwarn if "args parameter" in str(warned.message)]
    starts = json.loads((tmp_path / "runs/dcl_lm/initial_weights.json").read_text())
    assert str(run) in json.dumps(starts)


@pytest.mark.slow
def test_labels_are_few(run, phantom, tmp_path):
    folders = {"RUN": run, "DATA": phantom, "OUTPUT": tmp_path / "runs"}
    epochs = {"PROBE_EPOCHS": {0.5: 1}, "FINE_TUNING_EPOCHS": {0.5: 1}}
    found = execute(LABELS, {**folders, **epochs, "SETTINGS": SHORT})
    assert list(found["results"]["labelled images"]) == [8, 8, 8]
    _, probe, fine_tuned = found["results"]["AUC"]
    assert found["pairs"]["50% of the labels"]["AUC"] == pytest.approx(fine_tuned - probe)


@pytest.mark.slow
def test_a_folder_becomes_a_page(run, phantom, tmp_path, monkeypatch):
    monkeypatch.setattr("medclip_dcl.metrics.calibration.PLATT_PATIENTS", 2)
    found = execute(FOLDER, {"RUN": run, "DATA": phantom, "OUTPUT": tmp_path, "NIH": None, "EPOCHS": 2})
    assert "localisation/hit" in set(found["zero_shot"]["metric"])
    assert set(found["probe"]["metric"].str.split("/").str[0]) == {"classification"}
    assert list(found["scores"]["finding"]) == list(CHEX5)


@pytest.mark.slow
def test_evaluate_has_the_numbers_of_test_and_report(run, phantom):
    found = evaluate(run, phantom, prompts=CHEX5).set_index(["metric", "finding"])
    numbers = dict(zip(found.index, found[["value", "low", "high"]].to_numpy(), strict=True))
    tested = TestedRun(run).intervals
    assert len(tested) > 40
    for path, expected in tested.items():
        section, finding, metric = place_of(path).values()
        own = numbers[f"{section}/{metric}", finding]
        assert np.array_equal(own, np.array(expected[:3], dtype="float64"), equal_nan=True), path


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_have_short_cells_of_public_names(file):
    for cell in cells(file, "code"):
        assert len(cell["source"].splitlines()) <= MAX_LINES, cell["source"]
        assert not re.search(r"(?<![\w.])_[a-z]|\._[a-z]", cell["source"]), "public names alone"


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_kept_as_it_was_executed(file):
    assert file.stat().st_size < MAX_BYTES
    found = cells(file, "code")
    assert [cell["execution_count"] for cell in found] == list(range(1, len(found) + 1))
    assert not any("execution" in cell["metadata"] for cell in found)  # times, which differ in each run
    outputs = [output for cell in found for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert not [output["text"] for output in outputs if output.get("name") == "stderr"]
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    for picture in pictures:
        with Image.open(io.BytesIO(base64.b64decode(picture))) as opened:
            assert min(opened.size) >= 200
    assert pictures
    text = json.dumps([output for output in outputs if "image/png" not in output.get("data", {})])
    assert not re.search(r"(?<![\w.)])/(?:home|root|tmp|work|usr|opt|Users|private|var)/", text)
