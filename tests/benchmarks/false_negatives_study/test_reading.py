"""The plan's statistics on simulated replicates: error, power, shares handed on, chosen steps, sentences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from reading import (
    NOT_READ,
    PLAN,
    UNDECIDED,
    Rows,
    decide,
    equality_power,
    main,
    p_values,
    plan_hash,
    planned_size,
    read,
    read_plan,
    read_rows,
    smallest_difference,
    superiority_power,
)

from medclip_dcl.common.errors import UserError

STEPS, END = [10, 20, 40], 80
ARMS = ["infonce", "infonce_gamma4", "oracle", "eta_lm", "stop", "weight", "rho_class8", "constant_class8"]
ARMS += ["ranked", "ranked_constant", "ranked_random"]
OUTCOMES = ["common", "all", "chex5", "rare", "p_at_10", "recall", "at_floor"]
Truth = dict[tuple[str | int, ...], float]


@pytest.fixture
def plan_files(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text(
        f"kept_steps: {STEPS}\nlate_steps: [{END}]\nfixed_end: {END}\noracle: {{lse_nl: 4.8, pooled: 8.0}}\n"
    )
    return [file, PLAN[1]]


@pytest.fixture
def plan(plan_files):
    return read_plan(plan_files)


def simulated(truth=None, n=24, deviation=1.0, outcomes=("common", "all", "chex5")):
    """Rows of replicates with exact means: points above InfoNCE by (similarity, outcome, arm, step) or a part of it.

    Validate is best at step 20.
    """
    axes: dict[str, Any] = {"similarity": ["lse_nl", "pooled"], "arm": ARMS, "outcome": outcomes}
    axes |= {"step": [*STEPS, END], "split": ["test", "validate"], "replicate": range(n)}
    rows = pd.MultiIndex.from_product([*axes.values()], names=[*axes]).to_frame(index=False)
    noise = np.random.default_rng(0).standard_normal((2 * len(ARMS) * len(outcomes), 1, n))
    noise = deviation * (noise - noise.mean(-1, keepdims=True)) / noise.std(-1, ddof=1, keepdims=True)
    points = pd.Series(60 + np.repeat(noise, 2 * len(STEPS) + 2, axis=1).ravel())
    for key, difference in (truth or {}).items():
        points += difference * np.all([(rows[list(axes)[:4]] == part).any(axis=1) for part in key], axis=0)
    is_test = rows["split"] == "test"
    value = points.where(is_test, 60 - (rows["step"] - 20) ** 2 / 100) / 100
    return rows.assign(value=value, pairs=300, start="heads", commit="c", plan_hash="h")


def as_written(rows):
    """The table as the replicates write it."""
    key = [x for x in rows if x not in ("split", "outcome", "value")]
    wide = rows.assign(number=rows["split"] + " " + rows["outcome"]).pivot(
        index=key, columns="number", values="value"
    )
    return wide.reset_index()


def states(reading):
    return {name: decision.state for name, decision in reading.decisions.items()}


# Power and size


@pytest.mark.parametrize(
    ("difference", "deviation", "power"),
    [(3.8, 1.6, 1.0), (1.9, 1.4, 1.0), (1.2, 0.8, 1.0), (1.2, 1.7, 0.82), (0.6, 1.7, 0.24)],
)
def test_power_of_a_superiority(difference, deviation, power):
    assert superiority_power(deviation, difference, 24, 0.01) == pytest.approx(power, abs=0.005)
    random = np.random.default_rng(0)
    p = p_values({"kind": "superiority"}, [difference + deviation * random.standard_normal((20_000, 24))])
    assert (p["holds"] <= 0.01).mean() == pytest.approx(power, abs=0.01)


@pytest.mark.parametrize(("oracle", "power"), [(4.8, 0.825), (3.0, 0.104)])
def test_power_of_an_equality(oracle, power, plan):
    assert equality_power(1.5, oracle / 4, 24, 0.01) == pytest.approx(power, abs=0.001)
    differences = 1.5 * np.random.default_rng(0).standard_normal((20_000, 24))
    p = p_values(plan["hypotheses"]["H1"], [differences, np.full_like(differences, oracle)])
    assert (p["equal"] <= 0.01).mean() == pytest.approx(power, abs=0.01)


def test_smallest_difference_has_the_power():
    assert superiority_power(1.4, smallest_difference(1.4, 24, 0.01), 24, 0.01) == pytest.approx(0.8)
    assert np.isnan(smallest_difference(np.nan, 0, 0.01))


@pytest.mark.parametrize(("deviation", "n", "power"), [(1.0, 24, 0.825), (1.1, 28, 0.815), (3.0, 40, 0.0)])
def test_size_by_the_first_replicates(deviation, n, power, plan):
    first = simulated(n=12, deviation=1.0)
    values = Rows(first, plan).differences("", plan["hypotheses"]["H1"])[0].values
    first = simulated(n=12, deviation=1.5 * deviation / values.std(ddof=1))
    found = planned_size(Rows(first, plan))
    assert found == pytest.approx((n, power), abs=0.001)
    later = pd.concat([first, simulated({("eta_lm",): 9.0}, 20, 5.0).query("replicate >= 12")])
    moved = later.assign(value=later["value"] + 0.05 * (later["arm"] == "eta_lm"))
    assert planned_size(Rows(moved, plan)) == pytest.approx(found)
    assert planned_size(Rows(first.query("replicate < 11"), plan)) is None


# Decisions

ALL = ["H1", "H2", "H3", "H4", "H5-L", "H5-P", "H6-L", "H6-P"]
LSE = ["H1", "H3", "H4", "H5-L", "H6-L"]


@pytest.mark.parametrize(
    ("p", "failed", "hands_on", "expected"),
    [
        # Nothing is decided: all keep their share.
        (
            {},
            [],
            "both",
            {"H1": 0.01, "H2": 0.01, "H3": 0.01, "H4": 0, "H5-L": 0.01, "H5-P": 0.01, "H6-L": 0, "H6-P": 0},
        ),
        # H3 to H4; H4 to the first of the order.
        ({"H3": 0.01}, [], "both", {"H4": 0.01, "H1": 0.01}),
        ({"H3": 0.01, "H4": 0.01}, [], "both", {"H1": 0.02, "H2": 0.01}),
        # H5 to its own H6; H6 to the first of the order.
        ({"H5-P": 0.01}, [], "both", {"H6-P": 0.01, "H6-L": 0, "H1": 0.01}),
        ({"H5-P": 0.01, "H6-P": 0.01, "H1": 0.02}, [], "any", {"H1": 0.02, "H2": 0.03}),
        # One statement of H1 is enough where the plan says any.
        ({"H1": 0.01}, [], "any", {"H2": 0.02}),
        ({"H1": 0.01}, [], "both", {"H1": 0.01, "H2": 0.01}),
        ({"H1": 0.01, "H1 gain": 0.01}, [], "both", {"H2": 0.02}),
        # H2 to H1, and back, until nothing changes: H1 is decided with the share of H2, and hands both to H5-L.
        ({"H2": 0.01, "H1": 0.02}, [], "any", {"H1": 0.02, "H5-L": 0.03}),
        (
            {"H2": 0.01, "H1": 0.02, "H5-L": 0.03, "H6-L": 0.03},
            [],
            "any",
            {"H5-L": 0.03, "H6-L": 0.03, "H5-P": 0.04},
        ),
        # H0 fails: H2 is tested, its share passes over what is not read, which keeps its own.
        (
            {"H2": 0.01, "H1": 0.0, "H3": 0.0, "H5-P": 0.02},
            LSE,
            "any",
            {"H1": 0.01, "H3": 0.01, "H5-L": 0.01, "H6-P": 0.02},
        ),
        ({"H2": 0.01}, [*LSE, "H5-P", "H6-P"], "any", {"H2": 0.01, "H5-P": 0.01}),
        # A p between the share and what it becomes.
        ({"H4": 0.0}, [], "any", {"H4": 0}),
        ({"H2": 0.0101}, [], "any", {"H2": 0.01, "H1": 0.01}),
    ],
)
def test_shares_are_handed_on(p, failed, hands_on, expected, plan):
    plan["hypotheses"]["H1"]["hands_on"] = hands_on
    of_statements = {name: {"holds": p.get(name, 1.0)} for name in ALL}
    of_statements["H1"] = {"equal": p.get("H1", 1.0), "gain": p.get("H1 gain", 1.0), "cost": 1.0}
    found = decide(plan, of_statements, {name: name not in failed for name in ALL})
    assert {name: found[name].share for name in expected} == pytest.approx(expected)
    for name, decision in found.items():
        if name in failed:
            assert decision.state == NOT_READ
        elif p.get(name, 1.0) <= decision.share and decision.share:
            assert decision.state in ("holds", "equal", "equal gain")
        else:
            assert decision.state in (UNDECIDED, NOT_READ)


TRUTHS: dict[str, tuple[dict[str, float], set[str], set[str]]] = {
    "no differences but the oracle's": ({"oracle": 5.0}, {"equal"}, set()),
    "eta_LM gains a quarter of the oracle": ({"oracle": 8.0, "eta_lm": 2.0}, {"gain"}, set()),
    "eta_LM gains an eighth of the oracle": ({"oracle": 8.0, "eta_lm": 1.0}, {"gain", "equal"}, set()),
    "rho and ranked gain": (
        {"oracle": 8.0, **dict.fromkeys(["rho_class8", "constant_class8", *ARMS[-3:]], 4.0)},
        {"equal"},
        {"H3", "H5-L", "H5-P"},
    ),
}


def shares_of_errors(plan, truth, of_h1, true, n_trials=4000):
    """Share of trials with a false statement; noise of an arm is shared by its differences."""
    random, drawn = np.random.default_rng(0), {}

    def numbers(arm, *key):
        if (arm, *key) not in drawn:
            mean = truth.get(arm, 0.0) if key[1] == "common" else 0.0
            drawn[arm, *key] = mean + 1.1 * random.standard_normal((n_trials, 24))
        return drawn[arm, *key]

    p, gates = {}, {}
    for name, one in plan["hypotheses"].items():
        key = one["similarity"], one["outcome"], one["step"]
        pairs = [*one["arms"], *([one["margin"]["arms"]] if "margin" in one else [])]
        values = [numbers(arm, *key) - numbers(minus, *key) for arm, minus in pairs]
        if one["kind"] == "gate":
            gates[name] = (
                values[0].mean(1) - 2.069 * values[0].std(1, ddof=1) / np.sqrt(24) >= one["at_least"]
            )
        else:
            p[name] = p_values(one, values)
    errors = 0
    for trial in range(n_trials):
        of_trial = {name: {x: y[trial] for x, y in of.items()} for name, of in p.items()}
        readable = {
            name: gates[one["gate"]][trial] if "gate" in one else True
            for name, one in plan["hypotheses"].items()
        }
        found = decide(plan, of_trial, readable)
        false = {name for name, one in found.items() if one.state == "holds"} - true
        errors += bool(false or set(found["H1"].state.split()) - of_h1 - {UNDECIDED, *NOT_READ.split()})
    return errors / n_trials


@pytest.mark.parametrize("name", TRUTHS)
def test_familywise_error(name, plan):
    assert shares_of_errors(plan, *TRUTHS[name]) <= 0.05


# Rows


def test_each_run_has_its_own_step(plan):
    rows = simulated({("oracle",): 5.0})
    is_first = (rows["arm"] == "oracle") & (rows["outcome"] == "common") & (rows["replicate"] == 3)
    rows.loc[is_first & (rows["step"] == 10) & (rows["split"] == "validate"), "value"] = 0.61
    rows.loc[is_first & (rows["step"] == 10) & (rows["split"] == "test"), "value"] = 0.9
    numbers, one = Rows(rows, plan), plan["hypotheses"]["H0-L"]
    key = "lse_nl", 300, "heads", "oracle"
    place, points = numbers.arm(key, "common", "common")
    assert place.tolist() == [0 if x == 3 else 1 for x in range(24)]
    assert points[3] == pytest.approx(90)
    numbers.differences("H0-L", one)
    assert numbers.said == ["H0-L: oracle is best at the first kept step in 1 of 24."]
    # Of equal steps the first; validate's outcome may be another than the one that is read.
    rows.loc[is_first & (rows["step"] == 20) & (rows["split"] == "validate"), "value"] = 0.61
    numbers = Rows(rows, plan)
    chosen_by = {name: numbers.arm(key, "common", name)[0][3] for name in ("common", "chex5", None)}
    assert chosen_by == {"common": 0, "chex5": 1, None: 3}


def test_replicates_without_an_arm_are_said(plan):
    rows = simulated({("oracle",): 5.0})
    rows = rows[~((rows["arm"] == "oracle") & (rows["replicate"] == 7) & (rows["step"] == 40))]
    rows.loc[(rows["arm"] == "ranked") & (rows["replicate"].isin([2, 5])), "value"] = np.nan
    reading = read(rows, plan)
    assert "H1 reads 23 of 24 replicates: oracle lacks 7." in reading.said
    assert "H5-P reads 22 of 24 replicates: ranked lacks 2, 5." in reading.said
    assert [x.n for x in (reading.differences[name][0] for name in ("H1", "H2", "H5-L"))] == [23, 24, 22]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda rows: rows.assign(plan_hash=np.where(rows["replicate"] == 2, "other", "h")),
            "plan_hash: expected h in",
        ),
        (
            lambda rows: rows.assign(plan_hash="other"),
            r"plan_hash: expected h in every row, found \['other'\]",
        ),
        (lambda rows: rows.assign(value=100 * rows["value"]), "value: expected 0 to 1, found"),
        (lambda rows: rows[rows["replicate"] != 1], r"expected consecutive numbers, found none of \[1\]"),
    ],
)
def test_refused_rows(change, message, tmp_path):
    file = tmp_path / "rows.csv"
    as_written(change(simulated(n=3))).to_csv(file, index=False)
    with pytest.raises(UserError, match=message):
        read_rows([file], "h")


def test_refused_plans(plan_files):
    text = plan_files[0].read_text()
    before = plan_hash(plan_files)
    for changed, message in (
        (text.replace("[80]", "[90]"), "fixed_end"),
        (text + "hypotheses: {H1: {share: 0.06}}", "0.05"),
    ):
        plan_files[0].write_text(changed)
        with pytest.raises(UserError, match=message):
            read_plan(plan_files[::-1])
        assert plan_hash(plan_files) != before


# Sentences

GOOD: Truth = {("oracle", "common"): 8.0}
RANKED: Truth = {("ranked", "common"): 3.0}
SCENARIOS: dict[str, tuple[Truth, dict[str, str]]] = {
    "no headroom": (
        {},
        {"H0-L": "fails", "H0-P": "fails", "H1": NOT_READ, "H2": UNDECIDED, "H5-P": NOT_READ},
    ),
    "no headroom, overfitting": ({("eta_lm", "all", END): 3.0}, {"H1": NOT_READ, "H2": "holds"}),
    "equal": (GOOD, {"H0-L": "passes", "H1": "equal", "H2": UNDECIDED, "H3": UNDECIDED, "H5-L": UNDECIDED}),
    "equal, overfitting": ({**GOOD, ("eta_lm", "all", END): 3.0}, {"H1": "equal", "H2": "holds"}),
    "equal and gain": ({**GOOD, ("eta_lm", "common"): 1.1}, {"H1": "equal gain"}),
    "equal and cost": ({**GOOD, ("eta_lm", "common"): -1.1}, {"H1": "equal cost"}),
    "gain": ({**GOOD, ("eta_lm", "common"): 5.0, ("eta_lm", "all", END): 3.0}, {"H1": "gain", "H2": "holds"}),
    "cost": ({**GOOD, ("eta_lm", "common"): -5.0}, {"H1": "cost"}),
    "undecided": ({("oracle", "common"): 3.0, ("eta_lm", "common"): 0.6}, {"H1": UNDECIDED}),
    "class members": ({**GOOD, ("rho_class8", "common"): 3.0}, {"H3": "holds", "H4": UNDECIDED}),
    "class members, own share": ({**GOOD, ("rho_class8",): 3.0}, {"H3": "holds", "H4": "holds"}),
    "ranked": ({**GOOD, **RANKED}, {"H5-L": "holds", "H5-P": "holds", "H6-L": "holds", "H6-P": "holds"}),
    "ranked, constant as good": (
        {**GOOD, **RANKED, ("ranked_constant", "common"): 3.0},
        {"H5-L": "holds", "H6-L": UNDECIDED, "H5-P": "holds", "H6-P": UNDECIDED},
    ),
    "pooled alone": (
        {**GOOD, ("ranked", "common", "pooled"): 3.0},
        {"H5-L": UNDECIDED, "H6-L": NOT_READ, "H6-P": "holds"},
    ),
}


@pytest.fixture(scope="module")
def readings(tmp_path_factory):
    file = tmp_path_factory.mktemp("plan") / "plan.yaml"
    file.write_text(
        f"kept_steps: {STEPS}\nlate_steps: [{END}]\nfixed_end: {END}\noracle: {{lse_nl: 8.0, pooled: 8.0}}\n"
    )
    plan = read_plan([file, PLAN[1]])
    return plan, {name: read(simulated(truth, deviation=0.8), plan) for name, (truth, _) in SCENARIOS.items()}


@pytest.mark.parametrize("name", SCENARIOS)
def test_states_of_a_scenario(name, readings):
    expected = SCENARIOS[name][1]
    found = states(readings[1][name])
    assert {x: found[x] for x in expected} == expected


def test_every_sentence_is_reached(readings):
    plan, found = readings
    said = [sentence for reading in found.values() for sentence in reading.sentences]
    begin = [one["say"].partition("{")[0] for one in plan["sentences"]]
    assert [text for text in begin if not any(sentence.startswith(text) for sentence in said)] == []
    assert not any("nan" in sentence or "{" in sentence for sentence in said)
    reached = {
        place
        for reading in found.values()
        for place, one in enumerate(plan["sentences"])
        if one["say"].format_map(reading.differences) in reading.sentences
    }
    assert reached == set(range(len(plan["sentences"])))


def test_intervals_have_the_share_of_the_test(readings):
    reading = readings[1]["ranked"]
    ranked, h1 = reading.differences["H5-L"][0], reading.differences["H1"][0]
    assert (ranked.tail, h1.tail) == (0.01, 0.005)
    assert (ranked.interval[0] > 0) == (reading.p["H5-L"]["holds"] <= 0.01)
    assert "98% interval" in str(ranked) and "99% interval" in str(h1)


def test_too_few_replicates_are_not_read(plan):
    reading = read(simulated({("oracle",): 8.0}, n=23), plan)
    assert set(states(reading).values()) == {NOT_READ}
    assert reading.sentences == ["23 of 24 replicates: no hypothesis is read yet."]


def test_replicates_beyond_the_plan_are_not_read(plan):
    rows = simulated(n=26)
    reading = read(rows, plan)
    assert reading.differences["H2"][0].n == 24
    assert reading.said[0] == "Of 26 replicates the first 24 are read, as planned."


def test_the_page_and_the_command(plan_files, tmp_path, monkeypatch, capsys):
    truth: Truth = {("oracle", "common"): 8.0, ("oracle", "rare"): -2.5, ("oracle", "at_floor"): 20.0}
    rows = simulated(truth, outcomes=OUTCOMES)
    is_first = (rows["arm"] == "oracle") & (rows["replicate"] == 3) & (rows["step"] == 10)
    rows.loc[is_first & (rows["split"] == "validate"), "value"] = 0.61
    file = tmp_path / "rows.csv"
    as_written(rows.assign(plan_hash=plan_hash(plan_files))).to_csv(file, index=False)
    words = ["reading.py", str(file), "--plan", *map(str, plan_files)]
    monkeypatch.setattr("sys.argv", [*words, "--size"])
    main()
    assert capsys.readouterr().out.startswith("24 replicates, power 0.9")
    monkeypatch.setattr("sys.argv", [*words, "--output", str(tmp_path / "page")])
    main()
    sentences = capsys.readouterr().out.splitlines()
    page = (tmp_path / "page/reading.md").read_text()
    assert sentences and all(f"- {sentence}" in page for sentence in sentences)
    row = next(line for line in page.splitlines() if line.startswith("| oracle | "))
    *cells, ends = row.strip(" |").split(" | ")[1:]
    numbers = [cell.split()[0] for cell in cells]
    assert numbers == ["+8.0", "+0.0", "+0.0", "−2.5", "+0.0", "+0.0", "+20.0"]
    assert ends == "1, 0 of 24"
    arms = pd.read_csv(tmp_path / "page/arms.csv").query("similarity == 'lse_nl' and outcome == 'rare'")
    found = (
        arms.loc[arms["arm"] == "oracle", ["step_by", "quantity", "n", "points", "first"]].to_numpy().tolist()
    )
    last = f"step {STEPS[-1]}"
    assert found == [["common", "difference", 24, -2.5, 1], [last, "difference", 24, -2.5, 1]]
    assert arms.loc[arms["arm"] == "infonce", "quantity"].to_list() == ["mean", "mean"]
    tested = pd.read_csv(tmp_path / "page/hypotheses.csv").set_index("name")
    assert tested.loc["H0-L", "points"] == 8 and {"H3a", "H3b", "H4"} < set(tested.index)
    assert next(line for line in page.splitlines() if line.startswith("| H4 ")).endswith("|  |  | not read |")
    assert (tmp_path / "page/curves_lse_nl_300_heads.png").stat().st_size > 10_000
