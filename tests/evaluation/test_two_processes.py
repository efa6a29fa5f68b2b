"""Two processes find what one finds, on numbers of images that two do not divide: `test`, and `fit` of a classifier."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from medclip_dcl.command.cli import main
from medclip_dcl.data.prepared import write_table
from tests.evaluation.classifier_runs import results, words
from tests.processes import in_processes
from tests.small import write_pixel

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def odd_set(small_set, tmp_path_factory) -> Path:
    """The small set without the labels of one test image: nine images are evaluated."""
    folder = shutil.copytree(small_set, tmp_path_factory.mktemp("odd") / "set")
    cases = pd.read_parquet(folder / "cases.parquet")
    dropped = cases.loc[cases["use"] == "test", "dicom_id"].iloc[0]
    write_table(cases[cases["dicom_id"] != dropped], folder / "cases.parquet", "cases")
    return folder


@pytest.fixture(scope="module")
def one_and_two(odd_set, small_bert, undrawn, tmp_path_factory) -> tuple[Path, Path]:
    """A run that one process tested, and a copy to be tested by two."""
    one, two = (tmp_path_factory.mktemp("runs") / name for name in ("one", "two"))
    options = {
        "--run_folder": one,
        "--trainer.max_epochs": 1,
        "--trainer.enable_progress_bar": "false",
        "--trainer.precision": "32-true",
        "--trainer.accelerator": "cpu",
        "--trainer.check_val_every_n_epoch": 1,
        "--model.init_args.text_encoder.init_args.pretrained": small_bert,
        "--model.init_args.image_encoder": "tests.small.PatchRegions",
        "--model.init_args.image_encoder.init_args.dim": 128,
        "--model.init_args.warmup_steps": 1,
        "--data.init_args.folder": odd_set,
        "--data.init_args.image_size": 48,
        "--data.init_args.crop_size": 32,
        "--data.init_args.batch_size": 4,
    }
    configurations = [str(ROOT / f"configs/{name}.yaml") for name in ("demo", "objective/infonce")]
    words = [word for name, value in options.items() for word in (name, str(value))]
    main(["fit", *(word for file in configurations for word in ("--config", file)), *words])
    (one / "checkpoints/untrained.ckpt").unlink()  # one evaluation each is enough
    shutil.copytree(one, two)
    main(["test", "--config", str(one / "config.yaml")])
    return one, two


@pytest.fixture(scope="module")
def of_one_and_two(
    one_and_two, labelled_set, encoder, probed, tmp_path_factory
) -> dict[str, tuple[Path, Path]]:
    """Run folders of one process and of two. The classifier's encoder is frozen: BatchNorm sees half a batch."""
    one, two = one_and_two
    probe = tmp_path_factory.mktemp("two") / "probe"
    commands = [
        ["test", "--import", "tests.small", "--config", str(one / "config.yaml"), "--run_folder", str(two)],
        ["fit", *words(probe, labelled_set, encoder, probe=True), "--kept_steps=[4]"],
        ["test", "--config", str(probed / "config.yaml"), "--run_folder", str(probe)],
    ]
    in_processes(2, process, commands)
    return {"image_text": (one, two), "classifier": (probed, probe)}


def no_content(folder: Path, *_: Any) -> None:
    raise AssertionError(f"the second process looks at {folder}")


def process(rank: int, commands: list[list[str]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medclip_dcl.evaluation.results.write_figure", write_pixel)
        if rank:  # the first process looks at the content of the set for this machine
            patch.setattr("medclip_dcl.data.prepared.current_content", no_content)
        for command in commands:
            main([*command, "--trainer.devices", "2", "--trainer.strategy", "ddp"])


def assert_close(a: Any, b: Any, where: str) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_close(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, float):
        assert b == pytest.approx(a, rel=1e-6, abs=1e-6), where
    else:
        assert a == b, where


def test_every_metric_and_case_agrees(of_one_and_two):
    one, two = map(results, of_one_and_two["image_text"])
    assert (one["timings"]["processes"], two["timings"]["processes"]) == (1, 2)
    assert one["metrics"]["classification"] and one["metrics"]["grounding"] and one["metrics"]["retrieval"]
    for part in ("metrics", "counts", "protocol", "dataset"):
        assert_close(one[part], two[part], part)
    for section in ("classification", "grounding", "retrieval"):
        a, b = (
            pd.read_parquet(run / f"predictions/{section}.parquet") for run in of_one_and_two["image_text"]
        )
        pd.testing.assert_frame_equal(a, b, rtol=1e-5, atol=1e-6)
        if section == "classification":
            assert a["dicom_id"].nunique() == 5 and len(a) == 25
            assert not a.duplicated(["dicom_id", "finding"]).any()


def test_a_classifier_is_trained_and_tested_alike(of_one_and_two):
    runs = of_one_and_two["classifier"]
    a, b = (torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for run in runs)
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=1e-4, atol=1e-5, msg=key)
    curves = [pd.read_csv(run / "metrics.csv") for run in runs]
    is_kept = curves[1]["validate/loss"].notna() & (curves[1]["step"] == 3)
    assert is_kept.sum() == 1 and [file.name for file in (runs[1] / "steps/4").iterdir()] == ["results.json"]
    of_step = json.loads((runs[1] / "steps/4/results.json").read_text())
    assert (of_step["checkpoint"]["step"], of_step["timings"]["processes"]) == (4, 2)
    curves[1] = curves[1][~is_kept]
    for column in ("train/loss", "validate/loss", "validate/auc", "validate/average_precision"):
        a, b = (curve[column].dropna().tolist() for curve in curves)
        assert a == pytest.approx(b, abs=1e-5), column
    a, b = (pd.read_parquet(run / "predictions/finding_classification.parquet") for run in runs)
    pd.testing.assert_frame_equal(a, b, rtol=1e-3, atol=1e-4)
    one, two = map(results, runs)
    assert two["timings"]["processes"] == 2 and one["counts"] == two["counts"]
