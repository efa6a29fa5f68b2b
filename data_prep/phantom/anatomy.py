"""A patient seen from the front: lungs, heart, bones, vessels, soft tissue, and findings that change the contours.

All densities are in units in which the air of a lung takes away about 0.45 and the whole body about 0.8. The contours
are functions of the height ``y`` (see `geometry`), so that heart and diaphragm meet the lungs as they do in a body.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from data_prep.phantom.findings import FindingClass
from data_prep.phantom.geometry import Field, Frame, Line, blur, bump, smooth_step, spline

SIGN = {"right": -1, "left": 1}
"""The patient's right is on the image's left."""
_HEART_GROWTH = {"mild": 1.19, "moderate": 1.31, "severe": 1.50}


class Body:
    """Measures of one patient in one projection, body units: anatomy from one stream, the exposure from another.

    AP images are taken from nearer, lying or sitting: wider heart and mediastinum, higher diaphragm, scapulae
    over the lungs. `cardiac_ratio` is the width of the heart over the inner width of the chest (cardiothoracic ratio).
    """

    def __init__(
        self, patient: np.random.Generator, image: np.random.Generator, view: str, low_volumes: bool
    ) -> None:
        p, i, is_ap = patient, image, view == "AP"
        female = p.random() < 0.48
        inspiration = 0.795 + 0.018 * p.standard_normal() + 0.008 * i.standard_normal()
        inspiration -= 0.02 * is_ap + (0.075 + 0.02 * p.random()) * low_volumes
        right = float(np.clip(inspiration, 0.62, 0.83))
        ratio = 0.452 + 0.024 * p.standard_normal() + 0.006 * i.standard_normal()
        ratio = ratio + 0.022 * is_ap + 0.012 * low_volumes
        self.chest_width = float(0.37 + 0.012 * p.standard_normal())
        self.apex = float(0.075 + 0.012 * p.standard_normal())
        self.dome = {"right": right, "left": right + float(0.018 + 0.008 * p.standard_normal())}
        self.dome_height = float(p.uniform(0.075, 0.12))
        self.cardiac_ratio = float(np.clip(ratio, 0.38, 0.53))
        self.heart_lean = float(p.uniform(0.66, 0.74))
        self.mediastinum = float(0.058 + 0.006 * p.standard_normal() + 0.008 * is_ap)
        self.knob = float(p.uniform(0.015, 0.032))
        self.rotation = float(i.normal(0, 0.010 + 0.006 * is_ap))
        self.rib_phase = float(p.uniform(-0.02, 0.02))
        self.rib_spacing = float(p.uniform(0.078, 0.088))
        self.rib_contrast = float(i.uniform(0.055, 0.095))
        self.clavicle = float(0.155 + i.normal(0, 0.012) - 0.035 * is_ap)
        self.scapula = float(np.clip(i.normal(0.33 if is_ap else 0.40, 0.02), 0.28, 0.45))
        self.breast = float(p.uniform(0.03, 0.1)) if female else float(p.uniform(0, 0.02))
        self.fat = float(p.uniform(0, 0.08))
        self.arms = float(i.uniform(0.2, 1.0)) if is_ap else float(i.uniform(0, 0.5))
        self.stomach_gas = float(p.uniform(0.1, 0.25)) if p.random() < 0.65 else 0.0
        self.vessel_contrast = float(i.uniform(0.08, 0.125))
        # Normal lungs differ too: crowded vessels, motion, shadows of soft tissue at the bases, folds of skin,
        # costophrenic angles rounded by old scars.
        self.congestion = float(i.gamma(1.5, 0.008)) + 0.012 * is_ap + 0.02 * low_volumes
        self.vessel_blur = float(0.7 * i.beta(1.2, 3.0))
        self.basal_haze = float(i.gamma(1.2, 0.008)) + 0.01 * is_ap + 0.02 * low_volumes
        self.fold = (
            ("right", "left")[int(i.integers(2))] if i.random() < (0.12 if is_ap else 0.04) else "",
            float(i.uniform(0.75, 0.93)),
            float(i.uniform(0.15, 0.45)),
        )
        self.blunting = {side: float(p.uniform(0.02, 0.05)) if p.random() < 0.10 else 0.0 for side in SIGN}
        self.spine_bend = float(p.normal(0, 0.006))


class Chest:
    """The contours of a body on a frame, with the findings that change them. All findings read them.

    Attributes:
        lateral: distance of the inner chest wall from the midline at each pixel's height.
        lung: share of each pixel that is lung, by side, above the diaphragm and beside the mediastinum.
        heart: share of each pixel that is heart or great vessels.
    """

    def __init__(
        self,
        frame: Frame,
        body: Body,
        findings: Sequence[FindingClass],
        streams: Mapping[int, np.random.Generator],
    ) -> None:
        self.frame, self.body = frame, body
        heart_growth, knob_growth, widening, spine_bend = 1.0, 0.0, 0.0, 0.0
        raised = {}
        for finding in findings:
            rng = streams[finding.class_id]
            if finding.kind == "cardiomegaly":
                heart_growth = _HEART_GROWTH[finding.grade] * rng.uniform(0.96, 1.04)
            elif finding.kind == "elevated_diaphragm":
                raised[finding.side] = rng.uniform(0.09, 0.13)
            elif finding.kind == "enlarged_knob":
                knob_growth = rng.uniform(0.035, 0.05)
            elif finding.kind == "wide_mediastinum":
                widening = rng.uniform(0.035, 0.05)
            elif finding.kind.startswith("scoliosis"):
                spine_bend = rng.uniform(0.045, 0.065) * (-1 if finding.kind.endswith("right") else 1)
        self.dome = {side: body.dome[side] - raised.get(side, 0.0) for side in SIGN}
        self.center = np.float32(body.rotation)
        curve = np.float32(body.spine_bend) * np.sin((frame.y - 0.1) * 5)
        bow = np.float32(spine_bend) * np.sin(np.clip(frame.y - 0.05, 0, 0.8) * 3.9)
        self.spine: Field = (curve + bow).astype(np.float32)
        self.lateral: Field = self.wall(frame.y)
        self.diaphragm = {side: self._diaphragm(side) for side in SIGN}
        self.heart_width = body.cardiac_ratio * heart_growth * 2 * body.chest_width
        self.heart: Field = self._heart(knob_growth, widening)
        self.lung = {side: self._lung(sign, side) for side, sign in SIGN.items()}

    def wall(self, y: Field, lift: float = 0.0) -> Field:
        """Distance of the inner chest wall from the midline at heights y; 0 above the apex."""
        t = np.clip((y - np.float32(self.body.apex + lift)) / 0.8, 0, 1)
        rise = 1 - np.power(1 - t, 3.4)
        return (np.float32(self.body.chest_width) * np.sqrt(rise) * (1 + 0.02 * t)).astype(np.float32)

    def _diaphragm(self, side: str) -> Field:
        """Height of the diaphragm at each pixel's distance from the midline: a dome that falls to the angles."""
        f = self.frame
        u = (f.side(SIGN[side]) - 0.165) / np.float32(self.body.chest_width - 0.165)
        outer, inner = np.clip(u, 0, 1.3), np.clip(-u, 0, 1.5)
        fall = np.float32(self.body.dome_height) * (0.55 * outer**2 + 0.6 * outer**6 + 0.4 * inner**2)
        return (np.float32(self.dome[side]) + fall).astype(np.float32)

    def _heart(self, knob_growth: float, widening: float) -> Field:
        """Heart and mediastinum between a right and a left contour.

        Right: superior vena cava, right atrium. Left: aortic knob, pulmonary trunk, left ventricle, which leans on
        the diaphragm with its apex.
        """
        f, b = self.frame, self.body
        y = f.y
        base = np.float32(b.mediastinum + widening) + 0.01 * bump(y - 0.16, 0.1)
        bottom = np.float32(self.dome["left"] + 0.02)
        top = bottom - np.float32(0.39 + 0.12 * (self.heart_width - 0.33))
        t = np.clip((y - top) / (bottom - top), 0, 1.25)
        right_width = np.float32((1 - b.heart_lean) * self.heart_width)
        left_width = np.float32(b.heart_lean * self.heart_width)
        # Both contours are smooth half-waves that start at the mediastinum; the left one peaks lower and further out.
        wave = np.sin(np.float32(np.pi) * np.clip(t - 0.22, 0, 0.999)) ** 1.1
        right = base * 0.86 + (right_width - base * 0.86) * wave
        rise = np.clip(t / 0.84, 0, 1)
        fall = np.clip((t - 0.84) / 0.34, 0, 1)
        ventricle = np.sin(np.float32(np.pi / 2) * rise) ** 1.55 * np.sqrt(1 - fall**2)
        left = base + (left_width - base) * ventricle.astype(np.float32)
        knob = np.float32(b.knob + knob_growth)
        left = left + knob * bump(y - 0.30, 0.032 + 0.3 * knob_growth)
        left = left + 0.012 * bump(y - 0.395, 0.035)
        # A bent spine takes the mediastinum with it, in part.
        offset = f.x - self.center - 0.45 * self.spine
        inside = np.minimum(left - offset, offset + right)
        return smooth_step(inside, 0.0045) * smooth_step(y - 0.045, 0.03)

    def _lung(self, sign: int, side: str) -> Field:
        f = self.frame
        lateral = self.lateral - f.side(sign)
        # The apex curves towards the neck: the inner border moves outwards at the top.
        t = np.clip((f.y - np.float32(self.body.apex)) / 0.8, 0, 1)
        medial = f.side(sign) - 0.035 - 0.085 * np.exp(-t * 16)
        return (
            smooth_step(np.minimum(lateral, medial), 0.0045)
            * smooth_step(self.diaphragm[side] - f.y, 0.0045)
            * smooth_step(f.y - np.float32(self.body.apex), 0.006)
        )

    def lungs(self) -> Field:
        return np.maximum(self.lung["right"], self.lung["left"])

    def place(self, side: str, zone: str, rng: np.random.Generator) -> tuple[float, float]:
        """A point in the middle of a lung zone, body coordinates."""
        sign = SIGN[side]
        top, bottom = self.body.apex + 0.05, self.dome[side] - 0.02
        share = {"upper": 0.24, "mid": 0.53, "lower": 0.82}[zone]
        y = top + (bottom - top) * (share + rng.uniform(-0.07, 0.07))
        t = min(max((y - self.body.apex) / 0.8, 0.0), 1.0)
        wall = self.body.chest_width * (1 - (1 - t) ** 3.4) ** 0.5
        # On the left, low lesions keep clear of the heart.
        inner = 0.09
        if zone == "lower":
            inner = 0.12 if side == "right" else min(0.7 * self.heart_width, wall - 0.14)
        lateral = wall - 0.075
        return sign * float(inner + (lateral - inner) * rng.uniform(0.25, 0.85)), float(y)


