"""Speed, exactness and memory of the evaluation metrics.

    python tests/benchmarks/bench_evaluation.py [--images 24] [--rounds 5]

Run by hand, never in CI. Random data of MS-CXR's sizes. The rounds of what is compared are interleaved and medians are
compared, so that a noisy machine is fair to each. Prints the table and replaces the section of this file in RESULTS.md.

- mean IoU of one 2544 x 3056 heat map over 41 thresholds, against the loop over thresholds.
- retrieval ranks of 20,000 x 20,000 embeddings, in both directions, paired and by groups: extra memory in a process of
  its own; equal to the ranks of the full matrix at 2,000 x 2,000.
- the grounding and retrieval of 1,448 boxes on 1,047 images of 2544 x 3056, as the callbacks measure them, against
  ResNet-18 at 512 pixels. Images are measured on a share and scaled; the ranks at the end are computed for all boxes.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from results_file import command, medians, process_memory, write_section
from torch.nn.functional import normalize

from medclip_dcl.common.devices import device_name
from medclip_dcl.data.image_text import EvaluationTables
from medclip_dcl.evaluation import Grounding, Retrieval
from medclip_dcl.metrics import (
    box_bounds,
    cosine_retrieval_ranks,
    default_thresholds,
    mean_iou,
    retrieval_ranks,
)
from medclip_dcl.networks.described import Encoded
from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import at_image_size
from medclip_dcl.networks.text_encoder import SentenceEncoder

HERE = Path(__file__).resolve()
HEIGHT, WIDTH = 3056, 2544
N_BOXES, N_IMAGES, N_PHRASES = 1448, 1047, 700
DIM = 128


def iou_by_loop(heat_map: torch.Tensor, mask: torch.Tensor) -> float:
    """The definition, threshold by threshold."""
    total = 0.0
    for threshold in default_thresholds():
        above = heat_map > threshold
        total += float((above & mask).sum() / (above | mask).sum())
    return total / 41


def overlap(rounds: int) -> str:
    """One pass over a large map against the loop over thresholds."""
    heat_map = at_image_size((torch.randn(16, 16) * 0.3).clamp(-1, 1), HEIGHT, WIDTH)
    top, bottom, left, right = box_bounds(500, 700, 800, 900, image_height=HEIGHT, image_width=WIDTH)
    mask = torch.zeros(HEIGHT, WIDTH, dtype=torch.bool)
    mask[top:bottom, left:right] = True
    difference = abs(iou_by_loop(heat_map, mask) - float(mean_iou(heat_map, mask)))
    found = medians(
        {"ours": lambda: mean_iou(heat_map, mask), "loop": lambda: iou_by_loop(heat_map, mask)}, rounds
    )
    ratio = found["loop"] / found["ours"]
    return (
        f"| mean IoU of one {WIDTH} x {HEIGHT} map, 41 thresholds | {found['ours'] * 1e3:.0f} ms; the loop "
        f"{found['loop'] * 1e3:,.0f} ms: **{ratio:.0f} x** faster; difference {difference:.0e} | at least 20 x |"
    )


def embeddings(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Boxes, phrases (some of them equal) and the phrases' groups."""
    generator = torch.Generator().manual_seed(0)
    group = torch.randint(count // 2, (count,), generator=generator)
    phrases = torch.randn(count // 2, DIM, generator=generator)[group]
    return phrases + 2 * torch.randn(count, DIM, generator=generator), phrases, group


def all_ranks(boxes: torch.Tensor, phrases: torch.Tensor, group: torch.Tensor) -> list[torch.Tensor]:
    """The tables that the Retrieval callback asks for."""
    return [
        ranks
        for pair in ((boxes, phrases), (phrases, boxes))
        for ranks in (cosine_retrieval_ranks(*pair), cosine_retrieval_ranks(*pair, groups=(group, group)))
    ]


def extra_memory(count: int) -> tuple[int, float]:
    """Bytes beyond the embeddings at most, and seconds; called in a process of its own."""
    all_ranks(*embeddings(100))  # libraries load their parts at first use
    data = embeddings(count)
    before, start = process_memory()["VmRSS"], time.perf_counter()
    all_ranks(*data)
    return process_memory()["VmHWM"] - before, time.perf_counter() - start


def retrieval(count: int = 20_000, checked: int = 2_000) -> str:
    """Memory at 20,000, equality at 2,000."""
    words = [sys.executable, str(HERE), "--extra_memory", str(count)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    extra, seconds = (float(word) for word in done.stdout.split()[-2:])
    boxes, phrases, group = embeddings(checked)
    # Equal phrases are scored once and repeated, so that they tie exactly in the full matrix, too.
    distinct, column = torch.unique(normalize(phrases, dim=-1), dim=0, return_inverse=True)
    matrix = (normalize(boxes, dim=-1) @ distinct.T)[:, column]
    same = group[:, None] == group
    expected = [
        ranks
        for scores in (matrix, matrix.T)
        for ranks in (retrieval_ranks(scores), retrieval_ranks(scores, same))
    ]
    differing = sum(
        int((a != b).sum()) for a, b in zip(all_ranks(boxes, phrases, group), expected, strict=True)
    )
    return (
        f"| retrieval ranks, {count:,} x {count:,}, both directions, paired and by groups | peak extra memory "
        f"**{extra / 1e6:.0f} MB** (the matrix alone: {count**2 * 4 / 1e6:,.0f} MB), {seconds:.0f} s; at {checked:,} x "
        f"{checked:,} {differing} of {4 * checked:,} ranks differ from those of the full matrix | below 500 MB, equal |"
    )


class RandomSentences(SentenceEncoder):
    """An embedding for each number; the text encoder is not what is measured."""

    dim = DIM

    def __init__(self) -> None:
        super().__init__()
        self.vectors = torch.randn(N_PHRASES, DIM)

    def tokenize(self, texts: Any) -> list[list[int]]:
        return [[int(text)] for text in texts]

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.vectors[tokens[:, 0]]


def tables() -> EvaluationTables:
    """1,448 boxes on 1,047 images."""
    random = np.random.default_rng(0)
    ids = [f"image{i:04}" for i in range(N_IMAGES)]
    of_image = [*range(N_IMAGES), *random.integers(N_IMAGES, size=N_BOXES - N_IMAGES)]
    images = pd.DataFrame({"dicom_id": ids, "subject_id": range(N_IMAGES), "study_id": range(N_IMAGES)})
    boxes = pd.DataFrame(
        {
            "dicom_id": [ids[i] for i in of_image],
            "category": "Edema",
            "phrase": random.integers(N_PHRASES, size=N_BOXES).astype(str),
            "x": random.integers(0, 1200, N_BOXES).astype(float),
            "y": random.integers(0, 1500, N_BOXES).astype(float),
            "w": random.integers(200, 1300, N_BOXES).astype(float),
            "h": random.integers(200, 1500, N_BOXES).astype(float),
        }
    )
    cases = pd.DataFrame(columns=["dicom_id", "finding", "label"])
    sentences = pd.DataFrame(columns=["dicom_id", "sentence_id", "text"])  # reports are not retrieved here
    return EvaluationTables(images.assign(height=HEIGHT, width=WIDTH), cases, boxes, sentences)


@torch.inference_mode()
def whole(n_images: int, rounds: int) -> str:
    """The callbacks against the encoder."""
    network = ImageTextNetwork(ResNetRegions(dim=DIM), RandomSentences()).eval()
    network.image_encoder.to(memory_format=torch.channels_last)
    data, pixels = tables(), torch.rand(4, 3, 512, 512)
    grounding, retrieval_of_boxes = Grounding(), Retrieval()
    for callback in (grounding, retrieval_of_boxes):
        callback.prepare(data, "test")
    # A share with as many boxes an image as all have.
    order = np.random.default_rng(1).permutation(N_IMAGES)[:n_images]
    ids = [data.images["dicom_id"].iloc[i] for i in order]
    n_boxes = int(data.boxes["dicom_id"].isin(ids).sum())
    feature_map = torch.randn(n_images, DIM, 16, 16)
    step = max(1, n_images // rounds)
    seconds: dict[str, list[float]] = {"encoder": [], "metrics": []}
    for first in range(0, n_images, step):
        part = slice(first, first + step)
        start = time.perf_counter()
        for _ in range(-(-len(ids[part]) // len(pixels))):
            network.feature_map(pixels)
        middle = time.perf_counter()
        grounding.measure(network, feature_map[part], ids[part])
        retrieval_of_boxes.measure(network, Encoded(feature_map[part]), ids[part])
        end = time.perf_counter()
        encoded = -(-len(ids[part]) // len(pixels)) * len(pixels)
        if first:
            boxes = int(data.boxes["dicom_id"].isin(ids[part]).sum())
            seconds["encoder"].append((middle - start) / encoded * N_IMAGES)
            seconds["metrics"].append((end - middle) / boxes * N_BOXES)
    start = time.perf_counter()
    every = {str(name): rows.index.tolist() for name, rows in data.boxes.groupby("dicom_id")}
    vectors = torch.randn(N_BOXES, DIM).numpy()
    values = {name: [{row: vectors[row] for row in rows}, None] for name, rows in every.items()}  # no reports
    retrieval_of_boxes.summarise(network, values, data)
    ranks = time.perf_counter() - start
    encoder, metrics = (statistics.median(seconds[name]) for name in ("encoder", "metrics"))
    total = metrics + ranks
    return (
        f"| {N_BOXES:,} boxes on {N_IMAGES:,} images of {WIDTH} x {HEIGHT} ({n_boxes} boxes on {n_images} images "
        f"measured, scaled; ranks of all) | metrics **{total:.0f} s** (ranks {ranks:.1f} s), ResNet-18 at 512 "
        f"**{encoder:.0f} s**: {total / encoder:.2f} of the encoder's time | metrics take less |"
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Benchmark of the evaluation metrics.")
    parser.add_argument("--images", type=int, default=24, help="measured of the 1,047; the rest is scaled")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--extra_memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    if options.extra_memory is not None:
        print(*extra_memory(options.extra_memory))
        return
    lines = [
        f"{device_name(torch.device('cpu'))}, {platform.machine()}; torch {torch.__version__}; random data; medians of "
        f"{options.rounds} interleaved rounds, float32. `{command()}`",
        "",
        "| what | measured | asked for |",
        "|---|---|---|",
        overlap(options.rounds),
        retrieval(),
        whole(options.images, options.rounds),
    ]
    write_section("Evaluation", lines)


if __name__ == "__main__":
    main()
