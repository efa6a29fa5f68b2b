"""Calibrated probabilities and thresholds of findings: fitting, applying, and calibration.json.

A score is the similarity with the positive prompt minus that with the negative one, its logit gamma^2 * score; or it is
a classifier's logit, without prompts and with scale 1.
A fit holds for images like the fitted cases, most often those whose report mentions the finding, and for their
prevalence.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Shaped
from scipy.special import expit

from medclip_dcl.common.errors import MissingFileError, UserError
from medclip_dcl.common.files import parse_json, write_text
from medclip_dcl.common.findings import PLATT_PATIENTS, Ensemble, PromptSource, ensemble_used, read_prompts
from medclip_dcl.common.formats import CALIBRATION, VERSION_KEY
from medclip_dcl.metrics.summaries import calibration_error, scores_of

CALIBRATION_FILE = "calibration.json"
CARD_FILE = "README.md"
"""Model card of an exported folder."""
_THRESHOLDS = "## Probabilities and thresholds"
ISOTONIC_PATIENTS = 500
"""Likewise for an isotonic fit, which overfits some hundred cases (choice)."""
TARGETS = ("sensitivity", "specificity")

_AGAIN = "calibrate again: medclip-dcl calibrate MODEL"
_ROUNDING = 1e-9
_MAX_SCALE = 1e9
"""Of a temperature, its inverse and an offset; beyond, all images have one probability (choice)."""
_N_SIMULATED = 1000

Logits = Float[np.ndarray, " case"]
Labels = Bool[np.ndarray, " case"]


@dataclass(frozen=True)
class FindingCalibration:
    """Calibration of one finding: an entry of calibration.json.

    Attributes:
        negative: prompts, whose scores are averaged; `positive` likewise.
        n_positive: fitted cases, of so many `patients_positive`; `n_negative` likewise.
        method: "platt": p = sigmoid(logit / temperature + offset), fitted to smoothed targets (Platt 1999, 2.2),
            finite for separated cases. "isotonic": the least-squares ascending step function (Zadrozny and Elkan 2002),
            linear between its knots, within [1 / (n + 2), (n + 1) / (n + 2)] for n cases. None: no calibration.
        reason: why there is none.
        parameters: temperature and offset; or logits and probabilities, the knots.
        threshold: probability from which on an image counts as positive.
        sensitivity: of the fitted cases at the threshold; `specificity` likewise.
    """

    negative: tuple[str, ...]
    positive: tuple[str, ...]
    n_positive: int
    n_negative: int
    patients_positive: int
    patients_negative: int
    method: str | None = None
    reason: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    threshold: float | None = None
    sensitivity: float | None = None
    specificity: float | None = None

    @property
    def prompts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Negative and positive prompts."""
        return self.negative, self.positive

    def __post_init__(self) -> None:
        found, is_valid = self.parameters, self.method is None
        if self.method == "platt":
            is_valid = (
                1 / _MAX_SCALE < found["temperature"] < _MAX_SCALE and abs(found["offset"]) < _MAX_SCALE
            )
        elif self.method == "isotonic":
            knots = np.array([[-math.inf, *found["logits"], math.inf], [0, *found["probabilities"], 1]])
            is_valid = knots.shape[1] > 2 and bool((np.diff(knots) >= 0).all())
        shares = [x for x in (self.threshold, self.sensitivity, self.specificity) if x is not None]
        # A threshold just above 1 calls nothing positive.
        if not is_valid or not all(0 <= share < 1 + _ROUNDING for share in shares):
            raise UserError(f"{self.method} {str(dict(found))[:99]} or one of {shares} is out of range")

    def probabilities(self, logits: Logits) -> Float[np.ndarray, " case"]:
        """Calibrated probabilities of the network's logits; NaN without a calibration."""
        if self.method is None:
            return np.full(len(logits), np.nan)
        if self.method == "platt":
            return expit(logits / self.parameters["temperature"] + self.parameters["offset"])
        return np.interp(logits, self.parameters["logits"], self.parameters["probabilities"])


