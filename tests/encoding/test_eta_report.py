"""The report on eta: its contents, its files, and its errors."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from matplotlib.figure import Figure

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import write_json
from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.data.eta import training_sentences
from medclip_dcl.data.prepared import FORMAT_VERSION, PreparedDataError, PreparedSet, write_table
from medclip_dcl.encoding import eta_report
from medclip_dcl.encoding.eta_report import scored_sentences
from medclip_dcl.objectives import LanguageModelClassProbability
from medclip_dcl.training.class_probability import _report_quantiles
from tests.program import verb

main = verb("eta")

NAME = "bert-12345678"


def write_set(folder: Path, with_truth: bool = False) -> Path:
    """40 sentences; sentence s is in a report with probability 0.6 * exp(0.5 * log p), log p = -s / 4."""
    generator = np.random.default_rng(0)
    share = 0.6 * np.exp(0.5 * -np.arange(40) / 4)
    studies = 900
    use = np.array(["train"] * 500 + ["validate"] * 300 + ["test"] * 60 + ["grounding"] * 40)
    said = generator.random((studies, 40)) < share
    said[use != "train"] = True
    study, sentence = said.nonzero()
    reports = pd.DataFrame({"study_id": study, "section": "findings", "position": 0, "sentence_id": sentence})
    twice = reports.assign(section="impression").sample(frac=0.5, random_state=1)
    images = pd.DataFrame({"dicom_id": [f"i{s}" for s in range(studies)], "subject_id": range(studies)})
    images = images.assign(study_id=range(studies), view="PA", official_split="train", use=use)
    images = images.assign(path="none.jpg", height=9, width=7)
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
    write_scores(folder, NAME)
    return folder


def write_scores(folder: Path, name: str, log_p: np.ndarray | None = None) -> None:
    log_p = -np.arange(40) / 4 if log_p is None else log_p
    scores = pd.DataFrame({"sentence_id": range(40), "n_tokens": 5, "log_p": log_p})
    write_table(scores, folder / "log_p" / f"{name}.parquet", "log_p")


@pytest.fixture(scope="module")
def plain_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    return write_set(tmp_path_factory.mktemp("plain") / "set")


@pytest.fixture
def no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than everything else."""
    monkeypatch.setattr(eta_report, "_figure", lambda *_: Figure(figsize=(1, 1)))


def class_probability(folder: Path) -> dict[str, float]:
    """init_args that the written configuration gives to the class probability."""
    overlay = yaml.safe_load((folder / "class_probability.yaml").read_text())
    chosen = overlay["model"]["init_args"]["class_probability"]
    assert chosen["class_path"] == "medclip_dcl.objectives.LanguageModelClassProbability"
    LanguageModelClassProbability(**chosen["init_args"])(torch.tensor([-1.0]))
    assert overlay["data"]["init_args"]["log_p"] == NAME
    return chosen["init_args"]


def test_counts_training_reports_not_mentions_nor_images(plain_set: Path) -> None:
    prepared = PreparedSet(plain_set)
    reports = prepared.table("reports").drop_duplicates(["study_id", "sentence_id"])
    expected = reports[reports["study_id"] < 500].groupby("sentence_id").size()
    found = scored_sentences(prepared, NAME, 0.2, 0.35)[0].set_index("sentence_id")
    assert found["train_reports"].to_dict() == expected.to_dict()
    assert "rho" not in found


def test_command_writes_report_figure_and_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, again = write_set(tmp_path / "set", with_truth=True), tmp_path / "again"
    main([str(folder)])
    printed = capsys.readouterr().out
    assert class_probability(folder / "eta") == {"a": 0.2, "k": 0.35, "max_eta": 0.3}, "SSD's"
    assert (folder / "eta" / "eta.png").read_bytes().startswith(b"\x89PNG")
    sentences = scored_sentences(PreparedSet(folder), NAME, 0.2, 0.35)[0]
    log_p = np.repeat(sentences["log_p"], sentences["train_reports"])
    median = f"{0.2 * np.exp(0.35 * np.median(log_p)):.3g}"
    eta = next(line for line in printed.splitlines() if line.startswith("| eta "))
    assert eta.split(" | ")[4] == median and eta.endswith("| 0.2 |")
    assert "rho, the share of images of which it is true: 1.000" in printed and "warning" not in printed
    assert "its number of tokens: undefined (one of the two does not vary)" in printed
    # The reader of the report sees the texts; the terminal, and the configuration, do not.
    report = (folder / "eta" / "report.md").read_text()
    assert "Secret finding." in report and "## Least probable sentences" in report
    assert "ecret" not in printed and "ecret" not in (folder / "eta" / "class_probability.yaml").read_text()
    for line in printed.splitlines()[:-1]:
        assert line in report
    main([str(folder), "--output", str(again)])
    for name in ("report.md", "class_probability.yaml", "eta.png"):
        assert (folder / "eta" / name).read_bytes() == (again / name).read_bytes()