def body_outline(chest: Chest) -> Field:
    """Soft tissue: neck, shoulders, trunk and, in some images, the upper arms."""
    f, b = chest.frame, chest.body
    out = np.clip(f.d - 0.10, 0, 1)
    shoulder_line = -0.035 + 0.30 * out + 0.55 * out**2
    neck_edge = 0.098 + 0.9 * np.square(np.clip(f.y + 0.13, 0, 1))
    neck = smooth_step(neck_edge - f.d, 0.008)
    above = np.maximum(neck, smooth_step(f.y - shoulder_line, 0.010))
    trunk_half = chest.lateral.max() + np.float32(0.055 + 0.5 * b.fat)
    trunk_half = trunk_half + 0.02 * bump(f.y - 0.4, 0.2)
    # Below the armpit the arm hangs beside the trunk, with a gap that opens downwards.
    gap = np.float32(0.02 + 0.06 * (1 - b.arms)) * np.clip((f.y - 0.36) * 4, 0, 1)
    arm = smooth_step(f.d - trunk_half - gap, 0.006) * smooth_step(trunk_half + gap + 0.13 - f.d, 0.01)
    beside = np.maximum(smooth_step(trunk_half - f.d, 0.006), arm)
    below_armpit = smooth_step(f.y - 0.33, 0.03)
    shoulder_end = smooth_step(0.60 - f.d, 0.015)
    return above * ((1 - below_armpit) * shoulder_end + below_armpit * beside)


