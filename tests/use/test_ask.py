"""The command `ask`: heat maps and scores of image files, and what it refuses."""

from __future__ import annotations

import io
import json
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image

from medclip_dcl import __version__, load
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import CHEX5
from medclip_dcl.pictures.overlay import overlay
from medclip_dcl.use import loading
from medclip_dcl.use.score_table import FileState, ScoreTable
from tests.program import shell
from tests.small import export_network, platt_calibration

TEXTS = ["Mild pulmonary edema.", "No pneumothorax."]


@pytest.fixture
def files(tmp_path):
    """A folder of 7 images in several formats, one of them flat, one damaged, and of other files."""
    folder = tmp_path / "images"
    generator = np.random.default_rng(0)
    for place, name in enumerate(["a.jpg", "b.png", "deep/c.TIFF", "deep/a.jpg", "deep/d.bmp"]):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (50 + place, 40)).astype(np.uint8)).save(file)
    Image.new("L", (30, 40), 3).save(folder / "flat.png")
    (folder / "lost.jpg").write_bytes((folder / "a.jpg").read_bytes()[:300])
    (folder / "report.txt").write_text("No pneumothorax.")
    (folder / ".hidden.jpg").write_bytes(b"")
    return folder


def run(*arguments):
    shell("ask")([str(argument) for argument in arguments])


def refused(capsys, *arguments):
    """The one line with which the command refuses."""
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert caught.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if ": error: " in line]
    return line


def asking_texts(texts):
    return [part for text in texts for part in ("--text", text)]


def test_heat_maps_cover_image_in_common_colours(exported, model, files, tmp_path, capsys):
    output = tmp_path / "out"
    images = [files / "a.jpg", files / "deep/a.jpg", files / "a_image1.png"]
    images[-1].write_bytes((files / "b.png").read_bytes())
    run(exported, *images, *asking_texts(TEXTS), "--output", output)
    table = pd.read_csv(output / "scores.csv")
    assert list(table["image"]) == [str(image) for image in images for _ in TEXTS]
    assert list(table["text"]) == TEXTS * 3
    np.testing.assert_allclose(table["similarity"], model.similarity(images, TEXTS).ravel(), atol=1e-5)
    assert len(set(table["heat_map"])) == 6, "images of one name do not overwrite each other"
    for image, rows in table.groupby("image", sort=False):
        grey = np.asarray(Image.open(str(image)))
        maps = [model.heat_map(image, text) for text in TEXTS]
        limits = float(np.min(maps)), float(np.max(maps))
        assert rows["lowest_cosine"].tolist() == pytest.approx([limits[0]] * 2, abs=1e-5)
        for heat_map, name in zip(maps, rows["heat_map"], strict=True):
            drawn = np.asarray(Image.open(output / name))
            difference = drawn.astype(int) - overlay(grey, heat_map, limits=limits)
            assert np.abs(difference).max() <= 3, "a colour of the table next to it"
    assert TEXTS[0] in capsys.readouterr().out


def test_unusable_image_is_a_row_or_an_error(exported, files, tmp_path, capsys):
    rest = (*asking_texts(TEXTS), "--output", tmp_path / "out")
    run(exported, files / "lost.jpg", files / "flat.png", *rest)
    table = pd.read_csv(tmp_path / "out/scores.csv")
    assert table["error"][0].startswith("image cannot be decoded") and table["heat_map"].isna()[0]
    assert (
        list(table["warning"][1:])
        == ["all pixels have grey level 3, so that the scores say nothing about a patient"] * 2
    )
    assert "lost.jpg: image cannot be decoded" in refused(capsys, exported, files / "lost.jpg", *rest)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_scores_of_a_folder_are_those_of_classify(exported, model, files, tmp_path, kind, capsys):
    output = tmp_path / f"out/scores.{kind}"
    workers = 2 if kind == "csv" else 0
    run(exported, files, "--classify", "--output", output, "--batch_size", 3, "--workers", workers)
    table = pd.read_csv(output) if kind == "csv" else pd.read_parquet(output)
    names = ["a.jpg", "b.png", "deep/a.jpg", "deep/c.TIFF", "deep/d.bmp", "flat.png", "lost.jpg"]
    assert list(table["image"]) == [str(files / name) for name in names]
    assert list(table.columns) == ["image", *CHEX5, "error", "warning"]
    usable = table[table["error"].isna()]
    with pytest.warns(UserWarning, match="grey level 3"):
        expected = model.classify(list(usable["image"]))
    np.testing.assert_allclose(usable[list(CHEX5)], expected, atol=1e-5)
    assert list(table.index[table["error"].notna()]) == [6] and table.loc[6, list(CHEX5)].isna().all()
    assert list(table.index[table["warning"].notna()]) == [5]
    assert "7 images, 1 with an error, 1 with a warning" in capsys.readouterr().err
    names = [f"{output.name}{ending}" for ending in ("", ".files.parquet", ".json")]
    assert sorted(file.name for file in output.parent.iterdir()) == names


