"""A folder of images with a table: what its rows become, and what a table of reports alone serves."""

from __future__ import annotations

import csv
import gzip
import json
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from data_prep import folder as command
from data_prep import options
from data_prep.folder import prepare
from data_prep.options import Folder
from data_prep.sources import check
from data_prep.sources.preparation import summary
from data_prep.sources.splits import draw_split
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.data.link import ReportsRequirements
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet
from medclip_dcl.data.reports import ReportsDataModule
from tests.program import verb

ROOT = Path(__file__).parents[2]

# image, patient, study, view, split, Cardiomegaly, text
ROWS = [
    ("a/1.png", "Q-7", "first", "PA", "train", "", "FINDINGS: Lungs clear.\n\nIMPRESSION: Normal."),
    ("a/1 side.png", "Q-7", "first", "LL", "train", "", ""),
    ("a\\2.jpg", "Q-7", "second", "frontal", "Training", "1.0", "Heart is big, as before."),
    ("b.tif", "R-1", "x", "ap", "val", "0", "Clear.No effusion."),
    ("c", "R-2", "y", "AP", "TEST", "-1", "No effusion."),
]
COLUMNS = ["image", "patient", "study", "view", "split", "Cardiomegaly", "text"]


def shade(root: Path, name: str, height: int = 23, width: int = 31) -> None:
    file = root / name.replace("\\", "/")
    file.parent.mkdir(parents=True, exist_ok=True)
    darkest = zlib.crc32(name.encode()) % 200  # no two are equal
    shades = np.linspace(darkest, 250, height * width).reshape(height, width).astype(np.uint8)
    Image.fromarray(shades).save(file, format=None if file.suffix else "PNG")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    for name, *_ in ROWS:
        shade(tmp_path / "hospital", name)
    return write(tmp_path / "hospital" / "table.csv", pd.DataFrame(ROWS, columns=COLUMNS))


def write(file: Path, rows: pd.DataFrame) -> Path:
    rows.to_csv(file, index=False)
    return file


def read(file: Path) -> pd.DataFrame:
    return pd.read_csv(file, dtype=str, keep_default_na=False)


def settings(table: Path, **changed: Any) -> Folder:
    return Folder(**{"table": table, "output": table.parent.parent / "set", "size": 16, **changed})


def made(table: Path, rows: pd.DataFrame | None = None, **changed: Any) -> PreparedSet:
    """The set of a table, of other rows than those that it has."""
    if rows is not None:
        write(table, rows)
    chosen = settings(table, **changed)
    prepare(chosen)
    return PreparedSet(chosen.output)


def rejects(prepared: PreparedSet) -> list[list[str]]:
    return pd.read_csv(prepared.folder / "rejects.csv", dtype=str).to_numpy().tolist()


