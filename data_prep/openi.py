"""Prepare Open-i, the chest X-rays of Indiana University: 3,955 reports, 7,470 images."""

from __future__ import annotations

import hashlib
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from xml.etree import ElementTree

import pandas as pd

from data_prep.options import OpenI
from data_prep.sources import preparation
from data_prep.sources.finding_names import common_names, names_of
from data_prep.sources.growth import files_of_set
from data_prep.sources.preparation import Source
from data_prep.sources.prepared_images import image_files
from data_prep.sources.rows import TableCheck, rows_source, with_image_paths
from data_prep.sources.set_tables import Reject
from data_prep.sources.source_tables import is_placeholder, read_label_table, read_table, require
from data_prep.text.reports import MAX_BYTES
from data_prep.text.sections import OWN_RULES_VERSION
from medclip_dcl.common.errors import UserError
from medclip_dcl.pictures.image_file import ENDINGS

ARCHIVE = "NLMCXR_reports.tgz"
XML_FOLDERS = ("ecgen-radiology", "NLMCXR_reports/ecgen-radiology", ".")
REPORTS, PROJECTIONS = "indiana_reports.csv", "indiana_projections.csv"
IMAGE_FOLDERS = ("NLMCXR_png", "images/images_normalized", "images", ".")

NEGBIO = names_of("NegBio")
"""Columns of negbio_gold_14_labels.csv that mean the same as a column of CheXpert."""


class OpeniReport(NamedTuple):
    """One report; images by the names that the collection gives them."""

    uid: str
    findings: str
    impression: str
    images: tuple[str, ...]


def prepare(settings: OpenI) -> None:
    """Prepare a set, finish a broken one, or say that it is finished."""
    place = find_source(settings.source)
    projections, is_table = settings.projections, place.suffix == ".csv"
    if projections is None and is_table and (place.parent / PROJECTIONS).is_file():
        projections = place.parent / PROJECTIONS
    if settings.text_only and (settings.images or settings.projections or settings.all_views):
        raise UserError("--text_only has no images: leave out --images, --projections and --all_views")
    if projections is None and not settings.text_only and (is_table or not settings.all_views):
        raise UserError(
            f"{place} does not say which images are frontal; give --projections {PROJECTIONS} (of Kaggle's copy), or "
            "say --all_views or --text_only"
        )
    tables = [file for file in (projections, settings.labels) if file is not None]
    is_folder = place.is_dir()
    made_from = preparation.made_from(
        settings,
        "open-i",
        False,
        tables if is_folder else [place, *tables],
        {
            "split": settings.split_options(False),
            "views": "none" if settings.text_only else "all" if settings.all_views else "frontal",
            "labels": settings.labels.name if settings.labels is not None else None,
            "text_rules": OWN_RULES_VERSION,
        },
    )
    if is_folder:
        made_from["source_files"]["ecgen-radiology"] = _folder_hash(place)
    preparation.prepare_set(settings, made_from, lambda: _read(settings, place, projections))


def find_source(source: Path) -> Path:
    """The folder of XML files, the archive that it comes from, or Kaggle's table of reports."""
    if source.is_file():
        return source
    folders = [source / name for name in XML_FOLDERS if any((source / name).glob("*.xml"))]
    files = [source / name for name in (ARCHIVE, REPORTS) if (source / name).is_file()]
    if not folders and not files:
        raise UserError(
            f"--source {source}: expected {ARCHIVE}, ecgen-radiology/*.xml or {REPORTS}, found none of them"
        )
    return [*folders, *files][0]


