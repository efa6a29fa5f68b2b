"""The run report: ``python -m medclip_dcl.report RUN`` writes RUN/report.html from the run folder alone.

One file that opens from disk, without network: tables in the shape of SSD's tables 1, 3, 4 and 5 and of image-report
retrieval, training curves, the class probability, heat maps, configuration, versions and timings. What the folder lacks
is named in the report; what was not measured, or never trained in this folder, is left out.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup
from PIL import Image

from medclip_dcl.files import write_text
from medclip_dcl.report import charts, tables
from medclip_dcl.report.intervals import Interval, bootstrap_intervals, method
from medclip_dcl.report.page import page_environment
from medclip_dcl.report.saved_results import (
    SavedResultsError,
    command_of_test,
    images_in_words,
    read_json,
    read_results,
    value_at,
)

REPORT_FILE = "report.html"

_TRAINED, _UNTRAINED = "this run", tables.UNTRAINED
_GROUPS = ("best", "median", "worst")
_N_SENTENCES = 8
_JPEG_QUALITY = 86


class ReportError(SavedResultsError):
    """The report cannot be made; the message says why and what to do."""


@dataclass
class _Piece:
    """Something the report shows: ``missing`` says what is not there and which command makes it."""

    content: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def write_report(run: Path) -> Path:
    """Write report.html into a run folder.

    Raises:
        ReportError: not a run folder; a file of it cannot be read.
        SavedResultsError: its results cannot be read.
    """
    file = run / REPORT_FILE
    write_text(render(run), file)
    return file


def render(run: Path) -> str:
    """The report of a run folder as HTML; the same folder gives the same text.

    Raises:
        ReportError: as :func:`write_report`.
        SavedResultsError: as there.
    """
    if not run.is_dir():
        raise ReportError(f"{run} does not exist; give the folder of a run, such as runs/demo")
    if not any(
        (run / name).exists() for name in ("config.yaml", "metrics.csv", "results.json", "checkpoints")
    ):
        raise ReportError(
            f"{run} is not a run folder: it holds neither config.yaml, metrics.csv, results.json nor checkpoints/;"
            " give the folder that was the --run_folder of `python -m medclip_dcl fit`"
        )
    results = {
        name: found
        for name, found in ((_TRAINED, read_results(run)), (_UNTRAINED, read_results(run, "_untrained")))
        if found is not None
    }
    is_classifier = bool(results) and tables.is_of_classifier(next(iter(results.values())))
    pieces = [
        _tables(run, results),
        _curves(run),
        _predictions(run, results),
        # A classifier has neither.
        *([] if is_classifier else [_class_probability(run), _heat_maps(run, results)]),
        _facts(run, results),
    ]
    is_phantom = bool(results) and all(found["dataset"]["phantom"] for found in results.values())
    content: dict[str, Any] = {
        "name": run.resolve().name,
        "is_phantom": is_phantom,
        "is_known": bool(results),
        "is_classifier": is_classifier,
        "has_untrained": _UNTRAINED in results,
        "eta": None,
        "heat_maps": [],
        "embedding_map": None,
        "is_trained_here": _is_trained_here(run),
        "data": tables.data_in_words(next(iter(results.values()))) if results else None,
    }
    for piece in pieces:
        content |= piece.content
    content["missing"] = [text for piece in pieces for text in piece.missing]
    return page_environment().get_template("report.html").render(content)


def _is_trained_here(run: Path) -> bool:
    """False of a folder that holds the test of another's checkpoint or of an exported model alone."""
    return any((run / name).exists() for name in ("config.yaml", "metrics.csv", "checkpoints"))


def _tables(run: Path, results: dict[str, Any]) -> _Piece:
    piece = _Piece(
        {"tables": [], "notes": [], "headline": [], "method": None, "reason": "", "is_paper": False}
    )
    test = command_of_test(run)
    if _TRAINED not in results:
        piece.missing.append(f"results.json: the run has not been tested; made by: {test}")
    is_classifier = bool(results) and tables.is_of_classifier(next(iter(results.values())))
    if _UNTRAINED not in results and not is_classifier and _is_trained_here(run):
        piece.missing.append(
            "results_untrained.json: no row of the untrained network, against which to read the others; made by the"
            f" same `test` where checkpoints/untrained.ckpt is there: {test}"
        )
    if not results:
        return piece
    first = next(iter(results.values()))
    intervals, problems = _intervals(run, results)
    shown = []
    for layout in tables.layouts(list(results.values())):
        is_of_findings = layout.columns[0].path.startswith("classification/by_finding")
        if not is_of_findings or layout.title == tables.TABLE_3:
            shown.append(tables.filled(layout, results, intervals))
        if is_of_findings:
            shown.append(tables.by_finding(results, intervals))
        if layout.title == tables.TABLE_4:
            shown += [table for table in [tables.by_category(results, intervals)] if table]
    piece.content["tables"] = shown
    piece.content["method"] = method() if intervals and shown else None
    piece.content["reason"] = tables.why_left_out(first)
    piece.content["is_paper"] = any(row.kind == tables.PUBLISHED for table in shown for row in table.rows)
    found_notes = (
        note for found in results.values() for section in found["notes"].values() for note in section
    )
    sizes = {size for found in results.values() if "," in (size := images_in_words(found) or "")}
    other_sizes = [
        f"images were shown at {size}: numbers at the size of the training differ" for size in sizes
    ]
    notes = [*other_sizes, *found_notes, *problems]
    piece.content["notes"] = list(dict.fromkeys(notes))
    piece.content["headline"] = _headline(results)
    return piece


