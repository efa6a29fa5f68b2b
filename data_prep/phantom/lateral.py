"""Lateral images of the phantom: the patient looks to the left, the spine is on the right.

No label or box refers to them; releases have them, and preparation must leave them out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_prep.phantom.anatomy import vessels
from data_prep.phantom.findings import FindingClass
from data_prep.phantom.geometry import Field, Frame, blur, bump, smooth_step

_HEIGHT = {"upper": 0.25, "mid": 0.47, "lower": 0.68, "": 0.5}
_GRADE = {
    "mild": 0.4,
    "small": 0.4,
    "patchy": 0.6,
    "moderate": 0.7,
    **dict.fromkeys(("dense", "severe", "large"), 1.0),
}
_BLOBS = {"pneumonia": (0.10, 0.16), "mass": (0.06, 0.20), "nodule": (0.027, 0.18), "granuloma": (0.014, 0.4)}


def lateral_density(
    frame: Frame, findings: Sequence[FindingClass], rng: np.random.Generator, low_volumes: bool
) -> tuple[Field, Field]:
    """Density of a lateral image, whose x grows towards the back, and the share of each pixel that metal covers."""
    f = frame
    front = np.float32(-0.30 + 0.01 * rng.standard_normal()) + 0.16 * bump(f.y - -0.02, 0.22)
    back = np.float32(0.29 + 0.01 * rng.standard_normal()) - 0.15 * bump(f.y - -0.05, 0.25)
    back = back + 0.02 * np.sin((f.y - 0.1) * 4)
    skin_front = front - np.float32(0.05 + 0.05 * rng.random()) - 0.03 * smooth_step(f.y - 0.5, 0.08)
    outline = smooth_step(np.minimum(f.x - skin_front, back + 0.11 - f.x), 0.006)
    arm = smooth_step(0.09 - np.abs(f.x + 0.10 + f.y * 1.1), 0.01) * smooth_step(0.14 - f.y, 0.03)
    outline = np.maximum(outline, arm)

    raised = np.float32(0.05 if low_volumes else 0.0)
    domes = []
    for k in range(2):
        floor = np.float32(0.745 + 0.022 * k + 0.008 * rng.standard_normal()) - raised
        u = f.x + 0.06
        domes.append(floor + 0.55 * u**2 + 1.6 * np.clip(u, 0, 1) ** 3)
    inside = smooth_step(np.minimum(f.x - front, back - f.x), 0.005) * smooth_step(f.y - 0.05, 0.02)
    upper = smooth_step(domes[0] - f.y, 0.005)
    lower = smooth_step(domes[1] - f.y, 0.005)
    lung = inside * (0.55 * upper + 0.45 * lower)

    growth = max((1.12 + 0.3 * _GRADE[x.grade] for x in findings if x.kind == "cardiomegaly"), default=1.0)
    # Sharp behind, where lung meets it; in front it lies against the sternum, below on the diaphragm.
    r = f.ellipse(-0.135, 0.61, 0.145 * growth, 0.205 * growth, -0.45)
    heart = smooth_step(1 - r, 0.14) * smooth_step(f.y - 0.37, 0.035) * upper
    aorta = [(-0.08, 0.42), (-0.04, 0.29), (0.06, 0.26), (0.13, 0.34), (0.155, 0.55), (0.15, 0.8)]
    arch = blur(f.stroke(aorta, 0.055), 1.0)

    density = 0.46 + 0.12 * np.clip(1 - np.square((f.x) / 0.4), 0, 1)
    density = density - lung * (0.34 - 0.10 * bump(f.y - 0.05, 0.14))
    density += 0.14 * (1 - upper) + 0.03 * (1 - lower)
    density += 0.19 * heart * inside + 0.045 * arch
    density += 0.07 * bump(np.sqrt(f.ellipse(0.03, 0.43, 0.06, 0.07)), 1.0) * lung
    density += 0.075 * vessels(f, rng, 0.03, 0.8) * lung * (1 - 0.6 * heart)

    density += _lateral_bones(f, front, back)
    density -= 0.09 * blur(f.stroke([(0.0, -0.1), (0.02, 0.1), (0.05, 0.38)], 0.036), 1.0)
    for finding in findings:
        density += _lateral_finding(f, finding, lung, np.random.default_rng(int(rng.integers(1 << 31))))
    density += 0.008 * f.noise(rng, 0.05) * lung
    metal = np.zeros_like(f.x)
    kinds = {x.kind for x in findings}
    if "sternotomy_wires" in kinds:
        wires = [[(-0.285 - 0.02, y), (-0.27, y + 0.012)] for y in np.arange(0.25, 0.66, 0.075)]
        metal = np.maximum(metal, f.strokes(wires, 0.007))
    if kinds & {"pacemaker_single", "pacemaker_dual"}:
        case = f.strokes([[(-0.325, 0.17), (-0.30, 0.25)]], 0.018)
        metal = np.maximum(metal, 0.9 * case)
        lead = [(-0.31, 0.2), (-0.12, 0.16), (-0.03, 0.4), (-0.1, 0.62), (-0.19, 0.68)]
        density += 0.2 * f.stroke(lead, 0.009)
    return (density * outline).astype(np.float32), metal.astype(np.float32)


def _lateral_bones(f: Frame, front: Field, back: Field) -> Field:
    """Vertebrae, sternum, ribs and scapulae seen from the side."""
    offset = f.x - (back - 0.055)
    phase = f.y / 0.066
    disc = bump(np.abs(phase - np.round(phase)), 0.13)
    column = smooth_step(0.036 - np.abs(offset), 0.005) * (0.115 - 0.085 * disc)
    column = column * (1.25 - 0.6 * np.clip(f.y, 0, 0.8))
    sternum = 0.10 * bump(f.x - front + 0.012, 0.011) * smooth_step(0.62 - f.y, 0.03)
    arcs = f.y - 0.55 * (f.x - back) - 0.5 * np.square(f.x - back)
    phase = arcs / 0.085
    rib = 0.035 * smooth_step(0.13 - np.abs(phase - np.round(phase)), 0.04)
    rib = rib * smooth_step(f.x - -0.12, 0.06) * smooth_step(np.minimum(f.x - front, back + 0.02 - f.x), 0.01)
    scapula = 0.05 * bump(f.x - back + 0.03 + 0.1 * (f.y - 0.3), 0.012) * smooth_step(0.42 - f.y, 0.03)
    return (column + sternum + rib + scapula).astype(np.float32)


def _lateral_finding(f: Frame, finding: FindingClass, lung: Field, rng: np.random.Generator) -> Field:
    if finding.kind == "edema":
        return np.float32(0.13 * _GRADE[finding.grade]) * lung * (1 + 0.15 * f.noise(rng, 0.06))
    if finding.kind == "effusion":
        level = np.float32(0.88 - 0.30 * _GRADE[finding.grade]) + 0.25 * np.clip(0.24 - f.x, 0, 1)
        return 0.17 * smooth_step(f.y - level, 0.012) * np.minimum(1, lung * 2.3)
    if finding.kind in _BLOBS:
        radius, density = _BLOBS[finding.kind]
        x, y = rng.uniform(-0.12, 0.18), _HEIGHT[finding.zone] + rng.uniform(-0.05, 0.05)
        ragged = np.float32(0.3 if finding.kind == "pneumonia" else 0.05) * f.noise(rng, 0.05)
        return np.float32(density) * smooth_step(1 - f.ellipse(x, y, radius, radius) + ragged, 0.25) * lung
    return np.zeros_like(f.x)
