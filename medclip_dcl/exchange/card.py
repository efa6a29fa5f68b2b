"""Model card of a run: README.md of an exported folder, with metadata for the Hugging Face Hub.

It holds numbers, names of folders and settings, no text of a report and no path of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from medclip_dcl.common.findings import CHEX5, read_prompts
from medclip_dcl.exchange.card_facts import (
    as_text,
    data_facts,
    explained,
    model_facts,
    objective_lines,
    prompts_of,
    publishable,
    terms_of,
    training_facts,
)
from medclip_dcl.metrics.calibration import CALIBRATION_FILE, Calibration
from medclip_dcl.networks.bert_folder import weights_fingerprint
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.report import tables
from medclip_dcl.report.page import render_template
from medclip_dcl.report.reliability import fitted_table
from medclip_dcl.report.subgroups import describe_run
from medclip_dcl.report.tables import Cell, Column, Row, Table
from medclip_dcl.runs.saved import describe_checkpoint, describe_image_size, read_json, setting
from medclip_dcl.statistics.draws import TestedRun, method, units_of

CARD_FILE = "README.md"
RESULTS = "### Summary"
"""Stands in a card with metrics."""

_MODEL, _UNTRAINED = "this model", tables.UNTRAINED
_SECTIONS = {
    "classification": ("zero-shot classification", "zero-shot-image-classification"),
    "grounding": ("phrase grounding", "visual-grounding"),
    "retrieval": ("retrieval of phrases and boxes", "image-text-retrieval"),
    tables.REPORTS: ("retrieval of reports", "image-text-retrieval"),
}
"""Section of results.json -> its name in the card, and the Hub's name of the task."""


def model_card(
    folder: Path, network: ImageTextNetwork, address: str, calibration: Calibration | None = None
) -> str:
    """The card of a network from a run folder as Markdown; the same folder gives the same text.

    `address` of the exported model stands in the example.
    """
    run, untrained = (TestedRun(folder, suffix) for suffix in ("", "_untrained"))
    config, test, fit_file = run.config or {}, run.command, folder / "fit.json"
    weights = weights_fingerprint(network)
    of = run.results["checkpoint"] if run.results is not None else {}
    runs = {_MODEL: run} if of.get("weights") == weights else {}
    if runs and untrained.results is not None:
        runs[_UNTRAINED] = untrained
    dataset = _dataset(run)
    has_file = (folder / CALIBRATION_FILE).is_file()
    reason = "is of other weights" if has_file else "no probabilities and thresholds"
    pieces = {
        f"results.json: the model has not been tested; create it with: {test}": run.results is None,
        f"results.json is of other weights ({of.get('file')}), so that its numbers are left out; "
        f"test these: {test}": run.results is not None and not runs,
        f"results_untrained.json: no numbers of the untrained network; create it with: {test}": (
            bool(runs) and _UNTRAINED not in runs
        ),
        "the description of the training data: their folder is not at hand, and the run was not tested on them; "
        f"create it with: {test}": not dataset,
        "config.yaml: objective and settings of the training; restore the file in the run folder": not config,
        "fit.json: training has not finished; continue it with: "
        f"medclip-dcl fit --config {folder / 'config.yaml'}": not fit_file.is_file(),
        f"{CALIBRATION_FILE}: {reason}; create it with: medclip-dcl calibrate {folder}": (
            calibration is None
        ),
        f"predictions/images.parquet: no numbers by view, sex and age; create it with: {test}": (
            bool(runs) and not run.file_of("images").is_file()
        ),
    }
    missing = [text for text, is_missing in pieces.items() if is_missing]
    subgroups = describe_run(run, missing) if runs else None
    shown = str(publishable(folder))  # messages name the run by the path that the user gave
    content = {
        "name": folder.resolve().name,
        "address": address,
        "example": _example(network, config, calibration),
        "phantom": bool(dataset.get("phantom")) if dataset else None,
        "data": data_facts(dataset),
        "terms": terms_of(dataset),
        "model": model_facts(network),
        "training": training_facts(read_json(fit_file) if fit_file.is_file() else {}, config),
        "objective": objective_lines(config),
        **_results(runs, shown),
        "calibration": calibration,
        "fitted": None if calibration is None else fitted_table(calibration),
        "subgroups": subgroups,
        "limits": _limits(network, runs, dataset),
        "missing": [line.replace(str(folder), shown) for line in missing],
        "provenance": {"run": folder.resolve().name, "weights": weights} | _provenance(runs),
        "metadata": _metadata(folder, runs, dataset),
    }
    return render_template("card.md", content, Path(__file__).parent)


def _example(
    network: ImageTextNetwork, config: Mapping[str, Any], calibration: Calibration | None
) -> dict[str, Any]:
    """What the example of use depends on: prompts other than CheX5's, a sentence, modules of the user's classes."""
    calibrated = {} if calibration is None else calibration.findings
    prompts = {finding: one.prompts for finding, one in calibrated.items()} or prompts_of(config)
    own = {} if prompts == read_prompts(CHEX5) else prompts
    modules = {type(part).__module__ for part in network.children()}
    return {
        "prompts": own,
        "text": next(iter(own.values()))[1][0] if own else "Small left pleural effusion.",
        "is_calibrated": calibration is not None and bool(calibration.calibrated()),
        "modules": sorted(name for name in modules if not name.startswith("medclip_dcl.")),
    }


