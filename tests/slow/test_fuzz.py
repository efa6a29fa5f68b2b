"""500 mutated sources: each is refused by an error of the project's own, or gives a sound set with its rejects listed.

Never an error of pandas, PIL or another library, never a file outside the output folder. Which mutations a source gets
follows from its number alone; `python -m tests.slow.test_fuzz NUMBER` prepares one again.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
import shutil
import sys
import tarfile
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from data_prep import folder, mimic_cxr, openi
from data_prep.options import Folder, MimicCxr, OpenI
from data_prep.sources.check import check_set
from tests.data_prep.small_release import write_release

pytestmark = pytest.mark.slow

SOURCES = 500
OWN = ("data_prep", "medclip_dcl")
CELLS = [
    "", " ", "nan", "NaN", "inf", "-inf", "1e999", "-1", "0", "1.5", "null", "None", "True", "0x1F", "10" * 20,
    "a" * 300, "../../../../evil", "/etc/passwd", "..", ".", "a\x00b", "two\nlines", '"', "'", ",", ";", "é", "\ud7ff",
    "😀", "١٢٣٤٥٦٧٨", "=1+1", "10000001", "50000001", "train", "AP", "2.0", "-0.0", "1e-320", "99999999", "00000000",
    "con.jpg", "x" * 250,
]  # fmt: skip
JSON_VALUES: list[Any] = [
    None, True, -1, 0, 1e308, float("inf"), float("nan"), "text", "", [], {}, [1, 2], [1, 2, 3, 4, 5], {"id": 1},
    10**40, "../../evil.jpg", [None] * 4, ["1", "2", "3", "4"], [-5, -5, 1000, 1000], [1e9, 1e9, 1, 1], [0, 0, 0, 0],
    [[1], 2, 3, 4],
]  # fmt: skip


# --- Mutations of any file -----------------------------------------------------------------------------------------


def truncate(file: Path, draw: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: draw.randrange(len(content) + 1)])


def flip_bytes(file: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(draw.randint(1, 8)):
        if content:
            content[draw.randrange(len(content))] = draw.randrange(256)
    file.write_bytes(bytes(content))


def empty(file: Path, draw: random.Random) -> None:
    file.write_bytes(b"")


def noise(file: Path, draw: random.Random) -> None:
    file.write_bytes(draw.randbytes(draw.randint(1, 3000)))


def remove(file: Path, draw: random.Random) -> None:
    file.unlink()


def become_folder(file: Path, draw: random.Random) -> None:
    file.unlink()
    file.mkdir()


def become_link(file: Path, draw: random.Random) -> None:
    """A link to nothing, to itself, or to a file that is not the release's."""
    file.unlink()
    file.symlink_to(draw.choice(["nowhere", file.name, "/etc/hostname", "/dev/null"]))


ANY_FILE = [truncate, flip_bytes, empty, noise, remove, become_folder, become_link]


# --- Mutations of tables -------------------------------------------------------------------------------------------


def read_rows(file: Path) -> list[list[str]]:
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return list(csv.reader(io.StringIO(content.decode(), newline="")))


def write_rows(file: Path, rows: list[list[str]], encoding: str = "utf-8", end: str = "\n") -> None:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=end).writerows(rows)
    content = text.getvalue().encode(encoding, "replace")
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


