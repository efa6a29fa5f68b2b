"""What can be true of a study: latent classes and the state that decides which of them hold.

A *finding* is a class that is drawn into the picture (``small right pleural effusion``). A *derived* class holds or
does not hold as a consequence of the findings (``pleural effusion``, ``no pneumothorax``, ``the lungs are clear``).
Every sentence of a report says exactly one class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from data_prep.phantom.language import Wording

CATEGORIES = (
    "Atelectasis",
    "Cardiomegaly",
    "Consolidation",
    "Edema",
    "Lung Opacity",
    "Pleural Effusion",
    "Pneumonia",
    "Pneumothorax",
)
SIDES = ("right", "left")
ZONES = ("upper", "mid", "lower")


@dataclass(frozen=True)
class FindingClass:
    """A latent class.

    Attributes:
        kind: what is drawn (``nodule``), or ``derived`` for a class that follows from others.
        side, zone, grade: where and how; empty where it does not apply.
        frequency: share of training studies into which the finding is drawn, before conflicts are resolved; 0 for
            derived classes.
        category: the MS-CXR category of its boxes; empty where the class gets none.
        labels: CheXpert column -> 1.0 (said present) or 0.0 (said absent); a hedged wording turns 1.0 into -1.0.
        system: place in the report (0 devices, 1 lungs, 2 pleura, 3 heart, 4 mediastinum, 5 bones, 6 summary).
        rule: for derived classes, whether it holds given the study.
    """

    class_id: int
    name: str
    kind: str
    side: str = ""
    zone: str = ""
    grade: str = ""
    frequency: float = 0.0
    category: str = ""
    labels: dict[str, float] = field(default_factory=dict)
    system: int = 1
    wordings: tuple[Wording, ...] = ()
    rule: Callable[[StudyState], bool] | None = None

    @property
    def is_derived(self) -> bool:
        return self.rule is not None


@dataclass(frozen=True)
class StudyState:
    """What is true of one study: its findings and whether the lungs are poorly expanded."""

    findings: tuple[FindingClass, ...]
    low_volumes: bool

    def has(self, kind: str, side: str = "", zone: str = "", grade: str = "") -> bool:
        """Whether a finding of this kind (and side, zone, grade, where given) is there."""
        return self.count(kind, side, zone, grade) > 0

    def count(self, kind: str, side: str = "", zone: str = "", grade: str = "") -> int:
        return sum(
            f.kind == kind
            and (not side or f.side == side)
            and (not zone or f.zone == zone)
            and (not grade or f.grade == grade)
            for f in self.findings
        )

    def any_of(self, kinds: Iterable[str]) -> bool:
        return not {f.kind for f in self.findings}.isdisjoint(kinds)


Rule = Callable[[StudyState], bool]
"""Whether a derived class holds."""
