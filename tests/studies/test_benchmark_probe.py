"""Probes of a benchmark by the command: an image-text model and an image encoder alone, fitted by hand as well."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from transformers import ViTConfig, ViTModel

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.data.labelled import draw_patients
from medclip_dcl.data.prepared import PreparedSet, case_table, write_table
from medclip_dcl.networks import TransformersRegions
from medclip_dcl.studies.benchmark_probe import _shares_table
from tests.program import verb
from tests.report.page import Page

main = verb("benchmark")

pytestmark = pytest.mark.slow

CS = (1e-4, 1e-3, 0.01, 0.1, 1.0)
FITTED = ["Edema", "Pneumonia"]
PROBES = ["model (probe)", "vit (probe)"]


@pytest.fixture(scope="module")
def labelled_set(small_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`small_set` with ten test images and labels of three findings, one of which few train images have.

    Edema has uncertain and blank labels, in the test too.
    """
    folder = shutil.copytree(small_set, tmp_path_factory.mktemp("labelled") / "set")
    images = pd.read_parquet(folder / "images.parquet")
    images.loc[images["use"] == "grounding", "official_split"] = "test"
    write_table(images, folder / "images.parquet", "images")
    labels = pd.read_parquet(folder / "labels.parquet")
    labels[list(CHEXPERT)] = np.nan
    generator = np.random.default_rng(3)
    for finding in FITTED:
        of_use = {
            use: generator.permutation(rows.index)
            for use, rows in labels.groupby(images["use"].replace("grounding", "test"))
        }
        for rows in of_use.values():
            labels.loc[rows, finding] = np.arange(len(rows)) % 2
    labels["Fracture"] = (labels.index < 3).astype("float64")
    is_negative = (labels["Edema"] == 0) & (labels.index >= 32)  # of test
    labels.loc[[0, 5, 25], "Edema"], labels.loc[[1, 8, 26, is_negative.idxmax()], "Edema"] = -1.0, np.nan
    write_table(labels, folder / "labels.parquet", "labels")
    write_table(case_table(images, labels), folder / "cases.parquet", "cases")
    return folder


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of transformers with an image encoder alone."""
    folder = tmp_path_factory.mktemp("encoders") / "vit"
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    torch.manual_seed(5)
    model = ViTModel(
        ViTConfig(**sizes, image_size=40, patch_size=8, initializer_range=0.3), add_pooling_layer=False
    )
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_mean": [0.4, 0.5, 0.6],
                "image_std": [0.2, 0.3, 0.25],
                "size": {"height": 40, "width": 40},
            }
        )
    )
    return folder


@pytest.fixture(scope="module")
def run(
    exported: Path, vit: Path, labelled_set: Path, tmp_path_factory, undrawn: None
) -> tuple[Path, Callable[..., None]]:
    """The output folder, and the command for it with more words."""
    output = tmp_path_factory.mktemp("runs") / "benchmark"
    prompts = output.parent / "prompts.yaml"
    prompts.write_text("Edema: [no edema, edema]\nPneumonia: [clear, pneumonia]\n")

    def command(*more: str) -> None:
        words = [str(exported), str(vit), "--sets", str(labelled_set), "--output", str(output)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("medclip_dcl.studies.benchmark_plan.available_cores", lambda: 1)
            main([*words, "--prompts", str(prompts), "--probe", *more])

    command()
    return output, command


def saved(output: Path, model: str, labelled_set: Path, blank: str = "zeros") -> pd.DataFrame:
    """Images by dicom_id with their use, patient, targets and the features that the command kept, in column x."""
    (file,) = (output / f"probes/{model}/set").glob("features-*.npz")
    content = np.load(file)
    labels = pd.read_parquet(labelled_set / "labels.parquet")
    labels = labels.fillna(0.0) if blank == "zeros" else labels
    kept = pd.DataFrame({"dicom_id": content["dicom_id"], "x": list(content["features"].astype("float64"))})
    images = pd.read_parquet(labelled_set / "images.parquet")
    return kept.merge(images, on="dicom_id").merge(labels, on="study_id")


def by_hand(train: pd.DataFrame, validate: pd.DataFrame, finding: str, c: float) -> tuple[Any, float]:
    """Function of features to scikit-learn's logits of one finding, and its AUC on validate images."""
    x = np.stack([*train["x"]])
    deviation = x.std(0).clip(0.01 * x.std(0).mean())
    known = train[finding].isin([0.0, 1.0]).to_numpy()
    model = LogisticRegression(C=c, max_iter=1000).fit(
        ((x - x.mean(0)) / deviation)[known], train[finding][known]
    )

    def logits(some: pd.DataFrame) -> np.ndarray:
        return model.decision_function((np.stack([*some["x"]]) - x.mean(0)) / deviation)

    known_there = validate[validate[finding].isin([0.0, 1.0])]
    return logits, roc_auc_score(known_there[finding], logits(known_there))


