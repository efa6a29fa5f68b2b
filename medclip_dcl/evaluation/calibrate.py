"""Calibrate a model: ``medclip-dcl calibrate MODEL`` writes MODEL/calibration.json.

Of a checkpoint in a run the file is the run's; of one in no run and of a repository, --output names it. The scores are
those of ``load(MODEL).classify`` on validate images, but for resizing: an original is resized once, a prepared image
twice, with JPEG between, and the loaders decode it at half of its size where that suffices. A run keeps their logits
for other thresholds, in predictions/validate_classification.parquet; an exported folder, which may be shared, keeps
nothing of single patients.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
import torch

from medclip_dcl.common.command_line import progress_bar
from medclip_dcl.common.devices import usable_device, without_tf32
from medclip_dcl.common.errors import UserError, WorseResultError
from medclip_dcl.common.files import write_parquet
from medclip_dcl.common.find_model import find_model
from medclip_dcl.common.findings import Ensemble, PromptSource, require_labelled
from medclip_dcl.common.weight_files import read_model
from medclip_dcl.data.image_text import EvaluationTables, ImageTextDataModule
from medclip_dcl.data.labelled import LabelledDataModule, LabelledImages
from medclip_dcl.data.lineage import Lineage
from medclip_dcl.data.link import LabelledRequirements
from medclip_dcl.evaluation.finding_classification import labelled_cases, logit_cases
from medclip_dcl.evaluation.options import SENSITIVITY, Calibrate
from medclip_dcl.metrics.calibration import CALIBRATION_FILE, Calibration, check_target, fit_finding
from medclip_dcl.networks.classifier import FindingNetwork
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.runs.saved import other_preparation, read_config, read_parquet, setting, settings_of_callback
from medclip_dcl.use.model import FindingScorer, LoadedModel, network_of

SCORES_FILE = "predictions/validate_classification.parquet"
TARGET = {"sensitivity": SENSITIVITY}

_Network: TypeAlias = ImageTextNetwork | FindingNetwork
_Module: TypeAlias = ImageTextDataModule | LabelledDataModule
_Tables: TypeAlias = EvaluationTables | LabelledImages
_SCORES_OF = "scores_of"
"""Attribute of the kept scores: the model, data and prompts that they are of."""


def calibrate(
    model: str | Path,
    target: Mapping[str, float] = TARGET,
    data: str | Path | None = None,
    prompts: PromptSource | None = None,
    device: str = "cpu",
    output: Path | None = None,
    ensemble: Ensemble | None = None,
) -> Calibration:
    """Fit the calibration of a model on validate patients, and write it.

    A file stays that calibrates a finding which this fit cannot; one that is not asked for is left out, which is said.
    Set, prompts, ensemble and file that are None are those of the model's
    run; other models name no set, and their prompts are CheX5's. A classifier has no prompts, and its cases are those
    of the FindingClassification of its training. Computed in float32.
    """
    check_target(target)
    without_tf32()
    usable, found = usable_device(device), find_model(model)
    config = read_config(found.run) if found.run else None
    options = setting(config, "data.init_args") or {}
    folder = data or options.get("folder")
    if folder is None:
        raise UserError(f"SET: expected a prepared set, found none, and {model} names none; give one")
    home = None if found.is_downloaded else found.folder
    file = output or (home and home / CALIBRATION_FILE)
    if file is None or file.is_dir():
        there = f"the folder {file}" if file else f"none, and {model} has neither run nor folder here"
        raise UserError(f"--output: expected a .json file, found {there}; give --output FILE")
    earlier = Calibration.read(file) if file.is_file() else None
    network = network_of(saved := read_model(found.path)).to(usable)
    if isinstance(network, ImageTextNetwork):
        of_test = settings_of_callback(config, "ZeroShotClassification")
        prompts = prompts or (config or {}).get("prompts") or of_test.get("prompts")
        ensemble = ensemble or (config or {}).get("ensemble") or of_test.get("ensemble", "scores")
    scorer = LoadedModel(network, name=str(model)).scorer(prompts, ensemble)
    module, tables = _validate_images(network, str(folder), options)
    prepared = module.prepared
    if prompts is not None and isinstance(tables, EvaluationTables):
        require_labelled(scorer.findings, tables.labelled, "prompts")
    # On images of its training its probabilities would be too confident.
    lineage = Lineage.of(saved)
    lineage.require_untrained(prepared, tables.images["dicom_id"])
    answer = lineage.of_set(prepared)
    if answer.elsewhere or not answer.is_known:
        print(
            f"warning: {model} was trained on: {answer}; probabilities are too confident where validate images of "
            f"{prepared.folder} are among them",
            file=sys.stderr,
        )
    blank = tables.blank if isinstance(tables, EvaluationTables) else str(network.blank)
    cases = _cases(network, scorer, module, tables, blank, found.run)
    findings = {}
    for finding in scorer.findings:
        rows = cases[cases["finding"] == finding]
        logits, is_positive, patients = (rows[x].to_numpy() for x in ("logit", "label", "subject_id"))
        pair = ((), ()) if scorer.zero_shot is None else scorer.zero_shot.prompts[finding]
        findings[finding] = fit_finding(logits, is_positive == 1, patients, target, pair)
    fitted = Calibration(
        fingerprint=network.fingerprint(),
        scale=network.scale,
        target=dict(target),
        data={
            **{name: prepared.info.get(name) for name in ("source", "phantom")},
            "fingerprint": prepared.fingerprint,
            "folder": prepared.folder.resolve().name,
            "use": "validate",
            "blank": blank,
            "images": int(cases["dicom_id"].nunique()),
            "patients": int(cases["subject_id"].nunique()),
        },
        findings=findings,
        ensemble="scores" if scorer.zero_shot is None else scorer.zero_shot.ensemble,
    )
    _require_better(fitted, earlier, file, replaces_another=bool(output) or not Path(model).is_file())
    fitted.write(file)
    if output is None and found.run:
        write_parquet(cases, found.run / SCORES_FILE)
    print(f"written: {file}")
    return fitted


def _validate_images(network: _Network, folder: str, options: Mapping[str, Any]) -> tuple[_Module, _Tables]:
    """Validate images of a set with their labels, of other patients than the rest, in the network's geometry."""
    images: dict[str, Any] = {"image_size": network.image_size, "predict_use": "validate"}
    images |= {"batch_size": options.get("batch_size", 64), "num_workers": options.get("num_workers", 0)}
    blank_cases = options.get("blank_cases", "ignore")
    module: _Module = ImageTextDataModule(folder, blank_cases=blank_cases, **images)
    if isinstance(network, FindingNetwork):
        module = LabelledDataModule(folder, **images)
        module.connect(LabelledRequirements(network.findings, lambda images: {}))
    prepared = module.prepared
    if prepared.changes:
        print(f"warning: {prepared.changes}", file=sys.stderr)
    prepared.require_separate_patients()
    patients = prepared.table("images").groupby("use")["subject_id"].unique()
    of_test = {*patients.get("test", ()), *patients.get("grounding", ())}
    if both := sorted({*patients.get("validate", ())} & of_test):
        raise UserError(
            f"{folder}: {len(both)} patients are both validate and test patients (first: {both[0]}); prepare the set "
            "with splits by patient"
        )
    tables = module.evaluation("validate")
    if tables.view.geometry != network.geometry:
        raise UserError(
            f"{folder}: expected images of the model's geometry {network.geometry}, found {tables.view.geometry}; "
            f"prepare the set with --geometry {network.geometry}"
        )
    shown = {"image_size": network.image_size, "prepared_size": prepared.fitting[1]}
    if preparation := other_preparation(shown, {"prepared_size": network.prepared_size}):
        print(f"warning: {folder}: {preparation}", file=sys.stderr)
    return module, tables


