"""The benchmark by its command: two image-text models and a classifier on two sets, every number by other means."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from pytorch_lightning import Trainer
from safetensors.torch import load_file, save_file
from sklearn.metrics import average_precision_score, roc_auc_score

from medclip_dcl import evaluate, load
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import CHEXPERT, Ensemble, PromptEnsembles, read_prompts
from medclip_dcl.common.processes import locked, stop
from medclip_dcl.data.lineage import Lineage
from medclip_dcl.data.prepared import PreparedSet, case_table, write_table
from medclip_dcl.evaluation.grounding import COLUMNS
from medclip_dcl.models.classifier import Classifier
from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.report import draws as intervals
from medclip_dcl.report.compare import compare
from medclip_dcl.report.contrasts import sides_of
from medclip_dcl.runs.saved import command_of_test
from medclip_dcl.studies import benchmark_plan as plan
from medclip_dcl.studies import evaluate_model, one_run
from medclip_dcl.studies.benchmark_page import place_of
from medclip_dcl.studies.benchmark_plan import read_models
from tests.program import verb
from tests.report.page import Page

main = verb("benchmark")

SHARED = ["Edema", "Pneumonia"]
PROJECTION = "image_encoder.projection.weight"


@pytest.fixture(scope="module")
def labelled_set(small_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`small_set` with ten test images, half of them with each of four findings."""
    folder = shutil.copytree(small_set, tmp_path_factory.mktemp("labelled") / "set")
    images = pd.read_parquet(folder / "images.parquet")
    images.loc[images["use"] == "grounding", "official_split"] = "test"
    write_table(images, folder / "images.parquet", "images")
    labels = pd.read_parquet(folder / "labels.parquet")
    labels[list(CHEXPERT)] = np.nan
    is_test = labels["study_id"].isin(images.loc[images["official_split"] == "test", "study_id"])
    for place, finding in enumerate(["Edema", "Pneumonia", "Fracture", "Atelectasis"]):
        draw = np.random.default_rng(place).permutation(is_test.sum()) % 2
        labels.loc[is_test, finding] = draw.astype("float64")
    write_table(labels, folder / "labels.parquet", "labels")
    write_table(case_table(images, labels), folder / "cases.parquet", "cases")
    return folder


@pytest.fixture(scope="module")
def other_set(labelled_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images as those of a public set that names no patients and shares its images with another."""
    folder = shutil.copytree(labelled_set, tmp_path_factory.mktemp("other") / "others")
    info = json.loads((folder / "dataset.json").read_text())
    info |= {"source": "RSNA pneumonia", "options": {**info["options"], "images_of": ["NIH ChestX-ray14"]}}
    (folder / "dataset.json").write_text(json.dumps(info))
    return folder


@pytest.fixture(scope="module")
def models(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    other = shutil.copytree(exported, folder / "other")
    weights = load_file(other / "model.safetensors")
    weights[PROJECTION] = -weights[PROJECTION]
    save_file(weights, other / "model.safetensors")
    (other / "data.json").write_text(json.dumps({"fingerprint": "f00d", "images_of": ["NIH ChestX-ray14"]}))
    torch.manual_seed(3)
    classifier = Classifier([*SHARED, "Fracture"], ResNetRegions(dim=5, stride=16, width=8))
    classifier.network.image_size = 32
    trainer = Trainer(logger=False, accelerator="cpu", enable_progress_bar=False, enable_checkpointing=False)
    trainer.strategy.connect(classifier)
    trainer.save_checkpoint(folder / "classifier/checkpoints/best.ckpt")
    return {"model": exported, "other": other, "classifier": folder / "classifier"}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two findings that the sets label, and of one that they do not."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.yaml"
    file.write_text("Edema: [no edema, edema]\nPneumonia: [clear, pneumonia]\nHernia: [no hernia, hernia]\n")
    return file


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """For ten images a process of a loader would take longer to start than they do; they have intervals here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "MIN_PATIENTS", 2)
        patch.setattr("medclip_dcl.studies.benchmark_plan.available_cores", lambda: 1)
        yield


