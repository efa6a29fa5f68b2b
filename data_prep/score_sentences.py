"""Score every distinct sentence of a prepared set by a masked language model, or a causal one.

    medclip-dcl score --data SET --model FOLDER
    torchrun --nproc_per_node 4 -m medclip_dcl score --data SET --model FOLDER

FOLDER is a Hugging Face folder or repository id with a masked-language-model head: CXR-BERT, what
`medclip-dcl fit --config configs/language_model.yaml` exported, RoBERTa, ModernBERT, DeBERTa or another of
transformers; or a causal language model, such as GPT-2. The scores (pseudo-log-likelihood, of a causal model the
likelihood, natural logarithm) go to ``SET/log_p/NAME.parquet`` with the columns sentence_id, n_tokens, log_p; NAME is
the folder's name, a fingerprint of the weights and the options that change the scores. Existing scores are not computed
again. The same command continues after a kill; the result is the same, byte for byte, on the same machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.scores import language_model
from data_prep.scores.language_model import (
    choose_device,
    earlier_entries,
    has_results,
    journal,
    remove_progress,
    require_writable,
    result_file,
    scoring_fingerprint,
)
from medclip_dcl.common.command_line import option, parse_options, run_command, whole_number
from medclip_dcl.data.prepared import PreparedSet, seal, write_table

if TYPE_CHECKING:
    import torch
    from lightning_fabric import Fabric
    from transformers import PreTrainedModel

    from medclip_dcl.scoring import ScoringPlan

# Time that one process waits for another, which may have a slower machine.
_LONGEST_WAIT = timedelta(days=30)
# Parquet metadata: identifies the scored tokens and the model's settings.
_PLAN = "medclip_dcl_scored"


@dataclass(frozen=True, kw_only=True)
class Settings(language_model.Settings):
    """Options of the command; see `medclip_dcl.scoring.pseudo_log_likelihood`."""

    token_budget: int | None = option(
        "tokens in a batch (of each thread), which bounds memory (4096 on CPU, for models narrower than 512 16384; "
        "65536 on GPU)",
        None,
        type=whole_number(1),
    )
    within_word_l2r: bool = option(
        "also mask the later tokens of a word (Kauf & Ivanova, ACL 2023); its scores get a file of their own",
        False,
    )
    mask_every: int | None = option(
        "APPROXIMATE: mask every K-th token at once; K = 8 ranked Open-i's sentences like the exact scores (Spearman "
        ".9999) (exact)",
        None,
        type=whole_number(1),
        metavar="K",
    )
    dtype: str = option(
        "float32 is the reference; bfloat16 is faster where the CPU has AMX (BERT-base: 3.7 x) or AVX-512 for it "
        "(2 x); float16 is 8 times as precise as bfloat16 (float32)",
        "float32",
        choices=("float32", "bfloat16", "float16"),
    )

    @property
    def suffix(self) -> str:
        """The options that are part of the scores' name."""
        parts = ["within_word_l2r"] if self.within_word_l2r else []
        parts += [f"mask_every_{self.mask_every}"] if self.mask_every is not None else []
        parts += [self.dtype] if self.dtype != "float32" else []
        return "".join(f"-{part}" for part in parts)


