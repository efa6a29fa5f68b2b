"""Base class of the parts of an objective, which describe themselves for checkpoints."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from medclip_dcl.common.errors import UserError


class ObjectivePart(nn.Module):
    """A module that keeps its constructor's arguments under their names; another one overrides `config`."""

    def __init__(self) -> None:
        super().__init__()  # torch's takes any arguments

    def config(self) -> dict[str, Any]:
        """Constructor arguments, for checkpoints."""
        parameters, kept = inspect.signature(type(self)).parameters.values(), vars(self)
        if lost := [x.name for x in parameters if x.kind.name.startswith("VAR") or x.name not in kept]:
            raise UserError(
                f"{type(self).__name__}: expected plain attributes of the names of the constructor's arguments, or a "
                f"method config, found none of {', '.join(lost)}"
            )
        return {x.name: kept[x.name] for x in parameters}
