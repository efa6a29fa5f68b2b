"""What each finding does to a picture, and where: one function per kind.

Every function changes the layers of a picture and returns masks of what it changed, one per place; boxes are drawn
around them. A finding takes its random numbers from a stream of its own, so that the rest of the picture is the same
with and without it, and its place is the same in every picture of the study.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from data_prep.phantom.anatomy import SIGN, Chest
from data_prep.phantom.findings import FindingClass
from data_prep.phantom.geometry import Field, blur, bump, smooth_step, spline

_GRADES = {"mild": 0, "small": 0, "patchy": 0, "moderate": 1, "dense": 1, "severe": 2, "large": 2}


@dataclass
class Layers:
    """A picture in the making.

    Attributes:
        chest: the contours.
        air: share of the lungs' air that is left (1: healthy).
        vessels: vessels in the lungs, height 1.
        added: density added to (or, if negative, taken from) the body.
        metal: opaque things, share of each pixel that they cover.
        texture: smooth noise of unit variance, for irregular edges.
    """

    chest: Chest
    air: Field
    vessels: Field
    added: Field
    metal: Field
    texture: Field
    masks: dict[int, list[Field]] = field(default_factory=dict)


def _edema(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, grade = layers.chest, _GRADES[finding.grade]
    f, amount = chest.frame, (0.08, 0.135, 0.20)[grade] * rng.uniform(0.85, 1.15)
    wings = bump(
        np.sqrt(
            np.square((f.d - np.float32(0.15)) / np.float32(1.05))
            + np.square((f.y - np.float32(0.50)) * np.float32(0.72))
        ),
        0.125,
    )
    basal = np.clip((f.y - np.float32(0.42)) * np.float32(1.6), 0, 1)
    haze = (np.float32(0.8) * wings + np.float32(0.45) * basal) * (1 + np.float32(0.22) * layers.texture)
    layers.added += np.float32(amount) * haze * chest.lungs()
    # Fluid around the vessels blurs and widens them.
    mix = np.float32((0.35, 0.6, 0.85)[grade])
    layers.vessels = (1 - mix) * layers.vessels + mix * np.float32(1.35) * blur(layers.vessels, 2.2)
    if grade:
        layers.added += np.float32(0.04) * _septal_lines(layers, rng)
    region = np.float32(0.8) * wings + np.float32(0.45) * basal
    return [smooth_step(region - np.float32(0.33), 0.02) * chest.lung[side] for side in SIGN]


def _septal_lines(layers: Layers, rng: np.random.Generator) -> Field:
    """Kerley B lines: short horizontal lines at the outer lung bases."""
    chest, lines = layers.chest, []
    for sign in (-1, 1):
        for y in np.arange(0.58, 0.74, 0.022):
            x = sign * (chest.body.chest_width - 0.012)
            lines.append(
                np.array(
                    [(x, y), (x - sign * rng.uniform(0.02, 0.05), y + rng.uniform(-0.004, 0.004))], np.float32
                )
            )
    return chest.frame.strokes(lines, [0.004] * len(lines), [1.0] * len(lines)) * chest.lungs()


def _effusion(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, grade, sign = layers.chest, _GRADES[finding.grade], SIGN[finding.side]
    f = chest.frame
    # The fluid stands highest at the chest wall and falls towards the middle (meniscus); little of it rounds the angle.
    height = np.float32((0.09, 0.175, 0.30)[grade] * rng.uniform(0.8, 1.2))
    angle = np.float32(chest.dome[finding.side] + chest.body.dome_height)
    u = np.clip((chest.lateral - f.side(sign)) / np.float32(0.26), 0, 1.2)
    level = angle - height * (1 - np.float32(0.62 - 0.08 * grade) * u ** np.float32(0.8))
    fluid = smooth_step(f.y - level, (0.014, 0.02, 0.022)[grade])
    # The lung's recess reaches below the dome: fluid hides the diaphragm too.
    cavity = smooth_step(np.minimum(chest.lateral - f.side(sign), f.side(sign) - np.float32(0.04)), 0.005)
    cavity *= smooth_step(angle - f.y, 0.01)
    lung = chest.lung[finding.side]
    mask = fluid * np.maximum(lung, cavity)
    layers.air *= 1 - np.float32((0.85, 0.88, 0.93)[grade]) * mask
    layers.added += (
        np.float32(0.03) * mask * cavity + np.float32(0.025) * bump(f.y - level + 0.02, 0.05) * lung
    )
    # Of little fluid only the rounded angle is seen.
    return [mask * (u < np.float32(0.5))] if grade == 0 else [mask]


def _pneumonia(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f = layers.chest, layers.chest.frame
    x, y = chest.place(finding.side, finding.zone, rng)
    patchy = finding.grade == "patchy"
    radius = rng.uniform(0.075, 0.105) if patchy else rng.uniform(0.09, 0.125)
    shape = f.ellipse(x, y, radius * rng.uniform(0.95, 1.3), radius, rng.uniform(-0.5, 0.5))
    ragged = f.noise(rng, 0.045 if patchy else 0.07)
    cloud = smooth_step(
        1 - np.sqrt(shape) + np.float32(0.30 if patchy else 0.17) * ragged, 0.14 if patchy else 0.10
    )
    cloud *= chest.lung[finding.side]
    amount = np.float32((0.165 if patchy else 0.225) * rng.uniform(0.88, 1.12))
    layers.added += amount * cloud * (1 + np.float32(0.12) * layers.texture)
    # Consolidated lung hides its vessels; the bronchi in it stay filled with air.
    layers.vessels = layers.vessels * (1 - np.float32(0.7) * cloud)
    bronchi = f.strokes(*_bronchi(x, y, SIGN[finding.side], rng))
    layers.added -= np.float32(0.03 if patchy else 0.055) * bronchi * cloud
    return [cloud]


def _bronchi(
    x: float, y: float, sign: int, rng: np.random.Generator
) -> tuple[list[np.ndarray], list[float], list[float]]:
    hilum = np.array([sign * 0.09, 0.44])
    target = np.array([x, y])
    lines = []
    for _ in range(3):
        end = target + rng.normal(0, 0.035, 2)
        middle = (hilum + target) / 2 + rng.normal(0, 0.01, 2)
        lines.append(spline([tuple(hilum), tuple(middle), tuple(end)]))
    return lines, [0.009] * 3, [1.0] * 3


def _pneumothorax(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, grade, sign = layers.chest, _GRADES[finding.grade], SIGN[finding.side]
    f, jitter = chest.frame, rng.uniform(0.85, 1.15)
    drop = np.float32((0.062, 0.10, 0.16)[grade] * jitter)
    gap = np.float32((0.025, 0.06, 0.125)[grade] * jitter)
    reach = (0.40, 0.62, 1.0)[grade]
    # The visceral pleura: the chest wall's contour, lowered and drawn in; the lung clings to the wall below.
    fall_off = smooth_step(np.float32(reach) - f.y, 0.035)
    inner = chest.wall(f.y, float(drop)) - gap * fall_off
    depth = inner - f.side(sign)
    shrunk = smooth_step(depth, 0.0035) * smooth_step(
        f.y - np.float32(chest.body.apex) - drop * fall_off, 0.004
    )
    lung = chest.lung[finding.side]
    space = lung * (1 - shrunk) * fall_off
    line = bump(depth, 0.0065) * smooth_step(f.y - np.float32(chest.body.apex) - drop, 0.01) * fall_off * lung
    layers.vessels = layers.vessels * (1 - space)
    layers.added += np.float32(0.11) * line - np.float32(0.105) * space
    # The collapsed lung holds less air.
    layers.added += np.float32((0.0, 0.015, 0.05)[grade]) * lung * shrunk
    return [np.maximum(space, line)]


def _round(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    """Nodule, mass, granuloma: round, by size and density."""
    low, high, density, edge = {
        "nodule": (0.028, 0.034, 0.25, 0.22),
        "mass": (0.052, 0.068, 0.26, 0.14),
        "granuloma": (0.014, 0.017, 0.48, 0.25),
    }[finding.kind]
    x, y = layers.chest.place(finding.side, finding.zone, rng)
    radius = rng.uniform(low, high)
    r = layers.chest.frame.ellipse(x, y, radius * rng.uniform(0.9, 1.15), radius, rng.uniform(0, 3))
    if finding.kind == "mass":
        r = r * (1 + np.float32(0.16) * layers.texture)
    mask = smooth_step(1 - r, edge)
    layers.added += np.float32(density * rng.uniform(0.9, 1.1)) * mask
    return [mask]


def _cavity(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    x, y = layers.chest.place(finding.side, finding.zone, rng)
    f, radius = layers.chest.frame, rng.uniform(0.048, 0.058)
    r = f.ellipse(x, y, radius * rng.uniform(0.95, 1.15), radius, rng.uniform(0, 3)) * (
        1 + np.float32(0.10) * layers.texture
    )
    outer, hole = smooth_step(1 - r, 0.16), smooth_step(np.float32(0.42) - r, 0.07)
    fluid = smooth_step(f.y - np.float32(y + 0.3 * radius), 0.004)
    layers.added += np.float32(0.25) * outer - np.float32(0.30) * hole * (1 - fluid)
    return [outer]


def _linear_atelectasis(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    x, y = layers.chest.place(finding.side, finding.zone, rng)
    half, slope = rng.uniform(0.06, 0.085), rng.uniform(-0.35, 0.35)
    bow = rng.uniform(-0.012, 0.012)
    points = [(x - half, y - slope * half), (x, y + bow), (x + half, y + slope * half)]
    mask = blur(layers.chest.frame.stroke(points, 0.016), 1.0) * layers.chest.lung[finding.side]
    layers.added += np.float32(0.28) * mask
    return [mask * np.float32(1.4)]


def _bulla(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    x, y = layers.chest.place(finding.side, finding.zone, rng)
    radius = rng.uniform(0.055, 0.07)
    r = layers.chest.frame.ellipse(x, y, radius, radius * rng.uniform(0.9, 1.25), rng.uniform(0, 3))
    inside = smooth_step(1 - r, 0.06)
    rim = bump(np.sqrt(r) - 1, 0.07)
    layers.added += np.float32(0.09) * rim - np.float32(0.13) * inside
    layers.vessels = layers.vessels * (1 - inside)
    return [np.maximum(inside, rim)]


def _reticulation(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f = layers.chest, layers.chest.frame
    x, y = chest.place(finding.side, finding.zone, rng)
    edge = np.float32(0.2) * layers.texture
    region = smooth_step(1 - f.ellipse(x, y, 0.095, 0.10) + edge, 0.2) * chest.lung[finding.side]
    # Contours of two noises make a net of thin walls.
    net = np.maximum(bump(f.noise(rng, 0.018), 0.28), bump(f.noise(rng, 0.026), 0.22))
    layers.added += (np.float32(0.19) * net + np.float32(0.03)) * region
    return [region]


def _ground_glass(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f = layers.chest, layers.chest.frame
    x, y = chest.place(finding.side, finding.zone, rng)
    radius = rng.uniform(0.07, 0.09)
    haze = smooth_step(
        1
        - np.sqrt(f.ellipse(x, y, radius, radius * 1.1, rng.uniform(0, 3)))
        + np.float32(0.1) * layers.texture,
        0.16,
    )
    haze *= chest.lung[finding.side]
    layers.added += np.float32(0.165) * haze
    return [haze]


def _infarct(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f, sign = layers.chest, layers.chest.frame, SIGN[finding.side]
    _, y = chest.place(finding.side, finding.zone, rng)
    depth = np.float32(rng.uniform(0.10, 0.13))
    # A triangle with its base on the chest wall and its tip towards the hilum.
    inward = chest.lateral - f.side(sign)
    half = np.float32(0.062) * np.clip(1 - inward / depth, 0, 1)
    mask = (
        smooth_step(half - np.abs(f.y - np.float32(y)), 0.008)
        * smooth_step(depth - inward, 0.01)
        * chest.lung[finding.side]
    )
    layers.added += np.float32(0.27) * mask
    return [mask]


def _pleural_plaque(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f, sign = layers.chest, layers.chest.frame, SIGN[finding.side]
    _, y = chest.place(finding.side, finding.zone, rng)
    inward = chest.lateral - f.side(sign)
    thick = np.float32(0.022) * np.sqrt(
        np.clip(1 - np.square((f.y - np.float32(y)) / np.float32(0.075)), 0, 1)
    )
    mask = smooth_step(thick - np.abs(inward - np.float32(0.008)), 0.003) * smooth_step(
        thick - np.float32(0.004), 0.001
    )
    layers.added += np.float32(0.30) * mask * (1 + np.float32(0.12) * layers.texture)
    return [mask]


def _apical_cap(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f = layers.chest, layers.chest.frame
    thick = np.float32(rng.uniform(0.035, 0.05))
    inner = smooth_step(chest.wall(f.y, float(thick)) - np.float32(0.008) - f.side(SIGN[finding.side]), 0.006)
    inner *= smooth_step(
        f.y - np.float32(chest.body.apex) - thick * (1 + np.float32(0.15) * layers.texture), 0.005
    )
    mask = (
        chest.lung[finding.side] * (1 - inner) * smooth_step(np.float32(chest.body.apex + 0.13) - f.y, 0.02)
    )
    layers.air *= 1 - np.float32(0.75) * mask
    return [mask]


def _hilar_enlargement(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f, sign = layers.chest, layers.chest.frame, SIGN[finding.side]
    x, y = sign * 0.115 + float(chest.center), (0.45 if sign < 0 else 0.43)
    r = f.ellipse(x, y, rng.uniform(0.05, 0.06), rng.uniform(0.07, 0.085), sign * 0.2) * (
        1 + np.float32(0.16) * layers.texture
    )
    mask = smooth_step(1 - r, 0.16) * chest.lung[finding.side] * (1 - chest.heart)
    layers.added += np.float32(0.25) * mask
    return [mask]


def _collapse(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    """Upper lobe: opaque above a raised fissure. Lower lobe: a triangle behind the heart's border."""
    chest, f, sign = layers.chest, layers.chest.frame, SIGN[finding.side]
    lung = chest.lung[finding.side]
    if finding.zone == "upper":
        edge: Field = (
            np.float32(rng.uniform(0.27, 0.31))
            - np.float32(0.32) * (f.side(sign) - 0.08)
            + np.float32(1.2) * np.square(np.clip(f.side(sign) - 0.08, 0, 1))
        )
        mask = smooth_step(edge - f.y, 0.006) * lung
    else:
        edge = np.float32(0.07) + np.float32(rng.uniform(0.42, 0.5)) * np.clip(f.y - np.float32(0.47), 0, 1)
        mask = smooth_step(edge - f.side(sign), 0.007) * smooth_step(f.y - np.float32(0.47), 0.02) * lung
        mask = np.maximum(mask * (1 - 0.3 * chest.heart), mask * chest.heart * np.float32(0.7))
    layers.air *= 1 - np.float32(0.85) * mask
    layers.added += np.float32(0.03) * mask
    return [mask]


