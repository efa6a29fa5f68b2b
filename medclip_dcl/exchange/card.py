"""Model card of a run: README.md of an exported folder, with metadata for the Hugging Face Hub.

It holds numbers, names of folders and settings, no text of a report and no path of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from medclip_dcl.common.findings import CHEX5, read_prompts
from medclip_dcl.exchange import card_facts
from medclip_dcl.metrics.calibration import CALIBRATION_FILE, Calibration
from medclip_dcl.networks.bert_folder import weights_fingerprint
from medclip_dcl.networks.classifier import FindingNetwork
from medclip_dcl.networks.described import ImageNetwork
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.report import tables
from medclip_dcl.report.draws import TestedRun, method, units_of
from medclip_dcl.report.failures import described
from medclip_dcl.report.page import render_template
from medclip_dcl.report.reliability import fitted_table
from medclip_dcl.report.tables import Cell, Column, Row, Table
from medclip_dcl.runs.run_folder import RunFolder
from medclip_dcl.runs.saved import (
    describe_checkpoint,
    describe_image_size,
    measured_alike,
    other_preparation,
    read_json,
    setting,
    settings_of_callback,
)

RESULTS = "### Summary"
"""Stands in a card with metrics."""

_MODEL, _UNTRAINED = "this model", tables.UNTRAINED
_SECTIONS = {
    "classification": ("zero-shot classification", "zero-shot-image-classification"),
    "grounding": ("phrase grounding", "visual-grounding"),
    "retrieval": ("retrieval of phrases and boxes", "image-text-retrieval"),
    tables.REPORTS: ("retrieval of reports", "image-text-retrieval"),
    tables.CLASSIFIER: ("classification of findings", "image-classification"),
}
"""Section of results.json -> its name in the card, and the Hub's name of the task."""


def model_card(
    folder: Path,
    network: ImageTextNetwork | FindingNetwork,
    address: str,
    calibration: Calibration | None = None,
) -> str:
    """The card of a network from a run folder as Markdown; the same folder gives the same text.

    `address` of the exported model stands in the example.
    """
    run, untrained = (TestedRun(folder, suffix) for suffix in ("", "_untrained"))
    config, fit_file, dataset = run.config or {}, folder / "fit.json", _dataset(run)
    weights, tested = weights_fingerprint(network), (run.results or {}).get("checkpoint", {})
    runs = {_MODEL: run} if tested.get("weights") == weights else {}
    if runs and untrained.results is not None and measured_alike(run.results, untrained.results):
        runs[_UNTRAINED] = untrained
    no_calibration = (
        "is of other weights" if (folder / CALIBRATION_FILE).is_file() else "no probabilities and thresholds"
    )
    create = f"create it with: {run.command}"
    pieces = {
        f"results.json: the model has not been tested; {create}": run.results is None,
        f"results.json is of other weights ({tested.get('file')}), so that its numbers are left out; test these: "
        f"{run.command}": bool(tested and not runs),
        f"results_untrained.json: no numbers of the untrained network, measured as the trained one; {create}": (
            bool(runs) and len(runs) < 2 and isinstance(network, ImageTextNetwork)
        ),
        "the description of the training data: their folder is not at hand, and the run was not tested on them; "
        f"{create}": not dataset,
        "config.yaml: objective and settings of the training; restore the file in the run folder": not config,
        f"fit.json: training has not finished; continue it with: medclip-dcl fit --config {folder / 'config.yaml'}": (
            not fit_file.is_file()
        ),
        f"{CALIBRATION_FILE}: {no_calibration}; create it with: medclip-dcl calibrate {folder}": calibration
        is None,
        f"predictions/images.parquet: no numbers by view, sex and age; {create}": (
            bool(runs) and not run.file_of("images").is_file()
        ),
    }
    missing = [text for text, is_missing in pieces.items() if is_missing]
    subgroups, failures = described(run, missing) if runs else (None, [])
    shown = str(card_facts.publishable(folder))  # messages name the run by the path that the user gave
    content = {
        "name": folder.resolve().name,
        "address": address,
        "findings": getattr(network, "findings", ()),
        "example": _example(network, config, calibration),
        "phantom": bool(dataset.get("phantom")) if dataset else None,
        "data": card_facts.data_facts(dataset),
        "terms": card_facts.terms_of(dataset),
        "model": card_facts.model_facts(network),
        "training": card_facts.training_facts(read_json(fit_file) if fit_file.is_file() else {}, config),
        "objective": card_facts.objective_lines(config),
        **_results(runs, shown),
        "calibration": calibration,
        "fitted": None if calibration is None else fitted_table(calibration),
        "subgroups": subgroups,
        "failures": failures,
        "limits": _limits(network, runs, dataset),
        "missing": [line.replace(str(folder), shown) for line in missing],
        "provenance": {"run": folder.resolve().name, "weights": weights} | _provenance(runs),
        "metadata": _metadata(folder, network, runs, dataset),
    }
    return render_template("card.md", content, Path(__file__).parent)


