"""Report of a run: ``medclip-dcl report RUN`` writes RUN/report.html from the run folder alone.

The page opens without network, and lists missing pieces of the run folder, each with the command that makes it.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image

from medclip_dcl.common.files import write_text
from medclip_dcl.metrics.table import DIRECTIONS
from medclip_dcl.pictures.plots import draw_roc
from medclip_dcl.report import charts, tables
from medclip_dcl.report import reliability as calibration
from medclip_dcl.report.draws import TestedRun, method, units_of
from medclip_dcl.report.failures import described
from medclip_dcl.report.options import Report
from medclip_dcl.report.page import render_template
from medclip_dcl.runs import saved

REPORT_FILE = "report.html"

_TRAINED, _UNTRAINED = "this run", tables.UNTRAINED
_N_SENTENCES = 8
_DRAWN = ("grounding", "localisation")
"""Evaluations with example heat maps, by the beginnings of their names."""
_SENTENCE_FORMATS = {
    "n_reports": ("reports (whole set)", "{:,}"),
    "log_p": ("log p", "{:.2f}"),
    "eta": ("η", "{:.3g}"),
}
"""Column of class_probability.parquet -> heading and format."""


def write_report(run: Path) -> Path:
    """Write report.html into a run folder."""
    file = run / REPORT_FILE
    write_text(render(run), file)
    return file


def render(folder: Path) -> str:
    """The report of a run folder as HTML; the same folder gives the same text."""
    is_trained_here = any((folder / name).exists() for name in ("config.yaml", "metrics.csv", "checkpoints"))
    if not is_trained_here and not (folder / "results.json").exists():
        raise saved.SavedResultsError(
            f"{folder}: expected a run folder with config.yaml, metrics.csv, results.json or checkpoints/, found none "
            "of them; give the folder that was the --run_folder of `medclip-dcl fit`"
        )
    runs: dict[str, TestedRun] = {}
    for name, suffix in ((_TRAINED, ""), (_UNTRAINED, "_untrained")):
        run = TestedRun(folder, suffix)
        run.require_prepared_set()
        trained = runs.get(_TRAINED)
        if run.results is not None and (
            trained is None or saved.measured_alike(trained.results, run.results)
        ):
            runs[name] = run
    results = {name: run.tested for name, run in runs.items()}
    first = next(iter(results.values()), None)
    is_classifier = first is not None and tables.is_of_classifier(first)
    missing: list[str] = []
    subgroups, failures = described(runs[_TRAINED], missing) if _TRAINED in runs else (None, [])
    content: dict[str, Any] = {
        "name": folder.resolve().name,
        "is_phantom": bool(results) and all(found["dataset"]["phantom"] for found in results.values()),
        "is_classifier": is_classifier,
        "is_trained_here": is_trained_here,
        "results": first,
        "checkpoint": saved.describe_checkpoint(first["checkpoint"]) if first else None,
        "has_untrained": _UNTRAINED in results,
        "data": tables.describe_data(first) if first else None,
        "image_size": saved.describe_image_size(first) if first else None,
        **_tables(runs, results),
        "subgroups": subgroups,
        "failures": failures,
        **_charts_of_predictions(runs, missing),
        # A classifier has neither class probability nor heat maps.
        **({"eta": None} if is_classifier else _class_probability(folder / "class_probability.parquet")),
        **_curves(folder / "metrics.csv"),
        "heat_maps": {} if is_classifier else _heat_maps(folder / "figures"),
        "embedding_map": _data_uri(drawn)
        if (drawn := folder / "figures/embedding_map.png").is_file()
        else None,
        "config": config.read_text("utf-8") if (config := folder / "config.yaml").is_file() else None,
        "protocol": json.dumps(first["protocol"], indent=2, ensure_ascii=False) if first else None,
        "timings": {
            **({"fit": saved.read_json(folder / "fit.json")} if (folder / "fit.json").is_file() else {}),
            **{f"test, {name}": found["timings"] for name, found in results.items()},
        },
    }
    content["missing"] = [*_missing(folder, results, content), *missing]
    return render_template("report.html", content)


def _missing(run: Path, results: Mapping[str, Any], content: Mapping[str, Any]) -> list[str]:
    """Files that the run folder lacks, and the commands that make them."""
    test, fit = saved.command_of_test(run), "medclip-dcl fit"
    is_image_text, is_trained_here = not content["is_classifier"], content["is_trained_here"]
    is_grounded = any(tables.is_measured(found, "grounding") for found in results.values())
    curves = (
        "no training figures yet"
        if (run / "metrics.csv").is_file()
        else f"no training curves; create it with: {fit}"
    )
    pieces = {
        f"results.json: the run has not been tested; create it with: {test}": _TRAINED not in results,
        "results_untrained.json: no row of the untrained network, measured as the others, to read them against; made"
        f" by the same `test` where checkpoints/untrained.ckpt is there: {test}": (
            _UNTRAINED not in results and is_image_text and is_trained_here
        ),
        f"metrics.csv: {curves}": not content["curves"] and is_trained_here,
        "class_probability.parquet: no η by sentence; `fit` writes it": (
            is_image_text
            and is_trained_here
            and charts.ETA not in content["constant"]
            and not (run / "class_probability.parquet").is_file()
        ),
        "figures/grounding_*.png: no heat maps; `test` draws them": (
            is_image_text and is_grounded and not content["heat_maps"]
        ),
        "config.yaml: the configuration of the run": is_trained_here and content["config"] is None,
        f"fit.json: training has not finished; continue it with: {fit}": (
            is_trained_here and not (run / "fit.json").is_file()
        ),
    }
    return [text for text, is_missing in pieces.items() if is_missing]


def _tables(runs: Mapping[str, TestedRun], results: Mapping[str, Any]) -> dict[str, Any]:
    """Tables, notes and the numbers in the head of the page."""
    rows, errors = tables.shown(runs)
    notes = [size for found in results.values() if "," in (size := saved.describe_image_size(found))]
    notes = [f"images were shown at {size}: numbers at the size of the training differ" for size in notes]
    notes += [note for found in results.values() if (note := saved.other_preparation(**found["images"]))]
    notes += [note for found in results.values() for section in found["notes"].values() for note in section]
    notes += [f"{name} is shown without intervals: {error}" for name, error in errors.items()]
    shown = (
        [*tables.filled(rows), *tables.detail_tables(rows), *tables.other_tables(results)] if results else []
    )
    headline = []
    first = next(iter(results.values()), None)
    levels = tables.chance_levels(first) if first else {}
    units = units_of(first) if first else ""
    for label, path, digits, _ in tables.headline(first) if first else ():
        # A share that is 1 by chance, such as Recall at 10 of 10 candidates, says nothing.
        if levels.get(path) != 1:
            values = {name: saved.value_at(found["metrics"], path) for name, found in results.items()}
            texts = {name: tables.number(value, digits) for name, value in values.items()}
            chance = tables.number(levels[path], digits) if path in levels else None
            headline.append((label, texts.get(_TRAINED, tables.NOTHING), texts.get(_UNTRAINED), chance))
    return {
        "tables": shown,
        "forest": charts.forests({"AUC by finding": {name: run.aucs for name, run in rows.items()}}),
        "headline": headline,
        "notes": list(dict.fromkeys(notes)),
        "method": method(units) if len(errors) < len(rows) and shown else None,
        "units": units,
        "reason": tables.why_left_out(first) if first else "",
    }


def _curves(file: Path) -> dict[str, Any]:
    if not file.is_file() or not file.stat().st_size:
        return {"curves": [], "constant": {}}
    try:
        metrics = pd.read_csv(file)
    except ValueError as error:
        raise saved.SavedResultsError(
            f"{file} is not a readable table ({error}); restore or delete it"
        ) from error
    return dict(zip(("curves", "constant"), charts.curves(metrics), strict=True))


def _charts_of_predictions(runs: Mapping[str, TestedRun], missing: list[str]) -> dict[str, Any]:
    """ROC curves, calibration and histograms of ranks."""
    content: dict[str, Any] = {"roc": None, "ranks": [], "calibration": None}
    if _TRAINED not in runs:
        return content
    run = runs[_TRAINED]
    is_classifier = tables.is_of_classifier(run.tested)
    section = tables.CLASSIFIER if is_classifier else "classification"
    cases = _predictions(run, section, missing)
    by_finding = (run.tested["metrics"].get(section) or {}).get("by_finding", {})
    aucs = {finding: found["auc"] for finding, found in by_finding.items()}
    if cases is not None and any(auc is not None for auc in aucs.values()):
        content["roc"] = charts.chart("roc", (4.6, 4.6 + 0.09 * len(aucs)), draw_roc, cases, aucs)
        content["calibration"] = calibration.section(run)
    if is_classifier:
        return content
    has_boxes = tables.is_measured(run.tested, "retrieval")
    section, task = (
        ("retrieval", "retrieval") if has_boxes else (tables.REPORTS, f"{tables.REPORTS}/image_report")
    )
    by_run = {}
    for name, one in runs.items():
        if tables.is_measured(one.tested, section):
            queries = _predictions(one, section, missing)
            if queries is not None:
                by_run[name] = queries if has_boxes else queries[queries["task"] == "image_report"]
    if _TRAINED in by_run:
        levels = tables.chance_levels(run.tested)
        chance = {d: levels.get(f"{task}/{d}/MedR") for d in DIRECTIONS}
        items = ("box", "phrase") if has_boxes else ("image", "report")
        content["ranks"] = charts.ranks(by_run, items, chance)
    return content


def _predictions(run: TestedRun, section: str, missing: list[str]) -> pd.DataFrame | None:
    if (table := run.table(section)) is None:
        file = run.file_of(section)
        missing.append(f"{file.parent.name}/{file.name} is missing; `test` writes it")
    return table


def _class_probability(file: Path) -> dict[str, Any]:
    """Charts of η, and the most and the least probable sentences."""
    table = saved.read_parquet(file) if file.is_file() else pd.DataFrame()
    if table.empty:
        return {"eta": None}
    return {
        "eta": charts.chart("eta", (4.6, 2.9), charts.draw_eta, table["eta"]),
        "truth": charts.chart("truth", (4.6, 2.9), charts.draw_truth, table) if "rho" in table else None,
        "sentences": [_sentences(*one) for one in probable_sentences(table, _N_SENTENCES).items()],
    }


def probable_sentences(table: pd.DataFrame, number: int) -> dict[str, pd.DataFrame]:
    """The most and the least probable sentences, each beginning with the most extreme, by their headings."""
    order = "log_p" if "log_p" in table else "eta"
    ranked = table.sort_values([order, "sentence_id"], ascending=False, kind="stable")
    return {
        "Most probable sentences": ranked.head(number),
        "Least probable sentences": ranked.tail(number)[::-1],
    }


def _sentences(title: str, sentences: pd.DataFrame) -> tables.Table:
    formats = {name: shown for name, shown in _SENTENCE_FORMATS.items() if name in sentences}
    rows = []
    for one in sentences.to_dict("records"):
        texts = (form.format(one[name]).replace("-", "−") for name, (_, form) in formats.items())
        rows.append(tables.Row(one["text"], "sentence", [*map(tables.Cell, texts)]))
    columns = [tables.Column(heading) for heading, _ in formats.values()]
    return tables.Table(title, columns, rows, corner="sentence")


def _heat_maps(folder: Path) -> dict[str, list[str]]:
    """Group -> heat maps as data URIs."""
    maps: dict[str, list[str]] = {}
    for group in ("best", "median", "worst"):
        files = [file for name in _DRAWN for file in sorted(folder.glob(f"{name}_{group}_*.png"))]
        maps |= {group: [_data_uri(file) for file in files]} if files else {}
    return maps


def _data_uri(file: Path) -> str:
    """A figure as JPEG, which keeps the report small."""
    buffer = io.BytesIO()
    with Image.open(file) as image:
        image.convert("RGB").save(buffer, "JPEG", quality=86, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def run(options: Report) -> None:
    print(write_report(options.run))