def _fissural_fluid(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    y = rng.uniform(0.47, 0.53)
    r = layers.chest.frame.ellipse(
        -0.2, y, rng.uniform(0.085, 0.10), rng.uniform(0.022, 0.03), rng.uniform(-0.12, 0.12)
    )
    mask = smooth_step(1 - r, 0.14) * layers.chest.lung["right"]
    layers.added += np.float32(0.22) * mask
    return [mask]


def _hiatal_hernia(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f = layers.chest, layers.chest.frame
    x, y = rng.uniform(0.02, 0.06), chest.dome["left"] - rng.uniform(0.05, 0.065)
    wall = smooth_step(1 - f.ellipse(x, y, 0.085, 0.065), 0.1)
    gas = smooth_step(1 - f.ellipse(x, y - 0.005, 0.068, 0.05), 0.1) * smooth_step(
        np.float32(y + 0.012) - f.y, 0.003
    )
    layers.added += np.float32(0.07) * wall - np.float32(0.27) * gas
    return [wall]


def _enlarged_knob(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f = layers.chest, layers.chest.frame
    r = f.ellipse(float(chest.center) + 0.045, 0.30, 0.085, 0.085)
    return [smooth_step(1 - r, 0.1)]


def _tortuous_aorta(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, c = layers.chest, float(layers.chest.center)
    bow = rng.uniform(0.085, 0.105)
    points = [(c + 0.03, 0.29), (c + 0.07, 0.31), (c + bow, 0.42), (c + bow * 0.95, 0.54), (c + 0.045, 0.68)]
    mask = blur(chest.frame.stroke(points, 0.06), 1.0)
    layers.added += np.float32(0.20) * mask * (1 - np.float32(0.45) * chest.heart)
    return [mask]


def _wide_mediastinum(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f = layers.chest, layers.chest.frame
    return [
        chest.heart * smooth_step(np.float32(0.42) - f.y, 0.01) * smooth_step(f.y - np.float32(0.10), 0.01)
    ]


def _paratracheal_mass(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f = layers.chest, layers.chest.frame
    x, y = float(chest.center) - rng.uniform(0.06, 0.072), rng.uniform(0.25, 0.31)
    r = f.ellipse(x, y, 0.05, rng.uniform(0.065, 0.085)) * (1 + np.float32(0.14) * layers.texture)
    mask = smooth_step(1 - r, 0.12)
    layers.added += np.float32(0.24) * mask * (1 - np.float32(0.4) * chest.heart)
    return [mask]


def _miliary(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f = layers.chest, layers.chest.frame
    points = rng.uniform((-0.36, 0.1), (0.36, 0.8), (900, 2)).astype(np.float32)
    lines = [np.array([p, p + np.float32(0.004)], np.float32) for p in points]
    dots = f.strokes(lines, [0.009] * len(lines), [1.0] * len(lines))
    layers.added += (np.float32(0.12) * dots + np.float32(0.03)) * chest.lungs()
    return [chest.lung[side] for side in SIGN]


def _free_air(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f = layers.chest, layers.chest.frame
    thick = np.float32(rng.uniform(0.018, 0.026))
    below = f.y - chest.diaphragm["right"] - np.float32(0.010)
    u = np.clip((f.side(-1) - 0.19) / 0.13, -1, 1)
    mask = smooth_step(thick * np.sqrt(1 - u**2) - np.abs(below - thick), 0.003) * smooth_step(
        1 - np.abs(u), 0.03
    )
    layers.added -= np.float32(0.33) * mask
    return [mask]


def _rib_fracture(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, sign = layers.chest, SIGN[finding.side]
    _, y = chest.place(finding.side, finding.zone, rng)
    wall = float(chest.wall(np.full((1, 1), y, np.float32))[0, 0])
    x = sign * (wall - 0.015)
    # Two ends of a rib out of line, with callus around them.
    ends = [
        np.array([(x - sign * 0.055, y - 0.03), (x - sign * 0.004, y - 0.002)], np.float32),
        np.array([(x + sign * 0.002, y + 0.018), (x + sign * 0.03, y + 0.055)], np.float32),
    ]
    bone = blur(chest.frame.strokes(ends, [0.019, 0.019], [1.0, 1.0]), 1.0)
    callus = bump(np.sqrt(chest.frame.ellipse(x, y + 0.006, 0.028, 0.028)), 1.0)
    layers.added += np.float32(0.19) * np.maximum(bone, callus * np.float32(0.8))
    return [np.maximum(bone, callus)]


def _clavicle_fracture(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, sign = layers.chest, SIGN[finding.side]
    x, y = sign * 0.2, chest.body.clavicle + sign * chest.body.rotation - 0.05
    ends = [
        np.array([(x - sign * 0.07, y + 0.035), (x + sign * 0.012, y - 0.028)], np.float32),
        np.array([(x - sign * 0.006, y + 0.028), (x + sign * 0.09, y + 0.002)], np.float32),
    ]
    bone = blur(chest.frame.strokes(ends, [0.027, 0.027], [1.0, 1.0]), 1.0)
    layers.added += np.float32(0.16) * bone
    return [bone]


def _subcutaneous_air(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f, sign = layers.chest, layers.chest.frame, SIGN[finding.side]
    band = smooth_step(np.float32(0.035) - np.abs(f.side(sign) - chest.lateral - np.float32(0.045)), 0.006)
    band *= smooth_step(f.y - np.float32(0.2), 0.02) * smooth_step(np.float32(0.72) - f.y, 0.02)
    lines = []
    for y in rng.uniform(0.2, 0.70, 46):
        x = sign * (chest.body.chest_width + rng.uniform(0.012, 0.078))
        slant = rng.normal(0, 0.012)
        lines.append(np.array([(x, y), (x + slant, y + 0.03), (x + slant * 0.5, y + 0.06)], np.float32))
    widths = rng.uniform(0.005, 0.013, len(lines)).tolist()
    streaks = blur(f.strokes(lines, widths, [1.0] * len(lines)), 0.6)
    layers.added -= np.float32(0.22) * streaks * np.clip(band + np.float32(0.3), 0, 1)
    return [band]


def _clips(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    x, y = layers.chest.place(finding.side, finding.zone, rng)
    lines = []
    for k in range(5):
        x0, y0, angle = x + (k - 2) * 0.017, y + rng.uniform(-0.014, 0.014), rng.uniform(0, np.pi)
        end = (x0 + 0.016 * np.cos(angle), y0 + 0.016 * np.sin(angle))
        lines.append(np.array([(x0, y0), end], np.float32))
    drawn = layers.chest.frame.strokes(lines, [0.006] * 5, [1.0] * 5)
    layers.metal = np.maximum(layers.metal, drawn)
    return [drawn]


def _shoulder_prosthesis(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    sign, f = SIGN[finding.side], layers.chest.frame
    head = smooth_step(1 - f.ellipse(sign * 0.455, 0.12, 0.06, 0.06), 0.05) * smooth_step(
        f.side(sign) - f.y - 0.29, 0.01
    )
    stem = f.stroke([(sign * 0.46, 0.12), (sign * 0.50, 0.22), (sign * 0.53, 0.36)], 0.03)
    mask = np.maximum(head, stem)
    layers.metal = np.maximum(layers.metal, mask * np.float32(0.95))
    return [mask]


def _tube(
    layers: Layers, points: list[tuple[float, float]], width: float, density: float, stripe: bool = False
) -> Field:
    mask = layers.chest.frame.stroke(points, width)
    layers.added += np.float32(density) * mask
    if stripe:
        layers.added += np.float32(0.9 * density) * layers.chest.frame.stroke(points, width * 0.3)
    return mask


def _picc(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    s, c, y = SIGN[finding.side], float(layers.chest.center), layers.chest.body.clavicle
    points = [
        (s * 0.50, 0.36),
        (s * 0.44, 0.22),
        (s * 0.33, y + 0.02),
        (s * 0.2, y + 0.045 + rng.uniform(-0.01, 0.01)),
    ]
    points += [(s * 0.08, y + 0.075), (c - 0.03, 0.31), (c - 0.048, rng.uniform(0.42, 0.48))]
    return [_tube(layers, points, 0.008, 0.20)]


def _jugular_line(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    s, c = SIGN[finding.side], float(layers.chest.center)
    points = [
        (s * 0.10, -0.12),
        (s * 0.085, 0.02),
        (s * 0.06, 0.16),
        (c - 0.03 if s > 0 else c - 0.055, 0.28),
    ]
    points += [(c - 0.05, rng.uniform(0.40, 0.47))]
    return [_tube(layers, points, 0.010, 0.21)]


def _port(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    s, c, y = SIGN[finding.side], float(layers.chest.center), layers.chest.body.clavicle
    x0, y0 = s * rng.uniform(0.25, 0.29), y + rng.uniform(0.10, 0.13)
    reservoir = smooth_step(1 - layers.chest.frame.ellipse(x0, y0, 0.026, 0.026), 0.1)
    ring = bump(np.sqrt(layers.chest.frame.ellipse(x0, y0, 0.026, 0.026)) - 1, 0.18)
    layers.metal = np.maximum(layers.metal, np.maximum(np.float32(0.45) * reservoir, np.float32(0.9) * ring))
    points = [
        (x0, y0 - 0.02),
        (s * 0.24, y + 0.03),
        (s * 0.15, y + 0.035),
        (s * 0.07, y + 0.08),
        (c - 0.035, 0.32),
    ]
    return [np.maximum(reservoir, _tube(layers, [*points, (c - 0.05, rng.uniform(0.42, 0.47))], 0.008, 0.19))]


def _pacemaker(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, s, c = layers.chest, SIGN[finding.side], float(layers.chest.center)
    f, y = chest.frame, chest.body.clavicle
    x0, y0 = s * rng.uniform(0.27, 0.31), y + rng.uniform(0.075, 0.11)
    r = np.square(np.square((f.x - np.float32(x0)) / np.float32(0.055))) + np.square(
        np.square((f.y - np.float32(y0)) / np.float32(0.045))
    )
    case = smooth_step(1 - r, 0.12)
    layers.metal = np.maximum(layers.metal, np.float32(0.92) * case)
    bottom = chest.dome["left"]
    start = [
        (x0 - s * 0.04, y0 - 0.03),
        (s * 0.17, y + 0.03),
        (s * 0.08, y + 0.065),
        (c - 0.04, 0.31),
        (c - 0.055, 0.46),
    ]
    leads = [[*start, (c - 0.03, bottom - 0.06), (c + 0.06, bottom - 0.035), (c + 0.13, bottom - 0.05)]]
    if finding.kind == "pacemaker_dual":
        leads.append([*start[:-1], (c - 0.062, 0.45), (c - 0.055, bottom - 0.20), (c - 0.03, bottom - 0.235)])
    lines = [spline(lead) for lead in leads]
    drawn = f.strokes(lines, [0.009] * len(lines), [1.0] * len(lines))
    layers.added += np.float32(0.26) * drawn
    return [np.maximum(case, drawn)]


def _chest_tube(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    s = SIGN[finding.side]
    points = [
        (s * 0.48, 0.66),
        (s * 0.36, rng.uniform(0.56, 0.62)),
        (s * 0.28, 0.42),
        (s * 0.20, 0.24),
        (s * 0.15, 0.16),
    ]
    return [_tube(layers, points, 0.020, 0.09, stripe=True)]


def _pigtail(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    s, y = SIGN[finding.side], layers.chest.dome[finding.side] - 0.04
    x = s * rng.uniform(0.24, 0.29)
    turn = np.linspace(0, 1.7 * np.pi, 9)
    loop = [(x + s * 0.026 * float(np.sin(t)), y + 0.026 * float(np.cos(t))) for t in turn]
    return [_tube(layers, [(s * 0.48, y + 0.05), (s * 0.40, y + 0.04), *loop], 0.011, 0.22)]


def _endotracheal_tube(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    c = float(layers.chest.center)
    points = [(c * 0.6 + 0.004, -0.2), (c * 0.7 + 0.003, 0.08)]
    if finding.kind == "endotracheal_tube_low":
        points += [(c - 0.008, 0.33), (c - 0.035, 0.395), (c - 0.06, 0.43)]
    else:
        points += [(c - 0.002, rng.uniform(0.25, 0.31))]
    return [_tube(layers, points, 0.021, 0.07, stripe=True)]


def _tracheostomy(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    c = float(layers.chest.center)
    flange = layers.chest.frame.stroke([(c - 0.06, 0.0), (c, 0.015), (c + 0.06, 0.0)], 0.02)
    layers.added += np.float32(0.12) * flange
    tube = _tube(
        layers,
        [(c + 0.012, 0.01), (c + 0.01, 0.07), (c - 0.003, 0.16), (c - 0.004, 0.22)],
        0.026,
        0.17,
        stripe=True,
    )
    return [np.maximum(flange, tube)]


def _enteric_tube(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    c, dome = float(layers.chest.center), layers.chest.dome["left"]
    points = [(c + 0.012, -0.2), (c + 0.014, 0.2), (c + 0.006, 0.42), (c + 0.018, dome - 0.14)]
    if finding.kind == "enteric_tube":
        points += [
            (c + 0.05, dome + 0.0),
            (c + 0.12, dome + 0.07),
            (c + 0.10, dome + 0.14),
            (c + 0.03, dome + 0.16),
        ]
    return [_tube(layers, points, 0.010, 0.20)]


def _sternotomy_wires(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    c, lines = float(layers.chest.center), []
    for k in range(6):
        y, w = 0.24 + 0.075 * k, rng.uniform(0.015, 0.021)
        x = c + rng.normal(0, 0.004)
        turn = np.linspace(0, 2 * np.pi, 10)
        lines.append(np.stack([x + w * np.cos(turn), y + 0.45 * w * np.sin(turn)], 1).astype(np.float32))
        lines.append(np.array([(x + w, y), (x + w + 0.008, y + 0.008)], np.float32))
    drawn = layers.chest.frame.strokes(lines, [0.0055] * len(lines), [1.0] * len(lines))
    layers.metal = np.maximum(layers.metal, drawn)
    return [drawn]


def _valve_prosthesis(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f = layers.chest, layers.chest.frame
    x, y = float(chest.center) + 0.05, chest.dome["left"] - rng.uniform(0.13, 0.16)
    ring = bump(np.sqrt(f.ellipse(x, y, 0.034, 0.022, 0.6)) - 1, 0.16)
    layers.metal = np.maximum(layers.metal, np.float32(0.9) * ring)
    return [ring]


def _pulmonary_artery_catheter(
    layers: Layers, finding: FindingClass, rng: np.random.Generator
) -> list[Field]:
    c, dome = float(layers.chest.center), layers.chest.dome["left"]
    points = [
        (-0.10, -0.12),
        (-0.075, 0.06),
        (c - 0.055, 0.28),
        (c - 0.06, 0.50),
        (c - 0.02, dome - 0.09),
        (c + 0.05, dome - 0.11),
    ]
    points += [(c + 0.055, 0.50), (c + 0.03, 0.425), (c - 0.05, 0.42), (c - 0.10, 0.44)]
    return [_tube(layers, points, 0.009, 0.21)]


def _spinal_hardware(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    c, lines, widths = float(layers.chest.center) * 0.5, [], []
    top, bottom = rng.uniform(0.3, 0.4), rng.uniform(0.72, 0.85)
    for s in (-1, 1):
        lines.append(np.array([(c + s * 0.026, top), (c + s * 0.026, bottom)], np.float32))
        widths.append(0.009)
        for y in np.arange(top, bottom, 0.062):
            lines.append(np.array([(c + s * 0.026, y), (c + s * 0.010, y + 0.006)], np.float32))
            widths.append(0.012)
    drawn = layers.chest.frame.strokes(lines, widths, [1.0] * len(lines))
    layers.metal = np.maximum(layers.metal, np.float32(0.85) * drawn)
    return [drawn]


def _aortic_calcification(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, c = layers.chest, float(layers.chest.center)
    x = c + chest.body.mediastinum + chest.body.knob - 0.012
    points = [(x - 0.035, 0.272), (x - 0.012, 0.275), (x, 0.295), (x - 0.006, 0.318)]
    mask = chest.frame.stroke(points, 0.010)
    layers.added += np.float32(0.30) * mask
    return [mask]


def _contour(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    """Findings that are in the contours already; what is left is where they are."""
    chest, f = layers.chest, layers.chest.frame
    if finding.kind == "cardiomegaly":
        top = np.float32(chest.dome["left"] + 0.02 - 0.33)
        return [
            chest.heart
            * smooth_step(f.y - top, 0.01)
            * smooth_step(np.float32(chest.dome["left"] + 0.03) - f.y, 0.01)
        ]
    if finding.kind == "elevated_diaphragm":
        sign, dome = SIGN[finding.side], chest.dome[finding.side]
        inside = smooth_step(np.minimum(chest.lateral - f.side(sign), f.side(sign) - np.float32(0.05)), 0.005)
        return [inside * smooth_step(np.float32(0.075) - np.abs(f.y - np.float32(dome + 0.06)), 0.005)]
    # Scoliosis.
    return [
        smooth_step(np.float32(0.05) - np.abs(f.x - chest.spine), 0.006)
        * smooth_step(f.y - 0.1, 0.02)
        * smooth_step(0.85 - f.y, 0.02)
    ]


Draw = Callable[[Layers, FindingClass, np.random.Generator], list[Field]]

DRAW: dict[str, Draw] = {
    "cardiomegaly": _contour,
    "elevated_diaphragm": _contour,
    "scoliosis_right": _contour,
    "scoliosis_left": _contour,
    "edema": _edema,
    "effusion": _effusion,
    "pneumonia": _pneumonia,
    "pneumothorax": _pneumothorax,
    "nodule": _round,
    "mass": _round,
    "granuloma": _round,
    "cavity": _cavity,
    "linear_atelectasis": _linear_atelectasis,
    "bulla": _bulla,
    "reticulation": _reticulation,
    "ground_glass": _ground_glass,
    "infarct": _infarct,
    "pleural_plaque": _pleural_plaque,
    "apical_cap": _apical_cap,
    "hilar_enlargement": _hilar_enlargement,
    "collapse": _collapse,
    "fissural_fluid": _fissural_fluid,
    "hiatal_hernia": _hiatal_hernia,
    "enlarged_knob": _enlarged_knob,
    "tortuous_aorta": _tortuous_aorta,
    "wide_mediastinum": _wide_mediastinum,
    "paratracheal_mass": _paratracheal_mass,
    "miliary": _miliary,
    "aortic_calcification": _aortic_calcification,
    "free_air": _free_air,
    "rib_fracture": _rib_fracture,
    "clavicle_fracture": _clavicle_fracture,
    "emphysema_subcutaneous": _subcutaneous_air,
    "clips": _clips,
    "shoulder_prosthesis": _shoulder_prosthesis,
    "picc": _picc,
    "jugular_line": _jugular_line,
    "port": _port,
    "pacemaker_single": _pacemaker,
    "pacemaker_dual": _pacemaker,
    "chest_tube": _chest_tube,
    "pigtail": _pigtail,
    "endotracheal_tube": _endotracheal_tube,
    "endotracheal_tube_low": _endotracheal_tube,
    "tracheostomy": _tracheostomy,
    "enteric_tube": _enteric_tube,
    "enteric_tube_high": _enteric_tube,
    "sternotomy_wires": _sternotomy_wires,
    "valve_prosthesis": _valve_prosthesis,
    "pulmonary_artery_catheter": _pulmonary_artery_catheter,
    "spinal_hardware": _spinal_hardware,
}
"""Kind of finding -> what it does; contours first, devices last."""

ORDER = {kind: number for number, kind in enumerate(DRAW)}