def _example(
    network: ImageNetwork, config: Mapping[str, Any], calibration: Calibration | None
) -> dict[str, Any]:
    """Prompts other than CheX5's, a sentence and modules of the user's classes, for the example of use."""
    fitted = calibration.findings if calibration else {}
    prompts = {finding: one.prompts for finding, one in fitted.items()} or card_facts.prompts_of(config)
    if prompts == read_prompts(CHEX5) or isinstance(network, FindingNetwork):
        prompts = {}
    modules = {type(getattr(network, part)).__module__ for part in network.parts}
    of_run = config.get("ensemble") or settings_of_callback(config, "ZeroShotClassification").get("ensemble")
    ensemble = calibration.ensemble if calibration else of_run
    return {
        "ensemble": ensemble if prompts and ensemble != "scores" else None,
        "prompts": prompts,
        "text": next((positive[0] for _, positive in prompts.values()), "Small left pleural effusion."),
        "is_calibrated": bool(calibration and calibration.calibrated()),
        "modules": sorted(name for name in modules if not name.startswith("medclip_dcl.")),
    }


def _dataset(run: TestedRun) -> dict[str, Any]:
    """Description of the training data: dataset.json of their folder, else that of the test; empty if unknown."""
    folder = setting(run.config, "data.init_args.folder")
    descriptions = [run.results["dataset"]] if run.results is not None else []
    if folder and (file := Path(folder) / "dataset.json").is_file():
        descriptions.insert(0, {**read_json(file), "folder": Path(folder).resolve().name})
    trained = RunFolder(run.folder).data().get("fingerprint")
    return next((one for one in descriptions if trained in (None, one.get("fingerprint"))), {})


def _results(runs: Mapping[str, TestedRun], shown: str) -> dict[str, Any]:
    if not runs:
        return {"summary": None}
    run = runs[_MODEL]
    rows, errors = tables.shown(runs)
    lines = [method(units_of(run.tested))] if len(errors) < len(rows) else []
    lines += [f"Without intervals, {name}: {error}." for name, error in errors.items()]
    return {
        "summary": _summary(rows),
        "tables": tables.detail_tables(rows),
        "tested": tables.describe_data(run.tested),
        "method": " ".join(lines).replace(str(run.folder), shown),
    }


def _summary(runs: Mapping[str, tables.Shown]) -> Table:
    """Each number of the head of the report with its interval, beside the untrained network's and chance."""
    chance = tables.chance_levels(runs[_MODEL].results)
    rows = []
    for label, path, digits, _ in tables.headline(runs[_MODEL].results):
        cells = [
            *(run.cell(path, digits) for run in runs.values()),
            Cell(tables.number(chance.get(path), digits)),
        ]
        rows.append(Row(f"{_SECTIONS[path.split('/')[0]][0]}: {label}", "plain", cells))
    note = "Higher is better, except for MedR, the median rank. – : chance depends on the model."
    if _UNTRAINED in runs:
        note += " Untrained: the same network before its first training step."
    return Table("Summary", [*map(Column, runs), Column("by chance")], rows, note)


