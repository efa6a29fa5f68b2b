"""Seconds and memory of a training step under configs/mimic_cxr.yaml, extrapolated to the whole run.

    python tests/benchmarks/bench_training.py [--device cuda] [--batches 8 16] [--steps 4] [--precision bf16-mixed]

Run by hand, never in CI. ResNet-18 at 480 px, a BERT of CXR-BERT's size (folder in Hugging Face's format, random
weights), LSE+NL, dcl_lm, AdamW, with the callbacks of `fit`; batches are random and at hand, so that the loader costs
nothing; what it costs to read and augment an image is measured by itself. Sentences have another length at each step,
as in training: a GPU plans some kernels anew for each shape, so that only after many steps it is as fast as in a run.
Each row is measured in a process of its own, the time of the callbacks in a second training there: measuring it keeps a
GPU waiting. What was not measured (the batch of 64 on a CPU, and hours of the run) is extrapolated by the line through
the two largest batches, and said to be. Prints the tables and replaces the section of this file in RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pytorch_lightning import Callback, LightningModule, Trainer
from results_file import command, process_memory, write_section
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory
from transformers import BertConfig, BertForMaskedLM, BertTokenizer

from medclip_dcl.common.devices import best_precision, device_name
from medclip_dcl.data.by_length import pieces_by_length
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.networks.bert_folder import save_language_model
from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.similarity import LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences
from medclip_dcl.objectives import LanguageModelClassProbability
from medclip_dcl.pictures.transforms import augment, load_grey
from medclip_dcl.training.averaging import AveragedWeights
from medclip_dcl.training.finite import FiniteCheck
from medclip_dcl.training.last_checkpoint import in_order
from medclip_dcl.training.throughput import Throughput

HERE = Path(__file__).resolve()
TITLE = "Training at the size of mimic_cxr.yaml"
IMAGES, EPOCHS, BATCH = (
    234_073,
    15,
    64,
)  # frontal training images of MIMIC-CXR (SSD), and mimic_cxr.yaml's numbers
SIZE, CROP, WORD_PIECES = 512, 480, 24
PIECES = 30_522
_WARM_UP = 2
"""Steps before those that are measured."""


def text_encoder() -> BertSentences:
    """A BERT of CXR-BERT's size and dropout with random weights, by way of a folder."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {
        piece: i for i, piece in enumerate([*special, *(f"word{i}" for i in range(PIECES - len(special)))])
    }
    config = BertConfig(vocab_size=PIECES, hidden_dropout_prob=0.25, attention_probs_dropout_prob=0.25)
    with tempfile.TemporaryDirectory() as folder:
        save_language_model(BertForMaskedLM(config), BertTokenizer(vocab=vocabulary), Path(folder) / "bert")
        return BertSentences(str(Path(folder) / "bert"), dim=128, max_tokens=128)


def batch_of(images: int, length: int = WORD_PIECES, size: int = CROP) -> dict[str, Any]:
    """A batch as ImageTextDataModule serves it, of random numbers: one sentence of so many word pieces an image."""
    rows = torch.arange(images)
    pieces = pieces_by_length([length] * images)
    return {
        "images": torch.rand(images, 3, size, size),
        "view_of": rows,
        "tokens": torch.randint(1000, PIECES, (images, length)),
        "lengths": torch.full((images,), length),
        "by_length": pieces,
        "row_of_sentence": rows,
        "image_index": rows,
        "dicom_id": [str(i) for i in range(images)],
        "study_id": rows,
        "sentence_id": rows,
        "anchor": {"log_p": -40 * torch.rand(images)},
        "candidate": {},
    }


def served(images: int, steps: int, pins: bool) -> list[dict[str, Any]]:
    """Batches of lengths around the mean, in an order that repeats none before all have been."""
    around = [WORD_PIECES - 8 + 7 * i % 17 for i in range(17)]
    pictures = torch.rand(images, 3, CROP, CROP)
    batches = [{**batch_of(images, length), "images": pictures} for length in around[:steps]]
    if pins:
        in_place = pictures.pin_memory()
        batches = [{**pin_memory({**batch, "images": None}), "images": in_place} for batch in batches]
    return [batches[i % len(batches)] for i in range(steps)]


