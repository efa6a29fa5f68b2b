"""Test the plan's hypotheses on the rows of its replicates.

    python tests/benchmarks/false_negatives_study/reading.py ROWS.csv ... [--plan FILE ...] [--size | --output FOLDER]

A row is an arm at a kept step: replicate, similarity, pairs, start, arm, step, commit, plan_hash (of `plan_hash`), and
numbers from 0 to 1 in columns such as "validate common" and "test common"; those of training ("train at_floor") are
read as the test's. Points are hundredths. FOLDER gets the page reading.md, its tables hypotheses.csv and arms.csv, and
curves over steps. --size prints the number of replicates alone, by the deviation among the first 12; it shows no mean.

Differences are paired by replicate. Each run (replicate and arm) has its own step: the best of its validate numbers, of
equal ones the first. Before the planned number of replicates is there, no hypothesis is read.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import optimize, stats

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import read_yaml, write_text
from medclip_dcl.pictures.plots import COLOURS, LINES, MARKERS, write_figure
from medclip_dcl.report.contrasts import means

PLAN = [Path(__file__).with_name(name) for name in ("plan.yaml", "hypotheses.yaml")]
SETTING = ["similarity", "pairs", "start"]
NOT_READ, UNDECIDED = "not read", "undecided"
Settings = Mapping[str, Any]


def plan_hash(files: Sequence[Path] = PLAN) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def read_plan(files: Sequence[Path] = PLAN) -> dict[str, Any]:
    plan = {key: value for file in files for key, value in read_yaml(file).items()}
    if (total := sum(one.get("share", 0) for one in plan["hypotheses"].values())) > 0.05 + 1e-9:
        raise UserError(f"hypotheses: expected shares of alpha with a sum of at most 0.05, found {total:g}")
    steps = [*plan["kept_steps"], *plan["late_steps"]]
    if steps != sorted(set(steps)) or steps[-1] != plan["fixed_end"]:
        raise UserError(
            "kept_steps, late_steps: expected ascending steps, the last fixed_end; change plan.yaml"
        )
    return plan


def read_rows(files: Sequence[Path], expected_hash: str) -> pd.DataFrame:
    """A row for each number of all files: split, outcome and value beside the columns of a run and step."""
    wide = pd.concat(
        [pd.read_csv(file, dtype={"commit": str, "plan_hash": str}) for file in files], ignore_index=True
    )
    rows = wide.melt([*SETTING, "replicate", "arm", "step", "commit", "plan_hash"]).dropna(subset="value")
    rows[["split", "outcome"]] = rows.pop("variable").str.split(" ", n=1, expand=True)
    rows["split"] = rows["split"].replace("train", "test")
    if (hashes := set(rows["plan_hash"])) != {expected_hash}:
        raise UserError(f"plan_hash: expected {expected_hash} in every row, found {sorted(map(str, hashes))}")
    if len(outside := rows[(rows["value"] < 0) | (rows["value"] > 1)]):
        raise UserError(f"value: expected 0 to 1, found {len(outside)} others: {outside.iloc[0].to_dict()}")
    replicates = set(rows["replicate"])
    if skipped := set(range(min(replicates), max(replicates))) - replicates:
        raise UserError(f"replicate: expected consecutive numbers, found none of {sorted(skipped)}; run them")
    return rows


def signed(number: float) -> str:
    return f"{round(number, 1) + 0.0:+.1f}".replace("-", "−")


@dataclass
class Difference:
    """An arm minus another in points, with a t interval that leaves `tail` outside at each end."""

    arms: tuple[str, str]
    values: np.ndarray
    tail: float = 0.025
    read: str = ""

    def __post_init__(self) -> None:
        self.n = len(self.values)
        self.average = float(self.values.mean()) if self.n else np.nan
        self.deviation = float(self.values.std(ddof=1)) if self.n > 1 else np.nan
        self.size = f"{abs(self.average):.1f}"

    @property
    def interval(self) -> tuple[float, float]:
        half = stats.t.isf(self.tail, max(self.n - 1, 1)) * self.deviation / np.sqrt(max(self.n, 1))
        return self.average - half, self.average + half

    @property
    def smallest(self) -> str:
        """Smallest true difference that the test shows with power .8, at this deviation."""
        return f"{smallest_difference(self.deviation, self.n, self.tail):.1f}"

    def __str__(self) -> str:
        low, high = map(signed, self.interval)
        return f"{signed(self.average)} ({100 - 200 * self.tail:g}% interval {low} to {high})"


class Rows:
    """Numbers of the arms, by replicate; `said` collects what a reader must know of them."""

    def __init__(self, rows: pd.DataFrame, plan: Settings) -> None:
        self.plan, self.replicates, self.said = plan, np.unique(rows["replicate"]), list[str]()
        key = [*SETTING, "arm", "outcome", "split"]
        table = rows.pivot(index=[*key, "replicate"], columns="step", values="value")
        groups = table.reindex(columns=[*plan["kept_steps"], plan["fixed_end"]]).groupby(level=key)
        self.by_arm = {name: x.droplevel([*key]).reindex(self.replicates).to_numpy() for name, x in groups}

    def arm(self, key: tuple[Any, ...], outcome: str, chosen_by: str | None) -> tuple[np.ndarray, np.ndarray]:
        """Place of the step among the kept ones, and points, by replicate; NaN points for a replicate that lacks one.

        Args:
            key: similarity, pairs, start and arm.
            chosen_by: outcome of validate, which needs all of kept_steps; None: fixed_end, which some arms reach.
        """
        count = len(self.plan["kept_steps"])
        nothing = np.full((len(self.replicates), count + 1), np.nan)
        test = self.by_arm.get((*key, outcome, "test"), nothing)
        if chosen_by is None:
            return np.full(len(self.replicates), count), 100 * test[:, -1]
        validate = self.by_arm.get((*key, chosen_by, "validate"), nothing)[:, :count]
        place = np.nan_to_num(validate, nan=-1).argmax(axis=1)
        points = 100 * np.take_along_axis(test, place[:, None], axis=1)[:, 0]
        return place, np.where(np.isnan(validate).any(axis=1), np.nan, points)

    def at_last(self, key: tuple[Any, ...], outcome: str) -> np.ndarray:
        """Points at the last of kept_steps, by replicate."""
        test = self.by_arm.get((*key, outcome, "test"), np.full((len(self.replicates), 1), np.nan))
        return 100 * test[:, min(len(self.plan["kept_steps"]), test.shape[1]) - 1]

    def differences(self, name: str, one: Settings) -> list[Difference]:
        """Of each similarity, pair of arms and step, and last of an equality's margin.

        Over the replicates that have all of these arms, which are of the similarity unless named SIMILARITY/ARM.
        """
        every = [*itertools.product(listed(one["similarity"]), one["arms"], listed(one["step"]))]
        if one.get("kind") == "equality" and "arms" in one["margin"]:
            every.append((one["similarity"], one["margin"]["arms"], one["step"]))
        chosen_by = {"end": None, "best": one.get("chosen_by", one["outcome"])}
        arms = {
            (arm, similarity, step): self.arm(self._key(similarity, arm), one["outcome"], chosen_by[step])
            for similarity, pair, step in every
            for arm in pair
        }
        lacks: dict[str, np.ndarray] = {}
        for (arm, *_), (_, points) in arms.items():
            lacks[arm] = lacks.get(arm, False) | np.isnan(points)
        shared = ~np.any([*lacks.values()], axis=0)
        if not shared.all():
            found = {arm: ", ".join(map(str, self.replicates[x])) for arm, x in lacks.items() if x.any()}
            without = "; ".join(f"{arm} lacks {x}" for arm, x in found.items())
            self.said.append(f"{name} reads {shared.sum()} of {len(shared)} replicates: {without}.")
        for (arm, similarity, step), (place, _) in arms.items():
            of = f" with {similarity}" if len(listed(one["similarity"])) > 1 else ""
            for end, last in (("first", 0), ("last", len(self.plan["kept_steps"]) - 1)):
                if step == "best" and (count := (place[shared] == last).sum()):
                    self.said.append(
                        f"{name}: {arm}{of} is best at the {end} kept step in {count} of {shared.sum()}."
                    )
        rules = {"end": "fixed end", "best": f"best by {chosen_by['best']}"}
        return [
            Difference(
                (arm, minus),
                (arms[arm, similarity, step][1] - arms[minus, similarity, step][1])[shared],
                read=f"{similarity}, {one['outcome']}, {rules[step]}",
            )
            for similarity, (arm, minus), step in every
        ]

    def _key(self, similarity: str, arm: str) -> tuple[Any, ...]:
        of_arm, _, name = arm.rpartition("/")
        return (of_arm or similarity, self.plan["read"]["pairs"], self.plan["read"]["start"], name)


def listed(one: Any) -> list[Any]:
    return one if isinstance(one, list) else [one]


def p_value(values: np.ndarray, alternative: str) -> np.ndarray:
    """Of the t test of differences along the last axis against 0; NaN where all are equal, as of copies."""
    p = stats.ttest_1samp(values, 0, axis=-1, alternative=alternative).pvalue
    return np.where(np.ptp(values, axis=-1) > 1e-9, p, np.nan)


def p_values(one: Settings, differences: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """p of each statement of a hypothesis; `differences` as of :meth:`Rows.differences`, along the last axis."""
    if one["kind"] == "superiority":
        return {"holds": np.max([p_value(values, "greater") for values in differences], axis=0)}
    margin = one["margin"]
    if "part" in margin:
        *differences, of_margin = differences
        margin = {"points": margin["part"] * of_margin}
    of_each: dict[str, list[np.ndarray]] = {"equal": [], "gain": [], "cost": []}
    for values in differences:
        within = (p_value(values - margin["points"], "less"), p_value(values + margin["points"], "greater"))
        of_each["equal"].append(np.maximum(*within))
        for name, alternative in (("gain", "greater"), ("cost", "less")):
            of_each[name].append(np.minimum(1, 2 * p_value(values, alternative)))
    return {name: np.max(p, axis=0) for name, p in of_each.items()}


@dataclass
class Decision:
    """State: statements of the hypothesis, `UNDECIDED` or `NOT_READ`; share of alpha that it was tested with."""

    state: str
    share: float = 0.0


def decide(plan: Settings, p: Mapping[str, Settings], readable: Mapping[str, bool]) -> dict[str, Decision]:
    """Test each hypothesis, hand the shares of decided ones on, and repeat until nothing changes.

    Args:
        plan: with `hypotheses` and `order`.
        p: hypothesis -> statement -> p.
        readable: False for a hypothesis whose gate has failed.
    """
    hypotheses = {name: one for name, one in plan["hypotheses"].items() if one["kind"] != "gate"}
    share = {name: one.get("share", 0.0) for name, one in hypotheses.items()}
    decided: dict[str, Decision] = {}

    def may_be_read(name: str) -> bool:
        return readable[name] and hypotheses[name].get("after", name) in {name, *decided}

    def statements(name: str) -> list[str]:
        is_open = name not in decided and share[name] > 0 and may_be_read(name)
        return [statement for statement, x in p[name].items() if x <= share[name]] if is_open else []

    while new := next(filter(statements, hypotheses), None):
        shown = statements(new)
        decided[new] = Decision(" ".join(shown), share[new])
        others = (name for name in plan["order"] if name not in decided and may_be_read(name))
        receiver = hypotheses[new].get("hands_to") or next(others, None)
        if receiver and (hypotheses[new].get("hands_on") != "both" or len(shown) > 1):
            share[receiver] += share[new]
    states = {name: UNDECIDED if may_be_read(name) else NOT_READ for name in hypotheses}
    return {name: decided.get(name, Decision(states[name], share[name])) for name in hypotheses}


def equality_power(deviation: float, margin: float, n: int, alpha: float) -> float:
    """Power of two one-sided t tests to show that a true 0 is within the margin; exact for normal differences."""
    estimates = np.sqrt(stats.chi2.ppf((np.arange(2000) + 0.5) / 2000, n - 1) / (n - 1))
    room = np.sqrt(n) * margin / deviation - stats.t.isf(alpha, n - 1) * estimates
    return float(np.clip(2 * stats.norm.cdf(room) - 1, 0, None).mean())


def superiority_power(deviation: float, difference: float, n: int, alpha: float) -> float:
    return float(stats.nct.sf(stats.t.isf(alpha, n - 1), n - 1, np.sqrt(n) * difference / deviation))


def smallest_difference(deviation: float, n: int, alpha: float) -> float:
    """True difference that a one-sided paired t test shows with power .8; NaN: too few pairs."""
    if n < 2:
        return np.nan
    return deviation * optimize.brentq(lambda x: superiority_power(1, x, n, alpha) - 0.8, 0, 20)


def planned_size(numbers: Rows) -> tuple[int, float] | None:
    """Number of replicates and power, by the deviation of the first ones and the tuning oracle; None with too few.

    A plan without a hypothesis that sets the size has its number from the start, with no power (NaN).
    """
    plan, size = numbers.plan, numbers.plan["size"]
    if "hypothesis" not in size:
        return size["min"], np.nan
    one = plan["hypotheses"][size["hypothesis"]]
    values = numbers.differences("size", {**one, "kind": "described"})[0].values[: size["look"]]
    if len(values) < size["look"]:
        return None
    margin, deviation = one["margin"]["part"] * plan["oracle"][one["similarity"]], values.std(ddof=1)
    n = size["min"]
    while (power := equality_power(deviation, margin, n, one["share"])) < size["power"] and n < size["max"]:
        n += 1
    return n, power


@dataclass
class Reading:
    """Of all rows: size with power, differences and p by name, decisions, README sentences, what else must be said."""

    size: tuple[int, float] | None
    differences: dict[str, list[Difference]]
    p: dict[str, dict[str, float]]
    decisions: dict[str, Decision]
    sentences: list[str]
    said: list[str]


def read(rows: pd.DataFrame, plan: Settings) -> Reading:
    """Read the first replicates, as many as planned; with fewer, differences are described alone."""
    size, present = planned_size(Rows(rows, plan)), sorted(rows["replicate"].unique())
    is_complete = size is not None and len(present) >= size[0]
    used = present[: size[0]] if size else present
    numbers = Rows(rows[rows["replicate"].isin(used)], plan)
    if len(used) < len(present):
        numbers.said.append(f"Of {len(present)} replicates the first {len(used)} are read, as planned.")
    p, gates, differences = {}, {}, {}
    for name, one in {**plan["hypotheses"], **plan["described"]}.items():
        found = numbers.differences(name, one)
        has_margin = one.get("kind") == "equality" and "arms" in one["margin"]
        differences[name] = found[: len(found) - has_margin]
        is_read = is_complete and found[0].n > 1
        if one.get("kind") == "gate":
            state = "passes" if all(x.interval[0] >= one["at_least"] for x in found) else "fails"
            gates[name] = state if is_read else NOT_READ
        elif "kind" in one and is_read:
            p[name] = {x: float(y) for x, y in p_values(one, [x.values for x in found]).items()}
    readable = {
        name: name in p and all(gates[gate] == "passes" for gate in listed(one.get("gate", [])))
        for name, one in plan["hypotheses"].items()
    }
    decisions = {**{name: Decision(state) for name, state in gates.items()}, **decide(plan, p, readable)}
    for name in (name for name in p if decisions[name].share):
        sides = 2 if "equal" in p[name] else 1
        for difference in differences[name]:
            difference.tail = decisions[name].share / sides
    sentences = [
        one["say"].format_map(differences)
        for one in plan["sentences"]
        if all(decisions[name].state in ([x] if isinstance(x, str) else x) for name, x in one["when"].items())
    ]
    if not is_complete:
        expected = size[0] if size else f"{plan['size']['min']} to {plan['size']['max']}"
        sentences = [f"{len(present)} of {expected} replicates: no hypothesis is read yet."]
    return Reading(size, differences, p, decisions, sentences, numbers.said)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def hypotheses_table(reading: Reading, plan: Settings) -> pd.DataFrame:
    """A row for each difference of a hypothesis or description."""
    rows = []
    for name in {**plan["hypotheses"], **plan["described"]}:
        decision = reading.decisions.get(name, Decision("described"))
        of_statements = {} if decision.state == NOT_READ else reading.p.get(name, {})
        p = ", ".join(f"{statement} {x:.2g}" for statement, x in of_statements.items())
        for place, difference in enumerate(reading.differences[name]):
            low, high = difference.interval
            numbers = {"n": difference.n, "points": difference.average, "low": low, "high": high}
            numbers |= {"sd": difference.deviation, "level": 100 - 200 * difference.tail}
            numbers |= {"smallest": smallest_difference(difference.deviation, difference.n, difference.tail)}
            said = {"p": p, "share_of_alpha": decision.share if p else np.nan, "reading": decision.state}
            arms, key = " − ".join(difference.arms), name
            if len(reading.differences[name]) > 1:
                key += "abcdefgh"[place]
            rows.append({"name": key, "difference": arms, "read": difference.read, **numbers, **said})
    return pd.DataFrame(rows)


NOT_IN_PLAN = [("middle", "common"), ("all", "common")]
"""Outcomes and the outcome that chooses the step, shown beside the plan's."""


