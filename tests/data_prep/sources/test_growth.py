"""A finished set whose source has grown or changed: what is said, and what --complete makes of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from data_prep.sources.check import check_set
from data_prep.sources.growth import FILE
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet
from tests.data_prep.killing import content
from tests.data_prep.small_release import IMAGES, image_path, write_release
from tests.program import verb


class Kind(NamedTuple):
    """A source, the command on it for a folder, and its image files."""

    main: Callable[[list[str]], None]
    words: list[str]
    files: list[Path]


def shades(file: Path, number: int) -> Path:
    """Of the same number of bytes whatever the number."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((np.arange(32 * 32).reshape(32, 32) * (number + 3) % 251).astype(np.uint8)).save(file)
    return file


def mimic_cxr_source(place: Path) -> Kind:
    raw = write_release(place / "raw")
    files = [image_path(raw, number) for number, (_, _, view, _) in IMAGES.items() if view != "LATERAL"]
    return Kind(
        verb("prepare mimic-cxr"),
        ["--source", str(raw), "--ms_cxr", str(raw / "boxes.json"), "--rejected_share", "1"],
        files,
    )


def table(place: Path, numbers: range) -> None:
    rows = [(f"{n}.bmp", f"Q-{n // 2}", f"Heart is normal. No effusion {n}.", n % 2, n) for n in numbers]
    frame = pd.DataFrame(rows, columns=["image", "patient", "text", "Edema", "study"])
    frame.to_csv(place / "table.csv", index=False)


def folder_source(place: Path) -> Kind:
    table(place, range(40))
    files = [shades(place / f"{number}.bmp", number) for number in range(40)]
    return Kind(verb("prepare folder"), ["--table", str(place / "table.csv"), "--rejected_share", "1"], files)


def openi_source(place: Path) -> Kind:
    raw = place / "raw"
    names = {n: f"{n}_IM-{n:04}-1001.dcm.png" for n in range(40)}
    files = [shades(raw / "images/images_normalized" / name, n) for n, name in names.items()]
    reports = pd.DataFrame([(n, f"Heart is normal. Nodule {n}.", "") for n in names])
    reports.to_csv(raw / "indiana_reports.csv", index=False, header=["uid", "findings", "impression"])
    views = pd.DataFrame([(n, name, "Frontal") for n, name in names.items()])
    views.to_csv(raw / "indiana_projections.csv", index=False, header=["uid", "filename", "projection"])
    return Kind(verb("prepare openi"), ["--source", str(raw)], files)


def public_source(place: Path) -> Kind:
    raw = place / "raw"
    files = [shades(raw / f"images_{n % 3}" / f"{n}.bmp", n) for n in range(40)]
    rows = "".join(f"{n},{'5 9' if n % 2 else '-1'}\n" for n in range(40))
    (raw / "train-rle.csv").write_text(f"ImageId, EncodedPixels\n{rows}")
    return Kind(verb("prepare public"), ["siim", "--source", str(raw)], files)


SOURCES = {
    "mimic_cxr": mimic_cxr_source,
    "folder": folder_source,
    "openi": openi_source,
    "public": public_source,
}


def prepare(kind: Kind, output: Path, *words: str) -> None:
    kind.main([*kind.words, "--output", str(output), "--size", "16", "--workers", "1", *words])


def uses(output: Path) -> dict[str, str]:
    images = PreparedSet(output).table("images")
    return dict(zip(images["dicom_id"], images["use"], strict=True))


