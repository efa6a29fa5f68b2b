"""`medclip-dcl export`: what it writes, replaces and refuses; exports that cannot be loaded."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from medclip_dcl import load
from medclip_dcl.common.errors import UserError
from medclip_dcl.exchange.folder import export_model
from medclip_dcl.metrics.calibration import Calibration
from tests.program import shell
from tests.small import platt_calibration

main = shell("export")

TEXTS = ["No pneumothorax.", "Mild pulmonary edema."]
GREY = np.random.default_rng(0).integers(0, 256, (90, 70)).astype(np.uint8)


def calibrate(folder, network):
    """Write a calibration of no finding into a run folder or an exported one."""
    calibration = Calibration(network.fingerprint(), 14.0, {}, {}, {})
    calibration.write(folder / "calibration.json")
    return json.loads(calibration.to_json())


@pytest.fixture
def exported(run, tmp_path):
    export_model(run, tmp_path / "exported")
    return tmp_path / "exported"


def test_an_export_gives_the_runs_numbers(run, tmp_path, monkeypatch, capsys):
    main([str(run), "--output", str(tmp_path / "exported")])
    names = {path.name for path in (tmp_path / "exported").iterdir()}
    assert names == {"README.md", "config.json", "data.json", "model.safetensors"}
    found = load(tmp_path / "exported").similarity(GREY, TEXTS)
    assert np.array_equal(found, load(run).similarity(GREY, TEXTS))
    assert "warning: weights and vocabulary derive from" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    Image.fromarray(GREY).save("chest.jpg")
    (block,) = re.findall(r"```python\n(.*?)```", (tmp_path / "exported/README.md").read_text(), re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})


def test_an_earlier_export_is_replaced_whole(run, network, exported, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    calibration = calibrate(other, network)
    (exported / "image_encoder.onnx").write_text("of the earlier one")
    export_model(other, exported)
    assert json.loads((exported / "calibration.json").read_text()) == calibration
    assert (exported / "README.md").read_text().count("# other\n") == 1
    assert not (exported / "image_encoder.onnx").exists()
    export_model(run, exported)
    assert not (exported / "calibration.json").exists()


@pytest.mark.parametrize("scale, weights", [(14.0, {"weights": "0123456789abcdef"}), (5.0, {})])
def test_a_calibration_of_other_weights_stays_behind(run, network, tmp_path, scale, weights):
    other = shutil.copytree(run, tmp_path / "other")
    Calibration({**network.fingerprint(), **weights}, scale, {}, {}, {}).write(other / "calibration.json")
    with pytest.warns(UserWarning, match="fitted to another model"):
        export_model(other, tmp_path / "exported")
    assert not (tmp_path / "exported/calibration.json").exists()
    assert "calibration.json: is of other weights" in (tmp_path / "exported/README.md").read_text()


def test_an_export_is_exported_with_its_card(network, exported, tmp_path):
    calibrate(exported, network)
    export_model(exported, tmp_path / "copy")
    for file in exported.iterdir():
        assert (tmp_path / "copy" / file.name).read_bytes() == file.read_bytes()
    before = {file: file.stat().st_mtime_ns for file in exported.iterdir()}
    export_model(exported, exported)
    assert {file: file.stat().st_mtime_ns for file in exported.iterdir()} == before


def test_a_calibration_is_added_to_an_export_in_place(network, exported, tmp_path):
    calibration = calibrate(tmp_path, network)
    export_model(exported, exported, calibration=tmp_path / "calibration.json")
    assert json.loads((exported / "calibration.json").read_text()) == calibration


def test_a_card_does_not_state_thresholds_of_another_calibration(network, exported, tmp_path):
    calibrate(exported, network)
    card = (exported / "README.md").read_text()
    section = "## Probabilities and thresholds\n\n| finding | threshold |\n|---|---|\n| Edema | 0.3 |\n"
    before, after = (card.split(part)[i] for part, i in (("## Probabilities", 0), ("## Missing", 1)))
    (exported / "README.md").write_text(f"{before}{section}\n## Missing{after}")
    calibrate(tmp_path, network)
    export_model(exported, tmp_path / "copy", calibration=tmp_path / "calibration.json")
    export_model(exported, exported, calibration=tmp_path / "calibration.json")
    for folder in (exported, tmp_path / "copy"):
        found = (folder / "README.md").read_text()
        assert "`calibration.json` is newer than this card" in found and "0.3" not in found
        assert found.startswith(before) and found.endswith(f"\n## Missing{after}")


def test_saving_over_an_export_is_refused(run, exported):
    """Its card and ONNX files would stand beside other weights."""
    (exported / "image_encoder.onnx").write_text("of the export")
    with pytest.raises(UserError, match="holds README.md, image_encoder.onnx, which are not of this model"):
        load(run).save_pretrained(exported)


def test_a_better_export_is_kept(run, exported, tmp_path, capsys):
    calibration = platt_calibration(load(run).image_text)
    calibration.write(exported / "calibration.json")
    card = (exported / "README.md").read_text()
    (exported / "README.md").write_text(f"{card}\n### Summary\n")
    before = {file: file.read_bytes() for file in exported.iterdir()}
    with pytest.raises(SystemExit) as ended:
        main([str(run), "--output", str(exported)])
    assert "it has results and a calibration of these weights, which" in capsys.readouterr().err
    assert ended.value.code == 1 and {file: file.read_bytes() for file in exported.iterdir()} == before


def test_a_full_disk_leaves_the_earlier_export(run, exported, tmp_path, monkeypatch, capsys):
    (exported / "image_encoder.onnx").write_text("of the earlier one")
    before = {file: file.read_bytes() for file in exported.iterdir()}

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SystemExit) as ended:
        main([str(run), "--output", str(exported)])
    assert "model.safetensors: No space left on device" in capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and {file: file.read_bytes() for file in exported.iterdir()} == before


def test_a_killed_export_is_completed(run, tmp_path):
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported/model.safetensors").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"config.json is missing; .*medclip-dcl export RUN"):
        load(tmp_path / "exported")
    export_model(run, tmp_path / "exported")
    load(tmp_path / "exported")


def test_other_folders_are_left_alone(run, exported, tmp_path, capsys):
    (tmp_path / "project").mkdir()
    (tmp_path / "project/README.md").write_text("precious")
    (exported / "thesis.tex").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for folder, named in (
        (tmp_path / "project", "holds README.md"),
        (exported, "holds thesis.tex"),
        (run, "holds checkpoints"),
        (tmp_path / "file", "holds file"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main([str(run), "--output", str(folder)])
        message = capsys.readouterr().err
        assert stopped.value.code == 2 and named in message and message.count("\n") == 1
    assert (tmp_path / "project/README.md").read_text() == "precious"
    with pytest.raises(SystemExit):
        main([str(run), "--output", str(tmp_path / "new"), "--public"])
    assert "--public needs --push_to_hub" in capsys.readouterr().err


def test_a_failing_card_leaves_the_earlier_export(run, exported, tmp_path):
    damaged = shutil.copytree(run, tmp_path / "damaged")
    (damaged / "results.json").write_text("{")
    with pytest.raises(ValueError, match="results.json is not readable JSON"):
        export_model(damaged, exported)
    assert "# mine\n" in (exported / "README.md").read_text()
