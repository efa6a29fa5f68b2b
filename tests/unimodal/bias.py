"""Bias of the debiased loss by its positives, their number, gamma^2 and N: docs/results/bias_of_the_debiased_loss.csv.

`python -m tests.unimodal.bias` writes the table; `make numbers` takes it to docs/theory.md; a test computes it again.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch.nn.functional import softplus

from medclip_dcl.objectives.contrastive import contrastive_loss
from tests.unimodal.synthetic_classes import SyntheticClasses

FILE = Path(__file__).parents[2] / "docs/results/bias_of_the_debiased_loss.csv"
RHO = (0.5, 0.3, 0.15, 0.05)
SPREADS, NEGATIVES = (0.25, 0.75), (63, 511)
ARMS: list[tuple[str, float, int | None]] = [
    ("InfoNCE", 0.0, None),
    ("own", 1.0, None),
    *((f"{m} of the class", 1.0, m) for m in (1, 4, 64)),
]
"""Loss, eta over rho, and the number of class members that are the correction's positives; None: the own positive."""


def bias(
    classes: SyntheticClasses, gamma2: float, n: int, scale: float, m: int | None, repeats: int
) -> tuple[float, float]:
    """Mean of `contrastive_loss` minus the loss with the true negatives' expectation, and its standard error.

    Anchors are the points by their chance, x+ a point of the class, the N negatives and the M class members drawn.
    """
    generator = torch.Generator().manual_seed(0)
    logits = gamma2 * classes.logits.repeat(repeats, 1)
    rows, points = len(logits), classes.n_points
    chance = classes.chance.numpy()
    counts = torch.from_numpy(np.random.default_rng(0).multinomial(n, chance / chance.sum(), size=rows))
    first = (classes.labels * points).repeat(repeats)[:, None]
    drawn = torch.randint(points, (rows, 1 + (m or 0)), generator=generator)
    of_class = logits.gather(1, first + drawn)
    losses = contrastive_loss(
        torch.cat([of_class[:, :1], logits], dim=1),
        torch.zeros(rows, dtype=torch.int64),
        class_probability=scale * classes.rho.repeat(repeats),
        floor=-float(gamma2),
        weights=torch.cat([torch.zeros(rows, 1), counts], dim=1).double(),
        correction_logits=of_class[:, 1:] if m else None,
        reduction="none",
    )
    is_other = classes.chance * ~classes.is_same_class
    mean_negative = ((gamma2 * classes.logits).exp() * is_other).sum(1) / is_other.sum(1)
    unbiased = softplus(math.log(n) + mean_negative.log().repeat(repeats) - of_class[:, 0])
    of_repeat = (losses - unbiased).view(repeats, -1) @ classes.chance
    return of_repeat.mean().item(), of_repeat.std().item() / math.sqrt(repeats)


def table(spreads: tuple[float, ...] = SPREADS, negatives: tuple[int, ...] = NEGATIVES) -> pd.DataFrame:
    rows = []
    for spread, gamma2, n in itertools.product(spreads, (2, 4, 14), negatives):
        classes = SyntheticClasses.on_sphere(rho=RHO, spread=spread)
        for loss, scale, m in ARMS:
            value, error = bias(classes, gamma2, n, scale, m, repeats=500)
            rows.append((spread, loss, gamma2, n, round(value, 3), round(error, 3)))
    columns = ["spread", "loss", "gamma_squared", "negatives", "bias_nats", "standard_error"]
    return pd.DataFrame(rows, columns=columns)


if __name__ == "__main__":
    table().to_csv(FILE, index=False)