def _cases(
    network: _Network, scorer: FindingScorer, module: _Module, tables: _Tables, blank: str, run: Path | None
) -> pd.DataFrame:
    """Labelled cases with their logits: those that the run keeps if they are the same, else computed."""
    scores_of: dict[str, Any] = {
        "network": network.fingerprint(),
        "data": module.prepared.fingerprint,
        "blank": blank,
    }
    if isinstance(tables, LabelledImages):
        labels = labelled_cases(tables, blank)
    else:
        labels = tables.cases
        scores_of |= scorer.zero_shot.identity() if scorer.zero_shot else {}
    if labels[labels["finding"].isin(scorer.findings)].empty:
        raise UserError(
            f"{module.prepared.folder}: no validate image has a label of {', '.join(scorer.findings)}"
        )
    file = run and run / SCORES_FILE
    cases = read_parquet(file) if file and file.is_file() else None
    if cases is not None and cases.attrs.get(_SCORES_OF) == scores_of:
        return cases
    values: dict[str, list[float]] = {}
    for batch in progress_bar(iterable=module.predict_dataloader(), desc="validate images", unit=" batch"):
        with torch.inference_mode():
            encoded = network.encode(*network.inputs_of(batch))
        logits = network.scale * scorer.compute(encoded).astype("float64")
        values |= zip(batch["dicom_id"], logits.tolist(), strict=True)
    cases = logit_cases(labels, scorer.findings, values, tables)
    cases.attrs[_SCORES_OF] = scores_of
    return cases


