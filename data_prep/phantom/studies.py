"""Patients of a phantom, their studies and splits, and the findings of each study."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from data_prep.phantom.catalogue import Catalogue
from data_prep.phantom.findings import SIDES, FindingClass, StudyState
from data_prep.phantom.rates import Rates, ordinary, rare_classes

SPLITS = {"train": 0.70, "validate": 0.08, "test": 0.22}
_STUDIES_PER_PATIENT = (0.62, 0.22, 0.10, 0.06)
LOW_VOLUMES = 0.13

# Share of patients in heart failure, which causes cardiomegaly, edema and effusions together.
_HEART_FAILURE = 0.15
_MAX_TAIL_FINDINGS = 4
RARE = 0.02
"""Findings of CheX5 in a place and grade rarer than this take turns in the test studies with the long tail."""
_FORCED_IN_TEST = 2


@dataclass(frozen=True)
class PlannedStudy:
    """A study before anything is drawn; `test_number` counts the test studies and is None elsewhere."""

    index: int
    study_id: int
    subject_id: int
    split: str
    test_number: int | None


def plan_studies(studies: int, seed: int) -> list[PlannedStudy]:
    """Patients with one to four studies, split by patient.

    Each patient goes to the split that lacks most studies, so that small phantoms keep the shares as well.
    """
    rng = np.random.default_rng([seed, 0])
    sizes: list[int] = []
    while (left := studies - sum(sizes)) > 0:
        sizes.append(min(left, 1 + int(rng.choice(len(_STUDIES_PER_PATIENT), p=_STUDIES_PER_PATIENT))))
    subject_ids = 10_000_000 + np.sort(rng.choice(9_990_000, len(sizes), replace=False))
    study_ids = iter(50_000_000 + rng.permutation(rng.choice(9_990_000, studies, replace=False)))
    splits = _split_patients(sizes, rng)
    planned: list[PlannedStudy] = []
    tests = 0
    for subject_id, size, split in zip(subject_ids, sizes, splits, strict=True):
        for _ in range(size):
            test_number = tests if split == "test" else None
            study_id = int(next(study_ids))
            planned.append(PlannedStudy(len(planned), study_id, int(subject_id), split, test_number))
            tests += split == "test"
    return planned


def _split_patients(sizes: Sequence[int], rng: np.random.Generator) -> list[str]:
    total = sum(sizes)
    filled = dict.fromkeys(SPLITS, 0)
    splits = [""] * len(sizes)
    for patient in rng.permutation(len(sizes)):
        split = max(SPLITS, key=lambda s: SPLITS[s] - filled[s] / total)
        splits[patient] = split
        filled[split] += sizes[patient]
    return splits


def draw_state(
    catalogue: Catalogue, rng: np.random.Generator, test_number: int | None, rates: Rates | None = None
) -> StudyState:
    """Draw the findings of a study.

    Test studies get `_FORCED_IN_TEST` of the rarer classes with boxes in turn, so that each has boxes to be found, and
    with `rates` those of `RARE_FINDINGS` without boxes; all others follow the catalogue's frequencies, or `rates`.
    """
    usual = ordinary(catalogue)
    if test_number is None:
        forced, share = [], 1.0
        of_study = usual if rates is None else rates
    else:
        forced, share = forced_in_test(catalogue, test_number, with_rare=rates is not None), 0.4
        of_study = usual
    drawn = _draw_tail(catalogue, rng, np.array(of_study.tail) * share)
    common = _draw_chex5(catalogue, rng, dict(of_study.common))
    findings: list[FindingClass] = []
    # Rare findings first: they must not lose their place to common ones.
    for finding in [*forced, *drawn, *common]:
        if not any(_conflict(catalogue, finding, other) for other in findings):
            findings.append(finding)
    low_volumes = bool(rng.random() < LOW_VOLUMES)
    return StudyState(tuple(sorted(findings, key=lambda f: f.class_id)), low_volumes)


def forced_in_test(catalogue: Catalogue, test_number: int, with_rare: bool = False) -> list[FindingClass]:
    """The rarer classes whose turn it is in this test study: those with boxes, `with_rare` also `RARE_FINDINGS`."""
    tail = {c.class_id for c in catalogue.tail}
    rare = [c for c in catalogue.classes if c.category and (c.class_id in tail or 0 < c.frequency < RARE)]
    if with_rare:
        rare += [c for c in rare_classes(catalogue) if not c.category]
    order = np.random.default_rng(len(rare)).permutation(len(rare))
    turns = range(_FORCED_IN_TEST * test_number, _FORCED_IN_TEST * (test_number + 1))
    return [rare[order[turn % len(rare)]] for turn in turns]


def _draw_tail(
    catalogue: Catalogue, rng: np.random.Generator, chances: Float64[np.ndarray, " tail"]
) -> list[FindingClass]:
    is_drawn = rng.random(len(catalogue.tail)) < chances
    drawn = [f for f, yes in zip(catalogue.tail, is_drawn, strict=True) if yes]
    order = rng.permutation(len(drawn))
    return [drawn[k] for k in order[:_MAX_TAIL_FINDINGS]]


def _draw_chex5(
    catalogue: Catalogue, rng: np.random.Generator, factors: Mapping[str, float]
) -> list[FindingClass]:
    common = catalogue.entries
    failing = rng.random() < _HEART_FAILURE
    found = []
    if rng.random() < (0.60 if failing else 0.175) * factors["cardiomegaly"]:
        found.append(f"cardiomegaly_{_choose(rng, common['cardiomegaly'].grades)}")
    if rng.random() < (0.60 if failing else 0.105) * factors["edema"]:
        found.append(f"edema_{_choose(rng, common['edema'].grades)}")
    if rng.random() < (0.48 if failing else 0.175) * factors["effusion"]:
        sides = SIDES if rng.random() < 0.35 else (str(rng.choice(SIDES)),)
        found += [f"effusion_{side}_{_choose(rng, common['effusion'].grades)}" for side in sides]
    if rng.random() < 0.17 * factors["pneumonia"]:
        pneumonia = common["pneumonia"]
        for _ in range(1 + int(rng.random() < 0.2)):
            zone = _choose(rng, pneumonia.zones)
            found.append(f"pneumonia_{rng.choice(SIDES)}_{zone}_{_choose(rng, pneumonia.grades)}")
    if rng.random() < 0.145 * factors["pneumothorax"]:
        found.append(f"pneumothorax_{rng.choice(SIDES)}_{_choose(rng, common['pneumothorax'].grades)}")
    return [catalogue.by_name[name] for name in dict.fromkeys(found)]


def _choose(rng: np.random.Generator, shares: Collection[str]) -> str:
    """One of the zones or grades of the catalogue, by its shares."""
    assert isinstance(shares, Mapping)
    return str(rng.choice(list(shares), p=list(shares.values())))


def _conflict(catalogue: Catalogue, one: FindingClass, other: FindingClass) -> bool:
    """True if two findings cannot be told apart in one image."""
    pair = {one.kind, other.kind}
    if any(pair <= group for group in catalogue.exclusive):
        return True
    if one.side != other.side:
        return False
    if any(pair <= group for group in catalogue.exclusive_on_one_side):
        return True
    if not one.zone or not other.zone:
        return _hides(one, other) or _hides(other, one)
    return one.zone == other.zone and (pair <= catalogue.groups["focal"] or one.kind == other.kind)


def _hides(wide: FindingClass, focal: FindingClass) -> bool:
    """A large effusion or pneumothorax takes the place of what lies in it."""
    if wide.kind == "effusion" and wide.grade in ("moderate", "large"):
        return focal.zone == "lower"
    if wide.kind == "pneumothorax" and wide.grade in ("moderate", "large"):
        return focal.zone == "upper"
    return False
