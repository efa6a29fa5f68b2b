"""The command line on a small set: run folders, resuming, messages."""

from __future__ import annotations

import gc
import io
import json
import logging
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from lightning_utilities.core.imports import RequirementCache
from pytest import approx
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.callbacks.timer import Interval
from pytorch_lightning.loggers import TensorBoardLogger, WandbLogger

from medclip_dcl import load
from medclip_dcl.command.cli import _about_input, main
from medclip_dcl.common.findings import CHEX5
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.runs.run_folder import RunFolder
from medclip_dcl.studies.one_run import Run, is_done
from medclip_dcl.training.best_checkpoint import best_mode
from tests.command.small_runs import CLASSIFICATION, refused, small


@pytest.fixture(scope="module")
def fit(small_set, small_bert):
    """Arguments of `fit` in a folder."""
    return lambda run, *more, **options: ["fit", *small(run, small_set, small_bert, *more, **options)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, fit, undrawn) -> Path:
    """A run that was fitted and tested."""
    run = tmp_path_factory.mktemp("runs") / "first"
    main(fit(run))
    main(["test", "--config", str(run / "config.yaml")])
    return run


@pytest.fixture
def info():
    """Lines that the program says, not as warnings."""
    caught = io.StringIO()
    handler, logger = (
        logging.StreamHandler(caught),
        logging.getLogger("pytorch_lightning.utilities.rank_zero"),
    )
    logger.addHandler(handler)
    yield lambda: caught.getvalue().splitlines()
    logger.removeHandler(handler)


def test_a_run_folder_holds_everything(finished):
    assert gc.isenabled() and gc.get_freeze_count() > 10_000
    names = {path.name for path in finished.iterdir()}
    expected = {"config.yaml", "checkpoints", "metrics.csv", "fit.json", "class_probability.parquet"}
    assert expected | {"results.json", "results_untrained.json", "predictions", "figures"} <= names
    assert "predictions_untrained" in names and "figures_untrained" not in names
    checkpoints = {file.stem for file in (finished / "checkpoints").iterdir()}
    assert checkpoints == {"best", "last", "previous", "untrained"}
    metrics = pd.read_csv(finished / "metrics.csv")
    assert metrics["train/loss"].count() == 6 and metrics["validate/loss"].count() == 2
    assert metrics["train/class_probability"].max() > 0
    assert all(best_mode("", name, None) for name in map(str, metrics) if name.startswith("validate/"))
    fit = json.loads((finished / "fit.json").read_text())
    assert fit["steps"] == 6 and fit["epochs"] == 2 and fit["seconds"] > 0
    # Eta of the training sentences.
    table = pd.read_parquet(finished / "class_probability.parquet")
    etas = [0.2 * math.exp(0.35 * log_p) for log_p in table["log_p"]]
    assert table["eta"].tolist() == pytest.approx(etas, rel=1e-5)
    assert {"sentence_id", "text", "n_reports", "log_p", "eta", "rho", "sentence_share"} == set(table.columns)


def test_last_is_of_the_last_epoch_best_tested(finished):
    checkpoints = finished / "checkpoints"
    steps = [
        torch.load(checkpoints / f"{x}.ckpt", weights_only=True)["global_step"] for x in ("last", "best")
    ]
    losses = pd.read_csv(finished / "metrics.csv")["validate/loss"].dropna().tolist()
    epoch = 1 + losses.index(min(losses))
    assert steps == [6, 3 * epoch]
    best = {"metric": "validate/loss", "value": approx(min(losses), rel=1e-5)}
    assert json.loads((finished / "fit.json").read_text())["best"] == {
        "epoch": epoch,
        "step": steps[1],
        **best,
    }
    trained, untrained = (json.loads((finished / f"results{x}.json").read_text()) for x in ("", "_untrained"))
    assert trained["checkpoint"]["file"] == "checkpoints/best.ckpt"
    assert [x["checkpoint"]["epoch"] for x in (trained, untrained)] == [epoch, 0]
    assert trained["checkpoint"]["weights"] != untrained["checkpoint"]["weights"]
    assert trained["protocol"] == untrained["protocol"] and trained["counts"] == untrained["counts"]
    sections = {"classification", "grounding", "retrieval", "report_retrieval", "embedding_map"}
    assert set(trained["metrics"]) == sections