def table_of(printed: str) -> dict[str, list[str]]:
    """Cells of each row of the table of false negatives, by how they are counted."""
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("|")]
    place = next(i for i, row in enumerate(rows) if row[0] == "false negatives in a batch of")
    return {row[0]: row[1:] for row in rows[place + 2 :]}


@pytest.mark.usefixtures("no_figure")
def test_false_negatives_by_sentence_labels_and_truth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_set(tmp_path / "set", with_truth=True)
    images = pd.read_parquet(folder / "images.parquet").drop_duplicates("study_id")
    # Of the 500 training reports 100 have edema, 20 perhaps, 50 of these a fracture; 80 have no label at all.
    edema = np.select([images.index < 100, images.index < 120], [1.0, -1.0], np.nan)
    labels = pd.DataFrame(np.nan, index=images.index, columns=list(CHEXPERT)).assign(Edema=edema)
    labels.loc[images.index < 420, "Fracture"] = (images.index[:420] < 50).astype(float)
    labels.insert(0, "study_id", images["study_id"])
    write_table(labels, folder / "labels.parquet", "labels")
    table = pd.read_parquet(folder / "sentences.parquet")
    table.loc[[0, 1, 2], "text"] = ["Edema.", "No edema.", "Edema, no fracture."]
    write_table(table, folder / "sentences.parquet", "sentences")
    rows = ["Edema.,Edema,+", "No edema.,Edema,-", '"Edema, no fracture.",Edema,+']
    rows += ['"Edema, no fracture.",Fracture,-', "Not of the set.,Edema,+"]
    (tmp_path / "rows.csv").write_text("\n".join(["sentence,finding,sign", *rows]))
    main([str(folder), "--sentences", str(tmp_path / "rows.csv")])
    printed = capsys.readouterr().out
    said = training_sentences(PreparedSet(folder)).merge(pd.read_parquet(folder / "classes.parquet"))
    n, share = said["train_reports"].to_numpy(), np.array([120, 320, 70]) / 420
    others = len({*pd.read_parquet(folder / "reports.parquet").query("study_id < 500")["study_id"]}) - 1
    expected = {
        "reports with the same sentence (a lower bound)": (n * (n - 1)).sum() / n.sum() / others,
        "the same, for the sentences of --sentences": (n * (n - 1))[:3].sum() / n[:3].sum() / others,
        "reports whose labels agree, for these sentences": (n[:3] * share).sum() / n[:3].sum(),
        "images of which it is true (the truth)": (n * said["rho"]).sum() / n.sum(),
    }
    named = f"{n[:3].sum() / n.sum():.0%}"
    assert table_of(printed) == {
        counted: [part, *(f"{mean * b:,.1f}" for b in (63, 511, 4095))]
        for (counted, mean), part in zip(expected.items(), ["100%", named, named, "100%"], strict=True)
    }
    assert "labels agree, sentences with a + (2 sentences): 1.000" in printed
    assert "labels agree (3 sentences): 0.500" in printed


def test_singletons_are_counted_by_anchors(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set")
    reports = pd.read_parquet(folder / "reports.parquet")
    # Sentences 30 to 39 keep one training report.
    is_kept = (reports["sentence_id"] < 30) | (reports["study_id"] >= 500) | (reports["study_id"] == 7)
    single = pd.DataFrame({"study_id": 7, "section": "findings", "position": 0, "sentence_id": range(30, 40)})
    write_table(pd.concat([reports[is_kept], single]), folder / "reports.parquet", "reports")
    anchors = training_sentences(PreparedSet(folder))["train_reports"]
    summary = "\n".join(eta_report._summary(scored_sentences(PreparedSet(folder), NAME, 0.2, 0.35)[0]))
    assert f"{10 / anchors.sum():.1%} of the anchors (25% of the sentences) in no other report" in summary


@pytest.mark.usefixtures("no_figure")
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("Edema.,Edema,?", r"--sentences: .*expected the sign \+ or -, found '\?' in row 1"),
        ("Edema.,Oedema,+", "--sentences .*does not label 'Oedema'"),
        ("Never said.,Edema,+", "--sentences .*expected sentences of training reports"),
    ],
)
def test_wrong_sentences_are_named(tmp_path: Path, plain_set: Path, row: str, message: str) -> None:
    folder = shutil.copytree(plain_set, tmp_path / "set")
    labels = pd.DataFrame({"study_id": range(500), **dict.fromkeys(CHEXPERT, np.nan), "Edema": 1.0})
    write_table(labels, folder / "labels.parquet", "labels")
    (tmp_path / "rows.csv").write_text(f"sentence,finding,sign\n{row}\n")
    with pytest.raises(UserError, match=message):
        main([str(folder), "--sentences", str(tmp_path / "rows.csv")])