@pytest.mark.parametrize(
    "name", [name if name == "public" else pytest.param(name, marks=pytest.mark.slow) for name in SOURCES]
)
def test_completed_set_is_that_of_the_whole(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, output, whole = SOURCES[name](tmp_path), tmp_path / "set", tmp_path / "whole"
    kept, later = kind.files[::2], kind.files[1::2]
    for file in later:
        file.rename(f"{file}.later")
    prepare(kind, output)
    first, of_half, fingerprint = content(output), uses(output), PreparedSet(output).fingerprint
    assert len(of_half) == len(kept)
    capsys.readouterr()
    prepare(kind, output)
    assert "nothing to do\n" in capsys.readouterr().out
    for file in later:
        Path(f"{file}.later").rename(file)
    # Two exchange their names, as a file of the same size is put in another's place.
    times = [file.stat().st_mtime_ns for file in kept[:2]]
    assert times[0] != times[1]
    kept[0].rename(tmp_path / "aside")
    kept[1].rename(kept[0])
    (tmp_path / "aside").rename(kept[1])
    prepare(kind, output)
    said = capsys.readouterr().out
    assert f"is a finished set; {len(later)} further images, 2 changed images: --complete adds them" in said
    assert content(output) == first
    prepare(kind, output, "--complete")
    said = capsys.readouterr().out
    assert f"is completed: {len(later)} further images, 2 changed images\nprepared again: " in said
    assert f"fingerprint {fingerprint} is now {PreparedSet(output).fingerprint}: runs and features" in said
    prepare(kind, whole)
    assert content(output) == content(whole)
    assert uses(output).items() >= of_half.items()
    assert check_set(output, full=True)[1] == []
    capsys.readouterr()
    for words in ((), ("--complete",)):
        prepare(kind, output, *words)
        assert "nothing to do\n" in capsys.readouterr().out
    assert content(output) == content(whole)


def half_of_public(place: Path) -> tuple[Kind, Path, list[Path]]:
    """A set of half of the images, and the files of the other half in a folder aside."""
    kind, output = public_source(place), place / "set"
    later = [file.rename(place / file.name) for file in kind.files[1::2]]
    prepare(kind, output)
    return kind, output, later


@pytest.mark.slow
def test_images_that_are_gone_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twelve archives one after the other, each unpacked in place of the one before."""
    kind, output, later = half_of_public(tmp_path)
    first = uses(output)
    for file in kind.files[::2]:
        file.unlink()
    capsys.readouterr()
    prepare(kind, output)
    assert "nothing to do (20 images no longer in the source, kept in the set)" in capsys.readouterr().out
    for file in later:
        file.rename(tmp_path / "raw" / file.name)
    prepare(kind, output, "--complete")
    assert "20 further images, 20 images no longer in the source, kept" in capsys.readouterr().out
    assert len(uses(output)) == 40 and uses(output).items() >= first.items()
    assert len(PreparedSet(output).table("masks")) == 20 and check_set(output, full=True)[1] == []
    prepare(kind, output, "--complete")
    assert "nothing to do (20 images" in capsys.readouterr().out


@pytest.mark.slow
def test_damaged_set_asks_before_it_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind, output, later = half_of_public(tmp_path)
    whole = content(output)
    (output / "images/0.jpg").unlink()
    later[0].rename(tmp_path / "raw" / later[0].name)
    with pytest.raises(PreparedDataError, match="1 further image, 1 prepared image missing or .* --comp"):
        prepare(kind, output)
    (tmp_path / "raw" / later[0].name).rename(later[0])
    prepare(kind, output)
    assert content(output) == whole
    # Prepared images of two files of the same size in each other's place.
    swapped = [output / f"images/{number}.jpg" for number in (2, 4)]
    swapped[0].rename(tmp_path / "aside")
    swapped[1].rename(swapped[0])
    (tmp_path / "aside").rename(swapped[1])
    prepare(kind, output)
    assert content(output) == whole
    (output / FILE).write_bytes(b"PAR1")
    capsys.readouterr()
    prepare(kind, output)
    assert "what it was made from is not known without found.parquet: --complete" in capsys.readouterr().out
    prepare(kind, output, "--complete")
    assert content(output) == whole


@pytest.mark.slow
def test_source_exchanged_after_a_kill_is_read_again(tmp_path: Path) -> None:
    """An unfinished set takes what is there, of the same number of bytes as before."""
    kind, output, _ = half_of_public(tmp_path)
    (output / "dataset.json").rename(output / "unfinished.json")
    shades(kind.files[2], 99)
    before = (output / "images/2.jpg").read_bytes()
    prepare(kind, output)
    prepare(kind, tmp_path / "whole")
    assert (output / "images/2.jpg").read_bytes() != before
    assert content(output) == content(tmp_path / "whole")


@pytest.mark.slow
def test_repaired_image_is_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind, output = public_source(tmp_path), tmp_path / "set"
    size = kind.files[5].stat().st_size
    kind.files[5].write_bytes(b"x" * size)
    prepare(kind, output)
    assert "5" not in uses(output)
    kind.files[5].rename(tmp_path / "damaged")
    capsys.readouterr()
    prepare(kind, output, "--complete")
    assert "nothing to do\n" in capsys.readouterr().out, "the set does not keep it"
    (tmp_path / "damaged").unlink()
    shades(kind.files[5], 5)
    prepare(kind, output)
    assert "a finished set; 1 changed image: --complete" in capsys.readouterr().out
    prepare(kind, output, "--complete")
    assert "5" in uses(output) and (output / "rejects.csv").read_text() == "kind,id,reason\n"


@pytest.mark.slow
def test_a_table_grows_and_is_not_exchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, words = tmp_path / "set", ["--table", str(tmp_path / "table.csv"), "--text_only"]
    kind = Kind(verb("prepare folder"), words, [])
    table(tmp_path, range(30))
    prepare(kind, output)
    first = content(output)
    lines = (tmp_path / "table.csv").read_text().splitlines(keepends=True)
    # Another order of the rows, and a column that is not used, change nothing.
    moved = [f"{line.rstrip()},{note}\n" for note, line in enumerate([lines[0], *reversed(lines[1:])])]
    (tmp_path / "table.csv").write_text("".join(moved))
    prepare(kind, output, "--complete")
    assert "nothing to do\n" in capsys.readouterr().out and content(output) == first
    table(tmp_path, range(33))
    prepare(kind, output)
    assert "is a finished set; 3 further rows of the table: --complete" in capsys.readouterr().out
    assert content(output) == first
    (output / "log_p").mkdir()
    scores = PreparedSet(output).table("sentences").assign(n_tokens=3, log_p=-1.0)
    scores[["sentence_id", "n_tokens", "log_p"]].to_parquet(output / "log_p/model.parquet")
    prepare(kind, output, "--complete")
    assert "log_p/model.parquet: 3 of 34 sentences have no row; " in capsys.readouterr().out
    prepare(kind, tmp_path / "whole")
    shutil.rmtree(output / "log_p")
    assert content(output) == content(tmp_path / "whole")
    # A row that was kept has changed, or is gone, beside further ones.
    longer = (tmp_path / "table.csv").read_text() + lines[1].replace("0", "88", 1).replace(",0\n", ",88\n")
    for other in (longer.replace("effusion 4.", "effusion."), longer.replace(lines[3], "")):
        (tmp_path / "table.csv").write_text(other)
        with pytest.raises(
            PreparedDataError,
            match=r"made differently \(rows of the table that have changed or are gone: 1\)",
        ):
            prepare(kind, output, "--complete")


@pytest.mark.slow
def test_rows_between_others_are_further_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a column of studies, which are then numbered by row."""
    rows = [(f"Q-{n // 3}", f"No effusion {n // 2}.") for n in range(60)]
    kind = Kind(verb("prepare folder"), ["--table", str(tmp_path / "table.csv"), "--text_only"], [])
    for further in ([], [("Q-1", "A new one.")], [rows[0], ("Q-1", "A new one.")]):
        table = pd.DataFrame([*rows[:30], *further, *rows[30:]], columns=["patient", "text"])
        table.to_csv(tmp_path / "table.csv", index=False)
        prepare(kind, tmp_path / "set", "--complete")
        assert PreparedSet(tmp_path / "set").info["counts"]["studies"] == 60 + len(further)
    assert "is completed: 1 further row of the table" in capsys.readouterr().out


@pytest.mark.slow
def test_a_patient_limit_chooses_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of patients by their names the first are taken, and those of more images may come before."""
    kind, output = public_source(tmp_path), tmp_path / "set"
    kind = kind._replace(words=[*kind.words, "--limit", "3"])
    later = [file.rename(tmp_path / file.name) for file in kind.files[:12]]
    prepare(kind, output)
    for file in later:
        file.rename(tmp_path / "raw" / file.name)
    capsys.readouterr()
    prepare(kind, output, "--complete")
    assert "no longer chosen" in capsys.readouterr().out
    prepare(kind, tmp_path / "whole")
    assert content(output) == content(tmp_path / "whole")
    assert check_set(output)[1] == []