class StepTimes(Callback):
    """Seconds from the end of one step to the end of the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def median(self) -> float:
        return statistics.median(np.diff(self.ends)[_WARM_UP - 1 :].tolist())


def timed(callbacks: list[Callback], seconds: dict[str, list[float]]) -> None:
    """Let each hook of the callbacks that is called in a step add its time, by the callback's name."""
    for callback in callbacks:
        for hook in (
            "on_train_batch_start",
            "on_before_backward",
            "on_before_optimizer_step",
            "on_train_batch_end",
        ):
            setattr(callback, hook, _timed(getattr(callback, hook), seconds[type(callback).__name__]))


def _timed(hook: Any, seconds: list[float]) -> Any:
    @wraps(hook)
    def run(*arguments: Any, **options: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        hook(*arguments, **options)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)

    return run


def measure(batch: int, steps: int, precision: str, device: str) -> dict[str, Any]:
    """Seconds a step and peak memory in GiB, callbacks included; in a process of its own."""
    model = ImageTextModel(
        ResNetRegions(depth=18, stride=32, dim=128, weights=None),
        text_encoder(),
        LSENonLocal(dim=128),
        LanguageModelClassProbability(),
        warmup_steps=1,
    )
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak from here on
    batches = served(batch, steps + _WARM_UP, pins=device == "cuda")
    clock = fit(model, batches, precision, device, None)
    found = {"batch": batch, "seconds": clock.median(), "memory": peak_memory(device)}
    callbacks: dict[str, list[float]] = defaultdict(list)
    clock = fit(model, batches, precision, device, callbacks)
    return {**found, "callbacks": {name: sum(values) / len(clock.ends) for name, values in callbacks.items()}}


