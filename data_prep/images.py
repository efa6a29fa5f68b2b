"""Radiographs of a release, resized once: 8-bit grey JPEG files of one size under the release's relative paths."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

GEOMETRY = "stretch"
"""Both sides are resized to the same length, whatever the aspect ratio (SSD, section 3.2)."""

QUALITY = 95
"""JPEG quality of the prepared images."""

FILTER = "bilinear"
"""Antialiased: the triangle filter grows with the reduction."""


class Job(NamedTuple):
    """One image to prepare. Where `target` exists it is finished: it was renamed into place when whole."""

    source: Path
    target: Path
    size: int


class Outcome(NamedTuple):
    """Size of the original in pixels, or why the image cannot be used."""

    height: int = 0
    width: int = 0
    reason: str = ""


def prepare_images(jobs: Sequence[Job], pool: Executor | None = None) -> Iterator[Outcome]:
    """Decode, resize and write images; the outcomes come in the order of the jobs.

    Args:
        jobs: see `Job`.
        pool: processes to share the work; None works in this one.

    Raises:
        OSError: an image could not be written (the disk is full, say); unreadable sources are outcomes.
    """
    if pool is None:
        yield from map(prepare_image, jobs)
    else:
        yield from pool.map(prepare_image, jobs, chunksize=16)


def prepare_image(job: Job) -> Outcome:
    """Prepare one image; a finished one only has its original's size read again."""
    is_finished = job.target.exists()
    try:
        if job.source.stat().st_size == 0:
            return Outcome(reason="image file is empty")
        with Image.open(job.source) as image:
            width, height = image.size
            if is_finished:
                return Outcome(height, width)
            prepared = to_grey(image).resize((job.size, job.size), Image.Resampling.BILINEAR)
    except FileNotFoundError:
        return Outcome(reason="image file is missing")
    except UnidentifiedImageError:
        return Outcome(reason="not an image file of a known format")
    # PIL's readers raise these for damaged content; OSError also where the file cannot be read at all.
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        return Outcome(reason=f"image cannot be decoded: {getattr(error, 'strerror', None) or error}")
    job.target.parent.mkdir(parents=True, exist_ok=True)
    temporary = job.target.with_name(f".{job.target.name}.{os.getpid()}.tmp")
    prepared.save(temporary, format="JPEG", quality=QUALITY)
    os.replace(temporary, job.target)
    return Outcome(height, width)


def to_grey(image: Image.Image) -> Image.Image:
    """Eight-bit grey of an image of any mode.

    Colours and palettes become luma (ITU-R 601), transparency is left out. More than eight bits, whose meaning no
    header tells, are scaled linearly from the image's own minimum and maximum, as MIMIC-CXR-JPG was made from DICOM.

    Args:
        image: any image that PIL opens.

    Returns:
        the image in mode "L".

    Raises:
        OSError: the file is truncated or damaged.
    """
    if image.mode == "L":
        image.load()
        return image
    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        return image.convert("L")
    values = np.asarray(image).astype(np.float64)
    low, high = values.min(), values.max()
    if not low < high:
        # A constant image, or one with undefined pixels: nothing to see.
        return Image.new("L", image.size, 0)
    return Image.fromarray(np.rint((values - low) * (255 / (high - low))).astype(np.uint8))