def test_a_message_quotes_the_beginning_of_a_text_alone(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "Moderate cardiomegaly with a small left effusion of Mrs. Example. No pneumothorax."
    rows = read(table).assign(Edema=text)
    # Without a header the first patient's row is it.
    for given, changed in (
        (rows, {"label_columns": ("Edema",)}),
        (rows.set_axis([*rows.iloc[0]], axis=1), {}),
    ):
        with pytest.raises(UserError) as error:
            made(table, given, **changed)
        said = str(error.value) + capsys.readouterr().out
        assert text[:40].casefold() in said.casefold() and text[:45].casefold() not in said.casefold()


def test_label_columns_are_findings_like_any_other(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = read(table).rename(columns={"Cardiomegaly": "cardiomegaly"})
    rows = rows.assign(ward="71", nodule=["", "", "-1", "", ""], Effusion="1")
    rows["Rib fracture"] = ["", "1", "0", "1.0", "0"]
    # Blanks around names do not matter.
    rows = rows.rename(columns={name: f" {name} " for name in rows})
    prepared = made(table, rows, label_columns=("Rib fracture", "nodule", "Effusion"))
    assert prepared.findings == ["Cardiomegaly", "Pleural Effusion", "Rib fracture", "Nodule"]
    labels = prepared.table("labels").set_index("study_id")
    assert list(labels.columns) == [*CHEXPERT, "Rib fracture", "Nodule"]
    # Of study 1 its lateral image says it.
    assert labels["Rib fracture"].to_dict() == {1: 1, 2: 0, 3: 1, 4: 0}
    assert labels["Cardiomegaly"].dropna().to_dict() == {2: 1.0, 3: 0.0, 4: -1.0}
    assert (labels["Pleural Effusion"] == 1).all()
    cases = prepared.table("cases").query("finding == 'Rib fracture'")
    assert cases[["dicom_id", "label"]].to_numpy().tolist() == [["b.tif", 1], ["c", 0]]
    said = capsys.readouterr().out
    assert "the column Effusion counts as the finding Pleural Effusion\n" in said
    assert "columns that are not used: ward (--label_columns" in said
    assert "others     validate (yes/no): Rib fracture 1/0, Nodule 0/0" in said
    assert check.check_set(prepared.folder)[1] == []


def test_sex_and_age_of_a_table(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = read(table).assign(Gender=["", "Female", "M", "divers", "f"], age=["050Y", "", "61.5", "x", "200"])
    images = made(table, rows, sex_column="Gender").table("images").set_index("dicom_id")
    # Of study 1 its lateral image says the sex.
    assert images["sex"].to_dict() == {"a/1.png": "F", "a/2.jpg": "M", "b.tif": "unknown", "c": "F"}
    assert images["age"].dropna().to_dict() == {"a/1.png": 50.0, "a/2.jpg": 61.5}
    said = capsys.readouterr()
    assert "F 2, M 1, unknown 1, age unknown 2 (images)" in said.out
    assert "column Gender: expected F, M, female or male, found 'divers' in row 5 (1 of 4 rows)" in said.err


@pytest.mark.parametrize(
    ("columns", "changed", "sexes", "years"),
    [
        ({"sex": ["Feminino", "masculino"], "Edema": ["sim", "n\u00e3o"]}, {}, "FM", [10, 20]),
        ({"sex": ["donna", "uomo"], "Edema": ["s\u00ec", "no"]}, {}, "FM", [10, 20]),
        ({"sex": ["V", "M"], "Edema": ["ja", "nee"], "age": ["45 J.", "61 jaar"]}, {}, "FM", [45, 61]),
        ({"sex": ["Frau", "m"], "Edema": ["1", "0"], "age": ["45 J.", "61J"]}, {}, "FM", [45, 61]),
        (
            {"sex": "WM", "text": ["Befund: Erguss.", "Beurteilung: o. B."], "age": ["45 J."] * 2},
            {},
            "FM",
            [45, 45],
        ),
        ({"sex": "HM", "Edema": ["1", "0"]}, {"sex_values": {"h": "M", "m": "F"}}, "MF", [10, 20]),
        ({"sex": "FM", "text": ["Erguss.", "Clear."], "age": ["4 J"] * 2}, {"language": "de"}, "FM", [4, 4]),
    ],
)
def test_words_of_tables_in_other_languages(
    table: Path, columns: dict[str, Any], changed: dict[str, Any], sexes: str, years: list[int]
) -> None:
    names = ["a/1.png", "b.tif"]
    rows = pd.DataFrame({"image": names, "patient": names, "age": ["10", "20"], "split": "train"})
    images = made(table, rows.assign(**{k: list(v) for k, v in columns.items()}), **changed).table("images")
    assert images[["sex", "age"]].to_numpy().tolist() == list(map(list, zip(sexes, years, strict=True)))
    if "Edema" in columns:
        assert PreparedSet(table.parent.parent / "set").table("labels")["Edema"].tolist() == [1, 0]


def test_the_prepared_set_of_a_table(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared = made(table)
    images = prepared.table("images").set_index("dicom_id")
    # The lateral view is left out; the study keeps its number by name, 1: first, 2: second, 3: x, 4: y.
    columns = ["subject_id", "study_id", "view", "official_split", "use", "path", "height", "width"]
    assert images[columns].T.to_dict("list") == {
        "a/1.png": [1, 1, "PA", "train", "train", "a/1.png.jpg", 23, 31],
        "a/2.jpg": [1, 2, "frontal", "train", "train", "a/2.jpg", 23, 31],
        "b.tif": [2, 3, "ap", "validate", "validate", "b.tif.jpg", 23, 31],
        "c": [3, 4, "AP", "test", "test", "c.jpg", 23, 31],
    }
    for path in images["path"]:
        with prepared.open_image(path) as image:
            assert (image.format, image.size, image.mode) == ("JPEG", (16, 16), "L")
    reports = prepared.table("reports").merge(prepared.table("sentences"), on="sentence_id")
    said = reports.sort_values(["study_id", "position"])[["study_id", "section", "text"]]
    assert said.to_numpy().tolist() == [
        [1, "findings", "Lungs clear."],
        [1, "impression", "Normal."],
        [2, "no_header", "Heart is big, as before."],
        [3, "no_header", "Clear."],
        [3, "no_header", "No effusion."],
        [4, "no_header", "No effusion."],
    ]
    labels = prepared.table("labels").set_index("study_id")
    assert labels["Cardiomegaly"].to_dict() == {1: pytest.approx(np.nan, nan_ok=True), 2: 1, 3: 0, 4: -1}
    assert labels[[name for name in CHEXPERT if name != "Cardiomegaly"]].isna().all(axis=None)
    assert prepared.table("cases").to_numpy().tolist() == [["b.tif", "Cardiomegaly", 0, "validate"]]
    assert rejects(prepared) == []
    assert read(prepared.folder / "identifiers.csv").to_numpy().tolist() == [
        ["patient", "Q-7", "1"],
        ["patient", "R-1", "2"],
        ["patient", "R-2", "3"],
        *(["study", name, str(place)] for place, name in enumerate(("first", "second", "x", "y"), start=1)),
    ]
    counts = prepared.info["counts"]
    assert (counts["images_in_release"], counts["images_not_frontal"]) == (5, 1)
    assert not prepared.is_phantom
    said_to_user = capsys.readouterr()
    assert "train 2, validate 1, test 1" in said_to_user.out
    taken = "taken       75.0% no_header (e.g. 5 of 5 words, on 1 line)\n"
    assert taken in said_to_user.out and taken in check.check_set(prepared.folder)[0]
    assert "Lungs clear" not in said_to_user.out + said_to_user.err
    prepare(settings(table))
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(PreparedDataError, match="views: PA,AP,FRONTAL there, LL now"):
        prepare(settings(table, views=("LL",)))


def test_columns_of_other_names_delimiter_and_encoding(table: Path) -> None:
    prepare(settings(table))
    rows = read(table).rename(columns={name: f"my {name}" for name in COLUMNS[:5]})
    rows["my findings"], rows["Befund"] = "Größe unauffällig.", ""
    other = table.with_name("other.csv")
    other.write_text(rows.drop(columns="text").to_csv(index=False, sep=";"), encoding="latin-1")
    names = {f"{name}_column": f"my {name}" for name in COLUMNS[:5]}
    output = table.parent.parent / "other"
    text = {"findings_column": "my findings", "impression_column": "Befund"}
    prepare(settings(other, output=output, delimiter=";", encoding="latin-1", **names, **text))
    prepared = PreparedSet(output)
    assert prepared.table("sentences")["text"].tolist() == ["Größe unauffällig."]
    assert set(prepared.table("reports")["section"]) == {"findings"}
    for name in ("images", "labels"):
        first = PreparedSet(table.parent.parent / "set").table(name)
        pd.testing.assert_frame_equal(prepared.table(name), first)
    for encoding, wanted in ((None, "UTF-8"), ("ascii", "ascii")):
        with pytest.raises(UserError, match=rf"line \d is not {wanted}; name the --encoding"):
            prepare(settings(other, output=output / "x", delimiter=";", encoding=encoding, **names))


def test_sections_are_chosen_where_they_have_columns(table: Path) -> None:
    rows = read(table).rename(columns={"text": "findings"})
    rows["impression"] = ["Normal.", "Normal.", "", "", "Normal."]
    prepared = made(table, rows, sections=("impression",))
    assert prepared.table("sentences")["text"].tolist() == ["Normal."]
    assert set(prepared.table("reports")["study_id"]) == {1, 4}
    assert [row[2] for row in rejects(prepared)] == [
        "report has none of the chosen sections (impression)"
    ] * 2


def test_rows_without_study_or_split(table: Path) -> None:
    rows = pd.DataFrame(
        {"image": [f"{n}.png" for n in range(40)], "patient": [f"{n % 25}" for n in range(40)]}
    )
    rows["text"] = "Lungs clear."
    for name in rows["image"]:
        shade(table.parent, name)
    images = made(table, rows).table("images")
    # Numbers stay what they are; each row is a study, by its place in the table.
    assert images.set_index("dicom_id")["subject_id"].to_dict() == {f"{n}.png": n % 25 for n in range(40)}
    assert images.set_index("dicom_id")["study_id"].to_dict() == {f"{n}.png": n + 1 for n in range(40)}
    assert images.groupby("subject_id")["use"].nunique().max() == 1
    assert set(images["use"]) == {"train", "validate", "test"}
    assert not (table.parent.parent / "set" / "identifiers.csv").exists()
    prepare(settings(table, output=table.parent.parent / "other", split_seed=1))
    other = PreparedSet(table.parent.parent / "other").table("images")
    assert (images["use"] != other["use"]).any()
    with pytest.raises(PreparedDataError, match="made differently .split: "):
        prepare(settings(table, split_seed=1))
    write(table, rows.assign(split="train"))
    with pytest.raises(UserError, match="--split_shares and --split_seed draw a split, but the table"):
        prepare(settings(table, split_seed=1))


@pytest.mark.parametrize("deep", [False, True])
def test_rules_of_images_are_by_kind(table: Path, deep: bool) -> None:
    if deep:
        shades = np.linspace(9, 60_000, 23 * 31).reshape(23, 31).astype(np.uint16)
        Image.fromarray(shades).save(table.parent / "a" / "1.png")
    prepared = made(table)
    file = prepared.folder / "dataset.json"
    info = json.loads(file.read_text())
    assert info["image_rules"] == {"8 bits": 2, **({"deeper than 8 bits": 3} if deep else {})}

    def again(**changed: Any) -> None:
        file.write_text(json.dumps({**info, **changed}))
        prepare(settings(table))

    again()
    rules = info.pop("image_rules")
    with pytest.raises(PreparedDataError, match="image_rules of 8 bits: 1 there, 2 now"):
        again(image_rules={**rules, "8 bits": 1})


def test_drawn_split_has_its_shares_and_stays() -> None:
    patients = pd.Series([f"p{n}" for n in range(20_000)])
    drawn = draw_split(patients, (0.7, 0.1, 0.2), 3)
    shares = drawn.value_counts(normalize=True)
    assert shares["train"] == pytest.approx(0.7, abs=0.01)
    assert shares["test"] == pytest.approx(0.2, abs=0.01)
    fewer = draw_split(patients[5000:7000].iloc[::-1], (0.7, 0.1, 0.2), 3)
    assert (fewer == drawn[fewer.index]).all()
    assert set(draw_split(patients[:50], (0.0, 1.0, 0.0), 3)) == {"validate"}


@pytest.mark.slow
def test_a_split_names_findings_without_enough_patients(tmp_path, capsys) -> None:
    """Of each class: patients, not images. The shares that a line gives hold when the set is prepared with them."""
    rows = [(f"{n}.png", f"p{n // 2:03d}", int(n % 4 < 2), int(n < 2), int(n >= 2)) for n in range(400)]
    names = ["image", "patient", "Edema", "Fracture", "Support Devices"]
    (tmp_path / "hospital").mkdir()
    for pixels, (name, *_) in zip(
        np.random.default_rng(0).integers(0, 255, (400, 16, 16), np.uint8), rows, strict=True
    ):
        Image.fromarray(pixels).save(tmp_path / "hospital" / name)
    table = write(tmp_path / "hospital" / "table.csv", pd.DataFrame(rows, columns=names))

    def lines(output: str, **changed: Any) -> list[str]:
        prepare(settings(table, output=tmp_path / output, workers=1, **changed))
        said = capsys.readouterr().out
        check.run(options.Check(data=tmp_path / output, workers=1))
        found = [line for line in said.splitlines() if "too few" in line or "--split_shares" in line]
        assert found and "\n".join(found) in capsys.readouterr().out
        return found

    def patients(output: str, use: str, finding: str, label: int) -> int:
        prepared = PreparedSet(tmp_path / output)
        images = prepared.table("images").merge(prepared.table("labels"), on="study_id").query("use == @use")
        return images.loc[images[finding] == label, "subject_id"].nunique()

    few, _, gives = lines("set")
    n = patients("set", "validate", "Edema", 1)
    assert (
        0 < n < 20 and f"validate patients: {n} with Edema" in few and "calibration needs 20 of each" in few
    )
    shares = gives.split("--split_shares ")[1].split()[0]
    again = lines("again", split_shares=tuple(map(float, shares.split(","))))
    n = patients("again", "validate", "Edema", 1)
    assert n >= 20 and f"{n} validate patients with Edema" in gives
    # One patient alone has a fracture: no split helps, and none is offered.
    assert not any("Edema" in line or "--split_shares" in line for line in again)
    assert "with Fracture" in again[0] and "without Support Devices" in again[0]


def with_rows(rows: pd.DataFrame, *places: int, **changed: Any) -> pd.DataFrame:
    return pd.concat([rows, rows.iloc[list(places)].assign(**changed)])


def many(**columns: list[str]) -> pd.DataFrame:
    """A table of 24 images, in which the values of columns are repeated."""
    rows = {name: list(map(str, range(24))) for name in ("image", "patient", "study")}
    return pd.DataFrame(
        {**rows, "text": "Clear.", **{name: (given * 24)[:24] for name, given in columns.items()}}
    )


VIEWS = {"view": "PA"}
REFUSED: list[tuple[Callable[[pd.DataFrame], pd.DataFrame], dict[str, Any], str]] = [
    (lambda t: t.rename(columns={"patient": "a"}), {}, "column patient; found image, a, study.* --patient_column"),
    (lambda t: t.rename(columns={"image": "a"}), {}, "column image.*name it by --image_column, or pass --text_only"),
    (lambda t: t.drop(columns=["text", "Cardiomegaly"]), {}, "lacks the column text.*--text_column, or by --findings"),
    (lambda t: t.drop(columns="view"), {"views": ("LL",)}, "column view; found .*--view_column, or leave out --views"),
    (lambda t: t, {"sex_column": "sex"}, "lacks the column sex; .* --sex_column names one"),
    (lambda t: t, {"text_only": True, "sex_column": "sex"}, "no images: leave out --image_column, --sex_column"),
    (lambda t: t.assign(findings="x"), {}, "a column text beside findings or impression; say which"),
    (lambda t: t.assign(image="['" + t["image"] + "']"), {}, r"image: expected one image in each row .*found \"\['a/1"),
    (lambda t: t.assign(image=t["image"] + ";b.tif"), {}, "image: expected one image in each row .write a row"),
    (lambda t: t.assign(image="../" + t["image"]), {}, r"paths below .*, found '\.\./a/1\.png' in row 2.*'\.\./b"),
    (lambda t: t.assign(image="x" * 201), {}, "with names of at most 200 bytes"),
    (lambda t: t.assign(image="a\x00b"), {}, "expected paths below"),
    (lambda t: with_rows(t, 0, 2, view="AP"), {}, "each image once, found 'a/1.png' in rows 2, 7, and 1 more: 'a/2"),
    (lambda t: t.replace({"a/1.png": "b", "a/1 side.png": "b.jpg"}).assign(**VIEWS), {}, "'b' in row 2.*'b.jpg'"),
    (lambda t: t.replace("a/1 side.png", "b.tif.jpg/1.png").assign(**VIEWS), {}, "by more than .jpg.*'b.tif'"),
    (lambda t: t.replace({"Q-7": "7", "R-1": "007"}), {}, "one way of writing .* '7' in rows 2, 4, .*: '007'"),
    (lambda t: t.replace("R-1", "Q\u20107"), {}, r"'Q-7' in rows 2, 4, .*'Q.7' \(U\+2010\) in row 5"),
    (lambda t: t.replace({"R-2": "M\u00fc 1", "R-1": "Mu\u0308  1"}), {}, r"U\+0308. in row 5.* .U\+00FC. in"),
    (lambda t: t.replace({"x": "12005", "y": '="12,005"'}), {}, "study: expected one way .*'12005' in row 5.*12,005"),
    (lambda t: t.replace("c", "\uff42.tif"), {}, "image: expected one way of writing .*, found 'b.tif' in row 5"),
    (lambda t: t.replace("R-1", "1,23E+11"), {}, "patient: expected all digits .*'1,23E.11' in row 5"),
    (lambda t: t.replace("x", "None"), {}, "column study: expected a name in every row, found '' in row 5"),
    (lambda t: t.replace("val", "holdout"), {}, r"train \| validate \| test, found 'holdout' in row 5 \(1 of 5 rows\)"),
    (lambda t: t.replace("-1", "maybe"), {}, "Cardiomegaly: expected 1, 0, -1 or empty, found 'maybe' 1 .1 of 3 cells"),
    (lambda t: t.assign(Edema=["a b", "0", "A B", "-", "q"]), {"label_values": {"q": "1"}}, "s='a b=[?],-=[?],q=1' w"),
    (lambda t: t.assign(Edema=["1", "yes, a bit", "", "", "1"]), {}, "cells.; write labels in their place; fix"),
    (lambda t: many(Edema=["1", "x", "0", "1"]), {"drop_bad_rows": True}, "'x' 6 .6 of 24 cells.*_values='x=[?]'"),
    (lambda t: t.assign(text=["b'a'"] * 3 + ["a"] * 2), {}, "expected texts, found bytes 3 .3 of 5 cells"),
    (lambda t: pd.concat([t, pd.DataFrame([[*t][::-1]], columns=[*t])]), {}, "row 7 is a header of another order"),
    (lambda t: t.assign(text=list("ABCDE"), **VIEWS), {}, "rows have one text, found 'first' in rows 2, 3"),
    (lambda t: t.replace("R-1", "Q-7"), {}, "patients whose rows have one split, found 'Q-7' in rows 2, 4, 5"),
    (lambda t: t.assign(study="s"), {}, "studies whose rows have one patient, found 's' in rows 2"),
    (lambda t: t.assign(view="LATERAL"), {}, "one of the views PA, AP, FRONTAL .*, found 'LATERAL' in rows"),
    (lambda t: t.assign(image=""), {}, "no row has a frontal image; for reports alone pass --text_only"),
    (lambda t: t.assign(sex=list("12121")), {}, "sex: expected F, M, female or male, found '1' in rows .*: '2'"),
    (lambda t: t.assign(sex=["kvinde", "M"] * 2 + ["M"]), {}, "found 'kvinde' in rows .* give --sex_values"),
    (lambda t: t.assign(sex=["M", "V"] * 2 + ["M"]), {}, "found 'M' in rows .*: 'V' in row .* give --sex_values"),
    (lambda t: t.assign(age=["62 J."] + ["7"] * 4), {}, "found '62 J.' in row 2 .*--age_column, or say --lang"),
    (lambda t: t.assign(age="old"), {}, "column age: expected years, as 45, or 045Y .*, found 'old' in"),
    (lambda t: t, {"label_columns": ["Nodule"]}, "lacks the column Nodule; found .*--label_columns"),
    (lambda t: t, {"label_columns": ["view"]}, "view of --label_columns has another meaning"),
    (
        lambda t: t.assign(Effusion="1", pleural_effusion="0"), {"label_columns": ["Effusion"]},
        "expected one column of Pleural Effusion, found Effusion and pleural_effusion; fix the table",
    ),
    (lambda t: t.assign(cardiomegaly="1"), {}, "expected one column of Cardiomegaly, found Cardiomegaly and cardio"),
    (lambda t: t.assign(patient="1").drop(columns="split"), {}, "no patient of 1 was .*; give the table a column"),
    (lambda t: t.iloc[:0], {}, "holds no row; fix the table"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [pytest.param(*x, marks=[pytest.mark.slow] * (place % 3 > 0)) for place, x in enumerate(REFUSED)],
)
def test_a_table_that_cannot_be_right_is_named(
    table: Path, change: Callable[[pd.DataFrame], pd.DataFrame], options: dict[str, Any], message: str
) -> None:
    write(table, change(read(table)))
    with pytest.raises(UserError, match=message):
        prepare(settings(table, **options))
    assert not (table.parent.parent / "set").exists()


def test_placeholders_in_cells_are_missing_values(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        *["nan", "NULL", "None", "N/A", "<NA>", "#N/A", "-"],
        "None of the lines has moved.",
        "Na 135, clear.",
    ]
    rows = pd.DataFrame({"image": [f"{n}.png" for n in range(9)], "text": words, "age": "45", "sex": "F"})
    rows = rows.assign(patient=[*"123456789"], split="train", Edema="1")
    rows.loc[[1, 8], "patient"], rows.loc[2, ["age", "sex", "Edema"]] = "NULL", ["nan", "N/A", "<NA>"]
    for name in rows["image"]:
        shade(table.parent, name)
    prepared = made(table, rows, rejected_share=1.0)
    assert prepared.table("sentences")["text"].tolist() == ["None of the lines has moved."]
    assert [row[:2] for row in rejects(prepared)[:2]] == [["image", "1.png"], ["image", "8.png"]]
    assert rejects(prepared)[0][2] == "row 3, column patient: expected a name in every row"
    images = prepared.table("images").set_index("dicom_id")
    assert (images.loc["2.png", "sex"], images["age"].isna().sum(), len(images)) == ("unknown", 1, 7)
    assert prepared.info["counts"]["placeholders"] == dict(text=7, patient=2, sex=1, age=1, Edema=1)
    said = capsys.readouterr()
    assert "count as empty: text 7, patient 2, sex 1, age 1, Edema 1" in said.out
    assert (
        "column patient: expected a name in every row, found '' in rows 3, 10 (2 of 9 rows); left out"
        in said.err
    )


def test_all_problems_are_listed_and_bad_rows_dropped(table: Path) -> None:
    rows = read(table).replace({"val": "holdout", "-1": "maybe"})
    write(table, pd.concat([rows, rows.iloc[[2, 2]].assign(text=["A.", "B."])]))
    table.write_text(table.read_text() + "one,two\n1,2,3\n")
    with pytest.raises(
        UserError,
        match=r"4 problems: \(1\) line 11: 2 values for 7 columns, and 1 more.*\(2\).*maybe.*\(3\).*holdout.*a/2",
    ):
        prepare(settings(table))
    with pytest.raises(
        UserError, match=r"lacks the column Befund; .*lacks the column MRN.*\(3\) line 11.*mayb"
    ):
        prepare(settings(table, patient_column="MRN", text_column="Befund"))
    prepared = made(table, drop_bad_rows=True)
    assert prepared.table("images")["dicom_id"].tolist() == ["a/1.png", "c"]
    assert prepared.table("labels")["Cardiomegaly"].isna().all()
    assert prepared.info["counts"]["labels_not_read"] == {"Cardiomegaly": 1}
    dropped = [row[1:] for row in rejects(prepared)]
    assert [name for name, _ in dropped] == ["line 11", "line 12", "b.tif", *["a/2.jpg"] * 3]
    assert dropped[2][1] == "row 5, column split: expected train | validate | test"


def test_labels_in_words_are_read(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["yes", "FALSE", "ja", '="0"', "\uff11", "non", "si\u0301", "neg", "Unknown", "maybe", "Pos", ""]
    for name in many()["image"]:
        shade(table.parent, name)
    values = {"label_values": {"unknown": "-1", "maybe": "", "perhaps": "0"}}
    prepared = made(table, many(Edema=words, Nodule=["1", "0"]), label_columns=("Nodule",), **values)
    labels = prepared.table("labels").set_index("study_id")
    assert labels.loc[:11, "Edema"].tolist() == pytest.approx(
        [1, 0, 1, 0, 1, 0, 1, 0, -1, np.nan, 1, np.nan], nan_ok=True
    )
    assert prepared.info["options"]["label_values"] == values["label_values"]
    assert "--label_values: no label column has perhaps" in capsys.readouterr().err
    assert "labels_not_read" not in prepared.info["counts"]


def test_label_values_of_the_command_line() -> None:
    read = options._word_values("a = b=0, Present=1,maybe=", ("1", "0", ""))
    assert read == {"a = b": "0", "present": "1", "maybe": ""}


def test_header_rows_and_long_cells_of_others(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = read(table).assign(pixels="A" * 200_000)
    rows = pd.concat([rows.iloc[:2], pd.DataFrame([[*rows]], columns=[*rows]), rows.iloc[2:]])
    prepared = made(table, rows)
    assert len(prepared.table("images")) == 4
    assert "rows that repeat the header and are left out: 1 (row 4)" in capsys.readouterr().err
    write(table, rows.assign(text=[*rows["text"][:5], "B" * 200_000]))
    with pytest.raises(UserError, match="line 9: more than 131,072 characters in column text"):
        prepare(settings(table, output=table.parent / "x"))


def test_cells_that_are_no_texts_have_reasons(table: Path) -> None:
    rows = read(table)
    rows["text"] = [
        *["FINDINGS: Lungs clear."] * 2,
        '{"findings": "Clear."}',
        "['Clear.No effusion.']",
        "No effusion.",
    ]
    prepared = made(table, rows, rejected_share=0.0)
    assert rejects(prepared) == [
        ["report", "second", "row 4, column text: JSON or a Python dict, not a text"]
    ]
    use = prepared.table("images").set_index("dicom_id")["use"]
    assert use.to_dict() == {"a/1.png": "train", "a/2.jpg": "excluded", "b.tif": "validate", "c": "test"}
    assert {"Clear.", "No effusion."} < {*prepared.table("sentences")["text"]}


def test_images_are_found_by_other_spellings(table: Path) -> None:
    rows = read(table)
    rows["image"] = ['="a/1.png"', rows["image"][1], "a\\2.jpeg", "\uff42.tif", "c"]
    images = made(table, rows).table("images")
    assert images["dicom_id"].tolist() == ["a/1.png", "a/2.jpeg", "\uff42.tif", "c"]


def test_unknown_views_are_named_and_known_spellings_understood(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = made(table, read(table).assign(view=["a.p.", "lat.", "Thorax p-a", "Xr 1", "PA and lateral"]))
    assert prepared.table("images")["view"].tolist() == ["AP", "PA"]
    assert [row[:2] for row in rejects(prepared)] == [["image", "b.tif"], ["image", "c"]]
    assert prepared.info["counts"]["images_not_frontal"] == 1
    assert (
        "'Xr 1' in row 5, and 1 more: 'PA and lateral' in row 6 (2 of 5 rows); left"
        in capsys.readouterr().err
    )


def test_spellings_of_views() -> None:
    spelt = {
        "AP": [
            "A/P",
            "A. P.",
            "ap supine",
            "AP frontal",
            "antero-posterior",
            "Thorax liegend a.p.",
            "antéro-postérieur",
        ],
        "PA": ["p-a", "(PA)", "CHEST PA upright", "posteroanterior", "Thorax p.a. im Stehen", "PA view"],
        "FRONTAL": ["frontal view", "Frontal", "de face", "Thorax face"],
        "OTHER": [
            "LL",
            "lateral",
            "laterale",
            "lateraal",
            "perfil",
            "LAT.",
            "left lateral",
            "L-LAT",
            "RAO",
            "latéral",
            "profilo",
        ],
        "": ["", "AP/PA", "PA and lateral", "AP pelvis", "map", "1"],
    }
    for expected, words in spelt.items():
        assert set(command.standard_views(pd.Series(words))) == {expected}, words


@pytest.mark.parametrize(
    ("delimiter", "encoding", "first"),
    [(";", "utf-16", ""), ("\t", "utf-8-sig", ""), (";", "utf-8", "sep=;\r\n"), ("|", "utf-16-le", "")],
)
def test_a_table_says_its_delimiter_and_encoding(
    table: Path, delimiter: str, encoding: str, first: str
) -> None:
    text = read(table).to_csv(index=False, sep=delimiter, quoting=csv.QUOTE_ALL)
    table.write_text(first + text.replace("Heart", "Größe") + delimiter * 6 + "\n\n", encoding=encoding)
    prepared = made(table)
    assert "Größe is big, as before." in set(prepared.table("sentences")["text"])
    assert len(prepared.table("images")) == 4


@pytest.mark.parametrize("newline", ["\r", "\r\n"])
def test_other_line_ends_and_packed_tables(table: Path, newline: str) -> None:
    rows = read(table).replace({"text": {ROWS[2][-1]: "Big, as before, or so, it seems, now, then."}})
    text = rows.to_csv(index=False, sep=";").replace("\n\n", " ").replace("\n", newline)
    table.write_bytes(gzip.compress(text.encode()))
    assert len(made(table).table("images")) == 4


def test_one_table_of_a_zip_is_not_taken_for_all(table: Path) -> None:
    with zipfile.ZipFile(packed := table.with_suffix(".zip"), "w") as archive:
        archive.write(table, "2023.csv")
        archive.write(table, "2024.csv")
    with pytest.raises(UserError, match=r"expected one .csv in it, found 2023.csv, 2024.csv; unpack"):
        prepare(settings(packed))


def test_a_quote_that_joins_patients_is_refused(table: Path) -> None:
    table.write_text('sep=;\npatient;text\nQ-7;"Clear.\nQ-8;Edema."\nQ-9;Tube.\n')
    with pytest.raises(UserError, match="table.csv: line 3 is a row"):
        prepare(settings(table, text_only=True))


def test_files_of_other_kinds_are_named(table: Path) -> None:
    rows = read(table)
    for writing, kind in (
        (rows.to_parquet, "a Parquet file"),
        (rows.to_json, "JSON"),
        (rows.to_html, "HTML or XML"),
    ):
        writing(table)
        with pytest.raises(UserError, match=f"table.csv is {kind}; save it as a CSV file in UTF-8"):
            prepare(settings(table))


def test_report_beside_the_lateral_image_is_the_studys(table: Path, capsys) -> None:
    rows = read(table)
    rows["text"] = ["", ROWS[0][-1], *rows["text"].iloc[2:]]
    rows["Cardiomegaly"] = ["", "1", *rows["Cardiomegaly"].iloc[2:]]
    # What a frontal row says comes first, and another study's lateral row says nothing here.
    rows.loc[len(rows)] = ["d.png", "R-1", "x", "LL", "val", "1", "Dictated twice."]
    prepared = made(table, rows)
    reports = prepared.table("reports").merge(prepared.table("sentences"), on="sentence_id")
    assert reports.loc[reports["study_id"] == 1, "text"].tolist() == ["Lungs clear.", "Normal."]
    assert "Dictated twice." not in set(reports["text"])
    assert (
        "studies with other texts or labels in rows of other views, which do not count: 1"
        in capsys.readouterr().out
    )
    labels = prepared.table("labels").set_index("study_id")["Cardiomegaly"]
    assert labels.to_dict() == {1: 1.0, 2: 1.0, 3: 0.0, 4: -1.0}


def test_absolute_paths_and_an_unquoted_comma(table: Path) -> None:
    rows = read(table)
    rows["image"] = [str(table.parent.absolute() / name.replace("\\", "/")) for name in rows["image"]]
    images = made(table, rows).table("images")
    assert images["dicom_id"].tolist() == ["a/1.png", "a/2.jpg", "b.tif", "c"]
    table.write_text(table.read_text().replace('"Heart is big, as before."', "Heart is big, as before."))
    with pytest.raises(UserError, match="8 values for 7 columns .*must stand in quotes"):
        prepare(settings(table, output=table.parent / "x"))


def test_rows_without_image_or_text_have_reasons(table: Path) -> None:
    rows = read(table).replace({"image": {"c": ""}, "text": {"Heart is big, as before.": ""}})
    write(table, rows)
    (table.parent / "b.tif").unlink()
    with pytest.raises(UserError, match=r"2 of 4 images cannot be used, more than 0% \(first: "):
        shade(table.parent, "d.png")
        (table.parent / "d.png").write_bytes(b"")
        write(table, pd.concat([rows, rows.iloc[:1].assign(image="d.png")]))
        prepare(settings(table, rejected_share=0.0, output=table.parent.parent / "strict"))
    prepared = made(table, rows)
    assert rejects(prepared) == [
        ["report", "y", "its study has no image"],
        ["image", "b.tif", "image file is missing"],
        ["report", "second", "report has no findings or impression"],
    ]
    use = prepared.table("images").set_index("dicom_id")["use"]
    assert use.to_dict() == {"a/1.png": "train", "a/2.jpg": "excluded"}


def test_empty_reports_count_as_unusable(table: Path) -> None:
    # One has no text, the other none of the image.
    rows = read(table).replace({"text": {ROWS[2][-1]: "", ROWS[3][-1]: "INDICATION: Cough."}})
    write(table, rows)
    for text_only in (False, True):
        with pytest.raises(
            UserError, match=r"2 of 4 reports cannot be used, more than 49% .*--rejected_share"
        ):
            prepare(settings(table, rejected_share=0.49, text_only=text_only))
    (table.parent / "b.tif").unlink()  # images are another share: a single one is always allowed
    prepare(settings(table, rejected_share=0.5))
    assert [row[0] for row in rejects(PreparedSet(table.parent.parent / "set"))] == [
        "image",
        "report",
    ]
    write(table, rows.assign(text=""))
    with pytest.raises(UserError, match="no row has any text"):
        prepare(settings(table, rejected_share=1.0, output=table.parent / "x"))


@pytest.fixture
def text_set(table: Path) -> Path:
    rows = read(table).drop(columns=["image", "view"]).iloc[[0, 2, 3, 4]]
    output = table.parent.parent / "text"
    prepare(settings(write(table.with_name("text.csv"), rows), output=output, text_only=True))
    return output


def test_a_set_of_reports_alone(text_set: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared = PreparedSet(text_set)
    assert prepared.table("studies").to_numpy().tolist() == [
        [1, 1, "train", "train"],
        [2, 1, "train", "train"],
        [3, 2, "validate", "validate"],
        [4, 3, "test", "test"],
    ]
    assert [len(prepared.table(name)) for name in ("images", "cases")] == [0, 0]
    assert prepared.studies("train").tolist() == [1, 2]
    assert prepared.table("labels")["study_id"].tolist() == [1, 2, 3, 4]
    assert prepared.info["counts"]["studies_by_use"]["train"] == 2
    assert not (text_set / "images").exists()
    said = summary(text_set, prepared.info)
    assert "text only  no images; studies: " in said
    # CheX5's cases are images.
    assert "CheX5" not in said
    verb("check")([str(text_set)])
    assert "CheX5" not in capsys.readouterr().out


def test_reports_alone_serve_no_image_model(text_set: Path, small_bert: Path) -> None:
    verb("score")([str(text_set), "--model", str(small_bert), "--device", "cpu"])
    assert len(PreparedSet(text_set).log_p()) == 5
    reports = ReportsDataModule(str(text_set), batch_size=1, num_workers=0)
    reports.connect(ReportsRequirements(str(small_bert)))
    reports.setup("fit")
    # "No effusion." of validate and of test is no training sentence.
    assert sum(len(batch["tokens"]) for batch in reports.train_dataloader()) == 3
    images = ImageTextDataModule(str(text_set), image_size=16, crop_size=16, batch_size=1, num_workers=0)
    with pytest.raises(
        PreparedDataError, match="has no train images; .* reports alone serves language models"
    ):
        images.setup("fit")


def test_patients_of_reports_alone_have_one_use(text_set: Path) -> None:
    studies = pd.read_parquet(text_set / "studies.parquet")
    studies.assign(subject_id=1).to_parquet(text_set / "studies.parquet", index=False)
    assert PreparedSet(text_set).patients_in_training_and_evaluation == [1]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--split_shares", "0.5,0.4"),
        ("--split_shares", "1,1,-1"),
        ("--delimiter", "ab"),
        ("--encoding", "klingon"),
        ("--encoding", "hex"),
        ("--sections", "findings,history"),
        ("--rejected_share", "nan"),
        *(("--label_values", text) for text in ("present", "a=2", "a=1,A=0")),
    ],
)
def test_wrong_options_are_named(
    table: Path, arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        verb("prepare folder")(["--table", str(table), "--output", str(table.parent / "set"), *arguments])
    assert f"argument {arguments[0]}: '{arguments[1]}'" in capsys.readouterr().err


def test_language_of_reports_is_kept_and_said(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Most reports' language is told once and kept, so that a set that grows is cut as before."""
    german = ["Kein Erguss und keine Stauung.", "Narbe re. Oberlappen.", "Alt."]
    rows = pd.DataFrame(
        {"patient": ["p1", "p2", "p3"], "split": ["train", "validate", "test"], "text": german}
    )
    prepared = made(table, rows, text_only=True, shards=True)  # of which it has none
    assert "  language   de (too few words tell) 2, de 1 (reports)\n" in capsys.readouterr().out
    assert "Narbe re. Oberlappen." in set(prepared.table("sentences")["text"])
    assert prepared.info["language"] == "de"
    with pytest.raises(PreparedDataError, match="language: none there, en now"):
        prepare(settings(table, text_only=True, language="en"))
    english = made(table, text_only=True, language="en", output=table.parent / "english")
    assert {"Narbe re.", "Oberlappen."} <= set(english.table("sentences")["text"])
    assert "language" not in english.info and "languages" not in english.info["counts"]
    added = [
        (f"q{n}", "train", f"There is no effusion and the heart is of normal size {n}.") for n in range(5)
    ]
    write(table, pd.concat([rows, pd.DataFrame(added, columns=rows.columns)]))
    prepare(settings(table, text_only=True, complete=True))
    grown = PreparedSet(prepared.folder)
    assert grown.info["language"] == "de" and len(grown.table("studies")) == 8
    assert "Narbe re. Oberlappen." in set(grown.table("sentences")["text"])


def test_unknown_heads_of_five_patients_are_named(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"Ward: {n}\nClear lungs.\nIMPRESSION: Fine.\nJob ID: {n}" for n in range(5)]
    texts += ["Muster: x\nClear lungs."] * 4
    rows = pd.DataFrame({"patient": [f"p{n}" for n in range(9)], "text": texts, "split": "train"})
    prepare(settings(write(table, rows), output=table.parent / "set", text_only=True))
    said = capsys.readouterr().out
    assert "  heads      ended the impression: JOB ID 5\n  heads      left out: WARD 5\n" in said
    assert "  heads      1 more, each in reports of fewer than 5 patients" in said
    assert "MUSTER" not in said + (table.parent / "set" / "dataset.json").read_text()
    verb("check")([str(table.parent / "set"), "--workers", "1"])
    assert "left out: WARD 5" in capsys.readouterr().out
