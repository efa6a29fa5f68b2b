"""Make an exported folder of a published image-text model, which `load` and every command take."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from medclip_dcl.exchange.options import Convert

if TYPE_CHECKING:
    from medclip_dcl.networks.image_text import ImageTextNetwork


def run(options: Convert) -> None:
    """Convert a model, and print what a user should know about it."""
    # Import here to keep --help fast.
    from medclip_dcl.common.files import new_folder, write_text
    from medclip_dcl.common.terms import SOURCE_CARD, copy_terms

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


def _converted(options: Convert) -> tuple[ImageTextNetwork, list[str]]:
    """The network of FOLDER, and what a user should know; an option that its kind does not take is refused."""
    from medclip_dcl.common.errors import MissingFileError, UserError
    from medclip_dcl.common.weight_files import read_model
    from medclip_dcl.exchange.biovil import RESNET, from_biovil
    from medclip_dcl.exchange.open_clip_weights import OPEN_CLIP_FILE, from_open_clip, from_openai
    from medclip_dcl.exchange.transformers_folder import from_transformers

    source, text, mean, std = options.source, options.text_encoder, options.mean, options.std

    def take_only(*taken: str) -> None:
        given = {name for name in ("text_encoder", "mean", "std") if getattr(options, name)}
        if others := sorted(given - {*taken}):
            raise UserError(f"--{', --'.join(others)}: no part in the conversion of {source}; leave it out")

    if not source.exists():
        raise MissingFileError(f"FOLDER: {source} does not exist; download the model's files first")
    if (source / OPEN_CLIP_FILE).is_file():
        take_only("text_encoder")
        return from_open_clip(source, text)
    if source.is_dir():
        take_only()
        return from_transformers(source)
    if text is None:
        raise UserError("--text_encoder: expected the folder of the text encoder's tokenizer, found none")
    state = read_model(source).state
    if "visual.proj" in state:
        if mean is None or std is None:
            raise UserError("--mean and --std: expected both, which no state dict has, found one or none")
        return from_openai(state, source, text, mean, std)
    if any(name.startswith(RESNET) for name in state):
        take_only("text_encoder")
        return from_biovil(state, source, text)
    raise UserError(
        f"{source}: expected a CLIP with a vision transformer (visual.proj) or BioViL's image weights, found "
        f"{', '.join(sorted(state)[:8])}; this architecture has no counterpart here"
    )