def _intervals(run: Path, results: dict[str, Any]) -> tuple[dict[str, dict[str, Interval]], list[str]]:
    """Intervals of each row, and why a row has none."""
    found, problems = {}, []
    for name in results:
        try:
            found[name] = bootstrap_intervals(run, suffix="_untrained" if name == _UNTRAINED else "")
        except SavedResultsError as error:
            problems.append(f"{name} is shown without intervals: {error}")
    return found, problems


def _headline(results: dict[str, Any]) -> list[dict[str, str | None]]:
    """The numbers to read first, each with the untrained network's."""
    chosen: tuple[tuple[str, str, str, int], ...] = (
        ("AUC", "classification", "auc", 3),
        ("signed CNR", "grounding", "cnr_signed", 2),
        ("mIoU", "grounding", "miou", 3),
        ("Recall", "retrieval", "recall", 3),
        ("MedR", "retrieval", "medr", 0),
        ("image-report Recall", tables.REPORTS, "image_report/recall", 3),
        ("image-report MedR", tables.REPORTS, "image_report/medr", 0),
    )
    is_classifier = tables.is_of_classifier(next(iter(results.values())))
    if is_classifier:
        names = (("AUC", "auc"), ("average precision", "average_precision"), ("accuracy", "acc"))
        chosen = tuple((label, tables.CLASSIFIER, key, 3) for label, key in names)
    tiles = []
    for label, section, key, digits in chosen:
        values = {
            name: tables.number(value_at(found["metrics"], f"{section}/{key}"), digits)
            for name, found in results.items()
        }
        if not set(values.values()) - {tables.NOTHING}:
            continue
        tiles.append(
            {
                "label": label,
                "value": values.get(_TRAINED, tables.NOTHING),
                "untrained": values.get(_UNTRAINED),
            }
        )
    return tiles


def _curves(run: Path) -> _Piece:
    file = run / "metrics.csv"
    if not file.is_file():
        missing = ["metrics.csv: no training curves; made by: python -m medclip_dcl fit"]
        return _Piece({"curves": []}, missing if _is_trained_here(run) else [])
    try:
        metrics = pd.read_csv(file)
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ReportError(f"{file} is not a readable table ({error})") from error
    if "step" not in metrics:
        raise ReportError(f"{file} has no column step; it was not written by `python -m medclip_dcl fit`")
    curves = charts.curves(metrics)
    return _Piece({"curves": curves}, [] if curves else ["metrics.csv holds no training figures yet"])


def _predictions(run: Path, results: dict[str, Any]) -> _Piece:
    piece = _Piece({"roc": None, "ranks": []})
    if _TRAINED not in results:
        return piece
    is_classifier = tables.is_of_classifier(results[_TRAINED])
    section = tables.CLASSIFIER if is_classifier else "classification"
    cases = _table(run / "predictions" / f"{section}.parquet", piece)
    by_finding = (results[_TRAINED]["metrics"].get(section) or {}).get("by_finding", {})
    aucs = {finding: found["auc"] for finding, found in by_finding.items()}
    if cases is not None and any(auc is not None for auc in aucs.values()):
        piece.content["roc"] = charts.roc(cases, aucs)
    if is_classifier:
        return piece
    by_run = {}
    boxes = tables.is_measured(results[_TRAINED], "retrieval")
    section = "retrieval" if boxes else tables.REPORTS
    for name, suffix in ((_TRAINED, ""), (_UNTRAINED, "_untrained")):
        if name in results and tables.is_measured(results[name], section):
            queries = _table(run / f"predictions{suffix}" / f"{section}.parquet", piece)
            if queries is not None:
                by_run[name] = queries if boxes else queries[queries["task"] == "image_report"]
    if _TRAINED in by_run:
        items, path = (
            (("box", "phrase"), section) if boxes else (("image", "report"), f"{section}/image_report")
        )
        levels = tables.chance_levels(results[_TRAINED])
        chance = {d: levels.get(f"{path}/{d}/MedR") for d in ("image_to_text", "text_to_image")}
        piece.content["ranks"] = charts.ranks(by_run, items, chance)
    return piece