def ribs(chest: Chest) -> Field:
    """Posterior arcs (falling outwards from the spine) and fainter anterior arcs (falling inwards from the wall)."""
    f, b = chest.frame, chest.body
    spacing = np.float32(b.rib_spacing)
    relative = np.clip(f.d / np.maximum(chest.lateral, 0.08), 0, 1.12)
    cage = smooth_step(chest.lateral + 0.018 - f.d, 0.004) * smooth_step(f.d - 0.03, 0.01)
    cage *= smooth_step(f.y - np.float32(b.apex - 0.02), 0.01)
    fade = 1 - 0.75 * smooth_step(f.y - np.float32(chest.dome["right"] + 0.03), 0.02)
    steep = 0.05 + 0.10 * np.clip(f.y, 0, 1)
    posterior = f.y + 0.045 * relative * (1 - relative) - steep * relative**2.6
    band = _bands(posterior + np.float32(b.rib_phase), spacing, 0.155)
    anterior = f.y + 0.30 * (f.d - chest.lateral) + 0.12 * (1 - relative) ** 2
    front = _bands(anterior + np.float32(b.rib_phase + 0.035), spacing, 0.17)
    front *= smooth_step(relative - 0.42, 0.03) * smooth_step(f.y - 0.16, 0.02)
    outer = 1 + 0.5 * smooth_step(relative - 0.86, 0.03)
    return (band * outer + 0.6 * front) * cage * fade