def mutate_table(file: Path, draw: random.Random) -> None:
    rows = read_rows(file)
    column, other = draw.randrange(len(rows[0])), draw.randrange(len(rows[0]))
    body = rows[1:]
    kind = draw.randrange(15)
    encoding, end = "utf-8", "\n"
    if kind == 0:
        rows = [row[:column] + row[column + 1 :] for row in rows]
    elif kind == 1:
        rows[0][column] = draw.choice(
            [rows[0][other], rows[0][column].upper(), "", "new", " " + rows[0][column]]
        )
    elif kind == 2:
        for row in rows:
            row[column], row[other] = row[other], row[column]
    elif kind == 3:
        for row in body:
            row[column], row[other] = row[other], row[column]
    elif kind == 4:
        rows += draw.choices(body, k=draw.randint(1, 3))
    elif kind == 5:
        rows = [rows[0], *draw.sample(body, draw.randint(0, len(body)))]
    elif kind in (6, 7, 8):
        for row in draw.sample(body, draw.randint(1, len(body))):
            row[column] = draw.choice(CELLS)
    elif kind == 9:
        value = draw.choice(CELLS)
        for row in body:
            row[column] = value
    elif kind == 10:
        encoding = draw.choice(["utf-16", "latin-1", "utf-8-sig", "cp500"])
        draw.choice(body)[column] += draw.choice(["", "é", "ß"])
    elif kind == 11:
        end = draw.choice(["\r\n", "\r", "\n\n", "\x0b"])
    elif kind == 12:
        draw.choice(rows).append("more")
    elif kind == 13:
        draw.choice(rows).pop()
    else:
        rows = rows[:1]
    write_rows(file, rows, encoding, end)


def break_quotes(file: Path, draw: random.Random) -> None:
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    place = draw.randrange(len(content))
    content = content[:place] + b'"' * draw.randint(1, 3) + content[place:]
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


def change_packing(file: Path, draw: random.Random) -> None:
    """Packed under the name of what is not, and the other way round."""
    content = file.read_bytes()
    file.write_bytes(gzip.decompress(content) if file.suffix == ".gz" else gzip.compress(content))


TABLE: list[Callable[[Path, random.Random], None]] = [
    *ANY_FILE,
    *[mutate_table] * 12,
    break_quotes,
    change_packing,
]


# --- Mutations of images, texts, boxes, archives --------------------------------------------------------------------


def other_image(file: Path, draw: random.Random) -> None:
    kind = draw.randrange(9)
    if kind == 0:
        Image.new("L", (1, 1)).save(file, "JPEG")
    elif kind == 1:
        Image.new("RGBA", (9, 7), (1, 2, 3, 4)).save(file, "PNG")
    elif kind == 2:
        Image.fromarray(np.arange(77, dtype=np.uint16).reshape(7, 11) * 800).save(file, "PNG")
    elif kind == 3:
        Image.new("P", (5, 4)).save(file, "GIF")
    elif kind == 4:
        Image.fromarray(np.full((4, 5), np.nan, np.float32)).save(file, "TIFF")
    elif kind == 5:
        # A header that promises more pixels than any memory holds.
        Image.new("1", (8, 8)).save(file, "PNG")
        content = bytearray(file.read_bytes())
        content[16:24] = b"\x00\x01\x00\x00" * 2
        file.write_bytes(bytes(content))
    elif kind == 6:
        Image.new("CMYK", (3, 4)).save(file, "JPEG")
    elif kind == 7:
        Image.new("I", (6, 3), 70000).save(file, "TIFF")
    else:
        Image.new("L", (3000, 2)).save(file, "JPEG")


def other_text(file: Path, draw: random.Random) -> None:
    texts = [
        b"FINDINGS:", b"FINDINGS:\n\n\n IMPRESSION:\n", b"\x00" * 50, "FINDINGS: größer.".encode("latin-1"),
        b"\xff\xfe" * 9, b"FINDINGS: " + b"(" * 5000, b" FINDINGS: 1. 2. 3. ___ ___.", b"A" * 20_000,
        b"FINDINGS: clear\r\rIMPRESSION: b\r\n.", "FINDINGS: 😀 ﷽ \u2028 end.".encode(),
        b"FINDINGS: " + b"a. " * 3000, b"Normal" + b"\n" * 20_000, b"\xef\xbb\xbfFINDINGS: ok.",
    ]  # fmt: skip
    file.write_bytes(draw.choice(texts))


