"""Calibrate a model: ``medclip-dcl calibrate MODEL`` writes MODEL/calibration.json.

Of a checkpoint in a run the file is the run's; of one in no run and of a repository, --output names it. The scores are
those of ``load(MODEL).classify`` on validate images (they differ by up to 0.015 where the loaders decode a JPEG at half
its size or less). A run keeps their logits for other thresholds, in predictions/validate_classification.parquet; an
exported folder, which may be shared, keeps nothing of single patients.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from medclip_dcl.common.command_line import progress_bar
from medclip_dcl.common.devices import usable_device, without_tf32
from medclip_dcl.common.errors import UserError, WorseResultError
from medclip_dcl.common.files import write_parquet
from medclip_dcl.common.find_model import find_model
from medclip_dcl.common.findings import Ensemble, PromptSource, require_labelled
from medclip_dcl.common.weight_files import read_model
from medclip_dcl.data.image_text import EvaluationTables, ImageTextDataModule
from medclip_dcl.data.images import ImagesDataModule
from medclip_dcl.data.labelled import LabelledDataModule, LabelledImages
from medclip_dcl.data.lineage import Lineage
from medclip_dcl.data.link import LabelledRequirements
from medclip_dcl.evaluation.finding_classification import labelled_cases, logit_cases
from medclip_dcl.inference.model import FindingScorer, LoadedModel, network_of
from medclip_dcl.metrics.calibration import (
    CALIBRATION_FILE,
    Calibration,
    check_target,
    fit_finding,
)
from medclip_dcl.networks.classifier import FindingNetwork
from medclip_dcl.networks.described import ImageNetwork
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.options import SENSITIVITY, Calibrate
from medclip_dcl.runs.saved import read_config, read_parquet, setting, settings_of_callback

SCORES_FILE = "predictions/validate_classification.parquet"
TARGET = {"sensitivity": SENSITIVITY}

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

    A file that calibrates more findings stays. Set, prompts, ensemble and file that are None are those of the model's
    run; other models name no set, and their prompts are CheX5's. A classifier has no prompts, and its cases are those
    of its run's FindingClassification. Computed in float32.
    """
    check_target(target)
    without_tf32()
    usable = usable_device(device)
    found = find_model(model)
    config = read_config(found.run) if found.run else None
    options = setting(config, "data.init_args") or {}
    folder = data or options.get("folder")
    if folder is None:
        raise UserError(f"SET: expected a prepared set, found none, and {model} names none; give one")
    home = None if found.is_downloaded else found.folder
    if (file := output or (home and home / CALIBRATION_FILE)) is None:
        raise UserError(
            f"--output: expected a file, as {model} has neither run nor folder here; give --output FILE"
        )
    if file.is_dir():
        raise UserError(f"--output: expected a file, found the folder {file}; give a .json file")
    earlier = Calibration.read(file) if file.is_file() else None
    network = network_of(saved := read_model(found.path)).to(usable)
    images: dict[str, Any] = {"image_size": network.image_size, "predict_use": "validate"}
    images |= {"batch_size": options.get("batch_size", 64), "num_workers": options.get("num_workers", 0)}
    module: ImageTextDataModule | LabelledDataModule
    if isinstance(network, FindingNetwork):
        of_test = settings_of_callback(config, "FindingClassification")
        module = LabelledDataModule(str(folder), **images)
        module.connect(LabelledRequirements(network.findings, lambda images: {}))
    else:
        of_test = settings_of_callback(config, "ZeroShotClassification")
        prompts = prompts or (config or {}).get("prompts") or of_test.get("prompts")
        ensemble = ensemble or (config or {}).get("ensemble") or of_test.get("ensemble", "scores")
        module = ImageTextDataModule(str(folder), **images)
    scorer = LoadedModel(network, name=str(model)).scorer(prompts, ensemble)
    tables = _checked_tables(module, network)
    if isinstance(tables, LabelledImages):
        labels = labelled_cases(tables, of_test.get("blank", "ignore"))
    else:
        labels = tables.cases
        if prompts is not None:
            require_labelled(scorer.findings, tables.labelled, "prompts")
    # On them its probabilities would be too confident.
    lineage = Lineage.of(saved)
    lineage.require_untrained(module.prepared, tables.images["dicom_id"])
    answer = lineage.of_set(module.prepared)
    if answer.elsewhere or not answer.is_known:
        print(
            f"warning: {model} was trained on: {answer}; probabilities are too confident where validate images of "
            f"{module.prepared.folder} are among them",
            file=sys.stderr,
        )
    scores_of: dict[str, Any] = {"network": network.fingerprint(), "data": module.prepared.fingerprint}
    scores_of |= {"blank": of_test.get("blank")} if scorer.zero_shot is None else scorer.zero_shot.identity()
    kept = found.run and found.run / SCORES_FILE
    cases = read_parquet(kept) if kept and kept.is_file() else None
    if cases is None or cases.attrs.get(_SCORES_OF) != scores_of:
        cases = logit_cases(labels, scorer.findings, _logits(network, scorer, module), tables)
        cases.attrs[_SCORES_OF] = scores_of
    if cases.empty:
        raise UserError(
            f"{module.prepared.folder}: no validate image has a label of {', '.join(scorer.findings)}"
        )
    findings = {}
    for finding in scorer.findings:
        rows = cases[cases["finding"] == finding]
        logits, is_positive, patients = (rows[x].to_numpy() for x in ("logit", "label", "subject_id"))
        pair = ((), ()) if scorer.zero_shot is None else scorer.zero_shot.prompts[finding]
        findings[finding] = fit_finding(logits, is_positive == 1, patients, target, pair)
    info = module.prepared.info
    fitted = Calibration(
        fingerprint=network.fingerprint(),
        scale=network.scale,
        target=dict(target),
        data={
            **{name: info.get(name) for name in ("source", "phantom")},
            "fingerprint": module.prepared.fingerprint,
            "folder": module.prepared.folder.resolve().name,
            "use": "validate",
            "images": int(cases["dicom_id"].nunique()),
            "patients": int(cases["subject_id"].nunique()),
        },
        findings=findings,
        ensemble="scores" if scorer.zero_shot is None else scorer.zero_shot.ensemble,
    )
    calibrated = earlier.calibrated() if earlier and earlier.fingerprint == fitted.fingerprint else []
    if lost := [name for name in calibrated if name in findings and findings[name].method is None]:
        raise WorseResultError(
            f"{file} is kept: it calibrates {', '.join(lost)}, which {module.prepared.folder} does not "
            f"({findings[lost[0]].reason}); write to another file by --output FILE, or delete this one"
        )
    if earlier and earlier.fingerprint != fitted.fingerprint and not output and Path(model).is_file():
        raise WorseResultError(
            f"{file} is kept: it is of another checkpoint; give --output FILE, or delete this one"
        )
    if all(one.method is None for one in findings.values()):
        reasons = "; ".join(f"{name}: {one.reason}" for name, one in findings.items())
        raise WorseResultError(
            f"{file} is not written: {module.prepared.folder} calibrates no finding ({reasons}); give a set with more "
            "validate patients"
        )
    fitted.write(file)
    if output is None and found.run:
        write_parquet(cases, found.run / SCORES_FILE)
    print(f"written: {file}")
    return fitted