def _class_probability(run: Path) -> _Piece:
    file = run / "class_probability.parquet"
    nothing: dict[str, Any] = {"eta": None, "truth": None, "most_probable": [], "least_probable": []}
    if not file.is_file():
        missing = [
            "class_probability.parquet: no η by sentence (a constant η has none; else `fit` writes it)"
        ]
        return _Piece(nothing, missing if _is_trained_here(run) else [])
    piece = _Piece(nothing)
    table = _table(file, piece)
    if table is None or table.empty:
        return piece
    order = "log_p" if "log_p" in table else "eta"
    ranked = table.sort_values([order, "sentence_id"], ascending=False, kind="stable")
    columns = [name for name in ("text", "n_reports", "log_p", "eta") if name in table]
    piece.content["most_probable"] = ranked.head(_N_SENTENCES)[columns].to_dict("records")
    piece.content["least_probable"] = ranked.tail(_N_SENTENCES)[columns][::-1].to_dict("records")
    piece.content["eta"] = charts.eta_histogram(table["eta"])
    if "rho" in table:
        piece.content["truth"] = charts.eta_against_truth(table)
    return piece


def _heat_maps(run: Path, results: dict[str, Any]) -> _Piece:
    files = {group: sorted((run / "figures").glob(f"grounding_{group}_*.png")) for group in _GROUPS}
    groups = [(group, [_embedded_image(file) for file in found]) for group, found in files.items() if found]
    is_grounded = any(tables.is_measured(found, "grounding") for found in results.values())
    missing = (
        ["figures/grounding_*.png: no heat maps; `test` draws them"] if is_grounded and not groups else []
    )
    drawn = run / "figures" / "embedding_map.png"
    return _Piece(
        {"heat_maps": groups, "embedding_map": _embedded_image(drawn) if drawn.is_file() else None}, missing
    )


def _facts(run: Path, results: dict[str, Any]) -> _Piece:
    config = run / "config.yaml"
    fit = run / "fit.json"
    shown = results.get(_TRAINED) or results.get(_UNTRAINED) or {}
    missing = []
    if not config.is_file() and _is_trained_here(run):
        missing.append("config.yaml: the configuration of the run is not there")
    if not fit.is_file() and _is_trained_here(run):
        missing.append(
            "fit.json: training has not come to its end; continue it with: python -m medclip_dcl fit"
        )
    timings = {f"test, {name}": found["timings"] for name, found in results.items()}
    return _Piece(
        {
            "config": config.read_text(encoding="utf-8") if config.is_file() else None,
            "dataset": shown.get("dataset"),
            "images": images_in_words(shown),
            "checkpoint": shown.get("checkpoint"),
            "precision": shown.get("precision"),
            "versions": shown.get("versions", {}),
            "protocol": json.dumps(shown["protocol"], indent=2, ensure_ascii=False) if shown else None,
            "timings": ({"fit": read_json(fit)} if fit.is_file() else {}) | timings,
        },
        missing,
    )


def _table(file: Path, piece: _Piece) -> pd.DataFrame | None:
    if not file.is_file():
        piece.missing.append(f"{file.parent.name}/{file.name} is not there; `test` writes it")
        return None
    try:
        return pd.read_parquet(file)
    except (OSError, ValueError) as error:
        raise ReportError(
            f"{file} is not a readable Parquet file ({error}); delete it and make it again"
        ) from error


def _embedded_image(file: Path) -> Markup:
    """A figure as a data URI, as JPEG to keep the report small."""
    buffer = io.BytesIO()
    with Image.open(file) as image:
        image.convert("RGB").save(buffer, "JPEG", quality=_JPEG_QUALITY, optimize=True)
    return Markup("data:image/jpeg;base64,") + Markup(base64.b64encode(buffer.getvalue()).decode("ascii"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the report."""
    parser = argparse.ArgumentParser(
        prog="python -m medclip_dcl.report",
        description="Write RUN/report.html from the run folder alone.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, e.g. runs/demo")
    try:
        print(write_report(parser.parse_args(arguments).run))
    except SavedResultsError as error:
        print(f"medclip_dcl.report: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
