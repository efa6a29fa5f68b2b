"""Prepare a set from a `Source`, for `mimic_cxr`, `folder`, `openi` and `public`.

Images are written one by one, so that an interrupted run continues; ``dataset.json`` is written last. A finished set is
left unchanged, but for --complete and for prepared images that are missing or changed; one made with other options is
never overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from data_prep.command import one_process_in, progress, worker_processes
from data_prep.options import Prepare, PrepareReports
from data_prep.shard import to_shards
from data_prep.sources import prepared_images as image_files
from data_prep.sources import set_tables
from data_prep.sources.growth import FILE, Growth, SourceState
from data_prep.sources.keep_out import names_to_keep_out, studies_to_keep_out
from data_prep.sources.source_tables import and_others, file_hash
from data_prep.sources.splits import too_few_lines
from data_prep.text import sections, sentences
from data_prep.text.reports import Report, Sentences, read_sentences
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import digest, write_json, write_text
from medclip_dcl.common.findings import CHEX5
from medclip_dcl.data.identity import IMAGE_FILES, describe
from medclip_dcl.data.prepared import FORMAT_VERSION, PreparedDataError, PreparedSet, case_table, write_table
from medclip_dcl.data.shards import ShardIndex
from medclip_dcl.pictures.grey import RULES
from medclip_dcl.runs.saved import read_json

# Of an unknown head that is named.
_PATIENTS = 5
_COMPLETE, _CHOOSE = "complete the source", "choose other --sections"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Tables that a command has read and checked before any image or report is opened.

    Attributes:
        images: the chosen ones: dicom_id, subject_id, study_id, view, official_split, path (of the prepared
            file below ``images/``, ending in .jpg) and file (path of the original); optionally sex and age (see
            `medclip_dcl.data.prepared.OPTIONAL`).
        labels: by study, as `source_tables.read_label_table` gives them.
        reports: of the studies of `images`, or of `studies`, `n_reports` in number; read once; or sentences; or None.
        no_reports: error message if no report was found.
        language: of all reports, from `languages.LANGUAGES`; None: each one's own.
        studies: study_id, subject_id, official_split of reports that come without images; None where there are images.
        boxes: with the view of each one's image (without: all on `images`), `box_id`, and image_width and image_height
            of the image that they were drawn on (NaN: the image itself); None without any.
        masks: rows of the table "masks"; None without any.
        resized: how images got other proportions than those that the boxes were drawn on, see `options.MimicCxr`.
        grounding_patients: subject_id of every patient of the MS-CXR file.
        truth: the phantom's, None for a real source.
        counts: further ones for dataset.json.
        rejects: rows that were left out while the tables were read.
        files: texts of more files of the set by name.
        rows: digests of the rows of a table to which further rows may be added; None for a table that must stay.
        study_names, patient_names: the source's names by study_id and subject_id; those that are not named are numbers.
        kept_out: study_id of all studies of patients who are kept out of every use.
    """

    images: pd.DataFrame
    labels: pd.DataFrame
    reports: Iterable[Report] | Sentences | None = None
    n_reports: int = 0
    no_reports: str = ""
    language: str | None = "en"
    studies: pd.DataFrame | None = None
    boxes: pd.DataFrame | None = None
    masks: pd.DataFrame | None = None
    resized: str | None = None
    grounding_patients: frozenset[int] = frozenset()
    truth: Mapping[str, pd.DataFrame] | None = None
    counts: Mapping[str, Any] = field(default_factory=dict)
    rejects: Sequence[set_tables.Reject] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    rows: Sequence[str] | None = None
    study_names: Mapping[int, str] = field(default_factory=dict)
    patient_names: Mapping[int, str] = field(default_factory=dict)
    kept_out: frozenset[int] = frozenset()