def fit(
    model: ImageTextModel, batches: Any, precision: str, device: str, callbacks: dict[str, list[float]] | None
) -> StepTimes:
    """Train a step on each batch; `callbacks`, where given, gets their seconds by name, which slows the steps."""
    throughput = Throughput()
    watching: list[Callback] = [FiniteCheck(), throughput.arrival, throughput, AveragedWeights(0.999)]
    if callbacks is not None:
        timed(watching, callbacks)
    clock = StepTimes()
    trainer = Trainer(
        max_steps=len(batches),
        precision=precision,  # type: ignore[arg-type]
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        gradient_clip_val=1.0,
        callbacks=[*in_order(watching), clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(batches, batch_size=None))
    return clock


def peak_memory(device: str) -> float:
    """Peak in GiB: of the device's allocations, or of the process's resident memory."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return process_memory()["VmHWM"] / 2**30


def loader_milliseconds(count: int = 40) -> float:
    """To read a prepared JPEG of 512 px and augment it; one process."""
    generator = np.random.default_rng(0)
    smooth = Image.fromarray(generator.integers(0, 255, (32, 32)).astype(np.uint8)).resize((SIZE, SIZE))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "image.jpg"
        smooth.save(file, quality=95)
        start = time.perf_counter()
        for _ in range(count):
            augment(load_grey(file.read_bytes(), SIZE), CROP, 0.2, 0.2, generator)
        return 1e3 * (time.perf_counter() - start) / count


def at(rows: list[dict[str, Any]], name: str, batch: int) -> float:
    """Value at a batch size: measured, or on the line through the two largest batches."""
    for row in rows:
        if row["batch"] == batch:
            return row[name]
    if len(rows) == 1:
        return rows[0][name] * batch / rows[0]["batch"]
    first, second = sorted(rows, key=lambda row: row["batch"])[-2:]
    slope = (second[name] - first[name]) / (second["batch"] - first["batch"])
    return second[name] + slope * (batch - second["batch"])


def whole_run(rows: list[dict[str, Any]]) -> str:
    """Step, memory and hours of mimic_cxr.yaml."""
    steps = IMAGES // BATCH * EPOCHS
    seconds, memory = at(rows, "seconds", BATCH), at(rows, "memory", BATCH)
    if any(row["batch"] == BATCH for row in rows):
        how = "its run EXTRAPOLATED from its step"
    elif len(rows) == 1:
        how = f"EXTRAPOLATED in proportion from the batch of {rows[0]['batch']}"
    else:
        how = "EXTRAPOLATED from the two largest batches"
    return (
        f"configs/mimic_cxr.yaml (batch {BATCH}, {IMAGES:,} images, {EPOCHS} epochs: {steps:,} steps), {how}: "
        f"{seconds:.2f} s a step, {memory:.1f} GiB, "
        f"**{steps * seconds / 3600:,.1f} hours** without validation and evaluation."
    )


def report(rows: list[dict[str, Any]], options: argparse.Namespace, loader: float) -> list[str]:
    """The section of RESULTS.md."""
    largest = max(rows, key=lambda row: row["batch"])
    costs = "; ".join(
        f"{name} {1e3 * value:.1f} ms ({value / largest['seconds']:.2%} of the step)"
        for name, value in largest["callbacks"].items()
    )
    kind = (
        "memory allocated on the device" if options.device == "cuda" else "resident memory, imports included"
    )
    return [
        f"{device_name(torch.device(options.device))}, {platform.machine()}; torch {torch.__version__}; "
        f"{options.precision}; ResNet-18 at {CROP} px, BERT-base with {WORD_PIECES} word pieces a sentence, LSE+NL, "
        f"dcl_lm, AdamW, clipping, ema_decay; random data and weights; medians of {options.steps} steps. `{command()}`",
        "",
        f"| batch | seconds a step | images a second | peak, GiB ({kind}) |",
        "|---|---|---|---|",
        *(
            f"| {row['batch']} | {row['seconds']:.3f} | {row['batch'] / row['seconds']:.2f} | {row['memory']:.2f} |"
            for row in rows
        ),
        "",
        whole_run(rows),
        "",
        f"Callbacks, a step of batch {largest['batch']}, means with the first step, which builds the average: {costs}.",
        "",
        f"Reading and augmenting an image: {loader:.1f} ms of one process; "
        f"{loader * BATCH / 1e3 / at(rows, 'seconds', BATCH):.1f} loader processes keep up with the step of batch 64 "
        "above (at least one).",
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description="Benchmark of a training step at the size of mimic_cxr.yaml."
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", help="8 16; 32 64 on a GPU")
    parser.add_argument("--steps", type=int, help="4; 80 on a GPU")
    parser.add_argument("--precision", default=None, help="null: as `fit` chooses")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch finds no CUDA device")
    options.precision = options.precision or best_precision("gpu" if options.device == "cuda" else "cpu")
    is_gpu = options.device == "cuda"
    options.batches = options.batches or ([32, 64] if is_gpu else [8, 16])
    options.steps = options.steps or (80 if is_gpu else 4)
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    if options.one is not None:
        print(json.dumps(measure(options.one, options.steps, options.precision, options.device)))
        return
    rows, failed = [], []
    for batch in sorted(options.batches):
        own = ["--one", str(batch), "--steps", str(options.steps), "--precision", options.precision]
        done = subprocess.run(
            [sys.executable, str(HERE), "--device", options.device, *own],
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            failed.append(f"Batch {batch}: failed with status {done.returncode}.")
            print(failed[-1], flush=True)
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    if not rows:
        sys.exit("no row was measured")
    lines = report(rows, options, loader_milliseconds())
    lines += [part for line in failed for part in ("", line)]
    write_section(TITLE + (", on a GPU" if is_gpu else ""), lines)


if __name__ == "__main__":
    main()