def mutate_json(file: Path, draw: random.Random) -> None:
    content = json.loads(file.read_text())
    kind = draw.randrange(7)
    if kind == 0:
        del content[draw.choice(list(content))]
    elif kind == 1:
        content[draw.choice(list(content))] = draw.choice(JSON_VALUES)
    elif kind == 2:
        content = draw.choice([*JSON_VALUES, "deep"])
    elif kind in (3, 4):
        row = draw.choice(content[draw.choice(list(content))])
        row[draw.choice(list(row))] = draw.choice(JSON_VALUES)
    elif kind == 5:
        row = draw.choice(content[draw.choice(list(content))])
        del row[draw.choice(list(row))]
    else:
        part = content[draw.choice(list(content))]
        part += draw.choices(part, k=2)
    text = "[" * 100_000 if content == "deep" else json.dumps(content)
    file.write_text(text, encoding=draw.choice(["utf-8"] * 9 + ["utf-16"]))


def zip_the_reports(release: Path, draw: random.Random) -> None:
    archive = release / "mimic-cxr-reports.zip"
    names = [str(file.relative_to(release)) for file in (release / "files").rglob("*.txt") if file.is_file()]
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in names:
            packed.write(release / name, draw.choice(["", "mimic-cxr-reports/", "../../", "/"]) + name)
            (release / name).unlink()
    if draw.random() < 0.6:
        draw.choice([truncate, flip_bytes, flip_bytes, empty, noise])(archive, draw)


# --- Sources -------------------------------------------------------------------------------------------------------


def mutate_release(root: Path, draw: random.Random) -> list[str]:
    done = []
    for _ in range(draw.randint(1, 2)):
        kind = draw.choice(["table", "table", "image", "image", "text", "boxes", "boxes", "zip"])
        files = {
            "table": sorted(root.glob("mimic-cxr-*")),
            "image": sorted(root.rglob("*.jpg")),
            "text": sorted((root / "files").rglob("*.txt")),
            "boxes": sorted(root.glob("boxes.*")),
        }
        done.append(_mutate(kind, files, draw, root))
    return done


def _mutate(kind: str, files: dict[str, list[Path]], draw: random.Random, root: Path) -> str:
    changes: dict[str, list[Callable[[Path, random.Random], None]]] = {
        "table": TABLE,
        "image": [*ANY_FILE, *[other_image] * 6],
        "text": [*ANY_FILE, *[other_text] * 6],
        "boxes": [*ANY_FILE, *[mutate_json] * 20],
    }
    if kind == "zip":
        if not (root / "mimic-cxr-reports.zip").exists():
            zip_the_reports(root, draw)
        return "reports in an archive"
    plain = [file for file in files[kind] if file.is_file() and not file.is_symlink()]
    if not plain:
        return "nothing"
    change = draw.choice(changes[kind])
    count = draw.choice([1, 1, len(plain)]) if kind in ("image", "text") else 1
    for file in draw.sample(plain, count):
        try:
            change(file, draw)
        # An earlier mutation left nothing that this one could read.
        except (ValueError, LookupError, OSError, EOFError, TypeError, AttributeError, csv.Error):
            noise(file, draw)
    return f"{kind}: {change.__name__}"


def picture(number: int) -> Image.Image:
    return Image.fromarray(np.linspace(0, 100 + number, 24 * 18).reshape(18, 24).astype(np.uint8))


def write_folder(root: Path) -> None:
    """A table of nine images with every column that may be there."""
    rows = []
    for n in range(9):
        file = root / f"sub{n % 2}" / f"{n}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        picture(n).save(file)
        split = ("train", "validate", "test")[n % 3]
        rows.append(
            (str(file.relative_to(root)), f"P{n}", f"s{n}", "PA", split, n % 2, f"FINDINGS: Clear, {n}.")
        )
    columns = ["image", "patient", "study", "view", "split", "Edema", "text"]
    pd.DataFrame(rows, columns=columns).to_csv(root / "table.csv", index=False)


