"""The report on eta: its contents, its files, and its errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from matplotlib.figure import Figure

from data_prep import eta_report
from data_prep.eta_report import main
from data_prep.scores.eta_estimates import Estimates, LogLinearFit, bound_term, count_sentences, estimate
from medclip_dcl.common.errors import UserError, WorseResultError
from medclip_dcl.common.files import write_json
from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.data.prepared import FORMAT_VERSION, PreparedDataError, PreparedSet, write_table
from medclip_dcl.objectives import LanguageModelClassProbability
from medclip_dcl.training.class_probability import _report_quantiles


def write_set(folder: Path, with_truth: bool = False, with_labels: bool = False) -> Path:
    """40 sentences; sentence s stands in a report with probability 0.6 * exp(0.5 * log p), log p = -s / 4."""
    generator = np.random.default_rng(0)
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
    if with_labels:
        # Even sentences say that there is an effusion, odd ones that there is none; 30% of the studies have one.
        texts = ["Secret effusion." if s % 2 == 0 else "No secret effusion." for s in range(40)]
        tables["sentences"]["text"] = texts
        labels = pd.DataFrame({"study_id": range(studies), **dict.fromkeys(CHEXPERT, np.nan)})
        labels["Pleural Effusion"] = np.where(np.arange(studies) % 10 < 3, 1.0, np.nan)
        tables["labels"] = labels
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


@pytest.fixture(scope="module")
def plain_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    return write_set(tmp_path_factory.mktemp("plain") / "set")


@pytest.fixture(scope="module")
def plain(plain_set: Path) -> Estimates:
    return estimate(PreparedSet(plain_set))


def test_counts_reports_not_mentions_nor_images(tmp_path: Path) -> None:
    prepared = PreparedSet(write_set(tmp_path / "set"))
    table, numbers = count_sentences(prepared)
    reports = prepared.table("reports").drop_duplicates(["study_id", "sentence_id"])
    for row in table.itertuples():
        mine = reports.loc[reports["sentence_id"] == row.sentence_id, "study_id"]
        assert (row.train_reports, row.validate_reports) == ((mine < 500).sum(), mine.between(500, 799).sum())
    assert numbers["validate"] == reports.loc[reports["study_id"].between(500, 799), "study_id"].nunique()
    assert numbers["train"] == reports.loc[reports["study_id"] < 500, "study_id"].nunique()


def class_probability(folder: Path) -> dict[str, float]:
    """init_args that the written configuration gives to the class probability."""
    overlay = yaml.safe_load((folder / "class_probability.yaml").read_text())
    chosen = overlay["model"]["init_args"]["class_probability"]
    assert chosen["class_path"] == "medclip_dcl.objectives.LanguageModelClassProbability"
    LanguageModelClassProbability(**chosen["init_args"])(torch.tensor([-1.0]))
    assert overlay["data"]["init_args"]["log_p"] == "bert-12345678"
    return chosen["init_args"]


@pytest.fixture
def no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than everything else."""
    monkeypatch.setattr(eta_report, "_figure", lambda *_: Figure(figsize=(1, 1)))


