"""Score every distinct sentence of a prepared set by a masked language model.

    python -m data_prep.score_sentences --data SET --model FOLDER
    torchrun --nproc_per_node 4 -m data_prep.score_sentences --data SET --model FOLDER

FOLDER is a Hugging Face folder or repository id with a masked-language-model head: CXR-BERT, or what
`python -m medclip_dcl fit --config configs/language_model.yaml` exported. The scores (pseudo-log-likelihood, natural
logarithm) go to ``SET/log_p/NAME.parquet`` with the columns sentence_id, n_tokens, log_p; NAME is the folder's name, a
fingerprint of the weights and the options that change the scores. Existing scores are not computed again. Finished
batches are written three times a minute, so that the same command continues after a kill; the result is the same, byte
for byte, on the same machine.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa

from data_prep.command import run_command
from data_prep.scores.language_model import (
    Parts,
    choose_device,
    require_writable,
    result_name,
    settings_fingerprint,
)
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet, check_table, write_table

if TYPE_CHECKING:
    import torch
    from transformers import BertForMaskedLM

    from medclip_dcl.scoring import ScoringPlan

Answer = TypeVar("Answer")

_DTYPES = ("float32", "bfloat16", "float16")
# Number of sentences that take some seconds to tokenise.
_MANY = 50_000
# Number of sentence ids that a message lists.
_NAMED = 5
# Time that one process waits for another, which may have more work or a slower machine.
_LONGEST_WAIT = timedelta(days=30)
# Parquet metadata: identifies the scored tokens and the model's settings.
_PLAN = "medclip_dcl_scored"


class Options(NamedTuple):
    """Options of scoring; see `medclip_dcl.scoring.pseudo_log_likelihood`.

    Attributes:
        token_budget: tokens in a batch; None for the device's default.
        within_word_l2r: also mask the later tokens of a word (Kauf & Ivanova, ACL 2023).
        mask_every: None is exact; k masks every k-th token at once, an approximation.
        dtype: "float32" (the reference), "bfloat16" or "float16".
        device: "auto", "cpu" or "cuda".
        keep_every: seconds between writes of finished batches: the most that a kill may cost.
    """

    token_budget: int | None = None
    within_word_l2r: bool = False
    mask_every: int | None = None
    dtype: str = "float32"
    device: str = "auto"
    keep_every: float = 20.0

    @property
    def suffix(self) -> str:
        """The options that are part of the scores' name."""
        parts = ["within_word_l2r"] if self.within_word_l2r else []
        parts += [f"mask_every_{self.mask_every}"] if self.mask_every is not None else []
        parts += [self.dtype] if self.dtype != "float32" else []
        return "".join(f"-{part}" for part in parts)


def score_sentences(data: Path, model: str, options: Options) -> Path:
    """Write the scores of one model unless they exist.

    Args:
        data: the prepared set.
        model: Hugging Face folder or repository id.
        options: of scoring.

    Returns:
        The file with the scores.

    Raises:
        PreparedDataError: no such set; no GPU where one is asked for; scores that are not finite.
        ModelFolderError: a folder without head, or whose tokenizer does not fit its weights.
    """
    prepared = PreparedSet(data)
    sentences = prepared.table("sentences").sort_values("sentence_id", ignore_index=True)
    # Heavy imports come after the cheap checks.
    import torch

    from medclip_dcl.encoders.pretrained import load_masked_language_model, load_tokenizer, resolve_folder
    from medclip_dcl.scoring import NotFiniteError, ScoringPlan, default_token_budget

    folder = resolve_folder(model)
    tokenizer = load_tokenizer(folder)
    network = load_masked_language_model(folder)
    file = prepared.folder / "log_p" / f"{result_name(model, network, options.suffix)}.parquet"
    with _processes(choose_device(options.device)) as processes:
        network = network.to(processes.device)
        if len(sentences) >= _MANY:
            processes.say(f"tokenising {len(sentences):,} sentences")
        budget = default_token_budget(network) if options.token_budget is None else options.token_budget
        plan = ScoringPlan(
            tokenizer,
            sentences["text"].tolist(),
            positions=int(network.config.max_position_embeddings),
            token_budget=budget,
            within_word_l2r=options.within_word_l2r,
            mask_every=options.mask_every,
            truncate=True,
        )
        # The configuration also determines values, and is not among the weights.
        meaning = f"{plan.fingerprint}-{settings_fingerprint(network)}"
        batching = f"{budget}-{processes.device.type}"
        parts = Parts(file, meaning, batching, plan.places, options.keep_every)
        if processes.of_first(lambda: _has_scores_of(file, sentences, meaning)):
            processes.say(
                f"{file} holds the scores of all {len(sentences):,} sentences by this model: nothing to do"
            )
            parts.remove()
            return file
        require_writable(file)
        try:
            values = _scored(network, plan, parts, processes, getattr(torch, options.dtype))
        except NotFiniteError as error:
            sentence = sentences["sentence_id"].iloc[error.index]
            raise PreparedDataError(
                f"{folder} gives sentence_id {sentence} no finite log probability: {error.reason}"
            ) from error
        if processes.rank == 0:
            scores = plan.table(values)
            scores.insert(0, "sentence_id", sentences["sentence_id"])
            result = scores[["sentence_id", "n_tokens", "log_p"]]
            result.attrs = {_PLAN: meaning}
            write_table(result, file, "log_p")
            processes.say(_summary(scores, file))
        processes.wait()
        parts.remove()
    return file