@pytest.mark.usefixtures("no_figure")
def test_a_and_k_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_set(tmp_path / "set")
    main([str(folder), "--a", "0.25", "--k", "0.01"])
    assert class_probability(folder / "eta") == {"a": 0.25, "k": 0.01, "max_eta": 0.3}
    written = (folder / "eta" / "class_probability.yaml").read_text()
    assert "medclip-dcl eta: (a, k) as given by --a and --k." in written
    said = capsys.readouterr().out
    assert "eta = 0.25 * exp(0.01 * log p) (given)" in said
    assert "for nine of ten anchors: almost a constant class probability" in said


@pytest.mark.usefixtures("no_figure")
def test_unusual_eta_gives_a_constant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_set(tmp_path / "set")
    given = [str(folder), "--a", "0.001", "--k"]
    # log p of the median sentence is near -4.8, of the median anchor near -1.2: each distinct one counts once.
    main([*given, "0.45"])
    assert class_probability(folder / "eta")["k"] == 0.45
    capsys.readouterr()
    main([*given, "0.5"])
    constant = {"class_path": "medclip_dcl.objectives.ConstantClassProbability", "init_args": {"eta": 0.05}}
    overlay = yaml.safe_load((folder / "eta" / "class_probability.yaml").read_text())
    assert overlay == {"model": {"init_args": {"class_probability": constant}}}
    said = capsys.readouterr().out
    assert "e-05, lies outside [0.0001, 0.5]" in said
    assert "SSD's constant eta, 0.05" in said and "CXR-BERT" in said
    # The least probable sentences have an eta above 0.
    report = (folder / "eta" / "report.md").read_text()
    assert " 0.0000 |" not in report and "e-05 |" in report


def test_training_warns_by_the_same_rule(recwarn: pytest.WarningsRecorder) -> None:
    _report_quantiles(pd.Series([0.1, 0.5, 0.6, 1e-4, 1e-5, 1e-5, 1e-4]), True)
    assert not recwarn
    with pytest.warns(UserWarning, match=r"lies outside .*medclip-dcl eta says whether .*dcl_005"):
        _report_quantiles(pd.Series([0.3, 1e-5, 9.9e-5]), True)
    # The truth has no (a, k).
    with pytest.warns(UserWarning, match=r"lies outside .*floor$"):
        _report_quantiles(pd.Series([0.3, 0.51, 0.6]), False)


def test_a_score_that_is_missing_is_refused(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set")
    write_scores(folder, NAME, np.where(np.arange(40) == 3, np.nan, -np.arange(40.0)))
    with pytest.raises(
        PreparedDataError, match=r"1 of 40 training .* have NaN log_p \(first: sentence_id 3\)"
    ):
        main([str(folder)])
    assert not (folder / "eta").exists()


@pytest.mark.usefixtures("no_figure")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--a", "0.5"], "--a and --k go together"),
        (["--a", "1.5", "--k", "0"], r"class_probability.a: expected a number in \[0, 1\), found 1.5"),
        (["--a", "0.5", "--k", "inf"], "class_probability.k: expected at least 0, found inf"),
        (["--log_p", "none"], r"no sentence scores named none in .* \(there: bert-12345678\)"),
    ],
)
def test_wrong_options_are_named(plain_set: Path, options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main([str(plain_set), *options])


def test_a_set_without_training_is_refused(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set")
    images = pd.read_parquet(folder / "images.parquet")
    write_table(images.assign(use="excluded"), folder / "images.parquet", "images")
    with pytest.raises(PreparedDataError, match="has no train reports"):
        main([str(folder)])
