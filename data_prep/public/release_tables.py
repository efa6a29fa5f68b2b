"""Tables of a public set, as its reader returns them, and the files of its release."""

from __future__ import annotations

import filecmp
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from data_prep.sources.prepared_images import listed_files
from data_prep.sources.source_tables import require
from data_prep.sources.spellings import as_spelled, code_points, plain_image
from medclip_dcl.common.errors import UserError
from medclip_dcl.pictures.image_file import ENDINGS

_CHEXPERT = re.compile(r"(patient\d+)/(study\d+)/(view\d+_[a-z]+)$", re.IGNORECASE)
BOX = ["image", "category", "reader", "x", "y", "w", "h", "image_width", "image_height"]
"""Columns of boxes: reader who drew it ("" for none or a consensus), pixels of an image of this size (NaN: itself;
1 x 1: shares of its sides); optionally their phrase."""
MASK = ["image", "category", "height", "width", "counts"]
"""Columns of masks: COCO run lengths, column by column, alternately outside and inside, outside first."""


@dataclass(frozen=True, kw_only=True)
class PublicTables:
    """A public set before any image is opened.

    Attributes:
        title: name of the set.
        images: one row each: image (id, see `image_id`), a column of floats for each finding: 1, 0, -1 (uncertain), NaN
            (unlabelled); and where the release has them patient, study, view, split ("" to be drawn), sex and age, as
            text, "" if unknown; findings and impression, the same in all rows of a study; report, of which `--reports`
            makes sentences.
        boxes: `BOX`.
        masks: `MASK`.
        left_out: image -> why it is not used.
        choices: sentences about labels, splits and patients, printed and kept in dataset.json.
        images_of: sets whose images these are; the last one is the family whose names of patients it has.
        sentences: image -> (section, sentence) of its report, which the release has cut; None for other sets.
        language: of the reports, from `languages.LANGUAGES`.
        other_endings: of files that give way to one of the same image with another ending.
    """

    title: str
    images: pd.DataFrame
    boxes: pd.DataFrame | None = None
    masks: pd.DataFrame | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    choices: Sequence[str] = ()
    images_of: Sequence[str] = ()
    sentences: Mapping[str, Sequence[tuple[str, str]]] | None = None
    language: str = "en"
    other_endings: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Give boxes and masks the ids of `images`; boxes must be in pixels, and of findings that are not absent."""
        first: dict[str, str] = {}
        for name in self.images["image"].unique():
            if (other := first.setdefault(plain_image(name), name)) != name:
                both = " and ".join(f"{spelling}{code_points(spelling)}" for spelling in (other, name))
                raise UserError(f"{self.title}: images {both}: expected one spelling; correct the tables")
        for name in ("boxes", "masks"):
            if (regions := getattr(self, name)) is not None:
                ids = pd.Series(as_spelled(regions["image"], first.values()), regions.index, dtype="object")
                object.__setattr__(self, name, regions.assign(image=ids))
        if self.boxes is None or self.boxes.empty:
            return
        labels = self.images[self.images["image"].isin(self.boxes["image"])].select_dtypes("float64")
        label = labels.groupby(self.images["image"]).max().stack()
        is_absent = label.reindex(pd.MultiIndex.from_frame(self.boxes[["image", "category"]])).to_numpy() == 0
        is_small = self.boxes[["x", "y", "w", "h"]].max(axis=1).between(0, 1).to_numpy()
        for is_wrong, expected in (
            (
                is_small & (is_small.mean() > 0.5) & (self.boxes["image_width"] != 1).to_numpy(),
                "in pixels; multiply shares of an image by its width and height",
            ),
            (is_absent, "of findings that the image has by its label; correct one of them"),
        ):
            if is_wrong.any():
                image, category = self.boxes.loc[is_wrong, ["image", "category"]].iloc[0]
                raise UserError(
                    f"{self.title}: wrong boxes: {is_wrong.sum():,} of {len(self.boxes):,} (first: {category} on image "
                    f"{image}): expected boxes {expected}"
                )

    @property
    def names_patients(self) -> bool:
        """False if each image counts as a patient."""
        return "patient" in self.images

    @cached_property
    def rows(self) -> pd.DataFrame:
        """`images` with all columns: an image without patient or study is its own."""
        columns: dict[str, Any] = dict.fromkeys(("patient", "study"), self.images["image"])
        columns |= dict.fromkeys(("view", "split", "sex", "age"), "")
        return self.images.assign(**{name: columns[name] for name in columns if name not in self.images})


class ReleaseFolder:
    """Files of a release, wherever they lie below its folder: users unpack the parts of a download in many ways.

    Attributes:
        taken: the tables that were asked for and are there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.taken: list[Path] = []

    @cached_property
    def _files(self) -> list[Path]:
        return listed_files(self.folder)

    def optional(self, *names: str) -> Path | None:
        """The file of one of these names, the first that is there, packed (.gz, .zip) or not; None if none is.

        A name may begin with that of the folder, "masks/test.csv".
        """
        for name in names:
            ends = tuple(f"/{name}{packed}" for packed in ("", ".gz", ".zip"))
            found = [file for file in self._files if f"/{file.as_posix()}".endswith(ends)]
            found = [
                file for n, file in enumerate(found) if not any(_are_equal(file, one) for one in found[:n])
            ]
            if len({file.name for file in found}) < len(found):
                raise UserError(f"--source {self.folder} holds {found[0]} and {found[1]}; keep one of them")
            if found:
                self.taken.append(found[0])
                return found[0]
        return None

    def table(self, *names: str) -> Path:
        """As `optional`; one must be there."""
        return self.tables({"": names})[""]

    def tables(self, names: Mapping[str, Sequence[str]]) -> dict[str, Path]:
        """Split -> its table by one of these names, of the splits that have one, which must be one at least."""
        found = {split: file for split, of in names.items() if (file := self.optional(*of)) is not None}
        if not found:
            expected = " or ".join(name for of_split in names.values() for name in of_split)
            raise UserError(
                f"--source {self.folder}: expected {expected} (or packed, .gz, .zip), found neither in it nor below it"
            )
        return found

    def images(self, wanted: Iterable[str], other_endings: Sequence[str] = ()) -> dict[str, Path]:
        """Image id -> file, of the wanted images that are there; files of `other_endings` give way."""
        ids = set(wanted)
        found: dict[str, Path] = {}
        pictures = [file for file in self._files if ENDINGS.search(file.name)]
        pictures.sort(key=lambda file: file.suffix in other_endings)
        names = as_spelled((image_id(file.as_posix()) for file in pictures), ids)
        for name, file in zip(names, pictures, strict=True):
            if name not in ids:
                continue
            first = found.setdefault(name, file)
            if first != file and file.suffix not in other_endings and not _are_equal(first, file):
                raise UserError(
                    f"--source {self.folder} holds image {name} twice: {first} and {file}; keep one of them"
                )
        return found


