"""Checks of a prepared set: `tables` against each other and dataset.json, and `images`.

A check returns its problems: lines that name the defect, its number of cases, and the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd


def some(what: str, cases: Iterable[Any], total: int | None = None) -> list[str]:
    """A problem with its number of cases and the first of them; none without cases."""
    cases = [" ".join(map(str, case)) if isinstance(case, tuple) else str(case) for case in cases]
    of_total = "" if total is None else f" of {total:,}"
    return [f"{what}: {len(cases):,}{of_total} (first: {', '.join(cases[:3])})"] if cases else []


def rows(frame: pd.DataFrame, keys: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """The key columns of each row."""
    return frame[list(keys)].itertuples(index=False, name=None)