def test_command_writes_report_figure_and_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_set(tmp_path / "set", with_truth=True, with_labels=True)
    main(["--data", str(folder)])
    assert class_probability(folder / "eta") == {"a": 0.2, "k": 0.35, "max_eta": 0.3}, "SSD's"
    capsys.readouterr()
    main(["--data", str(folder), "--estimate", "reports"])
    chosen = class_probability(folder / "eta")
    assert chosen["a"] == pytest.approx(0.6, rel=0.06) and chosen["k"] == pytest.approx(0.5, rel=0.06)
    assert (folder / "eta" / "eta.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    report = (folder / "eta" / "report.md").read_text()
    assert "100% 0.3" in printed and "- rho (truth): 1.000" in printed and "warning" not in printed
    # The reader of the report sees the texts; the terminal, and the configuration, do not.
    assert "Secret effusion." in report and "## Least probable training sentences" in report
    assert "ecret" not in printed and "ecret" not in (folder / "eta" / "class_probability.yaml").read_text()
    for line in printed.splitlines()[:-1]:
        assert line in report


def test_the_figure_shows_where_the_anchors_are(tmp_path: Path) -> None:
    # One sentence that hardly occurs and is far less probable than all others would press them into a corner.
    folder = write_set(tmp_path / "set", with_truth=True)
    write_scores(folder, "bert-12345678", np.append(-np.arange(39) / 4, -500.0))
    found = estimate(PreparedSet(folder), None)
    figure = eta_report._figure(found, found.fits["reports"], "reports")
    shown = [axis for axis in figure.axes if axis.get_xlabel().startswith("log p")]
    assert len(shown) == 3  # the histogram, and rho as the truth and as reports tell it
    log_p, occurs = found.table["log_p"].to_numpy(), found.table["train_reports"].to_numpy()
    assert log_p.min() == -500
    for axis in shown[1:]:
        left, right = axis.get_xlim()
        assert right == 0
        assert occurs[log_p < left].sum() <= 0.05 * occurs.sum() <= occurs[log_p <= left].sum()
    assert shown[0].get_xlim()[0] > -10
    # No cell of the figure is blank.
    assert len(figure.axes) == 4 and all(axis.axison and axis.has_data() for axis in figure.axes)


def legend_of_truth(figure: Figure) -> list[str]:
    legend = figure.axes[2].get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def test_every_estimate_at_a_bound_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_set(tmp_path / "set", with_truth=True)
    write_scores(folder, "bert-12345678", -np.arange(40) / 4 - 30)
    main(["--data", str(folder), "--estimate", "reports"])
    said = capsys.readouterr().out
    found = estimate(PreparedSet(folder))
    assert [name for name, fit in found.fits.items() if fit.at_bound] == list(found.fits)
    for name, fit in found.fits.items():
        assert f"\n| {name} | 0.999 (at its bound) | {fit.k:.4g} | " in said
    assert "| ssd | 0.2 | 0.35 | " in said
    assert (
        "warning: a is at its bound 0.999; sentences with log p well below 0 are so common that eta would have to "
        "exceed 1 at log p = 0\n"
    ) in said
    legend = legend_of_truth(eta_report._figure(found, found.fits["reports"], "reports"))
    least_squares = found.fits["truth_least_squares"]
    assert f"truth_least_squares: a 0.999 (at its bound), k {least_squares.k:.4g}" in legend
    free = LogLinearFit(0.99996, 0.123456)
    with_given = found._replace(fits={**found.fits, "given": free})
    legend = legend_of_truth(eta_report._figure(with_given, free, "given"))
    assert "given: a 0.9999, k 0.1235" in legend


def test_sources_and_estimates(tmp_path: Path, plain: Estimates) -> None:
    folder = write_set(tmp_path / "set", with_truth=True, with_labels=True)
    found = estimate(PreparedSet(folder))
    table = found.table.set_index("sentence_id")
    assert table["rho_labels"].tolist() == pytest.approx([0.3, 0.7] * 20)
    for name in ("truth_least_squares", "truth_bound"):
        assert (found.fits[name].a, found.fits[name].k) == pytest.approx((0.6, 0.5), rel=1e-3)
    assert table["rho_reports"].tolist() == (table["train_reports"] / found.reports["train"]).tolist()
    # Every positive report has one label, which 30% of the studies have.
    assert table["label_frequency"].dropna().unique() == pytest.approx([0.3])
    assert plain.sources == ["reports"]


@pytest.mark.usefixtures("no_figure")
def test_the_table_of_the_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_set(tmp_path / "set", with_truth=True)
    main(["--data", str(folder), "--a", "0.25", "--k", "0.1"])
    chosen = class_probability(folder / "eta")
    assert (chosen["a"], chosen["k"]) == (0.25, 0.1)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    (given,) = [row for row in rows if row.startswith("| given |")]
    source = estimate(PreparedSet(folder)).source("truth")
    eta = 0.25 * np.exp(0.1 * source.log_p)
    assert f"| {bound_term(eta, source.rho, source.weights):.3f} (" in given
    capped = bound_term(np.minimum(eta, 0.3), source.rho, source.weights)
    assert f"({capped:.3f})" in given
    (none,) = [row for row in rows if row.startswith("| none (0) |")]
    assert f"| {bound_term(0 * eta, source.rho, source.weights):.3f} (" in none


@pytest.mark.usefixtures("no_figure")
def test_sentences_that_are_true_of_every_image_are_counted_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_set(tmp_path / "set", with_truth=True, with_labels=True)
    truth = pd.read_parquet(folder / "classes.parquet")
    truth.loc[0, "rho"] = 1.0
    write_table(truth, folder / "classes.parquet", "classes")
    labels = pd.read_parquet(folder / "labels.parquet")
    labels["Pleural Effusion"] = 0.0  # no study has one: every "no effusion" is true of all
    write_table(labels, folder / "labels.parquet", "labels")
    sentences = pd.read_parquet(folder / "sentences.parquet")
    sentences["text"] = "No secret effusion."
    write_table(sentences, folder / "sentences.parquet", "sentences")
    main(["--data", str(folder)])
    found = estimate(PreparedSet(folder))
    assert found.sources == ["truth", "reports"]
    left_out = found.table["train_reports"][0] / found.table["train_reports"].sum()
    said = capsys.readouterr().out
    assert f"(39 sentences; {left_out:.1%} of the anchors have rho 1" in said
    # They have a logarithm, 0, and take part in least squares.
    weights, log_rho = found.table["train_reports"].to_numpy(), np.log(found.table["rho_truth"].to_numpy())
    slope, intercept = np.polyfit(found.table["log_p"], log_rho, 1, w=np.sqrt(weights))
    fit = found.fits["truth_least_squares"]
    assert [fit.k, np.log(fit.a)] == pytest.approx([slope, intercept], rel=1e-3)


@pytest.mark.usefixtures("no_figure")
def test_findings_without_labels_in_training_are_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_set(tmp_path / "set", with_labels=True)
    labels = pd.read_parquet(folder / "labels.parquet")
    labels["Edema"] = 0.0
    labels.loc[labels["study_id"] >= 500, "Fracture"] = 1.0  # no training study: says nothing here
    write_table(labels, folder / "labels.parquet", "labels")
    sentences = pd.read_parquet(folder / "sentences.parquet")
    sentences.loc[:2, "text"] = ["No fracture.", "Old fracture.", "Stable mediastinum."]
    write_table(sentences, folder / "sentences.parquet", "sentences")
    main(["--data", str(folder)])
    said = capsys.readouterr().out
    assert (
        "- without labels: 12 of 14 CheXpert columns hold no label for any training study (Atelectasis, "
        "Cardiomegaly, Consolidation, Enlarged Cardiomediastinum, Fracture, "
    ) in said
    assert "Pneumothorax, Support Devices); sentences that name one of these have no rho (labels)" in said
    assert "names (37 sentences)" in said
    table = estimate(PreparedSet(folder)).table
    assert table["rho_labels"][:3].isna().all() and table["rho_labels"][3:].isin([0.3, 0.7]).all()
    # No label at all: there is no such source, and the report says why.
    labels[list(CHEXPERT)] = np.nan
    write_table(labels, folder / "labels.parquet", "labels")
    main(["--data", str(folder)])
    assert "- without labels: 14 of 14" in capsys.readouterr().out
    assert estimate(PreparedSet(folder)).sources == ["reports"]


@pytest.mark.usefixtures("no_figure")
def test_says_when_a_constant_is_as_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_set(tmp_path / "set", with_truth=True)
    main(["--data", str(folder), "--estimate", "reports"])
    assert "ConstantClassProbability" not in capsys.readouterr().out
    main(["--data", str(folder), "--a", "0.001", "--k", "0.5"])
    assert "warning: capped at 0.3 as in training, this eta is" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["my: lm #1-12345678", "2024", "null", "@x", 'a "b"', "1_000"])
