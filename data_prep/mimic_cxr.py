"""Prepare MIMIC-CXR-JPG, or anything in its layout (the digital phantom), for training and evaluation.

    python -m data_prep.mimic_cxr --source RAW --output SET [--reports DIR] [--ms_cxr FILE]

RAW holds the tables ``mimic-cxr-2.0.0-{metadata,split,chexpert}.csv.gz`` and ``files/``; the reports lie in
``RAW/files``, in ``RAW/mimic-cxr-reports/files`` or in DIR. SET becomes a prepared data set (see
`medclip_dcl.prepared`): frontal images of one size, sentences of the findings and impression sections, labels, boxes,
and what each image is for. What cannot be used is left out, each with its reason in ``rejects.csv``.

Images are finished one by one, so that a broken run continues; ``dataset.json`` is written last. A finished set is left
as it is, and one that was made in another way is never overwritten.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from data_prep import images as image_files
from data_prep import sections, sentences, tables
from data_prep.command import available_cores, progress, run_command, worker_processes
from data_prep.releases import (
    FRONTAL_VIEWS,
    LABELERS,
    Release,
    ReleaseError,
    file_hash,
    find_release,
    read_images,
    read_labels,
    read_ms_cxr,
    read_truth,
    require_ms_cxr,
    truth_files,
)
from data_prep.reports import Sentences, Study, read_sentences, report_folders
from medclip_dcl.prepared import FORMAT_VERSION, PreparedDataError, write_json, write_table, write_text

REJECTED_SHARE = 0.01
"""More images (or report files) than this share, and more than one, that cannot be used: the release is damaged."""


@dataclass(frozen=True)
class Settings:
    """What the command line says.

    Attributes:
        source: the release's folder.
        output: the prepared set's folder.
        reports: where the reports lie, if not in `source`.
        ms_cxr: the JSON or CSV file of MS-CXR, if there is one.
        size: side of the prepared images, pixels.
        sections: from `sections.SECTIONS`.
        labels: from `LABELERS`.
        workers: processes.
    """

    source: Path
    output: Path
    reports: Path | None = None
    ms_cxr: Path | None = None
    size: int = 512
    sections: tuple[str, ...] = sections.SECTIONS
    labels: str = "chexpert"
    workers: int = 1


def prepare(settings: Settings) -> None:
    """Prepare a set, finish a broken one, or say that it is finished.

    Raises:
        ReleaseError: the source lacks something, or what it holds cannot be right.
        PreparedDataError: the output folder holds another set, or something else.
    """
    release = find_release(settings.source, settings.labels)
    made_from = _made_from(settings, release)
    if _is_finished(settings.output, made_from):
        print(f"{settings.output} is a finished set, made with these options from this source: nothing to do")
        return
    raw = _read_raw(settings, release)
    _note_unused_boxes(settings)
    _remove_leftovers(settings.output)
    write_json(made_from, settings.output / _UNFINISHED)
    with worker_processes(settings.workers) as pool:
        ids = raw.frontal[["study_id", "subject_id"]].drop_duplicates()
        studies = [Study(int(study), int(subject)) for study, subject in ids.itertuples(index=False)]
        folders = report_folders(settings.source, settings.reports)
        found = read_sentences(studies, folders, settings.sections, pool)
        unreadable = {str(study): found.reasons[study] for study in found.unreadable}
        _refuse_many(settings.output, "report", unreadable, len(studies))
        images, image_rejects = _prepare_images(raw.frontal, settings, pool)
    written, rejects, counts = _assemble(raw, images, found)
    rejects = [*image_rejects, *rejects]
    for name, frame in written.items():
        write_table(frame, settings.output / f"{name}.parquet", name)
    _write_rejects(settings.output, rejects)
    counts["rejects"] = {kind: [row[0] for row in rejects].count(kind) for kind in ("image", "report", "box")}
    info = {**made_from, "counts": counts, "fingerprint": tables.fingerprint(written)}
    write_json(info, settings.output / "dataset.json")
    (settings.output / _UNFINISHED).unlink()
    print(_summary(settings.output, info))


@dataclass(frozen=True)
class _Raw:
    """The tables of a release, checked.

    Attributes:
        images: of any view.
        frontal: the images of frontal views.
        labels: by study.
        boxes: of MS-CXR, None without its file.
        truth: the phantom's, None for a real release.
    """

    images: pd.DataFrame
    frontal: pd.DataFrame
    labels: pd.DataFrame
    boxes: pd.DataFrame | None
    truth: Mapping[str, pd.DataFrame] | None

    @property
    def grounding_patients(self) -> set[int]:
        """Every patient of the MS-CXR file, also those whose boxes cannot be used."""
        if self.boxes is None:
            return set()
        has_box = self.images["dicom_id"].isin(self.boxes["dicom_id"])
        return {*self.boxes["subject_id"], *self.images.loc[has_box, "subject_id"]}


def _read_raw(settings: Settings, release: Release) -> _Raw:
    """Read and check all tables before any work begins."""
    images = read_images(release)
    frontal = images[images["view"].isin(FRONTAL_VIEWS)].reset_index(drop=True)
    if frontal.empty:
        raise ReleaseError(f"{release.metadata}: none of {len(images):,} images is frontal (AP or PA)")
    boxes = read_ms_cxr(settings.ms_cxr) if settings.ms_cxr is not None else None
    if boxes is not None and not boxes["dicom_id"].isin(images["dicom_id"]).any():
        raise ReleaseError(f"{settings.ms_cxr}: none of its images is among those of {release.metadata}")
    raw = _Raw(images, frontal, read_labels(release), boxes, read_truth(settings.source))
    # The final uses are checked again; hours of image work should not pass before a damaged split is noticed.
    use = tables.decide_use(frontal, raw.grounding_patients, (), ())
    tables.require_disjoint_patients(frontal.assign(use=use))
    return raw


def _assemble(
    raw: _Raw, images: pd.DataFrame, found: Sentences
) -> tuple[dict[str, pd.DataFrame], list[tables.Reject], dict[str, Any]]:
    """The tables of the set, what was left out of them, and counts."""
    written: dict[str, pd.DataFrame] = {}
    box_rejects: list[tables.Reject] = []
    boxed: set[str] = set()
    if raw.boxes is not None:
        written["boxes"], box_rejects = tables.select_boxes(raw.boxes, raw.images, images)
        boxed = set(written["boxes"]["dicom_id"])
    images = images.assign(use=tables.decide_use(images, raw.grounding_patients, boxed, found.reasons))
    tables.require_disjoint_patients(images)
    present = set(images["study_id"])
    texts = {study: text for study, text in found.of_study.items() if study in present}
    written["images"] = tables.typed(images, "images")
    written["sentences"], written["reports"] = tables.sentence_tables(texts)
    written["labels"], without_labels = tables.study_labels(images, raw.labels)
    written["chex5"] = tables.chex5_table(images, written["labels"])
    if raw.truth is not None:
        written["classes"], written["image_classes"] = tables.class_tables(
            raw.truth, written["sentences"], written["images"]
        )
    is_resized = (images["height"] != images["rows"]) | (images["width"] != images["columns"])
    counts = {
        **tables.count(written),
        "images_in_release": len(raw.images),
        "images_not_frontal": len(raw.images) - len(raw.frontal),
        "images_of_other_size_than_in_metadata": int(is_resized.sum()),
        "studies_without_labels": without_labels,
        "sentences_without_letter": found.without_letter,
    }
    reasons = {study: found.reasons[study] for study in sorted(found.reasons) if study in present}
    return written, [*(("report", str(s), reason) for s, reason in reasons.items()), *box_rejects], counts


# --- What a set was made from ------------------------------------------------------------------------------------

_UNFINISHED = "unfinished.json"


def _made_from(settings: Settings, release: Release) -> dict[str, Any]:
    """Everything that the content of a set depends on, except reports and images themselves (too many to hash)."""
    truth = truth_files(settings.source)
    files = [release.metadata, release.split, release.labels, *truth]
    if settings.ms_cxr is not None:
        require_ms_cxr(settings.ms_cxr)
        files.append(settings.ms_cxr)
    return {
        "format_version": FORMAT_VERSION,
        "source": f"digital phantom in the layout of {release.name}" if truth else release.name,
        "phantom": bool(truth),
        "source_files": {file.name: file_hash(file) for file in files},
        "options": {
            "size": settings.size,
            "geometry": image_files.GEOMETRY,
            "filter": image_files.FILTER,
            "jpeg_quality": image_files.QUALITY,
            "sections": list(settings.sections),
            "labels": settings.labels,
            "views": list(FRONTAL_VIEWS),
            "ms_cxr": settings.ms_cxr.name if settings.ms_cxr is not None else None,
            "section_rules": sections.RULES_VERSION,
            "sentence_rules": sentences.RULES_VERSION,
            "pysbd": version("pysbd"),
        },
    }


def _is_finished(output: Path, made_from: Mapping[str, Any]) -> bool:
    """True for a finished set of the same making; False for none, or for an unfinished one that may be continued.

    Raises:
        PreparedDataError: the folder holds something else.
    """
    if output.exists() and not output.is_dir():
        raise PreparedDataError(f"output {output} is a file; --output expects a folder of its own")
    for name in ("dataset.json", _UNFINISHED):
        file = output / name
        if not file.is_file():
            continue
        try:
            there = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise PreparedDataError(
                f"{file} is not JSON ({error}); delete {output} and prepare it again"
            ) from error
        if name == _UNFINISHED and not (output / "images").is_dir():
            # Nothing was made yet that depends on an option.
            return False
        if differences := _differences(there, made_from):
            raise PreparedDataError(
                f"{output} holds a {'prepared' if name == 'dataset.json' else 'partly prepared'} set that was made "
                f"differently ({'; '.join(differences)}); choose another --output, or delete this folder to prepare "
                "it again"
            )
        return name == "dataset.json"
    if output.is_dir() and any(not entry.name.startswith(".") for entry in output.iterdir()):
        raise PreparedDataError(
            f"output {output} is neither empty nor a prepared set; choose another --output, or empty it"
        )
    return False


def _differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if there.get("format_version") != now["format_version"]:
        return [
            f"format version {there.get('format_version')} there, this program writes version {now['format_version']}"
        ]
    found = []
    if there.get("source") != now["source"]:
        found.append(f"source: {there.get('source')} there, {now['source']} now")
    old, new = there.get("options", {}), now["options"]
    changed = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    found += [f"{name}: {_word(old.get(name))} there, {_word(new.get(name))} now" for name in changed]
    old, new = there.get("source_files", {}), now["source_files"]
    found += [f"{name} has changed" for name in sorted(old) if name in new and old[name] != new[name]]
    if not found and set(old) != set(new):
        found.append(f"source files: {_word(sorted(old))} there, {_word(sorted(new))} now")
    return found


def _word(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)


def _remove_leftovers(output: Path) -> None:
    """Remove what a killed run was writing just then, under temporary names."""
    for file in list(output.rglob(".*.tmp")):
        file.unlink()


def _note_unused_boxes(settings: Settings) -> None:
    lying_there = sorted(settings.source.glob("MS_CXR_Local_Alignment*"))
    if settings.ms_cxr is None and lying_there:
        print(
            f"note: {lying_there[0]} is not used: without --ms_cxr the set has no boxes, and MS-CXR patients may be in "
            "training",
            file=sys.stderr,
        )


# --- Images ------------------------------------------------------------------------------------------------------


def _prepare_images(
    images: pd.DataFrame, settings: Settings, pool: Executor | None
) -> tuple[pd.DataFrame, list[tables.Reject]]:
    """Prepare every image; returns those that can be used, with height and width of the originals, and the others.

    Raises:
        ReleaseError: more than `REJECTED_SHARE` cannot be used.
    """
    folder = settings.output / "images"
    jobs = [
        image_files.Job(settings.source / path, folder / path, settings.size)
        for path in images["path"].tolist()
    ]
    outcomes = list(progress(image_files.prepare_images(jobs, pool), len(jobs), "images", "images"))
    images = images.assign(height=[o.height for o in outcomes], width=[o.width for o in outcomes])
    reasons = pd.Series([o.reason for o in outcomes], index=images.index)
    bad = dict(zip(images.loc[reasons != "", "dicom_id"], reasons[reasons != ""], strict=True))
    _refuse_many(settings.output, "image", bad, len(images))
    rejects = [("image", str(dicom_id), reason) for dicom_id, reason in bad.items()]
    return images[reasons == ""].reset_index(drop=True), rejects


def _refuse_many(output: Path, kind: str, reasons: Mapping[str, str], total: int) -> None:
    """A few damaged files are left out; many mean that the download is broken. One is always allowed."""
    if len(reasons) <= max(1, REJECTED_SHARE * total):
        return
    _write_rejects(output, [(kind, name, reason) for name, reason in sorted(reasons.items())])
    first, reason = min(reasons.items())
    raise ReleaseError(
        f"{len(reasons):,} of {total:,} {kind}s cannot be used, more than {REJECTED_SHARE:.0%} (first: {first}, "
        f"{reason}; all of them: {output / 'rejects.csv'}); complete the download, then run the same command again"
    )


def _write_rejects(output: Path, rejects: Sequence[tables.Reject]) -> None:
    frame = pd.DataFrame(rejects, columns=["kind", "id", "reason"])
    write_text(frame.to_csv(index=False, lineterminator="\n"), output / "rejects.csv")


# --- What the user sees ------------------------------------------------------------------------------------------


def _summary(output: Path, info: Mapping[str, Any]) -> str:
    counts = info["counts"]
    uses = ", ".join(f"{use} {n:,}" for use, n in counts["images_by_use"].items())
    rejects = ", ".join(f"{kind} {n:,}" for kind, n in counts["rejects"].items())
    in_sections = ", ".join(f"{name} {n:,}" for name, n in counts["reports_by_section"].items())
    lines = [
        f"{output}: prepared from {info['source']}",
        f"  images     {counts['images']:,} frontal of {counts['images_in_release']:,} ({uses})",
        f"  patients   {counts['patients']:,}, of whom {counts['patients_grounding']:,} for grounding",
        f"  reports    {counts['reports']:,} of {counts['studies']:,} studies ({in_sections})",
        f"  sentences  {counts['report_sentences']:,}, of which {counts['sentences']:,} distinct; "
        f"{counts['sentences_without_letter']:,} without a letter dropped",
        f"  boxes      {counts['boxes']:,}",
        f"  left out   {rejects}"
        + ("" if not sum(counts["rejects"].values()) else "; reasons in rejects.csv"),
    ]
    for use, findings in counts["chex5"].items():
        cases = ", ".join(f"{finding} {n['yes']:,}/{n['no']:,}" for finding, n in findings.items())
        lines.append(f"  CheX5      {use} (yes/no): {cases}")
    return "\n".join(lines)


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(name for name in sections.SECTIONS if name in text.split(","))
    if not names or len(names) != len(text.split(",")):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected one or more of {','.join(sections.SECTIONS)}, separated by a comma"
        )
    return names


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.mimic_cxr", description="Prepare MIMIC-CXR-JPG (or the digital phantom)."
    )
    parser.add_argument("--source", type=Path, required=True, metavar="RAW", help="folder of MIMIC-CXR-JPG")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="SET", help="folder of the prepared data set"
    )
    parser.add_argument(
        "--reports", type=Path, metavar="DIR", help="folder of MIMIC-CXR's reports, if not in RAW"
    )
    parser.add_argument("--ms_cxr", type=Path, metavar="FILE", help="MS_CXR_Local_Alignment_v*.json or .csv")
    parser.add_argument(
        "--size", type=_positive, default=512, help="side of the prepared images, pixels (512)"
    )
    parser.add_argument(
        "--sections",
        type=_sections,
        default=sections.SECTIONS,
        metavar="NAMES",
        help="findings,impression (both)",
    )
    parser.add_argument(
        "--labels", choices=LABELERS, default="chexpert", help="which labels to take (chexpert)"
    )
    parser.add_argument(
        "--workers", type=_positive, default=available_cores(), help="processes (as many as there are cores)"
    )
    prepare(Settings(**vars(parser.parse_args(arguments))))


if __name__ == "__main__":
    run_command(main)
