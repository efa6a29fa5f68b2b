"""Results and training images of a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest

from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.runs.run_folder import RunFolder, RunFolderError

Tables = tuple[pd.DataFrame, pd.DataFrame]


def another_split(images: pd.DataFrame, files: pd.DataFrame) -> Tables:
    return images.replace({"use": {"train": "test", "test": "train"}}), files


def another_size(images: pd.DataFrame, files: pd.DataFrame) -> Tables:
    return another_split(images, files.assign(digest=files["digest"].str[::-1]))


def phantom_of_the_seed(images: pd.DataFrame, files: pd.DataFrame) -> Tables:
    return another_size(images, files.assign(original_bytes=files.index))


def further_images(images: pd.DataFrame, files: pd.DataFrame) -> Tables:
    """The tested images are new ones of a training patient whose earlier images are not in the set."""
    is_new = images["use"] == "test"
    files.loc[is_new, "digest"] = "new"
    images.loc[is_new, "dicom_id"] += "new"
    images.loc[is_new, "subject_id"] = 100
    return images.iloc[2:], files


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            another_split,
            "24 of 24 images to evaluate are training images of .*, and 24 are of its training patients",
        ),
        (another_size, "24 of 24 images to evaluate are training images"),
        (
            further_images,
            "0 of 6 images to evaluate are training images of .*, and 6 are of its training patients",
        ),
        (phantom_of_the_seed, None),
    ],
)
def test_images_of_the_training_are_not_evaluated(small_set, tmp_path, change, message):
    folder = Path(shutil.copytree(small_set, tmp_path / "set"))
    run = RunFolder(tmp_path / "run")
    run.claim({"model": {}}, {}, PreparedSet(folder).image_digests())
    names = ("images", "image_files")
    tables = change(*(pd.read_parquet(folder / f"{name}.parquet") for name in names))
    for name, table in zip(names, tables, strict=True):
        table.to_parquet(folder / f"{name}.parquet", index=False)
    prepared = PreparedSet(folder)
    tested = prepared.table("images").query("use == 'test'")["dicom_id"]
    if message is None:
        return run.require_untrained(prepared, tested)
    with pytest.raises(RunFolderError, match=message):
        run.require_untrained(prepared, tested)


def test_other_results_have_a_folder_of_their_own(tmp_path):
    run, other = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    run.claim({"model": {}}, {})
    own, foreign = run.checkpoints / "best.ckpt", other.checkpoints / "best.ckpt"
    assert run.folder_of_test(own) == run.folder == run.folder_of_test(run.checkpoints / "last.ckpt")
    assert run.folder_of_test(own, "set_0f") == run.folder / "tests/on_set_0f"
    names = [run.folder_of_test(file).name for file in (foreign, run.checkpoints / "untrained.ckpt")]
    assert names[0].startswith("b_best_") and names[1].startswith("a_untrained_")
    assert run.folder_of_test(foreign, "set_0f").name == f"{names[0]}_on_set_0f"
    # A folder without a run takes any results.
    assert other.folder_of_test(own) == other.folder