def _dataset(run: TestedRun) -> dict[str, Any]:
    """Description of the training data: dataset.json of their folder, else that of the test; empty if unknown."""
    file, folder = run.folder / "data.json", setting(run.config, "data.init_args.folder")
    found = [run.results["dataset"]] if run.results is not None else []
    if folder and (described := Path(folder) / "dataset.json").is_file():
        found.insert(0, {**read_json(described), "folder": Path(folder).resolve().name})
    trained = read_json(file).get("fingerprint") if file.is_file() else None
    return next((one for one in found if trained in (None, one.get("fingerprint"))), {})


def _results(runs: Mapping[str, TestedRun], shown: str) -> dict[str, Any]:
    if not runs:
        return {"summary": None}
    run = runs[_MODEL]
    rows, errors = tables.shown(runs)
    problems = [
        f"Without intervals, {name}: {str(error).replace(str(run.folder), shown)}."
        for name, error in errors.items()
    ]
    return {
        "summary": _summary(rows),
        "tables": tables.detail_tables(rows),
        "tested": tables.describe_data(run.tested),
        "method": " ".join(
            [method(units_of(run.tested)), *problems] if len(errors) < len(rows) else problems
        ),
    }


def _summary(runs: Mapping[str, tables.Shown]) -> Table:
    """Each number of the head of the report with its interval, beside the untrained network's and chance."""
    chance = tables.chance_levels(runs[_MODEL].results)
    rows = []
    for label, path, digits, _ in tables.headline(runs[_MODEL].results):
        cells = [run.cell(path, digits) for run in runs.values()]
        section = _SECTIONS[path.split("/")[0]][0]
        rows.append(
            Row(f"{section}: {label}", "plain", [*cells, Cell(tables.number(chance.get(path), digits))])
        )
    note = "Higher is better, except for MedR, the median rank. – : chance depends on the model."
    if _UNTRAINED in runs:
        note += " Untrained: the same network before its first training step."
    return Table("Summary", [*map(Column, runs), Column("by chance")], rows, note)


def _limits(
    network: ImageTextNetwork, runs: Mapping[str, TestedRun], dataset: Mapping[str, Any]
) -> list[str]:
    """Limits that follow from the run: data, what was not measured, approximations."""
    similarity = explained(network.config()["similarity"]["class_path"])
    limits = [f"Similarity: {similarity}"] if similarity else []
    if dataset.get("phantom"):
        limits.append("Trained on drawn pictures: its scores of real radiographs mean nothing.")
    elif dataset:
        limits.append(
            f"Trained on one source, {dataset.get('source')}: other hospitals, scanners, views and languages differ."
        )
        if labels := dataset.get("options", {}).get("labels"):
            limits.append(
                f"Labels of the findings are those of {labels}, made from the reports, not by readers of the images."
            )
    if runs:
        tested = runs[_MODEL].tested
        if lacking := [name for x, (name, _) in _SECTIONS.items() if not tables.is_measured(tested, x)]:
            limits.append(f"Not measured: {', '.join(lacking)}.")
        by_finding = tested["metrics"].get("classification", {}).get("by_finding", {})
        if few := [finding for finding, found in by_finding.items() if found["auc"] is None]:
            limits.append(f"Too few test cases for a number: {', '.join(few)}.")
        if tested["dataset"]["fingerprint"] == dataset.get("fingerprint"):
            limits.append("The test patients come from the same source as the training patients.")
        limits += [note for section in tested["notes"].values() for note in section]
        limits.append(f"Tested with {tested['precision']} precision at {describe_image_size(tested)}.")
    return limits


def _provenance(runs: Mapping[str, TestedRun]) -> dict[str, str]:
    if not runs:
        return {}
    tested = runs[_MODEL].tested
    found = {
        "checkpoint": describe_checkpoint(tested["checkpoint"]),
        "test data": tested["dataset"]["fingerprint"],
        **{f"{name} (test)": text for name, text in tested["versions"].items()},
    }
    return {name: as_text(value) for name, value in found.items() if value is not None}


def _metadata(folder: Path, runs: Mapping[str, TestedRun], dataset: Mapping[str, Any]) -> str:
    """YAML head of the card, as the Hub reads it; metrics are exactly those of results.json."""
    metadata: dict[str, Any] = {
        "library_name": "medclip_dcl",
        "pipeline_tag": "zero-shot-image-classification",
        "license": "other",
        "license_name": "terms-of-the-training-data",
        "tags": ["medical", "radiology", "chest-x-ray", "image-text", "contrastive-learning"],
    }
    # The language of other sources' reports is not known.
    if dataset.get("phantom") or str(dataset.get("source")).startswith(("mimic-cxr", "open-i")):
        metadata["language"] = ["en"]
    if runs:
        dataset = runs[_MODEL].tested["dataset"]
        if dataset.get("phantom"):
            metadata["tags"].append("phantom")
        source = str(dataset.get("source"))
        described = {"type": source, "name": str(dataset.get("folder") or source)}
        by_task: dict[str, list[dict[str, Any]]] = {}
        for label, path, _, value in tables.headline(runs[_MODEL].tested):
            metric = {"type": path.replace("/", "_"), "name": label, "value": value}
            by_task.setdefault(_SECTIONS[path.split("/")[0]][1], []).append(metric)
        results = [
            {"task": {"type": task}, "dataset": dict(described), "metrics": metrics}
            for task, metrics in by_task.items()
        ]
        metadata["model-index"] = [{"name": folder.resolve().name, "results": results}]
    return yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