def test_a_finished_run_is_left_alone(finished, fit):
    before = (finished / "checkpoints/last.ckpt").stat().st_mtime_ns
    main(fit(finished))
    assert (finished / "checkpoints/last.ckpt").stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_failed_start_leaves_the_folder_free(fit, tmp_path, capsys):
    wrong = ("--model.init_args.init_from", str(tmp_path / "nowhere.ckpt"))
    for _ in range(2):
        assert "nowhere.ckpt" in refused(capsys, fit(tmp_path / "run", *wrong))
        assert not (tmp_path / "run").exists()
    short = ("--trainer.max_steps", "1", "--trainer.limit_val_batches", "1", "--trainer.callbacks", "[]")
    main(fit(tmp_path / "run", *short))
    assert (tmp_path / "run/fit.json").is_file()


ANOTHER = "already holds another run: its config.yaml differs in model.init_args.beta2;"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--trainer.max_epochs", "1"], ["trainer.max_epochs", "larger --trainer.max_epochs (it had 2)"]),
        (["--model.init_args.beta2", "0.9"], [ANOTHER, "init_from", "max_epochs (it had 2)"]),
    ],
)
def test_another_run_in_a_finished_folder_is_advised(more, named, finished, fit, capsys):
    message = refused(capsys, fit(finished, *more))
    assert all(words in message for words in named)


def test_a_mistake_leaves_a_finished_run_finished(finished, fit, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    before = {file: file.read_bytes() for file in run.glob("*.*")}
    longer = fit(run, "--trainer.max_epochs", "3")
    assert "trainer: " in refused(capsys, [*longer, "--trainer.accelerator", "tpu"])  # Lightning's
    assert {file: file.read_bytes() for file in run.glob("*.*")} == before


@pytest.mark.slow
def test_a_finished_run_is_trained_longer(finished, fit, tmp_path, info, monkeypatch):
    run = shutil.copytree(finished, tmp_path / "run")
    # Killed between any two of its writes, the same command goes on.
    monkeypatch.setattr(
        "medclip_dcl.runs.run_folder.files.write_text", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    longer = fit(run, "--trainer.max_epochs", "3")
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        main(longer)
    assert not (run / "fit.json").exists() and (run / "checkpoints/last.ckpt").is_file()
    monkeypatch.undo()
    main(longer)
    assert json.loads((run / "fit.json").read_text())["epochs"] == 3
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_epochs"] == 3
    metrics = pd.read_csv(run / "metrics.csv")
    assert metrics["validate/loss"].count() == 3
    # The schedule of 9 steps with 2 of warm-up: the seventh step has the rate of the fifth of 7 that decay.
    rates = metrics["train/learning_rate"].dropna().tolist()
    highest = yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]["learning_rate"]
    assert rates[6:] == pytest.approx([highest * 0.5 * (1 + math.cos(math.pi * k / 7)) for k in (4, 5, 6)])
    assert any("was finished and goes on to 3 epochs" in line for line in info())
    said = next(line for line in info() if "learning rate at step 6" in line)
    assert f"{rates[6]:.3g}" in said and "0 by the settings" in said and "of 9 steps" in said
    # What was measured at the end of the second epoch is not taken for the third's.
    assert not (run / "results.json").exists() and not (run / "predictions").exists()
    assert (run / "results_2_epochs.json").read_text() == (finished / "results.json").read_text()
    assert (run / "predictions_2_epochs").is_dir() and (run / "figures_2_epochs").is_dir()


@pytest.mark.slow
def test_processes_that_are_spawned(fit, tmp_path):
    """They get the Trainer pickled, with its callbacks."""
    run, spawned = tmp_path / "run", ["--trainer.strategy", "ddp_spawn", "--trainer.devices", "2"]
    spawned += ["--data.init_args.batch_size", "2"]
    main(fit(run, "--trainer.max_epochs", "1", *spawned))
    assert json.loads((run / "fit.json").read_text())["epochs"] == 1


def test_a_refused_continuation_leaves_a_finished_run_as_it_was(finished, fit, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    torch.save({**checkpoint, "made_of": {"log_p": "another"}}, run / "checkpoints/last.ckpt")
    names = [*run.iterdir()]
    assert "files of log_p have changed" in refused(capsys, fit(run, "--trainer.max_epochs", "3"))
    assert sorted(run.iterdir()) == sorted(names)
    assert (run / "config.yaml").read_text() == (finished / "config.yaml").read_text()


def test_a_test_of_some_batches_leaves_the_complete_results(finished, tmp_path):
    """Also of a run with kept steps, whose results.json a whole test removes first."""
    run = shutil.copytree(finished, tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"kept_steps": [3]}))
    shutil.copy(run / "checkpoints/best.ckpt", run / "checkpoints/step_3.ckpt")
    main(["test", str(run), "--trainer.limit_test_batches", "1"])
    assert (run / "results.json").read_bytes() == (finished / "results.json").read_bytes()
    assert (run / "steps/3/results.json").is_file() and (run / "tests/limited/results.json").is_file()


