"""Reports of the phantom: which sentences a radiologist would write of a study, and the layout of MIMIC-CXR."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from data_prep.phantom.catalogue import Catalogue
from data_prep.phantom.findings import FindingClass, StudyState
from data_prep.phantom.language import Wording
from medclip_dcl.findings import CHEXPERT

LINE_WIDTH = 79

# Chance that a negation or normal statement that is true is written down.
_NORMAL_MENTION = {
    "no_cardiomegaly": 0.14,
    "normal_heart_size": 0.42,
    "no_edema": 0.30,
    "normal_vasculature": 0.10,
    "no_effusion": 0.26,
    "free_angles": 0.05,
    "no_pneumonia": 0.33,
    "no_consolidation": 0.12,
    "no_pneumothorax": 0.28,
    "no_effusion_or_pneumothorax": 0.20,
    "no_consolidation_effusion_or_pneumothorax": 0.12,
    "no_edema_or_effusion": 0.06,
    "no_pneumonia_or_edema": 0.08,
    "no_nodule": 0.05,
    "no_fracture": 0.06,
    "no_free_air": 0.05,
    "lungs_clear": 0.30,
    "normal_mediastinum": 0.22,
    "normal_hila": 0.08,
    "bones_intact": 0.16,
    "low_volumes": 0.7,
    "well_expanded": 0.10,
    "no_acute_process": 0.5,
    "normal_chest": 0.3,
    "technique": 0.05,
    "tubes_in_position": 0.2,
}
# Chance that a derived positive class is written down where it holds.
_GENERIC_MENTION = 0.10
_PLAIN_MENTION = 0.30
_COMBINATION_MENTION = 0.25
# Chance that a finding itself is written down; subtle ones are overlooked more often.
_FINDING_MENTION = {"mild": 0.80, "small": 0.85, "patchy": 0.88}
_FINDING_MENTION_ELSE = 0.92
# Findings of CheX5 without place and grade.
_PLAIN = frozenset(("cardiomegaly", "edema", "effusion", "pneumonia", "pneumothorax"))
_COMBINATIONS = frozenset(
    ("cardiomegaly_with_edema", "edema_with_effusion", "heart_failure", "pneumonia_multifocal")
    + ("effusion_bilateral", "effusion_bilateral_right_larger", "effusion_bilateral_left_larger")
)


@dataclass(frozen=True)
class Statement:
    """A sentence in a report and the class that it says."""

    finding: FindingClass
    wording: Wording


@dataclass(frozen=True)
class Report:
    """The text of a report file and what its findings and impression say."""

    text: str
    statements: tuple[Statement, ...]


def choose_wording(finding: FindingClass, rng: np.random.Generator, unseen: bool) -> Wording:
    """One wording of a class by weight; `unseen` allows those kept out of training."""
    wordings = [w for w in finding.wordings if unseen or not w.held_out]
    weights = np.array([w.weight for w in wordings])
    return wordings[int(rng.choice(len(wordings), p=weights / weights.sum()))]


def write_report(
    catalogue: Catalogue,
    state: StudyState,
    view: str,
    has_lateral: bool,
    unseen: bool,
    rng: np.random.Generator,
) -> Report:
    """Write the report of a study.

    What a report says is true of the study; not everything that is true is said. Nothing that is there is denied.

    Args:
        catalogue: the classes.
        state: what is true of the study.
        view: projection of the first frontal picture, ``AP`` or ``PA``.
        has_lateral: whether there is a lateral picture too.
        unseen: whether wordings may be used that are kept out of training (test patients).
        rng: of the report.
    """
    said = _choose_classes(catalogue, state, rng)
    statements = [Statement(c, choose_wording(c, rng, unseen)) for c in said]
    body = sorted((s for s in statements if s.finding.system < 6), key=lambda s: s.finding.system)
    summary = [s for s in statements if s.finding.system == 6]
    layout = rng.choice(4, p=(0.66, 0.16, 0.09, 0.09))
    head = _head(view, has_lateral, rng)
    if layout == 0 and body:
        summary += _repeated(body, rng, unseen)
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
        # No sections at all: a title in some, then the text.
        body, summary = body + summary, []
        title = "Portable chest radiograph" if view == "AP" else "Frontal view of the chest"
        pieces = [[_lines(f"{title} compared to ___")]] if rng.random() < 0.5 else []
        pieces = [*pieces, [_lines(_prose(body, rng))]]
    text = _assemble(pieces)
    return Report(text, (*body, *summary))


def _choose_classes(catalogue: Catalogue, state: StudyState, rng: np.random.Generator) -> list[FindingClass]:
    said = [
        finding
        for finding in state.findings
        if rng.random() < _FINDING_MENTION.get(finding.grade, _FINDING_MENTION_ELSE)
    ]
    for derived in catalogue.holding(state):
        if not derived.is_derived:
            continue
        if derived.name in _NORMAL_MENTION:
            chance = _NORMAL_MENTION[derived.name]
        elif derived.name in _PLAIN:
            chance = _PLAIN_MENTION
        else:
            chance = _COMBINATION_MENTION if derived.name in _COMBINATIONS else _GENERIC_MENTION
        if rng.random() < chance:
            said.append(derived)
    if not said:
        said = [catalogue.by_name["technique"]]
    return said


def _repeated(body: Sequence[Statement], rng: np.random.Generator, unseen: bool) -> list[Statement]:
    """The impression names some findings of the body again, in other words if it happens so."""
    positive = [s.finding for s in body if not s.finding.is_derived]
    return [Statement(f, choose_wording(f, rng, unseen)) for f in positive if rng.random() < 0.35]


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


def _assemble(pieces: Sequence[Sequence[str]]) -> str:
    """Paragraphs between lines that hold a single space, under the title of a final report."""
    paragraphs = [paragraph for piece in pieces for paragraph in piece]
    return " " * 33 + "FINAL REPORT\n" + "\n \n".join(paragraphs) + "\n"


def chexpert_labels(statements: Iterable[Statement]) -> dict[str, float]:
    """Labels of a report as CheXpert gives them.

    1 where a sentence says the finding, 0 where one denies it, -1 where one is unsure of it; certain presence beats
    doubt, doubt beats absence. What no sentence names has no label. ``No Finding`` is 1 where nothing but support
    devices is present or in doubt.

    Returns:
        column -> label, only of labelled columns.
    """
    rank = {1.0: 2, -1.0: 1, 0.0: 0}
    labels: dict[str, float] = {}
    for statement in statements:
        for column, value in statement.finding.labels.items():
            label = -1.0 if value == 1.0 and statement.wording.hedged else value
            if column not in labels or rank[label] > rank[labels[column]]:
                labels[column] = label
    if not any(value != 0.0 for column, value in labels.items() if column != "Support Devices"):
        labels["No Finding"] = 1.0
    return {column: labels[column] for column in CHEXPERT if column in labels}


def negbio_labels(chexpert: dict[str, float], rng: np.random.Generator) -> dict[str, float]:
    """Labels of another labeller: it agrees but for some doubts and some negations that it does not see."""
    labels = {}
    for column, value in chexpert.items():
        u = rng.random()
        if value == -1.0 and u < 0.3:
            labels[column] = 1.0
        elif not (value == 0.0 and u < 0.04):
            labels[column] = value
    return labels
