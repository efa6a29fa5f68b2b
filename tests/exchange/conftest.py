"""The network and the run folder that the tests of a module share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from medclip_dcl.networks.image_text import ImageTextNetwork
from tests.exchange.small import small_network, write_run
from tests.report.conftest import make_predictions, make_tested_run, measured


@pytest.fixture(scope="module")
def network(small_bert) -> ImageTextNetwork:
    torch.manual_seed(5)
    return small_network(small_bert)


@pytest.fixture(scope="module")
def run(network, tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "mine", network)


__all__ = ["make_predictions", "make_tested_run", "measured"]
