"""The latent classes of a study and the rules by which they hold.

A *finding* is a class that is drawn into the image (``small right pleural effusion``). A *derived* class holds or does
not hold as a consequence of the findings (``pleural effusion``, ``no pneumothorax``, ``the lungs are clear``). Every
sentence of a report states exactly one class.
"""

from __future__ import annotations

from dataclasses import dataclass

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
PARTS = ("devices", "lungs", "pleura", "heart", "mediastinum", "bones", "summary")
"""Parts of a report in their order."""

_EFFUSION_SIZES = {"small": 1, "moderate": 2, "large": 3}


@dataclass(frozen=True)
class FindingClass:
    """A latent class.

    Attributes:
        kind: the finding that is drawn (``nodule``), or ``derived``.
        side, zone, grade: empty where they do not apply.
        frequency: share of training studies into which the finding is drawn, before conflicts are resolved; 0 for
            derived classes.
        category: MS-CXR category of its boxes; empty: no boxes.
        labels: CheXpert column -> 1.0 (present) or 0.0 (absent); a hedged wording turns 1.0 into -1.0.
        part: of the report, an index into `PARTS`.
        mention: chance that a report states a derived class where it holds.
        rule: for derived classes, when they hold.
    """

    class_id: int
    name: str
    kind: str
    side: str
    zone: str
    grade: str
    frequency: float
    category: str
    labels: dict[str, float]
    part: int
    wordings: tuple[Wording, ...]
    mention: float = 0.0
    rule: Rule | None = None

    @property
    def is_derived(self) -> bool:
        return self.rule is not None


@dataclass(frozen=True)
class StudyState:
    """The truth about one study: its findings, and whether the lungs are poorly expanded."""

    findings: tuple[FindingClass, ...]
    low_volumes: bool

    @property
    def kinds(self) -> list[str]:
        return [f.kind for f in self.findings]


@dataclass(frozen=True)
class Rule:
    """Conditions under which a derived class holds; each must be met (see catalogue.yaml)."""

    any: frozenset[str] = frozenset()
    number: int = 1
    all: frozenset[str] = frozenset()
    none: frozenset[str] = frozenset()
    both_sides: str = ""
    larger_effusion: str = ""
    low_volumes: bool | None = None
    no_finding: bool = False

    @property
    def is_normal(self) -> bool:
        """True if nothing must be present: the class is stated by a normal sentence."""
        return not (self.any or self.all or self.both_sides or self.larger_effusion or self.low_volumes)

    def holds(self, state: StudyState, side: str, zone: str) -> bool:
        """True if a study meets the conditions on this side and in this zone (empty: anywhere)."""
        kinds = [f.kind for f in state.findings if side in ("", f.side) and zone in ("", f.zone)]
        return (
            (not self.any or sum(kind in self.any for kind in kinds) >= self.number)
            and self.all.issubset(kinds)
            and self.none.isdisjoint(kinds)
            and (
                not self.both_sides
                or {f.side for f in state.findings if f.kind == self.both_sides} == set(SIDES)
            )
            and (not self.larger_effusion or self._is_larger(state))
            and self.low_volumes in (None, state.low_volumes)
            and not (self.no_finding and kinds)
        )

    def _is_larger(self, state: StudyState) -> bool:
        sizes = {f.side: _EFFUSION_SIZES[f.grade] for f in state.findings if f.kind == "effusion"}
        return len(sizes) == 2 and sizes[self.larger_effusion] == max(sizes.values()) > min(sizes.values())