def write_openi(root: Path) -> None:
    """Eight official reports with two images each, and Kaggle's table of views."""
    views = []
    with tarfile.open(root / "NLMCXR_reports.tgz", "w:gz") as packed:
        for uid in range(1, 9):
            names = [f"CXR{uid}_IM-{uid:04}-{part}" for part in (1001, 2001)]
            views += [
                (uid, f"{name[3:]}.dcm.png", view)
                for name, view in zip(names, ("Frontal", "Lateral"), strict=True)
            ]
            images = "".join(f'<parentImage id="{name}"/>' for name in names)
            text = f'<AbstractText Label="FINDINGS">Clear {uid}.</AbstractText>'
            content = f'<eCitation><uId id="CXR{uid}"/>{text}{images}</eCitation>'.encode()
            member = tarfile.TarInfo(f"ecgen-radiology/{uid}.xml")
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
            for name in names:
                (root / "NLMCXR_png").mkdir(exist_ok=True)
                picture(uid).save(root / "NLMCXR_png" / f"{name}.png")
    table = pd.DataFrame(views, columns=["uid", "filename", "projection"])
    table.to_csv(root / "indiana_projections.csv", index=False)
    columns = ["filename", *openi.NEGBIO]
    labels = pd.DataFrame([(f"CXR{uid}", *[uid % 2] * 8) for uid in range(1, 9)], columns=columns)
    labels.to_csv(root / "labels.csv", index=False)


def rewrite_reports(root: Path, draw: random.Random) -> None:
    """Change the archive of reports itself, or the XML within it."""
    archive = root / "NLMCXR_reports.tgz"
    if draw.random() < 0.5:
        draw.choice([truncate, flip_bytes, empty, noise, become_folder, become_link])(archive, draw)
        return
    with tarfile.open(archive) as packed:
        contents = {member.name: packed.extractfile(member) for member in packed}
        files = {name: stream.read() for name, stream in contents.items() if stream is not None}
    for name in draw.sample(sorted(files), draw.choice([1, 4])):
        text = files[name].decode()
        cut = draw.randrange(len(text))
        files[name] = draw.choice([
            text[:cut].encode(), text.encode("utf-16"),
            text.replace("CXR", draw.choice(CELLS)).encode("utf-8", "replace"),
            text.replace("uId", "x").encode(), text.replace("Clear", "&evil;").encode(), b"", draw.randbytes(99),
            f'<!DOCTYPE a [<!ENTITY evil SYSTEM "file:///etc/hostname">]>{text}'.encode(),
            text.replace("_IM-", "/../../_IM-").encode(), text.replace("FINDINGS", "OTHER").encode(),
        ])  # fmt: skip
    with tarfile.open(archive, "w:gz") as packed:
        for name, content in files.items():
            member = tarfile.TarInfo(draw.choice([name, name, "../../../evil.xml", "/evil.xml", name]))
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))


def prepare_one(number: int, root: Path, output: Path) -> tuple[list[str], Callable[[], None]]:
    """Write source `number` below `root`; what was done to it, and the call that prepares it."""
    draw = random.Random(number)
    shared: dict[str, Any] = {
        "output": output,
        "size": 8,
        "rejected_share": draw.choice([0.01, 0.5, 1.0]),
        "limit": draw.choice([None, None, 1]),
        "sections": draw.choice([("findings", "impression"), ("impression",), ("findings",)]),
        "cases": draw.choice(["all", "balanced"]),
    }
    form = number % 10
    if form < 7:
        source = write_release(root / "raw")
        if draw.random() < 0.3:
            _boxes_as_csv(source)
        done = mutate_release(source, draw)
        boxes = next(
            (file for file in (source / "boxes.json", source / "boxes.csv") if os.path.lexists(file)), None
        )
        subset = draw.choice([None, None, ("p10",)])
        settings = MimicCxr(source=source, ms_cxr=boxes, subset=subset, **shared)
        return done, lambda: mimic_cxr.prepare(settings)
    (root / "raw").mkdir()
    if form < 9:
        write_folder(root / "raw")
        images = sorted((root / "raw").rglob("*.png"))
        files = {"table": [root / "raw" / "table.csv"], "image": images}
        kinds = draw.choices(["table", "table", "table", "image"], k=draw.randint(1, 2))
        done = [_mutate(kind, files, draw, root) for kind in kinds]
        of_folder = Folder(table=root / "raw" / "table.csv", text_only=draw.random() < 0.2, **shared)
        return done, lambda: folder.prepare(of_folder)
    write_openi(root / "raw")
    done = ["reports"]
    if draw.random() < 0.6:
        rewrite_reports(root / "raw", draw)
    else:
        tables = [root / "raw" / "indiana_projections.csv", root / "raw" / "labels.csv"]
        images = sorted((root / "raw").rglob("*.png"))
        done = [_mutate(draw.choice(["table", "image"]), {"table": tables, "image": images}, draw, root)]
    of_openi = OpenI(
        source=root / "raw" / "NLMCXR_reports.tgz",
        projections=root / "raw" / "indiana_projections.csv",
        labels=root / "raw" / "labels.csv",
        split_shares=(0.6, 0.2, 0.2),
        split_seed=draw.randrange(9),
        **shared,
    )
    return done, lambda: openi.prepare(of_openi)