def prepare_set(settings: Prepare, made_from: Mapping[str, Any], read: Callable[[], Source]) -> None:
    """Prepare or complete a set, finish a broken one, or say that it is finished; `read` checks the tables."""
    _require_same(settings.output, made_from, True)
    source = read()
    if settings.keep_out is not None:
        source = _with_kept_out(source, settings.keep_out, made_from["options"].get("columns", ["study"]))
    now = SourceState.now(source.images, source.rows or ())
    if not settings.shards and _growth(settings, made_from, source, now) is None:
        return
    with one_process_in(settings.output):
        # While this process was reading, another may have made the set.
        growth = _growth(settings, made_from, source, now)
        if growth is not None:
            _make(settings, made_from, source, now, growth)
        if settings.shards and len(source.images):
            index = ShardIndex.read(settings.output)
            to_shards(PreparedSet(settings.output), settings.output, index is not None and index.texts)


def _with_kept_out(source: Source, file: Path, columns: Iterable[str]) -> Source:
    """The source with studies to exclude, without their boxes and masks."""
    names_of = {"subject_id": source.patient_names}
    if "study" in columns:  # else studies have numbers of rows
        names_of = {"study_id": source.study_names, **names_of}
    rows = source.images if source.studies is None else source.studies.assign(dicom_id="")
    # A study here may have the number of a patient there.
    if file.is_dir() and PreparedSet(file).names_patients:
        names_of, rows = {"subject_id": source.patient_names}, rows.assign(dicom_id="")
    studies, n = studies_to_keep_out(rows, names_to_keep_out(file), names_of)
    images = source.images.loc[source.images["study_id"].isin(studies), "dicom_id"]
    regions: dict[str, Any] = {
        kind: of_kind[~of_kind["dicom_id"].isin(images)].reset_index(drop=True)
        for kind, of_kind in (("boxes", source.boxes), ("masks", source.masks))
        if of_kind is not None
    }
    return replace(source, **regions, kept_out=studies, counts={**source.counts, "kept_out": n})


def _make(
    settings: Prepare, made_from: Mapping[str, Any], source: Source, now: SourceState, growth: Growth
) -> None:
    output = settings.output
    finished, unfinished = output / "dataset.json", output / UNFINISHED
    earlier = next((read_json(file) for file in (finished, unfinished) if file.exists()), {})
    if "fingerprint" in earlier:
        print(f"{output} is completed: {str(growth) or 'an earlier run began it'}")
        if growth.changed:
            print(f"prepared again: {growth.changed[0]}{and_others(growth.changed[1:])}")
    # Of a set that is completed the fingerprint stays, to be compared, and the language: it is cut as before.
    write_json({**earlier, **made_from}, unfinished)
    source = _with_checked_boxes(settings, source)
    with worker_processes(settings.workers) as pool:
        found = source.reports if isinstance(source.reports, Sentences) else Sentences()
        if not isinstance(source.reports, Sentences | None) and isinstance(settings, PrepareReports):
            found = read_sentences(
                source.reports,
                source.n_reports,
                settings.sections,
                pool,
                source.no_reports,
                source.language,
                earlier.get("language"),
                settings.findings_heads,
            )
            for is_unusable, remedy, share in ((True, _COMPLETE, 0.0), (False, _CHOOSE, 0.5)):
                lost = [study for study in found.reasons if (study in found.unusable) == is_unusable]
                reasons = {source.study_names.get(s, str(s)): found.reasons[s] for s in lost}
                _refuse_many(settings, "report", reasons, source.n_reports, remedy, share)
        if growth.is_any:
            # From here on the set does not count as finished.
            finished.unlink(missing_ok=True)
        for path in sorted(growth.stale):
            (output / "images" / path).unlink(missing_ok=True)
        SourceState({**growth.gone, **now.images}, now.rows).write(output)
        images, image_rejects = _prepare_images(source.images, settings, pool)
    written, rejects, counts = _assemble(source, images, found, settings.cases)
    rejects = [*source.rejects, *image_rejects, *rejects]
    by_use = counts.get("studies_by_use", counts["images_by_use"])
    if sum(by_use.values()) == by_use["excluded"] or (source.reports is not None and not found.of_study):
        _write_rejects(output, rejects)
        raise UserError(f"nothing is left ({_named(by_use)}); {output / 'rejects.csv'} has the reasons")
    # While the tables are written again, the set must not count as finished.
    finished.unlink(missing_ok=True)
    for name, frame in written.items():
        write_table(frame, settings.output / f"{name}.parquet", name)
    for name, text in source.files.items():
        write_text(text, settings.output / name)
    _write_rejects(settings.output, rejects)
    kinds = ("image", "report", "box", *(("mask",) if "masks" in written else ()))
    counts["rejects"] = {kind: [row[0] for row in rejects].count(kind) for kind in kinds}
    language = {"language": found.language} if found.languages else {}
    rules = {"image_rules": {kind: RULES[kind] for kind in sorted({*images["kind"]})}}
    names = {name.removesuffix(".csv"): digest(text.encode()) for name, text in source.files.items()}
    info = {**made_from, **rules, **language, **names, "counts": counts, **describe(settings.output, written)}
    write_json(info, finished)
    unfinished.unlink()
    print("\n".join([summary(output, info), *too_few_lines(output, info, written)]))
    if earlier.get("fingerprint", info["fingerprint"]) != info["fingerprint"]:
        print(
            f"fingerprint {earlier['fingerprint']} is now {info['fingerprint']}: runs and features of before are of "
            "another set"
        )
        for problem in PreparedSet(output).score_problems():
            print(problem)