def _read(settings: OpenI, place: Path, projections: Path | None) -> Source:
    views = read_projections(projections) if projections is not None else {}
    rejects: list[Reject] = []
    if place.suffix == ".csv":
        reports = read_kaggle(place, list(views))
    else:
        reports, rejects = read_xml(place, settings.rejected_share)
    # A row for each image, and one without image: a report whose images are left out is a reject.
    rows = pd.DataFrame(reports, columns=["study", "findings", "impression", "name"])
    n_images = int(rows["name"].map(len).sum())
    rows["name"] = [("",) if settings.text_only else (*names, "") for names in rows["name"]]
    rows = rows.explode("name", ignore_index=True)
    view_of = {_key(name): view for (_, name), view in views.items()}
    rows["view"] = [view_of.get(_key(name), "") for name in rows["name"]]
    root = place.parent if settings.text_only else _image_folder(settings, place)
    kept = [
        root / PurePosixPath(path).with_name(name) for path, name in files_of_set(settings.output).items()
    ]
    found = [] if settings.text_only else image_files(root)
    # The first of several in a folder, before those that are gone.
    files = {_stem(file.name): file for file in (*kept, *reversed(found))}
    rows["file"] = rows["name"].map(lambda name: files.get(_stem(name)))
    is_image = rows["name"] != ""
    is_wanted = is_image & ((rows["view"] == "Frontal") | settings.all_views)
    is_unnamed = is_image & ~is_wanted & (rows["view"] == "")
    is_absent = is_wanted & rows["file"].isna()
    rejects += [
        ("image", name, reason)
        for reason, is_left_out in (
            ("the table of projections does not name it", is_unnamed),
            ("its file is not there", is_absent),
        )
        for name in rows.loc[is_left_out, "name"]
    ]
    if not settings.text_only and not (is_wanted & ~is_absent).any():
        raise UserError(
            f"none of {is_wanted.sum():,} images is below {root}; say --images DIR, or --text_only"
        )
    counts = {
        "images_in_release": n_images,
        "images_not_frontal": int((is_image & ~is_wanted & ~is_unnamed).sum()),
        "images_without_file": int(is_absent.sum()),
    }
    rows = rows[~is_image | (is_wanted & ~is_absent)].reset_index(drop=True)
    rows["image"] = [file.relative_to(root).as_posix() if file else "" for file in rows["file"]]
    texts = rows[["findings", "impression"]]
    rows[["findings", "impression"]] = texts.mask(texts.apply(is_placeholder), "")
    rows = rows.assign(file=rows["file"].map(str), patient=rows["study"], split="").drop(columns="name")
    if settings.labels is not None:
        rows = rows.merge(read_negbio(settings.labels), on="study", how="left")
    check = TableCheck(place, rejects=rejects)
    return rows_source(with_image_paths(rows, root, check), settings, check, counts)


def read_xml(place: Path, rejected_share: float) -> tuple[list[OpeniReport], list[Reject]]:
    """The official reports, of an archive or a folder, in the order of their numbers."""
    reports, rejects, names = [], [], []
    for name, content in _folder_members(place) if place.is_dir() else _archive_members(place):
        names.append(name)
        found = parse_report(content, name)
        if isinstance(found, str):
            rejects.append(("report", name, found))
        else:
            reports.append(found)
    if not reports or len(rejects) > max(1, rejected_share * len(names)):
        first = f" (first: {rejects[0][1]}, {rejects[0][2]})" if rejects else ""
        raise UserError(
            f"{place}: expected the XML reports of Open-i ({ARCHIVE}, or what it unpacks to), found that "
            f"{len(rejects):,} of {len(names):,} cannot be read{first}; download it again, or allow more with "
            "--rejected_share"
        )
    return sorted(reports, key=lambda report: int(report.uid)), rejects


def parse_report(content: bytes, name: str) -> OpeniReport | str:
    """A report from the bytes of its XML file, or why it cannot be read.

    ElementTree opens nothing outside the file, and expat stops at entities that expand to much.
    """
    if len(content) > MAX_BYTES:
        return f"report has more than {MAX_BYTES:,} bytes"
    try:
        root = ElementTree.fromstring(content)
    # ValueError: an encoding is declared that the parser does not know.
    except (ElementTree.ParseError, ValueError, RecursionError, LookupError) as error:
        return f"report is not XML ({error})"
    uid = _uid(root, name)
    if uid is None:
        return "report names no number (uId)"
    sections = {
        (part.get("Label") or "").strip().upper(): " ".join("".join(part.itertext()).split())
        for part in root.iter("AbstractText")
    }
    images = tuple(image.get("id", "").strip() for image in root.iter("parentImage"))
    return OpeniReport(
        uid, sections.get("FINDINGS", ""), sections.get("IMPRESSION", ""), tuple(filter(None, images))
    )