@dataclass(frozen=True)
class Calibration:
    """Content of calibration.json.

    Attributes:
        fingerprint: of the network (`ImageNetwork.fingerprint`).
        scale: factor from scores to logits: gamma^2, of a classifier 1.
        target: what the thresholds were chosen for, such as {"sensitivity": 0.95}.
        data: the prepared set, and its evaluated images and patients.
        ensemble: of several prompts a side, see `findings.Ensemble`.
    """

    fingerprint: Mapping[str, Any]
    scale: float
    target: Mapping[str, float]
    data: Mapping[str, Any]
    findings: Mapping[str, FindingCalibration]
    ensemble: Ensemble = "scores"

    @property
    def thresholds(self) -> dict[str, float]:
        """Probability from which on an image counts as positive, by finding; NaN without a calibration."""
        return {
            name: math.nan if one.threshold is None else one.threshold for name, one in self.findings.items()
        }

    def calibrated(self) -> list[str]:
        """Findings that have a calibration."""
        return [finding for finding, one in self.findings.items() if one.method is not None]

    def prompts(self, asked: PromptSource | None = None, ensemble: Ensemble | None = None) -> dict[str, Any]:
        """Prompts by finding, of all findings or of those that are asked for, which must be calibrated with them."""
        own = {finding: one.prompts for finding, one in self.findings.items()}
        pairs = own if asked is None else read_prompts(asked)
        for finding, pair in pairs.items():
            if pair != own.get(finding):
                raise UserError(
                    f"{finding} is not calibrated with the prompts {pair}, only {own.get(finding, ', '.join(own))}"
                    f" ({_AGAIN} --prompts FILE)"
                )
        if ensemble is not None and ensemble_used(pairs, ensemble) not in (None, self.ensemble):
            raise UserError(
                f"ensemble: expected {self.ensemble}, with which the calibration was fitted, found {ensemble} "
                f"({_AGAIN} --ensemble {ensemble})"
            )
        if all(self.findings[finding].method is None for finding in pairs):
            reasons = (f"{finding}: {self.findings[finding].reason}" for finding in pairs)
            raise UserError(f"none of these findings is calibrated: {'; '.join(reasons)}")
        return pairs

    def probabilities(self, scores: pd.DataFrame) -> pd.DataFrame:
        """Probabilities of score differences (image, finding); a finding without a calibration is NaN."""
        columns = {
            finding: self.findings[str(finding)].probabilities(
                self.scale * scores[finding].to_numpy("float64")
            )
            for finding in scores
        }
        return pd.DataFrame(columns, index=scores.index, columns=scores.columns)

    def of_cases(self, cases: pd.DataFrame) -> pd.DataFrame:
        """Cases of a test with the columns before and after (probabilities) and threshold."""
        cases = cases.reset_index(drop=True)
        logits = self.scale * scores_of(cases).to_numpy("float64")
        after = np.full(len(cases), np.nan)
        for finding, rows in cases.groupby("finding"):
            after[rows.index] = self.findings[str(finding)].probabilities(logits[rows.index])
        return cases.assign(
            before=expit(logits), after=after, threshold=cases["finding"].map(self.thresholds)
        )

    def write(self, file: Path) -> None:
        """Write calibration.json atomically; findings keep their order. A card beside it loses its thresholds."""
        write_text(self.to_json(), file)
        card = file.with_name(CARD_FILE)
        text = card.read_bytes().decode(errors="replace") if card.is_file() else ""
        if _THRESHOLDS in text:
            write_text(without_thresholds(text), card)

    def to_json(self) -> str:
        """Text of calibration.json."""
        content = {VERSION_KEY: CALIBRATION.version, **asdict(self)}
        return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def read(cls, file: Path) -> Calibration:
        """Read calibration.json."""
        try:
            content = parse_json(file.read_text(encoding="utf-8"))
            CALIBRATION.check(content, str(file))
            del content[VERSION_KEY]
            findings = {}
            for name, found in content.pop("findings").items():
                pair = found.pop("negative"), found.pop("positive")
                pair = read_prompts({name: pair})[name] if any(pair) else ((), ())  # a classifier's
                findings[name] = FindingCalibration(*pair, **found)
            return cls(findings=findings, **content)
        except FileNotFoundError as error:
            raise MissingFileError(f"no file {file}; give one of `calibrate --output FILE`") from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{file} is not a calibration of medclip_dcl ({error!r}); delete it and {_AGAIN}"
            ) from error


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What two fingerprints of networks differ in, by name; settings by their part."""
    flat = [
        {**one, **{f"{part} settings": x for part, x in (one.get("settings") or {}).items()}}
        for one in (there, here)
    ]
    names = [name for name in flat[1] if name != "settings"]
    return [name for name in names if name not in flat[0] or flat[0][name] != flat[1][name]]


def fit_finding(
    logits: Logits,
    labels: Labels,
    patients: Shaped[np.ndarray, " case"],
    target: Mapping[str, float],
    prompts: tuple[tuple[str, ...], tuple[str, ...]],
) -> FindingCalibration:
    """Calibration and threshold of one finding, with these negative and positive prompts, or why there is none."""
    found = FindingCalibration(
        *prompts,
        n_positive=int(labels.sum()),
        n_negative=int((~labels).sum()),
        patients_positive=len(np.unique(patients[labels])),
        patients_negative=len(np.unique(patients[~labels])),
    )
    n_patients = min(found.patients_positive, found.patients_negative)
    if n_patients < PLATT_PATIENTS:
        return replace(
            found,
            reason=f"{found.patients_positive} patients with a positive and {found.patients_negative} with a negative "
            f"case; a calibration needs {PLATT_PATIENTS} of each",
        )
    slope, offset = fit_platt(logits, labels)
    if slope <= 1 / _MAX_SCALE:
        return replace(found, reason="positive cases do not score above negative ones")
    if max(slope, abs(offset)) >= _MAX_SCALE:
        return replace(found, reason="the scores of all cases are alike")
    if n_patients >= ISOTONIC_PATIENTS:
        found = replace(found, method="isotonic", parameters=fit_isotonic(logits, labels))
    else:
        found = replace(found, method="platt", parameters={"temperature": 1 / slope, "offset": offset})
    probabilities = found.probabilities(logits)
    threshold = choose_threshold(probabilities, labels, target)
    is_above = probabilities >= threshold
    return replace(
        found,
        threshold=threshold,
        sensitivity=float(is_above[labels].mean()),
        specificity=float((~is_above)[~labels].mean()),
    )


def fit_platt(logits: Logits, labels: Labels) -> tuple[float, float]:
    """Slope (1 / temperature) and offset of ``p = sigmoid(slope * logit + offset)``, by maximum likelihood.

    Targets are (n_positive + 1) / (n_positive + 2) and 1 / (n_negative + 2) instead of 1 and 0 (Platt 1999).
    """
    from scipy.optimize import minimize

    n_positive, n_negative = labels.sum(), (~labels).sum()
    targets = np.where(labels, (n_positive + 1) / (n_positive + 2), 1 / (n_negative + 2))
    centre, spread = logits.mean(), logits.std()
    if not spread > 0:
        return 0.0, float(np.log(targets.mean() / (1 - targets.mean())))
    design = np.stack([(logits - centre) / spread, np.ones(len(logits))], axis=1)

    def loss(weights: np.ndarray) -> float:
        found = design @ weights
        return float(np.mean(np.logaddexp(0, found) - targets * found))

    def gradient(weights: np.ndarray) -> np.ndarray:
        return design.T @ (expit(design @ weights) - targets) / len(targets)

    def hessian(weights: np.ndarray) -> np.ndarray:
        p = expit(design @ weights)
        return (design.T * (p * (1 - p))) @ design / len(targets)

    found = minimize(
        loss, np.zeros(2), jac=gradient, hess=hessian, method="trust-exact", options={"gtol": 1e-9}
    )
    slope = found.x[0] / spread
    return float(slope), float(found.x[1] - slope * centre)


def fit_isotonic(logits: Logits, labels: Labels) -> dict[str, list[float]]:
    """Knots of the ascending step function with the smallest squared error: logits and probabilities."""
    from sklearn.isotonic import IsotonicRegression

    lowest = 1 / (len(labels) + 2)
    fitted = IsotonicRegression(y_min=lowest, y_max=1 - lowest).fit(logits, labels)
    return {"logits": fitted.X_thresholds_.tolist(), "probabilities": fitted.y_thresholds_.tolist()}


def without_thresholds(card: str) -> str:
    """A model card whose section of thresholds points to calibration.json, which is of a later calibration."""
    here = f"`{CALIBRATION_FILE}` is newer than this card; its maps and thresholds stand there alone."
    card = re.sub(r"(?m)^- calibration\.json: no probabilities.*\n", "", card)
    return re.sub(rf"(?ms)^{_THRESHOLDS}\r?$.*?(?=^## |\Z)", f"{_THRESHOLDS}\n\n{here}\n\n", card)


def check_target(target: Mapping[str, float]) -> None:
    """Refuse a target other than one of `TARGETS` and its share, in (0, 1]."""
    if len(target) != 1 or not all(name in TARGETS and 0 < share <= 1 for name, share in target.items()):
        raise UserError(f"target: expected a sensitivity or a specificity in (0, 1], found {dict(target)}")


def choose_threshold(
    probabilities: Float[np.ndarray, " case"], labels: Labels, target: Mapping[str, float]
) -> float:
    """The threshold that reaches a sensitivity (the highest such) or a specificity (the lowest such).

    A case is called positive at or above it. It lies half-way between two cases, so that rounding changes none of
    them. Tied cases are called alike, so that more than the target may be reached.
    """
    [(name, share)] = target.items()
    if name == "sensitivity":
        values = np.sort(probabilities[labels])[::-1]
        last = values[math.ceil(share * len(values) - _ROUNDING) - 1]
        return float(last + probabilities[probabilities < last].max(initial=0)) / 2
    values = np.sort(probabilities[~labels])
    last = values[math.ceil(share * len(values) - _ROUNDING) - 1]
    above = float(probabilities[probabilities > last].min(initial=1))
    # Above 1, and nothing is positive, if too many negative cases have the probability 1.
    return (float(last) + above) / 2 if above > last else float(np.nextafter(1, 2))


def perfect_error(probabilities: Float[np.ndarray, " case"]) -> float:
    """Mean expected calibration error where the labels are drawn from the probabilities (Broecker and Smith 2007)."""
    random, errors = np.random.default_rng(0), []
    # As many at a time as fit into 32 MB.
    size = max(1, 2**22 // max(1, len(probabilities)))
    for first in range(0, _N_SIMULATED, size):
        shape = min(size, _N_SIMULATED - first), len(probabilities)
        errors.append(calibration_error(probabilities, random.random(shape) < probabilities, np.ones(shape)))
    return float(np.concatenate(errors).mean())