def _boxes_as_csv(source: Path) -> None:
    content = json.loads((source / "boxes.json").read_text())
    images = {image["id"]: image for image in content["images"]}
    rows = [["dicom_id", "category_name", "label_text", "path", "x", "y", "w", "h", "image_width", "image_height",
             "split", "subject_id", "study_id"]]  # fmt: skip
    for box in content["annotations"]:
        image = images[box["image_id"]]
        patient, study = image["path"].split("/")[-3:-1]
        sides = [str(side) for side in (*box["bbox"], image["width"], image["height"])]
        name = image["file_name"].removesuffix(".jpg")
        rows.append([name, "Edema", box["label_text"], image["path"], *sides, "test", patient[1:], study[1:]])
    write_rows(source / "boxes.csv", rows)
    (source / "boxes.json").unlink()


def there(root: Path, output: Path) -> dict[str, tuple[int, int]]:
    """Everything below a folder but the output, with size and time of change."""
    found = {}
    for path in root.rglob("*"):
        if not path.is_relative_to(output):
            state = path.lstat()
            found[str(path)] = (state.st_size if not path.is_dir() else 0, state.st_mtime_ns)
    return found


def outcome(number: int, root: Path) -> tuple[str, str]:
    """Outcome of preparing source `number`: its kind, and the message or the failure."""
    root.mkdir()
    output = root / "outputs" / "set"
    output.parent.mkdir()
    done, prepare = prepare_one(number, root, output)
    before = there(root, output)
    before.pop(str(output.parent))
    try:
        prepare()
    except Exception as error:
        found = ("refused", str(error))
        # What `run_command` shows without a traceback.
        if not isinstance(error, ValueError) or type(error).__module__.split(".")[0] not in OWN:
            found = ("WRONG: an error of another's", f"{done}: {traceback.format_exc()[-1500:]}")
    else:
        _, problems = check_set(output)
        rejects = pd.read_csv(output / "rejects.csv", keep_default_na=False)
        found = ("finished with rejects" if len(rejects) else "finished, nothing left out", str(done))
        if problems:
            found = ("WRONG: the set has problems", f"{done}: {problems}")
    after = there(root, output)
    after.pop(str(output.parent))
    if after != before:
        found = (
            "WRONG: a file outside the output",
            f"{done}: {sorted(set(after.items()) ^ set(before.items()))[:5]}",
        )
    return found


def test_mutated_sources_are_refused_or_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes: Counter[str] = Counter()
    wrong = []
    for number in range(SOURCES):
        root = tmp_path / str(number)
        kind, message = outcome(number, root)
        shutil.rmtree(root)
        outcomes[kind] += 1
        if kind.startswith("WRONG"):
            wrong.append(f"source {number}: {kind}: {message}")
        elif kind == "refused":
            # One or two sentences that name a file, an option or a number, not a report's text.
            assert 20 < len(message) < 1200, message
    with capsys.disabled():
        print(f"\nof {SOURCES} mutated sources: {dict(outcomes)}")
    assert wrong == [], "\n\n".join(wrong[:10])
    # The mutations reach every part: too strong ones would only ever be refused.
    assert (
        min(outcomes[kind] for kind in ("refused", "finished with rejects", "finished, nothing left out"))
        > 15
    )


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        print(*outcome(int(sys.argv[1]), Path(scratch) / "source"), sep=": ")
