"""Options of `calibrate`, declared without torch and pandas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from medclip_dcl.common.command_line import ENSEMBLE, MODEL, PROMPTS, device, imports, option, positional
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import Ensemble

SENSITIVITY = 0.95
"""Default of the thresholds (choice)."""


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
    prompts: str | None = option(
        f"{PROMPTS} (those of the run's config.yaml, else CheX5's)", None, metavar="FILE"
    )
    ensemble: Ensemble | None = option(f"{ENSEMBLE} (as in the run's config.yaml, else scores)", None)
    output: Path | None = option("file to write (calibration.json of the run or folder)", None)
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
