"""Model card of a run: README.md of an exported folder, with metadata for the Hugging Face Hub.

Everything in it is read from the run folder and the network; what the folder lacks is listed with the command that
makes it. It holds numbers, names of folders and settings, no text of a report and no path of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from medclip_dcl.common.findings import CHEX5, read_prompts
from medclip_dcl.export.card_facts import (
    as_texts,
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
from medclip_dcl.report.intervals import intervals_of_rows, method
from medclip_dcl.report.page import render_template
from medclip_dcl.report.subgroups import IMAGES_FILE, describe_run
from medclip_dcl.report.tables import NOTHING, Cell, Column, Row, Table
from medclip_dcl.runs.saved import (
    command_of_test,
    describe_checkpoint,
    describe_image_size,
    read_config,
    read_json,
    read_results,
    setting,
    value_at,
)

CARD_FILE = "README.md"
RESULTS = "### Summary"
"""Stands in a card with metrics."""

_MODEL, _UNTRAINED = "this model", tables.UNTRAINED
_SUFFIXES = {_MODEL: "", _UNTRAINED: "_untrained"}
_SECTIONS = {
    "classification": "zero-shot classification",
    "grounding": "phrase grounding",
    "retrieval": "retrieval of phrases and boxes",
    tables.REPORTS: "retrieval of reports",
}
_TASKS = {
    "classification": "zero-shot-image-classification",
    "grounding": "visual-grounding",
    "retrieval": "image-text-retrieval",
    tables.REPORTS: "image-text-retrieval",
}


def model_card(
    run: Path, network: ImageTextNetwork, address: str, calibration: Calibration | None = None
) -> str:
    """The card of a trained network as Markdown; the same folder gives the same text.

    Args:
        run: the run folder that the network comes from.
        network: loaded from the run's checkpoint.
        address: of the exported model, in the example.
        calibration: of the network; None for none.

    Raises:
        SavedResultsError: a file of the run folder is not readable.
    """
    config = read_config(run) or {}
    missing: list[str] = []
    weights = weights_fingerprint(network)
    results = {
        name: found for name, suffix in _SUFFIXES.items() if (found := read_results(run, suffix)) is not None
    }
    tested = results.get(_MODEL)
    if tested is None:
        missing.append(f"results.json: the model has not been tested; create it with: {command_of_test(run)}")
        results = {}
    elif tested["checkpoint"].get("weights") != weights:
        missing.append(
            f"results.json is of other weights ({tested['checkpoint']['file']}), so that its numbers are left out; "
            f"test these: {command_of_test(run)}"
        )
        results = {}
    elif _UNTRAINED not in results:
        missing.append(
            f"results_untrained.json: no numbers of the untrained network; create it with: {command_of_test(run)}"
        )
    dataset = _dataset(run, config, tested)
    if dataset is None:
        missing.append(
            "the description of the training data: their folder is not at hand, and the run was not tested on them; "
            f"create it with: {command_of_test(run)}"
        )
    if not config:
        missing.append(
            "config.yaml: objective and settings of the training; restore the file in the run folder"
        )
    if not (run / "fit.json").is_file():
        missing.append(
            "fit.json: training has not finished; continue it with: "
            f"python -m medclip_dcl fit --config {run / 'config.yaml'}"
        )
    if calibration is None:
        reason = (
            "is of other weights" if (run / CALIBRATION_FILE).is_file() else "no probabilities and thresholds"
        )
        missing.append(
            f"{CALIBRATION_FILE}: {reason}; create it with: python -m medclip_dcl.evaluation.calibrate {run}"
        )
    subgroups = _subgroups(run, results, missing)
    shown = str(publishable(run))  # messages name the run by the path that the user gave
    content = {
        "name": run.resolve().name,
        "address": address,
        "example": _example(network, config, calibration),
        "phantom": None if dataset is None else bool(dataset.get("phantom")),
        "data": data_facts(dataset),
        "terms": terms_of(dataset),
        "model": model_facts(network),
        "training": training_facts(run, config),
        "objective": objective_lines(config),
        **_results(run, results, shown),
        **_calibration_content(calibration),
        "subgroups": subgroups,
        "limits": _limits(network, results, dataset, calibration, subgroups),
        "missing": [line.replace(str(run), shown) for line in missing],
        "provenance": _provenance(run, tested if results else None, weights),
        "metadata": _metadata(run, results, dataset or {}),
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


def _dataset(run: Path, config: Mapping[str, Any], tested: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Description of the training data: dataset.json of their folder, else that of the test; None if unknown."""
    file = run / "data.json"
    fingerprint = read_json(file).get("fingerprint") if file.is_file() else None
    folder = setting(config, "data.init_args.folder")
    if folder and (found := Path(folder) / "dataset.json").is_file():
        dataset = read_json(found)
        if fingerprint in (None, dataset.get("fingerprint")):
            return {**dataset, "folder": Path(folder).resolve().name}
    if tested is not None and fingerprint in (None, tested["dataset"]["fingerprint"]):
        return dict(tested["dataset"])
    return None


