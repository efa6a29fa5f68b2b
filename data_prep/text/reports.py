"""Find the reports of MIMIC-CXR, and read the sentences of reports of any source."""

from __future__ import annotations

import itertools
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from data_prep.command import progress
from data_prep.text.abbreviations import language_of, unknown_script
from data_prep.text.plain_text import plain_text
from data_prep.text.sections import Notes, Section, own_sections, study_sections
from data_prep.text.sentences import has_letter, passages, split_sentences, with_line_breaks
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import encoding_of

ARCHIVE = "mimic-cxr-reports.zip"
"""The download that holds all reports of MIMIC-CXR."""

MAX_BYTES = 2**22
"""A longer file is not a report (the longest of MIMIC-CXR have some ten thousand bytes)."""

MAX_CHARACTERS = 2**18
"""The same of a text in a table: a longer one could take minutes to cut into sentences."""

# Raised by `zipfile`: damaged content, an encrypted member (RuntimeError), a version or a compression unknown to it.
_DAMAGED_ZIP = (zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, RuntimeError, ValueError)

_NOTHING = "report has no findings or impression"

# Reports per round of the workers, so that an archive is never all in memory.
_BLOCK = 4096


class Report(NamedTuple):
    """The report of a study: its possible files, of which the first that exists is read, or its text.

    `content` is used if none of the files exists; `reason` says why it cannot be read. Reports of other sources than
    MIMIC-CXR have `sections` instead, see `own_sections`.
    """

    study_id: int
    files: tuple[Path, ...] = ()
    content: bytes | None = None
    sections: tuple[Section, ...] | None = None
    reason: str = ""


class Passages(NamedTuple):
    """The passages of a report as (section, passage) in order, or why it cannot be used.

    `has_others`: there are findings or an impression, but not the chosen sections. `taken`: the sections that were
    taken, and their shape (lines, words); of MIMIC-CXR ("", ""). `language`: the one with the most function words, and
    their number. `script`: one that the rules do not know, else "".
    """

    found: tuple[tuple[str, str], ...] = ()
    taken: tuple[str, str] = ("", "")
    language: tuple[str, int] = ("", 0)
    script: str = ""
    reason: str = ""
    is_unreadable: bool = False
    has_others: bool = False
    notes: Notes = Notes()


@dataclass
class Sentences:
    """The sentences of all reports, (section, sentence) in order, by study; or why it has none.

    `unusable`: studies whose report is missing, unreadable or empty; the others lack the chosen sections only.
    `taken`: sections that were taken -> number of reports, and the shape of one; empty for MIMIC-CXR.
    `language`: that of reports whose own words do not tell; `languages`: number of reports by language, empty where one
    was given for all; `scripts`: the same of reports in a script that the rules do not know.
    `heads`: unknown head, and what was done with it -> studies. `placeholders`: sections that hold one alone.
    """

    of_study: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    unusable: set[int] = field(default_factory=set)
    without_letter: int = 0
    taken: dict[str, tuple[int, str]] = field(default_factory=dict)
    language: str = "en"
    languages: dict[str, int] = field(default_factory=dict)
    scripts: dict[str, int] = field(default_factory=dict)
    heads: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    placeholders: int = 0


def report_places(source: Path, reports: Path | None) -> list[Path]:
    """Folders of ``pXX/pXXXXXXXX/sXXXXXXXX.txt``, of which the first that has a report is used, and `ARCHIVE`.

    `reports` is a folder in either layout, the folder ``files`` itself, or the archive; None takes the source's.
    """
    if reports is not None and reports.is_file():
        return [reports]
    folder = reports or source
    folders = [folder / "mimic-cxr-reports" / "files", folder / "files", *([reports] if reports else [])]
    return [*folders, *(place for place in [folder / ARCHIVE] if place.is_file())]


def find_reports(paths: Mapping[int, str], places: Sequence[Path]) -> Iterator[Report]:
    """The reports of studies, in their order, from their paths below the folder ``files``."""
    archives = [place for place in places if place.is_file()]
    folders = [place for place in places if place not in archives]
    with_files = (Report(study, tuple(folder / path for folder in folders)) for study, path in paths.items())
    if not archives:
        yield from with_files
        return
    try:
        with zipfile.ZipFile(archives[0]) as archive:
            # Any folders may stand before ``files`` in the archive.
            members = {"/".join(n.split("/")[-3:]): n for n in archive.namelist() if n.endswith(".txt")}
            for report in with_files:
                yield _with_content(report, archive, members.get(paths[report.study_id]))
    except _DAMAGED_ZIP as error:
        raise UserError(
            f"{archives[0]} cannot be read ({error}); expected {ARCHIVE} or the folder that it unpacks to: download it "
            "again"
        ) from error