@pytest.mark.parametrize("longer", [[], ["--trainer.max_epochs", "2"]])
def test_a_test_of_an_unfinished_run_is_not_its_result(finished, fit, tmp_path, info, longer):
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "fit.json").unlink()  # as killed before its end, and tested then
    assert not is_done(Run({}, run, ()), ["fit", "test"])
    main(fit(run, *longer))
    assert (run / "fit.json").is_file() and not (run / "results.json").exists()
    assert (run / "results_unfinished.json").read_text() == (finished / "results.json").read_text()
    assert any("renamed to ..._unfinished: results.json" in line for line in info())


@pytest.mark.slow
def test_another_runs_checkpoint_does_not_bring_its_settings(finished, fit, tmp_path, info):
    finished = shutil.copytree(finished, tmp_path / "other")
    (finished / "LICENSE").write_text("Terms")
    model = yaml.safe_load((finished / "config.yaml").read_text())["model"]["init_args"]
    rate, more = 3 * model["learning_rate"], ["--model.init_args.weight_decay", "0.3"]
    more += ["--model.init_args.learning_rate", str(rate), "--model.init_args.text_learning_rate", str(rate)]
    more += ["--ckpt_path", str(finished / "checkpoints/last.ckpt"), "--trainer.max_epochs", "3"]
    main(fit(tmp_path / "run", *more))
    rates = pd.read_csv(tmp_path / "run/metrics.csv")["train/learning_rate"].dropna()
    assert rates.tolist() == pytest.approx([rate * 0.5 * (1 + math.cos(math.pi * k / 7)) for k in (4, 5, 6)])
    last = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)
    groups = last["optimizer_states"][0]["param_groups"]
    assert {group["weight_decay"] for group in groups} == {0.0, 0.3}
    assert any("by the settings that the checkpoint was trained with" in line for line in info())
    assert (tmp_path / "run/LICENSE").read_text() == "Terms"