def arms_table(rows: pd.DataFrame, plan: Settings, setting: tuple[Any, ...]) -> pd.DataFrame:
    """A row for each arm, outcome and step rule: difference from the reference arm, 95% interval; of this one the mean.

    After those of the plan follow `NOT_IN_PLAN` and, of every outcome, the last of kept_steps: all runs are as long.
    """
    numbers, found = Rows(rows, plan), []
    outcomes, reference = plan["tables"]["outcomes"], plan["tables"]["reference"]
    by, last = next(iter(outcomes.values())), len(plan["kept_steps"]) - 1

    def points(arm: str, outcome: str, rule: str) -> np.ndarray:
        key = (*setting, arm)
        return numbers.at_last(key, outcome) if rule == at_last else numbers.arm(key, outcome, rule)[1]

    at_last = f"step {plan['kept_steps'][-1]}"
    for arm in sorted(set(rows["arm"])):
        place = numbers.arm((*setting, arm), by, by)[0][~np.isnan(points(arm, by, by))]
        ends = {"first": (place == 0).sum(), "last": (place == last).sum(), "runs": len(place)}
        for outcome, rule in [
            *outcomes.items(),
            *NOT_IN_PLAN,
            *((x, at_last) for x in dict.fromkeys([*outcomes, "middle"])),
        ]:
            own, minus = points(arm, outcome, rule), points(reference, outcome, rule)
            values = own if arm == reference else own - minus
            one = Difference((arm, reference), values[~np.isnan(values)])
            if one.n < 2:
                continue
            quantity, (low, high) = "mean" if arm == reference else "difference", one.interval
            row = {
                **dict(zip(SETTING, setting, strict=True)),
                "arm": arm,
                "outcome": outcome,
                "step_by": rule,
            }
            row |= {"quantity": quantity, "n": one.n, "points": one.average, "low": low, "high": high}
            found.append({**row, **ends})
    return pd.DataFrame(found)


