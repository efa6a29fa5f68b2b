"""The text encoder in the format of transformers, for use without medclip_dcl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerFast

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.weight_files import safetensors_bytes
from medclip_dcl.networks.bert_folder import save_language_model
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.text_encoder import TransformersSentences
from medclip_dcl.report.page import render_template

PROJECTION_FILE = "projection.safetensors"


def export_text_encoder(network: ImageTextNetwork, folder: Path) -> None:
    """Write the text encoder as a folder that transformers and `pretrained` of its class load.

    Beside it projection.safetensors, the projection of the pooled hidden state into the common space, and a README.md
    with the lines that compute a sentence embedding. A masked-language-model head is left out. An earlier export of a
    text encoder is replaced at once.
    """
    encoder = network.text_encoder
    if not isinstance(encoder, TransformersSentences):
        raise UserError(
            f"--text_encoder: expected an encoder of transformers, found a {type(encoder).__name__}; "
            "leave it out"
        )
    if folder.is_dir() and any(folder.iterdir()) and not (folder / PROJECTION_FILE).is_file():
        raise UserError(f"--text_encoder: {folder} holds something else; give another folder")
    readme = render_template("text_encoder.md", _readme_facts(encoder), Path(__file__).parent)
    files = {
        PROJECTION_FILE: safetensors_bytes(encoder.projection.state_dict()),
        "README.md": readme.encode(),
    }
    try:
        save_language_model(encoder.model, plain_tokenizer(encoder), folder, files)
    except FileExistsError as error:
        raise UserError(f"--text_encoder: {error}") from error


def _readme_facts(encoder: TransformersSentences) -> dict[str, Any]:
    layers = dict(encoder.projection.named_children())
    projection = encoder.projection if not layers else nn.Sequential()
    return {
        "family": type(encoder.model).__name__,
        "model_class": encoder.model_class,
        "options": ", add_pooling_layer=False" if getattr(encoder.model, "pooler", 0) is None else "",
        "inputs": "**tokens" if encoder.model_class == "AutoModel" else 'input_ids=tokens["input_ids"]',
        "padding": '"max_length"' if encoder.is_padded_to_positions else "True",
        # What torch prints of a layer is the call that makes it.
        "projection": f"torch.nn.{projection!r}",
        "layers": {name: f"torch.nn.{layer!r}" for name, layer in layers.items()},
        **{name: getattr(encoder, name) for name in ("pooling", "dim", "max_tokens", "final_period")},
    }


def plain_tokenizer(encoder: TransformersSentences) -> PreTrainedTokenizerFast:
    """The encoder's tokenizer as one of transformers without a class of its own, which would build it anew."""
    return PreTrainedTokenizerFast(
        tokenizer_object=encoder.tokenizer,
        pad_token=encoder.tokenizer.id_to_token(encoder.pad_token_id),
        model_max_length=encoder.max_tokens,
        truncation_side=encoder.truncation_side,
        model_input_names=["input_ids", "attention_mask"],
    )