def _require_better(
    fitted: Calibration, earlier: Calibration | None, file: Path, replaces_another: bool
) -> None:
    """Refuse to write a calibration of no finding, or over one of more findings or of another checkpoint."""
    folder, findings = fitted.data["folder"], fitted.findings
    is_same = earlier is not None and earlier.fingerprint == fitted.fingerprint
    if earlier and not is_same and not replaces_another:
        raise WorseResultError(
            f"{file} is kept: it is of another checkpoint; give --output FILE, or delete this one"
        )
    calibrated = earlier.calibrated() if earlier and is_same else []
    lost = [name for name in calibrated if name in findings and findings[name].method is None]
    if lost or not fitted.calibrated():
        reasons = "; ".join(f"{name}: {one.reason}" for name, one in findings.items() if one.method is None)
        if not lost:
            raise WorseResultError(
                f"{file} is not written: {folder} calibrates no finding ({reasons}); give a set with more "
                "validate patients"
            )
        raise WorseResultError(
            f"{file} is kept: it calibrates {', '.join(lost)}, which {folder} does not ({reasons}); give a set with "
            "more validate patients, write to another file by --output FILE, or delete this one"
        )
    if others := [name for name in calibrated if name not in findings]:
        print(f"no longer calibrated: {', '.join(others)}, which the prompts do not name", file=sys.stderr)


def summary(found: Calibration) -> str:
    """A line for each finding: its map and threshold, with sensitivity and specificity of the validate cases."""
    [(name, share)] = found.target.items()
    lines = [
        f"thresholds for a {name} of {share:g}, numbers on the {found.data['patients']} validate patients "
        "themselves, as everywhere optimistic; `medclip-dcl report RUN` shows them on test patients"
    ]
    for finding, one in found.findings.items():
        if one.method is None:
            lines.append(f"{finding}: not calibrated: {one.reason}")
            continue
        fitted = "isotonic"
        if one.method == "platt":
            fitted = "temperature {temperature:.3g}, offset {offset:.3g}".format(**one.parameters)
        lines.append(
            f"{finding}: {one.n_positive} positive, {one.n_negative} negative cases; {fitted}; threshold "
            f"{one.threshold:.3f}: sensitivity {one.sensitivity:.3f}, specificity {one.specificity:.3f}"
        )
    return "\n".join(lines)


def run(options: Calibrate) -> None:
    """Calibrate a model, and print a line for each finding."""
    found = calibrate(
        *(options.model, options.target, options.data, options.prompts, options.device, options.output),
        options.ensemble,
    )
    print(summary(found))
