"""Durations in words."""

from __future__ import annotations


def in_words(seconds: float) -> str:
    """12 s, 3 min, 2 h 05 min, 1 d 3 h."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"