def no_reports(paths: Mapping[int, str], places: Sequence[Path]) -> str:
    """Error message if no report was found."""
    first, others = next(iter(paths.values())), len(paths) - 1
    return (
        f"no report was found: {first} and the reports of the other {others:,} studies are "
        f"in none of {', '.join(map(str, places))}; MIMIC-CXR-JPG comes without reports: download {ARCHIVE} of "
        "MIMIC-CXR and put it into the source (packed or unpacked), or name it, or the folder that holds "
        "files/pXX/pXXXXXXXX/sXXXXXXXX.txt, by --reports"
    )


def _with_content(report: Report, archive: zipfile.ZipFile, member: str | None) -> Report:
    if member is None:
        return report
    try:
        # A damaged or malicious archive may promise little and unpack to much.
        with archive.open(member) as stream:
            content = stream.read(MAX_BYTES + 1)
    except _DAMAGED_ZIP as error:
        return report._replace(reason=f"report cannot be read from {ARCHIVE}: {error}")
    return report._replace(content=content)


def read_sentences(
    reports: Iterable[Report],
    total: int,
    wanted: Sequence[str],
    pool: Executor | None,
    nowhere: str,
    language: str | None = "en",
    others: str | None = None,
    findings_heads: Sequence[str] | None = None,
) -> Sentences:
    """Sentences of the wanted sections of `total` reports; `nowhere` is said if none can be read.

    `language`: of all reports; None: each one's own if it has two function words or more, else that of `others`, by
    default the one that most reports have. `findings_heads`: further heads of the findings.
    """
    read = partial(read_passages, wanted=tuple(wanted), heads=findings_heads or ())
    results = progress(_in_blocks(read, iter(reports), pool), total, "reports", "reports")
    texts = dict(results)
    if texts and all(text.is_unreadable for text in texts.values()):
        raise UserError(nowhere)
    lost = Counter(
        t.notes.longest[0]
        for t in texts.values()
        if not any(map(str(t.found).upper().__contains__, t.notes.longest))
    )
    head, number = [*lost.most_common(1), ("", 0)][0]
    if findings_heads is None and len(wanted) > 1 and number > max(1, len(texts) / 2):
        raise UserError(
            f"--findings_heads: {number:,} of {len(texts):,} reports have their longest text under {head}, a head "
            f'that no list knows; take it by --findings_heads "{head}", or leave it out by --findings_heads FINDINGS'
        )
    votes = Counter(text.language[0] for text in texts.values() if text.language[0])
    result = Sentences(language=language or others or max(votes, key=votes.__getitem__, default="en"))
    own = {study: text.language[0] if text.language[1] > 1 else "" for study, text in texts.items()}
    if language is None:
        told = Counter(own[study] for study, text in texts.items() if text.found).most_common()
        result.languages = {
            name or f"{result.language} (too few words tell)": number for name, number in told
        }
    result.scripts = dict(Counter(text.script for text in texts.values() if text.script).most_common())
    language_of_study = {study: language or name or result.language for study, name in own.items()}
    pairs = {(p, language_of_study[study]) for study, text in texts.items() for _, p in text.found}
    distinct = sorted(pairs)
    columns = [passage for passage, _ in distinct], [name for _, name in distinct]
    cut = pool.map(split_sentences, *columns, chunksize=64) if pool else map(split_sentences, *columns)
    pieces = progress(cut, len(distinct), "sentences", "passages")
    sentences_of = dict(zip(distinct, pieces, strict=True))
    _collect(result, texts, lambda study, passage: sentences_of[passage, language_of_study[study]])
    return result


def cut_sentences(of_study: Mapping[int, Sequence[tuple[str, str]]], language: str) -> Sentences:
    """Sentences, as (section, sentence), that a source has cut itself."""
    result = Sentences(language=language, languages={language: sum(map(bool, of_study.values()))})
    texts = {study: Passages(tuple(found), has_others=True) for study, found in of_study.items()}
    _collect(result, texts, lambda study, sentence: [sentence])
    return result


def _in_blocks(
    read: Callable[[Report], Passages], reports: Iterator[Report], pool: Executor | None
) -> Iterator[tuple[int, Passages]]:
    while block := list(itertools.islice(reports, _BLOCK)):
        found = pool.map(read, block, chunksize=64) if pool else map(read, block)
        yield from zip((report.study_id for report in block), found, strict=True)