@pytest.mark.parametrize("model", ["model", "vit"])
def test_probe_is_scikit_learns_by_hand(run, labelled_set, model) -> None:
    require_by_hand(run[0], labelled_set, model, "zeros")


def test_ignored_blanks_are_in_no_fit_and_no_test(run, labelled_set, tmp_path) -> None:
    output, command = run
    command("--blank", "ignore", "--output", str(tmp_path))
    require_by_hand(tmp_path, labelled_set, "vit", "ignore")


def require_by_hand(output: Path, labelled_set: Path, model: str, blank: str) -> None:
    """The same C, weights, test cases and AUC by hand; the zero-shot test has the same cases."""
    rows = saved(output, model, labelled_set, blank)
    train, validate = rows[rows["use"] == "train"], rows[rows["use"] == "validate"]
    aucs = {c: np.mean([by_hand(train, validate, x, c)[1] for x in FITTED]) for c in CS}
    best = max(CS, key=lambda c: aucs[c])
    probe = output / f"probes/{model}/set"
    fits = pd.read_csv(probe / "fits.csv")
    assert set(fits["c"]) == {best} and fits["validate_auc"].iloc[0] == pytest.approx(aucs[best], abs=1e-9)
    # Fracture is of three images.
    assert json.loads((probe / "config.json").read_text())["findings"] == FITTED
    cases = pd.read_parquet(output / f"tests/{model} (probe)/set/predictions/finding_classification.parquet")
    tensors = load_file(probe / "model.safetensors")
    for place, finding in enumerate(FITTED):
        logits, _ = by_hand(train, validate, finding, best)
        found = np.stack([*validate["x"]]) - tensors["feature_mean"].double().numpy()
        found = found / tensors["feature_std"].numpy() @ tensors["head.weight"][place].numpy()
        assert found + tensors["head.bias"][place].item() == pytest.approx(logits(validate), abs=1e-4)
    numbers = pd.read_csv(output / "benchmark.csv").query("section == 'classification' and metric == 'auc'")
    for finding in FITTED:
        of_finding = cases[cases["finding"] == finding]
        own = numbers[(numbers["model"] == f"{model} (probe)") & (numbers["finding"] == finding)]
        has_auc = of_finding["label"].value_counts().min() >= 5  # not where the negative one is left out
        assert has_auc == (finding != "Edema" or blank == "zeros")
        expected_auc = roc_auc_score(of_finding["label"], of_finding["logit"]) if has_auc else np.nan
        assert own["value"].iloc[0] == pytest.approx(expected_auc, abs=1e-6, nan_ok=True)
    test = rows[rows["official_split"] == "test"].melt("dicom_id", FITTED, "finding", "label")
    expected = test[test["label"].isin([0.0, 1.0])].sort_values(["finding", "dicom_id"])
    zero_shot = pd.read_parquet(output / "tests/model/set/predictions/classification.parquet")
    for found in (cases, zero_shot):
        assert (
            found[["finding", "dicom_id", "label"]].values.tolist()
            == expected[["finding", "dicom_id", "label"]].values.tolist()
        )


