"""Score every distinct sentence of a prepared set by a masked language model, or a causal one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import require_writable
from medclip_dcl.data.prepared import PreparedSet, seal, write_table
from medclip_dcl.encoding.model_results import ModelResults, scoring_fingerprint
from medclip_dcl.encoding.options import Score

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from transformers import PreTrainedModel

    from medclip_dcl.scoring import ScoringPlan

# Time that one process waits for another, which may have a slower machine.
_LONGEST_WAIT = timedelta(days=30)
# Parquet metadata: identifies the scored tokens and the model's settings.
_PLAN = "medclip_dcl_scored"


def run(options: Score) -> None:
    """Score the sentences of a prepared set, or of a file."""
    names = ("output", "column", "per_token")
    if options.data.is_dir():
        if of_file := [f"--{name}" for name in names if getattr(options, name)]:
            raise UserError(f"{', '.join(of_file)}: of a FILE, but {options.data} is a folder; leave out")
        score_sentences(options)
        return
    if options.output is None:
        raise UserError(
            f"--output: expected a .csv or .parquet file for the scores of {options.data}, found none"
        )
    if options.tasks > 1:
        raise UserError(
            f"--tasks: expected a SET for several tasks, found the file {options.data}; leave it out"
        )
    from medclip_dcl.scoring.sentence_file import score_file

    others = ("device", "dtype", "within_word_l2r", "token_budget", "column", "per_token")
    settings = {name: getattr(options, name) for name in others}
    score_file(options.data, options.model, options.output, **settings)


def score_sentences(settings: Score) -> Path:
    """Write the scores of one model unless they exist, and return their file."""
    prepared = PreparedSet(settings.data)
    sentences = prepared.table("sentences").sort_values("sentence_id", ignore_index=True)
    # Heavy imports come after the cheap checks.

    from medclip_dcl.networks.bert_folder import resolve_folder
    from medclip_dcl.networks.language_model import load_language_model
    from medclip_dcl.scoring import default_token_budget, score_summary, scoring_plan

    network, tokenizer = load_language_model(resolve_folder(settings.model))
    results = ModelResults(prepared.folder / "log_p", settings.model, network, settings.suffix)
    file = results.file
    with _processes(settings.device) as fabric:
        network = network.to(fabric.device)
        budget = settings.token_budget or default_token_budget(network)
        plan = scoring_plan(
            network,
            tokenizer,
            sentences["text"].tolist(),
            token_budget=budget,
            within_word_l2r=settings.within_word_l2r,
            truncate=True,
        )
        # The configuration also determines values, and is not among the weights.
        meaning = f"{plan.fingerprint}-{scoring_fingerprint(network)}"
        ids = sentences["sentence_id"].to_numpy()
        if fabric.broadcast(fabric.is_global_zero and results.exist_for(ids, _PLAN, meaning)):
            fabric.print(
                f"{file} holds the scores of all {len(ids):,} sentences by this model: nothing to do"
            )
            results.remove_progress()
            return file
        require_writable(file.parent)
        work = {"sentences": meaning, "token_budget": budget, "device": fabric.device.type}
        values, left = _scored(network, plan, results, work, fabric, settings)
        if left:
            # They are counted before the file is looked for: the task that writes it removes the journals.
            if not fabric.broadcast(fabric.is_global_zero and results.exist_for(ids, _PLAN, meaning)):
                fabric.print(
                    f"task {settings.task} of {settings.tasks} has done its share; {left:,} of {len(plan.batches):,} "
                    f"batches are left to other tasks, the last of which writes {file}",
                    flush=True,
                )
                return file
        elif fabric.is_global_zero:
            scores = plan.table(values)
            scores.insert(0, "sentence_id", sentences["sentence_id"])
            result = scores[["sentence_id", "n_tokens", "log_p"]]
            result.attrs = {_PLAN: meaning, **seal(result, sentences)}  # type: ignore[dict-item]
            write_table(result, file, "log_p")
            print(score_summary(scores, file, sentences["sentence_id"], "sentence_id"), flush=True)
        fabric.barrier()
        results.remove_progress()
    return file


def _scored(
    network: PreTrainedModel,
    plan: ScoringPlan,
    results: ModelResults,
    work: dict[str, Any],
    fabric: Fabric,
    settings: Score,
) -> tuple[np.ndarray, int]:
    """Values of the whole plan, on the first process, and the number of batches that other tasks have not done yet.

    Batches of earlier runs are not computed again.
    """
    import torch

    from medclip_dcl.scoring import restored, score_left

    values, left = restored(plan, results.earlier_entries(work) if fabric.is_global_zero else ())
    # No process writes before the first one has read.
    left = fabric.broadcast(left)
    n_batches = len(range(settings.task, len(plan.batches), settings.tasks))
    share = [number for number in left if number % settings.tasks == settings.task]
    if n_done := n_batches - len(share):
        fabric.print(f"continuing: {n_done:,} of {n_batches:,} batches were done before", flush=True)
    mine = share[fabric.global_rank :: fabric.world_size]
    who = f" (rank 0 of {fabric.world_size})" if fabric.world_size > 1 else ""
    part = f"{settings.task}_of_{settings.tasks}_" if settings.tasks > 1 else ""
    kept = results.journal(work, f"{part}{fabric.global_rank}")
    dtype = getattr(torch, settings.dtype)
    score_left(network, plan, values, mine, dtype=dtype, kept=kept, who=who, is_shown=fabric.is_global_zero)
    kept.close()  # a network file system shows it to other machines then
    if who:
        fabric.print("rank 0 has done its share; it waits for the others", flush=True)
    shared = torch.from_numpy(np.nan_to_num(values, nan=-np.inf, neginf=-np.inf)).to(fabric.device)
    together = fabric.all_reduce(shared, reduce_op="max")
    assert isinstance(together, torch.Tensor)
    values, left = together.cpu().numpy(), []
    if settings.tasks > 1:
        values, left = restored(plan, results.earlier_entries(work) if fabric.is_global_zero else ())
    return values, len(fabric.broadcast(left))


@contextmanager
def _processes(device: str) -> Iterator[Fabric]:
    """The processes that share the work: one, or those started by torchrun."""
    import torch
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment
    from lightning_fabric.strategies import DDPStrategy

    from medclip_dcl.common.devices import usable_device

    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        # Not SLURM's environment, which expects as many processes as the job has tasks.
        used = usable_device(device)
        devices = 1 if used.index is None else [used.index]
        yield Fabric(accelerator=used.type, devices=devices, plugins=LightningEnvironment())
        return
    if ":" in device:
        raise UserError(f"--device: expected auto, cpu or cuda with several processes, found {device}")
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    # A fast process waits for a slow one; torchrun ends both if one of them dies.
    strategy = DDPStrategy(timeout=_LONGEST_WAIT)
    # Named by its number, so that no process takes memory of the first GPU.
    has_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    kind = usable_device(f"cuda:{os.environ['LOCAL_RANK']}" if has_gpu else "cpu").type
    fabric = Fabric(accelerator=kind, devices=local_size, num_nodes=size // local_size, strategy=strategy)
    fabric.launch()
    try:
        yield fabric
    finally:
        torch.distributed.destroy_process_group()