def _assemble(
    source: Source, images: pd.DataFrame, found: Sentences, cases: str
) -> tuple[dict[str, pd.DataFrame], list[set_tables.Reject], dict[str, Any]]:
    written: dict[str, pd.DataFrame] = {}
    box_rejects: list[set_tables.Reject] = []
    boxed: set[str] = set()
    scaled = 0
    if source.boxes is not None:
        written["boxes"], box_rejects, scaled = set_tables.select_boxes(source.boxes, images, source.resized)
        boxed = set(written["boxes"]["dicom_id"])
    if source.masks is not None:
        written["masks"], mask_rejects = set_tables.select_masks(source.masks, images)
        box_rejects += mask_rejects
    without = {*found.reasons, *source.kept_out}
    images = images.assign(use=set_tables.decide_use(images, source.grounding_patients, boxed, without))
    studies = images
    if source.studies is not None:
        studies = source.studies.assign(dicom_id="")
        studies = studies.assign(use=set_tables.decide_use(studies, (), (), without))
        written["studies"] = set_tables.typed(studies, "studies")
    present = set(studies["study_id"])
    kept = present - source.kept_out
    texts = {study: text for study, text in found.of_study.items() if study in kept}
    written["images"], written[IMAGE_FILES] = (
        set_tables.typed(images, name) for name in ("images", IMAGE_FILES)
    )
    if source.reports is not None:
        written["sentences"], written["reports"] = set_tables.sentence_tables(texts)
    written["labels"] = set_tables.study_labels(studies, source.labels)
    written["cases"] = case_table(images, written["labels"], cases)
    if source.truth is not None:
        written["classes"], written["image_classes"] = set_tables.class_tables(
            source.truth, written["sentences"], written["images"]
        )
    counts = {
        **source.counts,
        **set_tables.count(written),
        **({} if source.reports is None else {"sentences_without_letter": found.without_letter}),
        **({"boxes_scaled": scaled} if scaled else {}),
    }
    further = {
        "texts": found.taken,
        "languages": found.languages,
        "scripts": found.scripts,
        "placeholder_sections": found.placeholders,
    }
    counts |= {name: numbers for name, numbers in further.items() if numbers}
    if found.heads:
        patient = dict(zip(studies["study_id"], studies["subject_id"], strict=True))
        counts["unknown_heads"] = _frequent_heads(found.heads, patient)
    reasons = {study: found.reasons[study] for study in sorted(found.reasons) if study in present}
    named = [
        ("report", source.study_names.get(study, str(study)), reason) for study, reason in reasons.items()
    ]
    return written, [*named, *box_rejects], counts