def _limits(network: ImageNetwork, runs: Mapping[str, TestedRun], dataset: Mapping[str, Any]) -> list[str]:
    """Limits that follow from the run: data, what was not measured, approximations."""
    is_classifier = isinstance(network, FindingNetwork)
    similarity = "" if is_classifier else card_facts.explained(network.config()["similarity"]["class_path"])
    limits = [f"Similarity: {similarity}"] if similarity else []
    if dataset.get("phantom"):
        limits.append("Trained on drawn pictures: its scores of real radiographs mean nothing.")
    elif dataset:
        limits.append(
            f"Trained on one source, {dataset.get('source')}: other hospitals, scanners, views and languages differ."
        )
        options = dataset.get("options", {})
        if labels := options.get("labels"):
            its = "made from the reports, not by readers of the images"
            its += "; those of the test images are a radiologist's" if options.get("test_labels") else ""
            limits.append(f"Labels of the findings are those of {labels}, {its}.")
    if runs:
        tested = runs[_MODEL].tested
        sections = [x for x in _SECTIONS if (x == tables.CLASSIFIER) == is_classifier]
        if names := [_SECTIONS[x][0] for x in sections if not tables.is_measured(tested, x)]:
            limits.append(f"Not measured: {', '.join(names)}.")
        section = tables.CLASSIFIER if is_classifier else "classification"
        by_finding = tested["metrics"].get(section, {}).get("by_finding", {})
        if few := [finding for finding, numbers in by_finding.items() if numbers["auc"] is None]:
            limits.append(f"Too few test cases for a number: {', '.join(few)}.")
        if tested["dataset"]["fingerprint"] == dataset.get("fingerprint"):
            limits.append("The test patients come from the same source as the training patients.")
        limits += [note for section in tested["notes"].values() for note in section]
        if preparation := other_preparation(**tested["images"]):
            limits.append(f"The tested {preparation}.")
        limits.append(f"Tested with {tested['precision']} precision at {describe_image_size(tested)}.")
    return limits


def _provenance(runs: Mapping[str, TestedRun]) -> dict[str, str]:
    if not runs:
        return {}
    tested = runs[_MODEL].tested
    return {
        "checkpoint": card_facts.as_text(describe_checkpoint(tested["checkpoint"])),
        "test data": tested["dataset"]["fingerprint"],
        **{f"{name} (test)": card_facts.as_text(text) for name, text in tested["versions"].items()},
    }


def _metadata(
    folder: Path, network: ImageNetwork, runs: Mapping[str, TestedRun], dataset: Mapping[str, Any]
) -> str:
    """YAML head of the card, as the Hub reads it; metrics are exactly those of results.json."""
    is_classifier = isinstance(network, FindingNetwork)
    metadata: dict[str, Any] = {
        "library_name": "medclip_dcl",
        "pipeline_tag": f"{'' if is_classifier else 'zero-shot-'}image-classification",
        "license": "other",
        "license_name": "terms-of-the-training-data",
        "tags": ["medical", "radiology", "chest-x-ray"],
    }
    if not is_classifier:
        metadata["tags"] += ["image-text", "contrastive-learning"]
    # The language of other sources' reports is not known.
    if dataset.get("phantom") or str(dataset.get("source")).startswith(("mimic-cxr", "open-i")):
        metadata["language"] = ["en"]
    if runs:
        dataset = runs[_MODEL].tested["dataset"]
        metadata["tags"] += ["phantom"] * bool(dataset.get("phantom"))
        source = str(dataset.get("source"))
        results: dict[str, dict[str, Any]] = {}
        for label, path, _, value in tables.headline(runs[_MODEL].tested):
            task = _SECTIONS[path.split("/")[0]][1]
            described = {"type": source, "name": str(dataset.get("folder") or source)}
            empty = {"task": {"type": task}, "dataset": described, "metrics": []}
            metric = {"type": path.replace("/", "_"), "name": label, "value": value}
            results.setdefault(task, empty)["metrics"].append(metric)
        metadata["model-index"] = [{"name": folder.resolve().name, "results": list(results.values())}]
    return yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
