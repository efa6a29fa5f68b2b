"""Verbs of the program, as functions of their words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from medclip_dcl.__main__ import main, run


def verb(name: str) -> Callable[[Sequence[str]], None]:
    """A verb whose errors are raised."""
    return partial(_call, run, name)


def shell(name: str) -> Callable[[Sequence[str]], None]:
    """A verb as a user sees it: an error is one line and an exit status."""
    return partial(_call, main, name)


def _call(program: Callable[[Sequence[str]], None], name: str, words: Sequence[str]) -> None:
    # A function of the module, which another process can be given.
    program([*name.split(), *words])