def _frequent_heads(heads: Mapping[tuple[str, str], Sequence[int]], patient: Mapping[int, int]) -> Any:
    """Action -> unknown head -> reports; heads of fewer patients than `_PATIENTS`, which may be names, are counted."""
    patients: dict[str, set[int]] = {}
    for (head, _), studies in heads.items():
        patients.setdefault(head, set()).update(patient[study] for study in studies if study in patient)
    named: dict[str, dict[str, int]] = {}
    for (head, action), studies in sorted(heads.items()):
        if len(patients[head]) >= _PATIENTS:
            named.setdefault(action, {})[head] = len(studies)
    return {"named": named, "rare": sum(0 < len(people) < _PATIENTS for people in patients.values())}


def _with_checked_boxes(settings: Prepare, source: Source) -> Source:
    """Turn boxes with their images; refuse those of images of another size, or mostly damaged, before hours of work."""
    remedy = "take the release's images, or copies in their proportions"

    def lost_of(rejects: Sequence[set_tables.Reject]) -> dict[str, str]:
        return {name: reason for _, name, reason in rejects if not reason.startswith(set_tables.OF_ITS_IMAGE)}

    if source.masks is not None:
        readable = _with_sizes(source.images, source.masks)
        _, rejects = set_tables.select_masks(source.masks, readable)
        _refuse_many(settings, "mask", lost_of(rejects), len(source.masks), remedy)
        turned = readable.loc[readable["orientation"].between(2, 8), "dicom_id"]
        if n := int(source.masks["dicom_id"].isin(turned).sum()):
            print(f"warning: {n:,} masks stay as drawn, though Exif turns their images: see that they fit")
    if source.boxes is None:
        return source
    readable = _with_sizes(source.images, source.boxes)
    boxes, fits_either_way, is_beyond = set_tables.upright_boxes(source.boxes, readable)
    if n := int(fits_either_way.sum()):
        print(f"warning: {n:,} boxes stay as drawn, though Exif turns their images: see that they fit")
    beyond = dict.fromkeys(boxes.loc[is_beyond, "box_id"], "it reaches beyond its image")
    _refuse_many(settings, "box", beyond, len(boxes), "write x, y, width, height, not corners", 0.05 - 1e-9)
    kept, rejects, _ = set_tables.select_boxes(boxes, readable, source.resized)
    lost = lost_of(rejects)
    refused = {name: reason for name, reason in lost.items() if reason.startswith(set_tables.OTHER_SIZE)}
    remedy += ", or say --resized" if hasattr(settings, "resized") else ""
    if not refused and len(lost) > len(kept):
        refused, remedy = lost, "download the file of the boxes again"
    _refuse_many(settings, "box", refused, len(lost) + len(kept), remedy)
    return replace(source, boxes=boxes)


def _with_sizes(images: pd.DataFrame, drawn: pd.DataFrame) -> pd.DataFrame:
    """The readable images that have boxes or masks, with size and orientation by their headers."""
    images = images[images["dicom_id"].isin(drawn["dicom_id"])]
    sizes = [image_files.size_of(Path(file)) for file in images["file"]]
    images = images.join(pd.DataFrame(sizes, images.index, ["width", "height", "orientation"]))
    return images[images["width"] > 0]


def take_patients(images: pd.DataFrame, limit: int | None, use: pd.Series) -> pd.DataFrame:
    """The images of the first `limit` patients of each use, by number; all of them for None."""
    if limit is None:
        return images
    # A patient with images of the test split beside boxes counts where grounding stands.
    order = {name: place for place, name in enumerate(("grounding", "test", "validate", "train"))}
    of_patient = use.map(order).groupby(images["subject_id"]).min()
    place = of_patient.groupby(of_patient).cumcount()
    taken = place.index[place < limit]
    return images[images["subject_id"].isin(taken)].reset_index(drop=True)