def test_any_name_of_scores_stands_in_the_configuration(plain: Estimates, name: str) -> None:
    written = yaml.safe_load(eta_report._yaml(plain.fits["reports"], "reports", name, plain))
    assert written["data"]["init_args"]["log_p"] == name


@pytest.mark.usefixtures("no_figure")
def test_a_close_to_one_stays_below_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_set(tmp_path / "set")
    main(["--data", str(folder), "--a", "0.99997", "--k", "0.1"])
    assert class_probability(folder / "eta")["a"] == 0.9999
    assert (
        "eta_report: (a, k) as given by --a and --k." in (folder / "eta/class_probability.yaml").read_text()
    )
    said = capsys.readouterr().out
    assert "eta = 0.9999 * exp(0.1 * log p) (given)" in said and "| given | 0.9999 | 0.1 |" in said
    with pytest.raises(UserError, match="--estimate does not go with --a and --k"):
        main(["--data", str(folder), "--a", "0.5", "--k", "0.1", "--estimate", "reports"])
    with pytest.raises(UserError, match="--a and --k go together"):
        main(["--data", str(folder), "--a", "0.5"])


@pytest.mark.usefixtures("no_figure")
def test_another_estimate_can_be_chosen(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set")
    main(["--data", str(folder), "--estimate", "reports_bound", "--output", str(tmp_path / "out")])
    expected = estimate(PreparedSet(folder)).fits["reports_bound"]
    assert class_probability(tmp_path / "out")["k"] == pytest.approx(expected.k, rel=1e-3)
    with pytest.raises(
        PreparedDataError, match="does not allow the estimate 'truth_bound'; there are reports, "
    ):
        main(["--data", str(folder), "--estimate", "truth_bound"])
    with pytest.raises(PreparedDataError, match="does not allow the estimate ''; there are reports, "):
        main(["--data", str(folder), "--estimate", ""])
    with pytest.raises(
        PreparedDataError, match=r"--a must lie in \[0, 1\) and --k be at least 0 and finite, got"
    ):
        main(["--data", str(folder), "--a", "1.5", "--k", "0"])
    with pytest.raises(PreparedDataError, match="finite, got 0.5 and inf"):
        main(["--data", str(folder), "--a", "0.5", "--k", "inf"])
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(PreparedDataError, match=r"--output .*file cannot be written .*; name a folder"):
        main(["--data", str(folder), "--output", str(file)])


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="a folder that even root cannot write")
@pytest.mark.usefixtures("no_figure")
@pytest.mark.parametrize("output", ["/proc/foo/bar", "/proc", "/proc/version/below", "x" * 300])
def test_an_output_that_cannot_be_written_is_one_line(plain_set: Path, output: str) -> None:
    with pytest.raises(PreparedDataError, match=rf"^--output \S*{output}\b.*; name "):
        main(["--data", str(plain_set), "--output", str(plain_set / output)])


