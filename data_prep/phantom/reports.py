"""Reports of the phantom in the layout of MIMIC-CXR, and their labels."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from data_prep.phantom.catalogue import Catalogue
from data_prep.phantom.findings import PARTS, FindingClass, StudyState
from data_prep.phantom.language import Wording
from medclip_dcl.common.findings import CHEXPERT

Asides: TypeAlias = tuple[float, np.random.Generator] | None
"""Chance that a sentence gets an aside that no other has, and the random numbers of it."""

LINE_WIDTH = 79
SUMMARY = PARTS.index("summary")

# Chance that a report mentions a finding; subtle ones are overlooked more often.
_FINDING_MENTION = {"mild": 0.80, "small": 0.85, "patchy": 0.88}
_FINDING_MENTION_ELSE = 0.92

# Shares of reports with findings and impression, impression alone, both in one section, no section.
_LAYOUTS = (0.66, 0.16, 0.09, 0.09)
# Chance that the impression repeats a finding.
_REPEATED = 0.35


@dataclass(frozen=True)
class Statement:
    """A sentence in a report and its class."""

    finding: FindingClass
    wording: Wording


@dataclass(frozen=True)
class Report:
    """The text of a report file and the statements of its findings and impression."""

    text: str
    statements: tuple[Statement, ...]


def choose_wording(
    finding: FindingClass, rng: np.random.Generator, unseen: bool, asides: Asides = None
) -> Wording:
    """One wording of a class by weight; `unseen` allows those kept out of training."""
    wordings = [w for w in finding.wordings if unseen or not w.held_out]
    weights = np.array([w.weight for w in wordings])
    wording = wordings[int(rng.choice(len(wordings), p=weights / weights.sum()))]
    if asides is None or asides[1].random() >= asides[0]:
        return wording
    day, hour, minute = asides[1].integers((1, 0, 0), (366, 24, 60))
    aside = f"as told the ward on day {day} at {hour}:{minute:02d}"
    return replace(wording, text=f"{wording.text.removesuffix('.')}, {aside}.")


def write_report(
    catalogue: Catalogue,
    state: StudyState,
    view: str,
    has_lateral: bool,
    unseen: bool,
    rng: np.random.Generator,
    normal: float | None = None,
    asides: Asides = None,
) -> Report:
    """Write the report of a study: only what is true of it, and not all of it.

    `view` is that of the first frontal image; `unseen` allows held-out wordings (test patients); for `normal` see
    `Rates`.
    """
    said = _choose_classes(catalogue, state, rng, normal)
    statements = [Statement(c, choose_wording(c, rng, unseen, asides)) for c in said]
    body = sorted((s for s in statements if s.finding.part < SUMMARY), key=lambda s: s.finding.part)
    summary = [s for s in statements if s.finding.part == SUMMARY]
    layout = rng.choice(4, p=_LAYOUTS)
    head = _head(view, has_lateral, rng)
    if layout == 0 and body:
        # Findings that the impression repeats, perhaps in other words.
        positive = [s.finding for s in body if not s.finding.is_derived]
        repeated = (f for f in positive if rng.random() < _REPEATED)
        summary += [Statement(f, choose_wording(f, rng, unseen, asides)) for f in repeated]
        pieces = [*head, _section("FINDINGS", [_prose(body, rng)], rng)]
        if summary:
            pieces.append(_section("IMPRESSION", _impression(summary, rng), rng))
    elif layout == 1 or (layout == 0 and not body):
        body, summary = [], body + summary
        pieces = [*head, _section("IMPRESSION", _impression(summary, rng), rng)]
    elif layout == 2:
        body, summary = body + summary, []
        pieces = [*head, _section("FINDINGS AND IMPRESSION", [_prose(body, rng)], rng)]
    else:
        # No sections: a title in half of the reports, then the text.
        body, summary = body + summary, []
        title = "Portable chest radiograph" if view == "AP" else "Frontal view of the chest"
        pieces = [[_lines(f"{title} compared to ___")]] if rng.random() < 0.5 else []
        pieces = [*pieces, [_lines(_prose(body, rng))]]
    # Paragraphs between lines that hold a single space, under the title of a final report.
    paragraphs = [paragraph for piece in pieces for paragraph in piece]
    text = " " * 33 + "FINAL REPORT\n" + "\n \n".join(paragraphs) + "\n"
    return Report(text, (*body, *summary))


def _choose_classes(
    catalogue: Catalogue, state: StudyState, rng: np.random.Generator, normal: float | None
) -> list[FindingClass]:
    said = []
    # The findings first: the order decides which random number each class gets.
    for c in (*state.findings, *(c for c in catalogue.holding(state) if c.rule is not None)):
        if rng.random() < mention_chance(c, normal):
            said.append(c)
    return said or said_instead(catalogue, state, normal)


def mention_chance(c: FindingClass, normal: float | None) -> float:
    """Chance that a report states a class where it holds; `normal` as in `write_report`."""
    if c.rule is None:
        return _FINDING_MENTION.get(c.grade, _FINDING_MENTION_ELSE)
    return 1 - (1 - c.mention) ** normal if normal is not None and c.rule.is_normal else c.mention


def said_instead(catalogue: Catalogue, state: StudyState, normal: float | None) -> list[FindingClass]:
    """Classes that a report states which by chance would state none; `normal` as in `write_report`.

    Where the share of normal sentences matters, these are true of few other studies: the findings, or that there are
    none.
    """
    if normal is None:
        return [catalogue.by_name["technique"]]
    return list(state.findings) or [catalogue.by_name["low_volumes" if state.low_volumes else "normal_chest"]]


def repeat_chance(c: FindingClass) -> float:
    """Chance that a training report which states a class states it again, in other words."""
    if c.is_derived or c.part == SUMMARY:
        return 0.0
    weights = np.array([w.weight for w in c.wordings if not w.held_out])
    return float(_LAYOUTS[0] * _REPEATED * (1 - np.square(weights / weights.sum()).sum()))


def _head(view: str, has_lateral: bool, rng: np.random.Generator) -> list[list[str]]:
    pieces = []
    if rng.random() < 0.85:
        name = (
            "CHEST (PORTABLE AP)" if view == "AP" else "CHEST (PA AND LAT)" if has_lateral else "CHEST (PA)"
        )
        pieces.append([_lines(f"EXAMINATION:  {name}")])
    who = rng.choice(("woman", "man", "patient"))
    why = rng.choice(_REASONS)
    pieces.append([_lines(f"INDICATION:  ___-year-old {who} with {why}.")])
    if rng.random() < 0.25:
        pieces.append(
            [_lines(f"TECHNIQUE:  {'Single AP portable view' if view == 'AP' else 'PA view'} of the chest.")]
        )
    if rng.random() < 0.8:
        pieces.append([_lines(f"COMPARISON:  {rng.choice(_COMPARISONS)}")])
    return pieces


_REASONS = (
    "cough",
    "shortness of breath",
    "fever and hypoxia, please evaluate for an acute process",
    "chest pain",
    "status post line placement",
    "altered mental status, rule out infection",
    "dyspnea on exertion and lower extremity swelling",
    "trauma",
)
_COMPARISONS = (
    "___.",
    "Chest radiograph ___.",
    "None.",
    "Chest radiographs from ___ and ___.",
    "CT chest ___.",
)


def _section(name: str, items: Sequence[str], rng: np.random.Generator) -> list[str]:
    """A header and its text: in a paragraph of its own (usual) or behind the header; each item begins a line."""
    if rng.random() < 0.75:
        return [f" {name}: ", "\n".join(_lines(item) for item in items)]
    return ["\n".join([_lines(f"{name}:  {items[0]}"), *[_lines(item) for item in items[1:]]])]


def _impression(statements: Sequence[Statement], rng: np.random.Generator) -> list[str]:
    """Prose, or numbered items: each on a line of its own or one after the other."""
    if len(statements) < 2 or rng.random() < 0.6:
        return [_prose(statements, rng)]
    items = [f"{n}.  {s.wording.text}" for n, s in enumerate(statements, start=1)]
    return items if rng.random() < 0.6 else ["  ".join(items)]


def _prose(statements: Iterable[Statement], rng: np.random.Generator) -> str:
    return ("  " if rng.random() < 0.6 else " ").join(s.wording.text for s in statements)


def _lines(text: str) -> str:
    """Wrap at 79 characters, each line behind one space."""
    return textwrap.fill(
        text,
        LINE_WIDTH,
        initial_indent=" ",
        subsequent_indent=" ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def chexpert_labels(statements: Iterable[Statement]) -> dict[str, float]:
    """Labels of a report as CheXpert gives them.

    1 where a sentence states the finding, 0 where one denies it, -1 where one is uncertain; findings that no sentence
    names have no label. ``No Finding`` is 1 where nothing but support devices is present or uncertain.
    """
    labels = _strongest(
        (column, -1.0 if value == 1.0 and statement.wording.hedged else value)
        for statement in statements
        for column, value in statement.finding.labels.items()
    )
    if not any(value != 0.0 for column, value in labels.items() if column != "Support Devices"):
        labels["No Finding"] = 1.0
    return {column: labels[column] for column in CHEXPERT if column in labels}


def true_labels(catalogue: Catalogue, holding: Sequence[FindingClass]) -> dict[str, float]:
    """Labels of a reader who looks for every finding, from all classes that hold in a study.

    1 where one of them states the finding; 0 where one of them denies it, or where no sentence of the catalogue ever
    does. Without a label is what they neither state nor deny.
    """
    labels = _strongest((column, value) for c in holding for column, value in c.labels.items())
    denied = {column for c in catalogue.classes for column, value in c.labels.items() if value == 0.0}
    labels |= {column: 0.0 for column in CHEXPERT if column not in denied and column not in labels}
    # Also findings without a column are findings.
    is_abnormal = any(not c.is_derived and "Support Devices" not in c.labels for c in holding)
    labels["No Finding"] = float(not is_abnormal)
    return {column: labels[column] for column in CHEXPERT if column in labels}


def _strongest(labels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The label of each column: presence beats uncertainty, uncertainty beats absence."""
    rank = {1.0: 2, -1.0: 1, 0.0: 0}
    found: dict[str, float] = {}
    for column, label in labels:
        if column not in found or rank[label] > rank[found[column]]:
            found[column] = label
    return found


def negbio_labels(chexpert: dict[str, float], rng: np.random.Generator) -> dict[str, float]:
    """Labels of another labeller, which misses some negations and takes some uncertain findings for present."""
    labels = {}
    for column, value in chexpert.items():
        u = rng.random()
        if value == -1.0 and u < 0.3:
            labels[column] = 1.0
        elif not (value == 0.0 and u < 0.04):
            labels[column] = value
    return labels
