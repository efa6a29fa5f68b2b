"""A ranking of reports for each sentence, learned on the training reports by ``medclip-dcl rank``: its two files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float, Int

from medclip_dcl.common.files import digest, replacing

QUANTILES = 101
"""Stored quantiles of a sentence's scores: of 0, .01, ..., 1."""
REPORTS_FOLDER = "ranking_reports"
SEAL = "medclip_dcl_ranked"


class Ranking(NamedTuple):
    """Vectors whose product is the score of a report for a sentence; keys ascend.

    Attributes:
        sentence_id: of each sentence of the set.
        sentences: vector of a sentence, (sentence, dim), and the quantiles of its scores over training reports,
            ascending, (sentence, 101), side by side; float16.
        study_id: of each report of train and validate.
        reports: their vectors, (report, dim), float16.
    """

    sentence_id: Int[np.ndarray, " sentence"]
    sentences: Float[np.ndarray, "sentence dim_and_quantiles"]
    study_id: Int[np.ndarray, " report"]
    reports: Float[np.ndarray, "report dim"]


def seal_of_reports(sentences: pd.DataFrame, reports: pd.DataFrame, train: pd.Series) -> str:
    """Digest of what a ranking was learned on and covers: the texts, the reports, and those of training."""
    texts = "\n".join(sentences.sort_values("sentence_id")["text"]).encode()
    rows = (reports[name].to_numpy() for name in ("study_id", "sentence_id"))
    return digest(texts, *(row.tobytes() for row in rows), np.sort(train.to_numpy()).tobytes())


def write_vectors(parts: Iterable[Mapping[str, np.ndarray]], file: Path, metadata: Mapping[str, str]) -> None:
    """Write parts of a table, one after the other, as Parquet, atomically: (row,) numbers and (row, dim) vectors."""
    with replacing(file) as stream:
        writer: Any = None
        for part in parts:
            columns = {
                name: pa.array(values)
                if values.ndim == 1
                else pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
                for name, values in part.items()
            }
            table = pa.table(columns).replace_schema_metadata(dict(metadata))
            # Vectors neither repeat nor compress.
            writer = writer or pq.ParquetWriter(
                stream, table.schema, use_dictionary=False, compression="none"
            )
            writer.write_table(table)
        writer.close()


def read_ranking(file: Path, of_reports: Path, seal: str) -> Ranking:
    """The ranking in the files of sentences and of reports; a ValueError says what is wrong with them."""
    sentence_id, *parts = _read(file, seal, "sentence_id", "vector", "quantiles")
    study_id, reports = _read(of_reports, seal, "study_id", "vector")
    if [part.shape[1] for part in parts] != [reports.shape[1], QUANTILES]:
        raise ValueError(
            f"expected vectors of {reports.shape[1]} numbers, those of {of_reports}, and {QUANTILES} quantiles, found "
            f"{[part.shape[1] for part in parts]}"
        )
    return Ranking(sentence_id, np.concatenate(parts, axis=1), study_id, reports)


def _read(file: Path, seal: str, *names: str) -> list[np.ndarray]:
    # Folder names such as a=b are not columns.
    table = pq.read_table(file, partitioning=None)
    if table.column_names != [*names]:
        raise ValueError(f"{file.name}: expected the columns {[*names]}, found {table.column_names}")
    if (table.schema.metadata or {}).get(SEAL.encode()) != seal.encode():
        raise ValueError(
            "expected a ranking of the set's reports, found one of others, or they were changed since"
        )
    keys, *vectors = (column.combine_chunks() for column in table.columns)
    values = [x.flatten().to_numpy(zero_copy_only=False).reshape(len(x), -1) for x in vectors]
    is_bad = ~np.append(True, np.diff(keys.to_numpy()) > 0)
    for part in values:
        is_bad |= ~np.isfinite(part).all(axis=1)
    if is_bad.any():
        raise ValueError(
            f"expected ascending {names[0]} and finite numbers, found others in {int(is_bad.sum()):,} of "
            f"{len(keys):,} rows"
        )
    return [keys.to_numpy(), *values]
