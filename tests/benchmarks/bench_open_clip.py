"""Training steps of a ViT-B/14 at 518 px with eta, beside open_clip's training loop: one model, the same batches.

    python tests/benchmarks/bench_open_clip.py [--device cuda] [--batch 64] [--steps 20] [--rounds 3]

Run by hand, never in CI. The model has random weights, built by open_clip and converted; open_clip runs its own
`train_one_epoch` with `ClipLoss`, ours is `fit` with the loss of both directions, eta of every sentence, and the
callbacks of every run. Both take float32 images and 77 tokens a text from pinned memory, AdamW, mixed bfloat16 and the
same clipping; ours also projects every patch, for heat maps. Times are of steps after a warm-up, in interleaved rounds.
Prints the table and replaces the section of this file in RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import open_clip
import torch
from bench_training import batch_of
from open_clip_train.train import train_one_epoch
from pytorch_lightning import Callback, Trainer
from results_file import command, write_section
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from medclip_dcl.common.devices import device_name
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.objectives import LanguageModelClassProbability
from medclip_dcl.training.finite import FiniteCheck
from medclip_dcl.training.last_checkpoint import in_order
from medclip_dcl.training.throughput import Throughput
from tests.program import verb
from tests.text_models import write_text_model

convert = verb("convert")

TITLE = "Training steps beside open_clip's loop"
TOKENS, WARM_UP, GOAL, CLIPPING = 77, 3, 0.95, 1.0


class Clock(Callback):
    """Takes the time from the end of the warm-up to the end of the last step."""

    def __init__(self, measured: int) -> None:
        self.measured = measured
        self.left = measured + WARM_UP
        self.stamps: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Waits for a GPU at the two ends alone."""
        self.left -= 1
        if self.left in (self.measured, 0):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.stamps.append(time.perf_counter())

    def seconds(self) -> float:
        """Of a step."""
        return (self.stamps[1] - self.stamps[0]) / self.measured


class Served:
    """Batches as open_clip's loop takes them; one that is asked for ends the step before it."""

    def __init__(self, batches: Sequence[Any], clock: Clock) -> None:
        self.batches, self.clock = batches, clock
        self.num_batches, self.num_samples = len(batches), len(batches) * len(batches[0][0])

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            yield batch
            self.clock.on_train_batch_end()


def theirs(model: Any, batches: Sequence[Any], options: Namespace) -> float:
    """Seconds of a step of open_clip's own loop."""
    clock = Clock(options.steps)
    arguments = Namespace(
        **{"device": options.device, "precision": "amp_bfloat16", "distill": False, "accum_freq": 1},
        **{"skip_scheduler": True, "grad_clip_norm": CLIPPING, "horovod": False, "rank": 0, "world_size": 1},
        **{"batch_size": options.batch, "log_every_n_steps": 50, "wandb": False, "local_rank": 0},
        **{"log_local": False},
    )
    data = {"train": Namespace(dataloader=Served(batches, clock), set_epoch=lambda epoch: None)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    train_one_epoch(model, data, open_clip.ClipLoss(), 0, optimizer, None, None, None, arguments)
    return clock.seconds()


def ours(model: ImageTextModel, batches: Sequence[Any], options: Namespace) -> float:
    """Seconds of a step of `fit`."""
    clock = Clock(options.steps)
    throughput = Throughput()
    trainer = Trainer(
        max_steps=len(batches),
        precision="bf16-mixed",
        accelerator="gpu" if options.device == "cuda" else "cpu",
        devices=1,
        gradient_clip_val=CLIPPING,
        callbacks=[*in_order([FiniteCheck(), throughput.arrival, throughput]), clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return clock.seconds()


def both_models(options: Namespace) -> tuple[Any, ImageTextModel, list[Any], list[Any]]:
    """open_clip's model, ours with its weights, and the same batches for each."""
    with tempfile.TemporaryDirectory() as folder:
        source, tokenizer = Path(folder) / "source", write_text_model("clip", Path(folder) / "tokenizer")
        source.mkdir()
        pieces = json.loads((tokenizer / "config.json").read_text())["text_config"]["vocab_size"]
        width = options.width
        settings = {
            "embed_dim": 512,
            "vision_cfg": {"image_size": options.side, "layers": options.layers, "width": width}
            | {"patch_size": options.patch},
            "text_cfg": {"context_length": TOKENS, "vocab_size": pieces, "width": 512, "heads": 8}
            | {"layers": options.layers},
        }
        torch.manual_seed(0)
        own = open_clip.CLIP(**settings, output_dict=True)
        content = {"model_cfg": settings, "preprocess_cfg": {"interpolation": "bicubic"}}
        (source / "open_clip_config.json").write_text(json.dumps(content))
        save_file(own.state_dict(), source / "open_clip_model.safetensors")
        output = Path(folder) / "output"
        convert([str(source), "--output", str(output), "--text_encoder", str(tokenizer)])
        model = ImageTextModel(
            class_probability=LanguageModelClassProbability(),
            image_to_text=0.5,
            init_from=str(output),
            warmup_steps=1,
        )
    end = model.network.tokenize(["effusion"])[0][0, -1]
    images = torch.rand(options.batch, 3, options.side, options.side)
    for_theirs, for_ours = [], []
    for _ in range(4):
        tokens = torch.randint(1, 100, (options.batch, TOKENS))
        tokens[:, -1] = end
        batch = {**batch_of(options.batch, TOKENS, size=options.side), "images": images, "tokens": tokens}
        for_theirs.append((images, tokens))
        for_ours.append(batch)
    if options.device == "cuda":
        own.cuda()
        pinned = images.pin_memory()
        for_theirs = [(pinned, tokens.pin_memory()) for _, tokens in for_theirs]
        for_ours = [{**pin_memory({**batch, "images": None}), "images": pinned} for batch in for_ours]
    return own, model, for_theirs, for_ours


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Training steps beside open_clip's loop.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    for name, value in {"batch": 64, "side": 518, "layers": 12, "width": 768, "patch": 14}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    own, model, for_theirs, for_ours = both_models(options)
    runs = {"open_clip, ClipLoss": (theirs, own, for_theirs), "ours, eta": (ours, model, for_ours)}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    memory = dict.fromkeys(runs, 0.0)
    for _ in range(options.rounds):
        for name, (run, network, batches) in runs.items():
            network.to(options.device)
            if options.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            served = [batches[step % len(batches)] for step in range(options.steps + WARM_UP)]
            seconds[name].append(run(network, served, options))
            if options.device == "cuda":
                memory[name] = torch.cuda.max_memory_allocated() / 2**30
            network.to("cpu")
            print(name, seconds[name][-1], flush=True)
    speed = {name: options.batch / statistics.median(values) for name, values in seconds.items()}
    first, second = runs
    write_section(
        TITLE,
        [
            f"{device_name(torch.device(options.device))}; torch {torch.__version__}, open_clip "
            f"{open_clip.__version__}; mixed bfloat16; ViT with {options.layers} layers x {options.width}, patch "
            f"{options.patch}, at {options.side} px; batch {options.batch}, {TOKENS} tokens a text; random data and "
            f"weights; medians of {options.rounds} interleaved rounds of {options.steps} steps. `{command()}`",
            "",
            "| loop | images a second | peak memory allocated, GiB |",
            "|---|---|---|",
            *(f"| {name} | {speed[name]:.1f} | {memory[name]:.1f} |" for name in runs),
            "",
            f"Ours has **{speed[second] / speed[first]:.3f}** of open_clip's images a second (asked for: {GOAL}).",
        ],
    )


if __name__ == "__main__":
    main()
