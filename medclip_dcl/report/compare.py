"""Comparison of runs: ``medclip-dcl compare RUN1 RUN2 ...``.

Tables in the shape of SSD's tables 1, 3, 4 and 5 with bootstrap intervals or, of several seeds, means with t intervals.
The files hold numbers, names of runs and the protocol, no text of a report.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medclip_dcl.common.files import write_json, write_text
from medclip_dcl.report import charts, contrasts, tables
from medclip_dcl.report.draws import N_DRAWS, Estimate, TestedRun, require_same_cases, units_of
from medclip_dcl.report.options import Compare
from medclip_dcl.report.page import render_template
from medclip_dcl.runs import saved

FILES = ("comparison.md", "comparison.tex", "comparison.html", "comparison.json")

_PHANTOM = (
    "The pictures are drawn and the reports are made up: the numbers say how runs compare on the phantom, nothing about"
    " radiographs of patients, and must not be set against the published rows."
)


@dataclass(frozen=True)
class Comparison:
    """Runs that were tested in the same way, and the table of their numbers and differences.

    `sides` are the rows of the tables: runs that differ in the seed alone by label, of one run by its name.
    """

    rows: list[TestedRun]
    sides: dict[str, list[TestedRun]]
    baseline: str | None
    table: contrasts.Contrasts
    n_draws: int

    @property
    def differences(self) -> dict[str, dict[str, Estimate]]:
        """Differences from the baseline, by side and path."""
        return {side: found for (side, minus), found in self.table.items() if minus}

    @property
    def trained(self) -> list[TestedRun]:
        """The rows of trained networks."""
        return [row for row in self.rows if not row.suffix]


def compare(
    runs: Sequence[Path],
    *,
    baseline: str | None = None,
    names: Sequence[str] | None = None,
    untrained: bool = False,
    n_draws: int = N_DRAWS,
) -> Comparison:
    """Read runs, check that they compare, and compare those that differ in more than the seed.

    Args:
        runs: run folders.
        baseline: name of a run or of a row, or one of the folders; None: no differences.
        names: of the runs; default: the folders' names.
        untrained: add the untrained network of each run, once if all have the same weights.
        n_draws: bootstrap draws of patients, the same for all rows.
    """
    rows = _read(runs, names, untrained)
    sides = contrasts.sides_of(rows)
    chosen = None if baseline is None else contrasts.side_named(sides, baseline)
    return Comparison(rows, sides, chosen, contrasts.compared(sides, chosen, n_draws=n_draws), n_draws)


def tables_of(comparison: Comparison) -> list[tables.Table]:
    """Tables of what was measured, with differences from the baseline and the paper's rows."""
    sides = comparison.sides.items()
    found = tables.filled(
        {label: tables.Shown(runs[0].tested, comparison.table[label, ""]) for label, runs in sides}
    )
    for table in found:
        if comparison.differences:
            table.rows.append(tables.Row(f"paired difference from {comparison.baseline}", "divider"))
        for name, differences in comparison.differences.items():
            cells = [_difference_cell(differences.get(one.path), one.digits) for one in table.columns]
            table.rows.append(tables.Row(f"{name} − {comparison.baseline}", "difference", cells))
    return found


def write_comparison(comparison: Comparison, output: Path) -> str:
    """Write comparison.md (and return it), .tex, .html and .json; the same runs and seed give the same bytes."""
    first = comparison.rows[0].tested
    explanation = contrasts.explain(
        comparison.sides, comparison.baseline, units_of(first), comparison.n_draws
    )
    settings = _settings(comparison)
    found = {side: tables.aucs(comparison.table[side, ""]) for side in comparison.sides}
    content = {
        "names": [label for label, runs in comparison.sides.items() if not runs[0].suffix],
        "data": tables.describe_data(first),
        "phantom": _PHANTOM if first["dataset"].get("phantom") else "",
        "method": explanation,
        "notes": _notes(comparison),
        "reason": tables.why_left_out(first),
        "forest": charts.forests({"AUC by finding": found}),
        "tables": tables_of(comparison),
        "facts": _facts(comparison),
        "settings": settings,
        "protocol": json.dumps(first["protocol"], indent=2, ensure_ascii=False),
    }
    for kind in ("md", "tex", "html"):
        write_text(render_template(f"compare.{kind}", content), output / f"comparison.{kind}")
    write_json(_json(comparison, settings, explanation), output / "comparison.json")
    return (output / "comparison.md").read_text(encoding="utf-8")