def score_sentences(settings: Settings) -> Path:
    """Write the scores of one model unless they exist, and return their file."""
    prepared = PreparedSet(settings.data)
    sentences = prepared.table("sentences").sort_values("sentence_id", ignore_index=True)
    # Heavy imports come after the cheap checks.
    import torch

    from medclip_dcl.networks.bert_folder import resolve_folder
    from medclip_dcl.networks.language_model import load_language_model
    from medclip_dcl.scoring import default_token_budget, score_summary, scoring_plan

    network, tokenizer = load_language_model(resolve_folder(settings.model))
    file = result_file(prepared.folder / "log_p", settings.model, network, settings.suffix)
    with _processes(choose_device(settings.device)) as fabric:
        network = network.to(fabric.device)
        budget = settings.token_budget or default_token_budget(network)
        plan = scoring_plan(
            network,
            tokenizer,
            sentences["text"].tolist(),
            token_budget=budget,
            within_word_l2r=settings.within_word_l2r,
            mask_every=settings.mask_every,
            truncate=True,
        )
        # The configuration also determines values, and is not among the weights.
        meaning = f"{plan.fingerprint}-{scoring_fingerprint(network)}"
        if settings.dtype != "float32":
            meaning += "-without_dropout"  # older files were scored with it, and are scored again
        ids = sentences["sentence_id"].to_numpy()
        if fabric.broadcast(fabric.is_global_zero and has_results(file, ids, _PLAN, meaning)):
            fabric.print(
                f"{file} holds the scores of all {len(ids):,} sentences by this model: nothing to do"
            )
            remove_progress(file)
            return file
        require_writable(file.parent)
        work = {"sentences": meaning, "token_budget": budget, "device": fabric.device.type}
        values = _scored(network, plan, file, work, fabric, getattr(torch, settings.dtype))
        if fabric.is_global_zero:
            scores = plan.table(values)
            scores.insert(0, "sentence_id", sentences["sentence_id"])
            result = scores[["sentence_id", "n_tokens", "log_p"]]
            result.attrs = {_PLAN: meaning, **seal(result, sentences)}  # type: ignore[dict-item]
            write_table(result, file, "log_p")
            print(score_summary(scores, file, sentences["sentence_id"], "sentence_id"), flush=True)
        fabric.barrier()
        remove_progress(file)
    return file


def _scored(
    network: PreTrainedModel,
    plan: ScoringPlan,
    file: Path,
    work: dict[str, Any],
    fabric: Fabric,
    dtype: torch.dtype,
) -> np.ndarray:
    """Values of the whole plan, on every process; batches of earlier runs are not computed again."""
    import torch

    from medclip_dcl.scoring import restored, score_left

    values, left = restored(plan, earlier_entries(file, work) if fabric.is_global_zero else ())
    # No process writes before the first one has read.
    left = fabric.broadcast(left)
    if n_done := len(plan.batches) - len(left):
        fabric.print(f"continuing: {n_done:,} of {len(plan.batches):,} batches were done before", flush=True)
    mine = left[fabric.global_rank :: fabric.world_size]
    who = f" (rank 0 of {fabric.world_size})" if fabric.world_size > 1 else ""
    kept = journal(file, work, fabric.global_rank)
    score_left(network, plan, values, mine, dtype=dtype, kept=kept, who=who, is_shown=fabric.is_global_zero)
    if who:
        fabric.print("rank 0 has done its share; it waits for the others", flush=True)
    shared = torch.from_numpy(np.nan_to_num(values, nan=-np.inf, neginf=-np.inf)).to(fabric.device)
    together = fabric.all_reduce(shared, reduce_op="max")
    assert isinstance(together, torch.Tensor)
    return together.cpu().numpy()


@contextmanager
def _processes(device: str) -> Iterator[Fabric]:
    """The processes that share the work: one, or those started by torchrun."""
    import torch
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment
    from lightning_fabric.strategies import DDPStrategy

    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        # Not SLURM's environment, which expects as many processes as the job has tasks.
        yield Fabric(accelerator=device, devices=1, plugins=LightningEnvironment())
        return
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    # A fast process waits for a slow one; torchrun ends both if one of them dies.
    strategy = DDPStrategy(timeout=_LONGEST_WAIT)
    fabric = Fabric(accelerator=device, devices=local_size, num_nodes=size // local_size, strategy=strategy)
    fabric.launch()
    try:
        yield fabric
    finally:
        torch.distributed.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, see `--help`."""
    words = sys.argv[1:] if arguments is None else arguments
    if words and not words[0].startswith("-"):
        from medclip_dcl.scoring.__main__ import main as score_file

        score_file(words)
        return
    score_sentences(parse_options(Settings, "score", __doc__, arguments))


if __name__ == "__main__":
    run_command(main)
