"""Images that a model was trained on, by what travels with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import digest
from medclip_dcl.common.weight_files import SavedModel
from medclip_dcl.data.lineage import LINEAGE, Lineage
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.runs.run_folder import RunFolder

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
    lineage = Lineage(tmp_path / "run", {}, PreparedSet(folder).image_digests())
    names = ("images", "image_files")
    tables = change(*(pd.read_parquet(folder / f"{name}.parquet") for name in names))
    for name, table in zip(names, tables, strict=True):
        table.to_parquet(folder / f"{name}.parquet", index=False)
    prepared = PreparedSet(folder)
    tested = prepared.table("images").query("use == 'test'")["dicom_id"]
    if message is None:
        return lineage.require_untrained(prepared, tested)
    with pytest.raises(UserError, match=message):
        lineage.require_untrained(prepared, tested)


@pytest.mark.filterwarnings("error")
def test_digests_are_of_images_now(small_set, tmp_path):
    folder = Path(shutil.copytree(small_set, tmp_path / "set"))
    written = PreparedSet(folder).image_digests()
    path = PreparedSet(folder).table("images")["path"][3]
    (folder / "images" / path).write_bytes(b"another image")
    now = PreparedSet(folder).image_digests()
    assert now["digest"][3] == digest(b"another image") != written["digest"][3]
    assert now.drop(index=3).equals(written.drop(index=3))


def other_images(folder: Path, to: Path, **info: Any) -> PreparedSet:
    """A set of other images; of the same source unless `info` says otherwise."""
    shutil.copytree(folder, to)
    for name, column in (("images", "dicom_id"), ("image_files", "digest")):
        table = pd.read_parquet(to / f"{name}.parquet")
        table.assign(**{column: to.name + table[column]}).to_parquet(to / f"{name}.parquet", index=False)
    described = json.loads((to / "dataset.json").read_text())
    (to / "dataset.json").write_text(json.dumps({**described, **info}))
    return PreparedSet(to)


OWN, NONE, UNKNOWN = "train patients of this set", "no images of this set", "not known"
ELSEWHERE = "images of this set elsewhere (test)"
BY_SET = [OWN, f"{ELSEWHERE}; others not known", UNKNOWN]


@pytest.mark.parametrize(
    ("place", "answers"),
    [
        ("in its run", [OWN, ELSEWHERE, NONE]),
        ("outside its run", BY_SET),
        ("in another run", BY_SET),
        ("exported", BY_SET),
        ("converted", [UNKNOWN] * 3),
        ("untrained, in its run", [NONE] * 3),
        ("untrained, in no run", [UNKNOWN] * 3),
        ("exported, named untrained.ckpt", BY_SET),
        ("started from the export", [BY_SET[1], BY_SET[1], f"{OWN}; others not known"]),
    ],
)
def test_answers_of_what_travels(place, answers, small_set, tmp_path) -> None:
    own, another = PreparedSet(small_set), other_images(small_set, tmp_path / "another")
    foreign = other_images(small_set, tmp_path / "foreign", source="PadChest")
    record, images = Lineage.of(None).after(own, False)
    run, other, folder = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "other"), tmp_path / "folder"
    run.claim({}, record, images)
    other.claim({}, *Lineage.of(None).after(foreign, False))
    if place == "exported, named untrained.ckpt":
        folder = tmp_path / "untrained.ckpt"
    folder.mkdir()
    if "export" in place:
        (folder / "data.json").write_text(json.dumps(record))
    content: dict[str, Any] = {LINEAGE: record}
    saved = {
        "in its run": SavedModel(run.checkpoints / "best.ckpt", {}, content),
        "outside its run": SavedModel(tmp_path / "copy.ckpt", {}, content),
        "in another run": SavedModel(other.checkpoints / "copy.ckpt", {}, content),
        "untrained, in its run": SavedModel(run.checkpoints / "untrained.ckpt"),
        "untrained, in no run": SavedModel(tmp_path / "untrained.ckpt"),
    }.get(place, SavedModel(folder))
    lineage = Lineage.of(saved)
    if place == "started from the export":
        lineage = Lineage(tmp_path, *lineage.after(foreign, False))
    assert [str(lineage.of_set(prepared)) for prepared in (own, another, foreign)] == answers


def test_counts_of_every_training_travel(small_set, tmp_path) -> None:
    """Of each training, in data.json: name, fingerprint, images and patients of each part of its set."""
    own, foreign = PreparedSet(small_set), other_images(small_set, tmp_path / "foreign", source="PadChest")
    images = own.table("images")
    first, _ = Lineage.of(None).after(own, False)
    second, _ = Lineage(tmp_path, first).after(foreign, False)
    assert second["start"] | {"images_of": ["test"]} == first and first["start"] == {"images_of": []}
    for record in (first, second):
        for use, rows in images.groupby("use"):
            assert record["images"][use] == len(rows)
            assert record["patients"][use] == len({*rows["subject_id"]})
    assert json.loads(json.dumps(second)) == second and second["images_of"] == ["PadChest", "test", None]


def test_a_set_without_digests_is_not_known(small_set, tmp_path) -> None:
    before = Lineage(tmp_path, *Lineage.of(None).after(PreparedSet(small_set), False))
    (shutil.copytree(small_set, tmp_path / "set") / "image_files.parquet").unlink()
    assert (
        before.is_known
        and not Lineage(tmp_path, *before.after(PreparedSet(tmp_path / "set"), False)).is_known
    )


def test_copies_in_another_release(small_set, tmp_path) -> None:
    """Files of RSNA cannot be told to be NIH's; those of the same release are compared by image."""
    prepared = PreparedSet(small_set)
    digests, source = prepared.image_digests().assign(use="train"), prepared.info["source"]
    record = {"images_of": ["RSNA pneumonia", source]}
    for images, answer in (
        (digests, OWN),
        (digests.assign(digest="0"), OWN),  # of another size
        (digests.assign(use="validate"), NONE),
        (digests.assign(dicom_id="other", digest="0"), f"images of this set elsewhere ({source})"),
    ):
        assert str(Lineage(tmp_path, record, images).of_set(prepared)) == answer
    # Of the same set, and before that of NIH, whose images it has.
    names = [source, "NIH ChestX-ray14", "NIH ChestX-ray14"]
    prepared.info["options"]["images_of"] = names[1:2]
    for before, answer in (
        (names[:2], OWN),
        (names, f"{OWN}; images of this set elsewhere (NIH ChestX-ray14)"),
        ([*names[:2], None], f"{OWN}; others not known"),
    ):
        own = {"fingerprint": prepared.fingerprint, "images_of": before}
        assert str(Lineage(tmp_path, own, digests).of_set(prepared)) == answer