def _bands(height: Field, spacing: np.float32, half: float) -> Field:
    """Bands of a share of the spacing with brighter edges: the two cortices of a rib."""
    phase = height / spacing
    offset = np.abs(phase - np.round(phase))
    inside = smooth_step(half - offset, 0.03)
    edge = bump(offset - (half - 0.03), 0.05)
    return 0.75 * inside + 0.4 * edge


def shoulder_girdle(chest: Chest) -> Field:
    """Clavicles, scapulae and humeral heads."""
    f, b = chest.frame, chest.body
    lines: list[Line] = []
    for sign in (-1, 1):
        y0 = b.clavicle + sign * b.rotation
        shaft = [(0.035, y0 + 0.01), (0.12, y0 - 0.01), (0.24, y0 - 0.07), (0.36, y0 - 0.085)]
        lines.append(spline([(sign * x, y) for x, y in shaft]))
        lines.append([(sign * 0.03, y0), (sign * 0.055, y0 + 0.02)])
    clavicles = blur(f.strokes(lines, [0.026, 0.03] * 2, [0.75, 0.6] * 2), 0.9)
    blade = 0.42 * smooth_step(f.d - np.float32(b.scapula) - 0.12 * (f.y - 0.25), 0.008)
    blade *= smooth_step(0.42 - f.y, 0.02) * smooth_step(f.y - 0.09, 0.02)
    blade *= smooth_step(0.5 - f.d, 0.02)
    border = bump(f.d - np.float32(b.scapula) - 0.12 * (f.y - 0.25), 0.007)
    border *= smooth_step(0.40 - f.y, 0.01) * smooth_step(f.y - 0.10, 0.01)
    head_r = np.square((f.d - 0.475) / 0.06) + np.square((f.y - 0.13) / 0.065)
    humerus = smooth_step(1 - head_r, 0.08)
    arm = smooth_step(0.032 - np.abs(f.d - 0.50 - 0.12 * (f.y - 0.15)), 0.006)
    arm *= smooth_step(f.y - 0.15, 0.02)
    bones = clavicles + blade + 0.5 * border + 0.7 * np.maximum(humerus, arm)
    return bones.astype(np.float32)


