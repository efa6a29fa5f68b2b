"""Tables of a public set, as its reader returns them, and the files of its release."""

from __future__ import annotations

import csv
import gzip
import io
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import yaml

from data_prep.sources.releases import ReleaseError

_IMAGE = re.compile(r"\.(?:png|jpe?g|dcm|dicom|tiff?|bmp)$", re.IGNORECASE)
REGION = ["image", "category", "reader"]
"""Columns of a box or a mask: image, finding, and the reader who drew it ("" for none or a consensus)."""
BOX = [*REGION, "x", "y", "w", "h", "image_width", "image_height"]
"""Columns of boxes, in pixels of an image of this width and height (NaN: of the image itself)."""
MASK = [*REGION, "height", "width", "counts"]
"""Columns of masks: COCO run lengths, column by column, alternately outside and inside, outside first."""


@dataclass(frozen=True, kw_only=True)
class PublicTables:
    """A public set before any image is opened.

    Attributes:
        title: name of the set.
        files: tables that were read.
        images: one row each: image (id without the file's ending), patient, study, view, split ("" to be drawn), sex,
            age (text, "" if unknown), and a column of floats for each finding: 1, 0, -1 (uncertain), NaN (unlabelled).
        boxes: `BOX`.
        masks: `MASK`.
        left_out: image -> why it is not used.
        choices: sentences about labels, splits and patients, printed and kept in dataset.json.
        names_patients: False if the release names none, so that each image counts as a patient.
        images_of: sets whose images these are.
    """

    title: str
    files: Sequence[Path]
    images: pd.DataFrame
    boxes: pd.DataFrame | None = None
    masks: pd.DataFrame | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    choices: Sequence[str] = ()
    names_patients: bool = True
    images_of: Sequence[str] = ()


# --- Files ------------------------------------------------------------------------------------------------------------


class ReleaseFolder:
    """Files of a release, wherever they lie below its folder: users unpack the parts of a download in many ways."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ReleaseError(f"--source {folder} is not a folder; it expects the unpacked release")
        self.folder = folder

    @cached_property
    def _files(self) -> list[Path]:
        found = [
            Path(where) / name for where, _, names in os.walk(self.folder, followlinks=True) for name in names
        ]
        return sorted(file for file in found if not file.name.startswith("."))

    def table(self, *names: str) -> Path:
        """The file of one of these names, the first that is there, packed (.gz) or not."""
        found = self.optional(*names)
        if found is None:
            raise ReleaseError(
                f"--source {self.folder}: expected {' or '.join(names)} (or packed, .gz), found neither"
                " in it nor below it"
            )
        return found

    def optional(self, *names: str) -> Path | None:
        """As `table`; None if none is there."""
        for name in names:
            found = [file for file in self._files if file.name in (name, f"{name}.gz")]
            if len({file.name for file in found}) < len(found):
                raise ReleaseError(
                    f"--source {self.folder} holds {found[0]} and {found[1]}; keep one of them"
                )
            if found:
                return found[0]
        return None

    def images(self, wanted: Iterable[str], name: Callable[[Path], str] | None = None) -> dict[str, Path]:
        """Image id -> file, of the wanted images that are there; `name` gives the id of a file (its stem)."""
        ids = set(wanted)
        found: dict[str, Path] = {}
        for file in self._files:
            if not _IMAGE.search(file.name):
                continue
            of_file = name(file) if name is not None else image_id(file.name)
            if of_file in ids and found.setdefault(of_file, file) != file:
                raise ReleaseError(
                    f"--source {self.folder} holds image {of_file} twice: {found[of_file]} and {file}; keep one of them"
                )
        return found


def image_id(name: str) -> str:
    """Name of an image without folders and without the ending of a picture."""
    return _IMAGE.sub("", name.replace("\\", "/").rpartition("/")[2].strip())


def read_csv(file: Path, columns: Sequence[str], optional: Sequence[str] | None = ()) -> pd.DataFrame:
    """These columns of a table as text, "" where empty; blanks around names and values are dropped.

    `optional` columns may be missing; None for all others.
    """
    reader = csv.reader(io.StringIO(text_of(file), newline=""), strict=True)
    rows = []
    try:
        names = [name.strip() for name in next(reader, [])]
        if missing := [column for column in columns if column not in names]:
            raise ReleaseError(
                f"{file}: expected the columns {', '.join(columns)}, found no {', '.join(missing)} among "
                f"{', '.join(names)[:300]}; is it the table of another version?"
            )
        others = names if optional is None else [column for column in optional if column in names]
        kept = list(dict.fromkeys([*columns, *others]))
        places = [names.index(column) for column in kept]
        # Commas without names may end the header alone.
        n_named = len(",".join(names).rstrip(",").split(","))
        for row in reader:
            if row and not n_named <= len(row) <= len(names):
                raise ReleaseError(
                    f"{file}, line {reader.line_num}: expected {n_named} values, found {len(row)}; the file is cut off "
                    "or damaged: download it again"
                )
            if row:
                rows.append([row[place].strip() for place in places])
    except csv.Error as error:
        raise ReleaseError(f"{file} cannot be read ({error}); download it again") from error
    return pd.DataFrame(rows, columns=kept, dtype="str")


def text_of(file: Path) -> str:
    """Content of a file, packed (.gz) or not."""
    try:
        content = file.read_bytes()
        return (gzip.decompress(content) if file.suffix == ".gz" else content).decode("utf-8-sig")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ReleaseError(f"{file} cannot be read ({error}); download it again") from error


def with_numbers(table: pd.DataFrame, columns: Sequence[str], file: Path) -> pd.DataFrame:
    """The table with these columns as floats, NaN where they are empty."""
    values = table[list(columns)].apply(pd.to_numeric, errors="coerce").astype("float64")
    is_wrong = values.isna() & (table[list(columns)] != "")
    if is_wrong.any(axis=None):
        column = is_wrong.any().idxmax()
        raise ReleaseError(
            f"{file}, column {column}: expected numbers, found {table.loc[is_wrong[column], column].iloc[0][:60]!r}; "
            "download it again"
        )
    return table.assign(**{column: values[column] for column in columns})


# --- Findings ---------------------------------------------------------------------------------------------------------


class Alias(NamedTuple):
    """Common name of a set's finding; `is_choice` if the two names need not mean the same."""

    finding: str
    is_choice: bool


