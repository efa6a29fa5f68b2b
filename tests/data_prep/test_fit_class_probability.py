"""Estimating (a, k) of eta = a * p_LM^k from reports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from data_prep.fit_class_probability import count_sentences, fit_log_linear, main
from medclip_dcl.objectives import LanguageModelClassProbability
from medclip_dcl.prepared import FORMAT_VERSION, PreparedDataError, PreparedSet, write_json, write_table


@pytest.mark.parametrize(("a", "k"), [(0.3, 0.4), (0.05, 0.9), (0.9, 0.05)])
def test_recovers_the_truth_from_binomial_counts(a: float, k: float) -> None:
    generator = np.random.default_rng(5)
    log_p = -generator.gamma(2.0, 3.0, size=4000)
    counts = generator.binomial(7000, a * np.exp(k * log_p))
    fit = fit_log_linear(log_p, counts, 7000, np.ones(4000))
    assert fit.a == pytest.approx(a, rel=0.02) and fit.k == pytest.approx(k, rel=0.02)
    assert fit.at_bound == ()


def test_is_the_maximum_of_the_weighted_binomial_likelihood() -> None:
    """No point of a grid around it is more likely."""
    generator = np.random.default_rng(6)
    log_p, weights = -generator.gamma(3.0, 10.0, size=200), generator.integers(1, 50, size=200)
    counts = generator.binomial(37, 0.4 * np.exp(0.05 * log_p) * generator.uniform(0.5, 1.5, 200))

    def log_likelihood(a: float, k: float) -> float:
        eta = a * np.exp(k * log_p)
        return float((weights * (counts * np.log(eta) + (37 - counts) * np.log1p(-eta))).sum())

    fit = fit_log_linear(log_p, counts, 37, weights)
    best = log_likelihood(fit.a, fit.k)
    for da in (0.9, 0.99, 0.999, 1.001, 1.01, 1.1):
        for dk in (0.9, 0.99, 0.999, 1.0, 1.001, 1.01, 1.1):
            assert log_likelihood(fit.a * da, fit.k * dk) < best


def test_weights_are_repetitions() -> None:
    generator = np.random.default_rng(7)
    log_p = -generator.gamma(2.0, 3.0, size=50)
    counts, weights = generator.binomial(90, 0.3 * np.exp(0.3 * log_p)), generator.integers(1, 6, size=50)
    weighted = fit_log_linear(log_p, counts, 90, weights)
    repeated = fit_log_linear(
        np.repeat(log_p, weights), np.repeat(counts, weights), 90, np.ones(weights.sum())
    )
    assert weighted.a == pytest.approx(repeated.a, rel=1e-5) and weighted.k == pytest.approx(
        repeated.k, rel=1e-5
    )


@pytest.mark.parametrize(
    ("counts", "bound"),
    [
        ([0, 3, 6, 9], "k is at its bound 0"),  # the less probable, the more frequent
        ([10, 10, 10, 10], "a is at its bound 0.999"),  # in every report
        ([9, 0, 0, 0], "k is at its bound 10"),  # nothing but the most probable one
    ],
)
def test_says_what_stands_at_a_bound(counts: list[int], bound: str) -> None:
    fit = fit_log_linear(np.array([0.0, -0.02, -0.04, -0.06]), np.array(counts), 10, np.ones(4))
    assert bound in fit.at_bound
    assert 0 <= fit.a < 1 and fit.k >= 0


def write_set(folder: Path, with_truth: bool = False, seed: int = 0) -> Path:
    """40 sentences; sentence s stands in a report with probability 0.6 * exp(0.5 * log p), log p = -s / 4."""
    generator = np.random.default_rng(seed)
    share = 0.6 * np.exp(0.5 * -np.arange(40) / 4)
    studies = 900
    use = np.array(["train"] * 500 + ["validate"] * 300 + ["test"] * 60 + ["grounding"] * 40)
    said = generator.random((studies, 40)) < share
    said[use == "test"] = True  # would turn the estimate upside down
    said[use == "grounding"] = True
    study, sentence = said.nonzero()
    reports = pd.DataFrame({"study_id": study, "section": "findings", "position": 0, "sentence_id": sentence})
    twice = reports.assign(section="impression").sample(frac=0.5, random_state=1)
    images = pd.DataFrame(
        {
            "dicom_id": [f"i{s}" for s in range(studies)],
            "subject_id": range(studies),
            "study_id": range(studies),
        }
    ).assign(view="PA", official_split="train", use=use, path="none.jpg", height=9, width=7)
    images = pd.concat([images, images.iloc[:200].assign(dicom_id=[f"second{s}" for s in range(200)])])
    tables = {
        "reports": pd.concat([reports, twice], ignore_index=True),
        "images": images.reset_index(drop=True),
        "sentences": pd.DataFrame({"sentence_id": range(40), "text": "Secret finding.", "n_reports": 1}),
    }
    if with_truth:
        truth = {"sentence_id": range(40), "class_id": range(40), "rho": share, "sentence_share": share[::-1]}
        tables["classes"] = pd.DataFrame(truth)
    for name, table in tables.items():
        write_table(table, folder / f"{name}.parquet", name)
    write_json({"format_version": FORMAT_VERSION, "phantom": with_truth}, folder / "dataset.json")
    write_scores(folder, "bert-12345678")
    return folder


def write_scores(folder: Path, name: str, log_p: np.ndarray | None = None) -> None:
    log_p = -np.arange(40) / 4 if log_p is None else log_p
    scores = pd.DataFrame({"sentence_id": range(40), "n_tokens": 5, "log_p": log_p})
    write_table(scores, folder / "log_p" / f"{name}.parquet", "log_p")


def test_counts_reports_not_mentions_nor_images(tmp_path: Path) -> None:
    prepared = PreparedSet(write_set(tmp_path / "set"))
    table, trials = count_sentences(prepared)
    reports = prepared.table("reports").drop_duplicates(["study_id", "sentence_id"])
    for row in table.itertuples():
        mine = reports.loc[reports["sentence_id"] == row.sentence_id, "study_id"]
        assert (row.train_reports, row.validate_reports) == ((mine < 500).sum(), mine.between(500, 799).sum())
    assert trials == reports.loc[reports["study_id"].between(500, 799), "study_id"].nunique()


def test_command_writes_a_configuration_of_the_truth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = write_set(tmp_path / "set", with_truth=True), tmp_path / "out" / "eta.yaml"
    main(["--data", str(folder), "--output", str(file)])
    overlay = yaml.safe_load(file.read_text())
    chosen = overlay["model"]["init_args"]["class_probability"]
    assert chosen["class_path"] == "medclip_dcl.objectives.LanguageModelClassProbability"
    assert chosen["init_args"]["a"] == pytest.approx(0.6, rel=0.06)
    assert chosen["init_args"]["k"] == pytest.approx(0.5, rel=0.06)
    assert overlay["data"]["init_args"]["log_p"] == "bert-12345678"
    LanguageModelClassProbability(**chosen["init_args"])(torch.tensor([-1.0]))
    printed = capsys.readouterr().out
    assert "100% 0.3" in printed and "with rho" in printed and "warning" not in printed
    assert "Spearman correlation of eta with the truth: 1.000 with rho" in printed
    assert "-1.000 with the share of sentences" in printed
    assert "Secret" not in printed and "Secret" not in file.read_text()


def test_four_digits_and_the_same_file_every_time(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set")
    files = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    for file in files:
        main(["--data", str(folder), "--output", str(file)])
    assert files[0].read_text() == files[1].read_text()
    written = yaml.safe_load(files[0].read_text())["model"]["init_args"]["class_probability"]["init_args"]
    assert all(float(f"{written[name]:.4g}") == written[name] for name in ("a", "k"))


def test_warns_where_eta_is_constant_or_next_to_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_set(tmp_path / "set")
    write_scores(folder, "upside_down", np.arange(40) / 4 - 10)
    main(["--data", str(folder), "--log_p", "upside_down", "--output", str(tmp_path / "eta.yaml")])
    printed = capsys.readouterr().out
    assert "warning: k is at its bound 0; log p says nothing about how common a sentence is" in printed
    assert "undefined (one of the two does not vary)" in printed
    assert "for nine anchors of ten: next to a constant class probability" in printed


def _nan(folder: Path) -> None:
    log_p = -np.arange(40.0)
    log_p[[3, 7]] = np.nan
    write_scores(folder, "bert-12345678", log_p)


def _second(folder: Path) -> None:
    write_scores(folder, "another")


def _none(folder: Path) -> None:
    (folder / "log_p" / "bert-12345678.parquet").unlink()


def _no_validate(folder: Path) -> None:
    images = pd.read_parquet(folder / "images.parquet")
    images["use"] = images["use"].replace("validate", "excluded")
    write_table(images, folder / "images.parquet", "images")


def _nothing_in_common(folder: Path) -> None:
    reports = pd.read_parquet(folder / "reports.parquet")
    kept = (reports["study_id"] < 500) == (reports["sentence_id"] < 20)
    write_table(reports[kept], folder / "reports.parquet", "reports")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            _nan,
            r"log_p/bert-12345678\.parquet: 2 of 40 training sentences have NaN log_p \(first: sentence_id 3\)",
        ),
        (_second, r"holds several sentence scores \(another, bert-12345678\)"),
        (_none, "has no sentence scores"),
        (_no_validate, "has no validate reports"),
        (_nothing_in_common, r"none of the 20 training sentences stands in one of the \d+ validate reports"),
    ],
)
def test_what_cannot_be_estimated_is_refused_by_name(tmp_path: Path, damage, message: str) -> None:
    folder = write_set(tmp_path / "set")
    damage(folder)
    with pytest.raises(PreparedDataError, match=message):
        main(["--data", str(folder), "--output", str(tmp_path / "eta.yaml")])
    assert not (tmp_path / "eta.yaml").exists()
