"""--config heads: features computed once, projections trained on them, an ordinary model at the end."""

from __future__ import annotations

import json
import shutil

import pandas as pd
import pytest
import yaml

from medclip_dcl import load
from medclip_dcl.command.cli import main
from tests.command.small_runs import refused, small
from tests.program import verb

encode = verb("encode")


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_projections_on_frozen_encoders_become_an_ordinary_model(
    small_set, small_bert, exported, tmp_path, capsys
):
    folder, run = shutil.copytree(small_set, tmp_path / "set"), tmp_path / "run"
    encode([str(exported), str(folder), "--device", "cpu"])
    (name,) = (file.name for file in (folder / "features").iterdir())
    assert name.startswith("model-") and f"--data.init_args.features {name}" in capsys.readouterr().out
    text = "--model.init_args.text_encoder.init_args."
    words = small(run, folder, small_bert, objective="infonce", resnet=True, heads=True)
    encoder = "--model.init_args.image_encoder.init_args."
    words += [f"{encoder}width", "16", f"{encoder}centred", "false", "--data.init_args.features", name]
    words += [f"{text}pooling", "cls", f"{text}max_tokens", "128"]
    words += ["--trainer.callbacks+=medclip_dcl.evaluation.SentenceClassification"]
    words += ["--trainer.callbacks.min_cases=2"]
    main(["fit", *words, "--model.init_args.init_from", str(exported), "--untrained", "true"])
    data = yaml.safe_load((run / "config.yaml").read_text())["data"]["init_args"]
    assert data["image_size"] == 64 and data["crop_size"] is None
    main(["test", "--config", str(run / "config.yaml")])
    found = json.loads((run / "results.json").read_text())
    assert (run / "results_untrained.json").is_file()
    assert set(found["metrics"]) > {"classification", "grounding"}
    main(["test", "--config", str(run / "config.yaml"), "--data.init_args.features", "null"])
    on_images = json.loads((run / "results.json").read_text())
    assert on_images["counts"] == found["counts"] and on_images["protocol"] == found["protocol"]
    for metric in ("cnr", "miou"):
        expected = on_images["metrics"]["grounding"][metric]
        assert found["metrics"]["grounding"][metric] == pytest.approx(expected, abs=2e-3)
    # The states of sentences are those of features, and encoded anew.
    expected = on_images["metrics"]["sentences"]["auc"]
    assert found["metrics"]["sentences"]["auc"] == pytest.approx(expected, abs=2e-3)
    row = pd.read_parquet(folder / "images.parquet").iloc[0]
    assert load(run).heat_map(folder / "images" / row["path"], "Mild pulmonary edema.").shape == (40, 40)
    another = ["test", "--config", str(run / "config.yaml"), "--data.init_args.features", "another"]
    assert f"no finished features named another (there: {name})" in refused(capsys, another)
