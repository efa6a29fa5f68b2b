"""Embed every distinct sentence of a prepared set by the initial, frozen text encoder.

    medclip-dcl embed --data SET --model FOLDER

FOLDER is a Hugging Face folder or repository id of a BERT (no head is needed), the initial text encoder. The
embeddings, [CLS] of the last hidden state or the mean over all tokens, in float32, go to
``SET/text_embedding/NAME.parquet`` with the columns sentence_id and embedding; NAME is the folder's name, a fingerprint
of the encoder's weights and "-mean" for that pooling. Existing embeddings are not computed again, and the same command
continues after a kill.

The objectives by text similarity read them; medclip-dcl similar prints what their thresholds find.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from data_prep.scores import language_model
from data_prep.scores.language_model import (
    RowFile,
    choose_device,
    has_results,
    journal,
    remove_progress,
    require_writable,
    result_file,
    settings_fingerprint,
)
from medclip_dcl.common.command_line import option, parse_options, run_command, whole_number
from medclip_dcl.data.prepared import (
    PreparedSet,
    TextEmbedding,
    seal_of_texts,
    write_text_embedding,
)

if TYPE_CHECKING:
    from transformers import BertModel

    from medclip_dcl.scoring.plan import Batch, DistinctPieces

# Parquet metadata: identifies the embedded tokens and the model's settings.
_MEANING = "medclip_dcl_embedded"
# Tokens in a batch, by device.
_BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}


@dataclass(frozen=True, kw_only=True)
class Settings(language_model.Settings):
    """Options of the command."""

    pooling: str = option(
        "cls: hidden state of [CLS] (choice, not from the paper); mean: over all tokens, [CLS] and [SEP] included; its "
        "embeddings get a file of their own (cls)",
        "cls",
        choices=("cls", "mean"),
    )
    batch_tokens: int | None = option(
        "tokens in a batch, which bounds memory (4096 on CPU, 65536 on GPU)",
        None,
        type=whole_number(1),
        metavar="N",
    )


def embed_sentences(settings: Settings) -> Path:
    """Write the embeddings of one model unless they exist, and return their file."""
    prepared = PreparedSet(settings.data)
    sentences = prepared.table("sentences").sort_values("sentence_id", ignore_index=True)
    device = choose_device(settings.device)
    # Heavy imports come after the cheap checks.
    from medclip_dcl.networks.bert_folder import load_bert, resolve_folder
    from medclip_dcl.networks.tokenizer_files import load_tokenizer
    from medclip_dcl.scoring.plan import DistinctPieces

    folder = resolve_folder(settings.model)
    tokenizer = load_tokenizer(folder)
    network = load_bert(folder).eval()
    suffix = "" if settings.pooling == "cls" else f"-{settings.pooling}"
    file = result_file(prepared.folder / "text_embedding", settings.model, network, suffix)
    positions = int(network.config.max_position_embeddings)
    pieces = DistinctPieces(tokenizer, sentences["text"].tolist(), positions=positions, truncate=True)
    special = (tokenizer.cls_token_id, tokenizer.sep_token_id)
    # The configuration also determines values, and is not among the weights.
    meaning = f"{pieces.fingerprint_with(special)}-{settings_fingerprint(network)}"
    network = network.to(device)
    budget = settings.batch_tokens or _BATCH_TOKENS[device]
    ids = sentences["sentence_id"].to_numpy()
    if has_results(file, ids, _MEANING, meaning):
        print(f"{file} holds the embeddings of all {len(ids):,} sentences by this model: nothing to do")
    else:
        require_writable(file.parent)
        kept = journal(file, {"sentences": meaning, "batch_tokens": budget, "device": device})
        rows = RowFile(file.with_name(f".{file.stem}.rows.progress.npy"), pieces.n_distinct, kept)
        values = _embedded(network, pieces, budget, rows, settings.pooling)[pieces.row]
        write_text_embedding(
            TextEmbedding(ids, values), file, {_MEANING: meaning, **seal_of_texts(sentences)}
        )
        print(f"{file}: {len(ids):,} sentences, {values.shape[1]} dimensions", flush=True)
        if count := int(pieces.is_truncated.sum()):
            print(f"  {count:,} sentences were too long for the model: only their beginning was embedded")
    remove_progress(file)
    return file


def _embedded(
    network: BertModel, pieces: DistinctPieces, budget: int, rows: RowFile, pooling: str
) -> Float[np.ndarray, "row dim"]:
    """Embeddings of all distinct sentences; batches of earlier runs are not computed again."""
    batches = pieces.in_batches(budget)
    ends = np.cumsum([batch.stop - batch.start for batch in batches])
    left = batches[int(np.searchsorted(ends, rows.done, side="right")) :]
    rows.write(embed_batches(network, pieces, left, pooling), len(left), "sentences")
    found = np.load(rows.file)
    values = np.empty_like(found)
    values[np.concatenate(list(pieces.rows_by_length.values()))] = found
    return values


def embed_batches(
    network: BertModel, pieces: DistinctPieces, batches: Sequence[Batch], pooling: str
) -> Iterator[Float[np.ndarray, "row dim"]]:
    """Pooled last hidden states of one batch after the other, from a network in eval mode on its device.

    The sentences of a batch have one length: there is no padding, and no sentence affects another.
    """
    import torch

    length, bucket = -1, np.empty((0, 0), dtype=np.int64)
    for batch in batches:
        if batch.length != length:
            length, bucket = batch.length, pieces.bucket(batch.length)
        # Not around the yield: the caller's code must not run in inference mode.
        with torch.inference_mode():
            tokens = torch.from_numpy(bucket[batch.start : batch.stop]).to(network.device)
            hidden = network(input_ids=tokens).last_hidden_state
            pooled = hidden[:, 0] if pooling == "cls" else hidden.mean(dim=1)
            found = pooled.float().cpu().numpy()
        yield found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, see `--help`."""
    embed_sentences(parse_options(Settings, "data_prep.embed_sentences", __doc__, arguments))


if __name__ == "__main__":
    run_command(main)