def write_page(reading: Reading, rows: pd.DataFrame, plan: Settings, folder: Path) -> None:
    """Write reading.md, hypotheses.csv, arms.csv and a figure for each setting."""
    planned = "unknown" if reading.size is None else str(reading.size[0])
    if reading.size and not np.isnan(reading.size[1]):
        planned += f" (power of H1 at 0: {reading.size[1]:.2f})"
    commits, hashes = (", ".join(sorted(set(rows[name]))) for name in ("commit", "plan_hash"))
    lines = ["# Reading of the study", "", *(f"- {sentence}" for sentence in reading.sentences), ""]
    lines += [
        f"{rows['replicate'].nunique()} replicates; planned {planned}. Plan {hashes}, commits {commits}."
    ]
    lines += ["Points are hundredths. Each run has its own best kept step by validate.", ""]
    hypotheses = hypotheses_table(reading, plan)
    write_text(hypotheses.round(4).to_csv(index=False), folder / "hypotheses.csv")
    differences = (difference for found in reading.differences.values() for difference in found)
    cells = [
        [one["name"], one["difference"], one["read"], str(one["n"])]
        + [str(difference) if difference.n > 1 else "–"]
        + [one["p"], f"{one['share_of_alpha']:g}" if one["p"] else "", one["reading"]]
        for one, difference in zip(hypotheses.to_dict("records"), differences, strict=True)
    ]
    head = ["", "difference", "read", "n", "points", "p", "share of alpha", "reading"]
    lines += ["## Hypotheses", "", *table(head, cells), "", *(f"- {one}" for one in reading.said), ""]
    tables = []
    for setting, of_setting in rows.groupby(SETTING):
        file = f"curves_{'_'.join(map(str, setting))}.png"
        write_figure(_curves(of_setting, plan["curves"]), folder / file)
        tables.append(arms_table(of_setting, plan, tuple(setting)))
        lines += [f"## {', '.join(map(str, setting))}: benefit and harm of each arm, 95% intervals", ""]
        lines += [*_arms(tables[-1], plan), "", f"![Curves over steps]({file})", ""]
    write_text(pd.concat(tables).round(4).to_csv(index=False), folder / "arms.csv")
    write_text("\n".join(lines), folder / "reading.md")


