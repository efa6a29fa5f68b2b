"""Tested runs that are made up."""

from tests.statistics.conftest import make_predictions, make_tested_run, measured

__all__ = ["make_predictions", "make_tested_run", "measured"]
