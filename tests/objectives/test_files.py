"""Every file of configs/objective: built, and two steps of training."""

from __future__ import annotations

import math

import pytest
import torch

from tests.objective_steps import OBJECTIVES, steps


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_file_trains_two_steps(name, embedded_set, small_bert):
    found = steps(name, torch.device("cpu"), torch.float32, str(embedded_set), str(small_bert))
    assert len(found.losses) == 2 and all(1e-3 < loss < 30 for loss in found.losses)
    assert found.gradient.isfinite().all() and found.gradient.norm() > 1e-4
    more = {"label_weight": 0.7}
    labelled = steps(name, torch.device("cpu"), torch.float32, str(embedded_set), str(small_bert), **more)
    # The label head starts at 0: each of its entries costs log 2.
    assert labelled.losses == pytest.approx([loss + 0.7 * math.log(2) for loss in found.losses], abs=1e-5)
    assert len(labelled.gradient) > len(found.gradient)  # `steps` finds one for each parameter
