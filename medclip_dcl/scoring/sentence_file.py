"""Scores of the sentences of a file, for ``medclip-dcl score FILE``."""

from __future__ import annotations

import csv
import io
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from medclip_dcl.common.devices import usable_device
from medclip_dcl.common.errors import MissingFileError, UserError
from medclip_dcl.common.files import encoding_of, kind_of_file, parse_json, write_bytes, write_parquet
from medclip_dcl.common.journal import Journal
from medclip_dcl.networks.bert_folder import model_fingerprint, resolve_folder
from medclip_dcl.networks.language_model import load_language_model
from medclip_dcl.scoring.score import restored, score_left, score_summary, scoring_plan

_TABLES = (".csv", ".parquet")
_READ = (".csv", ".tsv", ".jsonl", ".parquet")


def score_file(
    file: Path,
    source: str,
    output: Path,
    *,
    device: str,
    dtype: str,
    column: str | None,
    per_token: bool,
    **options: Any,
) -> None:
    """Score the sentences of a file by a language model; `options` are those of `ScoringPlan`.

    The same call continues after a kill. No text is printed.
    """
    if output.suffix not in _TABLES or output.absolute() == file.absolute() or output.is_dir():
        found = f"the folder {output}" if output.is_dir() else output
        raise UserError(f"--output: expected another .csv or .parquet file than FILE, found {found}")
    table = _read(file, column)
    texts = table[column or "text"].astype(object).fillna("").tolist()  # a categorical one takes no new value
    model, tokenizer = load_language_model(resolve_folder(source))
    model = model.to(used := usable_device(device))
    plan = scoring_plan(model, tokenizer, texts, truncate=True, **options)
    meaning: dict[str, Any] = {"sentences": plan.fingerprint, "dtype": dtype, "device": used.type}
    meaning["token_budget"] = options["token_budget"]
    meaning["model"] = model_fingerprint(model, model.config.to_diff_dict())
    output.parent.mkdir(parents=True, exist_ok=True)
    progress = output.with_name(f".{output.name}.progress.jsonl")
    kept = Journal(progress, meaning, "give the options of before, or remove it")
    values, left = restored(plan, kept.entries)
    score_left(model, plan, values, left, dtype=getattr(torch, dtype), kept=kept)
    scores = plan.table(values).drop(columns="text")
    _write(plan.token_table(values) if per_token else pd.concat([table, scores], axis=1), output)
    kept.remove()
    print(score_summary(scores, output, pd.Series(scores.index), "rows, from 0:"))


def _read(file: Path, column: str | None) -> pd.DataFrame:
    """The table, or the lines as a table of one column."""
    if not file.is_file():
        raise MissingFileError(f"no file {file}")
    suffix = file.suffix.lower()
    kind = "" if suffix == ".parquet" else kind_of_file(file)
    if kind and (kind, suffix) != ("JSON", ".jsonl"):
        raise UserError(f"{file} is {kind}; expected lines of text, or one of {', '.join(_READ)}")
    if column is not None and suffix not in _READ:
        raise UserError(
            f"--column: {file} is read as lines of text; give one of {', '.join(_READ)}, or leave it out"
        )
    column = column or "text"
    try:
        table = pd.read_parquet(file) if suffix == ".parquet" else _parsed(file.read_bytes(), suffix, column)
    except (ValueError, pd.errors.ParserWarning) as error:  # pandas', pyarrow's and the decoder's
        raise UserError(
            f"{file} cannot be read as UTF-8 in that format ({type(error).__name__}); write it again"
        ) from error
    if column not in table:  # its header may be a text
        raise UserError(f"--column: {file} has no column {column!r}; give the name of one of its columns")
    if not all(isinstance(text, str) for text in table[column].dropna()):
        raise UserError(f"--column: expected texts, found other values in {column!r}; give another column")
    if suffix == ".tsv" and table[column].str.contains("\t").any():
        raise UserError(f"{file}: a quote joins rows: {column!r} holds a tab; double that quote")
    if added := {"n_tokens", "log_p", "n_unknown", "truncated"} & {*table.columns}:
        raise UserError(f"{file}: expected no column {min(added)}, which is added; rename it")
    return table.reset_index(drop=True)


def _parsed(content: bytes, suffix: str, column: str) -> pd.DataFrame:
    text = io.StringIO(content.decode(encoding_of(content)), newline="" if suffix in _READ else None)
    if suffix == ".jsonl":
        return pd.DataFrame([parse_json(line) for line in text if line.strip()])
    if suffix not in _READ:
        return pd.DataFrame({column: [line.removesuffix("\n") for line in text]}, dtype=object)
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # a row with too many values
        sep = "\t" if suffix == ".tsv" else ","
        return pd.read_csv(text, dtype=str, keep_default_na=False, index_col=False, sep=sep)


def _write(table: pd.DataFrame, file: Path) -> None:
    if file.suffix == ".csv":
        # pandas does not quote a carriage return by itself.
        write_bytes(table.to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC).encode(), file)
    else:
        write_parquet(table, file)
