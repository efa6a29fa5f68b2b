"""Options of `export`, `bundle` and `convert`, declared without torch and pandas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from medclip_dcl.common.command_line import CALIBRATION, MODEL, imports, option, positional, positive
from medclip_dcl.common.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Export:
    """Export a model.

    FOLDER then holds config.json (with the tokenizer) and model.safetensors, which medclip_dcl.load reads,
    calibration.json if the model has one, data.json (on which sets it was trained), and README.md, a model card made
    from the run folder. MODEL may be FOLDER itself, to add ONNX files or to upload it.

    With --format, FOLDER is instead one that transformers (CLIP, SigLIP) or open_clip (CLIP, a BERT with a ViT of timm)
    loads without medclip_dcl.
    """

    model: str = positional(MODEL, metavar="MODEL")
    output: Path = option("folder to write", metavar="FOLDER")
    calibration: Path | None = option(CALIBRATION, None)
    format: Literal["transformers", "open_clip"] | None = option(
        "write FOLDER, a new one, in this library's layout, of a CLIP or a SigLIP", None
    )
    text_encoder: Path | None = option(
        "also write the text encoder as a folder for transformers, with its projection",
        None,
        metavar="FOLDER",
    )
    onnx: bool = option("also write both encoders as ONNX files into FOLDER (extra: onnx)", False)
    push_to_hub: str | None = option(
        "upload FOLDER to the Hugging Face Hub, as a private repository", None, metavar="OWNER/NAME"
    )
    public: bool = option("with --push_to_hub: as a public repository", False)
    imported: Sequence[str] = imports()

    def __post_init__(self) -> None:
        if self.public and not self.push_to_hub:
            raise UserError("--public needs --push_to_hub")
        if self.format and (self.text_encoder or self.onnx or self.push_to_hub):
            raise UserError(
                "--format writes FOLDER alone; run the command again without it for the other files"
            )


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Write a folder that installs medclip_dcl with a model on a machine without a network (Linux, macOS).

    FOLDER gets wheels/ (the installed versions of all packages, which pip takes from its index), model/ (an exported
    folder), requirements.txt with hashes, bundle.json (system, processor, Python), SHA256SUMS and install.py. On the
    other machine `python3 FOLDER/install.py ENVIRONMENT` checks every file and installs.
    """

    model: str = positional(MODEL, metavar="MODEL")
    output: Path = option("folder to write, a new one", metavar="FOLDER")
    wheel: Path = option("wheel file of medclip_dcl, of the installed version")
    extras: str = option("extras of medclip_dcl, by commas (page)", "page", metavar="A,B")


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Make an exported folder of a published model, which load and every command take.

    FOLDER is one of
        a folder of transformers' CLIPModel or SiglipModel (MedSigLIP, XrayCLIP), with preprocessor and tokenizer
        a folder of open_clip (open_clip_config.json and weights; BiomedCLIP needs --text_encoder and the extra models)
        a state dict of OpenAI's CLIP with a vision transformer (CheXzero): needs --text_encoder, --mean and --std
        the image weights of BioViL (biovil_image_resnet50_proj_size_128.pt) or BioViL-T
            (biovil_t_image_model_proj_size_128.pt, without its prior images): needs --text_encoder
        the weights of CheXficient, or of CXR-CLIP with a ResNet-50: need --text_encoder
        torch.save of {"state": m.state_dict(), "findings": m.targets}, where m is a classifier of torchxrayvision
    Files are read as data, without running their code, and must hold exactly the model's tensors. Licence and model
    card of the source are copied beside the weights.
    """

    source: Path = positional("folder or file, see above", metavar="FOLDER")
    output: Path = option("exported folder, a new one", metavar="FOLDER")
    text_encoder: Path | None = option(
        "tokenizer, and configuration where it is a BERT", None, metavar="FOLDER"
    )
    mean: list[float] | None = option(
        "of channels in [0, 1], for a state dict of CLIP", None, nargs=3, metavar="X"
    )
    std: list[float] | None = option("likewise", None, nargs=3, metavar="X")
    image_size: int | None = positive("side of a classifier's images in pixels (224, ResNet: 512)", None)
