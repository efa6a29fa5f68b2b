"""Make an exported folder of a published image-text model, which `load` and every command take.

    python -m medclip_dcl.convert SOURCE --output FOLDER

SOURCE is one of
    a folder of transformers' CLIPModel or SiglipModel (MedSigLIP, XrayCLIP), with preprocessor and tokenizer
    a folder of open_clip (open_clip_config.json and weights; BiomedCLIP needs --text_encoder and the extra timm)
    a state dict of OpenAI's CLIP with a vision transformer (CheXzero): needs --text_encoder, --mean and --std
    the image weights of BioViL (biovil_image_resnet50_proj_size_128.pt) or BioViL-T
        (biovil_t_image_model_proj_size_128.pt, without its prior images): needs --text_encoder
Files are read as data, without running their code, and must hold exactly the model's tensors. Licence and model card of
the source are copied beside the weights.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from medclip_dcl.common.command_line import run_command

_STALE = ("data.json", "*.onnx", "tokenizer.json")
"""Files of an earlier export that would be of other weights; its calibration is checked when it is read."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, see `--help`."""
    options = _parser().parse_args(arguments)
    # Here, so that --help is quick.
    from medclip_dcl.common.errors import MissingFileError, UserError
    from medclip_dcl.common.files import write_text
    from medclip_dcl.common.terms import SOURCE_CARD, TERMS, copy_terms
    from medclip_dcl.common.weight_files import CONFIG_FILE, WEIGHTS_FILE, is_exported
    from medclip_dcl.convert import open_clip_weights
    from medclip_dcl.convert.transformers_folder import Converted, from_transformers
    from medclip_dcl.networks.biovil import biovil_differences, is_biovil, load_biovil

    source, output, text = options.source, options.output, options.text_encoder
    if not source.exists():
        raise MissingFileError(f"SOURCE {source}: no file and no folder; download the model's files first")
    if output.is_file() or (output.is_dir() and any(output.iterdir()) and not is_exported(output)):
        raise UserError(f"--output {output} exists and is not an exported model; choose another folder")

    def refuse_others(*used: str) -> None:
        names = {name for name in ("text_encoder", "mean", "std", "text_as_given") if getattr(options, name)}
        if others := sorted(names - {*used}):
            raise UserError(f"--{', --'.join(others)}: no part in the conversion of {source}; leave it out")

    with tempfile.TemporaryDirectory() as work:
        if source.is_dir() and (source / open_clip_weights.OPEN_CLIP_FILE).is_file():
            refuse_others("text_encoder")
            found = open_clip_weights.from_open_clip(source, text, Path(work))
        elif source.is_dir():
            refuse_others()
            found = from_transformers(source)
        elif text is None:
            raise UserError("--text_encoder: expected the folder of the text encoder's tokenizer, found none")
        elif is_biovil(source):
            refuse_others("text_encoder", "text_as_given")
            network = load_biovil(source, text, final_period=not options.text_as_given)
            found = Converted(network, biovil_differences(source))
        else:
            refuse_others("text_encoder", "mean", "std")
            if options.mean is None or options.std is None:
                own = map(_numbers, (open_clip_weights.OPENAI_MEAN, open_clip_weights.OPENAI_STD))
                raise UserError(
                    "--mean and --std: expected three numbers each, of images in [0, 1]: a state dict has none "
                    f"(OpenAI's: {' and '.join(own)})"
                )
            found = open_clip_weights.from_openai(source, text, options.mean, options.std, Path(work))
    found.network.save_pretrained(output)
    folder = source if source.is_dir() else source.parent
    for earlier in (file for pattern in (*_STALE, *TERMS) for file in output.glob(pattern)):
        earlier.unlink()
    copied = copy_terms(folder, output)
    # Of a folder that this program wrote, the card of its own source.
    if (folder / "README.md").is_file() and SOURCE_CARD not in copied:
        shutil.copyfile(folder / "README.md", output / SOURCE_CARD)
        copied.append(SOURCE_CARD)
    write_text(_card(source, found.differences, found.facts, copied), output / "README.md")
    for line in found.differences:
        print(f"difference: {line}")
    for name, value in found.facts.items():
        print(f"{name}: {value}")
    print(
        f"{output}: {CONFIG_FILE}, {WEIGHTS_FILE}; next: python -m medclip_dcl.benchmark {output} --sets SET ..."
    )


def _card(source: Path, differences: Sequence[str], facts: dict[str, str], terms: Sequence[str]) -> str:
    lines = [
        "# Converted model",
        "",
        f"Converted from {source.name} by medclip_dcl. Research only, not for clinical use.",
        "",
    ]
    named = ", ".join(terms) or "none was found beside the source: look where you downloaded it"
    lines += [f"- Terms and model card of the source, which hold for this copy: {named}"]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += [f"- Differs from the source: {line}" for line in differences]
    return "\n".join(lines) + "\n"


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m medclip_dcl.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="folder or file, see above")
    add("--output", type=Path, required=True, metavar="FOLDER", help="exported folder")
    add("--text_encoder", type=Path, metavar="FOLDER", help="tokenizer, and configuration where it is a BERT")
    add(
        "--mean",
        type=float,
        nargs=3,
        metavar="X",
        help="of the channels of images in [0, 1], for a state dict",
    )
    add("--std", type=float, nargs=3, metavar="X", help="of the channels, likewise")
    add("--text_as_given", action="store_true", help="BioViL: do not end prompts and phrases with a period")
    return parser


if __name__ == "__main__":
    run_command(main)
