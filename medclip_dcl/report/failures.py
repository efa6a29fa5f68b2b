"""Where a model fails: the largest of the numbers of a test that are worse than they should be (tables.yaml).

Candidates, with `MIN_PATIENTS` patients of both classes (of a sensitivity, with the finding) on each side, are one
family: a sentence needs p of at most `ALPHA` by :func:`joint_p`, a simultaneous interval (max-t) without the null.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from medclip_dcl.common.findings import MIN_PATIENTS
from medclip_dcl.metrics.table import place_of
from medclip_dcl.report.contrasts import ALPHA, joint_p
from medclip_dcl.report.draws import Numbers, Predictions, TestedRun, estimate
from medclip_dcl.report.subgroups import ATTRIBUTES, UNKNOWN, Groups, describe, groups_of_run, pair_of
from medclip_dcl.report.tables import DESCRIPTIONS, interval_cell, number
from medclip_dcl.runs.saved import SavedResultsError

MAX_SENTENCES = 6
_RULES: dict[str, dict[str, Any]] = DESCRIPTIONS["failures"]
_Candidate = tuple[str, np.ndarray, int, dict[str, Any]]
"""Number, its effect (worse above 0) in each draw, patients, and words of the sentence."""


class Failure(NamedTuple):
    """A sentence, and the title of the table that has its number."""

    text: str
    table: str


def described(run: TestedRun, missing: list[str]) -> tuple[dict[str, Any] | None, list[Failure]]:
    """The sections of a tested run on subgroups (None without groups, and where `missing` says why) and on failures."""
    try:
        groups = groups_of_run(run)
        return describe(groups), failures(run.predictions, run.draws(), groups)
    except SavedResultsError as error:
        missing += [f"no tables by view, sex and age: {error}"] * run.file_of("images").is_file()
        return None, []


def failures(predictions: Predictions, numbers: Numbers, groups: Groups | None) -> list[Failure]:
    """The largest failures, by effect over unit; `numbers` are of the draws that gave `groups`."""
    every = list(_of_groups(groups)) if groups else []
    for path, values in numbers.items():
        if (place := place_of(path)) and place.entry and place.name in ("neg", "gain"):
            effect = 0.5 - values if place.name == "neg" else -values
            words: dict[str, Any] = {"finding": place.entry, "values": values}
            every.append((place.name, effect, predictions.n_patients[path], words))
    every = [one for one in every if one[2] >= MIN_PATIENTS]
    if not every:
        return []
    found, p = [], joint_p(np.stack([one[1] for one in every]), np.array([one[2] for one in every]))
    for (name, effect, n, words), of_all in zip(every, p, strict=True):
        rule, shown = _RULES[name], interval_cell(estimate(words["values"], n), 3)
        if of_all <= ALPHA and 0 < effect[0] >= rule["least"]:
            text = rule["text"].format_map(words | {"shown": shown})
            text += f" ({n:,} patients; p = {of_all:.2g} among {len(every)} candidates)"
            found.append((effect[0] / rule["unit"], Failure(text, rule.get("table") or words["table"])))
    return [failure for _, failure in sorted(found, key=lambda one: -one[0])[:MAX_SENTENCES]]


def _of_groups(groups: Groups) -> Iterator[_Candidate]:
    names = groups.table.groupby("attribute")["group"].unique()
    for row, gap, n in zip(groups.table.to_dict("records"), groups.gaps, groups.n_patients, strict=True):
        place, attribute = place_of(row["metric"]), row["attribute"]
        if place is None or not place.entry or place.name not in _RULES or not np.isfinite(gap[0]):
            continue
        pair = pair_of([name for name in names[attribute] if name != UNKNOWN])
        group, others = pair if pair and row["group"] in pair else (row["group"], "the others")
        # Of a pair the first alone has a gap, and either may be the worse.
        if is_second := others != "the others" and gap[0] > 0:
            group, others = others, group
        effect, value = (gap, row["value"] - gap[0]) if is_second else (-gap, row["value"])
        words = {"group": group, "others": others, "value": number(value, 3), "table": ATTRIBUTES[attribute]}
        words |= {"heading": place.number.heading or place.name, "finding": place.entry, "values": effect}
        yield place.name, effect, int(n), words
