"""Seconds and memory of `medclip-dcl rank` at MIMIC-CXR's size, on simulated reports; the objective's time in a step.

    python tests/benchmarks/bench_rank.py [--reports 222000] [--sentences 1300000]

Run by hand, never in CI. Words and phrases follow Zipf's law; four in five sentences stand in one report. The set has
tables alone. The objective: similarity and loss of random features, forward and backward, with the weights of
`RankedByText` and without. Prints what the command prints, and replaces the section of this file in RESULTS.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from results_file import command, cpu, write_section

from medclip_dcl.common.files import write_json
from medclip_dcl.common.findings import CHEXPERT
from medclip_dcl.data.prepared import FORMAT_VERSION, TABLES, write_table
from medclip_dcl.networks.similarity import GlobalCosine, LSENonLocal, Similarity
from medclip_dcl.objectives import RankedByText
from medclip_dcl.objectives.in_batch import InBatchObjective

TITLE = "Ranking of reports"
WORDS, PHRASES, SAID, COMMON = 20_000, 60_000, 7, 0.16


def write_set(folder: Path, reports: int, sentences: int) -> None:
    """A set of reports alone: `SAID` common sentences each, and the others, each in one report."""
    random = np.random.default_rng(0)

    def zipf(count: int, size: int) -> np.ndarray:
        return np.minimum(count ** random.random(size), count).astype(np.int64) - 1

    words = np.array([f"w{number}" for number in range(WORDS)], dtype=object)
    lengths = random.integers(2, 6, PHRASES)
    phrases = [" ".join(words[zipf(WORDS, length)]) for length in lengths]
    texts = [" ".join(phrases[place] for place in row) for row in zipf(PHRASES, 3 * sentences).reshape(-1, 3)]
    common = int(COMMON * sentences)
    drawn = [np.arange(common), zipf(common, SAID * reports - common)]
    study = np.concatenate(
        [np.arange(SAID * reports) % reports, random.integers(0, reports, sentences - common)]
    )
    said = pd.DataFrame(
        {"study_id": study, "sentence_id": np.concatenate([*drawn, np.arange(common, sentences)])}
    )
    said = said.drop_duplicates().sort_values(["study_id", "sentence_id"], ignore_index=True)
    said = said.assign(section="findings", position=said.groupby("study_id").cumcount())[[*TABLES["reports"]]]
    counts = np.bincount(said["sentence_id"], minlength=sentences)
    studies = np.arange(reports)
    labels = random.choice([1.0, 0.0, -1.0, np.nan], (reports, len(CHEXPERT)), p=[0.15, 0.1, 0.05, 0.7])
    tables = {
        "images": pd.DataFrame(
            {name: pd.Series(dtype=_type(kind)) for name, kind in TABLES["images"].items()}
        ),
        "studies": pd.DataFrame({"study_id": studies, "subject_id": studies}).assign(
            official_split="train", use=np.where(studies % 50, "train", "validate")
        ),
        "sentences": pd.DataFrame({"sentence_id": np.arange(sentences), "text": texts, "n_reports": counts}),
        "reports": said,
        "labels": pd.DataFrame(labels, columns=[*CHEXPERT]).assign(study_id=studies)[["study_id", *CHEXPERT]],
    }
    for name, table in tables.items():
        write_table(table, folder / f"{name}.parquet", name)
    write_json({"format_version": FORMAT_VERSION}, folder / "dataset.json")


def _type(kind: str) -> str:
    return "object" if kind == "str" else kind


def objective_times(rounds: int = 15) -> list[str]:
    """Rows of medians of milliseconds of CPU, with one thread."""
    torch.set_num_threads(1)
    random, rows = torch.Generator().manual_seed(0), []
    similarities: list[tuple[Similarity, int, int]] = [(LSENonLocal(), 64, 225), (GlobalCosine(), 512, 1)]
    for similarity, batch, regions in similarities:
        features = torch.randn(batch, regions, 128, generator=random, requires_grad=True)
        sentences = torch.randn(batch, 128, generator=random, requires_grad=True)
        fields = {
            "anchor": {
                "log_p": -20 * torch.rand(batch, generator=random),
                "sentence_ranking": torch.randn(batch, 229, generator=random).sort(1).values,
            },
            "candidate": {"report_ranking": torch.randn(batch, 128, generator=random)},
        }
        names = ("image_index", "view_of", "study_id", "sentence_id")
        data = {**dict.fromkeys(names, torch.arange(batch)), **fields}
        seconds: list[list[float]] = [[], []]
        for _ in range(rounds + 1):
            for place, rule in enumerate((RankedByText(None, c=2.0), None)):
                started = time.process_time()
                InBatchObjective(negative_weights=rule)(similarity, features, sentences, data)[0].backward()
                seconds[place].append(time.process_time() - started)
        times = " | ".join(f"{1000 * statistics.median(each[1:]):.1f}" for each in seconds)
        rows.append(
            f"| {batch} | {type(similarity).__name__}, {regions} region{'s' * (regions > 1)} | {times} |"
        )
    return rows


def measured(folder: Path, *options: str) -> str:
    """Row of the seconds, memory and files of the command."""
    started = time.perf_counter()
    words = [sys.executable, "-m", "medclip_dcl", "rank", str(folder), *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as running:
        said = running.stdout.read() if running.stdout else ""
        # Of the command alone, without the writer.
        _, status, usage = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - started
    if running.returncode:
        raise SystemExit(f"{words} failed: {running.returncode}")
    print(said)
    (terms,) = re.findall(r"([\d,]+) terms", said)
    kind = "posterior" if options else "ranking"
    sizes = [
        sum(file.stat().st_size for file in (folder / name).iterdir()) for name in (kind, f"{kind}_reports")
    ]
    of_files = " | ".join(f"{size / 1e9:.2f}" for size in sizes)
    return (
        f"| `{' '.join(['rank', *options])}` | {terms} | {usage.ru_utime + usage.ru_stime:.0f} | {wall:.0f} | "
        f"{usage.ru_maxrss / 2**20:.2f} | {of_files} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reports", type=int, default=222_000)
    parser.add_argument("--sentences", type=int, default=1_300_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        # In a process of its own: the command would inherit its peak.
        writer = multiprocessing.Process(
            target=write_set, args=(Path(name), options.reports, options.sentences)
        )
        writer.start()
        writer.join()
        rows = [measured(Path(name)), measured(Path(name), "--posterior")]
    lines = [
        f"CPU, {cpu()[0]}, on a shared machine; {options.reports:,} simulated reports, {options.sentences:,} distinct "
        f"sentences. `{command()}`. What tells false negatives: tests/benchmarks/study_text_rankings.py "
        "([page](../../docs/ranked_by_text.md)).",
        "",
        "| command | terms | CPU seconds | seconds | peak memory, GiB | of sentences, GB | of reports, GB |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        "| batch | similarity | ranked_by_text, CPU ms | infonce, CPU ms |",
        "|---|---|---|---|",
        *objective_times(),
    ]
    write_section(TITLE, lines)


if __name__ == "__main__":
    main()