def aliases() -> dict[str, Alias]:
    """Plain name of a finding in any set -> its common name, from ``findings.yaml``."""
    table = yaml.safe_load((files("data_prep.public") / "findings.yaml").read_text(encoding="utf-8"))
    found = {_plain(finding): Alias(finding, False) for finding in table}
    for finding, other in table.items():
        for kind, names in (other or {}).items():
            if kind != "source":
                found |= {_plain(name): Alias(finding, kind == "choice") for name in names}
    return found


def _plain(name: str) -> str:
    return re.sub(r"[\s_/-]+", " ", name).strip().lower()


def common_names(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """A set's names of findings -> common names (its own where the table has none), and the choices among them."""
    known, found, choices = aliases(), {}, []
    for name in dict.fromkeys(names):
        alias = known.get(_plain(name), Alias(name, False))
        found[name] = alias.finding
        if alias.is_choice:
            choices.append(f"{name!r} counts as {alias.finding}")
    return found, [f"findings: {'; '.join(choices)} (choices)"] if choices else []


def in_common(names: pd.Series) -> pd.Series:
    """The common name of each."""
    return names.map(common_names(names)[0])


def renamed(labels: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Labels under common names, of several columns of one name the largest value; and the choices among the names."""
    names, choices = common_names(labels.columns)
    labels = labels.rename(columns=names)
    return labels if labels.columns.is_unique else labels.T.groupby(level=0, sort=False).max().T, choices


def listed(
    images: pd.Series, findings: pd.Series, known: Sequence[str] = ()
) -> tuple[pd.DataFrame, list[str]]:
    """As `renamed`, from the list of an image's findings: 1 if listed, else 0; `known` first, others by their names."""
    pairs = pd.DataFrame({"image": images.to_numpy(), "finding": list(findings)}).explode("finding")
    names, choices = common_names([*known, *sorted(set(pairs["finding"].dropna()))])
    labels = pd.crosstab(pairs["image"], pairs["finding"].map(names)).clip(upper=1)
    labels = labels.reindex(index=images, columns=[*dict.fromkeys(names.values())], fill_value=0)
    return labels.astype("float64").reset_index(drop=True), choices


# --- Masks ------------------------------------------------------------------------------------------------------------


def uncompressed(counts: str) -> list[int]:
    """Run lengths of a compressed COCO mask: 5 bits a character, from the third run on as differences to two before."""
    runs: list[int] = []
    value, shift = 0, 0
    for character in counts.encode("ascii"):
        bits = character - 48
        if not 0 <= bits < 64:
            raise ValueError(f"character {chr(character)!r} does not stand in run lengths")
        value |= (bits & 0x1F) << shift
        shift += 5
        if bits & 0x20:
            continue
        if bits & 0x10:
            value -= 1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
        value, shift = 0, 0
    if shift or any(run < 0 for run in runs):
        raise ValueError("the run lengths are cut off")
    return runs


def run_lengths(mask: np.ndarray) -> list[int]:
    """COCO run lengths of a mask (H, W) bool."""
    flat = mask.ravel(order="F")
    edges = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    runs = np.diff(edges, prepend=0, append=flat.size).tolist()
    return [0, *runs] if flat[0] else runs