@pytest.mark.parametrize("damaged", [[], 3, {"images_of": "NIH"}, {"images_of": None}])
def test_damaged_names_of_sets(damaged, tmp_path) -> None:
    (tmp_path / "data.json").write_text(json.dumps(damaged))
    with pytest.raises(UserError, match="data.json: .*expected a (mapping|list of sets), found"):
        Lineage.of(SavedModel(tmp_path))


# --- Patients by the names of their source ---------------------------------------------------------------------------

PUBLIC = {"names_patients": True, "images_of": []}
OF_PADCHEST = {"names_patients": True, "images_of": ["PadChest"]}
OF_NIH = {"names_patients": True, "images_of": ["NIH ChestX-ray14"]}
NAMELESS = {"names_patients": False, "images_of": ["NIH ChestX-ray14"]}
TABLE = "folder of images with a table"


def of_source(
    folder: Path, to: Path, source: str, options: dict[str, Any], digits: int = 0, *, less: int = 0
) -> PreparedSet:
    """Other images, of patients whose names are `less` than the numbers of `folder`: of so many digits, or numbers."""
    other_images(folder, to, phantom=False, source=source, options=options)
    images = pd.read_parquet(to / "images.parquet")
    names = images["subject_id"] - less
    if digits:  # subject_id stays: a place in the set's own list
        rows = {
            "kind": "patient",
            "name": names.map(f"{{:0{digits}d}}".format),
            "number": images["subject_id"],
        }
        pd.DataFrame(rows).drop_duplicates().to_csv(to / "identifiers.csv", index=False)
    else:
        images.assign(subject_id=names).to_parquet(to / "images.parquet", index=False)
    return PreparedSet(to)


def named(prepared: PreparedSet, *uses: str) -> list[int]:
    """Name of the patient of each image, by the table and the CSV file alone."""
    images, file = pd.read_parquet(prepared.folder / "images.parquet"), prepared.folder / "identifiers.csv"
    lines = [line.split(",") for line in file.read_text().splitlines()[1:]] if file.exists() else []
    name_of = {int(number): int(name) for _, name, number in lines}
    return [name_of.get(number, number) for number in images.loc[images["use"].isin(uses), "subject_id"]]