def _are_equal(one: Path, other: Path) -> bool:
    """True for copies, as downloads that contain each other have them."""
    try:
        return filecmp.cmp(one, other, shallow=False)
    except OSError:  # a broken link
        return False


def image_id(path: str) -> str:
    """A file's name without its ending; of CheXpert patient00001_study1_view1_frontal, as CheXlocalize has it."""
    path = ENDINGS.sub("", path.strip())
    of_chexpert = _CHEXPERT.search(path) if "/" in path else None
    return "_".join(of_chexpert.groups()).lower() if of_chexpert else path.rpartition("/")[2]


def with_numbers(table: pd.DataFrame, columns: Sequence[str], file: Path) -> pd.DataFrame:
    """The table with these columns as floats, NaN where they are empty."""
    values = table[list(columns)].apply(pd.to_numeric, errors="coerce").astype("float64")
    for column in columns:
        require(table[column], values[column].notna() | (table[column] == ""), "numbers", file)
    return table.assign(**{column: values[column] for column in columns})


def uncompressed(counts: str) -> list[int]:
    """Run lengths of a compressed COCO mask: 5 bits a character, from the fourth on differences to two before."""
    runs: list[int] = []
    value, shift = 0, 0
    for character in counts.encode("ascii"):
        bits = character - 48
        value |= (bits & 0x1F) << shift
        shift += 5
        if not bits & 0x20:
            value -= (bits & 0x10) << shift - 4
            runs.append(value + runs[-2] if len(runs) > 2 else value)
            value, shift = 0, 0
    return runs


def run_lengths(mask: np.ndarray) -> list[int]:
    """COCO run lengths of a mask (H, W) bool."""
    flat = mask.ravel(order="F")
    edges = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    runs = np.diff(edges, prepend=0, append=flat.size).tolist()
    return [0, *runs] if flat[0] else runs