def _results(run: Path, results: Mapping[str, Any], shown: str) -> dict[str, Any]:
    if not results:
        return {"summary": None, "tables": [], "tested": "", "method": ""}
    tested = results[_MODEL]
    intervals, errors = intervals_of_rows(run, {name: _SUFFIXES[name] for name in results})
    problems = [
        f"Without intervals, {name}: {str(error).replace(str(run), shown)}." for name, error in errors.items()
    ]
    return {
        "summary": _summary(results, intervals),
        "tables": [*tables.detail_tables(results, intervals), *_prompts(tested)],
        "tested": tables.describe_data(tested),
        "method": " ".join([method(), *problems] if intervals else problems),
    }


def _summary(results: Mapping[str, Any], intervals: tables.Intervals) -> Table:
    """Each number of the head of the report with its interval, beside the untrained network's and chance."""
    chance = tables.chance_levels(results[_MODEL])
    rows = []
    for label, path, digits in tables.DESCRIPTIONS["headline"]:
        if value_at(results[_MODEL]["metrics"], path) is None:
            continue
        cells = [
            tables.number_cell(found, intervals.get(name, {}), path, digits)
            for name, found in results.items()
        ]
        section = _SECTIONS[path.split("/")[0]]
        rows.append(
            Row(f"{section}: {label}", "plain", [*cells, Cell(tables.number(chance.get(path), digits))])
        )
    note = "Higher is better, except for MedR, the median rank. – : chance depends on the model."
    if _UNTRAINED in results:
        note += " Untrained: the same network before its first training step."
    return Table("Summary", [*map(Column, results), Column("by chance")], rows, note)


def _prompts(tested: Mapping[str, Any]) -> list[Table]:
    """The prompts of the zero-shot classification; no table where there was none."""
    pairs = tested["protocol"].get("classification", {}).get("prompts", {})
    rows = [
        Row(finding, "plain", [Cell(_joined(pair[side])) for side in ("negative", "positive")])
        for finding, pair in pairs.items()
        if pair.keys() >= {"negative", "positive"}
    ]
    return [Table("Prompts of the findings", [Column("negative"), Column("positive")], rows)] if rows else []


def _joined(prompts: str | list[str]) -> str:
    return prompts if isinstance(prompts, str) else "; ".join(prompts)


def _subgroups(run: Path, results: Mapping[str, Any], missing: list[str]) -> dict[str, Any] | None:
    """Metrics by view, sex and age group of the tested images; None where there are none."""
    if not results:
        return None
    if not (run / IMAGES_FILE).is_file():
        missing.append(
            f"{IMAGES_FILE}: no numbers by view, sex and age; create it with: {command_of_test(run)}"
        )
    return describe_run(run, missing)


def _calibration_content(calibration: Calibration | None) -> dict[str, Any]:
    if calibration is None:
        return {"calibration": None, "calibrated_on": "", "target": ""}
    data = calibration.data
    columns = {
        "method": "method",
        "threshold": "threshold",
        "sensitivity": "sensitivity",
        "specificity": "specificity",
        "positive cases": "n_positive",
        "negative cases": "n_negative",
    }
    rows = [
        Row(finding, "plain", [Cell(_calibrated(getattr(found, key))) for key in columns.values()])
        for finding, found in calibration.findings.items()
    ]
    known = [f"{data[name]} {name}" for name in ("images", "patients") if name in data]
    where = (
        f"{', '.join(known)} (use {data.get('use')}) of {data.get('folder')}"
        if known
        else "data not described"
    )
    note = " ".join(
        f"{finding}: {found.reason}." for finding, found in calibration.findings.items() if found.reason
    )
    return {
        "calibration": Table("By finding", [*map(Column, columns)], rows, note),
        "calibrated_on": where,
        "target": ", ".join(f"{name} {value:g}" for name, value in calibration.target.items()),
    }


