"""Errors about the user's input; commands print them as one line, everything else keeps its traceback."""

from __future__ import annotations


class UserError(ValueError):
    """A configuration, file or argument that the user gave cannot be used.

    The message names the thing, what was expected, what was found and what to do. Raise it where input is checked and
    nowhere else: a mistaken call of a function is a plain ``ValueError`` or ``TypeError``, so that a bug shows where
    it happened.
    """


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that the user named does not exist."""