def test_calibrated_table_has_probabilities_and_threshold_sides(small_bert, files, tmp_path, capsys):
    folder = export_network(small_bert, tmp_path / "model")
    calibration = platt_calibration(load(folder).image_text, 0.02, 0.1, 0.5, ["Edema"])
    asked = [folder, files / "a.jpg", files / "lost.jpg", "--classify", "--calibrated"]
    table = tmp_path / "scores.csv"
    assert "medclip-dcl calibrate" in refused(capsys, *asked, "--output", table)
    calibration.write(folder / "calibration.json")
    run(*asked, "--output", table)
    found = pd.read_csv(table, index_col="image")
    expected = load(folder).classify(files / "a.jpg", calibrated=True).iloc[0]
    for finding in set(CHEX5) - {"Edema"}:
        assert found[finding].iloc[0] == pytest.approx(expected[finding], abs=1e-6)
        assert found[f"{finding} positive"].iloc[0] == (expected[finding] >= 0.5)
    assert found[["Edema", "Edema positive"]].isna().all(axis=None)
    assert found.loc[str(files / "lost.jpg"), "Cardiomegaly positive":].isna().sum() >= 4
    assert "calibration" in refused(capsys, *asked[:-1], "--output", table)
    run(*asked, "--dtype", "bfloat16", "--output", tmp_path / "rounded.csv")
    assert "--dtype bfloat16: the calibration was fitted in float32" in capsys.readouterr().err


def test_prompts_of_file_and_list_of_images(exported, model, files, tmp_path):
    prompts = {"wet": ["no edema", ["edema", "pulmonary edema"]], "air": ["No pneumothorax", "pneumothorax"]}
    (tmp_path / "prompts.yaml").write_text(yaml.safe_dump(prompts))
    (tmp_path / "list.txt").write_text(
        f"\ufeff{files / 'b.png'}\n\n{files / 'gone.png'}\n{os.path.relpath(files / 'b.png')}\n",
        encoding="utf-8",
    )
    output = tmp_path / "scores.csv"
    command = (exported, "--classify", "--list", tmp_path / "list.txt", "--output", output)
    run(*command, files / "a.jpg", "--prompts", tmp_path / "prompts.yaml")
    table = pd.read_csv(output)
    assert [os.path.basename(image) for image in table["image"]] == ["a.jpg", "b.png", "gone.png"]
    assert list(table["error"].fillna("")) == ["", "", "No such file or directory"]
    expected = model.classify([files / "a.jpg", files / "b.png"], prompts)
    np.testing.assert_allclose(table[["wet", "air"]][:2], expected, atol=1e-5)


@pytest.fixture
def reads(monkeypatch):
    """Names of the files that are read."""
    found, as_grey = [], loading.as_grey

    def noted(name):
        found.append(os.path.basename(name))
        return as_grey(name)

    monkeypatch.setattr(loading, "as_grey", noted)
    return found


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_killed_run_continues_finished_one_does_nothing(
    exported, files, tmp_path, reads, kind, monkeypatch, capsys
):
    whole, output = tmp_path / f"whole.{kind}", tmp_path / f"scores.{kind}"
    options = (exported, files, "--classify", "--batch_size", 2, "--workers", 0)
    run(*options, "--output", whole)
    add, calls = ScoreTable.add, []

    def killed(self, rows):
        calls.append(rows)
        if len(calls) == 3:
            raise KeyboardInterrupt
        add(self, rows)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr(ScoreTable, "add", killed)
        run(*options, "--output", output)
    assert caught.value.code == 130 and not output.exists()
    partial = output.with_name(f"{output.name}.partial")
    with partial.open("ab") as stream:
        stream.write(b'{"image": "cut o')
    reads.clear()
    run(*options, "--output", output)
    assert reads == ["d.bmp", "flat.png", "lost.jpg"], "the first two batches are kept"
    assert not partial.exists()
    if kind == "csv":
        assert output.read_bytes() == whole.read_bytes()
    before = output.stat().st_mtime_ns, output.stat().st_ino
    reads.clear()
    capsys.readouterr()
    run(*options, "--output", output)
    assert (output.stat().st_mtime_ns, output.stat().st_ino) == before and reads == []
    assert "is finished: 7 images" in capsys.readouterr().err
    Image.effect_noise((20, 20), 9).save(files / "new.png")
    run(*options, "--output", output)
    assert reads == ["new.png"]
    frames = [pd.read_csv(file) if kind == "csv" else pd.read_parquet(file) for file in (output, whole)]
    pd.testing.assert_frame_equal(frames[0][:7], frames[1])


