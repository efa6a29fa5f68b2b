"""Errors about the user's input; commands print them as one line, everything else keeps its traceback."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping

_QUOTED = reprlib.Repr()
_QUOTED.maxlevel, _QUOTED.maxstring, _QUOTED.maxother = 3, 60, 60


class UserError(ValueError):
    """A configuration, file or argument that the user gave cannot be used.

    The message names the thing, what was expected, what was found and what to do. Raise it where input is checked and
    nowhere else: a mistaken call of a function is a plain ``ValueError`` or ``TypeError``, so that a bug shows where
    it happened. A command that ends with it has the exit status `status`.
    """

    status = 2


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that the user named does not exist."""


class WorseResultError(UserError):
    """A result is empty, or worse than that of an earlier command, whose file is kept."""

    status = 1


def needs_extra(user: str, package: str | None, extra: str) -> str:
    """The line about a package that is not installed, with the extra of setup.cfg that installs it."""
    return f"{user} needs the package {package}: pip install 'medclip_dcl[{extra}]'"


def quoted(value: object) -> str:
    """The beginning of a value as a user wrote it, for a message of a readable length."""
    text = _QUOTED.repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def check_choice(setting: str, value: object, choices: Collection[object]) -> None:
    """Refuse a value of a setting, e.g. "data.sampling", that is not among its choices."""
    if value not in choices:
        raise UserError(f"{setting}: expected one of {', '.join(map(str, choices))}, found {quoted(value)}")


def check_range(setting: str, value: float | None, interval: str) -> None:
    """Refuse a number outside an interval, such as "(0, 1]"; None is allowed."""
    low, high = map(float, interval[1:-1].split(","))
    is_end = (value == low and interval[0] == "[") or (value == high and interval[-1] == "]")
    if not (value is None or is_end or low < value < high):
        raise UserError(f"{setting}: expected a number in {interval}, found {value}")


def check_min(part: str, values: Mapping[str, tuple[int | float | None, int]]) -> None:
    """Refuse settings of a part, name -> (value, least value), below their least value; None is allowed."""
    for name, (value, least) in values.items():
        if value is not None and not least <= value < math.inf:
            raise UserError(f"{part}.{name}: expected at least {least}, found {value}")


def check_options(above_0: Mapping[str, float | None], at_least_0: Mapping[str, float]) -> None:
    """Refuse options of a model out of their range; None is allowed."""
    for names, least in ((above_0, "above"), (at_least_0, "at least")):
        for name, value in names.items():
            is_in = value is None or 0 < value < math.inf or (value == 0 and least == "at least")
            if not is_in:
                raise UserError(f"model.{name}: expected a finite number {least} 0, found {value}")