def test_four_digits_and_the_same_files_every_time(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set")
    outputs = [tmp_path / "one", tmp_path / "two"]
    for output in outputs:
        main(["--data", str(folder), "--estimate", "reports", "--output", str(output)])
    for name in ("report.md", "class_probability.yaml", "eta.png"):
        assert (outputs[0] / name).read_bytes() == (outputs[1] / name).read_bytes()
    chosen = class_probability(outputs[0])
    assert all(float(f"{chosen[name]:.4g}") == chosen[name] for name in ("a", "k"))


@pytest.mark.usefixtures("no_figure")
def test_warns_where_eta_is_constant_or_next_to_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_set(tmp_path / "set")
    write_scores(folder, "upside_down", np.arange(40) / 4 - 10)
    main(["--data", str(folder), "--log_p", "upside_down", "--estimate", "reports"])
    printed = capsys.readouterr().out
    assert "warning: k is at its bound 0; log p says nothing about how common a sentence is" in printed
    assert "undefined (one of the two does not vary)" in printed
    assert "for nine of ten anchors: almost a constant class probability" in printed


@pytest.mark.usefixtures("no_figure")
def test_what_training_would_warn_about_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_set(tmp_path / "set")
    given = ["--a", "0.001", "--k"]
    # log p of the median sentence is near -4.8, of the median anchor near -1.2: each distinct one counts once.
    main(["--data", str(folder), *given, "0.45"])
    assert class_probability(folder / "eta")["k"] == 0.45
    capsys.readouterr()
    main(["--data", str(folder), *given, "0.5"])
    overlay = yaml.safe_load((folder / "eta" / "class_probability.yaml").read_text())
    assert overlay == {
        "model": {
            "init_args": {
                "class_probability": {
                    "class_path": "medclip_dcl.objectives.ConstantClassProbability",
                    "init_args": {"eta": 0.05},
                }
            }
        }
    }
    said = capsys.readouterr().out
    assert "e-05, lies outside [0.0001, 0.5]" in said
    assert "--estimate reports or reports_least_squares or reports_bound" in said
    assert "SSD's constant eta, 0.05" in said and "CXR-BERT" in said
    # The least probable sentences have an eta above 0.
    report = (folder / "eta" / "report.md").read_text()
    assert " 0.0000 |" not in report and "e-05 |" in report
    # No estimate that depends on the scores: nothing is recommended for them.
    write_scores(folder, "bert-12345678", np.arange(40) / 4 - 10)
    main(["--data", str(folder), *given, "9", "--output", str(tmp_path / "other")])
    said = capsys.readouterr().out
    assert "the scores of bert-12345678 cannot carry eta here" in said and "--estimate r" not in said


@pytest.mark.usefixtures("no_figure")
def test_no_constant_replaces_estimates_of_other_scores(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set")
    write_scores(folder, "other")
    command = ["--data", str(folder), "--a", "0.001", "--k"]
    main([*command, "0.45", "--log_p", "bert-12345678"])
    with pytest.raises(WorseResultError, match="kept: .* of other scores than other; give another --output"):
        main([*command, "0.5", "--log_p", "other"])
    assert class_probability(folder / "eta")["k"] == 0.45


def test_training_warns_by_the_same_rule(recwarn: pytest.WarningsRecorder) -> None:
    _report_quantiles(pd.Series([0.1, 0.5, 0.6, 1e-4, 1e-5, 1e-5, 1e-4]), True)
    assert not recwarn
    with pytest.warns(
        UserWarning, match=r"lies outside .*data_prep\.eta_report says whether .*dcl_005\.yaml"
    ):
        _report_quantiles(pd.Series([0.3, 1e-5, 9.9e-5]), True)
    # The truth has no (a, k).
    with pytest.warns(UserWarning, match=r"lies outside .*floor$"):
        _report_quantiles(pd.Series([0.3, 0.51, 0.6]), False)


def _nan(folder: Path) -> None:
    log_p = -np.arange(40.0)
    log_p[[3, 7]] = np.nan
    write_scores(folder, "bert-12345678", log_p)


def _infinite(folder: Path) -> None:
    write_scores(folder, "bert-12345678", np.append(-np.arange(39.0), -np.inf))


def _negated(folder: Path) -> None:
    write_scores(folder, "bert-12345678", np.arange(40.0))


def _twice(folder: Path) -> None:
    scores = pd.read_parquet(folder / "log_p" / "bert-12345678.parquet")
    write_table(pd.concat([scores, scores[5:7]]), folder / "log_p" / "bert-12345678.parquet", "log_p")


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
        (
            _infinite,
            r"bert-12345678\.parquet: 1 of 40 rows hold an infinite log_p; .*sentence_id 39 and log_p -inf",
        ),
        (
            _negated,
            r"bert-12345678\.parquet: 39 of 40 rows hold a log_p above 0; .*sentence_id 1 and log_p 1",
        ),
        (_twice, r"bert-12345678\.parquet: 2 of 42 rows repeat a sentence_id; .*sentence_id 5 "),
        (_second, r"holds several sentence scores \(another, bert-12345678\)"),
        (_none, "has no sentence scores"),
        (_no_validate, "has no validate reports"),
        (_nothing_in_common, r"none of the 20 training sentences occurs in one of the \d+ validate reports"),
    ],
)
def test_what_cannot_be_estimated_is_refused_by_name(tmp_path: Path, damage, message: str) -> None:
    folder = write_set(tmp_path / "set")
    damage(folder)
    with pytest.raises(PreparedDataError, match=message):
        main(["--data", str(folder)])
    assert not (folder / "eta").exists()
