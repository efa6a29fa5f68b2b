"""Options of `ask` and `page`, declared without torch and pandas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from medclip_dcl.common.command_line import (
    CALIBRATION,
    ENSEMBLE,
    MODEL,
    PROMPTS,
    available_cores,
    device,
    imports,
    option,
    positional,
    positive,
    whole_number,
)
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import Ensemble


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Ask a trained model about radiographs (JPEG, PNG, TIFF, DICOM): heat maps of texts, or scores of findings."""

    model: str = positional(MODEL, metavar="MODEL")
    images: Sequence[str] = positional(
        "image file, or folder (its image files, also in subfolders)", (), nargs="*", metavar="IMAGE"
    )
    listed: Path | None = option("text file with the path of an image in each line", None, flag="--list")
    text: Sequence[str] | None = option("sentence to look for; repeatable", None, action="append")
    classify: bool = option("zero-shot scores of CheX5 or --prompts, or the logits of a classifier", False)
    calibrated: bool = option(
        "with --classify: probabilities, and whether they reach the threshold, by the model's calibration.json",
        False,
    )
    calibration: Path | None = option(f"with --classify, as --calibrated: {CALIBRATION}", None)
    prompts: str | None = option(f"for --classify: {PROMPTS}", None, metavar="FILE")
    ensemble: Ensemble | None = option(f"{ENSEMBLE} (scores; with --calibrated as calibrated)", None)
    output: Path = option(
        "with --text a folder, for the heat maps and scores.csv; with --classify a .csv or .parquet file",
        metavar="PATH",
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
    calibration: Path | None = option(CALIBRATION, None)
    port: int = option("of 127.0.0.1; 0 takes a free one (8501)", 8501, type=whole_number(0, 65535))
    imported: Sequence[str] = imports()
