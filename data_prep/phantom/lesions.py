"""Findings of lungs, pleura, mediastinum and bones: one drawing function per kind.

A finding takes its random numbers from a stream of its own, so that the rest of the image is the same with and without
it, and its place is the same in every image of the study.
"""

from __future__ import annotations

import numpy as np

from data_prep.phantom.anatomy import SIGN, Layers
from data_prep.phantom.devices import DRAW_DEVICES, Draw
from data_prep.phantom.findings import FindingClass
from data_prep.phantom.geometry import Field, blur, bump, smooth_step, spline

_GRADES = {"mild": 0, "small": 0, "patchy": 0, "moderate": 1, "dense": 1, "severe": 2, "large": 2}


def _edema(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, grade = layers.chest, _GRADES[finding.grade]
    f, amount = chest.frame, (0.08, 0.135, 0.20)[grade] * rng.uniform(0.85, 1.15)
    wings = bump(np.sqrt(np.square((f.d - 0.15) / 1.05) + np.square((f.y - 0.50) * 0.72)), 0.125)
    basal = np.clip((f.y - 0.42) * 1.6, 0, 1)
    haze = (0.8 * wings + 0.45 * basal) * (1 + 0.22 * layers.texture)
    layers.added += np.float32(amount) * haze * chest.lungs()
    # Fluid around the vessels blurs and widens them.
    mix = np.float32((0.35, 0.6, 0.85)[grade])
    layers.vessels = (1 - mix) * layers.vessels + mix * 1.35 * blur(layers.vessels, 2.2)
    if grade:
        layers.added += 0.04 * _septal_lines(layers, rng)
    region = 0.8 * wings + 0.45 * basal
    return [smooth_step(region - 0.33, 0.02) * chest.lung[side] for side in SIGN]


def _septal_lines(layers: Layers, rng: np.random.Generator) -> Field:
    """Kerley B lines: short horizontal lines at the outer lung bases."""
    chest, lines = layers.chest, []
    for sign in (-1, 1):
        for y in np.arange(0.58, 0.74, 0.022):
            x = sign * (chest.body.chest_width - 0.012)
            lines.append([(x, y), (x - sign * rng.uniform(0.02, 0.05), y + rng.uniform(-0.004, 0.004))])
    return chest.frame.strokes(lines, 0.004) * chest.lungs()


def _effusion(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, grade, sign = layers.chest, _GRADES[finding.grade], SIGN[finding.side]
    f = chest.frame
    # The fluid stands highest at the chest wall and falls towards the middle (meniscus); little of it rounds the angle.
    height = np.float32((0.09, 0.175, 0.30)[grade] * rng.uniform(0.8, 1.2))
    angle = np.float32(chest.dome[finding.side] + chest.body.dome_height)
    u = np.clip((chest.lateral - f.side(sign)) / 0.26, 0, 1.2)
    level = angle - height * (1 - np.float32(0.62 - 0.08 * grade) * u**0.8)
    fluid = smooth_step(f.y - level, (0.014, 0.02, 0.022)[grade])
    # The lung's recess reaches below the dome: fluid hides the diaphragm too.
    cavity = smooth_step(np.minimum(chest.lateral - f.side(sign), f.side(sign) - 0.04), 0.005)
    cavity *= smooth_step(angle - f.y, 0.01)
    lung = chest.lung[finding.side]
    mask = fluid * np.maximum(lung, cavity)
    layers.air *= 1 - np.float32((0.85, 0.88, 0.93)[grade]) * mask
    layers.added += 0.03 * mask * cavity + 0.025 * bump(f.y - level + 0.02, 0.05) * lung
    # Of little fluid only the rounded angle is seen.
    return [mask * (u < 0.5)] if grade == 0 else [mask]


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
    layers.added += amount * cloud * (1 + 0.12 * layers.texture)
    # Consolidated lung hides its vessels; the bronchi in it stay filled with air.
    layers.vessels = layers.vessels * (1 - 0.7 * cloud)
    bronchi = f.strokes(_bronchi(x, y, SIGN[finding.side], rng), 0.009)
    layers.added -= np.float32(0.03 if patchy else 0.055) * bronchi * cloud
    return [cloud]


def _bronchi(x: float, y: float, sign: int, rng: np.random.Generator) -> list[np.ndarray]:
    hilum = np.array([sign * 0.09, 0.44])
    target = np.array([x, y])
    lines = []
    for _ in range(3):
        end = target + rng.normal(0, 0.035, 2)
        middle = (hilum + target) / 2 + rng.normal(0, 0.01, 2)
        lines.append(spline([tuple(hilum), tuple(middle), tuple(end)]))
    return lines


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
    layers.added += 0.11 * line - 0.105 * space
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
        r = r * (1 + 0.16 * layers.texture)
    mask = smooth_step(1 - r, edge)
    layers.added += np.float32(density * rng.uniform(0.9, 1.1)) * mask
    return [mask]


def _cavity(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    x, y = layers.chest.place(finding.side, finding.zone, rng)
    f, radius = layers.chest.frame, rng.uniform(0.048, 0.058)
    r = f.ellipse(x, y, radius * rng.uniform(0.95, 1.15), radius, rng.uniform(0, 3))
    r *= 1 + 0.10 * layers.texture
    outer, hole = smooth_step(1 - r, 0.16), smooth_step(0.42 - r, 0.07)
    fluid = smooth_step(f.y - np.float32(y + 0.3 * radius), 0.004)
    layers.added += 0.25 * outer - 0.30 * hole * (1 - fluid)
    return [outer]


def _linear_atelectasis(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    x, y = layers.chest.place(finding.side, finding.zone, rng)
    half, slope = rng.uniform(0.06, 0.085), rng.uniform(-0.35, 0.35)
    bow = rng.uniform(-0.012, 0.012)
    points = [(x - half, y - slope * half), (x, y + bow), (x + half, y + slope * half)]
    mask = blur(layers.chest.frame.stroke(points, 0.016), 1.0) * layers.chest.lung[finding.side]
    layers.added += 0.28 * mask
    return [mask * 1.4]


def _bulla(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    x, y = layers.chest.place(finding.side, finding.zone, rng)
    radius = rng.uniform(0.055, 0.07)
    r = layers.chest.frame.ellipse(x, y, radius, radius * rng.uniform(0.9, 1.25), rng.uniform(0, 3))
    inside = smooth_step(1 - r, 0.06)
    rim = bump(np.sqrt(r) - 1, 0.07)
    layers.added += 0.09 * rim - 0.13 * inside
    layers.vessels = layers.vessels * (1 - inside)
    return [np.maximum(inside, rim)]


def _reticulation(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f = layers.chest, layers.chest.frame
    x, y = chest.place(finding.side, finding.zone, rng)
    edge = 0.2 * layers.texture
    region = smooth_step(1 - f.ellipse(x, y, 0.095, 0.10) + edge, 0.2) * chest.lung[finding.side]
    # Contours of two noises make a net of thin walls.
    net = np.maximum(bump(f.noise(rng, 0.018), 0.28), bump(f.noise(rng, 0.026), 0.22))
    layers.added += (0.19 * net + 0.03) * region
    return [region]


def _ground_glass(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f = layers.chest, layers.chest.frame
    x, y = chest.place(finding.side, finding.zone, rng)
    radius = rng.uniform(0.07, 0.09)
    r = np.sqrt(f.ellipse(x, y, radius, radius * 1.1, rng.uniform(0, 3)))
    haze = smooth_step(1 - r + 0.1 * layers.texture, 0.16) * chest.lung[finding.side]
    layers.added += 0.165 * haze
    return [haze]


def _infarct(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f, sign = layers.chest, layers.chest.frame, SIGN[finding.side]
    _, y = chest.place(finding.side, finding.zone, rng)
    depth = np.float32(rng.uniform(0.10, 0.13))
    # A triangle with its base on the chest wall and its tip towards the hilum.
    inward = chest.lateral - f.side(sign)
    half = 0.062 * np.clip(1 - inward / depth, 0, 1)
    mask = smooth_step(half - np.abs(f.y - np.float32(y)), 0.008) * smooth_step(depth - inward, 0.01)
    mask *= chest.lung[finding.side]
    layers.added += 0.27 * mask
    return [mask]


def _pleural_plaque(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f, sign = layers.chest, layers.chest.frame, SIGN[finding.side]
    _, y = chest.place(finding.side, finding.zone, rng)
    inward = chest.lateral - f.side(sign)
    thick = 0.022 * np.sqrt(np.clip(1 - np.square((f.y - np.float32(y)) / 0.075), 0, 1))
    mask = smooth_step(thick - np.abs(inward - 0.008), 0.003) * smooth_step(thick - 0.004, 0.001)
    layers.added += 0.30 * mask * (1 + 0.12 * layers.texture)
    return [mask]


def _apical_cap(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f = layers.chest, layers.chest.frame
    thick = np.float32(rng.uniform(0.035, 0.05))
    inner = smooth_step(chest.wall(f.y, float(thick)) - 0.008 - f.side(SIGN[finding.side]), 0.006)
    inner *= smooth_step(f.y - np.float32(chest.body.apex) - thick * (1 + 0.15 * layers.texture), 0.005)
    mask = chest.lung[finding.side] * (1 - inner)
    mask *= smooth_step(np.float32(chest.body.apex + 0.13) - f.y, 0.02)
    layers.air *= 1 - 0.75 * mask
    return [mask]


def _hilar_enlargement(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f, sign = layers.chest, layers.chest.frame, SIGN[finding.side]
    x, y = sign * 0.115 + float(chest.center), (0.45 if sign < 0 else 0.43)
    r = f.ellipse(x, y, rng.uniform(0.05, 0.06), rng.uniform(0.07, 0.085), sign * 0.2)
    r *= 1 + 0.16 * layers.texture
    mask = smooth_step(1 - r, 0.16) * chest.lung[finding.side] * (1 - chest.heart)
    layers.added += 0.25 * mask
    return [mask]


def _collapse(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    """Upper lobe: opaque above a raised fissure. Lower lobe: a triangle behind the heart's border."""
    chest, f, sign = layers.chest, layers.chest.frame, SIGN[finding.side]
    lung = chest.lung[finding.side]
    if finding.zone == "upper":
        outwards = f.side(sign) - 0.08
        edge: Field = np.float32(rng.uniform(0.27, 0.31)) - 0.32 * outwards
        edge += 1.2 * np.square(np.clip(outwards, 0, 1))
        mask = smooth_step(edge - f.y, 0.006) * lung
    else:
        edge = 0.07 + np.float32(rng.uniform(0.42, 0.5)) * np.clip(f.y - 0.47, 0, 1)
        mask = smooth_step(edge - f.side(sign), 0.007) * smooth_step(f.y - 0.47, 0.02) * lung
        mask = np.maximum(mask * (1 - 0.3 * chest.heart), mask * chest.heart * 0.7)
    layers.air *= 1 - 0.85 * mask
    layers.added += 0.03 * mask
    return [mask]


def _fissural_fluid(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    y = rng.uniform(0.47, 0.53)
    radii = rng.uniform(0.085, 0.10), rng.uniform(0.022, 0.03)
    r = layers.chest.frame.ellipse(-0.2, y, *radii, rng.uniform(-0.12, 0.12))
    mask = smooth_step(1 - r, 0.14) * layers.chest.lung["right"]
    layers.added += 0.22 * mask
    return [mask]


def _hiatal_hernia(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f = layers.chest, layers.chest.frame
    x, y = rng.uniform(0.02, 0.06), chest.dome["left"] - rng.uniform(0.05, 0.065)
    wall = smooth_step(1 - f.ellipse(x, y, 0.085, 0.065), 0.1)
    gas = smooth_step(1 - f.ellipse(x, y - 0.005, 0.068, 0.05), 0.1)
    gas *= smooth_step(np.float32(y + 0.012) - f.y, 0.003)
    layers.added += 0.07 * wall - 0.27 * gas
    return [wall]


def _tortuous_aorta(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, c = layers.chest, float(layers.chest.center)
    bow = rng.uniform(0.085, 0.105)
    points = [(c + 0.03, 0.29), (c + 0.07, 0.31), (c + bow, 0.42), (c + bow * 0.95, 0.54), (c + 0.045, 0.68)]
    mask = blur(chest.frame.stroke(points, 0.06), 1.0)
    layers.added += 0.20 * mask * (1 - 0.45 * chest.heart)
    return [mask]


def _paratracheal_mass(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f = layers.chest, layers.chest.frame
    x, y = float(chest.center) - rng.uniform(0.06, 0.072), rng.uniform(0.25, 0.31)
    r = f.ellipse(x, y, 0.05, rng.uniform(0.065, 0.085)) * (1 + 0.14 * layers.texture)
    mask = smooth_step(1 - r, 0.12)
    layers.added += 0.24 * mask * (1 - 0.4 * chest.heart)
    return [mask]


def _miliary(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f = layers.chest, layers.chest.frame
    points = rng.uniform((-0.36, 0.1), (0.36, 0.8), (900, 2)).astype(np.float32)
    lines = [np.array([p, p + 0.004], np.float32) for p in points]
    dots = f.strokes(lines, 0.009)
    layers.added += (0.12 * dots + 0.03) * chest.lungs()
    return [chest.lung[side] for side in SIGN]


def _free_air(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f = layers.chest, layers.chest.frame
    thick = np.float32(rng.uniform(0.018, 0.026))
    below = f.y - chest.diaphragm["right"] - 0.010
    u = np.clip((f.side(-1) - 0.19) / 0.13, -1, 1)
    mask = smooth_step(thick * np.sqrt(1 - u**2) - np.abs(below - thick), 0.003)
    mask *= smooth_step(1 - np.abs(u), 0.03)
    layers.added -= 0.33 * mask
    return [mask]


def _rib_fracture(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, sign = layers.chest, SIGN[finding.side]
    _, y = chest.place(finding.side, finding.zone, rng)
    wall = float(chest.wall(np.full((1, 1), y, np.float32))[0, 0])
    x = sign * (wall - 0.015)
    # Two ends of a rib out of line, with callus around them.
    ends = [
        [(x - sign * 0.055, y - 0.03), (x - sign * 0.004, y - 0.002)],
        [(x + sign * 0.002, y + 0.018), (x + sign * 0.03, y + 0.055)],
    ]
    bone = blur(chest.frame.strokes(ends, 0.019), 1.0)
    callus = bump(np.sqrt(chest.frame.ellipse(x, y + 0.006, 0.028, 0.028)), 1.0)
    layers.added += 0.19 * np.maximum(bone, callus * 0.8)
    return [np.maximum(bone, callus)]


def _clavicle_fracture(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, sign = layers.chest, SIGN[finding.side]
    x, y = sign * 0.2, chest.body.clavicle + sign * chest.body.rotation - 0.05
    ends = [
        [(x - sign * 0.07, y + 0.035), (x + sign * 0.012, y - 0.028)],
        [(x - sign * 0.006, y + 0.028), (x + sign * 0.09, y + 0.002)],
    ]
    bone = blur(chest.frame.strokes(ends, 0.027), 1.0)
    layers.added += 0.16 * bone
    return [bone]


def _subcutaneous_air(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f, sign = layers.chest, layers.chest.frame, SIGN[finding.side]
    band = smooth_step(0.035 - np.abs(f.side(sign) - chest.lateral - 0.045), 0.006)
    band *= smooth_step(f.y - 0.2, 0.02) * smooth_step(0.72 - f.y, 0.02)
    lines = []
    for y in rng.uniform(0.2, 0.70, 46):
        x = sign * (chest.body.chest_width + rng.uniform(0.012, 0.078))
        slant = rng.normal(0, 0.012)
        lines.append([(x, y), (x + slant, y + 0.03), (x + slant * 0.5, y + 0.06)])
    widths = rng.uniform(0.005, 0.013, len(lines)).tolist()
    streaks = blur(f.strokes(lines, widths), 0.6)
    layers.added -= 0.22 * streaks * np.clip(band + 0.3, 0, 1)
    return [band]


def _aortic_calcification(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, c = layers.chest, float(layers.chest.center)
    x = c + chest.body.mediastinum + chest.body.knob - 0.012
    points = [(x - 0.035, 0.272), (x - 0.012, 0.275), (x, 0.295), (x - 0.006, 0.318)]
    mask = chest.frame.stroke(points, 0.010)
    layers.added += 0.30 * mask
    return [mask]


def _contour(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    """Findings that are in the contours already; what is left is where they are."""
    chest, f = layers.chest, layers.chest.frame
    if finding.kind == "cardiomegaly":
        top = np.float32(chest.dome["left"] + 0.02 - 0.33)
        low = smooth_step(np.float32(chest.dome["left"] + 0.03) - f.y, 0.01)
        return [chest.heart * smooth_step(f.y - top, 0.01) * low]
    if finding.kind == "elevated_diaphragm":
        sign, dome = SIGN[finding.side], chest.dome[finding.side]
        inside = smooth_step(np.minimum(chest.lateral - f.side(sign), f.side(sign) - 0.05), 0.005)
        return [inside * smooth_step(0.075 - np.abs(f.y - np.float32(dome + 0.06)), 0.005)]
    if finding.kind == "enlarged_knob":
        return [smooth_step(1 - f.ellipse(float(chest.center) + 0.045, 0.30, 0.085, 0.085), 0.1)]
    if finding.kind == "wide_mediastinum":
        return [chest.heart * smooth_step(0.42 - f.y, 0.01) * smooth_step(f.y - 0.10, 0.01)]
    # Scoliosis.
    column = smooth_step(0.05 - np.abs(f.x - chest.spine), 0.006)
    return [column * smooth_step(f.y - 0.1, 0.02) * smooth_step(0.85 - f.y, 0.02)]


_OF_CONTOURS = (
    *("cardiomegaly", "elevated_diaphragm", "scoliosis_right", "scoliosis_left", "enlarged_knob"),
    "wide_mediastinum",
)
DRAW: dict[str, Draw] = {
    **dict.fromkeys(_OF_CONTOURS, _contour),
    "edema": _edema,
    "effusion": _effusion,
    "pneumonia": _pneumonia,
    "pneumothorax": _pneumothorax,
    **dict.fromkeys(("nodule", "mass", "granuloma"), _round),
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
    "tortuous_aorta": _tortuous_aorta,
    "paratracheal_mass": _paratracheal_mass,
    "miliary": _miliary,
    "aortic_calcification": _aortic_calcification,
    "free_air": _free_air,
    "rib_fracture": _rib_fracture,
    "clavicle_fracture": _clavicle_fracture,
    "emphysema_subcutaneous": _subcutaneous_air,
    **DRAW_DEVICES,
}
"""Functions by kind of finding, in the order in which they draw: contours first, devices last."""

ORDER = {kind: number for number, kind in enumerate(DRAW)}
