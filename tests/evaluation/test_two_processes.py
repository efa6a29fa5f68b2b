"""`test` in two processes finds what one process finds, on a number of images that two do not divide."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from medclip_dcl.cli import main
from medclip_dcl.data.prepared import write_table

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
def of_one_and_two(odd_set, small_bert, tmp_path_factory) -> list[Path]:
    """Two copies of a run folder, tested by one process and by two."""
    one, two = (tmp_path_factory.mktemp("runs") / name for name in ("one", "two"))
    options = {
        "--run_folder": one,
        "--trainer.max_epochs": 1,
        "--trainer.enable_progress_bar": "false",
        "--trainer.precision": "32-true",
        "--trainer.accelerator": "cpu",
        "--trainer.check_val_every_n_epoch": 1,
        "--model.init_args.text_encoder.init_args.pretrained": small_bert,
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
    for run, processes in ((one, []), (two, ["--trainer.devices", "2", "--trainer.strategy", "ddp_spawn"])):
        main(["test", "--config", str(one / "config.yaml"), "--run_folder", str(run), *processes])
    return [one, two]


def results(run: Path) -> dict[str, Any]:
    return json.loads((run / "results.json").read_text(encoding="utf-8"))


def assert_close(a: Any, b: Any, where: str) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_close(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, float):
        assert b == pytest.approx(a, rel=1e-6, abs=1e-6), where
    else:
        assert a == b, where


def test_every_metric_agrees(of_one_and_two):
    one, two = map(results, of_one_and_two)
    assert (one["timings"]["processes"], two["timings"]["processes"]) == (1, 2)
    assert one["metrics"]["classification"] and one["metrics"]["grounding"] and one["metrics"]["retrieval"]
    for part in ("metrics", "counts", "protocol", "dataset"):
        assert_close(one[part], two[part], part)


@pytest.mark.parametrize("section", ["classification", "grounding", "retrieval"])
def test_no_case_is_lost_or_counted_twice(of_one_and_two, section):
    one, two = (pd.read_parquet(run / "predictions" / f"{section}.parquet") for run in of_one_and_two)
    pd.testing.assert_frame_equal(one, two, rtol=1e-5, atol=1e-6)
    if section == "classification":
        assert one["dicom_id"].nunique() == 5 and len(one) == 25
        assert not one.duplicated(["dicom_id", "finding"]).any()
