"""Options of the verbs that use, compare and convert models, and of `demo`, declared without torch and pandas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from medclip_dcl.common.command_line import (
    available_cores,
    device,
    imports,
    option,
    positional,
    positive,
    require_task,
    whole_number,
)
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import Ensemble

MODEL = "run folder, checkpoint, exported folder or Hugging Face repository (owner/name)"
SENSITIVITY = 0.95
"""Default of the thresholds (choice)."""
_CALIBRATION = "file of calibrate --output, in place of the model's"
_PROMPTS = "YAML file of finding: [negative, positive], or a packaged one by its name, public or chexpert14"
_ENSEMBLE = "several prompts a side: the mean of scores or of embeddings"


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Go the whole way on the digital phantom: data, language model, scores, training, test, calibration, report.

    Each step is a command that is printed before it runs. The same command continues a demo that was stopped; finished
    steps are skipped.
    """

    folder: Path = option("folder that gets data/ and runs/ (.)", Path("."), type=Path, metavar="FOLDER")


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Fit calibrated probabilities and thresholds of findings on validate patients.

    Writes calibration.json of the run or exported folder. A run keeps the scores for other thresholds, in
    predictions/validate_classification.parquet; an exported folder, which may be shared, keeps nothing of single
    patients.
    """

    model: str = positional(MODEL, metavar="MODEL")
    data: str | None = positional("prepared set (the run's)", None, nargs="?", metavar="SET")
    sensitivity: float | None = option(
        f"choose thresholds that find this share of the positive cases, in (0, 1] ({SENSITIVITY})",
        None,
        metavar="SHARE",
    )
    specificity: float | None = option(
        "choose thresholds that leave this share of the negative cases negative, in (0, 1]",
        None,
        metavar="SHARE",
    )
    prompts: str | None = option(f"{_PROMPTS} (those of the run's test, else CheX5's)", None, metavar="FILE")
    ensemble: Ensemble | None = option(f"{_ENSEMBLE} (as in the run's test, else scores)", None)
    output: Path | None = option(
        "file to write (calibration.json of the run or folder)", None, metavar="FILE"
    )
    device: str = device()
    imported: Sequence[str] = imports()

    def __post_init__(self) -> None:
        if self.sensitivity is not None and self.specificity is not None:
            raise UserError("--sensitivity and --specificity: expected one of them, found both")

    @property
    def target(self) -> dict[str, float]:
        """What thresholds are chosen by."""
        if self.specificity is not None:
            return {"specificity": self.specificity}
        return {"sensitivity": SENSITIVITY if self.sensitivity is None else self.sensitivity}


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Ask a trained model about radiographs (JPEG, PNG, TIFF, DICOM): heat maps of texts, or scores of findings."""

    model: str = positional(MODEL, metavar="MODEL")
    images: Sequence[str] = positional(
        "image file, or folder (its image files, also in subfolders)", (), nargs="*", metavar="IMAGE"
    )
    listed: Path | None = option(
        "text file with the path of an image in each line", None, flag="--list", metavar="FILE"
    )
    text: Sequence[str] | None = option("sentence to look for; repeatable", None, action="append")
    classify: bool = option("zero-shot scores of CheX5 or --prompts, or the logits of a classifier", False)
    calibrated: bool = option(
        "with --classify: probabilities, and whether they reach the threshold, by the model's calibration.json",
        False,
    )
    calibration: Path | None = option(
        f"with --classify, as --calibrated: {_CALIBRATION}", None, metavar="FILE"
    )
    prompts: str | None = option(f"for --classify: {_PROMPTS}", None, metavar="FILE")
    ensemble: Ensemble | None = option(f"{_ENSEMBLE} (scores; with --calibrated as calibrated)", None)
    output: Path = option(
        "with --text a folder, for the heat maps and scores.csv; with --classify a .csv or .parquet file"
    )
    device: str = device()
    dtype: Literal["float32", "bfloat16", "float16"] = option(
        "of the encoders' arithmetic (float32)", "float32"
    )
    batch_size: int = positive("images of --classify in a batch (16)", 16)
    workers: int = option(
        "processes that read images for --classify; 0: none of its own (one a core, at most 8)",
        min(8, available_cores()),
        type=whole_number(0),
    )
    imported: Sequence[str] = imports()

    @property
    def texts(self) -> list[str]:
        return [*(self.text or ())]

    @property
    def is_calibrated(self) -> bool:
        return self.calibrated or self.calibration is not None

    def __post_init__(self) -> None:
        if bool(self.text) == self.classify:
            raise UserError("--text and --classify: expected one of them")
        if not self.classify and (self.prompts or self.calibrated or self.calibration or self.ensemble):
            raise UserError(
                "--prompts, --ensemble, --calibrated and --calibration belong to --classify; leave them out with --text"
            )


