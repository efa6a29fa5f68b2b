"""Means over seeds, paired differences and max-t: SciPy's tests and loops give the same numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from medclip_dcl.report.contrasts import (
    bootstrap_differences,
    compared,
    holm,
    is_marked,
    joint_p,
    means,
    over_patients_and_seeds,
    paired_differences,
    side_named,
    sides_of,
)
from medclip_dcl.report.draws import Predictions, TestedRun, bootstrap_numbers

LEVELS = {"CL": 0.0, "low": 0.1, "high": -0.2}


@pytest.mark.parametrize("names", [("CheXzero (ViT-L)", "CheXzero"), ("CheXzero", "CheXzero (ViT-L)")])
def test_a_side_of_exactly_that_name_is_meant(names):
    sides = {name: [TestedRun(Path(name), "", name)] for name in names}
    assert side_named(sides, "CheXzero") == "CheXzero"
    del sides["CheXzero"]
    assert side_named(sides, "CheXzero") == "CheXzero (ViT-L)"


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    """Two groups x three levels x seven seeds; at r = 0.5 seed 3 of low is missing and seed 5 of CL has no number."""
    random = np.random.default_rng(0)
    rows = [
        {"r": r, "objective": level, "seed": seed, "value": shift * r + random.normal() + 3 * seed}
        for r in (0.1, 0.5)
        for level, shift in LEVELS.items()
        for seed in range(7)
    ]
    table = pd.DataFrame(rows)
    low = (table["r"] == 0.5) & (table["objective"] == "low") & (table["seed"] == 3)
    table.loc[(table["r"] == 0.5) & (table["objective"] == "CL") & (table["seed"] == 5), "value"] = np.nan
    return table[~low].sample(frac=1, random_state=1)


def values(runs: pd.DataFrame, r: float, level: str) -> pd.Series:
    found = runs[(runs["r"] == r) & (runs["objective"] == level)]
    return found.set_index("seed")["value"].dropna().sort_index()


def records(found: pd.DataFrame) -> list[dict[str, Any]]:
    return found.to_dict("records")  # type: ignore[return-value]


def test_means_and_their_intervals_are_those_of_scipy(runs):
    found = means(runs, ["r", "objective"])
    assert len(found) == 6
    for row in records(found):
        own = values(runs, row["r"], row["objective"])
        low, high = stats.t.interval(0.95, len(own) - 1, own.mean(), stats.sem(own))
        np.testing.assert_allclose(
            [row["n"], row["mean"], row["low"], row["high"]], [len(own), own.mean(), low, high]
        )


def test_differences_are_paired_over_common_seeds(runs):
    found = paired_differences(runs, compared="objective", reference="CL", pairs="seed", groups=["r"])
    assert len(found) == 4
    counts = found.set_index(["r", "objective"])["n"].to_dict()
    assert counts == {(0.1, "low"): 7, (0.1, "high"): 7, (0.5, "low"): 5, (0.5, "high"): 6}
    for row in records(found):
        own, reference = values(runs, row["r"], row["objective"]).align(
            values(runs, row["r"], "CL"), join="inner"
        )
        test = stats.ttest_rel(own, reference)
        interval = test.confidence_interval(0.95)
        expected = [(own - reference).mean(), interval.low, interval.high, test.pvalue]
        np.testing.assert_allclose([row["mean"], row["low"], row["high"], row["p"]], expected)


def test_holm_step_by_step():
    p = np.array([0.04, 0.01, np.nan, 0.03, 0.9])
    # The smallest of four times 4, the next times 3, never below the one before: 0.04, 0.09, max(0.09, 0.08), 0.9.
    np.testing.assert_allclose(holm(p), [0.09, 0.04, np.nan, 0.09, 0.9])
    np.testing.assert_allclose(holm(np.array([0.6, 0.7])), [1.0, 1.0])
    assert len(holm(np.array([]))) == 0


def test_two_seeds_and_equal_values_have_no_interval():
    rows = pd.DataFrame(
        {"level": ["a", "b"] * 3, "seed": [0, 0, 1, 1, 2, 2], "value": [1.0, 1.5, 2.0, 2.5, 4.0, 4.5]}
    )
    for n, mean in ((1, [1.0, 1.5]), (2, [1.5, 2.0])):
        few = means(rows[rows["seed"] < n], ["level"])
        assert few["mean"].tolist() == mean and few[["low", "high"]].isna().all(axis=None)
    assert means(rows, ["level"])[["low", "high"]].notna().all(axis=None)
    others = rows.assign(value=[1.0, 1.5, 2.0, 2.6, 4.0, 4.7])
    for n, is_known in ((2, False), (3, True)):
        pairs = paired_differences(others[others["seed"] < n], compared="level", reference="a", pairs="seed")
        assert (pairs[["low", "p", "p_holm"]].notna() == is_known).all(axis=None)
    # All differences are 0.5: most likely the seed changes nothing, which is no evidence.
    equal = paired_differences(rows, compared="level", reference="a", pairs="seed")
    assert equal["mean"].tolist() == [0.5] and equal[["low", "high", "p", "p_holm"]].isna().all(axis=None)


def test_differences_equal_but_for_rounding_are_insignificant():
    """One image more of 599 in every seed: k/599 - (k - 1)/599 is rounded to two numbers."""
    counts = {0: 302, 1: 324, 2: 341}
    rows = [
        {"objective": objective, "seed": seed, "value": (count + more) / 599}
        for seed, count in counts.items()
        for objective, more in (("CL", 0), ("low", 1))
    ]
    assert len({(count + 1) / 599 - count / 599 for count in counts.values()}) > 1
    (found,) = records(
        paired_differences(pd.DataFrame(rows), compared="objective", reference="CL", pairs="seed")
    )
    assert found["n"] == 3 and found["mean"] == pytest.approx(1 / 599)
    assert all(np.isnan(found[name]) for name in ("low", "high", "p", "p_holm"))


def test_p_is_the_share_of_larger_deviations():
    random = np.random.default_rng(0)
    observed = np.array([0.1, -3.6, 0.5, np.nan, 0.0, 4.0])
    gaps = np.column_stack([observed, observed[:, None] + random.normal(size=(6, 400))])
    gaps[0, 7] = gaps[1, 1:101] = np.nan  # as where a draw lacks the positives of a rare finding
    gaps[5, 1:] = gaps[1, 1:] + 7.6  # as gap 1, of few patients
    # No draw changes the last four.
    gaps[4], still = 0.2, np.repeat([[0.0], [-0.3], [0.3], [0.3]], 401, axis=1)
    gaps = np.concatenate([gaps, still])
    n_patients = np.array([500, 10_000, 30, 500, 500, 6, 500, 7, 500, 1])
    known = [0, 1, 2, 5]
    spread = {i: np.nanstd(gaps[i, 1:], ddof=1) for i in known}
    largest = [
        np.nanmax([abs(gaps[i, draw] - gaps[i, 0]) / spread[i] for i in known]) for draw in range(1, 401)
    ]
    p = joint_p(gaps, n_patients)
    for i in known:
        n = n_patients[i]
        statistic = abs(gaps[i, 0]) / (spread[i] * np.sqrt(n / (n - 1)))
        deviate = stats.norm.ppf(stats.t.cdf(statistic, n - 1))
        counted = [x for x, own in zip(largest, gaps[i, 1:], strict=True) if np.isfinite(own)]
        assert p[i] == pytest.approx((sum(x >= deviate for x in counted) + 1) / (len(counted) + 1)), i
    assert p[1] < 0.05 < p[2] and np.isnan(p[[3, 9]]).all()
    # Of n patients all with the same sign, or no less than 400 draws can show.
    assert p[[6, 7, 8, 4]].tolist() == [1.0, 2.0**-6, 1 / 401, 1 / 401]
    assert p[5] > 0.05, "of 6 patients, 4 standard deviations are few"


N = 60


def made(folder: Path, findings: dict[str, int], seed: int = 0, skill: float = 0.0) -> TestedRun:
    """A test of a classifier on patients of whom the first n have the finding; noise by seed and finding."""
    tables = []
    for finding, n_positive in findings.items():
        label = (np.arange(N) < n_positive).astype(int)
        noise = np.random.default_rng([seed, len(finding)]).normal(size=N)
        one = pd.DataFrame({"dicom_id": range(N), "subject_id": range(N), "logit": skill * label + noise})
        tables.append(one.assign(finding=finding, label=label))
    folder.mkdir(parents=True)
    results = {"format_version": 2, "metrics": {}, "seed": seed, "skill": skill}
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "config.yaml").write_text(f"{{seed_everything: {seed}, objective: {skill}}}")
    run = TestedRun(folder, "", folder.name)
    images = pd.DataFrame({"subject_id": range(N + 10)})
    run.__dict__["predictions"] = Predictions({"classification": pd.concat(tables)}, images=images)
    return run


def test_another_side_moves_no_difference(tmp_path):
    """Neither with other findings nor with the same ones; a copy differs by 0, without an interval."""
    both = {"Mass": 30, "Edema": 30}
    a, b, again = (made(tmp_path / x, both, seed) for x, seed in (("a", 1), ("b", 2), ("again", 1)))
    c = made(tmp_path / "c", {"Edema": 30, "Rare": 19}, seed=9)
    few = compared({"a": [a], "b": [b]}, "a", n_draws=60)
    more = compared({"c": [c], "a": [a], "again": [again], "b": [b]}, "a", n_draws=60)
    assert more["b", "a"] == few["b", "a"] and more["b", ""] == few["b", ""]
    path = "classification/by_finding/Mass/auc"
    low, high, p = few["b", "a"][path].low, few["b", "a"][path].high, few["b", "a"][path].p
    assert low is not None and high is not None and low < high and p is not None
    assert more["again", "a"][path][:4] == (0, None, None, 1) and not is_marked(more["again", "a"][path])
    # Means over other findings are not compared, unless they are formed of those that both have.
    assert not any(name == "classification/auc" for name in more["c", "a"])
    shared = compared({"a": [a], "c": [c], "b": [b]}, "a", findings=["Edema"], n_draws=60)
    edema = "classification/by_finding/Edema/auc"
    assert shared["c", ""]["classification/auc"].value == shared["c", ""][edema].value
    assert shared["c", "a"]["classification/auc"][:3] == shared["c", "a"][edema][:3]
    assert {k: v for k, v in shared["b", "a"].items() if "by" in k} == {
        k: v for k, v in few["b", "a"].items() if "by" in k
    }
    rare = more["c", ""]["classification/by_finding/Rare/auc"]
    assert rare.n_patients == 19 and rare.value is not None and rare.low is None
    # The mean over the rare one alone has no interval, though another finding of the side has.
    d = made(tmp_path / "d", {"Edema": 30, "Rare": 19}, seed=4)
    alone = compared({"c": [c], "d": [d]}, "c", findings=["Rare"])
    for pair in (("c", ""), ("d", ""), ("d", "c")):
        mean, often = alone[pair]["classification/auc"], alone[pair][edema]
        assert mean.low is None and mean.n_patients == 19 and often.low is not None, pair


def test_the_method_is_that_of_each_pair(tmp_path):
    """Three seeds against three by seed; against one run by patients, of the mean over the seeds."""
    findings, path = {"Mass": 30, "Edema": 30}, "classification/auc"
    runs = [
        made(tmp_path / f"{name}_{seed}", findings, seed, skill)
        for name, skill in (("weak", 0.5), ("strong", 1.5))
        for seed in range(3)
    ]
    lone = made(tmp_path / "lone", findings, 7, 0.1)
    tens = [made(tmp_path / f"infonce_{seed}", findings, seed) for seed in (10, 11, 12)]
    assert [*sides_of(tens)] == ["infonce (3 seeds)"]
    assert tens[0].config is not None
    tens[0].config["ckpt_path"] = "runs/other/checkpoints/last.ckpt"  # it starts from another training
    assert [*sides_of(tens)] == ["infonce_10", "infonce (2 seeds)"]
    tens[0].config["ckpt_path"] = None
    for run, precision in zip(tens, ("32-true", "bf16-mixed", "32-true"), strict=True):
        (run.folder / "fit.json").write_text(json.dumps({"precision": precision}))
    assert [*sides_of(tens)] == ["infonce (2 seeds)", "infonce_11"]
    sides = sides_of([*runs, lone])
    assert [*sides] == ["weak (3 seeds)", "strong (3 seeds)", "lone"]
    table = compared(sides, "weak (3 seeds)", n_draws=80)
    of_seeds = np.array([run.predictions.values["classification"][path][0] for run in runs]).reshape(2, 3)
    found = table["strong (3 seeds)", "weak (3 seeds)"][path]
    test = stats.ttest_rel(of_seeds[1], of_seeds[0])
    assert found.over == "seeds" and found.n == 3 and found.p == pytest.approx(test.pvalue)
    assert table["strong (3 seeds)", ""][path].over == "seeds"
    draws = [run.draws(n_draws=80)[path] for run in [*runs[:3], lone]]
    expected = draws[3] - np.mean(draws[:3], axis=0)
    found = table["lone", "weak (3 seeds)"][path]
    assert found.over == table["lone", ""][path].over == "patients" and found.n == 80
    assert found[:3] == pytest.approx((expected[0], *np.quantile(expected[1:], [0.025, 0.975])))


@pytest.mark.parametrize("shift", [0, 1])
def test_of_two_seeds_patients_are_drawn(shift, tmp_path):
    """Of two alone, and of the two that sides of three have in common."""
    path = "classification/by_finding/Mass/auc"
    sides = {
        name: [made(tmp_path / f"{name}_{x}", {"Mass": 30}, x, skill) for x in seeds]
        for name, skill, seeds in (
            ("weak", 0.5, range(2 + shift)),
            ("strong", 1.5, range(shift, 2 + 2 * shift)),
        )
    }
    table = compared(sides, "weak", n_draws=80)
    draws = {
        name: np.mean([run.draws(n_draws=80)[path] for run in runs], axis=0) for name, runs in sides.items()
    }
    for pair, values in {
        ("strong", ""): draws["strong"],
        ("strong", "weak"): draws["strong"] - draws["weak"],
    }.items():
        found = table[pair][path]
        assert found.value == pytest.approx(values[0]) and found.over == (
            "seeds" if shift and not pair[1] else "patients"
        )
        if found.over == "patients":
            assert found[1:3] == pytest.approx(np.quantile(values[1:], [0.025, 0.975]))


@pytest.mark.parametrize("changed", ["predictions", "metric"])
def test_draws_are_kept_until_predictions_or_metrics_change(changed, tmp_path, monkeypatch):
    run = made(tmp_path / "a", {"Mass": 30})
    first = run.draws(n_draws=20)
    monkeypatch.setattr("medclip_dcl.report.draws.bootstrap_numbers", lambda *_, **__: {})
    for path, values in run.draws(n_draws=20).items():
        np.testing.assert_array_equal(values, first[path])
    if changed == "predictions":
        run.file_of("classification").parent.mkdir()
        run.file_of("classification").write_text("other patients")
    else:
        path, value = next(iter(run.predictions.values["classification"].items()))
        run.predictions.values["classification"][path] = value + 0.1
    assert run.draws(n_draws=20) == {}


@pytest.mark.parametrize("by_prompts", [False, True])
def test_later_numbers_are_families_of_their_own(by_prompts, tmp_path):
    """The average precision of two classifiers is as old as their AUC, that of prompts is not."""
    pair = [made(tmp_path / str(seed), {"Mass": 30, "Edema": 30}, seed).predictions for seed in (1, 2)]
    families = [{"balanced_acc"}, {"auc", "acc", "average_precision"}]
    if by_prompts:
        families = [{"balanced_acc"}, {"auc", "acc"}, {"average_precision"}]
        cases = pair[0].tables["classification"]
        cases = cases.assign(score_positive=cases["logit"], score_negative=np.arange(len(cases)) % 7)
        pair[0] = replace(pair[0], tables={"classification": cases.drop(columns="logit")})
    found = bootstrap_differences(pair[0], pair[1], 60)
    a, b = (bootstrap_numbers(one, 60) for one in pair)
    names = {path: path.rpartition("/")[2] for path in found}
    for family in families:
        paths = [path for path in found if names[path] in family]
        p = joint_p(np.stack([a[path] - b[path] for path in paths]), np.full(len(paths), 30))
        assert [found[path].p for path in paths] == pytest.approx(p)


def test_p_of_few_patients_is_that_of_few(tmp_path):
    """Not only numbers of a finding rest on few patients."""
    rows = pd.DataFrame({"dicom_id": [*"abcd"], "subject_id": range(4), "phrase": "p", "box": range(4)})
    rows = rows.assign(category="Edema", cnr=1.0, miou=0.5, pair_cnr_signed=1.0, pair_miou=0.5)
    predictions = Predictions({"grounding": rows.assign(cnr_signed=1.0)})
    assert predictions.n_behind("grounding/cnr_signed") == 4


def test_an_interval_over_patients_and_seeds_has_both_as_limits():
    """Alike seeds: percentiles over patients; alike patients: the t interval; both: their variances add."""
    patients, seeds = np.random.default_rng(0).normal(0.5, 2.0, 4001), np.array([0.1, 0.4, 1.1])
    alike = over_patients_and_seeds(np.tile(patients, (3, 1)))
    assert (alike.low, alike.high) == pytest.approx(np.quantile(patients[1:], [0.025, 0.975]))
    found = over_patients_and_seeds(np.repeat(seeds[:, None], 4001, axis=1))
    ends = stats.t.interval(0.95, 2, seeds.mean(), stats.sem(seeds))
    assert (found.low, found.high) == pytest.approx(ends, rel=0.02) and found.value == pytest.approx(
        seeds.mean()
    )
    many = np.linspace(-1, 1, 500)
    both = over_patients_and_seeds(many[:, None] * 30 + patients)
    expected = 1.96 * np.sqrt(2.0**2 + (many.std(ddof=1) * 30) ** 2 / 500)
    assert both.low is not None and both.high is not None
    assert (both.high - both.low) / 2 == pytest.approx(expected, rel=0.05)
    assert over_patients_and_seeds(patients[None]).low is None
    cut = over_patients_and_seeds(
        np.repeat([[0.1], [0.4]], 41, axis=1), (0.0, 1.0)
    )  # t with one degree of freedom
    assert (cut.low, cut.high) == (-1, 1)
