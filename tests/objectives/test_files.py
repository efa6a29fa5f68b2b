"""Every file of configs/objective: built, and two steps of training."""

from __future__ import annotations

import pytest
import torch

from tests.objective_steps import OBJECTIVES, steps


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_file_trains_two_steps(name, embedded_set, small_bert):
    found = steps(name, torch.device("cpu"), torch.float32, str(embedded_set), str(small_bert))
    assert len(found.losses) == 2 and all(1e-3 < loss < 30 for loss in found.losses)
    assert found.gradient.isfinite().all() and found.gradient.norm() > 1e-4
