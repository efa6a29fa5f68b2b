"""Options of the commands, declared without torch and pandas; `medclip_dcl.__main__` has the table of commands."""

from __future__ import annotations

import argparse
import codecs
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from data_prep.text.languages import LANGUAGES, SECTIONS
from medclip_dcl.common.command_line import number, option, positional, positive, worker_count
from medclip_dcl.common.errors import UserError
from medclip_dcl.pictures.geometry import GEOMETRIES

SHARES = (0.8, 0.1, 0.1)
"""Of the patients, for train, validate and test, where a source has no split."""
VIEWS = ("PA", "AP", "FRONTAL")
"""Frontal views, in upper or lower case."""
PUBLIC = (
    *("nih", "nih_relabelled", "chexpert", "rsna", "vindr", "siim", "padchest", "chestx_det"),
    *("padchest_gr", "chexpert_plus", "rexgradient"),
)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _sections(text: str) -> tuple[str, ...]:
    if unknown := {*_names(text)} - {*SECTIONS}:
        expected = f"one or more of {','.join(SECTIONS)}"
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}, found {', '.join(unknown)}")
    return tuple(name for name in SECTIONS if name in _names(text))


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(share) for share in text.split(","))
    except ValueError:
        shares = ()
    if len(shares) != 3 or not all(0 <= share <= 1 for share in shares) or not math.isclose(sum(shares), 1):
        raise argparse.ArgumentTypeError(f"{text!r}: expected three shares whose sum is 1, as in 0.8,0.1,0.1")
    return shares


def _encoding(text: str) -> str:
    try:
        name = codecs.lookup(text).name
        "".encode(name)
    except (LookupError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a text encoding that Python knows") from error
    return "utf-8-sig" if name == "utf-8" else name


def _delimiter(text: str) -> str:
    text = {"tab": "\t", "\\t": "\t"}.get(text, text)
    if len(text) != 1 or text in '"\r\n':
        raise argparse.ArgumentTypeError(f"{text!r}: expected one character, or tab")
    return text


def _word_values(text: str, known: Sequence[str]) -> dict[str, str]:
    values = {}
    for pair in text.split(","):
        word, sign, value = (part.strip() for part in pair.rpartition("="))
        if not (word and sign) or value not in known or word.casefold() in values:
            expected = f"each word once with {', '.join(known)}or nothing, as in word={known[0]},other="
            raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}, found {pair!r}")
        values[word.casefold()] = value
    return values