def spine(chest: Chest) -> Field:
    """Vertebral bodies, disc spaces and spinous processes behind the mediastinum."""
    f = chest.frame
    offset = f.x - chest.spine - chest.center * 0.5
    column = smooth_step(0.048 - np.abs(offset), 0.006)
    phase = f.y / 0.062
    disc = bump(np.abs(phase - np.round(phase)), 0.16)
    pedicles = bump(np.abs(offset) - 0.028, 0.009) * bump(np.abs(phase - np.round(phase)) - 0.5, 0.18)
    process = bump(offset, 0.007) * bump(np.abs(phase - np.round(phase)) - 0.5, 0.2)
    return column * (0.8 - 0.35 * disc) + 0.35 * (pedicles + process)


def airways(chest: Chest) -> Field:
    """Trachea and main bronchi: lucent."""
    shift = float(chest.center)
    trunk = [(shift * 0.6, -0.15), (shift * 0.7 + 0.002, 0.1), (shift - 0.004, 0.25), (shift - 0.006, 0.36)]
    right = [(shift - 0.006, 0.35), (shift - 0.04, 0.395), (shift - 0.07, 0.44)]
    left = [(shift - 0.006, 0.35), (shift + 0.045, 0.40), (shift + 0.09, 0.425)]
    lines = [spline(right), spline(left), spline(trunk)]
    return blur(chest.frame.strokes(lines, [0.022, 0.02, 0.042], [0.5, 0.5, 1.0]), 1.0)


def vessels(frame: Frame, rng: np.random.Generator, center: float, spread: float = 1.0) -> Field:
    """Branching pulmonary vessels from both hila, wider below (upright) and tapering to the periphery.

    `center` is that of the chest, body units to the right of the midline; `spread` stretches the trees sideways.
    """
    points, widths, values = _vessel_trees()[int(rng.integers(_TREES))]
    stretch = np.array([spread * rng.uniform(0.94, 1.08), rng.uniform(0.94, 1.06)], np.float32)
    origin = np.array([0, 0.43], np.float32)
    shifted = (points - origin) * stretch + origin + np.array([center, 0], np.float32)
    return frame.strokes(list(shifted.astype(np.float32)), widths, values)


_TREES = 48
_LEVELS = 4
_VesselTree = tuple[np.ndarray, list[float], list[float]]


@functools.cache
def _vessel_trees() -> tuple[_VesselTree, ...]:
    """Trees to choose from: growing one takes longer than drawing it."""
    rng = np.random.default_rng(48)
    return tuple(_vessel_tree(rng) for _ in range(_TREES))


def _vessel_tree(rng: np.random.Generator) -> _VesselTree:
    """Poly-lines of three points with their widths and heights, thin ones first."""
    segments: list[tuple[np.ndarray, float, float]] = []
    for sign in (-1, 1):
        hilum = np.array([sign * 0.07, 0.43 if sign < 0 else 0.415])
        angles = np.linspace(-1.2, 1.3, 7) + rng.normal(0, 0.16, 7)
        for angle in angles:
            start = hilum + np.array([sign * 0.012, 0.05]) * rng.normal(0, 0.7, 2)
            start = start + np.array([0, 0.035 * angle])
            width = 0.0105 + 0.005 * (angle > 0.2) + 0.003 * rng.random()
            _grow(segments, rng, start, float(angle), sign, float(width), _LEVELS)
    segments.sort(key=lambda segment: segment[1])
    points = np.stack([segment[0] for segment in segments]).astype(np.float32)
    return points, [segment[1] for segment in segments], [segment[2] for segment in segments]


def _grow(
    segments: list[tuple[np.ndarray, float, float]],
    rng: np.random.Generator,
    start: np.ndarray,
    angle: float,
    sign: int,
    width: float,
    levels: int,
) -> None:
    """Add a vessel and its branches. Angles are measured downwards from the outward direction, rad."""
    length = (0.05 + 0.05 * rng.random()) * (1.3 if levels == _LEVELS else 1.0)
    # Vessels sag: those that leave upwards bend outwards, the lower ones bend down.
    bend = angle + float(rng.normal(0, 0.22)) + 0.06 * np.sign(angle)
    middle = start + length / 2 * np.array([sign * np.cos(angle), np.sin(angle)])
    end = middle + length / 2 * np.array([sign * np.cos(bend), np.sin(bend)])
    segments.append((np.stack([start, middle, end]), width, float(min(1.0, 0.22 + 50 * width))))
    if levels == 0:
        return
    main = float(rng.choice((-1, 1)))
    _grow(segments, rng, end, bend - main * 0.12 + float(rng.normal(0, 0.08)), sign, width * 0.8, levels - 1)
    if rng.random() < 0.9:
        side = bend + main * (0.5 + 0.3 * float(rng.random()))
        _grow(segments, rng, end, side, sign, width * 0.55, levels - 1)


