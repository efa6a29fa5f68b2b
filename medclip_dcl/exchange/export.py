"""Export a model: ``medclip-dcl export MODEL FOLDER``.

FOLDER then holds config.json (with the tokenizer) and model.safetensors, which `medclip_dcl.load` reads,
calibration.json if the model has one, data.json (on which sets it was trained), and README.md, a model card made from
the run folder. MODEL may be FOLDER itself, to add ONNX files or to upload it.

With --format, FOLDER is instead one that transformers (CLIP, SigLIP) or open_clip (CLIP, a BERT with a ViT of timm)
loads without medclip_dcl.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from medclip_dcl.common.command_line import add_import_option, one_line_errors


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the export; a mistake of the user is one line and status 2."""
    parser = argparse.ArgumentParser(
        prog="medclip-dcl export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="run folder, checkpoint, exported folder or Hugging Face repository")
    add("folder", type=Path, metavar="FOLDER", help="folder to write")
    words = "file of calibrate --output, in place of the model's"
    add("--calibration", type=Path, metavar="FILE", help=words)
    words = "write FOLDER, a new one, in this library's layout, of a CLIP or a SigLIP"
    add("--format", choices=("transformers", "open_clip"), help=words)
    words = "also write the text encoder as a folder for transformers, with its projection"
    add("--text_encoder", type=Path, metavar="FOLDER", help=words)
    words = "also write the image encoder as a torchvision ResNet state dict (.safetensors)"
    add("--image_encoder", type=Path, metavar="FILE", help=words)
    words = "also write both encoders as ONNX files into FOLDER (extra: onnx)"
    add("--onnx", action="store_true", help=words)
    words = "upload FOLDER to the Hugging Face Hub, as a private repository"
    add("--push_to_hub", metavar="OWNER/NAME", help=words)
    add("--public", action="store_true", help="with --push_to_hub: as a public repository")
    add_import_option(parser)
    options = parser.parse_args(arguments)
    if options.public and not options.push_to_hub:
        parser.error("--public needs --push_to_hub")
    others = (options.text_encoder, options.image_encoder, options.onnx, options.push_to_hub)
    if options.format and any(others):
        parser.error("--format writes FOLDER alone; run the command again without it for the other files")
    with one_line_errors("medclip_dcl.exchange.export: error"):
        _export(options)


def _export(options: argparse.Namespace) -> None:
    # Here, so that --help is quick.
    from medclip_dcl.exchange.encoders import export_image_encoder, export_text_encoder
    from medclip_dcl.exchange.folder import export_model
    from medclip_dcl.exchange.formats import export_layout
    from medclip_dcl.exchange.hub import WARNING, push_to_hub
    from medclip_dcl.exchange.onnx_files import export_onnx

    if options.format:
        for note in export_layout(options.model, options.folder, options.format):
            print(f"note: {note}")
        print(f"model for {options.format}: {options.folder}")
    else:
        model = export_model(options.model, options.folder, options.push_to_hub, options.calibration)
        print(f"model: {options.folder}")
        if options.text_encoder:
            export_text_encoder(model.image_text, options.text_encoder)
            print(f"text encoder: {options.text_encoder}")
        if options.image_encoder:
            export_image_encoder(model.network, options.image_encoder)
            print(f"image encoder: {options.image_encoder}")
        if options.onnx:
            export_onnx(model.network, options.folder)
            print(f"ONNX files: {options.folder}")
    print(f"medclip_dcl.exchange.export: warning: {WARNING}", file=sys.stderr)
    if options.push_to_hub:
        print(f"uploaded: {push_to_hub(options.folder, options.push_to_hub, public=options.public)}")


if __name__ == "__main__":
    main()