UNFINISHED = "unfinished.json"
_CONTENT = "content of "


def made_from(
    settings: Prepare, source: str, phantom: bool, files: Sequence[Path], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that the content of a set depends on, except reports and images (too many to hash)."""
    kept_out = {}
    if (file := settings.keep_out) is not None:
        kept_out["keep_out"] = f"{file.name} {file_hash(file / 'dataset.json' if file.is_dir() else file)}"
    text_rules = {
        "section_rules": sections.RULES_VERSION,
        "sentence_rules": sentences.RULES_VERSION,
        "pysbd": version("pysbd"),
        **given(settings, "findings_heads"),
    }
    return {
        "format_version": FORMAT_VERSION,
        "source": source,
        "phantom": phantom,
        "source_files": {file.name: file_hash(file) for file in files},
        "options": {
            "size": settings.size,
            "geometry": settings.geometry,
            "filter": image_files.FILTER,
            "jpeg_quality": image_files.QUALITY,
            **({"sections": list(settings.sections)} if isinstance(settings, PrepareReports) else {}),
            "cases": settings.cases,
            "limit": settings.limit,
            **kept_out,
            **(text_rules if isinstance(settings, PrepareReports) else {}),
            **options,
        },
    }


def given(settings: Prepare, *names: str) -> dict[str, Any]:
    """Those of the options that are given: sets without them stay as they were, byte by byte."""
    return {name: value for name in names if (value := getattr(settings, name, None))}


def _require_same(output: Path, now: Mapping[str, Any], can_grow: bool, lost: Sequence[str] = ()) -> None:
    """Refuse a folder of other content; with `can_grow` the tables may differ, which `_growth` compares by row."""
    finished, unfinished = output / "dataset.json", output / UNFINISHED
    file = finished if finished.is_file() else unfinished
    if not file.is_file():
        if output.is_dir() and any(not entry.name.startswith(".") for entry in output.iterdir()):
            raise PreparedDataError(
                f"output {output} is neither empty nor a prepared set; choose another --output, or empty it"
            )
        return
    made = [output / "images", *output.glob("*.parquet")]
    if file == unfinished and not any(place.exists() for place in made if place.name != FILE):
        # Nothing was made yet that depends on an option.
        return
    differences = _differences(read_json(file, f"delete {output} and prepare it again"), now)
    if can_grow and all(difference.startswith(_CONTENT) for difference in differences):
        differences = []
    if lost:
        differences.append(f"rows of the table that have changed or are gone: {len(lost):,}")
    if differences:
        raise PreparedDataError(
            f"{output} holds a {'prepared' if file == finished else 'partly prepared'} set that was made differently "
            f"({'; '.join(differences)}); choose another --output, or delete this folder to prepare it again"
        )


def _growth(
    settings: Prepare, made_from: Mapping[str, Any], source: Source, now: SourceState
) -> Growth | None:
    """Changes with which a set is to be made or completed; None for a finished set, which is said."""
    output = settings.output
    kept = SourceState.of_set(output)
    growth = Growth.between(kept or SourceState({}, ()), now, source.images["path"], output)
    can_grow = kept is not None and source.rows is not None
    _require_same(output, made_from, can_grow, growth.lost_rows)
    if not (output / "dataset.json").is_file():
        return growth
    damaged = PreparedSet(output).content.images
    # These are made again in any case, of what is there.
    changed = [path for path in growth.changed if path not in damaged]
    growth = growth._replace(changed=changed, damaged=damaged)
    if growth.is_any and not settings.complete:
        what = str(growth) if kept is not None else f"what it was made from is not known without {FILE}"
        if damaged:
            raise PreparedDataError(f"{output}: {what}; make the set of what is there now with --complete")
        means = "has another fingerprint, and runs on it are of another set"
        by = "changed: another size or time; " if growth.changed else ""
        print(
            f"{output} is a finished set; {what}: --complete adds them ({by}a set that then differs {means})"
        )
        return None
    # Beside dataset.json: a run that made missing images again was killed, or one that was about to end.
    if growth.is_any or damaged or (output / UNFINISHED).exists():
        if ShardIndex.read(output) is not None:
            raise PreparedDataError(
                f"{output}: {growth}: its images are in shards, which do not change; first go back to files: "
                f"medclip-dcl shard {output} --undo"
            )
        return growth
    also = f" ({growth})" if growth.gone else ""
    print(f"{output} is a finished set, made with these options from this source: nothing to do{also}")
    return None


def _differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    def facts(info: Mapping[str, Any]) -> dict[str, Any]:
        named = {name: info.get(name) for name in ("format_version", "source")}
        files = {f"{_CONTENT}{name}": digest for name, digest in info.get("source_files", {}).items()}
        return {**named, **info.get("options", {}), **files}

    old, new = facts(there), facts(now)
    rules = there.get("image_rules", {})
    old |= {f"image_rules of {kind}": rule for kind, rule in rules.items()}
    new |= {f"image_rules of {kind}": RULES.get(kind) for kind in rules}
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"{name}: {_word(old.get(name))} there, {_word(new.get(name))} now" for name in changed]


def _word(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)


def _prepare_images(
    images: pd.DataFrame, settings: Prepare, pool: Executor | None
) -> tuple[pd.DataFrame, list[set_tables.Reject]]:
    """Images that can be used, with the originals' size and the columns of the table "image_files", and the others."""
    folder = settings.output / "images"
    jobs = [
        image_files.Job(Path(file), folder / path, settings.size, settings.geometry)
        for file, path in images[["file", "path"]].itertuples(index=False)
    ]
    prepare = image_files.prepare_image
    found = pool.map(prepare, jobs, chunksize=16) if pool else map(prepare, jobs)
    outcomes = pd.DataFrame(
        progress(found, len(jobs), "images", "images"), columns=image_files.Outcome._fields
    )
    images = images.join(outcomes.set_axis(images.index))
    reasons = images.pop("reason")
    for note, rows in images[images["note"] != ""].groupby("note"):
        print(f"{note}: {len(rows):,} of {len(images):,} images (first: {rows['file'].iloc[0]})")
    is_bad = reasons != ""
    bad = dict(zip(images.loc[is_bad, "dicom_id"], reasons[is_bad], strict=True))
    _refuse_many(settings, "image", bad, len(images), _COMPLETE)
    rejects = [("image", str(dicom_id), reason) for dicom_id, reason in bad.items()]
    return images[~is_bad].reset_index(drop=True), rejects


def _refuse_many(
    settings: Prepare, kind: str, reasons: Mapping[str, str], total: int, remedy: str, share: float = 0.0
) -> None:
    """A few damaged files are left out; many mean a broken download. One of several is always allowed."""
    share = max(share, settings.rejected_share)
    if len(reasons) <= max(total > 1, share * total):
        return
    _write_rejects(settings.output, [(kind, name, reason) for name, reason in sorted(reasons.items())])
    first, reason = min(reasons.items())
    kinds = "boxes" if kind == "box" else f"{kind}s"
    raise UserError(
        f"{len(reasons):,} of {total:,} {kinds} cannot be used, more than {100 * share:g}% (first: "
        f"{first}, {reason}; all of them: {settings.output / 'rejects.csv'}); {remedy}, or allow more with "
        "--rejected_share, then run the same command again"
    )


def _write_rejects(output: Path, rejects: Sequence[set_tables.Reject]) -> None:
    frame = pd.DataFrame(rejects, columns=["kind", "id", "reason"])
    write_text(frame.to_csv(index=False, lineterminator="\n"), output / "rejects.csv")


def summary(output: Path, info: Mapping[str, Any]) -> str:
    """Summary of a finished set, from its dataset.json."""
    rejects = info["counts"]["rejects"]
    why = "; reasons in rejects.csv" if sum(rejects.values()) else ""
    head, tail = f"{output}: prepared from {info['source']}", f"  left out   {_named(rejects)}{why}"
    return "\n".join([head, *count_lines(info["counts"]), tail])


def _named(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in numbers.items())


def count_lines(counts: Mapping[str, Any]) -> list[str]:
    """Lines about the content of a set, from the counts in its dataset.json."""
    reports, sentences, people = "none", "", dict(counts.get("images_by_sex", {}))
    if "sentences_without_letter" in counts:
        reports = f"{{reports:,}} of {{studies:,}} studies ({_named(counts['reports_by_section'])})"
        sentences = "{report_sentences:,}, of which {sentences:,} distinct; "
        sentences += "{sentences_without_letter:,} without a letter, or with an empty box, dropped"
    if "images_without_age" in counts:
        people["age unknown"] = counts["images_without_age"]
    images = "images", f"{{images:,}} frontal of {{images_in_release:,}} ({_named(counts['images_by_use'])})"
    if "studies_by_use" in counts:
        images = "text only", f"no images; studies: {_named(counts['studies_by_use'])}"
    rows = [
        images,
        ("patients", "{patients:,}, of whom {patients_grounding:,} for grounding"),
        ("sex, age", f"{_named(people)} (images)" if people else ""),
        ("kept out", _named(counts["kept_out"]) if "kept_out" in counts else ""),
        ("reports", reports),
        ("sentences", sentences),
    ]
    rows = [(title, text.format_map(counts)) for title, text in rows]
    rows += _text_rows(counts)
    for kind, remark in (
        ("languages", ""),
        ("scripts", ": few of their heads and no abbreviations are known"),
    ):
        if counts.get(kind):
            rows.append((kind[:-1], f"{_named(counts[kind])} (reports){remark}"))
    scaled = f", {counts['boxes_scaled']:,} scaled to resized images" if "boxes_scaled" in counts else ""
    rows += [("boxes", f"{counts['boxes']:,}{scaled}")]
    rows += [("masks", f"{counts['masks']:,}")] if "masks" in counts else []
    return [f"  {title:<10} {text}" for title, text in [*rows, *_case_rows(counts)] if text]


def _text_rows(counts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Sections that were taken from the texts, shares of the reports and the shape of one; none for MIMIC-CXR.

    Below them the unknown heads with the numbers of reports, by what was done with them.
    """
    texts = sorted(counts.get("texts", {}).items(), key=lambda text: -text[1][0])
    total = sum(number for _, (number, _) in texts)
    rows = [
        ("" if at else "taken", f"{number / total:6.1%} {taken} (e.g. {shape})")
        for at, (taken, (number, shape)) in enumerate(texts)
    ]
    if number := counts.get("placeholder_sections"):
        rows.append(("missing", f"sections that hold a placeholder alone (N/A, See impression): {number:,}"))
    heads = counts.get("unknown_heads", {"named": {}, "rare": 0})
    for action, numbers in heads["named"].items():
        frequent = dict(sorted(numbers.items(), key=lambda head: -head[1]))
        rows.append(("heads", f"{action}: {_named(frequent)}"))
    if heads["rare"]:
        rows.append(("heads", f"{heads['rare']:,} more, each in reports of fewer than {_PATIENTS} patients"))
    return rows


def _case_rows(counts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The cases of each use that has any, CheX5's in a row of their own; none for a set without images."""
    if "studies_by_use" in counts:
        return []
    rows = []
    for use, findings in counts["cases"].items():
        for title, names in (("CheX5", list(CHEX5)), ("others", [f for f in findings if f not in CHEX5])):
            cases = ", ".join(f"{f} {findings[f]['yes']:,}/{findings[f]['no']:,}" for f in names)
            if any(findings[f]["yes"] or findings[f]["no"] for f in names):
                rows.append((title, f"{use} (yes/no): {cases}"))
    return rows or [("cases", "none: no label is exactly 1 or 0")]