def test_no_last_checkpoint_no_longer_training(finished, fit, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    for name in ("last.ckpt", "previous.ckpt"):
        (run / "checkpoints" / name).unlink()
    assert "no last.ckpt" in refused(capsys, fit(run, "--trainer.max_epochs", "3"))
    assert (run / "fit.json").is_file() and (run / "results.json").is_file()


@pytest.mark.slow
def test_a_run_shorter_than_every_interval(fit, tmp_path, info):
    run = tmp_path / "run"
    options = ["--trainer.max_epochs", "1", "--trainer.check_val_every_n_epoch", "3"]
    main(fit(run, *options, "--trainer.log_every_n_steps", "50"))
    assert (run / "checkpoints/best.ckpt").is_file()
    *_, best, following = info()
    assert best.startswith("best checkpoint: epoch 1 of 1 (3 steps), validate/loss ")
    of_run = f"--config {run}/config.yaml --run_folder {run} --import tests.small"
    assert following == f"next: medclip-dcl test {of_run}"
    metrics = pd.read_csv(run / "metrics.csv")
    assert metrics.loc[metrics["train/loss"].notna(), "step"].tolist() == [2]
    assert metrics["validate/loss"].count() == 1 and metrics["train/images_per_second"].count() == 1


@pytest.mark.slow
def test_folders_that_do_not_fit_are_refused(small_set, small_bert, tmp_path, capsys):
    for name in ("metrics.csv", "tested/results.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("step\n")
    broken, new = shutil.copytree(small_set, tmp_path / "set"), tmp_path / "new"
    shutil.rmtree(broken / "log_p")
    for command, run, data, more, words in (
        ("fit", tmp_path, small_set, [], "holds results but no config.yaml; choose another --run_folder"),
        ("fit", tmp_path / "tested", small_set, [], "holds results but no config.yaml"),
        ("test", new, small_set, [], "holds no checkpoints; train first"),
        ("fit", new, broken, [], "has no sentence scores; create scores with"),
        ("fit", new, small_set, ["--data.init_args.image_size", "50"], "multiple of the image encoder's"),
    ):
        assert words in refused(capsys, [command, *small(run, data, small_bert, *more)])


@pytest.mark.slow
def test_a_run_outlives_its_language_models_folder(small_set, small_bert, tmp_path, finished, capsys):
    text = shutil.copytree(small_bert, tmp_path / "bert")
    run = tmp_path / "run"
    main(["fit", *small(run, small_set, text, *CLASSIFICATION)])
    (run / "fit.json").unlink()
    # Another vocabulary on the disk does not reach a run that continues.
    vocabulary = (text / "tokenizer.json").read_text()
    swapped = vocabulary.replace('"edema": ', '"X": ').replace('"cardiomegaly": ', '"edema": ')
    (text / "tokenizer.json").write_text(swapped.replace('"X": ', '"cardiomegaly": '))
    last = run / "checkpoints/last.ckpt"
    before = torch.load(last, weights_only=True)["network"]["text_encoder"]
    main(["fit", *small(run, small_set, text, *CLASSIFICATION)])
    assert torch.load(last, weights_only=True)["network"]["text_encoder"] == before
    assert "was trained with another text_encoder" in refused(
        capsys, ["fit", *small(tmp_path / "new", small_set, text), "--ckpt_path", str(last)]
    )
    shutil.rmtree(text)
    (run / "checkpoints/untrained.ckpt").unlink()  # one evaluation is enough
    main(["test", "--config", str(run / "config.yaml")])
    # The same settings and seed as the first run: only the place of the language model differs.
    a, b = (pd.read_parquet(folder / "predictions/classification.parquet") for folder in (run, finished))
    pd.testing.assert_frame_equal(a, b, check_exact=True)


def test_training_does_not_go_on_from_weights_alone(finished, fit, tmp_path, capsys):
    untrained = finished / "checkpoints/untrained.ckpt"
    message = refused(capsys, [*fit(tmp_path / "new"), "--ckpt_path", str(untrained)])
    assert f"starts from them by --model.init_args.init_from {untrained}" in message


def test_a_changed_prepared_set_is_noticed(finished, fit, small_set, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    now = json.loads((run / "data.json").read_text())
    assert (now["fingerprint"], now["images_of"]) == (PreparedSet(small_set).fingerprint, ["test"])
    lineage = torch.load(run / "checkpoints/best.ckpt", weights_only=True)["lineage"]
    assert lineage == now, "also outside its run"
    (run / "data.json").write_text(json.dumps({"fingerprint": "other"}))
    assert "holds a run on other data: the prepared set has changed since" in refused(capsys, fit(run))


@pytest.mark.slow
def test_a_runs_results_stay_its_own(finished, small_set, tmp_path, capsys, info):
    run, other = (Path(shutil.copytree(finished, tmp_path / name)) for name in ("run", "other"))
    changed = Path(shutil.copytree(small_set, tmp_path / "changed"))
    labels = pd.read_parquet(changed / "labels.parquet")
    labels.assign(Edema=1.0).to_parquet(changed / "labels.parquet", index=False)
    before = {
        name: (run / name).read_bytes() for name in ("results.json", "predictions/classification.parquet")
    }
    words = ["test", "--config", str(run / "config.yaml"), "--run_folder", str(run), *CLASSIFICATION]
    words += ["--data.init_args.folder", str(changed), "--ckpt_path", str(other / "checkpoints/last.ckpt")]
    main(words)
    assert {name: (run / name).read_bytes() for name in before} == before
    (folder,) = (run / "tests").iterdir()
    now = PreparedSet(changed).fingerprint
    assert folder.name.startswith("other_last_") and folder.name.endswith(f"_on_changed_{now[:8]}")
    results = json.loads((folder / "results.json").read_text())
    assert results["checkpoint"]["file"] == "other/checkpoints/last.ckpt"
    assert re.match(
        "other/checkpoints/last.ckpt was trained on another set .test, ", *results["notes"]["data"]
    )
    assert not (folder / "results_untrained.json").exists()
    said = "\n".join(info())
    assert f"the set is not that of the run in {run}" in said and f"results: {folder}/results.json" in said
    images = pd.read_parquet(changed / "images.parquet")
    images = images.replace({"train": "test", "test": "train"})
    images.to_parquet(changed / "images.parquet", index=False)
    message = refused(capsys, words)
    assert re.search(rf"24 of 3\d images to evaluate are training images of {other}", message)


def test_a_copy_is_tested_as_itself(finished, tmp_path, info):
    """Also where its training began with a checkpoint of the original, whose results stay."""
    results = (finished / "results.json").read_bytes()
    copy = Path(shutil.copytree(finished, tmp_path / "copy"))
    config = yaml.safe_load((copy / "config.yaml").read_text())
    config["ckpt_path"] = str(finished / "checkpoints/last.ckpt")
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    (copy / "results.json").unlink()
    main(["test", "--config", str(copy / "config.yaml"), *CLASSIFICATION, "--untrained", "false"])
    assert f"copy/config.yaml lies in {copy} and names {finished}" in "\n".join(info())
    assert json.loads((copy / "results.json").read_text())["checkpoint"]["file"] == "checkpoints/best.ckpt"
    assert (finished / "results.json").read_bytes() == results and not (copy / "tests").exists()


def test_a_run_continues_with_other_loader_workers(finished):
    config = yaml.safe_load((finished / "config.yaml").read_text())
    config["data"]["init_args"]["num_workers"] += 3
    assert not RunFolder(finished).check(config, json.loads((finished / "data.json").read_text()))


def test_a_trial_run_claims_no_folder(tmp_path, fit):
    trial = ("--trainer.fast_dev_run", "true", "--trainer.callbacks", "[]")
    main(fit(tmp_path / "run", *trial))
    assert not [file for file in tmp_path.rglob("*") if file.is_file()], "a trial leaves nothing behind"


def test_an_unfinished_run_continues_where_it_stopped(small_set, small_bert, tmp_path, capsys, info):
    run = tmp_path / "run"
    short = ("--trainer.max_epochs", "1", "--trainer.limit_val_batches", "1", "--trainer.callbacks", "[]")
    arguments = ["fit", *small(run, small_set, small_bert, *short)]
    main(arguments)
    best = tmp_path / "elsewhere.ckpt"
    shutil.copy(run / "checkpoints/best.ckpt", best)
    weights = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    (run / "fit.json").unlink()
    main([*arguments, "--ckpt_path", str(best)])
    assert any(f"last.ckpt, where it has come to since {best}" in line for line in info())
    again = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    (run / "fit.json").unlink()
    for name in ("last.ckpt", "previous.ckpt"):
        (run / "checkpoints" / name).write_bytes(b"PK broken")
    assert "continue from another with --ckpt_path" in refused(capsys, arguments)
    with pytest.warns(UserWarning, match=r"can be read .*; continuing from .*elsewhere.ckpt"):
        main([*arguments, "--ckpt_path", str(best)])
    assert (run / "fit.json").is_file()


def test_errors_of_libraries_are_one_line():
    with pytest.raises(yaml.YAMLError) as unwritten:
        yaml.safe_dump({"interval": Interval.step})
    with pytest.raises(RuntimeError) as unlogged:
        EarlyStopping("validate/nothing")._validate_condition_metric({})
    with pytest.raises(ModuleNotFoundError) as absent, pytest.MonkeyPatch.context() as patch:
        wandb = RequirementCache("wandb>=999")
        patch.setattr("pytorch_lightning.loggers.wandb._WANDB_AVAILABLE", wandb)
        WandbLogger()
    with pytest.raises(ModuleNotFoundError) as no_board, pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_fabric.loggers.tensorboard._TENSORBOARD_AVAILABLE", False)
        patch.setattr("lightning_fabric.loggers.tensorboard._TENSORBOARDX_AVAILABLE", False)
        TensorBoardLogger(".")
    wrapped = TypeError("a configuration")
    wrapped.__cause__ = unwritten.value
    for error, words in (
        (wrapped, "config.yaml cannot hold <Interval.step"),
        (absent.value, "trainer.logger needs the package wandb: pip install 'medclip_dcl[wandb]'"),
        (
            no_board.value,
            "trainer.logger needs the package tensorboard: pip install 'medclip_dcl[tensorboard]'",
        ),
        (unlogged.value, "trainer: "),
        (RuntimeError("DataLoader timed out after 600 seconds"), "data.num_workers: DataLoader timed out"),
    ):
        assert str(_about_input(error)).startswith(words) or words in str(_about_input(error))
    assert _about_input(RuntimeError("of a user's class")) is None


@pytest.mark.slow
def test_part_never_replaces_a_whole(finished, small_set, tmp_path, info):
    run = shutil.copytree(finished, tmp_path / "run")
    arguments = ["--config", str(finished / "config.yaml"), "--run_folder", str(run), *CLASSIFICATION]
    main(["predict", *arguments])

    def content():
        return {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}

    before = content()
    for command in ("test", "predict"):
        main([command, *arguments, "--trainer.fast_dev_run", "true"])
    assert content() == before
    for command in ("test", "predict"):
        limit = [f"--trainer.limit_{command}_batches", "1", "--data.init_args.batch_size", "4"]
        main([command, *arguments, *limit])
        assert any(f"these go to {run / 'tests/limited'}" in line for line in info())
    now = content()
    assert {file: now[file] for file in before} == before
    limited = run / "tests/limited"
    assert json.loads((limited / "results.json").read_text())["limited"]
    assert len(pd.read_parquet(limited / "predictions/image_embeddings.parquet")) == 4
    # Where there is none it is written, with a note; the whole replaces it.
    (run / "results.json").unlink()
    (run / "results_untrained.json").unlink()
    main(["test", *arguments, "--trainer.limit_test_batches", "1", "--data.init_args.batch_size", "4"])
    assert "limited" in json.loads((run / "results.json").read_text())
    main(["test", *arguments])
    assert "limited" not in json.loads((run / "results.json").read_text())


@pytest.mark.slow
def test_longer_by_steps_sees_the_same_batches(fit, tmp_path, monkeypatch):
    """As one run of that length, from the middle of an epoch and from its end (three steps)."""
    seen: list[tuple[int, int, list[str]]] = []

    def note(self, trainer, pl_module, batch, index):
        seen.append((trainer.global_step, trainer.current_epoch, batch["dicom_id"]))

    monkeypatch.setattr("medclip_dcl.training.throughput.Arrival.on_train_batch_start", note)

    def train(run: str, *ends: int) -> list[tuple[int, int, list[str]]]:
        seen.clear()
        for end in ends:
            length = ("--trainer.max_steps", str(end), "--trainer.max_epochs", "-1")
            main(fit(tmp_path / run, *length, "--trainer.callbacks", "[]"))
        return list(seen)

    whole = train("whole", 9)
    assert train("longer", 3, 4, 6, 9) == whole
    assert pd.read_csv(tmp_path / "longer/metrics.csv")["step"].max() == 8


@pytest.mark.slow
def test_untrained_results_of_another_protocol_are_measured_again(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    before = json.loads((run / "results_untrained.json").read_text())
    main(["test", "--config", str(finished / "config.yaml"), "--run_folder", str(run), *CLASSIFICATION])
    again = json.loads((run / "results_untrained.json").read_text())
    assert before["protocol"].keys() > again["protocol"].keys() == {"classification"}
    assert again["metrics"]["classification"] == before["metrics"]["classification"]
    cases = run / "predictions_untrained/classification.parquet"
    cases.unlink()
    main(["test", "--config", str(finished / "config.yaml"), "--run_folder", str(run), *CLASSIFICATION])
    assert cases.is_file(), "what compare --untrained asks for is made"


def test_predict_writes_embeddings_and_scores(finished, info):
    main(["predict", "--config", str(finished / "config.yaml")])
    assert f"predict: {finished}/checkpoints/best.ckpt, epoch " in "\n".join(info())
    assert f"predictions: {finished}/predictions" in info()
    images = pd.read_parquet(finished / "predictions/image_embeddings.parquet")
    scores = pd.read_parquet(finished / "predictions/finding_scores.parquet")
    sentences = pd.read_parquet(finished / "predictions/sentence_embeddings.parquet")
    assert len(images) == 10 and len(scores) == 50 and len(images["embedding"][0]) == 128
    for table in (images, scores):
        assert list(table)[:3] == ["dicom_id", "subject_id", "study_id"]
    assert set(sentences["sentence_id"]) <= set(range(9))
    # The same numbers as the notebook's model gives for the prepared image.
    config = yaml.safe_load((finished / "config.yaml").read_text())
    folder = Path(config["data"]["init_args"]["folder"])
    row = pd.read_parquet(folder / "images.parquet").query("use == 'test'").iloc[0]
    (first,) = images.query("dicom_id == @row.dicom_id").to_dict("records")
    assert (first["subject_id"], first["study_id"]) == (row["subject_id"], row["study_id"])
    difference = load(finished / "checkpoints/best.ckpt").classify(folder / "images" / row["path"])
    mine = scores.query("dicom_id == @row.dicom_id").set_index("finding")
    for finding in CHEX5:
        expected = (mine["score_positive"] - mine["score_negative"])[finding]
        assert difference[finding].iloc[0] == pytest.approx(expected, abs=1e-4)
    # For a spreadsheet: the same, an embedding as a column for each number.
    main(["predict", "--config", str(finished / "config.yaml"), "--prediction_format", "csv"])
    pd.testing.assert_frame_equal(
        pd.read_csv(finished / "predictions/finding_scores.csv"),
        scores.reset_index(drop=True),
        check_dtype=False,
    )
    wide = pd.read_csv(finished / "predictions/image_embeddings.csv")
    assert list(wide)[:4] == ["dicom_id", "subject_id", "study_id", "embedding_0"] and wide.shape == (10, 131)
    assert wide.filter(like="embedding_").to_numpy() == pytest.approx(
        np.stack(images["embedding"].tolist()), abs=1e-6
    )


@pytest.mark.slow
def test_prompts_of_a_file_replace_the_callbacks(finished, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(
        "Nodule: [No nodule, [Nodule, Mass]]\nFractur: [No fracture, Fracture]\n"
    )
    command = ["--config", str(finished / "config.yaml"), "--prompts", str(tmp_path / "mine.yaml")]
    found = {}
    for ensemble in ("scores", "embeddings"):
        main(["predict", *command, *(["--ensemble", ensemble] if ensemble != "scores" else [])])
        scores = found[ensemble] = pd.read_parquet(finished / "predictions/finding_scores.parquet")
        assert len(scores) == 20 and set(scores["finding"]) == {"Nodule", "Fractur"}
        assert scores.attrs == {"ensemble": ensemble}
    is_other = found["scores"]["score_positive"] != found["embeddings"]["score_positive"]
    assert set(scores["finding"][is_other]) == {"Nodule"}, "of one prompt a side both are the same"
    before = (finished / "results.json").read_bytes()
    (tmp_path / "mine.yaml").write_text("Fractur: [No fracture, Fracture]\n")
    said = refused(capsys, ["test", *command])
    assert "does not label 'Fractur'; did you mean Fracture?" in said and "Support Devices" in said
    assert (finished / "results.json").read_bytes() == before


@pytest.mark.slow
def test_null_is_float32_outside_of_fit(finished, fit, tmp_path, monkeypatch):
    class Seen(Exception):
        pass

    tf32: list[bool] = []

    def seen(cli, _):
        raise Seen(cli.trainer.precision)

    monkeypatch.setattr("medclip_dcl.command.lightning_cli.MedclipCLI._run_subcommand", seen)
    monkeypatch.setattr("medclip_dcl.command.lightning_cli.best_precision", lambda _: "bf16-mixed")
    monkeypatch.setattr("medclip_dcl.command.lightning_cli.without_tf32", lambda: tf32.append(False))
    found: dict[str, tuple[str, int]] = {}
    for command in ("fit", "test", "predict"):
        arguments = (
            fit(tmp_path / "run")[1:] if command == "fit" else ["--config", str(finished / "config.yaml")]
        )
        with pytest.raises(Seen) as caught:
            main([command, *arguments, "--trainer.precision", "null"])
        found[command] = str(caught.value), len(tf32)
    of_others = {name: ("32-true", place) for place, name in enumerate(["test", "predict"], 1)}
    assert found == {"fit": ("bf16-mixed", 0), **of_others}


@pytest.mark.slow
def test_initial_weights_of_another_run_may_go(finished, small_set, small_bert, tmp_path):
    source = shutil.copy(finished / "checkpoints/best.ckpt", tmp_path / "source.ckpt")
    run = tmp_path / "run"
    arguments = small(run, small_set, small_bert, objective="infonce")
    arguments += [
        "--model.init_args.init_from", str(source), "--data.init_args.image_size", "64",
        "--model.init_args.similarity", "medclip_dcl.networks.GlobalCosine", "--trainer.limit_val_batches", "2",
        *CLASSIFICATION,
    ]  # fmt: skip
    main(["fit", *arguments])
    before, after = (
        torch.load(file, weights_only=True) for file in (source, run / "checkpoints/untrained.ckpt")
    )
    record = json.loads((run / "initial_weights.json").read_text())
    for name in record["taken"]:
        assert torch.equal(after["state_dict"][f"network.{name}"], before["state_dict"][f"network.{name}"]), (
            name
        )
    assert record["kept"] == ["similarity.log_gamma2"] and after["initial_weights"] == record
    assert record["left_out"] == ["similarity.log_gamma2", "similarity.q.weight", "similarity.q.bias"]
    assert set(record["taken"]) | set(record["kept"]) == {
        name.removeprefix("network.") for name in after["state_dict"]
    }

    # As if it had been killed after two epochs, and the other run were something else by now.
    source.write_bytes(b"no checkpoint")
    (run / "fit.json").unlink()
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["init_args"]["init_from"] == str(source)
    config["trainer"]["max_epochs"] = 3
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", str(run / "config.yaml")])
    assert json.loads((run / "fit.json").read_text())["epochs"] == 3
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["initial_weights"] == record
    source.unlink()
    main(["test", "--config", str(run / "config.yaml")])
    results = [json.loads((run / f"{name}.json").read_text()) for name in ("results", "results_untrained")]
    assert results[0]["checkpoint"]["weights"] != results[1]["checkpoint"]["weights"]
    load(finished / "checkpoints/best.ckpt").save_pretrained(tmp_path / "exported")
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "exported").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]
