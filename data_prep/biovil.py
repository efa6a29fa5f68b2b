"""Convert BioViL's published weights into an exported model for `test` and `load`.

    python -m data_prep.biovil --image_weights FILE.pt --text_model FOLDER --output FOLDER
    python -m medclip_dcl test --config configs/mimic_cxr.yaml --run_folder runs/biovil_published --ckpt_path FOLDER

The text model is the Hugging Face folder of BiomedVLP-CXR-BERT-specialized. Both are read as data, without running
their code, and must hold exactly the model's tensors.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from data_prep.command import run_command
from medclip_dcl.errors import UserError


def export_biovil(image_weights: Path, text_model: Path, output: Path, final_period: bool = True) -> None:
    """Write config.json and model.safetensors of BioViL.

    Raises:
        UserError: a file is missing or is not BioViL's, or the output folder holds something else.
    """
    # Imported here to keep `--help` fast.
    from medclip_dcl.networks.biovil import load_biovil
    from medclip_dcl.weight_files import is_exported

    if output.exists() and not is_exported(output) and (output.is_file() or any(output.iterdir())):
        raise UserError(f"{output} exists and is not an exported model; choose another --output")
    for name, source in (("--image_weights", image_weights), ("--text_model", text_model)):
        if not source.exists():
            raise UserError(f"nothing at {source} ({name})")
    load_biovil(image_weights, text_model, final_period=final_period).save_pretrained(output)
    print(f"{output}: BioViL; evaluate it with python -m medclip_dcl test --ckpt_path {output} ...")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and convert."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.biovil",
        description="Convert BioViL's published weights into an exported model for `test --ckpt_path` and `load`.",
    )
    parser.add_argument(
        "--image_weights",
        type=Path,
        required=True,
        metavar="FILE",
        help="biovil_image_resnet50_proj_size_128.pt",
    )
    parser.add_argument(
        "--text_model", type=Path, required=True, metavar="FOLDER", help="of BiomedVLP-CXR-BERT-specialized"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="exported model")
    parser.add_argument(
        "--text_as_given",
        action="store_true",
        help="do not end prompts and phrases with a period (results.json records it)",
    )
    options = parser.parse_args(arguments)
    export_biovil(options.image_weights, options.text_model, options.output, not options.text_as_given)


if __name__ == "__main__":
    run_command(main)
