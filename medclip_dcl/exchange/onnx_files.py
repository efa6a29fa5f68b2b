"""Both encoders, or a classifier, as ONNX files, which run without torch; needs the extra ``onnx``."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from medclip_dcl.common.errors import UserError, needs_extra
from medclip_dcl.common.files import write_bytes, write_text
from medclip_dcl.networks.classifier import FindingNetwork
from medclip_dcl.networks.image_text import ImageTextNetwork

IMAGE_FILE = "image_encoder.onnx"
TEXT_FILE = "text_encoder.onnx"
TOKENIZER_FILE = "tokenizer.json"
CLASSIFIER_FILE = "classifier.onnx"

TOLERANCE = 1e-4
"""Largest difference from torch, relative to the largest value where that exceeds 1."""

_IMAGES = (
    "images: float32 (batch, 3, size, size), grey levels / 255 in three equal channels, of radiographs fitted to the "
    "size as image_size, geometry and prepared_size say; the normalisation of the channels is inside. "
)
_FEATURE_MAP = (
    "feature_map: (batch, dim, row, column), a region every stride pixels, not normalised to length 1; global_vector, "
    "of encoders that have one: (batch, dim)."
)
_LOGITS = "logits: (batch, finding), in the order of findings."
_SENTENCES = (
    "input_ids, attention_mask: int64 (batch, token), at most max_tokens, padded at the end, of tokenizer.json with "
    "special tokens; where final_period is true, a text without a final mark gets a period first. sentence_embedding: "
    "(batch, dim), not normalised to length 1."
)


class _Encoder(nn.Module):
    """A function of a network, as the module that is exported."""

    def __init__(self, network: nn.Module, encode: Callable[..., Any]) -> None:
        super().__init__()
        self.network, self.encode = network, encode

    def forward(self, *inputs: Tensor) -> Any:
        return self.encode(*inputs)


def export_onnx(network: ImageTextNetwork | FindingNetwork, folder: Path) -> None:
    """Write image_encoder.onnx, text_encoder.onnx and tokenizer.json, or classifier.onnx.

    Each is checked against torch before it is written. Inputs and outputs stand in the files' descriptions; size,
    geometry, treatment of texts and findings in their metadata. The network must be in evaluation mode, on the CPU.
    """
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(needs_extra("--onnx", error.name, "onnx")) from error
    has_vector, seen = network.image_encoder.has_global_vector, network.view.seen
    batch, token = torch.export.Dim("batch"), torch.export.Dim("token")
    images = {"images": (torch.rand(2, 3, seen, seen), {0: batch})}
    settings = {name: getattr(network, name) for name in ("image_size", "geometry", "prepared_size")}
    if isinstance(network, FindingNetwork):
        settings["findings"] = network.findings
        classifier = _Encoder(network, lambda images: (network(images),))
        program = _program(classifier, images, ["logits"], _IMAGES + _LOGITS, settings)
        return write_bytes(program, folder / CLASSIFIER_FILE)
    text = network.text_encoder
    tokens, lengths = network.tokenize(["Small left pleural effusion.", "No edema", "The lungs are clear."])
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    image = _program(
        _Encoder(network, lambda images: tuple(network.encode(images))[: 1 + has_vector]),
        images,
        ["feature_map", "global_vector"][: 1 + has_vector],
        _IMAGES + _FEATURE_MAP,
        settings | {"stride": network.stride},
    )
    sentence = _program(
        _Encoder(network, lambda tokens, mask: (network.encode_sentences(tokens, mask.sum(dim=1)),)),
        {name: (x, {0: batch, 1: token}) for name, x in (("input_ids", tokens), ("attention_mask", mask))},
        ["sentence_embedding"],
        _SENTENCES,
        {name: getattr(text, name, None) for name in ("max_tokens", "final_period")}
        | {"tokenizer": TOKENIZER_FILE},
    )
    write_text(text.tokenizer.to_str(), folder / TOKENIZER_FILE)
    write_bytes(image, folder / IMAGE_FILE)
    write_bytes(sentence, folder / TEXT_FILE)


def _program(
    encoder: nn.Module,
    inputs: Mapping[str, tuple[Tensor, Mapping[int, Any]]],
    outputs: Sequence[str],
    description: str,
    settings: Mapping[str, Any],
) -> bytes:
    """An encoder as a serialised ONNX model that gives torch's results; each input with its dynamic axes."""
    # The exporter's remarks do not concern the user.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    examples, axes = zip(*inputs.values(), strict=True)
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        program: Any = torch.onnx.export(
            encoder.eval(),
            examples,
            dynamo=True,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_shapes={"inputs": axes},
            verbose=False,
        )
    model = program.model_proto
    # The exporter notes source lines, and with them folders of this machine.
    for graph in (model.graph, *model.functions):
        for part in (graph, *graph.node, *graph.value_info):
            del part.metadata_props[:]
    model.doc_string = description
    for name, value in settings.items():
        model.metadata_props.add(key=name, value=json.dumps(value))
    content = model.SerializeToString()
    _check(content, encoder, dict(zip(inputs, examples, strict=True)), outputs)
    return content


def _check(content: bytes, encoder: nn.Module, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> None:
    """Refuse a model that differs from torch at the batch size of the export, or at 1."""
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    for size in (1, len(next(iter(inputs.values())))):
        some = {name: value[:size] for name, value in inputs.items()}
        with torch.no_grad():
            by_torch = encoder(*some.values())
        by_onnx = session.run(list(outputs), {name: value.numpy() for name, value in some.items()})
        for output, result, tensor in zip(outputs, by_onnx, by_torch, strict=True):
            expected = tensor.numpy()
            difference, scale = np.abs(result - expected).max(), max(1.0, float(np.abs(expected).max()))
            if not difference <= TOLERANCE * scale:
                raise RuntimeError(
                    f"{output}: ONNX differs from torch by {difference:.2g} at batch size {size}"
                )
