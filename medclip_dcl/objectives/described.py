"""Base class of the parts of an objective, which describe themselves for checkpoints."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


class Described(nn.Module):
    """A module that keeps its constructor's arguments under their names; another one overrides `config`."""

    def config(self) -> dict[str, Any]:
        """Constructor arguments, for checkpoints."""
        names: list[str] = []
        for kind in (kind for kind in type(self).__mro__ if "__init__" in vars(kind)):
            parameters = inspect.signature(kind).parameters.values()
            names += [x.name for x in parameters if not x.kind.name.startswith("VAR")]
            if all(x.kind is not x.VAR_KEYWORD for x in parameters):
                break  # else **options are those of the class above
        return {name: getattr(self, name) for name in names}