def _arms(arms: pd.DataFrame, plan: Settings) -> list[str]:
    """A row for each arm of the table, the reference first."""
    outcomes, cells = plan["tables"]["outcomes"], []
    for _, of_arm in sorted(arms.groupby("arm"), key=lambda x: x[1]["quantity"].iloc[0] != "mean"):
        by_outcome = {
            x["outcome"]: x for x in of_arm.to_dict("records") if outcomes.get(x["outcome"]) == x["step_by"]
        }
        first = of_arm.iloc[0]
        cells.append([first["arm"] + (" itself" if first["quantity"] == "mean" else "")])
        for outcome in outcomes:
            if not (one := by_outcome.get(outcome)):
                cells[-1].append("–")
                continue
            show = signed if one["quantity"] == "difference" else "{:.1f}".format
            points, low, high = (show(one[x]) for x in ("points", "low", "high"))
            cells[-1].append(f"{points} [{low}, {high}], n {one['n']}")
        cells[-1].append(f"{first['first']}, {first['last']} of {first['runs']}")
    head = [f"{outcome}, step by {chosen_by}" for outcome, chosen_by in outcomes.items()]
    head.append(f"best by {next(iter(outcomes.values()))} at the first, last kept step")
    return table([f"arm − {plan['tables']['reference']}", *head], cells)


