"""Devices and surgical material: one drawing function per kind, see `lesions`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from data_prep.phantom.anatomy import SIGN, Layers
from data_prep.phantom.findings import FindingClass
from data_prep.phantom.geometry import Field, Line, bump, smooth_step, spline

Draw = Callable[[Layers, FindingClass, np.random.Generator], list[Field]]
"""Changes the layers and returns masks of the changed pixels, one per place."""


def _clips(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    x, y = layers.chest.place(finding.side, finding.zone, rng)
    lines = []
    for k in range(5):
        x0, y0, angle = x + (k - 2) * 0.017, y + rng.uniform(-0.014, 0.014), rng.uniform(0, np.pi)
        end = (x0 + 0.016 * np.cos(angle), y0 + 0.016 * np.sin(angle))
        lines.append([(x0, y0), end])
    drawn = layers.chest.frame.strokes(lines, 0.006)
    layers.metal = np.maximum(layers.metal, drawn)
    return [drawn]


def _shoulder_prosthesis(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    sign, f = SIGN[finding.side], layers.chest.frame
    head = smooth_step(1 - f.ellipse(sign * 0.455, 0.12, 0.06, 0.06), 0.05) * smooth_step(
        f.side(sign) - f.y - 0.29, 0.01
    )
    stem = f.stroke([(sign * 0.46, 0.12), (sign * 0.50, 0.22), (sign * 0.53, 0.36)], 0.03)
    mask = np.maximum(head, stem)
    layers.metal = np.maximum(layers.metal, mask * 0.95)
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
    points = [(s * 0.50, 0.36), (s * 0.44, 0.22), (s * 0.33, y + 0.02)]
    points += [(s * 0.2, y + 0.045 + rng.uniform(-0.01, 0.01)), (s * 0.08, y + 0.075)]
    points += [(c - 0.03, 0.31), (c - 0.048, rng.uniform(0.42, 0.48))]
    return [_tube(layers, points, 0.008, 0.20)]


def _jugular_line(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    s, c = SIGN[finding.side], float(layers.chest.center)
    points = [(s * 0.10, -0.12), (s * 0.085, 0.02), (s * 0.06, 0.16), (c - (0.03 if s > 0 else 0.055), 0.28)]
    points += [(c - 0.05, rng.uniform(0.40, 0.47))]
    return [_tube(layers, points, 0.010, 0.21)]


def _port(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    s, c, y = SIGN[finding.side], float(layers.chest.center), layers.chest.body.clavicle
    x0, y0 = s * rng.uniform(0.25, 0.29), y + rng.uniform(0.10, 0.13)
    reservoir = smooth_step(1 - layers.chest.frame.ellipse(x0, y0, 0.026, 0.026), 0.1)
    ring = bump(np.sqrt(layers.chest.frame.ellipse(x0, y0, 0.026, 0.026)) - 1, 0.18)
    layers.metal = np.maximum(layers.metal, np.maximum(0.45 * reservoir, 0.9 * ring))
    points = [(x0, y0 - 0.02), (s * 0.24, y + 0.03), (s * 0.15, y + 0.035), (s * 0.07, y + 0.08)]
    points += [(c - 0.035, 0.32), (c - 0.05, rng.uniform(0.42, 0.47))]
    return [np.maximum(reservoir, _tube(layers, points, 0.008, 0.19))]


def _pacemaker(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, s, c = layers.chest, SIGN[finding.side], float(layers.chest.center)
    f, y = chest.frame, chest.body.clavicle
    x0, y0 = s * rng.uniform(0.27, 0.31), y + rng.uniform(0.075, 0.11)
    x, y_of = (f.x - np.float32(x0)) / 0.055, (f.y - np.float32(y0)) / 0.045
    r = np.square(np.square(x)) + np.square(np.square(y_of))
    case = smooth_step(1 - r, 0.12)
    layers.metal = np.maximum(layers.metal, 0.92 * case)
    bottom = chest.dome["left"]
    start = [(x0 - s * 0.04, y0 - 0.03), (s * 0.17, y + 0.03), (s * 0.08, y + 0.065)]
    start += [(c - 0.04, 0.31), (c - 0.055, 0.46)]
    leads = [[*start, (c - 0.03, bottom - 0.06), (c + 0.06, bottom - 0.035), (c + 0.13, bottom - 0.05)]]
    if finding.kind == "pacemaker_dual":
        leads.append([*start[:-1], (c - 0.062, 0.45), (c - 0.055, bottom - 0.20), (c - 0.03, bottom - 0.235)])
    lines = [spline(lead) for lead in leads]
    drawn = f.strokes(lines, 0.009)
    layers.added += 0.26 * drawn
    return [np.maximum(case, drawn)]


def _chest_tube(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    s = SIGN[finding.side]
    points = [(s * 0.48, 0.66), (s * 0.36, rng.uniform(0.56, 0.62))]
    points += [(s * 0.28, 0.42), (s * 0.20, 0.24), (s * 0.15, 0.16)]
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
    layers.added += 0.12 * flange
    points = [(c + 0.012, 0.01), (c + 0.01, 0.07), (c - 0.003, 0.16), (c - 0.004, 0.22)]
    return [np.maximum(flange, _tube(layers, points, 0.026, 0.17, stripe=True))]


def _enteric_tube(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    c, dome = float(layers.chest.center), layers.chest.dome["left"]
    points = [(c + 0.012, -0.2), (c + 0.014, 0.2), (c + 0.006, 0.42), (c + 0.018, dome - 0.14)]
    if finding.kind == "enteric_tube":
        points += [
            (c + 0.05, dome),
            (c + 0.12, dome + 0.07),
            (c + 0.10, dome + 0.14),
            (c + 0.03, dome + 0.16),
        ]
    return [_tube(layers, points, 0.010, 0.20)]


def _sternotomy_wires(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    c = float(layers.chest.center)
    lines: list[Line] = []
    for k in range(6):
        y, w = 0.24 + 0.075 * k, rng.uniform(0.015, 0.021)
        x = c + rng.normal(0, 0.004)
        turn = np.linspace(0, 2 * np.pi, 10)
        lines.append(np.stack([x + w * np.cos(turn), y + 0.45 * w * np.sin(turn)], 1).astype(np.float32))
        lines.append([(x + w, y), (x + w + 0.008, y + 0.008)])
    drawn = layers.chest.frame.strokes(lines, 0.0055)
    layers.metal = np.maximum(layers.metal, drawn)
    return [drawn]


def _valve_prosthesis(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    chest, f = layers.chest, layers.chest.frame
    x, y = float(chest.center) + 0.05, chest.dome["left"] - rng.uniform(0.13, 0.16)
    ring = bump(np.sqrt(f.ellipse(x, y, 0.034, 0.022, 0.6)) - 1, 0.16)
    layers.metal = np.maximum(layers.metal, 0.9 * ring)
    return [ring]


def _pulmonary_artery_catheter(
    layers: Layers, finding: FindingClass, rng: np.random.Generator
) -> list[Field]:
    c, dome = float(layers.chest.center), layers.chest.dome["left"]
    points = [(-0.10, -0.12), (-0.075, 0.06), (c - 0.055, 0.28), (c - 0.06, 0.50)]
    points += [(c - 0.02, dome - 0.09), (c + 0.05, dome - 0.11)]
    points += [(c + 0.055, 0.50), (c + 0.03, 0.425), (c - 0.05, 0.42), (c - 0.10, 0.44)]
    return [_tube(layers, points, 0.009, 0.21)]


def _spinal_hardware(layers: Layers, finding: FindingClass, rng: np.random.Generator) -> list[Field]:
    c, lines, widths = float(layers.chest.center) * 0.5, [], []
    top, bottom = rng.uniform(0.3, 0.4), rng.uniform(0.72, 0.85)
    for s in (-1, 1):
        lines.append([(c + s * 0.026, top), (c + s * 0.026, bottom)])
        widths.append(0.009)
        for y in np.arange(top, bottom, 0.062):
            lines.append([(c + s * 0.026, y), (c + s * 0.010, y + 0.006)])
            widths.append(0.012)
    drawn = layers.chest.frame.strokes(lines, widths)
    layers.metal = np.maximum(layers.metal, 0.85 * drawn)
    return [drawn]


DRAW_DEVICES: dict[str, Draw] = {
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
