"""Learning curve: whether more training patients would help, by the last doubling of their number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from medclip_dcl.common.files import write_text
from medclip_dcl.report.contrasts import over_patients_and_seeds
from medclip_dcl.studies.grid import Comparison, Experiment, last_doubling
from medclip_dcl.studies.grid_patients import sides_of_groups

CURVE_FILE = "learning_curve.csv"
_SMALL = 0.01
"""A difference that does not matter (choice)."""


def write_verdicts(experiment: Experiment, table: pd.DataFrame) -> list[str]:
    """A sentence for each combination of the other axes, also a row of `CURVE_FILE`; none without a learning curve.

    Inside +-0.01 the interval of the last doubling says that more patients would not help; wholly above 0, that they
    would. Otherwise it is undecided. The interval is over tested patients and the paired axis (the draws of labels).
    """
    curve, rows = experiment.learning_curve, []
    doubled = None if curve is None else last_doubling(experiment.axes[curve.axis])
    if curve is None or doubled is None:
        return []
    (whole, half), name = doubled, curve.outcome
    by_size = replace(
        experiment, compare=Comparison(curve.axis, half.name), outcomes={name: experiment.outcomes[name]}
    )
    for key, sides in sides_of_groups(by_size, table):
        own, minus = sides.get(whole.value, {}), sides.get(half.value, {})
        if not (seeds := [seed for seed in own if seed in minus]):
            continue
        gaps = np.array([own[seed][name] - minus[seed][name] for seed in seeds])
        found = over_patients_and_seeds(gaps, experiment.outcomes[name].bounds)
        of_key = table[(table[by_size.groups] == list(key)).all(axis=1)]  # another set has other patients
        n_patients = of_key.groupby(curve.axis)["train_patients"].median()
        before, after = (int(n_patients[level.value]) for level in (half, whole))
        levels = dict(zip(by_size.groups, key, strict=True))
        of = ", ".join(map(str, levels.values()))
        change = "an unknown number" if found.value is None else f"{found.value:+.3f}"
        interval, verdict = "no interval", "undecided whether more patients would help"
        if found.low is not None and found.high is not None:
            interval = f"95% interval {found.low:+.3f} to {found.high:+.3f}"
            if found.low >= -_SMALL and found.high <= _SMALL:
                verdict = "more patients would not help"
            elif found.low > 0:
                verdict = "more patients would help"
        said = (
            f"{of or name}: from {before:,} to {after:,} training patients {name} changed by {change} "
            f"({interval} over test patients and {experiment.pairs}): {verdict}"
        )
        ends = {"difference": found.value, "low": found.low, "high": found.high, "verdict": said}
        rows.append({**levels, "patients_before": before, "patients": after, "outcome": name, **ends})
    write_text(pd.DataFrame(rows).to_csv(index=False), experiment.folder / CURVE_FILE)
    return [row["verdict"] for row in rows]
