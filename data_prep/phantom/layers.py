"""The layers of an image to which findings add."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from data_prep.phantom.anatomy import Chest
from data_prep.phantom.findings import FindingClass
from data_prep.phantom.geometry import Field


@dataclass
class Layers:
    """An image in the making.

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


Draw = Callable[[Layers, FindingClass, np.random.Generator], list[Field]]
"""Changes the layers and returns masks of the changed pixels, one per place."""
