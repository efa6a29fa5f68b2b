"""Errors about the user's input; commands print them as one line, everything else keeps its traceback."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection

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


def check_range(part: str, interval: str, **values: float | None) -> None:
    """Refuse settings of a part that are not in an interval, such as "(0, 1]"; None is allowed."""
    low, high = map(float, interval[1:-1].split(","))
    is_open_ended = interval[0] == "[" and high == math.inf
    expected = f"at least {low:g}" if is_open_ended else f"a number in {interval}"
    for name, value in values.items():
        is_end = (value == low and interval[0] == "[") or (value == high and interval[-1] == "]")
        if not (value is None or is_end or low < value < high):
            raise UserError(f"{f'{part}.{name}'.removeprefix('.')}: expected {expected}, found {value}")
