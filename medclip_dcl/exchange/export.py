"""Export a model."""

from __future__ import annotations

import sys

from medclip_dcl.exchange.encoders import export_text_encoder
from medclip_dcl.exchange.folder import export_model
from medclip_dcl.exchange.formats import export_layout
from medclip_dcl.exchange.hub import WARNING, push_to_hub
from medclip_dcl.exchange.onnx_files import export_onnx
from medclip_dcl.exchange.options import Export


def run(options: Export) -> None:
    """Write the folder of a model, and what was asked for beside it."""
    if options.format:
        for note in export_layout(options.model, options.output, options.format):
            print(f"note: {note}")
        print(f"model for {options.format}: {options.output}")
    else:
        model = export_model(options.model, options.output, options.push_to_hub, options.calibration)
        print(f"model: {options.output}")
        if options.text_encoder:
            export_text_encoder(model.image_text, options.text_encoder)
            print(f"text encoder: {options.text_encoder}")
        if options.onnx:
            export_onnx(model.network, options.output)
            print(f"ONNX files: {options.output}")
    print(f"warning: {WARNING}", file=sys.stderr)
    if options.push_to_hub:
        print(f"uploaded: {push_to_hub(options.output, options.push_to_hub, public=options.public)}")
