"""The reports of a release: where the files lie, and the sentences that stand in them."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from data_prep.command import progress
from data_prep.releases import ReleaseError
from data_prep.sections import study_sections
from data_prep.sentences import has_letter, passages, split_sentences


class Study(NamedTuple):
    """A study whose report is wanted, by the release's numbers."""

    study_id: int
    subject_id: int

    @property
    def report(self) -> str:
        """Path of the report below the folder ``files``."""
        return f"p{self.subject_id // 1_000_000}/p{self.subject_id}/s{self.study_id}.txt"


class Passages(NamedTuple):
    """What one report file holds: (section, passage) in order, or why it cannot be used."""

    found: tuple[tuple[str, str], ...] = ()
    reason: str = ""
    is_unreadable: bool = False


@dataclass
class Sentences:
    """The sentences of all reports.

    Attributes:
        of_study: study_id -> (section, sentence) in order; only studies that have any.
        reasons: study_id -> why it has none.
        unreadable: studies whose report file is missing, empty or unreadable (the others have no such text).
        without_letter: how many sentences were dropped because they hold no letter.
    """

    of_study: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    unreadable: set[int] = field(default_factory=set)
    without_letter: int = 0


def report_folders(source: Path, reports: Path | None) -> list[Path]:
    """Folders in which reports are looked for (``pXX/pXXXXXXXX/sXXXXXXXX.txt`` below them), in this order.

    Args:
        source: the release's folder, taken where `reports` is None.
        reports: a folder in either layout, or the folder ``files`` itself.

    Raises:
        ReleaseError: `reports` is not a folder.
    """
    if reports is None:
        return [source / "mimic-cxr-reports" / "files", source / "files"]
    if not reports.is_dir():
        raise ReleaseError(f"--reports {reports} is not a folder; {_EXPECTED}")
    return [reports / "mimic-cxr-reports" / "files", reports / "files", reports]


_EXPECTED = "--reports expects the folder that holds files/pXX/pXXXXXXXX/sXXXXXXXX.txt of MIMIC-CXR"


def read_sentences(
    studies: Sequence[Study], folders: Sequence[Path], wanted: Sequence[str], pool: Executor | None
) -> Sentences:
    """Read the reports, choose their sections and cut them into sentences.

    Reports repeat themselves: each distinct passage is cut once. The rate goes to standard error.

    Args:
        studies: whose reports to read.
        folders: from `report_folders`.
        wanted: sections, see `sections.SECTIONS`.
        pool: processes that share the work, or None.

    Raises:
        ReleaseError: not one report was found.
    """
    read = partial(read_passages, folders=tuple(folders), wanted=tuple(wanted))
    results = pool.map(read, studies, chunksize=64) if pool else map(read, studies)
    texts = dict(zip(studies, progress(results, len(studies), "reports", "reports"), strict=True))
    if studies and all(text.is_unreadable for text in texts.values()):
        raise ReleaseError(
            f"no report was found: {studies[0].report} and the reports of the other {len(studies) - 1:,} studies are "
            f"in none of {', '.join(str(folder) for folder in folders)}; MIMIC-CXR-JPG comes without reports: download "
            f"mimic-cxr-reports.zip of MIMIC-CXR and unpack it into the source, or say where it is: {_EXPECTED}"
        )
    distinct = sorted({passage for text in texts.values() for _, passage in text.found})
    begin = time.monotonic()
    cut = pool.map(split_sentences, distinct, chunksize=64) if pool else map(split_sentences, distinct)
    pieces = list(progress(cut, len(distinct), "sentences", "passages"))
    seconds, n_sentences = max(time.monotonic() - begin, 1e-9), sum(map(len, pieces))
    print(
        f"sentences: {n_sentences:,} in {len(distinct):,} distinct passages ({n_sentences / seconds:,.0f} sentences/s)",
        file=sys.stderr,
    )
    return _collect(texts, dict(zip(distinct, pieces, strict=True)))


def read_passages(study: Study, folders: Sequence[Path], wanted: Sequence[str]) -> Passages:
    """Passages of the wanted sections of one report, from the first folder that has it."""
    for folder in folders:
        try:
            content = (folder / study.report).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return Passages(reason=f"report cannot be read: {error.strerror}", is_unreadable=True)
        break
    else:
        return Passages(reason="report file is missing", is_unreadable=True)
    if not content.strip():
        return Passages(reason="report file is empty", is_unreadable=True)
    try:
        report = content.decode("utf-8")
    except UnicodeDecodeError:
        # Any byte is a character of Latin-1, the usual other encoding of such reports.
        report = content.decode("latin-1")
    sections = study_sections(report, wanted)
    if not sections:
        has_others = bool(study_sections(report))
        lacking = (
            f"none of the chosen sections ({', '.join(wanted)})"
            if has_others
            else "no findings or impression"
        )
        return Passages(reason=f"report has {lacking}")
    return Passages(
        tuple((section.name, passage) for section in sections for passage in passages(section.text))
    )


def _collect(texts: Mapping[Study, Passages], sentences_of: Mapping[str, Sequence[str]]) -> Sentences:
    result = Sentences()
    for study, text in texts.items():
        every = [(section, sentence) for section, passage in text.found for sentence in sentences_of[passage]]
        kept = [(section, sentence) for section, sentence in every if has_letter(sentence)]
        result.without_letter += len(every) - len(kept)
        if kept:
            result.of_study[study.study_id] = kept
        else:
            result.reasons[study.study_id] = text.reason or "report has no sentence with a letter"
        if text.is_unreadable:
            result.unreadable.add(study.study_id)
    return result