def hila(chest: Chest) -> Field:
    """Hilar shadows, lower on the right."""
    f, total = chest.frame, np.zeros_like(chest.frame.x)
    for side, sign in SIGN.items():
        x, y = sign * 0.088 + float(chest.center), 0.445 if side == "right" else 0.425
        total += 0.55 * np.exp(-f.ellipse(x, y, 0.05, 0.075))
    return total


def soft_shadows(chest: Chest) -> Field:
    """Breasts, which whiten the lower lungs above a soft lower border."""
    f, b = chest.frame, chest.body
    r = np.square((f.d - 0.22) / 0.17) + np.square((f.y - 0.62) / 0.19)
    lower = smooth_step(1 - r, 0.06)
    return np.float32(b.breast) * lower * np.clip((f.y - 0.42) * 4, 0, 1)


def normal_haze(chest: Chest) -> Field:
    """Density of normal lungs that resembles disease: haze, a fold of skin, a rounded angle."""
    f, b = chest.frame, chest.body
    r = f.ellipse(float(chest.center), 0.50, 0.27, 0.22)
    basal = np.clip((f.y - 0.45) * 2.2, 0, 1)
    haze = np.float32(b.congestion) * np.exp(-r) + np.float32(b.basal_haze) * basal
    side, place, top = b.fold
    if side:
        # Denser towards the midline, with an edge on the outside: not a line as the pleura is.
        inward = chest.lateral * np.float32(place) - f.side(SIGN[side])
        ramp = smooth_step(inward, 0.003) * np.exp(np.clip(inward, 0, 1) * -22)
        ends = smooth_step(f.y - np.float32(top), 0.03), smooth_step(np.float32(top + 0.3) - f.y, 0.03)
        haze = haze + 0.06 * ramp * ends[0] * ends[1]
    for side, height in b.blunting.items():
        if height:
            floor = np.float32(chest.dome[side] + b.dome_height)
            corner = floor - f.y + 2 * (chest.lateral - f.side(SIGN[side]))
            haze = haze + 0.26 * smooth_step(np.float32(2 * height) - corner, 0.012)
    return (haze * chest.lungs()).astype(np.float32)


def gas(chest: Chest, rng: np.random.Generator) -> Field:
    """Gas in the stomach and in the bowel under the left dome: lucent."""
    f, b = chest.frame, chest.body
    if not b.stomach_gas:
        return np.zeros_like(f.x)
    x, y = rng.uniform(0.12, 0.2), chest.dome["left"] + rng.uniform(0.05, 0.075)
    wobble = 0.25 * f.noise(rng, 0.07)
    r = f.ellipse(x, y, rng.uniform(0.045, 0.08), rng.uniform(0.02, 0.036), -0.15)
    bubble = smooth_step(1 - r + wobble, 0.22)
    colon = smooth_step(1 - f.ellipse(x + 0.09, y + 0.07, 0.06, 0.028, 0.6) + wobble, 0.3)
    colon = colon * rng.uniform(0, 0.6)
    below = smooth_step(f.y - chest.diaphragm["left"] - 0.008, 0.004)
    return (np.float32(b.stomach_gas) * np.maximum(bubble, np.float32(colon)) * below).astype(np.float32)


@dataclass
class Layers:
    """The layers of an image to which findings add.

    Attributes:
        chest: the contours.
        air: share of the lungs' air that is left (1: healthy).
        vessels: vessels in the lungs, height 1.
        added: density added to (or, if negative, taken from) the body.
        metal: share of each pixel that metal covers.
        texture: smooth noise of unit variance, for irregular edges.
    """

    chest: Chest
    air: Field
    vessels: Field
    added: Field
    metal: Field
    texture: Field