@pytest.fixture(scope="module")
def run(
    models: dict[str, Path],
    labelled_set: Path,
    other_set: Path,
    prompts: Path,
    tmp_path_factory,
    undrawn: None,
    one_process: None,
) -> tuple[Path, Callable[..., None]]:
    """The output folder, and the command for it with more words."""
    output = tmp_path_factory.mktemp("runs") / "benchmark"

    def command(*more: str) -> None:
        words = [*map(str, models.values()), "--sets", str(labelled_set), str(other_set)]
        main([*words, "--output", str(output), "--prompts", str(prompts), *more])

    command()
    return output, command


@pytest.fixture(scope="module")
def table(run: tuple[Path, Callable[..., None]]) -> pd.DataFrame:
    return pd.read_csv(run[0] / "benchmark.csv", keep_default_na=False, na_values=[""]).fillna(
        {"minus": "", "finding": ""}
    )


def test_each_column_of_the_table_is_described(table) -> None:
    page = Path(__file__).parents[2] / "docs/public_sets.md"
    assert "n_draws" in table and set(re.findall(r"`(\w+)`", page.read_text("utf-8"))) > {*table}


def scores(folder: Path, model: str, name: str = "set") -> pd.DataFrame:
    """Cases of a test with the score that ranks them."""
    section = "finding_classification" if model == "classifier" else "classification"
    found = pd.read_parquet(folder / f"tests/{model}/{name}/predictions/{section}.parquet")
    if model == "classifier":
        return found.assign(score=found["logit"])
    return found.assign(score=found["score_positive"] - found["score_negative"])


def test_each_number_is_that_of_its_predictions(run, table, models) -> None:
    of_set = table[(table["section"] == "classification") & (table["set"] == "set")]
    auc = of_set[of_set["metric"] == "auc"]
    for model in models:
        own = auc[(auc["model"] == model) & (auc["minus"] == "")].set_index("finding")
        cases = scores(run[0], model).groupby("finding")
        expected = {finding: roc_auc_score(one["label"], one["score"]) for finding, one in cases}
        assert set(own.index) == {"", *expected} and ("Fracture" in expected) == (model == "classifier")
        for finding, value in expected.items():
            assert own.loc[finding, "value"] == pytest.approx(value, abs=1e-6)
            low, high, n = own.loc[finding, ["low", "high", "n_draws"]]
            assert low <= value <= high or (value == 0.5 and n == 0), "the same score for all"
        precision = average_precision_score(
            *(scores(run[0], model).query("finding == 'Edema'")[x] for x in ("label", "score"))
        )
        is_edema = (of_set["finding"] == "Edema") & (of_set["metric"] == "average_precision")
        assert of_set[is_edema & (of_set["model"] == model)]["value"].iloc[0] == pytest.approx(
            precision, abs=1e-6
        )
        # Alike for all: what the classifier alone has is not in the mean.
        assert own.loc["", "value"] == pytest.approx(np.mean([expected[x] for x in SHARED]), abs=1e-6)


