"""Draw the phantom's images: an 8-bit image and boxes from a study's findings, a projection and a seed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from data_prep.phantom import anatomy
from data_prep.phantom.anatomy import SIGN, Body, Chest, Layers
from data_prep.phantom.findings import FindingClass
from data_prep.phantom.geometry import GRID, Field, Frame, blur, bump, smooth_step
from data_prep.phantom.lateral import lateral_density
from data_prep.phantom.lesions import DRAW, ORDER

# Streams of random numbers of an image: (seed, study, stream, ...).
_PATIENT, _FINDING, _EXPOSURE = 1, 2, 3

_DEGRADED_CONTRAST, _DEGRADED_GRAIN = 0.5, 24.0
"""Share of the contrast, and standard deviation of the grain in grey levels, of a degraded image."""

Box = tuple[int, int, int, int]
"""x, y, width, height in pixels of the image."""


@dataclass(frozen=True)
class Picture:
    """An 8-bit image and the boxes of its findings by class_id."""

    pixels: UInt8[np.ndarray, "height width"]
    boxes: dict[int, list[Box]]


class Exposure:
    """Properties of an image that do not depend on the patient: position, tones, grain, collimation, side marker."""

    def __init__(self, rng: np.random.Generator, view: str) -> None:
        portable = view == "AP"
        self.collimation = (rng.uniform(0.01, 0.05, 4) * (rng.random(4) < 0.12)).tolist()
        self.letter = "R" if rng.random() < 0.45 else "L"
        self.scale = rng.normal(1.02, 0.04)
        self.angle = rng.normal(0, 0.035 if portable else 0.02)
        self.shift = (rng.normal(0, 0.018), rng.normal(0.0, 0.02))
        self.black = rng.uniform(0.0, 0.06)
        self.white = rng.uniform(0.98, 1.14) + 0.05 * portable
        self.gamma = rng.uniform(0.85, 1.25)
        self.grain = rng.uniform(0.010, 0.022) + 0.006 * portable
        self.marker_height, self.marker_top = rng.uniform(0.05, 0.10), rng.uniform(0.04, 0.22)
        self.marker_value = rng.uniform(0.6, 1.0)


def draw_frontal(
    seed: Sequence[int],
    findings: Iterable[FindingClass],
    view: str,
    low_volumes: bool,
    image: int,
    height: int,
    width: int,
) -> Picture:
    """Draw a frontal image with boxes of every visible finding.

    Args:
        seed: of the study; patient, findings and exposure take streams of their own from it.
        findings: of the study.
        view: ``AP`` or ``PA``.
        low_volumes: whether the lungs are poorly expanded.
        image: number of the image in its study.
        height, width: of the image, px.
    """
    findings = sorted(findings, key=lambda f: (ORDER[f.kind], f.class_id))
    exposure_rng = np.random.default_rng([*seed, _EXPOSURE, image])
    exposure = Exposure(exposure_rng, view)
    patient = np.random.default_rng([*seed, _PATIENT])
    body = Body(patient, exposure_rng, view, low_volumes)
    frame = _frame(exposure, height, width)
    streams = {f.class_id: np.random.default_rng([*seed, _FINDING, f.class_id]) for f in findings}
    chest = Chest(frame, body, findings, streams)
    sharp = anatomy.vessels(frame, patient, float(chest.center))
    blurred = np.float32(body.vessel_blur) * blur(sharp, 2.0)
    layers = Layers(
        chest=chest,
        air=np.ones_like(frame.x),
        vessels=np.float32(1 - body.vessel_blur) * sharp + blurred,
        added=np.zeros_like(frame.x),
        metal=np.zeros_like(frame.x),
        texture=frame.noise(patient, 0.035),
    )
    mottle = frame.noise(exposure_rng, 0.06)
    gas = anatomy.gas(chest, exposure_rng)
    masks = {f.class_id: DRAW[f.kind](layers, f, streams[f.class_id]) for f in findings}
    density = _density(chest, layers, gas, mottle)
    pixels = _expose(density, layers.metal, exposure, exposure_rng, frame, height, width)
    boxes = {number: _boxes(of_finding, height, width) for number, of_finding in masks.items()}
    return Picture(pixels, boxes)


def draw_lateral(
    seed: Sequence[int],
    findings: Sequence[FindingClass],
    low_volumes: bool,
    image: int,
    height: int,
    width: int,
) -> Picture:
    """Draw a lateral image; it has no boxes. Arguments as for `draw_frontal`."""
    rng = np.random.default_rng([*seed, _EXPOSURE, image])
    exposure = Exposure(rng, "LATERAL")
    frame = _frame(exposure, height, width)
    patient = np.random.default_rng([*seed, _PATIENT, 1])
    density, metal = lateral_density(frame, findings, patient, low_volumes)
    return Picture(_expose(density, metal, exposure, rng, frame, height, width), {})


def degraded(
    pixels: UInt8[np.ndarray, "height width"], rng: np.random.Generator
) -> UInt8[np.ndarray, "height width"]:
    """The image as of a small dose and a scattering grid left out: little contrast, blurred, coarse grain."""
    height, width = pixels.shape
    value = blur(pixels.astype(np.float32), max(height, width) / 150)
    # Grain that remains when a model sees the image at a hundred pixels.
    coarse = rng.standard_normal((max(1, height // 4), max(1, width // 4)), dtype=np.float32)
    grain = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    value = 128 + _DEGRADED_CONTRAST * (value - 128) + _DEGRADED_GRAIN * grain
    return np.clip(value, 0, 255).astype(np.uint8)


def _frame(exposure: Exposure, height: int, width: int) -> Frame:
    longer = max(height, width)
    rows, columns = round(GRID * height / longer), round(GRID * width / longer)
    return Frame(rows, columns, exposure.scale, exposure.angle, exposure.shift)


def _density(chest: Chest, layers: Layers, gas: Field, mottle: Field) -> Field:
    """Sum of soft tissue, air, blood and bone along the rays."""
    f, b = chest.frame, chest.body
    outline = anatomy.body_outline(chest)
    central = np.clip(1 - np.square(f.x / 0.5), 0, 1)
    density = np.float32(0.47 + 0.6 * b.fat) + 0.14 * central
    below = np.zeros_like(f.x)
    for side, sign in SIGN.items():
        below += smooth_step(f.y - chest.diaphragm[side], 0.006) * (f.side(sign) > 0)
    density = density + 0.10 * below
    density += anatomy.soft_shadows(chest)
    lungs = chest.lungs()
    u = (f.d - 0.2) / 0.17
    depth = 0.40 - 0.06 * np.clip(u**2, 0, 1.5) + 0.04 * bump(f.y - 0.35, 0.25)
    # Behind the heart and below the dome some lung remains.
    behind = 1 - 0.80 * chest.heart
    recess = np.zeros_like(f.x)
    for side, sign in SIGN.items():
        past = f.y - chest.diaphragm[side]
        recess += (
            smooth_step(past, 0.006)
            * np.clip(1 - past / 0.10, 0, 1)
            * smooth_step(np.minimum(chest.lateral - f.side(sign), f.side(sign) - 0.05), 0.006)
        )
    air = (lungs * depth * behind + 0.07 * recess) * layers.air
    density -= air * (1 + 0.02 * mottle)
    density += chest.heart * (0.13 - 0.11 * below)
    visible = lungs * (0.25 + 0.75 * layers.air) * (1 - 0.7 * chest.heart)
    density += (np.float32(b.vessel_contrast) * layers.vessels + 0.055 * anatomy.hila(chest)) * visible
    density += np.float32(b.rib_contrast) * anatomy.ribs(chest) * (1 - 0.35 * chest.heart)
    density += 0.12 * anatomy.shoulder_girdle(chest)
    density += 0.055 * anatomy.spine(chest)
    density -= 0.105 * anatomy.airways(chest)
    density += anatomy.normal_haze(chest) - gas
    density += layers.added + 0.008 * mottle
    return (density * outline).astype(np.float32)


def _expose(
    density: Field,
    metal: Field,
    exposure: Exposure,
    rng: np.random.Generator,
    frame: Frame,
    height: int,
    width: int,
) -> UInt8[np.ndarray, "height width"]:
    """Tone curve, enlargement, grain, marker, collimation. Nothing here depends on the image's content."""
    value = np.clip(
        (density - np.float32(exposure.black)) / np.float32(exposure.white - exposure.black), 0, None
    )
    # A shoulder keeps dense tissue from saturating.
    value = np.tanh(1.25 * value) / np.float32(np.tanh(1.25))
    value = np.clip(value, 0, 1.2) ** np.float32(exposure.gamma)
    value = value * (1 - metal) + metal * 1.05
    marker = _marker(exposure, frame)
    value = np.maximum(value, marker)
    value *= _collimator(exposure, frame)
    image = Image.fromarray((value * 220 + 8).astype(np.float32))
    large = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    top, left = (int(k) for k in rng.integers(0, 512, 2))
    flipped = bool(rng.random() < 0.5)
    grain = _grain_tile().take(range(top, top + height), 0, mode="wrap")
    grain = grain.take(range(left, left + width), 1, mode="wrap")
    grain = grain[::-1, ::-1] if flipped else grain
    large = large + grain * np.float32(exposure.grain * 255)
    return np.clip(large, 0, 255).astype(np.uint8)


