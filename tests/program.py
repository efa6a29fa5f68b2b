"""Verbs of the program, as functions of their words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from medclip_dcl.__main__ import main, run


def verb(name: str) -> Callable[[Sequence[str]], None]:
    """A verb whose errors are raised."""
    return lambda words: run([*name.split(), *words])


def shell(name: str) -> Callable[[Sequence[str]], None]:
    """A verb as a user sees it: an error is one line and an exit status."""
    return lambda words: main([*name.split(), *words])
