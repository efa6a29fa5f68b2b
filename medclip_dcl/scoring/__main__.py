"""Score the sentences of a file: ``medclip-dcl score FILE --model FOLDER --output FILE``."""

from __future__ import annotations

import argparse
import csv
import io
import warnings
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch

from medclip_dcl.common.command_line import run_command
from medclip_dcl.common.devices import usable_device
from medclip_dcl.common.errors import MissingFileError, UserError
from medclip_dcl.common.files import encoding_of, kind_of_file, parse_json, write_bytes, write_parquet
from medclip_dcl.common.journal import Journal
from medclip_dcl.networks.bert_folder import model_fingerprint, resolve_folder
from medclip_dcl.networks.language_model import load_language_model
from medclip_dcl.scoring.score import restored, score_left, score_summary, scoring_plan

_TABLES = (".csv", ".parquet")
_READ = (".csv", ".tsv", ".jsonl", ".parquet")
_DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, see `--help`."""
    options = _parser().parse_args(arguments)
    file, output = options.file, options.output
    if output.suffix not in _TABLES or output.absolute() == file.absolute() or output.is_dir():
        found = f"the folder {output}" if output.is_dir() else output
        raise UserError(f"--output: expected another .csv or .parquet file than FILE, found {found}")
    column = options.column or "text"
    table = _read(file, options.column)
    texts = table[column].astype(object).fillna("").tolist()  # a categorical one takes no new value
    device = usable_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, tokenizer = load_language_model(resolve_folder(options.model))
    model = model.to(device)
    plan = scoring_plan(model, tokenizer, texts, within_word_l2r=options.within_word_l2r, truncate=True)
    meaning = {"sentences": plan.fingerprint, "dtype": options.dtype, "device": device.type}
    meaning["model"] = model_fingerprint(model, model.config.to_diff_dict())
    output.parent.mkdir(parents=True, exist_ok=True)
    progress = output.with_name(f".{output.name}.progress.jsonl")
    kept = Journal(progress, meaning, "give the options of before, or remove it")
    values, left = restored(plan, kept.entries)
    score_left(model, plan, values, left, dtype=getattr(torch, options.dtype), kept=kept)
    scores = plan.table(values).drop(columns="text")
    _write(plan.token_table(values) if options.per_token else pd.concat([table, scores], axis=1), output)
    kept.remove()
    print(score_summary(scores, output, pd.Series(scores.index), "rows, from 0:"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medclip-dcl score",
        description="Score sentences by a language model: exact pseudo-log-likelihood under a masked one (BERT, "
        "RoBERTa, DistilBERT, ELECTRA's generator, DeBERTa, ModernBERT, ...), likelihood under a causal one (GPT-2, "
        "...); natural logarithm. The same command continues after a kill. No text is printed.",
    )
    add = parser.add_argument
    add(
        "file",
        type=Path,
        metavar="FILE",
        help=f"a sentence in each line (.txt), or a table ({', '.join(_READ)})",
    )
    add("--model", required=True, metavar="FOLDER", help="Hugging Face folder or repository id")
    add(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help=".csv or .parquet: the lines, or the table, with n_tokens, log_p, n_unknown and truncated",
    )
    add("--column", help="the table's column of sentences (text)")
    add(
        "--within_word_l2r",
        action="store_true",
        help="also mask the later tokens of a word (Kauf & Ivanova, ACL 2023)",
    )
    add(
        "--per_token",
        action="store_true",
        help="a row for each token instead: number of its sentence and position, from 0, token, log_p",
    )
    add("--dtype", choices=_DTYPES, default=_DTYPES[0], help="float32 is the reference (float32)")
    add("--device", help="cpu, cuda, cuda:1, ... (a GPU if there is one)")
    return parser


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


if __name__ == "__main__":
    run_command(main)