def _runs_of(folder: Path) -> list[Path]:
    """The finished runs of a study's folder, in the order of its grid; any other folder itself."""
    if not (table := folder / "results.parquet").is_file():
        return [folder]
    return [folder / "runs" / name for name in saved.read_parquet(table)["run"].unique()]


def _read(folders: Sequence[Path], names: Sequence[str] | None, untrained: bool) -> list[TestedRun]:
    """Rows that were tested alike, those of trained networks first."""
    own = (folder.resolve().name for folder in folders)
    # A run of a study is named by its levels.
    named = [re.sub(r",?\w+=", " ", name).strip() if "," in name else name for name in own]
    named = named if names is None else [x.strip() for x in names]
    if len(named) != len(folders) or len({*named, "", contrasts.UNTRAINED}) != len(named) + 2:
        raise saved.SavedResultsError(
            f"--names: expected {len(folders)} names that differ from each other and from {contrasts.UNTRAINED}, found "
            f"{', '.join(map(repr, named))}; give them by commas, and each run once"
        )
    trained = [TestedRun(folder, "", name) for folder, name in zip(folders, named, strict=True)]
    others = [TestedRun(row.folder, "_untrained", f"{row.name}, {contrasts.UNTRAINED}") for row in trained]
    rows = [*trained, *others] if untrained else trained
    for row in rows:
        row.require_prepared_set()
        _require_same_test(rows[0], row)
    if not untrained:
        return trained
    others = list({row.tested["checkpoint"]["weights"]: row for row in others[::-1]}.values())[::-1]
    if len(others) == 1:
        others[0].name = contrasts.UNTRAINED
    return [*trained, *others]


def _require_same_test(first: TestedRun, other: TestedRun) -> None:
    """Refuse numbers of different meaning; an evaluation without numbers, such as a figure, may differ.

    Retrieval of reports is not compared with a run that has none: no sentence was tested.
    """
    measured = {name for row in (first, other) for name, found in row.tested["metrics"].items() if found}
    # Tests of an earlier version have no scores by single prompts.
    may_lack = (section for section in (tables.REPORTS, "prompts") if section in measured)
    measured -= {x for x in may_lack if not all(x in row.tested["metrics"] for row in (first, other))}
    for part, keys in (("dataset", {"fingerprint"}), ("protocol", measured), ("counts", measured)):
        a, b = ({key: row.tested[part].get(key) for key in keys} for row in (first, other))
        if differences := saved.differing_settings(a, b, part):
            key = min(differences)
            here, there = map(_short, differences[key])
            raise saved.SavedResultsError(
                f"{other.file} cannot be compared with {first.file}: {key} is {there} there and {here} here;"
                " test both with the same options on the same prepared set"
            )
    require_same_cases(other.predictions, first.predictions)


def _short(value: Any) -> str:
    text = "not given" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _difference_cell(difference: Estimate | None, digits: int) -> tables.Cell:
    """One decimal more than the numbers themselves have; ranks as they are."""
    if difference is None or difference.value is None:
        return tables.Cell(tables.NOTHING)
    cell = tables.interval_cell(difference, digits + 1 if digits else 0, tables.signed)
    # Over patients an interval says nothing about another training.
    return cell._replace(
        text=cell.text + "*" * (difference.over == "seeds" and contrasts.is_marked(difference))
    )