def test_rows_are_findings_and_columns_models(run, table, models) -> None:
    page = Page((run[0] / "benchmark.html").read_text())
    assert page.mute == page.wrong == [] and all(len(set(widths)) == 1 for widths in page.widths)
    shares = scores(run[0], "model").groupby("finding")["label"].mean()[SHARED].mean()
    precisions = [row[:2] for row in page.tables[0] if row[0] == "average precision"]
    assert precisions[0] == ["average precision", f"{shares:.3f}"]
    assert page.tables[0][1][1] == "prevalence" and not any(r[1] for r in page.tables[0] if r[0] == "AUC")
    auc = table[(table["section"] == "classification") & (table["metric"] == "auc") & (table["minus"] == "")]
    for place, name in ((1, "set"), (5, "others")):
        groups, headings, *rows = page.tables[place]
        assert groups[-1] == "paired difference from model"
        assert headings[1:] == ["positive / negative cases", "prevalence", *models, "other", "classifier"]
        of_set = auc[auc["set"] == name]
        assert [row[0] for row in rows] == [
            "mean",
            *dict.fromkeys(of_set["finding"][of_set["finding"] != ""]),
        ]
        forest = page.forest(name)
        for column, (model, (legend, marks)) in enumerate(zip(models, forest.items(), strict=True), 3):
            assert legend.rstrip("†") == model
            own = of_set[of_set["model"] == model].set_index("finding")["value"]
            assert len(marks) == len(own)
            for x, row in marks:
                finding = rows[int(row)][0]
                assert x == pytest.approx(own[finding.replace("mean", "")], abs=1e-6)
                assert rows[int(row)][column].startswith(f"{x:.3f}")


def same_numbers(found: pd.DataFrame, output: Path, model: str) -> None:
    """To the digit those of benchmark.csv; of the classifier without means, over findings that all models have."""
    table = pd.read_csv(output / "benchmark.csv").fillna({"minus": "", "finding": ""})
    of_set = table[(table["set"] == "set") & (table["model"] == model) & (table["minus"] == "")]
    of_set = of_set.assign(metric=of_set["section"] + "/" + of_set["metric"])
    columns = ["finding", "metric", "value", "low", "high"]
    a, b = (one[columns] for one in (found, of_set))
    if model == "classifier":
        a, b = (one[one["finding"] != ""] for one in (a, b))
    assert len(a) > 8
    a, b = a.reset_index(drop=True), b.reset_index(drop=True)
    pd.testing.assert_frame_equal(a, b, rtol=1e-14, atol=0)  # pandas 2 reads the last digit less exactly