def _uid(root: ElementTree.Element, name: str) -> str | None:
    """Number of a report: ``<uId id="CXR12"/>``, else ``<IUXRId id="12"/>``, else of its file, ``12.xml``."""
    ids = [element.get("id", "") for tag in ("uId", "IUXRId") for element in root.iter(tag)]
    for text in (*ids, Path(name).stem):
        if match := re.fullmatch(r"(?:CXR)?0*([0-9]{1,9})", text.strip()):
            return match[1]
    return None


def _folder_members(folder: Path) -> Iterator[tuple[str, bytes]]:
    for file in sorted(folder.glob("*.xml")):
        with file.open("rb") as stream:
            yield file.name, stream.read(MAX_BYTES + 1)


def _archive_members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of the XML files; nothing is unpacked, so that no name leads anywhere."""
    try:
        with tarfile.open(archive, "r:*") as members:
            for member in members:
                if member.isfile() and member.name.endswith(".xml"):
                    stream = members.extractfile(member)
                    assert stream is not None  # it is a file
                    yield member.name.split("/")[-1], stream.read(MAX_BYTES + 1)
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
        raise UserError(f"{archive} cannot be read ({error}); download it again") from error


def _folder_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for name, content in _folder_members(folder):
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def read_kaggle(file: Path, images: Sequence[tuple[str, str]]) -> list[OpeniReport]:
    """Kaggle's table of reports, with their images: pairs of uid and name."""
    names: dict[str, list[str]] = {}
    for uid, name in images:
        names.setdefault(uid, []).append(name)
    table = read_table(file, ("uid", "findings", "impression"))
    uids = table["uid"]
    require(uids, uids.str.fullmatch(r"[0-9]{1,9}") & ~uids.duplicated(), "a number, each report once", file)
    return [
        OpeniReport(uid, findings, impression, tuple(names.get(uid, ())))
        for uid, findings, impression in table.itertuples(index=False)
    ]


def read_projections(file: Path) -> dict[tuple[str, str], str]:
    """Kaggle's table of images: uid and name of an image -> Frontal or Lateral."""
    table = read_table(file, ("uid", "filename", "projection"))
    views, names = table["projection"], table["filename"]
    require(views, views.isin(["Frontal", "Lateral"]), "Frontal or Lateral", file)
    require(names, ~names.duplicated(), "each image once", file)
    return dict(zip(zip(table["uid"], table["filename"], strict=True), views, strict=True))


def read_negbio(file: Path) -> pd.DataFrame:
    """Labels by study (the report's number as text), in CheXpert's columns."""
    table = read_label_table(file, "filename", r"CXR[0-9]{1,9}", "CXR and a number", NEGBIO)
    table["filename"] = table["filename"].str.removeprefix("CXR")
    return table.rename(columns={"filename": "study", **common_names(NEGBIO)[0]})


def _image_folder(settings: OpenI, place: Path) -> Path:
    if settings.images is not None:
        return settings.images
    # The folder of XML files is next to the images, not above them.
    base = settings.source if settings.source.is_dir() else place.parent
    return next(base / name for name in IMAGE_FOLDERS if (base / name).is_dir())


def _stem(name: str) -> str:
    return ENDINGS.sub("", name.split("/")[-1])


def _key(name: str) -> str:
    """The same for both forms of an image's name: CXR1_1_IM-0001-3001 and 1_IM-0001-3001.dcm.png."""
    stem = _stem(name)
    match = re.fullmatch(r"(?:CXR)?(\d+)(?:_\d+)?_(IM-.*)", stem)
    return f"{match[1]}_{match[2]}" if match else stem
