"""Time the text encoder's forward and backward on batches of report sentences, in pieces of like length and whole.

    python tests/benchmarks/bench_text.py --data SET --model runs/demo_language_model/language_model [--images 16 64]

Run by hand, never in CI. Each batch has all sentences (and one sentence) of so many reports of the prepared set. One
thread, CPU seconds; the two ways take turns, and the table gives medians. Replaces the section of this file in
RESULTS.md.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import numpy as np
import torch
from results_file import command, write_section
from torch import Tensor

from medclip_dcl.data.by_length import pieces_by_length
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.networks.image_text import pad_tokens
from medclip_dcl.networks.text_encoder import BertSentences

TITLE = "Sentences in pieces of like length"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", required=True, help="prepared set")
    parser.add_argument("--model", required=True, help="folder of a BERT")
    parser.add_argument("--images", type=int, nargs="+", default=[16, 64], help="reports in a batch")
    parser.add_argument("--batches", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    encoder = BertSentences(options.model, max_tokens=128).train()
    prepared = PreparedSet(options.data)
    sentences = prepared.table("sentences")
    texts = dict(zip(sentences["sentence_id"].tolist(), sentences["text"].tolist(), strict=True))
    reports = prepared.table("reports").drop_duplicates(["study_id", "sentence_id"])
    of_study = reports.groupby("study_id")["sentence_id"].apply(list).tolist()
    bert = encoder.model.config
    lines = [
        f"{platform.machine()}, one thread, float32; torch {torch.__version__}; {options.data}, BERT of "
        f"{bert.num_hidden_layers} layers x {bert.hidden_size}; forward and backward, medians of {options.batches} "
        f"batches, the ways in turn. `{command()}`",
        "",
        "| batch | sentences | tokens | padded | in pieces | pieces | whole, CPU s | in pieces, CPU s | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for images in options.images:
        for draws_one in (True, False):
            lines.append(row(encoder, of_study, texts, images, draws_one, options.batches))
    write_section(TITLE, lines)


def row(
    encoder: BertSentences,
    of_study: list[list[int]],
    texts: dict[int, str],
    images: int,
    draws_one: bool,
    batches: int,
) -> str:
    generator = np.random.default_rng(0)
    found = []
    for _ in range(batches):
        studies = [of_study[i] for i in generator.choice(len(of_study), images, replace=False)]
        ids = [s for said in studies for s in ([said[generator.integers(len(said))]] if draws_one else said)]
        tokens, lengths = pad_tokens(encoder.tokenize([texts[s] for s in ids]))
        pieces = pieces_by_length(lengths.tolist())
        whole = [(torch.arange(len(ids)), int(lengths.max()))]
        seconds = [timed(encoder, tokens, lengths, way) for way in (whole, pieces)]
        in_pieces = sum(len(places) * longest for places, longest in pieces)
        found.append([len(ids), int(lengths.sum()), tokens.numel(), in_pieces, len(pieces), *seconds])
    *counts, whole_s, pieces_s = (statistics.median(values) for values in zip(*found, strict=True))
    of = "one sentence of each" if draws_one else "all sentences"
    cells = [f"{value:,.0f}" for value in counts] + [
        f"{whole_s:.3f}",
        f"{pieces_s:.3f}",
        f"{whole_s / pieces_s:.2f}",
    ]
    return f"| {images} reports, {of} | {' | '.join(cells)} |"


def timed(encoder: BertSentences, tokens: Tensor, lengths: Tensor, pieces: list[tuple[Tensor, int]]) -> float:
    encoder.zero_grad()
    start = time.process_time()
    parts = [encoder(tokens[places, :longest], lengths[places]) for places, longest in pieces]
    torch.cat(parts).square().sum().backward()
    return time.process_time() - start


if __name__ == "__main__":
    main()
