"""Calibrate a model: ``medclip-dcl calibrate MODEL`` writes MODEL/calibration.json.

Of a checkpoint in a run the file is the run's; of one in no run and of a repository, --output names it. The scores are
those of ``load(MODEL).classify`` on validate images (they differ by up to 0.015 where the loaders decode a JPEG at half
its size or less). A run keeps them for other thresholds, in predictions/validate_classification.parquet; an exported
folder, which may be shared, keeps nothing of single patients.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import torch

from medclip_dcl.common.command_line import add_import_option, one_line_errors, progress_bar
from medclip_dcl.common.devices import usable_device, without_tf32
from medclip_dcl.common.errors import UserError, WorseResultError
from medclip_dcl.common.files import write_parquet
from medclip_dcl.common.find_model import find_model
from medclip_dcl.common.findings import Ensemble, PromptSource, ensemble_used, require_labelled
from medclip_dcl.common.weight_files import CLASSIFIER, read_model
from medclip_dcl.data.image_text import EvaluationTables, ImageTextDataModule
from medclip_dcl.data.lineage import Lineage
from medclip_dcl.evaluation.classification import scored_cases
from medclip_dcl.metrics.calibration import (
    CALIBRATION_FILE,
    TARGETS,
    Calibration,
    check_target,
    fit_finding,
)
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.zero_shot import ZeroShot
from medclip_dcl.runs.saved import read_config, read_parquet, setting, settings_of_callback

SCORES_FILE = "predictions/validate_classification.parquet"
TARGET = {"sensitivity": 0.95}
"""Default of the thresholds (choice)."""

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
    run; other models name no set, and their prompts are CheX5's. Computed in float32.
    """
    check_target(target)
    without_tf32()
    usable = usable_device(device)
    found = find_model(model)
    config = read_config(found.run) if found.run else None
    options = setting(config, "data.init_args") or {}
    folder = data or options.get("folder")
    if folder is None:
        raise UserError(
            f"--data: expected a prepared set, found none, and {model} names none; give --data SET"
        )
    home = None if found.is_downloaded else found.folder
    if (file := output or (home and home / CALIBRATION_FILE)) is None:
        raise UserError(
            f"--output: expected a file, as {model} has neither run nor folder here; give --output FILE"
        )
    if file.is_dir():
        raise UserError(f"--output: expected a file, found the folder {file}; give a .json file")
    earlier = Calibration.read(file) if file.is_file() else None
    saved = read_model(found.path)
    if saved.kind == CLASSIFIER:
        raise UserError(
            f"{model} holds a classifier: zero-shot scores are calibrated, logits of a classifier are not"
        )
    network = ImageTextNetwork.from_pretrained(found.path).to(usable)
    of_test = settings_of_callback(config, "ZeroShotClassification")
    prompts = prompts or (config or {}).get("prompts") or of_test.get("prompts")
    ensemble = ensemble or (config or {}).get("ensemble") or of_test.get("ensemble", "scores")
    zero_shot = ZeroShot(prompts, ensemble)
    module = ImageTextDataModule(
        str(folder),
        image_size=network.image_size,
        batch_size=options.get("batch_size", 64),
        num_workers=options.get("num_workers", 0),
        predict_use="validate",
    )
    tables = _checked_tables(module, network)
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
    if prompts is not None:
        require_labelled(zero_shot.prompts, tables.labelled, "prompts")
    cases = _kept_scores(found.run and found.run / SCORES_FILE, network, module, tables, zero_shot)
    scale = network.similarity.gamma2.item()
    logits = scale * (cases["score_positive"] - cases["score_negative"]).to_numpy()
    findings = {}
    for finding, pair in zero_shot.prompts.items():
        rows = (cases["finding"] == finding).to_numpy()
        labels, patients = (cases.loc[rows, name].to_numpy() for name in ("label", "subject_id"))
        findings[finding] = fit_finding(logits[rows], labels == 1, patients, target, pair)
    info = module.prepared.info
    fitted = Calibration(
        fingerprint=network.fingerprint(),
        scale=scale,
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
        ensemble=zero_shot.ensemble,
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
            "validate patients by --data"
        )
    fitted.write(file)
    if output is None and found.run:
        write_parquet(cases, found.run / SCORES_FILE)
    print(f"written: {file}")
    return fitted


def _checked_tables(module: ImageTextDataModule, network: ImageTextNetwork) -> EvaluationTables:
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


def _kept_scores(
    file: Path | None,
    network: ImageTextNetwork,
    module: ImageTextDataModule,
    tables: EvaluationTables,
    zero_shot: ZeroShot,
) -> pd.DataFrame:
    """Scores of the validate cases, from the file if it holds those of this model, data and prompts."""
    scores_of = {
        "network": network.fingerprint(),
        "data": module.prepared.fingerprint,
        "prompts": {finding: [list(texts) for texts in pair] for finding, pair in zero_shot.prompts.items()},
        "ensemble": ensemble_used(zero_shot.prompts, zero_shot.ensemble),
    }
    if file and file.is_file():
        kept = read_parquet(file)
        if kept.attrs.get(_SCORES_OF) == scores_of:
            return kept
    values: dict[str, Any] = {}
    sentences = network.embed_texts(zero_shot.texts)
    for batch in progress_bar(iterable=module.predict_dataloader(), desc="validate images", unit=" batch"):
        with torch.inference_mode():
            encoded = network.encode(batch["images"].to(network.mean.device))
            scores = zero_shot.scores(network, encoded, sentences)
        values |= zip(batch["dicom_id"], scores.tolist(), strict=True)
    cases = scored_cases(tables.cases, list(zero_shot.prompts), values, tables)
    if cases.empty:
        raise UserError(
            f"{module.prepared.folder}: no validate image has a label of {', '.join(zero_shot.prompts)}"
        )
    cases.attrs[_SCORES_OF] = scores_of
    return cases


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; a mistake of the user is one line and status 2."""
    parser = argparse.ArgumentParser(
        prog="medclip-dcl calibrate",
        description="Fit calibrated probabilities and thresholds of zero-shot findings on validate patients; writes "
        f"MODEL/{CALIBRATION_FILE}.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="run folder, checkpoint, exported folder or Hugging Face repository")
    targets = parser.add_mutually_exclusive_group()
    for name, words in (
        ("sensitivity", "find this share of the positive cases"),
        ("specificity", "leave this share of the negative cases negative"),
    ):
        help = f"choose thresholds that {words}, in (0, 1]; default: a sensitivity of {TARGET['sensitivity']}"
        targets.add_argument(f"--{name}", type=float, metavar="SHARE", help=help)
    add("--data", metavar="SET", help="prepared set; default: the run's")
    add(
        "--prompts",
        metavar="FILE",
        help="YAML file of prompts; default: those of the run's test, else CheX5's",
    )
    words = "several prompts a side: the mean of scores or of embeddings; default: as in the run's test, else scores"
    add("--ensemble", choices=get_args(Ensemble), help=words)
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"file to write; default: {CALIBRATION_FILE} of the run or folder",
    )
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add_import_option(parser)
    options = parser.parse_args(arguments)
    given = {name: getattr(options, name) for name in TARGETS if getattr(options, name) is not None}
    with one_line_errors("medclip_dcl.command.calibrate: error"):
        found = calibrate(
            *(options.model, given or TARGET, options.data, options.prompts, options.device, options.output),
            options.ensemble,
        )
    print(summary(found))


if __name__ == "__main__":
    main()