def _calibrated(value: Any) -> str:
    if value is None:
        return NOTHING
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _limits(
    network: ImageTextNetwork,
    results: Mapping[str, Any],
    dataset: Mapping[str, Any] | None,
    calibration: Calibration | None,
    subgroups: Mapping[str, Any] | None,
) -> list[str]:
    """Limits that follow from the run: data, what was not measured, approximations."""
    similarity = explained(network.config()["similarity"]["class_path"])
    limits = [f"Similarity: {similarity}"] if similarity else []
    if dataset is not None and dataset.get("phantom"):
        limits.append("Trained on drawn pictures: its scores of real radiographs mean nothing.")
    elif dataset is not None:
        limits.append(
            f"Trained on one source, {dataset.get('source')}: other hospitals, scanners, views and languages differ."
        )
        if labels := dataset.get("options", {}).get("labels"):
            limits.append(
                f"Labels of the findings are those of {labels}, made from the reports, not by readers of the images."
            )
    if calibration is None:
        limits.append("Scores are not probabilities, and no threshold was chosen.")
    if tested := results.get(_MODEL):
        metrics = tested["metrics"]
        unmeasured = [
            text
            for section, text in _SECTIONS.items()
            if section not in metrics or not tables.is_measured(tested, section)
        ]
        if unmeasured:
            limits.append(f"Not measured: {', '.join(unmeasured)}.")
        by_finding = metrics.get("classification", {}).get("by_finding", {})
        if few := [finding for finding, found in by_finding.items() if found["auc"] is None]:
            limits.append(f"Too few test cases for a number: {', '.join(few)}.")
        trained = None if dataset is None else dataset.get("fingerprint")
        if tested["dataset"]["fingerprint"] == trained:
            limits.append("The test patients come from the same source as the training patients.")
        limits += [note for section in tested["notes"].values() for note in section]
        size = describe_image_size(tested)
        limits += [f"Tested with {tested['precision']} precision" + (f" at {size}." if size else ".")]
    else:
        limits.append("Nothing was measured with these weights.")
    if subgroups is None:
        limits.append("This card has no numbers by sex, age, view or scanner.")
    return limits


def _provenance(run: Path, tested: Mapping[str, Any] | None, weights: str) -> dict[str, str]:
    found: dict[str, Any] = {"run": run.resolve().name, "weights": weights}
    if tested is not None:
        found["checkpoint"] = describe_checkpoint(tested["checkpoint"])
        found["test data"] = tested["dataset"]["fingerprint"]
        found |= {f"{name} (test)": text for name, text in tested["versions"].items()}
    return as_texts(found)


def _metadata(run: Path, results: Mapping[str, Any], dataset: Mapping[str, Any]) -> str:
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
    if tested := results.get(_MODEL):
        dataset = tested["dataset"]
        if dataset.get("phantom"):
            metadata["tags"].append("phantom")
        by_task: dict[str, list[dict[str, Any]]] = {}
        for label, path, _ in tables.DESCRIPTIONS["headline"]:
            value = value_at(tested["metrics"], path)
            if value is not None:
                metric = {"type": path.replace("/", "_"), "name": label, "value": value}
                by_task.setdefault(_TASKS[path.split("/")[0]], []).append(metric)
        described = {
            "type": str(dataset.get("source")),
            "name": str(dataset.get("folder") or dataset.get("source")),
        }
        metadata["model-index"] = [
            {
                "name": run.resolve().name,
                "results": [
                    {"task": {"type": task}, "dataset": dict(described), "metrics": metrics}
                    for task, metrics in by_task.items()
                ],
            }
        ]
    return yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