def test_scores_of_something_else_are_never_mixed(exported, small_bert, files, tmp_path, capsys):
    output = tmp_path / "scores.csv"
    options = ("--classify", "--output", output, "--workers", 0)
    run(exported, files, *options)
    before = output.read_bytes()
    (tmp_path / "prompts.yaml").write_text("wet: [dry, wet]")
    other = export_network(small_bert, tmp_path / "other", seed=1)
    capsys.readouterr()
    for changed, message in (
        (
            (other, files),
            "scores.csv.json differs in model; give another --output",
        ),
        ((exported, files, "--prompts", tmp_path / "prompts.yaml"), "differs in prompts"),
        ((exported, files, "--dtype", "bfloat16"), "differs in dtype"),
        ((exported, files / "a.jpg"), "has rows of 6 images that are not asked for now"),
    ):
        assert message in refused(capsys, *changed, *options)
    pd.read_csv(output).assign(read_by="me").to_csv(output, index=False)
    assert "has other columns" in refused(capsys, exported, files, *options)
    output.write_bytes(before)
    (tmp_path / "scores.csv.json").unlink()
    assert "was not written by this command" in refused(capsys, exported, files, *options)
    assert output.read_bytes() == before
    partial = tmp_path / "new.csv.partial"
    for content, message in (
        (b"[]\n", "does not say what it is of; give another --output"),
        (
            json.dumps({"meaning": {"model": "x"}}).encode() + b"\n",
            "differs in code of --import, dtype, image size, model, prompts, rules for images, settings of the model",
        ),
    ):
        partial.write_bytes(content)
        new = ("--classify", "--output", tmp_path / "new.csv")
        assert message in refused(capsys, exported, files, *new)