def read_passages(report: Report, wanted: Sequence[str], heads: Sequence[str] = ()) -> Passages:
    """Passages of the wanted sections of one report; `heads`: further heads of the findings."""
    if report.sections is not None:
        if report.reason:  # its cell was counted where it was read; it is none of the damaged reports
            return Passages(reason=report.reason, has_others=True)
        return _own_passages(report.sections, wanted, heads)
    text = _text(report)
    if isinstance(text, Passages):
        return text
    notes = Notes(findings_heads=heads)
    sections = study_sections(text, wanted, notes)
    found = _passages(sections, partial(study_sections, text), wanted)
    return found._replace(notes=notes, script=unknown_script(text))


def _own_passages(given: Sequence[Section], wanted: Sequence[str], heads: Sequence[str]) -> Passages:
    plain = [section._replace(text=plain_text(section.text)) for section in given]
    if not any(has_letter(section.text) for section in plain):
        return Passages(reason=_NOTHING, is_unreadable=True)
    if sum(len(section.text) for section in plain) > MAX_CHARACTERS:
        return Passages(reason=f"report has more than {MAX_CHARACTERS:,} characters", is_unreadable=True)
    notes = Notes(findings_heads=heads)
    sections = own_sections(plain, wanted, notes)
    taken = " + ".join(dict.fromkeys(section.name for section in sections)) or "nothing"
    remarks = ["marks of an export taken off"] if plain != list(given) else []
    remarks += ["under unknown heads"] if notes.is_of_unknown_heads else []
    taken += f" ({', '.join(remarks)})" if remarks else ""
    n_lines = sum(has_letter(line) for section in sections for line in section.text.splitlines())
    n_given = sum(len(with_line_breaks(section.text).split()) for section in plain)
    n_words = sum(len(section.text.split()) for section in sections)
    shape = f"{n_words} of {n_given} words, on {n_lines} line{'s' * (n_lines != 1)}"
    text = "\n".join(section.text for section in plain)
    found = _passages(sections, partial(own_sections, plain), wanted)
    return found._replace(
        taken=(taken, shape), notes=notes, language=language_of(text), script=unknown_script(text)
    )


def _passages(sections: Sequence[Section], every: Callable[[], object], wanted: Sequence[str]) -> Passages:
    if not sections:
        if every():
            return Passages(
                reason=f"report has none of the chosen sections ({', '.join(wanted)})", has_others=True
            )
        return Passages(reason=_NOTHING)
    return Passages(
        tuple((section.name, passage) for section in sections for passage in passages(section.text))
    )


def _text(report: Report) -> str | Passages:
    """A report's text, or why there is none."""
    content = report.content
    for file in report.files:
        try:
            with file.open("rb") as stream:
                content = stream.read(MAX_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return Passages(reason=f"report cannot be read: {error.strerror}", is_unreadable=True)
        break
    if content is None:
        return Passages(reason=report.reason or "report file is missing", is_unreadable=True)
    if len(content) > MAX_BYTES:
        return Passages(reason=f"report has more than {MAX_BYTES:,} bytes", is_unreadable=True)
    if not content.strip():
        return Passages(reason="report file is empty", is_unreadable=True)
    try:
        text = content.decode(encoding_of(content))
    except UnicodeDecodeError:
        # Any byte is a character of Latin-1, the usual other encoding of such reports.
        text = content.decode("latin-1")
    return Passages(reason="report has zero bytes: no text", is_unreadable=True) if "\0" in text else text


def _collect(
    result: Sentences, texts: Mapping[int, Passages], cut: Callable[[int, str], Sequence[str]]
) -> None:
    for study_id, text in texts.items():
        taken, shape = text.taken
        if taken:
            number, shape = result.taken.get(taken, (0, shape))
            result.taken[taken] = (number + 1, shape)
        result.placeholders += text.notes.placeholders
        for head in text.notes.heads.items():
            result.heads.setdefault(head, []).append(study_id)
        every = [
            (section, sentence) for section, passage in text.found for sentence in cut(study_id, passage)
        ]
        kept = [(section, sentence) for section, sentence in every if has_letter(sentence)]
        result.without_letter += len(every) - len(kept)
        if kept:
            result.of_study[study_id] = kept
        else:
            result.reasons[study_id] = text.reason or "report has no sentence with a letter"
            if not text.has_others:
                result.unusable.add(study_id)