@dataclass(frozen=True, kw_only=True)
class Page:
    """Serve a page on this machine: heat maps of sentences over an image, or the findings of a classifier.

    It needs the extra page.
    """

    model: str = positional(MODEL, metavar="MODEL")
    calibration: Path | None = option(_CALIBRATION, None, metavar="FILE")
    port: int = option("of 127.0.0.1; 0 takes a free one (8501)", 8501, type=whole_number(0, 65535))
    imported: Sequence[str] = imports()


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
    calibration: Path | None = option(_CALIBRATION, None, metavar="FILE")
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
    wheel: Path = option("wheel file of medclip_dcl, of the installed version", metavar="FILE")
    extras: str = option("extras of medclip_dcl, by commas (page)", "page", metavar="A,B")


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Make an exported folder of a published image-text model, which load and every command take.

    FOLDER is one of
        a folder of transformers' CLIPModel or SiglipModel (MedSigLIP, XrayCLIP), with preprocessor and tokenizer
        a folder of open_clip (open_clip_config.json and weights; BiomedCLIP needs --text_encoder and the extra models)
        a state dict of OpenAI's CLIP with a vision transformer (CheXzero): needs --text_encoder, --mean and --std
        the image weights of BioViL (biovil_image_resnet50_proj_size_128.pt) or BioViL-T
            (biovil_t_image_model_proj_size_128.pt, without its prior images): needs --text_encoder
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


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write RUN/report.html from the run folder alone."""

    run: Path = positional("folder of a run, e.g. runs/demo", metavar="RUN")


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare tested runs in the shape of SSD's tables 1, 3, 4 and 5, with bootstrap intervals by patient.

    Writes comparison.html, .md, .tex and .json, and prints the Markdown.
    """

    runs: Sequence[Path] = positional("folder of a tested run, or of a study", nargs="+", metavar="RUN")
    baseline: str | None = option(
        "folder or name of the row that is subtracted from the others", None, metavar="RUN"
    )
    names: str | None = option("names of the rows, by commas (the folders' names)", None, metavar="A,B")
    untrained: bool = option("add the untrained network of each run", False)
    output: Path = option("where to write (runs/comparison)", Path("runs/comparison"), metavar="FOLDER")


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Test models on prepared sets by one protocol, and compare them on one page.

    Tests that are finished are kept: the same command continues after a kill, and one with a further model or set tests
    only that. Writes benchmark.html and benchmark.csv of the models and sets of the command.
    """

    models: Sequence[Path] = positional(MODEL, nargs="+", metavar="MODEL")
    sets: Sequence[Path] = option("prepared sets", nargs="+", metavar="SET")
    output: Path = option("where tests and page go", metavar="FOLDER")
    names: str | None = option("names of the models, by commas (of their folders)", None, metavar="A,B")
    baseline: str | None = option(
        "model that is subtracted from the others (the first)", None, metavar="NAME"
    )
    prompts: str = option(f"{_PROMPTS} (public)", "public", metavar="FILE")
    ensemble: Ensemble = option(f"{_ENSEMBLE}, as in CLIP (scores)", "scores")
    device: str = device()
    imported: Sequence[str] = imports()


@dataclass(frozen=True, kw_only=True)
class Configs:
    """List the packaged configurations, experiments, prompts and batch files, or copy one to edit it.

    Other commands take these names without the folder of the kind: --config mimic_cxr, --config objective/dcl_lm,
    study digits, --prompts public. A file of such a name in the working directory is taken instead.
    """

    name: str | None = positional(
        "print this one, by its name in the list, or copy it to --output", None, nargs="?", metavar="NAME"
    )
    output: Path | None = option("copy it to this file, a new one", None, metavar="FILE")

    def __post_init__(self) -> None:
        if self.output and not self.name:
            raise UserError("--output: expected a NAME to copy; medclip-dcl configs lists them")


@dataclass(frozen=True, kw_only=True)
class Study:
    """Run the grid of a study: what is finished is kept, what was killed continues.

    Writes results.parquet, report.html, tables.md, plots/ and what is chosen into the study's folder.
    """

    file: Path = positional("experiment file, or a packaged one by its name, such as digits", metavar="FILE")
    workers: int = option("processes that share the cores (1)", 1, type=whole_number(1))
    task: int = option("train the runs task, task + tasks, ... (0)", 0, type=whole_number(0))
    tasks: int = option("commands that share the grid (SLURM array) (1)", 1, type=whole_number(1))
    report_only: bool = option("make table and report of what is finished, run nothing", False)
    device: str = device("; for runs whose trainer.accelerator is auto")
    imported: Sequence[str] = imports()

    def __post_init__(self) -> None:
        require_task(self.task, self.tasks)
