"""Time training, evaluation and scoring alone and beside a busy neighbour, by the way OpenMP's threads wait; by hand.

    python tests/benchmarks/bench_threads.py --model runs/demo

Threads that wait for each other at the end of a parallel region spin by default: fast while every thread has a core,
slow as soon as another program takes one. OpenMP reads its settings when torch is imported, so that each measurement is
a process of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import product
from pathlib import Path

from results_file import command, cpu, write_section

WAYS: dict[str, dict[str, str]] = {
    "one thread": {"OMP_NUM_THREADS": "1"},
    "all threads, spinning (default)": {},
    "all threads, OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "all threads, GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
}
WORK = """
import sys, time, torch
from medclip_dcl import load
from medclip_dcl.objectives import contrastive_loss
torch.manual_seed(0)
network = load(sys.argv[1]).network.train()
images, texts = torch.rand(16, 3, 128, 128), ["No pneumothorax.", "Small left pleural effusion."] * 24
tokens, lengths = network.tokenize(texts)
positives = torch.arange(48) % 16
def training():
    network.zero_grad()
    contrastive_loss(network(images, tokens, lengths), positives).backward()
bert = network.text_encoder.model
@torch.no_grad()
def evaluation():
    network.eval()
    features = network.feature_map(images)
    network.similarity(network.regions(features), network.encode_sentences(tokens, lengths))
@torch.no_grad()
def naive_scoring():
    network.eval()
    for _ in range(24):  # a sentence of 24 tokens: all of its masked copies
        bert(torch.full((24, 24), 5)).last_hidden_state @ bert.embeddings.word_embeddings.weight.T
work = {"training": training, "evaluation": evaluation, "naive_scoring": naive_scoring}[sys.argv[3]]
work()
times = []
for _ in range(int(sys.argv[2])):
    start = time.perf_counter()
    work()
    times.append(time.perf_counter() - start)
print(sorted(times)[len(times) // 2])
"""
WORKS = {
    "training": "a step",
    "evaluation": "features and similarities",
    "naive_scoring": "24 sentences of 24 tokens, each with its masked copies as a batch, all logits",
}


def work_seconds(model: str, steps: int, work: str, settings: dict[str, str]) -> float:
    """Median seconds of one kind of work on 16 images or 24 sentences in a process with these settings."""
    names = {name for way in WAYS.values() for name in way}
    plain = {name: value for name, value in os.environ.items() if name not in names}
    words = [sys.executable, "-c", WORK, model, str(steps), work]
    done = subprocess.run(words, env=plain | settings, check=True, capture_output=True, text=True)
    return float(done.stdout)


@contextmanager
def neighbours(number: int) -> Iterator[None]:
    """Busy processes of one thread each."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="run folder, such as runs/demo")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=9, help="steps of a measurement")
    options = parser.parse_args()
    model = str(Path(options.model))
    found: dict[tuple[str, str, int], list[float]] = {}
    before = os.getloadavg()[0]
    for _ in range(options.rounds):
        for number, (way, settings), work in product((0, 1), WAYS.items(), WORKS):
            with neighbours(number):
                seconds = work_seconds(model, options.steps, work, settings)
            found.setdefault((work, way, number), []).append(seconds)
    name, units = cpu()
    lines = [
        f"{name}, {os.cpu_count()} cores, {', '.join(units)}; torch {version('torch')}, float32; the network of "
        f"`make demo`: training ({WORKS['training']}) and "
        f"evaluation ({WORKS['evaluation']}) of 16 images of 128 pixels with 48 sentences; its BERT scoring "
        f"{WORKS['naive_scoring']}. Seconds, median of {options.steps}, medians of {options.rounds} rounds; "
        f"alone / beside one busy process; load before the start {before:.1f}. "
        f"`{command()}`",
        "",
        "| way | " + " | ".join(WORKS).replace("_", " ") + " |",
        "|---|" + "---|" * len(WORKS),
    ]
    for way in WAYS:
        cells = [
            " / ".join(f"{statistics.median(found[work, way, number]):.2f}" for number in (0, 1))
            for work in WORKS
        ]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    write_section("Threads that wait", lines)


if __name__ == "__main__":
    main()
