"""`medclip-dcl score`: tables of scores of files, without a text on the screen."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from medclip_dcl.common.errors import UserError
from medclip_dcl.networks.language_model import load_language_model
from medclip_dcl.scoring import pseudo_log_likelihood, score, sentence_file
from tests.program import verb
from tests.scoring.families import TEXTS, write

ODD = [*TEXTS, 'a "quoted"\rline, with commas']


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("roberta", tmp_path_factory.mktemp("model"))


def run(file: Path, model: Path, output: Path, *options: str) -> pd.DataFrame:
    verb("score")([str(file), "--model", str(model), "--output", str(output), "--device", "cpu", *options])
    if output.suffix == ".parquet":
        return pd.read_parquet(output)
    return pd.read_csv(output, dtype={"text": str}, keep_default_na=False, na_values={"log_p": [""]})


def test_lines_become_a_table(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("\ufeff" + "\n".join(TEXTS) + "\n", encoding="utf-8")
    found = run(file, model, tmp_path / "new" / "scores.csv")
    expected = pseudo_log_likelihood(*load_language_model(model), TEXTS, truncate=True)
    # pandas 2 reads the last digit less exactly.
    pd.testing.assert_frame_equal(found, expected, check_dtype=False, rtol=1e-14, atol=0)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["scores.csv"]
    said = "".join(capsys.readouterr())
    assert f"{len(TEXTS)} sentences, median" in said and "no score (NaN) (rows, from 0: 3)" in said
    assert not any(word in said.lower() for word in ("heart", "pneumothorax", "effusion"))


@pytest.mark.parametrize("kinds", [("csv", "parquet"), ("parquet", "csv")])
def test_tables_keep_their_columns(model: Path, tmp_path: Path, kinds: tuple[str, str]) -> None:
    table = pd.DataFrame({"id": [f"00{i}" for i in range(len(ODD))], "text": ODD})
    file, output = (tmp_path / f"{name}.{kind}" for name, kind in zip(("in", "out"), kinds, strict=True))
    if kinds[0] == "csv":
        table.to_csv(file, index=False, quoting=2)
    else:
        table["text"] = table["text"].replace("", None).astype("category")  # as tables of repeated sentences
        table[::-1].to_parquet(file)  # with an index
        table = table[::-1].reset_index(drop=True).astype(object).fillna("")
    found = run(file, model, output, "--within_word_l2r")
    expected = pseudo_log_likelihood(
        *load_language_model(model), table["text"].tolist(), within_word_l2r=True, truncate=True
    )
    assert list(found.columns) == ["id", "text", "n_tokens", "log_p", "n_unknown", "truncated"]
    assert found["text"].tolist() == table["text"].tolist()
    assert found["log_p"].equals(expected["log_p"])
    assert found["id"].astype(int).tolist() == table["id"].astype(int).tolist()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", "id\tfinding\n01\tNo effusion.\n2\t\n"),
        ("A.TSV", "id\tfinding\n01\tNo effusion.\n2\t\n".encode("utf-16")),
        ("a.jsonl", '{"id": "01", "finding": "No effusion."}\n{"id": "2", "finding": ""}\n'),
        ("a.jsonl", '{"id": "01", "finding": "No effusion."}\n{"id": "2", "finding": ""}\n'.encode("utf-16")),
        ("a.csv", "id,finding\n01,No effusion.\n2,\n".encode("utf-16-le")),
        ("a.txt", "No effusion.\r\n\r\n".encode("utf-16")),
    ],
)
def test_further_formats_are_read(tmp_path: Path, name: str, content: str | bytes) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    table = sentence_file._read(tmp_path / name, None if name == "a.txt" else "finding")
    column = "text" if name == "a.txt" else "finding"
    assert table[column].tolist() == ["No effusion.", ""]
    assert name == "a.txt" or table["id"].tolist() == ["01", "2"]


def test_a_quote_that_joins_sentences_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('text\tid\n5 cm tube.\t1\n"No effusion.\t3\nClear."\t4\n')
    with pytest.raises(UserError, match="a.tsv: a quote joins rows"):
        sentence_file._read(tmp_path / "a.tsv", None)


def test_tokens_get_rows_of_their_own(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.csv"
    pd.DataFrame({"finding": TEXTS}).to_csv(file, index=False)
    scores = run(file, model, tmp_path / "out.parquet", "--column", "finding")
    tokens = run(file, model, tmp_path / "tokens.parquet", "--column", "finding", "--per_token")
    summed = tokens.groupby("sentence")["log_p"].agg(["sum", "size"])
    assert summed["sum"].tolist() == pytest.approx(scores["log_p"].dropna().tolist(), rel=1e-12)
    assert summed["size"].tolist() == scores["n_tokens"][scores["n_tokens"] > 0].tolist()
    assert tokens["token"][:2].tolist() == ["No", "Ġpneumothorax"]


def test_a_killed_command_goes_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, output = tmp_path / "texts.txt", tmp_path / "scores.parquet"
    file.write_text("\n".join(TEXTS), encoding="utf-8")
    expected = run(file, model, tmp_path / "whole.parquet")
    original, asked = score.score_batches, []

    def some(network, plan, numbers, **options):
        asked.append(list(numbers))
        for count, found in enumerate(original(network, plan, numbers, **options)):
            if len(asked) == 1 and count == 2:
                raise KeyboardInterrupt
            yield found

    monkeypatch.setattr(score, "score_batches", some)
    with pytest.raises(KeyboardInterrupt):
        run(file, model, output)
    assert not output.is_file()
    with pytest.raises(UserError, match="differs in sentences; give the options of before, or remove it"):
        run(file, model, output, "--within_word_l2r")
    pd.testing.assert_frame_equal(run(file, model, output), expected)
    assert asked[-1] == asked[0][2:] and len(asked) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "scores.parquet", "texts.txt", "whole.parquet",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.csv", "secret\nheart\n", [], "has no column 'text'"),
        ("a.csv", "text\nheart, secret\n", [], "cannot be read .*ParserWarning"),
        ("a.txt", b"secret \xe6dema", [], "cannot be read as UTF-8"),
        (
            "a.txt",
            "secret",
            ["--column", "text"],
            "--column: a.txt is read as lines .* .csv, .tsv, .jsonl, .parquet",
        ),
        (
            "a.json",
            '[{"text": "secret"}]',
            [],
            "a.json is JSON; expected lines of text, or one of .csv, .tsv, .jsonl",
        ),
        ("a.jsonl", '{"text": "secret"', [], "cannot be read"),
        ("a.jsonl", '{"other": "secret"}', [], "--column: a.jsonl has no column 'text'"),
        ("a.csv", b"PAR1 secret", [], "a.csv is a Parquet file"),
        ("a.tsv", "text\nsecret\tsecret\n", [], "cannot be read .*ParserWarning"),
        ("a.csv", "text,log_p\nsecret,1\n", [], "expected no column log_p"),
        ("a.txt", "secret", ["--output", "folder.csv"], "--output: .* found the folder folder.csv"),
        ("a.txt", "secret", ["--output", "a.npy"], "--output: expected another .csv or .parquet file"),
        ("a.csv", "text\nsecret\n", ["--output", "a.csv"], "--output: expected another"),
        ("b.txt", None, [], "no file b.txt"),
        ("b.txt", None, ["--tasks", "2"], "--tasks: expected a SET .* found the file b.txt; leave it out"),
    ],
)
def test_refusals_show_no_text(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    name: str, content: str | bytes | None, options: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("folder.csv").mkdir()
    if content is not None:
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError, match=message) as caught:
        verb("score")([name, "--model", str(model), "--output", "out.csv", *options])
    assert "secret" not in str(caught.value) + "".join(capsys.readouterr())
    assert not Path("out.csv").exists()