def _column() -> Any:
    """An option that the description of `Folder` names, so that its help has one screen."""
    return option(argparse.SUPPRESS, None, metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Options of every command that prepares a set."""

    output: Path = option("folder of the prepared data set", metavar="SET")
    size: int = positive("side of the prepared images, pixels (512)", 512)
    geometry: str = option(
        "stretch both sides to --size, scale the shortest to it, or the longest and pad with black (stretch)",
        "stretch",
        choices=GEOMETRIES,
    )
    cases: Literal["all", "balanced"] = option(
        "cases of a finding by exact labels: all, or as many with as without", "all"
    )
    limit: int | None = positive("at most N patients of each use, for a first try", None)
    keep_out: Path | None = option(
        "exclude patients named here, or by image or study, one a line", None, metavar="FILE|SET"
    )
    rejected_share: float = option(
        "share of images, reports, boxes and masks to leave out as missing, damaged or of another size (0.01); one "
        "of several always may",
        0.01,
        type=number(1.0),
        metavar="SHARE",
    )
    complete: bool = option("add images that a finished set lacks, and prepare changed ones again", False)
    shards: bool = option("store images in tar files (medclip-dcl shard)", False)
    workers: int = worker_count()


@dataclass(frozen=True, kw_only=True)
class PrepareReports(Prepare):
    """Options of every command that prepares a set with reports."""

    sections: tuple[str, ...] = option(
        "findings,impression (both)", SECTIONS, type=_sections, metavar="NAMES"
    )
    findings_heads: tuple[str, ...] | None = option(
        "further heads of the findings, as in REMARKS", None, type=_names, metavar="NAMES"
    )


@dataclass(frozen=True, kw_only=True)
class PrepareSplit(Prepare):
    """Options of sources that may have no split."""

    split_shares: tuple[float, float, float] | None = option(
        "of patients for train,validate,test without a split (0.8,0.1,0.1)",
        None,
        type=_shares,
        metavar="SHARES",
    )
    split_seed: int | None = option("of that draw (0)", None, metavar="SEED")

    @property
    def shares(self) -> tuple[float, float, float]:
        """For train, validate, test."""
        return self.split_shares or SHARES

    @property
    def seed(self) -> int:
        return self.split_seed or 0

    def split_options(self, has_split: bool) -> Any:
        """The split, for dataset.json."""
        if not has_split:
            return {"shares": list(self.shares), "seed": self.seed}
        if self.split_shares is not None or self.split_seed is not None:
            raise UserError(
                "--split_shares and --split_seed draw a split, but the table has a column for it; leave them out, or "
                "the column"
            )
        return "column"


@dataclass(frozen=True, kw_only=True)
class PrepareRows(PrepareSplit, PrepareReports):
    """Options of sources that are tables of rows with reports."""

    text_only: bool = option("a set of reports alone, for language models and scores of sentences", False)


@dataclass(frozen=True, kw_only=True)
class MimicCxr(PrepareReports):
    """Prepare MIMIC-CXR-JPG, or anything in its layout (the digital phantom), for training and evaluation.

    RAW, which is only read, holds mimic-cxr-2.0.0-{metadata,split,chexpert}.csv.gz and files/; the reports lie in
    RAW/files, in RAW/mimic-cxr-reports/files, in RAW/mimic-cxr-reports.zip (read without unpacking) or in PLACE.
    See docs/mimic_cxr.md."""

    source: Path = option("folder of MIMIC-CXR-JPG", metavar="RAW")
    reports: Path | None = option(
        "folder of MIMIC-CXR's reports, or mimic-cxr-reports.zip, if not in RAW", None, metavar="PLACE"
    )
    ms_cxr: Path | None = option("MS_CXR_Local_Alignment_v*.json or .csv (1.0.0 or 1.1.0)", None)
    ms_cxr_split: Literal["train", "val", "test"] | None = option(
        "boxes to evaluate, by the split of MS-CXR 1.1.0 (all); all its patients stay out of training", None
    )
    resized: Literal["stretch", "pad", "crop"] | None = option(
        "how images got other proportions than the release's, to scale boxes: stretch, or pad or crop two sides alike",
        None,
    )
    subset: tuple[str, ...] | None = option(
        "only patients of these folders, as in p10 or p10,p11", None, type=_names, metavar="p10"
    )
    patients: Path | None = option(
        "hosp/patients.csv.gz of MIMIC-IV, for tables of results by sex and age", None
    )
    labels: Literal["chexpert", "negbio"] = option("labels to take (chexpert)", "chexpert")
    test_labels: Literal["radiologist"] | None = option(
        "labels of the official test split: by the radiologist of MIMIC-CXR-JPG 2.1.0 for 687 studies, none for its "
        "others (those of --labels)",
        None,
    )


@dataclass(frozen=True, kw_only=True)
class Folder(PrepareRows):
    """Prepare a folder of images with a table, as a hospital exports them (docs/other_data.md).

    FILE.csv (or .csv.gz) has a header and one row for each image, in these columns, or in others that --image_column
    NAME, --text_column NAME and so on name:

        image        path of the image below DIR (the table's own folder), in any format that is read
        text         the report; or findings and impression, its sections, each in a column of its own
        patient      name or number; all rows of a patient are used for the same purpose
        study        optional; rows of one study share their report. Without it every row is a study
        view         optional; images of other views than PA, AP and FRONTAL (--views) are left out
        sex, age     optional, for tables of results by group
        split        optional: train, validate or test. Without it patients are drawn
        Atelectasis, Cardiomegaly, ... (CheXpert's names, in any case): optional labels, 1, 0, -1
                     (uncertain), empty, or words such as yes and no; and those of --label_columns
    """

    table: Path = option("CSV file with a header")
    images: Path | None = option("folder below which the images lie (the table's)", None, metavar="DIR")
    image_column: str | None = _column()
    text_column: str | None = _column()
    findings_column: str | None = _column()
    impression_column: str | None = _column()
    patient_column: str | None = _column()
    study_column: str | None = _column()
    view_column: str | None = _column()
    split_column: str | None = _column()
    sex_column: str | None = _column()
    age_column: str | None = _column()
    label_columns: Sequence[str] = option(
        "columns of labels of other findings than CheXpert's, or of these by another name (Effusion)",
        (),
        nargs="+",
        metavar="NAME",
    )
    label_values: Mapping[str, str] | None = option(
        "labels of words (1, 0, -1, or nothing), as in present=1,maybe=",
        None,
        type=partial(_word_values, known=("1", "0", "-1", "")),
        metavar="WORD=LABEL",
    )
    sex_values: Mapping[str, str] | None = option(
        "the same of sexes, F or M, as in kvinde=F,mand=M",
        None,
        type=partial(_word_values, known=("F", "M", "")),
        metavar="WORD=SEX",
    )
    views: tuple[str, ...] = option(
        "frontal views of the view column (PA,AP,FRONTAL)", VIEWS, type=_names, metavar="NAMES"
    )
    delimiter: str | None = option("between two values (the header's)", None, type=_delimiter)
    encoding: str | None = option("of the table (utf-8, or utf-16 with its mark)", None, type=_encoding)
    language: str | None = option(
        f"of all reports: {', '.join(LANGUAGES)} (that of each one's words, else that of most)",
        None,
        choices=tuple(LANGUAGES),
        metavar="CODE",
    )
    drop_bad_rows: bool = option("leave out bad rows, listed in rejects.csv; else one error lists all", False)


@dataclass(frozen=True, kw_only=True)
class OpenI(PrepareRows):
    """Prepare Open-i, the chest X-rays of Indiana University: 3,955 reports, 7,470 images.

    RAW is one of the collection's two public forms, or a folder that holds it:

        NLMCXR_reports.tgz, or ecgen-radiology/ unpacked from it; images in NLMCXR_png/
        indiana_reports.csv of Kaggle's copy; images in images/images_normalized/

    The XML files do not name the frontal images: --projections takes Kaggle's file for that, --all_views takes
    every image. Each report counts as a patient. See docs/other_data.md."""

    source: Path = option(
        "NLMCXR_reports.tgz, ecgen-radiology/, indiana_reports.csv, or a folder that holds one of them",
        metavar="RAW",
    )
    images: Path | None = option("folder of the images, if not beside the reports", None, metavar="DIR")
    projections: Path | None = option("indiana_projections.csv, which names the frontal images", None)
    all_views: bool = option("lateral images as well", False)
    labels: Path | None = option("negbio_gold_14_labels.csv: labels of seven findings and No Finding", None)


@dataclass(frozen=True, kw_only=True)
class Public(PrepareSplit):
    """Prepare a public set with labels, boxes or masks, and of padchest_gr, chexpert_plus and rexgradient reports.

    FOLDER is the unpacked release in any arrangement of its folders (docs/public_sets.md). A part of the images is
    enough: the others are counted. The same command continues after a kill.
    """

    name: str = positional(f"release: {', '.join(PUBLIC)}", choices=PUBLIC, metavar="NAME")
    source: Path = option("folder of the unpacked release", metavar="FOLDER")
    redraw_test: bool = option(
        "draw the official test patients anew by --split_shares (choice: to train on findings that only the test list "
        "has); official training and validate patients stay",
        False,
    )
    official_validate_as_test: bool = option(
        "test on the official validate patients, if none are for test (CheXpert), and draw validate from train (0.01)",
        False,
    )
    reports: bool = option("also its reports (padchest: Spanish, without accents)", False)
    templates: Path | None = option(
        "prompts (a file, or a packaged one by its name, such as public) from which each image gets sentences by its "
        "labels: the first positive one of a finding that it has, the first negative one of a finding that it has not "
        "(choice); they are no reports, which dataset.json says",
        None,
    )
    language: Literal["en", "es"] = option("of padchest_gr: language of its sentences (en)", "en")
    unknown_views: bool = option("of rexgradient: images whose view is unknown as well", False)


@dataclass(frozen=True, kw_only=True)
class Check:
    """Verify a prepared data set and summarise it, with the published counts for comparison.

    Tables are checked against the format and each other, image files by size and time. Identical images are a warning
    across patients and a problem across uses. The exit status is 1 if there is a problem."""

    data: Path = positional("prepared data set", metavar="SET")
    full: bool = option("decode every image, compare its digest, and find images of equal pixels", False)
    workers: int = worker_count()


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Store the images of a prepared set in plain tar files (shards) of about 1 GB, for file systems that count files.

    Training, encoding and check read either form, with equal results; the fingerprint stays. The files are removed once
    the digest of every image in the shards was compared: until then the images take twice the disk. The same command
    continues after a kill. Nothing else may read the set meanwhile. See docs/shards.md."""

    data: Path = positional("prepared data set", metavar="SET")
    undo: bool = option("store the images in files again, and remove the shards", False)
    output: Path | None = option(
        "write a copy of the set there, and leave SET as it is", None, metavar="FOLDER"
    )
    keep_files: bool = option("leave the files beside the shards, which are read", False)
    texts: bool = option(
        "also the sentences of each image's report, as NNNNNNNN.txt, for other readers: patient data", False
    )

    def __post_init__(self) -> None:
        for name in ("texts", "keep_files"):
            if getattr(self, name) and (self.undo or (name == "keep_files" and self.output)):
                raise UserError(
                    f"--{name}: of no use with {'--undo' if self.undo else '--output'}; leave it out"
                )
