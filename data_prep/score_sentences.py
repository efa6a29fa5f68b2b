"""Score every distinct sentence of a prepared set by a masked language model.

    python -m data_prep.score_sentences --data SET --model FOLDER

FOLDER is a Hugging Face folder or repository id with a masked-language-model head: CXR-BERT, or what
`python -m medclip_dcl fit --config configs/language_model.yaml` exported. The scores (pseudo-log-likelihood, natural
logarithm) go to ``SET/log_p/NAME.parquet`` with the columns sentence_id, n_tokens, log_p; NAME is the folder's name and
a fingerprint of the weights. Scores that are there already are not computed again.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.command import run_command
from medclip_dcl.prepared import PreparedDataError, PreparedSet, check_table, write_table

if TYPE_CHECKING:
    import pandas as pd

_FINGERPRINT_DIGITS = 8
_L2R_SUFFIX = "-within_word_l2r"


def score_sentences(
    data: Path, model: str, *, token_budget: int | None, within_word_l2r: bool, device: str
) -> Path:
    """Write the scores of one model, or say that they are there.

    Args:
        data: the prepared set.
        model: Hugging Face folder or repository id.
        token_budget: word pieces in a batch; None for the device's default.
        within_word_l2r: mask the later pieces of a word, too (Kauf & Ivanova, ACL 2023).
        device: "auto", "cpu" or "cuda".

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

    from medclip_dcl.encoders.pretrained import (
        load_masked_language_model,
        load_tokenizer,
        resolve_folder,
        weights_fingerprint,
    )
    from medclip_dcl.scoring import pseudo_log_likelihood

    folder = resolve_folder(model)
    tokenizer = load_tokenizer(folder)
    network = load_masked_language_model(folder)
    name = f"{_last_component(model)}-{weights_fingerprint(network)[:_FINGERPRINT_DIGITS]}"
    file = prepared.folder / "log_p" / f"{name}{_L2R_SUFFIX if within_word_l2r else ''}.parquet"
    if _has_scores_of(file, sentences):
        print(f"{file} holds the scores of all {len(sentences):,} sentences by this model: nothing to do")
        return file
    network = network.to(_device(device, torch.cuda.is_available()))
    scores = pseudo_log_likelihood(
        network,
        tokenizer,
        sentences["text"].tolist(),
        token_budget=token_budget,
        within_word_l2r=within_word_l2r,
        truncate=True,
        progress=sys.stderr.isatty(),
    )
    scores.insert(0, "sentence_id", sentences["sentence_id"])
    _check_finite(scores, folder)
    write_table(scores[["sentence_id", "n_tokens", "log_p"]], file, "log_p")
    print(_summary(scores, file))
    return file


def _last_component(model: str) -> str:
    """Name of a folder (also of ``.`` or with a closing slash) or of a repository."""
    return os.path.basename(os.path.abspath(os.path.expanduser(model)))


def _device(device: str, has_cuda: bool) -> str:
    if device == "cuda" and not has_cuda:
        raise PreparedDataError("--device cuda: this machine has no usable GPU; use --device cpu or auto")
    return ("cuda" if has_cuda else "cpu") if device == "auto" else device


def _has_scores_of(file: Path, sentences: pd.DataFrame) -> bool:
    """True if the file has a row for each of these sentences; one of another set's sentences is made again."""
    if not file.is_file():
        return False
    import pandas as pd

    scores = pd.read_parquet(file)
    check_table(scores, "log_p")
    return scores["sentence_id"].tolist() == sentences["sentence_id"].tolist()


def _check_finite(scores: pd.DataFrame, folder: Path) -> None:
    bad = scores[(scores["n_tokens"] > 0) & ~scores["log_p"].between(float("-inf"), 0, inclusive="neither")]
    if len(bad):
        raise PreparedDataError(
            f"{folder} gives {len(bad)} of {len(scores)} sentences no finite log probability (first: sentence_id "
            f"{bad['sentence_id'].iloc[0]}); the weights are damaged or hold NaN"
        )


def _summary(scores: pd.DataFrame, file: Path) -> str:
    """What was written, and what of it deserves a look; no texts."""
    lines = [f"{file}: {len(scores):,} sentences, median log p {scores['log_p'].median():.2f}"]
    for count, what in (
        (int(scores["truncated"].sum()), "were too long for the model: only their beginning was scored"),
        (int((scores["n_unknown"] > 0).sum()), "hold word pieces that the model does not know ([UNK])"),
        (int((scores["n_tokens"] == 0).sum()), "have no word pieces and no score (NaN)"),
    ):
        if count:
            lines.append(f"  {count:,} sentences {what}")
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
        help="word pieces in a batch, which bounds memory (default: 4096 on CPU, 65536 on GPU)",
    )
    parser.add_argument(
        "--within_word_l2r",
        action="store_true",
        help="mask the later pieces of a word, too (Kauf & Ivanova 2023); its scores get a file of their own",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    options = parser.parse_args(arguments)
    score_sentences(
        options.data,
        options.model,
        token_budget=options.token_budget,
        within_word_l2r=options.within_word_l2r,
        device=options.device,
    )


if __name__ == "__main__":
    run_command(main)
