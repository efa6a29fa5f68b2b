"""Arguments of small runs."""

from tests.training.conftest import arguments

__all__ = ["arguments"]