def _checked_tables(
    module: ImageTextDataModule | LabelledDataModule, network: ImageNetwork
) -> EvaluationTables | LabelledImages:
    """Tables of the validate images, which must be of other patients than the rest and look as the network expects."""
    prepared = module.prepared
    if prepared.changes:
        print(f"warning: {prepared.changes}", file=sys.stderr)
    prepared.require_separate_patients()
    images = prepared.table("images")
    of_test = images.loc[images["use"].isin(["test", "grounding"]), "subject_id"]
    both = sorted(set(images.loc[images["use"] == "validate", "subject_id"]) & set(of_test))
    if both:
        raise UserError(
            f"{prepared.folder}: {len(both)} patients are both validate and test patients (first: {both[0]}); prepare "
            "the set with splits by patient"
        )
    tables = module.evaluation("validate")
    if tables.view.geometry != network.geometry:
        raise UserError(
            f"{prepared.folder}: expected images of the model's geometry {network.geometry}, found "
            f"{tables.view.geometry}; prepare the set with --geometry {network.geometry}"
        )
    return tables


def _logits(
    network: ImageTextNetwork | FindingNetwork, scorer: FindingScorer, module: ImagesDataModule
) -> dict[str, list[float]]:
    """Logits of the validate images by finding."""
    values: dict[str, list[float]] = {}
    for batch in progress_bar(iterable=module.predict_dataloader(), desc="validate images", unit=" batch"):
        with torch.inference_mode():
            encoded = network.encode(batch["images"].to(network.mean.device))
        logits = network.scale * scorer.score(encoded).astype("float64")
        values |= zip(batch["dicom_id"], logits.tolist(), strict=True)
    return values


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
