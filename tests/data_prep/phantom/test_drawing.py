"""Images of the phantom: a finding changes the image inside its box, and rare ones as much as common ones."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from scipy.stats import spearmanr

from data_prep.phantom.catalogue import catalogue
from data_prep.phantom.drawing import Picture, draw_frontal, draw_lateral
from data_prep.phantom.findings import FindingClass

CLASSES = catalogue()
DRAWN = [c for c in CLASSES.classes if not c.is_derived]
ONE_PER_KIND = list({c.kind: c for c in DRAWN}.values())


def _frontal(
    findings: list[FindingClass], study: int = 0, view: str = "PA", shape: tuple[int, int] = (112, 112)
) -> Picture:
    return draw_frontal((11, study), findings, view, False, 0, *shape)


def _mask(picture: Picture, finding: FindingClass) -> np.ndarray:
    mask = np.zeros(picture.pixels.shape, bool)
    for x, y, w, h in picture.boxes[finding.class_id]:
        mask[y : y + h, x : x + w] = True
    return mask


@functools.cache
def _without_findings(study: int) -> Picture:
    return _frontal([], study)


@functools.cache
def _change(name: str, study: int) -> tuple[float, float]:
    """Mean absolute difference that the finding makes inside and outside of its boxes, grey levels."""
    finding = CLASSES.by_name[name]
    with_it = _frontal([finding], study)
    difference = np.abs(with_it.pixels.astype(float) - _without_findings(study).pixels)
    mask = _mask(with_it, finding)
    assert mask.any(), finding.name
    return float(difference[mask].mean()), float(difference[~mask].mean())


@pytest.mark.parametrize(
    "finding",
    [
        pytest.param(c, id=c.kind, marks=[pytest.mark.slow] * (place % 8 > 0))
        for place, c in enumerate(ONE_PER_KIND)
    ],
)
def test_a_finding_changes_the_picture_inside_its_box(finding: FindingClass) -> None:
    inside, outside = _change(finding.name, study=finding.class_id % 8)
    # A catheter fills little of its box.
    assert inside > (1.0 if finding.part == 0 else 3.0)
    assert inside > 2.5 * outside


@pytest.mark.parametrize(
    ("view", "shape"),
    [
        ("AP", (113, 89)),
        ("PA", (90, 121)),
        pytest.param("PA", (113, 89), marks=pytest.mark.slow),
        pytest.param("AP", (90, 121), marks=pytest.mark.slow),
    ],
)
def test_boxes_lie_in_pictures_of_every_shape(view: str, shape: tuple[int, int]) -> None:
    for study, finding in enumerate(DRAWN[::9]):
        picture = _frontal([finding], study, view, shape)
        assert picture.pixels.shape == shape and picture.pixels.dtype == np.uint8
        for x, y, w, h in picture.boxes[finding.class_id]:
            assert 0 <= x < x + w <= shape[1] and 0 <= y < y + h <= shape[0]


@pytest.mark.parametrize(
    "kind", ["nodule", "pneumonia", "effusion", "pneumothorax", "picc", "pacemaker_dual"]
)
def test_boxes_lie_on_the_named_side(kind: str) -> None:
    # The patient's right is on the picture's left.
    for finding in (c for c in DRAWN if c.kind == kind):
        picture = _frontal([finding], 2)
        centers = [x + w / 2 for x, _, w, _ in picture.boxes[finding.class_id]]
        assert all((c < 58) == (finding.side == "right") for c in centers), finding.name


def test_zones_are_above_each_other() -> None:
    edema = CLASSES.by_name["edema_moderate"]
    assert len(_frontal([edema], 3).boxes[edema.class_id]) == 2, "one for each lung"
    tops = [
        np.mean([_frontal([f], k).boxes[f.class_id][0][1] for k in range(4)])
        for f in (CLASSES.by_name[f"mass_right_{zone}"] for zone in ("upper", "mid", "lower"))
    ]
    assert tops[0] < tops[1] < tops[2]


@pytest.mark.parametrize(
    "kind",
    [
        "effusion_right",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("cardiomegaly", "pneumothorax_left")),
    ],
)
def test_grades_differ_in_extent(kind: str) -> None:
    grades = ("mild", "moderate", "severe") if kind == "cardiomegaly" else ("small", "moderate", "large")
    findings = [CLASSES.by_name[f"{kind}_{grade}"] for grade in grades]
    areas = [np.mean([_mask(_frontal([f], k), f).sum() for k in range(4)]) for f in findings]
    assert areas[0] < areas[1] < areas[2]


@pytest.mark.slow
def test_rare_findings_are_as_visible_as_common_ones() -> None:
    boxed = [c for c in CLASSES.tail if c.category][::2]
    changes = [_change(c.name, study=c.class_id % 8)[0] for c in boxed]
    assert abs(spearmanr(changes, [c.frequency for c in boxed]).statistic) < 0.2
    common = [
        np.mean([_change(c.name, study)[0] for study in range(2)])
        for c in DRAWN
        if c.frequency > 0.03 and c.category
    ]
    assert np.median(changes) > 0.7 * np.median(common)


def test_pictures_depend_on_study_and_number_only() -> None:
    finding = CLASSES.by_name["mass_left_upper"]
    first, again = (draw_frontal((1, 2), [finding], "PA", False, 0, 80, 80) for _ in range(2))
    np.testing.assert_array_equal(first.pixels, again.pixels)
    for seed, image in (((1, 3), 0), ((2, 2), 0), ((1, 2), 1)):
        assert (first.pixels != draw_frontal(seed, [finding], "PA", False, image, 80, 80).pixels).mean() > 0.5


def test_the_order_of_findings_does_not_matter() -> None:
    findings = [
        CLASSES.by_name[n] for n in ("cardiomegaly_mild", "edema_severe", "nodule_right_upper", "picc_left")
    ]
    np.testing.assert_array_equal(_frontal(findings).pixels, _frontal(findings[::-1]).pixels)


def test_findings_keep_their_place_in_a_second_picture() -> None:
    finding = CLASSES.by_name["mass_left_upper"]
    boxes = [
        draw_frontal((4, 4), [finding], "PA", False, image, 128, 128).boxes[finding.class_id][0]
        for image in (0, 1)
    ]
    centers = np.array([(x + w / 2, y + h / 2) for x, y, w, h in boxes])
    assert np.abs(centers[0] - centers[1]).max() < 16


@pytest.mark.slow
def test_ap_and_low_volumes_enlarge_the_heart() -> None:
    heart = CLASSES.by_name["cardiomegaly_mild"]

    def mean_box(view: str, low_volumes: bool) -> np.ndarray:
        pictures = [draw_frontal((8, k), [heart], view, low_volumes, 0, 128, 128) for k in range(8)]
        return np.mean([p.boxes[heart.class_id][0] for p in pictures], 0)

    assert mean_box("AP", False)[2] > mean_box("PA", False)[2]
    assert mean_box("PA", True)[1] < mean_box("PA", False)[1] - 4


def test_lateral_pictures_have_no_boxes_and_look_different() -> None:
    finding = CLASSES.by_name["pneumonia_left_lower_dense"]
    pictures = [draw_lateral((5, k), [finding], False, 1, 90, 110) for k in range(5)]
    assert all(p.boxes == {} and p.pixels.shape == (90, 110) for p in pictures)
    lateral = np.mean([p.pixels for p in pictures], 0)
    frontal, other = (
        np.mean([draw_frontal((5, k), [], "PA", False, 0, 90, 110).pixels for k in ks], 0)
        for ks in (range(5), range(5, 10))
    )
    assert np.corrcoef(frontal.ravel(), other.ravel())[0, 1] > 0.9
    assert np.corrcoef(frontal.ravel(), lateral.ravel())[0, 1] < 0.7


def test_pictures_use_the_grey_scale_without_saturating() -> None:
    for k in range(6):
        pixels = _frontal([], k, "AP" if k % 2 else "PA").pixels
        assert 25 < pixels.std() < 95
        assert (pixels == 255).mean() < 0.02
