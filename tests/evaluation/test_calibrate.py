"""The calibrate command on a small run, load() with its file, and the numbers of a calibration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from sklearn.metrics import brier_score_loss

from medclip_dcl import load
from medclip_dcl.command.cli import main as medclip_dcl
from medclip_dcl.common.files import write_parquet
from medclip_dcl.common.findings import CHEX5, Ensemble
from medclip_dcl.data.prepared import PreparedSet, write_table
from medclip_dcl.evaluation.calibrate import SCORES_FILE, calibrate
from medclip_dcl.metrics import summaries
from medclip_dcl.metrics.calibration import CALIBRATION_FILE, Calibration
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.runs.run_folder import IMAGES_FILE
from medclip_dcl.runs.saved import other_preparation
from medclip_dcl.use.model import LoadedModel
from tests.command.small_runs import CLASSIFICATION, small
from tests.program import shell

main = shell("calibrate")


@pytest.fixture(scope="module")
def trained(small_set, small_bert, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "a"
    short = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "1"]
    medclip_dcl(["fit", *small(run, small_set, small_bert, *short, *CLASSIFICATION)])
    (run / IMAGES_FILE).unlink()  # its training images serve as validate images below
    return run


@pytest.fixture(scope="module")
def validate_set(small_set, trained, tmp_path_factory) -> Path:
    """40 validate images of as many patients, with labels that the run's own scores mostly tell.

    19 patients have a positive case of Pneumothorax, and Edema is scored the wrong way round.
    """
    folder = shutil.copytree(small_set, tmp_path_factory.mktemp("calibration") / "set")
    images = pd.read_parquet(folder / "images.parquet")
    images["use"] = images["official_split"] = ["validate"] * 40 + ["test"] * 2
    images["subject_id"] = np.arange(42)
    write_table(images, folder / "images.parquet", "images")
    files = [folder / "images" / path for path in images["path"][:40]]
    ranks = load(trained).classify(files).rank().to_numpy()
    noise = np.random.default_rng(0).normal(0, 6, (40, 1))
    labels = (ranks + noise).argsort(axis=0).argsort(axis=0) >= 20
    labels[:, list(CHEX5).index("Edema")] ^= True
    few = labels[:, list(CHEX5).index("Pneumothorax")]
    few[np.flatnonzero(few)[0]] = False
    rows = [
        (images["dicom_id"][i], finding, int(labels[i, j]), "validate")
        for i in range(40)
        for j, finding in enumerate(CHEX5)
    ]
    write_table(
        pd.DataFrame(rows, columns=["dicom_id", "finding", "label", "use"]), folder / "cases.parquet", "cases"
    )
    (folder / "dataset.json").write_text(
        json.dumps({**json.loads((folder / "dataset.json").read_text()), "fingerprint": "of 40"})
    )
    return folder


@pytest.fixture(scope="module")
def calibrated(trained, validate_set, tmp_path_factory) -> Path:
    run = shutil.copytree(trained, tmp_path_factory.mktemp("calibrated") / "a")
    main([str(run), str(validate_set), "--sensitivity", "0.8"])
    return run


@pytest.fixture
def copy(calibrated, tmp_path) -> Path:
    return shutil.copytree(calibrated, tmp_path / "a")


def own(model: LoadedModel) -> Calibration:
    assert model.calibration is not None
    return model.calibration


def paths(folder: Path, use: str = "validate") -> dict[str, str]:
    images = pd.read_parquet(folder / "images.parquet").query("use == @use")
    return {
        d: str(folder / "images" / path) for d, path in zip(images["dicom_id"], images["path"], strict=True)
    }


def test_classify_gives_the_probabilities_of_the_kept_scores(calibrated, validate_set):
    model, kept = load(calibrated), pd.read_parquet(calibrated / SCORES_FILE)
    files = paths(validate_set)
    found = model.classify(list(files.values()), calibrated=True)
    found.index = list(files)
    wide = kept.pivot(index="dicom_id", columns="finding", values="logit")
    for finding in ("Cardiomegaly", "Pleural Effusion", "Pneumonia"):
        one = own(model).findings[finding]
        expected = 1 / (
            1 + np.exp(-(wide[finding] / one.parameters["temperature"] + one.parameters["offset"]))
        )
        np.testing.assert_allclose(found.loc[expected.index, finding], expected, atol=1e-4)
        labels = kept[kept["finding"] == finding].set_index("dicom_id")["label"]
        is_above = found.loc[labels.index, finding] >= one.threshold
        assert is_above[labels == 1].mean() == pytest.approx(one.sensitivity)
        assert (one.sensitivity or 0) >= 0.8
        assert (~is_above)[labels == 0].mean() == pytest.approx(one.specificity)
    assert found["Edema"].isna().all() and found["Pneumothorax"].isna().all()
    assert "19 patients with a positive" in own(model).findings["Pneumothorax"].reason
    assert "do not score above" in own(model).findings["Edema"].reason
    text = (calibrated / "calibration.json").read_text()
    assert not any(dicom_id in text for dicom_id in paths(validate_set))
    content = json.loads(text)
    assert content["data"] == {
        "source": "test", "fingerprint": PreparedSet(validate_set).fingerprint, "folder": "set", "phantom": True,
        "use": "validate", "blank": "ignore", "images": 40, "patients": 40,
    }  # fmt: skip
    found = content["findings"]["Cardiomegaly"]
    assert (found["n_positive"], found["n_negative"], found["method"]) == (20, 20, "platt")
    assert content["target"] == {"sensitivity": 0.8} and content["fingerprint"]["image_size"] == 48
    with pytest.raises(ValueError, match="none of these findings is calibrated: Edema"):
        model.classify([], {"Edema": CHEX5["Edema"]}, calibrated=True)
    with pytest.raises(ValueError, match="Cardiomegaly is not calibrated with the prompts"):
        model.classify([], {"Cardiomegaly": ("no", "yes")}, calibrated=True)


def test_nothing_is_done_again_that_has_not_changed(copy, validate_set, monkeypatch, capsys):
    before = (copy / "calibration.json").read_bytes()
    monkeypatch.setattr(ImageTextNetwork, "feature_map", None)  # an image would raise
    main([str(copy), str(validate_set), "--sensitivity", "0.8"])
    assert (copy / "calibration.json").read_bytes() == before
    main([str(copy), str(validate_set), "--specificity", "0.9"])
    said = capsys.readouterr().out
    assert "thresholds for a specificity of 0.9" in said and "Edema: not calibrated" in said
    found = own(load(copy))
    assert found.target == {"specificity": 0.9} and (found.findings["Pneumonia"].specificity or 0) >= 0.9


def test_an_export_carries_its_calibration(calibrated, tmp_path):
    model = load(calibrated)
    model.save_pretrained(tmp_path / "exported")
    assert load(tmp_path / "exported").calibration == model.calibration
    model.calibration = None
    (tmp_path / "exported/data.json").write_text("{}")
    model.save_pretrained(tmp_path / "exported")
    files = {file.name for file in (tmp_path / "exported").iterdir()}
    assert files == {"config.json", "model.safetensors"}, "an earlier export's lineage or calibration stays"


def test_an_exported_folder_is_calibrated_beside_its_weights(calibrated, validate_set, tmp_path, capsys):
    expected, folder = own(load(calibrated)), tmp_path / "exported"
    load(calibrated / "checkpoints/best.ckpt").save_pretrained(folder)
    (folder / "data.json").write_text(json.dumps({"fingerprint": "f00d", "images_of": ["test"]}))
    files = {file.name for file in folder.iterdir()}
    assert "SET: expected a prepared set, found none" in refused(capsys, str(folder))
    main([str(folder), str(validate_set), "--sensitivity", "0.8"])
    assert own(load(folder)) == expected and expected.calibrated()
    assert (
        "exported was trained on: images of this set elsewhere (test); others not known; prob"
        in capsys.readouterr().err
    )
    assert {file.name for file in folder.iterdir()} == {*files, CALIBRATION_FILE}, "no patient's scores"


def test_a_checkpoint_has_the_calibration_of_its_run_or_a_file(copy, validate_set, tmp_path, capsys):
    checkpoint, data = copy / "checkpoints/best.ckpt", [str(validate_set), "--sensitivity", "0.8"]
    expected, before = own(load(copy)), (copy / CALIBRATION_FILE).read_bytes()
    assert own(load(checkpoint)) == expected
    alone = shutil.copy(checkpoint, tmp_path / "alone.ckpt")
    assert load(alone).calibration is None
    assert "--output: expected a .json file, found none, and" in refused(capsys, str(alone), *data)
    main([str(alone), *data, "--output", str(tmp_path / "alone.json")])
    assert own(load(alone, calibration=tmp_path / "alone.json")) == expected
    with pytest.raises(FileNotFoundError, match="no file .*gone.json"):
        load(alone, calibration=tmp_path / "gone.json")
    content = torch.load(checkpoint, weights_only=True)
    content["state_dict"]["network.similarity.log_gamma2"] += 0.5
    torch.save(content, other := copy / "checkpoints/other.ckpt")
    with pytest.raises(ValueError, match="was fitted to another model"):
        load(other, calibration=tmp_path / "alone.json")
    with pytest.raises(SystemExit):
        main([str(other), *data])
    assert "it is of another checkpoint; give --output" in capsys.readouterr().err
    assert (copy / CALIBRATION_FILE).read_bytes() == before


def test_a_calibration_of_other_weights_is_left_out(copy, validate_set):
    file = copy / "checkpoints/best.ckpt"
    content = torch.load(file, weights_only=True)
    content["state_dict"]["network.similarity.log_gamma2"] += 0.5
    torch.save(content, file)
    with pytest.warns(UserWarning, match="calibration.json was fitted to another model .* calibrate again"):
        model = load(copy)
    with pytest.raises(ValueError, match="this model has no calibration: run medclip-dcl calibrate"):
        model.classify([], calibrated=True)
    assert model.classify([]).shape == (0, 5)
    main([str(copy), str(validate_set)])
    assert own(load(copy)).scale == pytest.approx(model.image_text.similarity.gamma2.item())


def test_a_better_calibration_is_kept(copy, small_set, capsys):
    def content():
        return {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()}

    before = content()
    with pytest.raises(SystemExit) as ended:
        main([str(copy), str(small_set)])
    said = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 1 and content() == before
    assert "calibration.json is kept: it calibrates Cardiomegaly, Pleural Effusion, Pneumonia, which" in said
    assert "4 patients with a positive" in said and "--output FILE" in said
    (copy / CALIBRATION_FILE).unlink()
    with pytest.raises(SystemExit) as ended:
        main([str(copy), str(small_set)])
    said = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 1 and "calibration.json is not written" in said and "4 patients" in said
    assert not (copy / CALIBRATION_FILE).exists()


def test_training_images_are_not_calibrated_on(copy, small_set, validate_set, capsys):
    write_parquet(PreparedSet(small_set).image_digests(), copy / IMAGES_FILE)
    before = (copy / CALIBRATION_FILE).read_bytes()
    said = refused(capsys, str(copy), str(validate_set))
    assert "24 of 40 images to evaluate are training images" in said
    assert (copy / CALIBRATION_FILE).read_bytes() == before


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_what_cannot_be_calibrated_is_refused(copy, validate_set, small_set, tmp_path, capsys):
    run, data = str(copy), [str(validate_set)]
    assert "found {'sensitivity': 95.0}" in refused(capsys, run, *data, "--sensitivity", "95")
    assert "--output: expected a .json file, found the folder" in refused(capsys, run, *data, "--output", run)
    prompts = tmp_path / "prompts.yaml"
    prompts.write_text("Pneumonja: [no pneumonia, pneumonia]\n")
    assert "did you mean Pneumonia?" in refused(capsys, run, *data, "--prompts", str(prompts))

    both = shutil.copytree(validate_set, tmp_path / "both")
    images = pd.read_parquet(both / "images.parquet")
    images.loc[41, "subject_id"] = 7
    write_table(images, both / "images.parquet", "images")
    assert "1 patients are both validate and test patients (first: 7)" in refused(capsys, run, str(both))
    padded = shutil.copytree(validate_set, tmp_path / "padded")
    info = json.loads((padded / "dataset.json").read_text())
    (padded / "dataset.json").write_text(json.dumps(info | {"options": {"geometry": "pad", "size": 40}}))
    assert "prepare the set with --geometry stretch" in refused(capsys, run, str(padded))


@pytest.mark.parametrize(
    ("size", "before", "note"),
    [
        (40, None, "prepared at 40 pixels and enlarged to 48: scores differ; prepare the set with --size 48"),
        (64, None, ""),
        (64, 64, ""),
        (
            64,
            96,
            "prepared at 64 pixels, those of the training at 96: scores differ; prepare the set with --size 96",
        ),
        (None, 96, ""),
    ],
)
def test_images_prepared_at_another_size_are_said(size, before, note):
    shown = {"image_size": 48, "prepared_size": size}
    assert other_preparation(shown, {"prepared_size": before}).removeprefix("images were ") == note


def test_a_coarser_set_is_calibrated_on_with_a_warning(copy, validate_set, tmp_path, capsys):
    coarse = shutil.copytree(validate_set, tmp_path / "coarse")
    info = json.loads((coarse / "dataset.json").read_text())
    (coarse / "dataset.json").write_text(json.dumps(info | {"options": {**info["options"], "size": 24}}))
    main([str(copy), str(coarse), "--output", str(tmp_path / "calibration.json")])
    assert f"warning: {coarse}: images were prepared at 24 pixels" in capsys.readouterr().err


def test_a_calibration_belongs_to_its_ensemble(copy, validate_set, tmp_path, capsys):
    prompts = tmp_path / "prompts.yaml"
    pair = CHEX5["Pneumonia"]
    prompts.write_text(f"Pneumonia: [{pair.negative}, [{pair.positive}, {pair.positive} there]]\n")
    words = [str(copy), str(validate_set), "--prompts", str(prompts)]
    file, found = next(iter(paths(validate_set).values())), {}
    both: tuple[Ensemble, Ensemble] = ("scores", "embeddings")
    for ensemble, other in (both, both[::-1]):
        main([*words, "--ensemble", ensemble])
        model = load(copy)
        found[ensemble] = own(model).findings["Pneumonia"].parameters
        assert own(model).ensemble == ensemble
        pd.testing.assert_frame_equal(
            model.classify(file, calibrated=True),
            own(model).probabilities(model.classify(file, str(prompts), ensemble=ensemble)),
        )
        with pytest.raises(
            ValueError, match=f"fitted, found {other} .calibrate again: .* --ensemble {other}"
        ):
            model.classify(file, calibrated=True, ensemble=other)
    assert found["scores"] != found["embeddings"]
    config = yaml.safe_load((copy / "config.yaml").read_text())
    config["trainer"]["callbacks"][0]["init_args"]["ensemble"] = "embeddings"
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    assert calibrate(copy, data=validate_set, prompts=str(prompts)).ensemble == "embeddings", "the run's own"


def rows(n: int = 57) -> pd.DataFrame:
    """Cases of two findings, several a patient; probabilities on bin edges, at 0 and at 1."""
    generator = np.random.default_rng(n)
    return pd.DataFrame(
        {
            "subject_id": generator.integers(0, 17, n),
            "finding": np.where(np.arange(n) % 3, "b", "a"),
            "label": generator.integers(0, 2, n),
            "before": generator.integers(0, 21, n) / 20,
            "after": generator.random(n),
            "threshold": np.where(np.arange(n) % 3, 0.4, 0.6),
        }
    )


def error_by_loop(p: np.ndarray, labels: np.ndarray) -> float:
    total = 0.0
    for place in range(10):
        inside = [i for i, x in enumerate(p) if place / 10 <= x < (place + 1) / 10 or (place == 9 and x == 1)]
        if inside:
            total += len(inside) * abs(np.mean(p[inside]) - np.mean(labels[inside]))
    return total / len(p)


def test_calibration_numbers_are_a_loops_and_sklearns():
    cases = rows()
    found = summaries.values_of(summaries.calibration(cases, summaries.once(cases)))["by_finding"]
    assert list(found) == ["a", "b"]
    for finding, of_finding in cases.groupby("finding"):
        labels, above = of_finding["label"].to_numpy(), of_finding["after"] >= of_finding["threshold"]
        for name in ("before", "after"):
            p = of_finding[name].to_numpy()
            assert found[finding][name]["ece"] == pytest.approx(error_by_loop(p, labels))
            assert found[finding][name]["brier"] == pytest.approx(brier_score_loss(labels, p))
        in_bin = (of_finding["after"] * 10).astype(int) == 4
        assert found[finding]["after"]["bins"]["4"] == pytest.approx(labels[in_bin].mean())
        assert found[finding]["sensitivity"] == pytest.approx(above[labels == 1].mean())
        assert found[finding]["specificity"] == pytest.approx((~above)[labels == 0].mean())


def test_weights_of_a_calibration_are_repeated_cases():
    cases = rows()
    weights = np.random.default_rng(1).integers(0, 3, (4, len(cases))).astype("float64")
    weighted = dict(summaries.by_path(summaries.calibration(cases, weights), ""))
    for draw in range(4):
        repeated = cases.loc[np.repeat(cases.index, weights[draw].astype(int))]
        alone = dict(summaries.by_path(summaries.calibration(repeated, summaries.once(repeated)), ""))
        for path, values in alone.items():
            assert weighted[path][draw] == pytest.approx(values[0], nan_ok=True), path


def test_one_patients_class_has_no_number():
    cases = rows().assign(label=0)
    cases.loc[[0, 3], ["label", "subject_id"]] = [[1, 99], [1, 99]]
    found = summaries.calibration(cases, summaries.once(cases), min_patients=2)["by_finding"]
    assert np.isnan(found["a"]["sensitivity"]).all() and np.isfinite(found["a"]["specificity"]).all()
    assert np.isnan(found["b"]["sensitivity"]).all(), "there is no positive case"
