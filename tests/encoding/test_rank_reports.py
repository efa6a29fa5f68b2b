"""The ranking of reports, learned on the reports of training, against scikit-learn and loops."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

from medclip_dcl.common.files import write_parquet
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet
from medclip_dcl.encoding import rank_reports
from medclip_dcl.metrics.false_negatives import auc_within_anchors
from tests.program import verb

main = verb("rank")
NEW = ["Zzz.", "Edema."]
"""Texts of two sentences that only a validate report has: without a known term, and with one."""


@pytest.fixture(scope="module", autouse=True)
def few_steps():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_reports, "_MIN_STEPS", 60)
        patch.setattr(rank_reports, "_BATCH", 16)
        yield


def edited(small_set, folder, **tables):
    """A copy of the small set with other tables."""
    shutil.copytree(small_set, folder)
    for name, change in tables.items():
        write_parquet(change(pd.read_parquet(folder / f"{name}.parquet")), folder / f"{name}.parquet")
    return folder


def reports(table: pd.DataFrame) -> pd.DataFrame:
    """Two topics: reports of even studies say the first five sentences, the others the rest; one says both new."""
    ids = [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    rows = [
        (study, "findings", place, sentence)
        for study in table["study_id"].unique()
        for place, sentence in enumerate(x for x in ids[study % 2] if (study * 7 + x) % 5)
    ]
    rows += [(5024, "impression", 90 + place, 9 + place) for place in range(2)]
    return pd.DataFrame(rows, columns=table.columns)


@pytest.fixture(scope="module")
def ranked(small_set, tmp_path_factory):
    """A ranked set of two topics with two new sentences, and what the command printed."""
    folder = edited(
        small_set,
        tmp_path_factory.mktemp("ranked") / "set",
        reports=reports,
        sentences=lambda t: pd.concat(
            [
                t.assign(
                    text=[
                        f"{x} Edema of lungs, {'first' if i < 5 else 'second'} kind."
                        for i, x in enumerate(t["text"])
                    ]
                ),
                pd.DataFrame({"sentence_id": [9, 10], "text": NEW, "n_reports": 1}),
            ],
            ignore_index=True,
        ),
        classes=lambda t: pd.DataFrame(
            {
                "sentence_id": range(11),
                "class_id": [i >= 5 for i in range(11)],
                "rho": 0.5,
                "sentence_share": 0.5,
            }
        ).astype({"class_id": "int64"}),
        image_classes=lambda t: pd.DataFrame(
            {"dicom_id": [f"{i:08x}-0" for i in range(42)], "class_id": [i % 2 for i in range(42)]}
        ),
    )
    return folder


def test_reports_of_the_sentences_topic_rank_first(ranked, capsys):
    main([str(ranked)])
    printed = capsys.readouterr().out
    assert "11 sentences, 24 training reports" in printed and "GiB" in printed
    assert "1 sentences have no known term, or one score for all reports" in printed
    auc = [float(line.split()[-1]) for line in printed.splitlines() if "AUC within" in line]
    assert auc[0] > 0.95 and auc[1] > 0.9
    ranking = PreparedSet(ranked).ranking()
    assert ranking.sentence_id.tolist() == [*range(11)] and len(ranking.study_id) == 24 + 8
    assert ranking.sentences.dtype == np.float16 and ranking.sentences.shape == (11, 128 + 101)
    # The quantiles are those of the rounded vectors' scores over training reports; of no known term all 0.
    vectors, of_reports = (
        ranking.sentences[:, :128].astype(np.float64),
        ranking.reports[:24].astype(np.float64),
    )
    expected = np.quantile(vectors @ of_reports.T, np.linspace(0, 1, 101), axis=1).T
    assert ranking.sentences[:, 128:] == pytest.approx(expected, rel=2e-3, abs=2e-3)
    assert not ranking.sentences[9].any() and ranking.sentences[10].any()
    # Each part's scores have deviation 1 and mean 0.
    for part in np.split(np.arange(128), 2):
        scores = np.delete(vectors, 9, axis=0)[:, part] @ of_reports[:, part].T
        assert scores.std(1) == pytest.approx(np.ones(10), abs=0.01) and abs(scores.mean(1)).max() < 0.01


def test_sentences_of_one_score_are_counted(ranked, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(ranked, tmp_path / "set")
    shutil.rmtree(folder / "ranking", ignore_errors=True)
    monkeypatch.setattr(rank_reports, "_SAME", np.inf)
    main([str(folder), "--rest_alone"])
    assert "11 sentences have no known term, or one score" in capsys.readouterr().out


def test_an_existing_ranking_is_kept(ranked, capsys):
    main([str(ranked)])
    (file,) = (ranked / "ranking").iterdir()
    before = file.stat().st_mtime_ns
    capsys.readouterr()
    main([str(ranked)])
    assert "nothing to do" in capsys.readouterr().out and file.stat().st_mtime_ns == before


def rewritten(file: Path, rows: list[int], change: str) -> None:
    """Exchange rows of a column, or leave out rows, and keep what else the file says."""
    table, metadata = pq.read_table(file, partitioning=None), pq.read_metadata(file).metadata
    if change == "fewer":
        table = table.take(rows)
    else:
        table = table.set_column(1, "vector", table["vector"].combine_chunks().take(pa.array(rows)))
    with pq.ParquetWriter(file, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({key: metadata[key] for key in metadata if key != b"ARROW:schema"})


@pytest.mark.parametrize(
    ("kind", "rows", "change"),
    [
        ("ranking", [*range(11)][::-1], "exchanged"),
        ("ranking_reports", [1, 0, *range(2, 32)], "exchanged"),
        ("ranking_reports", [*range(31)], "fewer"),
    ],
)
def test_a_damaged_ranking_is_refused_and_made_again(ranked, tmp_path, capsys, kind, rows, change):
    main([str(ranked)])
    folder = shutil.copytree(ranked, tmp_path / "set")
    (file,) = (folder / kind).iterdir()
    rewritten(file, rows, change)
    with pytest.raises(
        PreparedDataError, match=rf"{kind}/.*expected numbers with the digest .*medclip-dcl rank SET"
    ):
        PreparedSet(folder).ranking()
    main([str(folder)])
    assert "made again" in capsys.readouterr().out
    assert file.read_bytes() == (ranked / kind / file.name).read_bytes()


def test_a_ranking_without_a_validate_report_is_refused(ranked, tmp_path, capsys):
    main([str(ranked)])
    folder = edited(
        ranked, tmp_path / "set", images=lambda t: t.assign(use=t["use"].replace("test", "validate"))
    )
    with pytest.raises(PreparedDataError, match=r"ranking_reports/.*6 of 38 reports have no row.*rank SET"):
        PreparedSet(folder).ranking()
    main([str(folder)])
    assert len(PreparedSet(folder).ranking().study_id) == 38


def test_a_killed_command_leaves_no_ranking(ranked, tmp_path, monkeypatch):
    folder = tmp_path / "set"
    shutil.copytree(ranked, folder)
    for name in ("ranking", "ranking_reports"):
        shutil.rmtree(folder / name, ignore_errors=True)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(rank_reports.np, "sort", killed)
        rank_reports.rank_reports(rank_reports.Rank(data=folder))
    assert not PreparedSet(folder).models("ranking")
    first = rank_reports.rank_reports(rank_reports.Rank(data=folder))
    main([str(ranked)])
    assert first.read_bytes() == (ranked / "ranking" / first.name).read_bytes()


def test_labels_codes_and_options_name_the_ranking(ranked, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "set"
    shutil.copytree(ranked, folder)
    shutil.rmtree(folder / "ranking", ignore_errors=True)
    other = pd.read_parquet(folder / "labels.parquet").assign(Edema=1.0, Pneumothorax=np.nan)
    write_parquet(other.convert_dtypes(), tmp_path / "other.parquet")  # codes as integers or missing
    main([str(folder)])
    [own] = PreparedSet(folder).models("ranking")
    for words in (["--rest_alone"], ["--labels", str(tmp_path / "other.parquet")]):
        main([str(folder), *words])
    assert len(PreparedSet(folder).models("ranking")) == 3
    with pytest.raises(PreparedDataError, match=r"several report rankings .*name one \(the option ranking\)"):
        PreparedSet(folder).ranking()
    capsys.readouterr()
    with monkeypatch.context() as patch:  # as of an earlier release
        patch.setattr(rank_reports, "_CODES_VERSION", 1)
        main([str(folder)])
    assert "nothing to do" not in (printed := capsys.readouterr().out) and "data.ranking" in printed
    assert len(PreparedSet(folder).models("ranking")) == 4
    blank = other.assign(**dict.fromkeys(other.columns[1:], np.nan)).assign(Edema=0.0)
    write_parquet(blank, folder / "labels.parquet")
    with pytest.raises(PreparedDataError, match="labels.parquet is not what it was learned from"):
        PreparedSet(folder).ranking(own)
    shutil.rmtree(folder / "ranking")
    main([str(folder)])
    assert capsys.readouterr().out.count("the rest of the report alone ranks") == 1
    assert PreparedSet(folder).ranking().reports.shape[1] == 64


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        (
            "sentences",
            lambda t: t.assign(text=t["text"] + "!"),
            "expected report rankings of the set's texts, .*rank SET",
        ),
        ("reports", lambda t: t.iloc[:-1], "expected report rankings of the set's texts, found others"),
    ],
)
def test_a_ranking_of_other_reports_is_refused(ranked, tmp_path, table, change, message):
    main([str(ranked)])
    folder = edited(ranked, tmp_path / "set", **{table: change})
    with pytest.raises(PreparedDataError, match=message):
        PreparedSet(folder).ranking()
    assert any("ranking" in problem for problem in PreparedSet(folder).score_problems())


def test_reports_that_cannot_be_ranked_are_one_line(small_set, tmp_path):
    alone = edited(small_set, tmp_path / "a", sentences=lambda t: t.assign(text=[f"w{i}" for i in range(9)]))
    with pytest.raises(PreparedDataError, match="expected a word that two sentences"):
        rank_reports.rank_reports(rank_reports.Rank(data=alone))
    labels = pd.read_parquet(small_set / "labels.parquet")
    for wrong, words in (
        (labels.assign(subject_id=7), r"1, 0, -1 or blank in all other columns, found 0 .*\['subject_id'\]"),
        (pd.concat([labels, labels[:2]]), "one row for each study_id, .* found 2 repeated study_id"),
    ):
        write_parquet(wrong, tmp_path / "labels.parquet")
        with pytest.raises(PreparedDataError, match=words):
            rank_reports.rank_reports(rank_reports.Rank(data=small_set, labels=tmp_path / "labels.parquet"))
    with pytest.raises(PreparedDataError, match="--rest_alone: expected no --labels"):
        rank_reports.rank_reports(rank_reports.Rank(data=small_set, labels=tmp_path, rest_alone=True))
    short = edited(small_set, tmp_path / "b", reports=lambda t: t[t["position"] == 0])
    with pytest.raises(PreparedDataError, match="two training reports of several sentences"):
        rank_reports.rank_reports(rank_reports.Rank(data=short))


def test_silent_reports_rank_as_denying_ones(small_set, tmp_path):
    """Pneumothorax by study: present, denied, not mentioned, not mentioned and without a row."""
    said = [[6, 7, 2], [0, 1, 2], [2, 3], [2, 3]]
    texts = {1: "No pneumothorax seen.", 6: "Small right pneumothorax."}

    def spoken(table: pd.DataFrame) -> pd.DataFrame:
        studies = table["study_id"].unique()
        rows = [(x, "findings", place, i) for x in studies for place, i in enumerate(said[x % 4])]
        return pd.DataFrame(rows, columns=table.columns)

    def labelled(table: pd.DataFrame) -> pd.DataFrame:
        blank = table.assign(**dict.fromkeys(table.columns[1:], np.nan))
        blank["Pneumothorax"] = (table["study_id"] % 4).map({0: 1.0, 1: 0.0})
        return blank[table["study_id"] % 4 < 3]

    folder = edited(
        small_set,
        tmp_path / "set",
        reports=spoken,
        labels=labelled,
        sentences=lambda t: t.assign(text=t["sentence_id"].map(texts).fillna(t["text"])),
    )
    ranking = PreparedSet(folder).ranking(rank_reports.rank_reports(rank_reports.Rank(data=folder)).stem)
    by_labels = ranking.reports[:, 64:].astype(np.float32) @ ranking.sentences[0, 64:128].astype(np.float32)
    present, denied, silent, no_row = (by_labels[ranking.study_id % 4 == code] for code in range(4))
    assert present.max() < denied.min() and np.ptp([*denied, *silent, *no_row]) == 0


def posterior_of(folder: Path, name: str | None = None) -> np.ndarray:
    """(sentence, report) P of a set, by numpy."""
    found = PreparedSet(folder).ranking(name, "posterior")
    log_g = -np.log1p(np.exp(-found.sentences[:, :-1].astype(np.float64) @ found.reports.T))
    return np.exp(np.minimum(log_g - found.sentences[:, -1:], 0))


@pytest.fixture(scope="module")
def believed(ranked, tmp_path_factory):
    """A set of two topics, whose reports are labelled by their topic, with a posterior; and what was printed."""
    folder = edited(
        ranked,
        tmp_path_factory.mktemp("believed") / "set",
        labels=lambda t: t.assign(**dict.fromkeys(t.columns[1:], 0.0)).assign(
            Edema=(t["study_id"] % 2).map({0: np.nan, 1: 1.0}),
            Fracture=(t["study_id"] % 4).map({0: -1.0, 1: -1.0}),
        ),
    )
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(rank_reports, "_MIN_STEPS", 300)
        main([str(folder), "--posterior"])
    return folder, printed.getvalue()


def test_the_posterior_is_that_of_the_topic(believed):
    folder, printed = believed
    assert (
        "12 of 14 columns have one value" in printed and "Edema" not in printed and "Cardiomegaly" in printed
    )
    assert "2 sentences have no known term, or no training report says them" in printed
    auc = [float(line.split()[-1]) for line in printed.splitlines() if "AUC within" in line]
    assert auc[0] == 1 and auc[1] > 0.9
    prepared = PreparedSet(folder)
    p, study = posterior_of(folder), prepared.ranking(None, "posterior").study_id
    assert p.shape == (11, 32) and not p[9:].any()
    is_first = study % 2 == 0
    for sentence in range(9):
        own = is_first if sentence < 5 else ~is_first
        assert p[sentence, own].min() > 0.7 and p[sentence, ~own].max() < 0.3


def test_a_posterior_of_other_reports_or_labels_is_refused(believed, tmp_path):
    for table, change, words in (
        ("reports", lambda t: t.iloc[:-1], "expected report posteriors of the set's texts, found others"),
        ("labels", lambda t: t.assign(Edema=0.0), "labels.parquet is not what it was learned from"),
        (
            "images",
            lambda t: t.assign(use="train"),
            "expected report posteriors .* or texts were changed since",
        ),
    ):
        folder = edited(believed[0], tmp_path / table, **{table: change})
        with pytest.raises(PreparedDataError, match=rf"{words}.*medclip-dcl rank SET --posterior"):
            PreparedSet(folder).ranking(kind="posterior")
        assert any("posterior" in problem for problem in PreparedSet(folder).score_problems())


def test_labels_of_ones_own_may_differ_from_the_sets(believed, tmp_path, capsys):
    labels = pd.read_parquet(believed[0] / "labels.parquet")
    write_parquet(labels[["study_id", "Edema"]], tmp_path / "own.parquet")
    blank = labels.assign(**dict.fromkeys(labels.columns[1:], np.nan))
    folder = edited(believed[0], tmp_path / "set", labels=lambda t: blank)
    shutil.rmtree(folder / "posterior")
    with pytest.raises(
        PreparedDataError, match="--posterior expects a training report with a label.* --labels"
    ):
        rank_reports.rank_reports(rank_reports.Rank(data=folder, posterior=True))
    file = rank_reports.rank_reports(
        rank_reports.Rank(data=folder, posterior=True, labels=tmp_path / "own.parquet")
    )
    assert posterior_of(folder, file.stem).max() == 1
    ones = labels.assign(Edema=1.0)[["study_id", "Edema"]]
    write_parquet(ones, tmp_path / "ones.parquet")
    with pytest.raises(PreparedDataError, match="1 of 1 columns have one value .*name another table"):
        rank_reports.rank_reports(
            rank_reports.Rank(data=folder, posterior=True, labels=tmp_path / "ones.parquet")
        )
    with pytest.raises(PreparedDataError, match="--rest_alone: expected no --posterior"):
        rank_reports.rank_reports(rank_reports.Rank(data=folder, rest_alone=True, posterior=True))


def test_auc_within_anchors_is_that_of_each_anchor():
    random = np.random.default_rng(0)
    scores = random.integers(0, 6, (7, 31)).astype(float)  # ties
    fits, says = random.random((7, 31)) < 0.4, random.random((7, 31)) < 0.3
    fits[0], fits[1] = True, False
    expected = [
        roc_auc_score(np.delete(fits[sentence], own), np.delete(scores[sentence], own))
        for sentence, own in zip(*np.nonzero(says), strict=True)
        if len(set(np.delete(fits[sentence], own))) == 2
    ]
    assert auc_within_anchors(scores, fits, says) == pytest.approx(np.mean(expected))
    assert np.isnan(auc_within_anchors(scores[:2], fits[:2], says[:2]))