def _curves(rows: pd.DataFrame, plan: Settings) -> Figure:
    """Mean and 95% t interval of test numbers over the kept steps, a panel for each outcome."""
    figure = Figure(figsize=(4.8 * len(plan["outcomes"]), 3.6), layout="constrained")
    for axes, outcome in zip(figure.subplots(1, len(plan["outcomes"])), plan["outcomes"], strict=True):
        test = rows[(rows["split"] == "test") & (rows["outcome"] == outcome) & rows["arm"].isin(plan["arms"])]
        points = means(test.assign(value=100 * test["value"]), ["arm", "step"]).sort_values("step")
        for place, arm in enumerate(plan["arms"]):
            of_arm, colour = points[points["arm"] == arm], COLOURS[place]
            if of_arm.empty:
                continue
            at = of_arm["step"] * 1.015 ** (
                place - len(plan["arms"]) / 2
            )  # side by side, to show every interval
            line: Any = {
                "color": colour,
                "marker": MARKERS[place],
                "linestyle": LINES[place % len(LINES)],
                "lw": 1.2,
            }
            axes.plot(at, of_arm["mean"], label=arm, ms=3.5, **line)
            axes.vlines(at, of_arm["low"], of_arm["high"], color=colour, lw=1)
        steps = sorted(set(points["step"]))
        axes.set(xscale="log", xlabel="step", ylabel=f"{outcome}, test, points")
        axes.set_xticks(steps, map(str, steps), rotation=60)
        axes.minorticks_off()
    # An arm may lack an outcome.
    lines = {str(line.get_label()): line for axes in figure.axes for line in axes.get_lines()}
    shown = [arm for arm in plan["arms"] if arm in lines]
    figure.legend(
        [lines[arm] for arm in shown], shown, loc="outside upper center", ncols=6, frameon=False, fontsize=8
    )
    return figure


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("rows", type=Path, nargs="+", metavar="ROWS")
    parser.add_argument("--plan", type=Path, nargs="+", default=PLAN)
    parser.add_argument("--size", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("runs/false_negatives/reading"))
    options = parser.parse_args()
    plan = read_plan(options.plan)
    rows = read_rows(options.rows, plan_hash(options.plan))
    if options.size:
        print("{} replicates, power {:.2f}".format(*planned_size(Rows(rows, plan)) or ("too few", np.nan)))
        return
    reading = read(rows, plan)
    write_page(reading, rows, plan, options.output)
    print(*reading.sentences, sep="\n")


if __name__ == "__main__":
    main()