@pytest.mark.parametrize(
    ("there", "here", "is_refused", "answer"),
    [
        (("PadChest", PUBLIC, 36), ("PadChest-GR", OF_PADCHEST, 36), True, OWN),
        (("PadChest-GR", OF_PADCHEST, 36), ("PadChest", PUBLIC, 36), True, OWN),
        (("CheXpert", PUBLIC, 12), ("CheXpert", PUBLIC, 12), True, OWN),
        (("NIH ChestX-ray14", PUBLIC), ("RSNA pneumonia", OF_NIH), True, OWN),
        (("mimic-cxr-2.0.0", {}), ("mimic-cxr-2.1.0", {}), True, OWN),
        (("PadChest", PUBLIC, 36), ("CheXpert", PUBLIC, 36), False, NONE),
        (("VinDr-CXR", PUBLIC), ("NIH ChestX-ray14", PUBLIC), False, NONE),
        ((TABLE, {}, 36), ("PadChest", PUBLIC, 36), False, NONE),
        (
            ("NIH ChestX-ray14", PUBLIC),
            ("SIIM-ACR pneumothorax", NAMELESS),
            False,
            "images of this set elsewhere (NIH ChestX-ray14)",
        ),
        (
            ("SIIM-ACR pneumothorax", NAMELESS),
            ("NIH ChestX-ray14", PUBLIC),
            False,
            "images of this set elsewhere (NIH ChestX-ray14)",
        ),
        ((TABLE, {}), (TABLE, {}), False, f"images of this set elsewhere ({TABLE})"),
    ],
)
def test_patients_are_compared_within_a_family(there, here, is_refused, answer, small_set, tmp_path) -> None:
    """No image is shared, and the numbers of patients differ where their names have many digits."""
    trained = of_source(small_set, tmp_path / "there", *there)
    lineage = Lineage(tmp_path, *Lineage.of(None).after(trained, False))
    tested = of_source(small_set, tmp_path / "here", *here, less=7)
    assert str(lineage.of_set(tested)) == answer
    images = tested.table("images")
    for uses in (["test", "grounding"], ["validate"]):
        # Validate patients of the training chose its checkpoint: they are not tested.
        used = {*named(trained, "train", *(["validate"] if "test" in uses else []))}
        n = sum(name in used for name in named(tested, *uses))
        evaluated = images.loc[images["use"].isin(uses), "dicom_id"]
        assert n > 0
        if not is_refused:
            lineage.require_untrained(tested, evaluated)
            continue
        with pytest.raises(UserError, match=f"and {n} are of its training .* --keep_out {tested.folder}$"):
            lineage.require_untrained(tested, evaluated)


def test_models_without_names_are_not_guessed(small_set, tmp_path) -> None:
    """An earlier data_images.parquet: patients are compared where the shared images have the same numbers."""
    trained = of_source(small_set, tmp_path / "there", "PadChest", PUBLIC, 36)
    record, images = Lineage.of(None).after(trained, False)
    before = images.drop(columns=["patient", "family"])
    tested = of_source(small_set, tmp_path / "here", "PadChest-GR", OF_PADCHEST, 36, less=7)
    lineage = Lineage(tmp_path, record, before)
    lineage.require_untrained(tested, tested.table("images")["dicom_id"])
    assert str(lineage.of_set(tested)) == "images of this set elsewhere (PadChest)"
    # A training that follows knows the names of its own patients, and says that others are not known.
    second = Lineage(
        tmp_path, *lineage.after(of_source(small_set, tmp_path / "next", "VinDr", PUBLIC), False)
    )
    assert str(second.of_set(tested)) == "images of this set elsewhere (PadChest)"
    whole = Lineage(tmp_path, record, images)
    assert str(Lineage(tmp_path, *whole.after(PreparedSet(small_set), False)).of_set(tested)) == OWN


def test_shared_images_tell_whose_names_are_used(small_set, tmp_path) -> None:
    """A user's table of images that a release has, too: one of them says that its names are the release's."""
    trained = of_source(small_set, tmp_path / "there", "PadChest", PUBLIC, 36)
    tested = of_source(small_set, tmp_path / "here", TABLE, {}, 36, less=7)
    lineage = Lineage(tmp_path, *Lineage.of(None).after(trained, False))
    held_out = tested.table("images").query("use == 'test'")["dicom_id"]
    lineage.require_untrained(tested, held_out)
    files = pd.read_parquet(file := tested.folder / "image_files.parquet")
    row = tested.table("images").query("subject_id == 107").index[0]  # the release's patient 100
    copied = pd.read_parquet(trained.folder / "image_files.parquet")["digest"][0]
    for digest_there, is_refused in ((copied, True), ("other", False)):
        files.loc[row, "digest"] = digest_there
        files.to_parquet(file, index=False)
        now = PreparedSet(tested.folder)
        if is_refused:
            with pytest.raises(UserError, match="0 of 6 images .* and 6 are of its training patients"):
                lineage.require_untrained(now, held_out)
        else:
            lineage.require_untrained(now, held_out)


def test_names_that_are_lost_are_not_replaced_by_numbers(small_set, tmp_path) -> None:
    prepared = of_source(small_set, tmp_path / "set", "PadChest", PUBLIC, 36)
    file, info = prepared.folder / "identifiers.csv", prepared.folder / "dataset.json"
    described = json.loads(info.read_text())
    info.write_text(json.dumps({**described, "identifiers": digest(file.read_bytes())}))
    assert len(PreparedSet(prepared.folder).image_digests()) == 42
    text = file.read_text()
    file.write_text(text.replace("1", "2"))
    for _ in range(2):
        with pytest.raises(UserError, match="identifiers.csv: expected the names of all patients as"):
            PreparedSet(prepared.folder).image_digests()
        file.unlink(missing_ok=True)
    info.write_text(json.dumps(described))  # of an earlier version
    file.write_text("".join(text.splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError, match="identifiers.csv: expected the names of all patients as"):
        PreparedSet(prepared.folder).image_digests()
