"""Time that the rest of a grid takes, from the cells that are finished."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pandas as pd

from medclip_dcl.experiments.cells import End
from medclip_dcl.experiments.grid import Cell


class TimeLeft:
    """Estimates the time left, each cell by the mean of those that differ from it in the paired axis alone.

    Cells that this command has run come first; without them those that were finished before, perhaps on another
    machine; without those the mean of all. Cells under way count in full: the estimate is too long by less than a cell.

    Args:
        cells: those to run.
        lanes: processes that run them.
        pairs: the paired axis.
        earlier: results.parquet so far.
    """

    def __init__(self, cells: Sequence[Cell], lanes: int, pairs: str | None, earlier: pd.DataFrame) -> None:
        self._waiting, self._lanes, self._pairs = {cell.name: cell for cell in cells}, lanes, pairs
        self._here: dict[str, list[float]] = defaultdict(list)
        self._before: dict[str, list[float]] = defaultdict(list)
        seconds = (
            earlier.drop_duplicates("cell").set_index("cell")[["fit_seconds", "test_seconds"]].sum(axis=1)
        )
        for name, of_cell in seconds.items():
            self._before[self._group(str(name))].append(float(of_cell))

    def count(self, end: End) -> None:
        """A cell has ended."""
        del self._waiting[end.cell.name]
        if end.seconds is not None:
            self._here[self._group(end.cell.name)].append(end.seconds)

    def seconds(self) -> float | None:
        """Seconds left; None while no cell is finished."""
        known = [self._here, self._before]
        every = [x for times in next(filter(None, known), {}).values() for x in times]
        if not every:
            return None
        total = 0.0
        for name in self._waiting:
            group = self._group(name)
            times = next((of[group] for of in known if group in of), every)
            total += sum(times) / len(times)
        return total / min(self._lanes, max(1, len(self._waiting)))

    def _group(self, name: str) -> str:
        return ",".join(part for part in name.split(",") if not part.startswith(f"{self._pairs}="))
