"""Convert BioViL's published weights into an exported model for `test` and `load`.

    python -m data_prep.biovil --image_weights FILE.pt --text_model FOLDER --output FOLDER
    python -m medclip_dcl test --config configs/mimic_cxr.yaml --run_folder runs/biovil_published --ckpt_path FOLDER

The text model is the Hugging Face folder of BiomedVLP-CXR-BERT-specialized. Both are read as data, without running
their code, and must hold exactly the model's tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from medclip_dcl.common.command_line import option, parse_options, run_command
from medclip_dcl.common.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of the command."""

    image_weights: Path = option("biovil_image_resnet50_proj_size_128.pt", type=Path, metavar="FILE")
    text_model: Path = option("of BiomedVLP-CXR-BERT-specialized", type=Path, metavar="FOLDER")
    output: Path = option("exported model", type=Path, metavar="FOLDER")
    text_as_given: bool = option(
        "do not end prompts and phrases with a period (results.json records it)", False
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, see `--help`."""
    settings = parse_options(Settings, "data_prep.biovil", __doc__, arguments)
    # Imported here to keep `--help` fast.
    from medclip_dcl.common.weight_files import CONFIG_FILE, WEIGHTS_FILE, is_exported
    from medclip_dcl.networks.biovil import load_biovil

    output, own = settings.output, {CONFIG_FILE, WEIGHTS_FILE}
    # An export of a run has a card, too, which would then be beside BioViL's weights.
    others = {file.name for file in output.glob("*")} - (own if is_exported(output) else set())
    if output.is_file() or others:
        raise UserError(f"{output} exists and is not an exported model of BioViL; choose another --output")
    final_period = not settings.text_as_given
    load_biovil(settings.image_weights, settings.text_model, final_period=final_period).save_pretrained(
        output
    )
    print(f"{output}: BioViL; evaluate it with python -m medclip_dcl test --ckpt_path {output} ...")


if __name__ == "__main__":
    run_command(main)