def test_scores_belong_to_ensemble_and_code(exported, model, files, tmp_path, monkeypatch, capsys):
    (tmp_path / "own_parts_of_ask.py").write_text("SHIFT = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    prompts = {"wet": ["dry", ["wet", "edema"]]}
    (tmp_path / "prompts.yaml").write_text(yaml.safe_dump(prompts))
    options = [
        exported,
        files / "a.jpg",
        "--classify",
        "--output",
        tmp_path / "s.csv",
        "--workers",
        0,
    ]
    options += ["--prompts", tmp_path / "prompts.yaml", "--import", "own_parts_of_ask"]
    run(*options, "--ensemble", "embeddings")
    expected = model.classify(files / "a.jpg", prompts, ensemble="embeddings")["wet"].iloc[0]
    assert pd.read_csv(tmp_path / "s.csv")["wet"][0] == pytest.approx(expected, abs=1e-5)
    about = json.loads((tmp_path / "s.csv.json").read_text())
    assert about["meaning"]["ensemble"] == "embeddings" and about["medclip_dcl"] == __version__
    assert "differs in ensemble" in refused(capsys, *options)
    (tmp_path / "own_parts_of_ask.py").write_text("SHIFT = 2\n")
    assert "differs in code of --import" in refused(capsys, *options, "--ensemble", "embeddings")


def test_two_commands_do_not_mix_their_rows(tmp_path):
    file = tmp_path / "scores.csv"
    row = {"image": "a.jpg", "x": 0.5, "error": None, "warning": None}
    first, second = (ScoreTable(file, ["x"], {"model": name}) for name in ("first", "second"))
    with first, second:
        first.add([row])
        with pytest.raises(UserError, match="another command is writing"):
            second.add([row | {"image": "b.jpg"}])
    assert list(ScoreTable(file, ["x"], {"model": "first"}).rows) == [os.path.abspath("a.jpg")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.jpg", "--text", "x", "--output", "a.jpg"], "a.jpg: File exists"),
        (["a.jpg", "--text", " ", "--output", "out"], "the text at position 0 is empty; give a sentence"),
        (["a.jpg", "--text", "edema " * 200, "--output", "out"], "200 words, is longer than the text encoder takes"),
        (["a.jpg", "--classify", "--output", "out"], "scores are written to a file, .csv or .parquet"),
        (["a.jpg", "--text", "x", "--prompts", "p.yaml", "--output", "out"], "--prompts, --ensemble, --calibrated"),
        (["a.jpg", "--text", "x", "--ensemble", "scores", "--output", "out"], "--prompts, --ensemble, --calibrated"),
        (["--classify", "--output", "s.csv"], "found no image; give image files or folders, or --list FILE"),
        (["gone.jpg", "--classify", "--output", "s.csv"], "gone.jpg: no such image file or folder; check the path"),
        (["nothing", "--classify", "--output", "s.csv"], "nothing holds no image file (JPEG, PNG, TIFF"),
        (["--list", "blank.txt", "--classify", "--output", "s.csv"], "found no image; give image files"),
        (["a.jpg", "--classify", "--prompts", "image.yaml", "--output", "s.csv"], "cannot be called 'image'"),
        (["a.jpg", "--text", "x", "--output", "."], "scores.csv is not a table of heat maps"),
        (["a.jpg", "--text", "x", "--output", "a.jpg/out"], "a.jpg/out: Not a directory"),
        (["a.jpg", "--classify", "--output", "a.jpg/s.csv"], "a.jpg: File exists"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_with_the_remedy(exported, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    Image.effect_noise((20, 20), 9).save("a.jpg")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "blank.txt").write_text("\n\n")
    (tmp_path / "scores.csv").write_text("image,Edema\n")
    (tmp_path / "image.yaml").write_text("image: [no x, x]")
    assert message in refused(capsys, exported, *arguments)


@pytest.fixture
def odd(files, monkeypatch):
    """A folder of odd files: path -> reason why it cannot be used, or ""."""
    odd = {"~x.jpg": "", "x" * 250 + ".jpg": "", "a\rb.jpg": "", os.fsdecode(b"caf\xe9.jpg"): ""}
    folder = files.parent / "odd"
    (folder / "closed").mkdir(parents=True)
    for name in odd:
        try:
            (folder / name).write_bytes((files / "a.jpg").read_bytes())
        except OSError:
            pytest.skip("this file system refuses such names")
    os.mkfifo(folder / "pipe.jpg")
    (folder / "IM0001").write_bytes(bytes(128) + b"DICM")
    (folder / "link").symlink_to(files / "deep")
    (folder / "loop").symlink_to(folder)
    scandir = os.scandir

    def refusing(place):
        if os.path.basename(place) == "closed":
            raise PermissionError(13, "Permission denied", place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refusing)
    odd |= {
        "pipe.jpg": "a pipe",
        "IM0001": "DICOM image cannot be decoded",
        "closed": "Is a directory",
        "link/c.TIFF": "",
        "link/a.jpg": "",
        "link/d.bmp": "",
    }
    return {str(folder / name): reason for name, reason in odd.items()}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_odd_files_have_their_rows_among_others(exported, odd, tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path / "odd")
    output = tmp_path / f"scores.{kind}"
    command = (exported, ".", "~x.jpg", "--classify", "--workers", 0, "--output", output)
    run(*command)
    table = pd.read_csv(output) if kind == "csv" else pd.read_parquet(output)
    found = dict(zip(map(os.path.abspath, table["image"]), table["error"].fillna(""), strict=True))
    shown = {name.encode(errors="surrogateescape").decode(errors="backslashreplace"): name for name in odd}
    assert found.keys() == shown.keys()
    assert all(
        odd[shown[name]] in error and bool(odd[shown[name]]) == bool(error) for name, error in found.items()
    )
    run(*command)
    assert "is finished: 10 images" in capsys.readouterr().err


def test_heat_maps_of_odd_files_have_own_names(exported, odd, files, tmp_path):
    images = [files / "b.png", tmp_path / "B.png", tmp_path / "b_1.png"]
    for image in images[1:]:
        image.write_bytes(images[0].read_bytes())
    run(exported, *odd, *images, *asking_texts(["2 x", "x"]), "--output", tmp_path / "out")
    table = pd.read_csv(tmp_path / "out/scores.csv")
    assert table["error"].notna().sum() == 3
    names = {name.lower() for name in table["heat_map"].dropna()}
    assert len(names) == 2 * (len(odd) - 3 + len(images)) == len(list((tmp_path / "out").glob("*.png")))


def test_rows_belong_to_files_and_not_to_names(exported, files, tmp_path, monkeypatch, capsys, reads):
    options = (exported, "--classify", "--workers", 0, "--output", tmp_path / "scores.csv")
    monkeypatch.chdir(files)
    run(*options, "a.jpg", "b.png")
    monkeypatch.chdir(files / "deep")
    assert f"not asked for now (first: {files / 'a.jpg'})" in refused(capsys, *options, "a.jpg", "../b.png")
    reads.clear()
    run(*options, "../a.jpg", "../b.png", "a.jpg")
    assert reads == ["a.jpg"]
    assert list(pd.read_csv(tmp_path / "scores.csv")["image"]) == ["../a.jpg", "../b.png", "a.jpg"]


def swap(first, second):
    between = first.with_name(f".{first.name}")
    for old, new in ((first, between), (second, first), (between, second)):
        os.rename(old, new)


EXCHANGES = {
    "mv": lambda shown, other: os.replace(other, shown),
    "cp -p": lambda shown, other: shutil.copy2(other, shown),
    "swapped names": swap,
    "swapped folders": lambda shown, other: swap(shown.parent, other.parent),
    "written in place": lambda shown, other: shown.write_bytes(other.read_bytes()),
}


@pytest.mark.parametrize("way", EXCHANGES)
@pytest.mark.parametrize("is_finished", [False, True])
def test_an_exchanged_file_is_asked_again(tmp_path, capsys, way, is_finished):
    """All files have one size and one time of change, as sets that were unpacked or made anonymous have."""
    images = [tmp_path / folder / name for folder in ("first", "second") for name in ("x.png", "y.png")]
    for place, image in enumerate(images):
        image.parent.mkdir(exist_ok=True)
        image.write_bytes(bytes([place] * 9))
        os.utime(image, (1e9, 1e9))
    names, output = [str(image) for image in images], tmp_path / "scores.csv"
    with ScoreTable(output, ["x"], {}) as table:
        table.add(
            {"image": name, "x": 1.0, "error": None, "warning": None, "file": FileState.read(name)}
            for name in names
        )
        if is_finished:
            table.finish(names)
    # Another time alone is no other image.
    os.utime(images[1])
    table = ScoreTable(output, ["x"], {})
    assert table.missing(names) == [] and table.is_written == is_finished and not capsys.readouterr().err
    EXCHANGES[way](images[0], images[2])
    again = table.missing(names), ScoreTable(output, ["x"], {}).missing(names)
    changed = {"swapped folders": names, "swapped names": [names[0], names[2]], "mv": [names[0]]}.get(
        way, names[:1]
    )
    assert again == (changed, changed)
    assert f"{len(changed)} of 4 rows are asked again" in capsys.readouterr().err


def test_a_table_without_states_is_asked_again(exported, files, tmp_path, capsys, reads):
    options = (
        exported,
        files / "a.jpg",
        "--classify",
        "--output",
        tmp_path / "s.csv",
        "--workers",
        0,
    )
    run(*options)
    states = tmp_path / "s.csv.files.parquet"
    for harm in (states.unlink, lambda: states.write_bytes(states.read_bytes()[:50])):
        harm()
        reads.clear()
        run(*options)
        assert reads == ["a.jpg"]
        assert "1 of 1 rows are asked again: their files have changed" in capsys.readouterr().err


def test_a_text_of_unknown_words_is_named(exported, files, tmp_path):
    with pytest.warns(UserWarning, match="the text at position 0 holds no word, or hardly one, that"):
        run(exported, files / "a.jpg", *asking_texts(["肺炎", TEXTS[0]]), "--output", tmp_path)
    assert warnings.formatwarning("said", UserWarning, "ask.py", 1) == "warning: said\n"
    first, second = pd.read_csv(tmp_path / "scores.csv")["warning"]
    assert first.startswith("the text holds no word") and pd.isna(second)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no disk that is full")
def test_a_full_disk_is_one_line(exported, files, tmp_path, monkeypatch, capsys):
    opened, full = Path.open, lambda: io.BufferedWriter(io.FileIO("/dev/full", "w"))
    monkeypatch.setattr(
        Path, "open", lambda file, *how, **as_: full() if "xb" in how else opened(file, *how, **as_)
    )
    options = (exported, files / "a.jpg", "--classify", "--output", tmp_path / "scores.csv")
    assert "error: No space left on device" in refused(capsys, *options)