@pytest.mark.parametrize(
    "name", ["other", *(pytest.param(x, marks=pytest.mark.slow) for x in ("model", "classifier"))]
)
def test_evaluate_has_the_numbers_of_the_benchmark(
    name, run, models, labelled_set, prompts, tmp_path, monkeypatch, capfd
) -> None:
    """Of a folder, a classifier's run and a model changed in memory; nothing is printed, left or changed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model: Any = models[name]
    if name == "other":
        model = load(models["model"])
        model.network.get_parameter(PROJECTION).data.neg_()
    random_state, environment = torch.get_rng_state(), dict(os.environ)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = evaluate(model, labelled_set, prompts=prompts, device="cpu")
    same_numbers(found, run[0], name)
    said = [str(one.message) for one in caught if one.category is UserWarning]
    assert any("was trained on: not known" in line for line in said)
    unprompted = "set: no prompts, so no zero-shot AUC: Atelectasis, Fracture"
    assert (unprompted in said) == (name != "classifier")
    edema = found[(found["finding"] == "Edema") & (found["metric"] == "classification/auc")]
    assert edema[["positives", "patients"]].to_numpy().tolist() == [[5, 4]]
    assert found.query("metric == 'classification/auc' and finding == ''")["patients"].tolist() == [5]
    assert not [*tmp_path.iterdir()] and capfd.readouterr() == ("", "")
    assert torch.equal(random_state, torch.get_rng_state()) and environment == dict(os.environ)


def test_positives_of_a_reader_are_its_boxes(monkeypatch) -> None:
    ids = {"dicom_id": [f"i{i}" for i in range(30)], "subject_id": range(30), "box": range(30)}
    numbers = dict.fromkeys(set(COLUMNS) - {*ids, "category", "phrase"}, 0.5)
    reader = ["R1"] * 20 + ["R2"] * 10
    rows = pd.DataFrame({**ids, **numbers, "category": "Effusion", "phrase": "p", "reader": reader})
    predictions = intervals.Predictions({"grounding": rows.assign(reader_iou=np.nan, reader_dice=np.nan)})
    run: Any = SimpleNamespace(
        intervals=intervals.bootstrap_intervals(predictions, 20), predictions=predictions
    )
    run.draws = lambda: None
    monkeypatch.setattr(evaluate_model, "groups_of_run", lambda run: None)
    monkeypatch.setattr(evaluate_model, "failures", lambda *given: [])
    found = evaluate_model._table(run).dropna(subset="positives").groupby("finding")["positives"].unique()
    assert {name: [*n] for name, n in found.items()} == {"Effusion": [30], "R1": [20], "R2": [10]}


def test_evaluate_repeats_no_finished_test(run, models, labelled_set, prompts, tmp_path) -> None:
    output = shutil.copytree(run[0], tmp_path / "out")
    results = output / "tests/model/set/results.json"
    before = results.stat().st_mtime_ns
    with pytest.warns(UserWarning, match="no prompts"):
        same_numbers(evaluate(models["model"], labelled_set, output, prompts=prompts), output, "model")
    assert results.stat().st_mtime_ns == before


def test_evaluate_refuses_in_one_line(models, labelled_set, prompts, tmp_path, monkeypatch) -> None:
    """A loaded model knows the images of its training, from any folder, and that these are no longer known."""
    trained = shutil.copytree(models["classifier"], tmp_path / "trained")
    PreparedSet(labelled_set).image_digests().assign(use="train").to_parquet(trained / "data_images.parquet")
    (trained / "data.json").write_text(json.dumps({"fingerprint": "f00d", "images_of": []}))
    (trained / "config.yaml").write_text("model: {}\n")
    hernia = load(models["classifier"])
    setattr(hernia.network, "findings", ["Hernia"])  # noqa: B010
    gone, replaced, fewer = (
        shutil.copytree(trained, tmp_path / name) for name in ("gone", "replaced", "fewer")
    )
    monkeypatch.chdir(tmp_path)
    moved, *lost = map(load, ("trained", gone, replaced, fewer))
    monkeypatch.chdir(labelled_set)
    (gone / "data_images.parquet").unlink()
    pd.read_parquet(file := fewer / "data_images.parquet").iloc[:1].to_parquet(file)
    (replaced / "data.json").write_text(json.dumps({"fingerprint": "beef", "images_of": []}))
    refusals: list[tuple[Any, Any, dict[str, Any], str]] = [
        ("nowhere", labelled_set, {}, "^no file or folder nowhere$"),
        (models["model"], tmp_path, {}, "prepare"),
        (
            models["model"],
            labelled_set,
            {"prompts": "nowhere.yaml"},
            "prompts: expected a file or the name .*, found nowhere.yaml",
        ),
        (models["model"], labelled_set, {"device": "gpu"}, "device gpu cannot be used"),
        (hernia.network, labelled_set, {}, "found FindingNetwork; write it by trainer.save_checkpoint"),
        (moved, labelled_set, {}, "are training images of"),
        *((one, labelled_set, {}, "best.ckpt, its data.json or data_images.parquet is gone") for one in lost),
        (
            hernia,
            labelled_set,
            {},
            r"expected labels of the model's findings \(Hernia\), found labels of Edema",
        ),
    ]
    for model, data, options, words in refusals:
        with pytest.raises(UserError, match=words) as error:
            evaluate(model, data, **{"prompts": prompts, **options})
        assert "\n" not in str(error.value)


def test_two_threads_leave_the_output_open(
    models, labelled_set, prompts, one_process, undrawn, capfd
) -> None:
    def work() -> None:
        evaluate(models["classifier"], labelled_set, prompts=prompts)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for act in (threading.Thread.start, threading.Thread.join):
        for one in threads:
            act(one)
    print("open", flush=True)
    os.write(1, b"open\n")
    assert capfd.readouterr().out.split() == ["open", "open"]


def test_an_interruption_ends_evaluate(models, labelled_set, prompts, monkeypatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("medclip_dcl.command.cli.main", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        evaluate(models["model"], labelled_set, prompts=prompts)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_two_models_alone_have_the_numbers_of_compare(
    run, models, labelled_set, table, prompts, tmp_path
) -> None:
    """Neither a further model nor a further set moves p; means of findings that all have follow the models."""
    output = shutil.copytree(run[0], tmp_path / "out")
    words = [str(models["model"]), str(models["other"]), "--sets", str(labelled_set), "--output", str(output)]
    main([*words, "--prompts", str(prompts)])
    place = ["model", "minus", "section", "finding", "metric"]
    few = pd.read_csv(output / "benchmark.csv").fillna({"minus": "", "finding": ""}).set_index(place)
    more = table[(table["set"] == "set") & (table["model"] != "classifier")].set_index(place)
    pd.testing.assert_frame_equal(few, more)
    folders = [output / f"tests/{name}/set" for name in ("model", "other")]
    found = compare(folders, names=["model", "other"], baseline="model")
    numbers = {
        (side, minus, *place.values()): one
        for (side, minus), of_pair in found.table.items()
        for path, one in of_pair.items()
        for place in [place_of(path)]
    }
    assert numbers.keys() == set(few.index)
    for key, one in numbers.items():
        row = dict(few.loc[[key]].iloc[0])
        for name in ("value", "low", "high", "p"):
            expected = getattr(one, name)
            assert row[name] == expected or (expected is None and np.isnan(row[name])), (key, name)


def test_models_that_differ_in_the_seed_are_one_row(tmp_path) -> None:
    """An untrained network is not a seed beside a trained one, nor is one that was trained on other data."""
    runs = []
    for seed, name, data in ((0, "best", "a"), (1, "best", "a"), (2, "untrained", "a"), (3, "best", "b")):
        file = tmp_path / f"infonce_{seed}/checkpoints/{name}.ckpt"
        file.parent.mkdir(parents=True)
        (file.parents[1] / "config.yaml").write_text(f"seed_everything: {seed}")
        model: Any = SimpleNamespace(name=f"infonce_{seed}", saved=SimpleNamespace(path=file))
        model.lineage = Lineage(file, {"fingerprint": data})
        runs.append(plan.BenchmarkedRun(tmp_path / "test", model))
    assert [*sides_of(runs)] == ["infonce (2 seeds)", "infonce_2", "infonce_3"]


def test_a_tests_settings_name_the_model_alone(run, models) -> None:
    """A tokenizer has megabytes, which a parser would look through again and again."""
    settings = (run[0] / "tests/model/set/test.yaml").read_text()
    assert f"ckpt_path: {models['model']}" in settings and "tokenizer" not in settings


def test_page_says_what_was_left_out_and_known(run) -> None:
    page = (run[0] / "benchmark.html").read_text()
    assert "set: no prompts, so no zero-shot AUC: Atelectasis, Fracture" in page
    assert "† other on others: trained on images of this set elsewhere (NIH ChestX-ray14)" in page
    assert page.count("this set elsewhere") == 2  # and in the table of what was tested
    assert "not known on which images they were trained: model, other, classifier" in page
    assert "without Fracture" in page and "signed CNR of phrases" in page


@pytest.mark.slow
def test_a_rerun_tests_what_has_changed(run, models, table, capsys) -> None:
    output, command = run
    files = {file: file.stat().st_mtime_ns for file in output.glob("tests/*/*/results.json")}
    assert len(files) == 6
    (output / "tests/model/set/results.json").unlink()  # killed before its end
    weights = load_file(models["other"] / "model.safetensors")
    save_file(
        {**weights, PROJECTION: torch.ones_like(weights[PROJECTION])}, models["other"] / "model.safetensors"
    )
    command()
    changed = {
        str(file.relative_to(output / "tests").parent)
        for file in files
        if file.stat().st_mtime_ns != files[file]
    }
    assert changed == {"model/set", "other/set", "other/others"}
    assert capsys.readouterr().out.count("is tested already") == 3
    again = pd.read_csv(output / "benchmark.csv").fillna({"minus": ""})
    before, after = (one[(one["model"] != "other") & (one["minus"] == "")]["value"] for one in (table, again))
    pd.testing.assert_series_equal(before, after)


@pytest.mark.slow
def test_a_model_of_the_test_images_is_left_out(run, models, labelled_set, tmp_path, prompts) -> None:
    """The others are on the page all the same; here they are tested already."""
    trained = shutil.copytree(models["classifier"], tmp_path / "trained")
    digests = PreparedSet(labelled_set).image_digests().assign(use="train")
    digests.to_parquet(trained / "data_images.parquet")
    (trained / "data.json").write_text(json.dumps({"fingerprint": "f00d", "images_of": []}))
    (trained / "config.yaml").write_text("model: {}\n")
    output = shutil.copytree(run[0], tmp_path / "out")
    words = [str(trained), str(models["model"]), "--sets", str(labelled_set), "--output", str(output)]
    with pytest.raises(SystemExit) as end:
        main([*words, "--prompts", str(prompts)])
    assert end.value.code == 1
    page = (tmp_path / "out/benchmark.html").read_text()
    assert "trained on set:" in page and "are training images of" in page and ">model<" in page


def test_results_belong_to_code_and_ensemble(models, labelled_set, tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plan, "is_readable", lambda folder: True)
    code = tmp_path / "own_parts_of_benchmark.py"
    code.write_text("SHIFT = 1\n")
    importlib.import_module("own_parts_of_benchmark")
    (model,), (prepared,) = plan.read_models([models["model"]], None), plan.read_sets([labelled_set]).values()
    several: PromptEnsembles = {"Edema": (("no edema",), ("edema", "wet"))}
    one: PromptEnsembles = {"Edema": (("no edema",), ("edema",))}
    steps: tuple[tuple[Ensemble, int], ...] = (("scores", 1), ("embeddings", 1), ("embeddings", 2))
    for prompts, kept in ((several, [True, False, False]), (one, [True, True, False])):
        results = tmp_path / f"out{len(kept)}/tests/model/set/results.json"
        found = []
        code.write_text("SHIFT = 1\n")
        how = (["own_parts_of_benchmark"], results.parents[3])
        plan.test_of(model, "set", prepared, prompts, "scores", *how)[1]()
        for ensemble, content in steps:
            results.write_text("{}")
            code.write_text(f"SHIFT = {content}\n")
            plan.test_of(model, "set", prepared, prompts, ensemble, *how)[1]()
            found.append(results.is_file())
        assert found == kept


def test_a_classifier_of_other_findings_is_not_applicable(
    run, models, labelled_set, tmp_path, prompts
) -> None:
    file = tmp_path / "hernia/checkpoints/best.ckpt"
    saved = torch.load(models["classifier"] / "checkpoints/best.ckpt", weights_only=True)
    saved["network"]["findings"] = ["Hernia"]
    file.parent.mkdir(parents=True)
    torch.save(saved, file)
    output = shutil.copytree(run[0], tmp_path / "out")
    words = [
        str(models["model"]),
        str(tmp_path / "hernia"),
        "--sets",
        str(labelled_set),
        "--output",
        str(output),
    ]
    main([*words, "--prompts", str(prompts)])  # status 0
    assert not (output / "tests/hernia").exists()
    page = (output / "benchmark.html").read_text()
    assert "hernia on set: not applicable, the set labels none of Hernia" in page and "Not tested" not in page
    with pytest.raises(UserError, match="expected one that applies to a set of --sets, found none"):
        main(words[1:] + ["--prompts", str(prompts)])


def test_a_set_without_test_images_is_one_line(models, labelled_set, tmp_path, capsys) -> None:
    folder = shutil.copytree(labelled_set, tmp_path / "usual")
    images = pd.read_parquet(folder / "images.parquet")
    write_table(images.assign(use="train", official_split="train"), folder / "images.parquet", "images")
    for name in ("boxes", "masks"):
        (folder / f"{name}.parquet").unlink(missing_ok=True)
    with pytest.raises(SystemExit, match="1"):
        main([*map(str, models.values()), "--sets", str(folder), "--output", str(tmp_path / "out")])
    assert (
        capsys.readouterr().out.count("is for test; prepare it with --split_shares, or --official_val") == 1
    )


def test_only_the_holder_of_a_test_changes_it(models, labelled_set, tmp_path) -> None:
    (model,), (prepared,) = read_models([models["model"]], None), plan.read_sets([labelled_set]).values()
    run, prepare = plan.test_of(model, "set", prepared, {}, "scores", [], tmp_path, "cuda:3")
    asked = run.folder / "asked.json"
    run.folder.mkdir(parents=True)
    with locked(run.folder / ".lock"):
        assert one_run.run_one(run, ("test",), prepare=prepare).state == "busy"
    assert not asked.exists()
    prepare()
    assert json.loads(asked.read_text())["model"] == model.digest()
    trainer = yaml.safe_load((run.folder / "test.yaml").read_text())["trainer"]
    assert (trainer["accelerator"], trainer["devices"]) == ("cuda", [3])


def test_a_damaged_test_is_tested_again(run, models, labelled_set, prompts, tmp_path) -> None:
    folder = tmp_path / "tests/model/set"
    (model,), (prepared,) = read_models([models["model"]], None), plan.read_sets([labelled_set]).values()
    words = read_prompts(prompts, "--prompts")

    def cut(name: str) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-200])

    def drop_rows() -> None:
        pd.read_parquet(folder / table).iloc[2:].to_parquet(folder / table)

    table = "predictions/classification.parquet"
    damages: list[tuple[bool, Callable[[], object]]] = [
        (True, lambda: None),
        (False, lambda: cut("results.json")),
        (False, lambda: (folder / "results.json").write_text("[]")),
        (False, lambda: (folder / "results.json").write_text('{"format_version": 2}')),
        (False, lambda: (folder / table).unlink()),
        (False, lambda: cut(table)),
        (False, drop_rows),
        (False, lambda: cut("asked.json")),
        (False, lambda: (folder / "asked.json").write_text("[]")),
    ]
    for is_kept, damage in damages:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(run[0] / "tests/model/set", folder)
        damage()
        plan.test_of(model, "set", prepared, words, "scores", [], tmp_path)[1]()
        assert (folder / "results.json").is_file() == is_kept
    (folder / "results.json").unlink(missing_ok=True)
    assert f"--config {folder / 'test.yaml'} " in command_of_test(folder) and (folder / "test.yaml").is_file()


def test_a_signal_ends_the_command(models, labelled_set, prompts, tmp_path, monkeypatch) -> None:
    """The next test does not begin."""
    monkeypatch.setattr("medclip_dcl.command.cli.main", lambda *_, **__: stop(signal.SIGINT, None))
    words = [*map(str, models.values()), "--sets", str(labelled_set), "--prompts", str(prompts)]
    with pytest.raises(SystemExit) as end:
        main([*words, "--output", str(tmp_path)])
    assert end.value.code == 143 and len([*tmp_path.glob("tests/*")]) == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--names", "a,b"], "--names: expected 3, one for each MODEL, found 2"),
        (["--names", "a,b,b"], "expected names that differ and are names of folders, found 'b'"),
        (["--names", "a,b,../c"], "found '../c'"),
        (["--baseline", "mode"], "--baseline: expected one of model, other, classifier, found 'mode'"),
    ],
)
def test_wrong_options_are_named(run, more, words) -> None:
    with pytest.raises(UserError, match=words.replace("..", r"\.\.")):
        run[1](*more)