def _facts(comparison: Comparison) -> tables.Table:
    facts = [
        (row.name, {"run folder": row.folder.resolve().name, **tables.facts_of(row.tested)})
        for row in comparison.rows
    ]
    fingerprint = comparison.rows[0].tested["dataset"].get("fingerprint")
    return tables.facts_table("Networks", facts, f"All on the prepared set with fingerprint {fingerprint}.")


def _without_place(value: Any) -> Any:
    is_place = isinstance(value, str) and Path(value).is_absolute()
    return f".../{Path(value).name}" if is_place else value


def _settings(comparison: Comparison) -> tables.Table:
    """Dotted name of each setting that differs between the runs' config.yaml, and its value in each run."""
    configs = [row.config for row in comparison.trained]
    known = [config for config in configs if config is not None]
    names = {name for config in known[1:] for name in saved.differing_settings(known[0], config)}
    rows = []
    for name in sorted(names):
        values = (_without_place(saved.setting(config, name)) for config in configs)
        rows.append(tables.Row(name, "text", [tables.Cell(_short(value).strip('"')) for value in values]))
    unknown = [row.name for row in comparison.trained if row.config is None]
    note = f"No config.yaml, so that the settings are not known: {', '.join(unknown)}." if unknown else ""
    columns = [tables.Column(row.name) for row in comparison.trained]
    return tables.Table("Settings that differ", columns, rows, note or ("" if rows else "None."))


def _notes(comparison: Comparison) -> list[str]:
    sections = (section for row in comparison.rows for section in row.tested["notes"].values())
    notes = [note for section in sections for note in section]
    precisions = sorted({str(row.tested["precision"]) for row in comparison.rows})
    if len(precisions) > 1:
        notes.append(f"the networks were tested in different precisions: {', '.join(precisions)}")
    sizes = dict.fromkeys(saved.describe_image_size(row.tested) for row in comparison.rows)
    if len(sizes) > 1 or any("," in size for size in sizes):
        notes.append(f"sizes of the images differ: {', '.join(sizes)}")
    notes += [x for row in comparison.rows if (x := saved.other_preparation(**row.tested["images"]))]
    without = [row.name for row in comparison.rows if tables.REPORTS not in row.tested["metrics"]]
    if 0 < len(without) < len(comparison.rows):
        notes.append(f"no retrieval of reports, because no sentence was tested: {', '.join(without)}")
    return list(dict.fromkeys(notes))


def _json(comparison: Comparison, settings: tables.Table, explanation: str) -> dict[str, Any]:
    """All numbers, also those that the tables leave out: ACC per finding, categories, differences of the variants."""
    first = comparison.rows[0].tested
    rows = {
        label: {
            "folders": [row.folder.resolve().name for row in of_label],
            "checkpoints": [row.tested["checkpoint"] for row in of_label],
            "intervals": {k: v._asdict() for k, v in comparison.table[label, ""].items()},
            "differences": {k: v._asdict() for k, v in comparison.differences.get(label, {}).items()},
        }
        for label, of_label in comparison.sides.items()
    }
    return {
        "rows": rows,
        "baseline": comparison.baseline,
        "method": explanation,
        "settings_that_differ": {row.label: [cell.text for cell in row.cells] for row in settings.rows},
        **{key: first[key] for key in ("dataset", "protocol", "counts")},
    }


def run(options: Compare) -> None:
    """Write the comparison of runs, and print it as Markdown."""
    # Fail before minutes of work.
    if options.output.is_file():
        raise saved.SavedResultsError(f"--output: expected a folder, found the file {options.output}")
    names = options.names.split(",") if options.names is not None else None
    runs = [run for folder in options.runs for run in _runs_of(folder)]
    comparison = compare(runs, baseline=options.baseline, names=names, untrained=options.untrained)
    print(write_comparison(comparison, options.output), end="")
    print(f"written: {', '.join(str(options.output / name) for name in FILES)}", file=sys.stderr)