@functools.cache
def _grain_tile() -> Field:
    """Fine noise of unit variance; an image has a window of it, repeated where the image is larger."""
    return np.random.default_rng(0).standard_normal((2048, 2048), dtype=np.float32)


_LETTERS: dict[str, list[list[tuple[float, float]]]] = {
    "L": [[(0, 0), (0, 1), (0.6, 1)]],
    "R": [
        [(0, 1), (0, 0), (0.5, 0), (0.62, 0.14), (0.62, 0.36), (0.5, 0.5), (0, 0.5)],
        [(0.3, 0.5), (0.65, 1)],
    ],
}


def _marker(exposure: Exposure, frame: Frame) -> Field:
    """A lead letter on the side of the patient that it names."""
    height, y0 = exposure.marker_height, exposure.marker_top
    sign = -1 if exposure.letter == "R" else 1
    plain = Frame(frame.height, frame.width, 1.0)
    half = 0.5 * frame.width / min(frame.height, frame.width)
    left = sign * (half - 0.06) - 0.3 * height
    lines = [
        np.array([(left + height * x, y0 + height * y) for x, y in stroke], np.float32)
        for stroke in _LETTERS[exposure.letter]
    ]
    return plain.strokes(lines, 0.013, exposure.marker_value)


def _collimator(exposure: Exposure, frame: Frame) -> Field:
    """Black borders where the field was narrowed."""
    top, bottom, left, right = (round(b * GRID) for b in exposure.collimation)
    window = np.full((frame.height, frame.width), 0.03, np.float32)
    window[top : frame.height - bottom, left : frame.width - right] = 1
    return window


def _boxes(masks: Sequence[Field], height: int, width: int) -> list[Box]:
    """Bounding boxes of masks above .35, in pixels of the enlarged image; parts too small to see are left out."""
    boxes = []
    for mask in masks:
        seen = mask > 0.35
        if seen.sum() < 6:
            continue
        rows, columns = np.flatnonzero(seen.any(1)), np.flatnonzero(seen.any(0))
        sy, sx = height / mask.shape[0], width / mask.shape[1]
        x0, x1 = round(columns[0] * sx), round((columns[-1] + 1) * sx)
        y0, y1 = round(rows[0] * sy), round((rows[-1] + 1) * sy)
        boxes.append((x0, y0, max(1, x1 - x0), max(1, y1 - y0)))
    return boxes
