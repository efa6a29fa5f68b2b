"""Frequencies and wordings of the phantom's classes, and their independence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
import yaml
from scipy.stats import spearmanr

from data_prep.phantom.catalogue import FILE, SECTIONS, Entry, catalogue
from data_prep.phantom.findings import PARTS, SIDES, ZONES, StudyState
from data_prep.phantom.studies import SPLITS, draw_state, forced_in_test, plan_studies
from medclip_dcl.common.findings import CHEX5

CLASSES = catalogue()


@pytest.fixture(scope="module")
def states() -> list[StudyState]:
    return [draw_state(CLASSES, np.random.default_rng([5, k]), None) for k in range(3000)]


@pytest.fixture(scope="module")
def held_names(states: list[StudyState]) -> list[list[str]]:
    """Names of the classes that hold in each study."""
    return [[c.name for c in CLASSES.holding(state)] for state in states]


@pytest.fixture(scope="module")
def shares(states: list[StudyState], held_names: list[list[str]]) -> np.ndarray:
    """Share of studies in which each class holds, by class_id."""
    counts = Counter(CLASSES.by_name[name].class_id for names in held_names for name in names)
    return np.array([counts[c.class_id] / len(states) for c in CLASSES.classes])


def test_the_tail_is_long(shares: np.ndarray) -> None:
    assert len(CLASSES.classes) >= 150
    tail = np.array([c.frequency for c in CLASSES.tail])
    assert (tail < 0.01).sum() >= 80
    assert tail.min() < 0.002 and tail.min() >= 0.001
    assert shares[[c.class_id for c in CLASSES.tail]].max() < 0.10


def test_drawn_shares_are_the_stated_frequencies(shares: np.ndarray) -> None:
    # Conflicts between findings take a little away, chance adds and takes.
    for c in CLASSES.classes:
        if not c.is_derived:
            noise = 4 * (c.frequency / 3000) ** 0.5
            assert c.frequency * 0.70 - noise < shares[c.class_id] < c.frequency * 1.25 + noise, c.name


def test_wordings_do_not_follow_the_frequency(shares: np.ndarray) -> None:
    numbers = np.array([len(c.wordings) for c in CLASSES.classes])
    lengths = np.array([np.mean([len(w.text.split()) for w in c.wordings]) for c in CLASSES.classes])
    assert set(numbers.tolist()) == {2, 3, 4, 5, 6}
    everything = np.arange(len(numbers))
    findings = np.array([c.class_id for c in CLASSES.classes if not c.is_derived])
    tail = np.array([c.class_id for c in CLASSES.tail])
    for group in (everything, findings, tail):
        for what in (numbers, lengths):
            assert abs(spearmanr(what[group], shares[group]).statistic) < 0.12


def test_weights_of_wordings_do_not_follow_their_length() -> None:
    pairs = [(w.weight * len(c.wordings), len(w.text)) for c in CLASSES.classes for w in c.wordings]
    assert abs(spearmanr(*zip(*pairs, strict=True)).statistic) < 0.1


def test_each_sentence_says_one_class() -> None:
    texts = [text for text, _ in CLASSES.sentences()]
    assert len(texts) == len(set(texts)) >= 600
    for text in texts:
        assert text[0].isupper() and text.endswith(".") and text == " ".join(text.split())
        assert "{" not in text and text.isascii()


def test_some_prompts_are_sentences_of_reports() -> None:
    prompts, held_out = {p for pair in CHEX5.values() for p in pair}, set(CLASSES.held_out_prompts)
    fixed = {p.removesuffix(".") for p in CLASSES.fixed_sentences.values()}
    assert held_out <= prompts and prompts - held_out <= fixed and fixed.isdisjoint(held_out)
    texts = [text.lower() for text, _ in CLASSES.sentences()]
    words = {word.strip(".,") for text in texts for word in text.split()}
    for prompt in held_out:
        assert not any(prompt.lower() in text for text in texts), prompt
        assert {word.lower() for word in prompt.split()} <= words, prompt
    for name, prompt in CLASSES.fixed_sentences.items():
        assert [w.text for w in CLASSES.by_name[name].wordings].count(prompt) == 1
        assert not CLASSES.by_name[name].wordings[0].held_out


def test_held_out_wordings_belong_to_boxed_classes() -> None:
    held_out = [(c, w) for c in CLASSES.classes for w in c.wordings if w.held_out]
    assert len(held_out) >= 20
    for c, _ in held_out:
        assert c.category
        assert sum(not w.held_out for w in c.wordings) >= 2
    assert all(any(not w.hedged for w in c.wordings) for c in CLASSES.classes)
    assert sum(w.hedged for c in CLASSES.classes for w in c.wordings) >= 5


def test_consequences_are_consistent(states: list[StudyState], held_names: list[list[str]]) -> None:
    for state, names in zip(states[:1000], held_names, strict=False):
        held = set(names)
        kinds = {f.kind for f in state.findings}
        assert ("cardiomegaly" in held) == ("no_cardiomegaly" not in held) == ("cardiomegaly" in kinds)
        assert ("normal_heart_size" in held) == ("no_cardiomegaly" in held)
        assert ("edema" in held) == ("no_edema" not in held) == ("edema" in kinds)
        assert ("pneumonia" in held) == ("no_pneumonia" not in held) == ("pneumonia" in kinds)
        assert ("pneumothorax" in held) == ("no_pneumothorax" not in held) == ("pneumothorax" in kinds)
        assert ("effusion" in held) == ("no_effusion" not in held)
        assert ("effusion" in held) == bool(kinds & {"effusion", "fissural_fluid"})
        both = "effusion_right" in held and "effusion_left" in held
        assert ("effusion_bilateral" in held) == both
        assert not {"effusion_bilateral_right_larger", "effusion_bilateral_left_larger"} <= held
        assert ("no_effusion_or_pneumothorax" in held) == {"no_effusion", "no_pneumothorax"}.issubset(held)
        assert ("low_volumes" in held) != ("well_expanded" in held)
        if "lungs_clear" in held:
            assert held.isdisjoint({"edema", "pneumonia"}) and "no_consolidation" in held
        if "normal_chest" in held:
            assert not state.findings and {"lungs_clear", "no_acute_process", "bones_intact"} <= held
        if "edema_with_effusion" in held:
            assert {"edema", "effusion"} <= held
        for side in ("right", "left"):
            zones = [f"pneumonia_{side}_{zone}" in held for zone in ("upper", "mid", "lower")]
            assert (f"pneumonia_{side}" in held) == any(zones)


def test_the_catalogue_does_not_contradict_itself() -> None:
    data = yaml.safe_load(FILE.read_text())
    entries = [Entry(**values) for section in SECTIONS for values in data[section]]
    groups, kinds = data["groups"], CLASSES.entries.keys()
    assert {kind for members in groups.values() for kind in members} <= kinds
    used = [data["exclusive"], data["exclusive_on_one_side"]]
    used += [[(e.holds or {}).get(key, ()) for e in entries] for key in ("any", "all", "none")]
    assert {name for lists in used for names in lists for name in names} <= kinds | groups.keys()
    for entry in entries:
        assert entry.part in PARTS and entry.form in data["frames"], entry.name
        assert set(entry.sides) <= {"", *SIDES} and set(entry.zones) <= {"", *ZONES}, entry.name
        assert set(entry.may_hedge) <= set(entry.grades), entry.name
        for shares in (entry.zones, entry.grades):
            assert not isinstance(shares, Mapping) or sum(shares.values()) == pytest.approx(1), entry.name
    assert len(CLASSES.by_name) == len(CLASSES.classes), "names differ"
    assert data["fixed_sentences"].keys() <= CLASSES.by_name.keys()


@pytest.mark.parametrize("studies", [20, 37, 2600])
def test_splits_are_by_patient_and_near_their_shares(studies: int) -> None:
    planned = plan_studies(studies, seed=3)
    assert [p.index for p in planned] == list(range(studies))
    assert len({p.study_id for p in planned}) == studies
    split_of: dict[int, set[str]] = {}
    for p in planned:
        split_of.setdefault(p.subject_id, set()).add(p.split)
        assert 10_000_000 <= p.subject_id < 20_000_000 <= 50_000_000 <= p.study_id < 60_000_000
    assert all(len(splits) == 1 for splits in split_of.values())
    assert len(split_of) < studies
    for split, share in SPLITS.items():
        assert abs(sum(p.split == split for p in planned) - share * studies) <= 4
    numbers = [p.test_number for p in planned if p.test_number is not None]
    assert numbers == list(range(len(numbers)))
    assert all((p.test_number is not None) == (p.split == "test") for p in planned)


def test_boxed_tail_classes_take_turns_in_test() -> None:
    counts = Counter(f.name for k in range(200) for f in forced_in_test(CLASSES, k))
    boxed = {c.name for c in CLASSES.tail if c.category}
    assert boxed <= set(counts)
    assert max(counts.values()) - min(counts.values()) <= 1
    for k in range(20):
        state = draw_state(CLASSES, np.random.default_rng([6, k]), k)
        assert forced_in_test(CLASSES, k)[0] in state.findings
