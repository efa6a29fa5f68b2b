"""Embed every distinct sentence of a prepared set by the initial, frozen text encoder, of any family that trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from medclip_dcl.common.files import require_writable
from medclip_dcl.data.prepared import PreparedSet, TextEmbedding, seal_of_texts, write_text_embedding
from medclip_dcl.encoding.model_results import ModelResults, RowFile, scoring_fingerprint
from medclip_dcl.encoding.options import Embed

if TYPE_CHECKING:
    from medclip_dcl.networks.text_encoder import TransformersSentences
    from medclip_dcl.scoring.plan import Batch, DistinctPieces

# Parquet metadata: identifies the embedded tokens and the model's settings.
_MEANING = "medclip_dcl_embedded"
# Tokens in a batch, by device.
_BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}


def embed_sentences(settings: Embed) -> Path:
    """Write the embeddings of one model unless they exist, and return their file."""
    prepared = PreparedSet(settings.data)
    sentences = prepared.table("sentences").sort_values("sentence_id", ignore_index=True)
    # Heavy imports come after the cheap checks.
    from transformers import PreTrainedTokenizerFast

    from medclip_dcl.common.devices import usable_device
    from medclip_dcl.networks.library_folder import longest_sentence
    from medclip_dcl.networks.text_encoder import TransformersSentences
    from medclip_dcl.scoring.plan import DistinctPieces

    encoder = TransformersSentences(settings.model, pooling=settings.pooling).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=encoder.tokenizer)
    suffix = "" if encoder.pooling == encoder.own_pooling else f"-{encoder.pooling}"
    results = ModelResults(prepared.folder / "text_embedding", settings.model, encoder.model, suffix)
    file = results.file
    texts, positions = sentences["text"].tolist(), longest_sentence(encoder.model)
    pieces = DistinctPieces(tokenizer, texts, positions=positions, truncate=True)
    # The configuration also determines values, and is not among the weights.
    meaning = (
        f"{pieces.fingerprint_with((*pieces.before, *pieces.after))}-{scoring_fingerprint(encoder.model)}"
    )
    encoder = encoder.to(device := usable_device(settings.device))
    budget = settings.batch_tokens or _BATCH_TOKENS[device.type]
    ids = sentences["sentence_id"].to_numpy()
    if results.exist_for(ids, _MEANING, meaning):
        print(f"{file} holds the embeddings of all {len(ids):,} sentences by this model: nothing to do")
    else:
        require_writable(file.parent)
        kept = results.journal({"sentences": meaning, "batch_tokens": budget, "device": device.type})
        rows = RowFile(file.with_name(f".{file.stem}.rows.progress.npy"), pieces.n_distinct, kept)
        values = _embedded(encoder, pieces, budget, rows)[pieces.row]
        write_text_embedding(
            TextEmbedding(ids, values), file, {_MEANING: meaning, **seal_of_texts(sentences)}
        )
        print(f"{file}: {len(ids):,} sentences, {values.shape[1]} dimensions", flush=True)
        if count := int(pieces.is_truncated.sum()):
            print(f"  {count:,} sentences were too long for the model: only their beginning was embedded")
    results.remove_progress()
    return file


def _embedded(
    encoder: TransformersSentences, pieces: DistinctPieces, budget: int, rows: RowFile
) -> Float[np.ndarray, "row dim"]:
    """Embeddings of all distinct sentences; batches of earlier runs are not computed again."""
    batches = pieces.in_batches(budget)
    ends = np.cumsum([batch.stop - batch.start for batch in batches])
    left = batches[int(np.searchsorted(ends, rows.done, side="right")) :]
    rows.write(embed_batches(encoder, pieces, left), len(left), "sentences")
    found = np.load(rows.file)
    values = np.empty_like(found)
    values[np.concatenate(list(pieces.rows_by_length.values()))] = found
    return values


def embed_batches(
    encoder: TransformersSentences, pieces: DistinctPieces, batches: Sequence[Batch]
) -> Iterator[Float[np.ndarray, "row dim"]]:
    """Pooled states of one batch after the other, from an encoder in eval mode on its device.

    The sentences of a batch have one length: there is no padding, and no sentence affects another.
    """
    import torch

    length, bucket = -1, np.empty((0, 0), dtype=np.int64)
    for batch in batches:
        if batch.length != length:
            length, bucket = batch.length, pieces.bucket(batch.length)
        # Not around the yield: the caller's code must not run in inference mode.
        with torch.inference_mode():
            tokens = torch.from_numpy(bucket[batch.start : batch.stop]).to(encoder.model.device)
            found = (
                encoder.states(tokens, tokens.new_full((len(tokens),), tokens.shape[1])).float().cpu().numpy()
            )
        yield found
