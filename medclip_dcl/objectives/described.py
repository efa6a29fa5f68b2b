"""Base class of the parts of an objective, which describe themselves for checkpoints."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


class Described(nn.Module):
    """A module that keeps its constructor's arguments under their names; another one overrides `config`."""

    def config(self) -> dict[str, Any]:
        """Constructor arguments, for checkpoints."""
        parameters = inspect.signature(type(self)).parameters.values()
        return {x.name: getattr(self, x.name) for x in parameters if not x.kind.name.startswith("VAR")}