def test_features_are_the_library_s_class_token(run, vit, labelled_set) -> None:
    """Of the set's images as they are, 40 pixels, normalised as the folder says."""
    rows = saved(run[0], "vit", labelled_set)
    model = ViTModel.from_pretrained(vit, add_pooling_layer=False).eval()
    for _, row in rows.iloc[[0, 17, 31]].iterrows():
        grey = np.asarray(Image.open(labelled_set / "images" / row["path"]), np.float32) / 255
        image = torch.tensor(
            np.stack([(grey - m) / s for m, s in zip([0.4, 0.5, 0.6], [0.2, 0.3, 0.25], strict=True)])
        )
        with torch.no_grad():
            token = model(image[None].float()).last_hidden_state[0, 0]
        assert row["x"] == pytest.approx(token.numpy(), abs=1e-4)


def test_page_marks_probes_as_trained_on_the_set(run) -> None:
    """The encoder alone has a probe and no test of its own; both models have the same cases."""
    page, numbers = (run[0] / "benchmark.html").read_text(), pd.read_csv(run[0] / "benchmark.csv")
    assert set(numbers["model"]) == {"model", *PROBES} and {*numbers["minus"].dropna()} == {"model"}
    assert not (run[0] / "tests/vit").exists()
    assert "set: 4 blank labels of images count as negative" in page
    for name in PROBES:
        assert f"‡ {name} on set: trained on train patients of this set; others not known" in page
    assert (
        "findings with too few train images: Fracture" in page and "not over draws of train patients" in page
    )


def test_a_rerun_keeps_features_and_probes(run, monkeypatch, capsys) -> None:
    """Fits that were lost need no features; a changed set needs both."""
    output, command = run
    before = {file: file.stat().st_mtime_ns for file in output.glob("probes/*/set/*") if file.is_file()}
    command()
    assert capsys.readouterr().out.count("is tested already") == 3
    assert before == {file: file.stat().st_mtime_ns for file in before}
    (output / "probes/vit/set/asked.json").write_text("{")
    monkeypatch.setattr(TransformersRegions, "features_and_global", None)
    command()
    assert capsys.readouterr().out.count("is tested already") == 3


def test_without_validate_labels_c_is_the_default(exported, labelled_set, run, tmp_path) -> None:
    folder = shutil.copytree(labelled_set, tmp_path / "set")
    images, labels = (pd.read_parquet(folder / f"{name}.parquet") for name in ("images", "labels"))
    of_validate = labels["study_id"].isin(images.loc[images["use"] == "validate", "study_id"])
    labels.loc[of_validate, list(CHEXPERT)] = np.nan
    write_table(labels, folder / "labels.parquet", "labels")
    write_table(case_table(images, labels), folder / "cases.parquet", "cases")
    words = [str(exported), "--sets", str(folder), "--output", str(tmp_path / "out"), "--probe"]
    main([*words, "--prompts", str(run[0].parent / "prompts.yaml")])
    assert set(pd.read_csv(tmp_path / "out/probes/model/set/fits.csv")["c"]) == {0.01}
    assert "C 0.01 without validate labels" in (tmp_path / "out/benchmark.html").read_text()