def _scored(
    network: BertForMaskedLM,
    plan: ScoringPlan,
    parts: Parts,
    processes: _Processes,
    dtype: torch.dtype,
) -> np.ndarray:
    """Values of the whole plan, on every process; batches of earlier runs are not computed again."""
    from medclip_dcl.scoring import score_batches, scoring_progress

    values = plan.empty_values()
    # The first process decides: another may be writing parts at this moment.
    done = processes.of_first(lambda: parts.read_into(values))
    if done:
        processes.say(f"continuing: {len(done):,} of {len(plan.batches):,} batches were done before")
    left = [number for number in range(len(plan.batches)) if number not in done]
    mine = left[processes.rank :: processes.size]
    who = f"rank 0 of {processes.size}" if processes.size > 1 else ""
    with scoring_progress(plan, processes.rank == 0, mine, who) as report, parts.keeping():
        for number, found in score_batches(network, plan, mine, dtype=dtype):
            values[plan.places(number)] = found
            parts.add(number, found)
            report(number)
    if processes.size > 1:
        processes.say("rank 0 has done its share; it waits for the others")
    return processes.together(values)


class _Processes:
    """The processes that share the work: one, or those started by torchrun."""

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1) -> None:
        self.device, self.rank, self.size = device, rank, size

    def say(self, text: str) -> None:
        """Print once."""
        if self.rank == 0:
            print(text, flush=True)

    def together(self, values: np.ndarray) -> np.ndarray:
        """Values of all processes; NaN where a process has none."""
        if self.size == 1:
            return values
        import torch
        import torch.distributed as dist

        shared = torch.from_numpy(np.nan_to_num(values, nan=-np.inf, neginf=-np.inf)).to(self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return shared.cpu().numpy()

    def of_first(self, question: Callable[[], Answer]) -> Answer:
        """The first process's answer, on all of them."""
        if self.size == 1:
            return question()
        import torch.distributed as dist

        answer: list[Any] = [question() if self.rank == 0 else None]
        dist.broadcast_object_list(answer)
        return answer[0]

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier()


@contextmanager
def _processes(device: str) -> Iterator[_Processes]:
    import torch

    size = _number("WORLD_SIZE", 1)
    if size == 1:
        yield _Processes(torch.device(device))
        return
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise PreparedDataError(
            f"WORLD_SIZE is {size}, but LOCAL_WORLD_SIZE is not set: start several processes by torchrun, or unset "
            "WORLD_SIZE for one"
        )
    local_size = _number("LOCAL_WORLD_SIZE", size)
    # A fast process waits for a slow one; torchrun ends both if one of them dies.
    strategy = DDPStrategy(timeout=_LONGEST_WAIT)
    fabric = Fabric(accelerator=device, devices=local_size, num_nodes=size // local_size, strategy=strategy)
    fabric.launch()
    try:
        yield _Processes(fabric.device, fabric.global_rank, fabric.world_size)
    finally:
        torch.distributed.destroy_process_group()


def _number(name: str, default: int) -> int:
    """A positive number from the environment."""
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise PreparedDataError(
            f"{name} is {text!r}, expected a positive number: start several processes by torchrun, or unset {name} "
            "for one"
        )
    return int(text)


def _has_scores_of(file: Path, sentences: pd.DataFrame, meaning: str) -> bool:
    """Whether the file has the scores of these sentences' tokens; scores of other texts are computed again."""
    if not file.is_file():
        return False
    try:
        scores = pd.read_parquet(file)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        # The system's own errors have a number: the file may be whole.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        print(f"{file} is damaged ({error}): the sentences are scored again", file=sys.stderr)
        return False
    try:
        check_table(scores, "log_p")
    except PreparedDataError as error:
        raise PreparedDataError(
            f"{file} is not a file of scores: {error}; move it away, and run the same command again"
        ) from error
    is_same = scores["sentence_id"].tolist() == sentences["sentence_id"].tolist()
    if is_same and scores.attrs.get(_PLAN) == meaning:
        return True
    print(
        f"{file} is of other {'settings or texts' if is_same else 'sentences'}: the sentences are scored again",
        file=sys.stderr,
    )
    return False


def _summary(scores: pd.DataFrame, file: Path) -> str:
    """Number and median of the scores, and sentences that deserve a look; no texts."""
    lines = [f"{file}: {len(scores):,} sentences, median log p {scores['log_p'].median():.2f}"]
    for chosen, what in (
        (scores["truncated"], "were too long for the model: only their beginning was scored"),
        (scores["n_unknown"] > 0, "contain unknown tokens ([UNK])"),
        (scores["n_tokens"] == 0, "have no tokens and no score (NaN)"),
    ):
        numbers = scores.loc[chosen, "sentence_id"].tolist()
        if numbers:
            first = ", ".join(map(str, numbers[:_NAMED])) + (", ..." if len(numbers) > _NAMED else "")
            lines.append(f"  {len(numbers):,} sentences {what} (sentence_id {first})")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and score."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.score_sentences",
        description="Pseudo-log-likelihood of every distinct sentence of a prepared set, into SET/log_p/.",
    )
    parser.add_argument("--data", type=Path, required=True, metavar="SET", help="prepared data set")
    parser.add_argument(
        "--model",
        required=True,
        metavar="FOLDER",
        help="Hugging Face folder or repository id with a masked-language-model head",
    )
    parser.add_argument(
        "--token_budget",
        type=int,
        help="tokens in a batch (of each thread), which bounds memory (default: 4096 on CPU, for models "
        "narrower than 512 16384; 65536 on GPU)",
    )
    parser.add_argument(
        "--within_word_l2r",
        action="store_true",
        help="also mask the later tokens of a word (Kauf & Ivanova 2023); its scores get a file of their own",
    )
    parser.add_argument(
        "--mask_every",
        type=int,
        metavar="K",
        help="APPROXIMATE: mask every K-th token at once; K = 8 ranked Open-i's sentences "
        "like the exact scores (Spearman .9999) (default: exact)",
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="float32",
        help="float32 is the reference; bfloat16 is faster where the CPU has AMX (BERT-base: 3.6 x) or AVX-512 for it "
        "(2 x); float16 is 8 times as precise as bfloat16 (default: float32)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument(
        "--keep_every",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="between writes of finished batches; a kill loses no more than that (default: 20)",
    )
    options = vars(parser.parse_args(arguments))
    if options["mask_every"] is not None and (options["mask_every"] < 1 or options["within_word_l2r"]):
        parser.error("--mask_every must be at least 1 and does not go with --within_word_l2r")
    if options["token_budget"] is not None and options["token_budget"] < 1:
        parser.error(f"--token_budget must be at least 1, got {options['token_budget']}")
    if not 0 <= options["keep_every"] < math.inf:
        parser.error(f"--keep_every must be at least 0 and finite, got {options['keep_every']}")
    score_sentences(options.pop("data"), options.pop("model"), Options(**options))


if __name__ == "__main__":
    run_command(main)
