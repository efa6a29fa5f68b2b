"""Make an exported folder of a published model, which `load` and every command take."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open

from medclip_dcl.common.errors import MissingFileError, UserError
from medclip_dcl.common.files import new_folder, parse_json, write_text
from medclip_dcl.common.terms import SOURCE_CARD, copy_terms
from medclip_dcl.common.weight_files import as_state_dict, read_state_dict, read_torch_file
from medclip_dcl.exchange.biovil import RESNET, from_biovil
from medclip_dcl.exchange.chexficient import PROJECTION, from_chexficient
from medclip_dcl.exchange.open_clip_weights import OPEN_CLIP_FILE, from_open_clip, from_openai
from medclip_dcl.exchange.options import Convert
from medclip_dcl.exchange.torchxrayvision import HOW_TO_SAVE, from_torchxrayvision
from medclip_dcl.exchange.transformers_folder import IMAGES_ALONE, from_transformers
from medclip_dcl.networks.described import ImageNetwork


def run(options: Convert) -> None:
    """Convert a model, and print what a user should know about it."""
    source, output = options.source, options.output
    with new_folder(output, "--output") as temporary:
        network, notes = _converted(options)
        network.save_pretrained(temporary)
        folder = source if source.is_dir() else source.parent
        terms = copy_terms(folder, temporary)
        # Of a folder that this program wrote, the card of its own source.
        if (folder / "README.md").is_file() and SOURCE_CARD not in terms:
            shutil.copyfile(folder / "README.md", temporary / SOURCE_CARD)
            terms.append(SOURCE_CARD)
        if terms and not source.is_dir():
            notes = [*notes, f"{', '.join(terms)}: found beside {source.name}; see that they are its own"]
        card = plain_card("Converted model", f"Converted from {source.name} by medclip_dcl.", terms, notes)
        write_text(card, temporary / "README.md")
    print(*notes, f"next: medclip-dcl benchmark {output} --sets SET ...", sep="\n")
    print(f"prepare each SET with --geometry {network.geometry}, which is that of this model")


def plain_card(title: str, origin: str, terms: list[str], notes: list[str]) -> str:
    """README.md of a folder of somebody else's weights."""
    named = ", ".join(terms) or "none was found beside the source: look where you downloaded it"
    return (
        f"# {title}\n\n{origin} Research only, not for clinical use.\n\n"
        f"- Terms and model card of the source, which hold for this copy: {named}\n"
        + "".join(f"- {note}\n" for note in notes)
    )


def _converted(options: Convert) -> tuple[ImageNetwork, list[str]]:
    """The network of FOLDER, and what a user should know; an option that its kind does not take is refused."""
    source, mean, std = options.source, options.mean, options.std

    def take_only(*taken: str) -> None:
        given = {name for name in ("text_encoder", "mean", "std", "image_size") if getattr(options, name)}
        if others := sorted(given - {*taken}):
            raise UserError(f"--{', --'.join(others)}: no part in the conversion of {source}; leave it out")

    def text_folder() -> Path:
        if options.text_encoder is None:
            raise UserError("--text_encoder: expected the folder of the text encoder's tokenizer, found none")
        return options.text_encoder

    if not source.exists():
        raise MissingFileError(f"FOLDER: {source} does not exist; download the model's files first")
    if (source / OPEN_CLIP_FILE).is_file():
        take_only("text_encoder")
        return from_open_clip(source, options.text_encoder)
    if source.is_dir():
        take_only()
        return from_transformers(source)
    try:
        state, findings = _state_and_findings(source)
    except UserError as error:
        raise UserError(_without_counterpart(source) or str(error)) from error
    if findings is not None or {"fc.weight", "model.fc.weight", "classifier.weight"} & state.keys():
        take_only("image_size")
        return from_torchxrayvision(state, findings, source, options.image_size)
    if "visual.proj" in state:
        take_only("text_encoder", "mean", "std")
        if mean is None or std is None:
            raise UserError("--mean and --std: expected both, which no state dict has, found one or none")
        return from_openai(state, source, text_folder(), mean, std)
    take_only("text_encoder")
    if any(name.startswith(RESNET) for name in state):
        return from_biovil(state, source, text_folder())
    if f"{PROJECTION}weight" in state:
        return from_chexficient(state, source, text_folder())
    raise UserError(
        _without_counterpart(source)
        or f"{source}: expected a CLIP with a vision transformer (visual.proj), BioViL's image weights, CheXficient or "
        f"a classifier of torchxrayvision, found {', '.join(sorted(state)[:8])}; this architecture has no counterpart "
        f"here; {IMAGES_ALONE}"
    )


def _state_and_findings(file: Path) -> tuple[dict[str, Any], Any]:
    """Tensors of a file, alone or beside others of a training, and the names of findings beside them, or None."""
    if file.suffix == ".safetensors":
        state, metadata = read_state_dict(file), safe_open(file, framework="pt").metadata() or {}
        return state, parse_json(metadata.get("findings", "null"))
    content = read_torch_file(file)
    entries = content if isinstance(content, dict) else {}
    wrapped = [
        entries[name] for name in ("state", "model", "state_dict") if isinstance(entries.get(name), dict)
    ]
    return as_state_dict([*wrapped, content][0], file), entries.get("findings")


def _without_counterpart(file: Path) -> str:
    """A line about a known model that is not converted from this file; "" for any other file."""
    known = {
        b"torchxrayvision": f"it is a pickled module, and files that hold Python objects are not opened; {HOW_TO_SAVE}",
        b"CARZero": "CARZero scores image and text together by a decoder, and has no vectors to compare; give another",
    }
    content = file.read_bytes()
    return next((f"{file}: {line}" for name, line in known.items() if name in content), "")