def test_what_cannot_be_probed_is_one_line(
    exported, vit, small_bert, labelled_set, run, tmp_path, capsys
) -> None:
    with pytest.raises(UserError, match="vit"):
        main([str(vit), "--sets", str(labelled_set), "--output", str(tmp_path / "out")])
    one_class = shutil.copytree(labelled_set, tmp_path / "one_class")
    labels = pd.read_parquet(one_class / "labels.parquet")
    is_train = PreparedSet(labelled_set).table("images")["use"] == "train"
    labels.loc[is_train, list(CHEXPERT)] = 0.0
    write_table(labels, one_class / "labels.parquet", "labels")
    shared = shutil.copytree(labelled_set, tmp_path / "shared")
    images = pd.read_parquet(shared / "images.parquet")
    images.loc[images["use"] == "test", "subject_id"] = images.loc[
        images["use"] == "train", "subject_id"
    ].iloc[0]
    write_table(images, shared / "images.parquet", "images")
    for models, folder, words in (
        ([vit], shared, r"vit \(probe\) on shared: .*both in training and in evaluation"),
        ([small_bert], labelled_set, r"small_bert \(probe\) on set: .*model_type"),
        (
            [vit],
            one_class,
            r"vit \(probe\) on one_class: no finding has 5 positive and 5 negative train images",
        ),
    ):
        with pytest.raises(SystemExit, match="1"):
            main([*map(str, models), "--sets", str(folder), "--output", str(tmp_path / "out"), "--probe"])
        said = capsys.readouterr().out
        assert said.count("\n") == 1 and re.search(words, said)


def test_a_share_whose_draws_have_no_finding_in_common_has_a_dash() -> None:
    fits = pd.DataFrame(
        [
            *((1.0, 0, x, 0.8) for x in "AB"),
            *((0.01, 0, "A", 0.6), (0.01, 0, "B", np.nan), (0.01, 1, "A", np.nan), (0.01, 1, "B", 0.9)),
        ],
        columns=["share", "draw", "finding", "auc"],
    ).assign(model="m")
    assert [row.cells[0].text for row in _shares_table(fits).rows] == ["–", "0.800"]


def test_shares_are_draws_of_patients_by_hand(run, labelled_set) -> None:
    """Each draw has scalers and C of its own; a finding with too few images of a draw is left out of all means."""
    output, command = run
    command("--probe_shares", "0.02,0.8,1")
    fits = pd.read_csv(output / "probe_shares.csv").query("model == 'vit (probe)'")
    rows = saved(output, "vit", labelled_set)
    train, validate = rows[rows["use"] == "train"], rows[rows["use"] == "validate"]
    test = rows[rows["official_split"] == "test"]
    fitted: dict[int, set[str]] = {}
    assert [*fits.groupby("share")["draw"].nunique()] == [5, 5, 1]
    for draw, of_draw in fits[fits["share"] == 0.8].dropna(subset="c").groupby("draw"):
        drawn = train[
            train["subject_id"].isin(draw_patients(train["subject_id"].to_numpy(), 0.8, int(str(draw))))
        ]
        counts = {x: drawn[x].value_counts() for x in [*FITTED, "Fracture"]}
        enough = [x for x, n in counts.items() if min(n.get(0.0, 0), n.get(1.0, 0)) >= 5]
        assert 0 < len(drawn) < len(train) and sorted(of_draw["finding"]) == sorted(enough)
        fitted[int(str(draw))] = {*enough}
        aucs = {c: np.mean([by_hand(drawn, validate, x, c)[1] for x in enough]) for c in CS}
        best = max(CS, key=lambda c: aucs[c])
        assert set(of_draw["c"]) == {best}
        for _, row in of_draw.iterrows():
            known = test[test[row["finding"]].isin([0.0, 1.0])]
            logits, _ = by_hand(drawn, validate, row["finding"], best)
            assert row["auc"] == pytest.approx(roc_auc_score(known[row["finding"]], logits(known)), abs=1e-9)
    shown = {row[0]: row for row in Page((output / "benchmark.html").read_text()).tables[-2][1:]}
    over = sorted(set.intersection(*fitted.values()))
    means = fits[(fits["share"] == 0.8) & fits["finding"].isin(over)].groupby("draw")["auc"].mean()
    assert over and shown["0.8"][2] == f"{means.mean():.3f} [{means.min():.3f}, {means.max():.3f}]"
    assert shown["0.02"][1:] == ["–", "–"]
