"""Runs side by side: ``python -m medclip_dcl.report.compare RUN1 RUN2 ...``.

Tables in the shape of SSD's tables 1, 3, 4 and 5 with bootstrap intervals, paired differences from a baseline, the
paper's own rows where the set is the paper's, and the settings in which the runs differ, as Markdown, LaTeX, HTML and
JSON. Runs that were not tested in the same way on the same cases are
refused. No text of a report is read out: the files hold numbers, names of runs and the protocol.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medclip_dcl.files import write_json, write_text
from medclip_dcl.report.intervals import (
    LEVEL,
    N_DRAWS,
    POLICY,
    Difference,
    Interval,
    Numbers,
    Predictions,
    bootstrap_numbers,
    differences_of,
    intervals_of,
    method,
    read_predictions,
    require_same_cases,
)
from medclip_dcl.report.page import page_environment
from medclip_dcl.report.saved_results import (
    SavedResultsError,
    command_of_test,
    differing_settings,
    images_in_words,
    read_config,
    read_results,
    setting,
)
from medclip_dcl.report.table_formats import markdown_text, to_latex, to_markdown
from medclip_dcl.report.tables import (
    NOTHING,
    PLAIN,
    PUBLISHED,
    REPORTS,
    UNTRAINED,
    Cell,
    Layout,
    Row,
    Table,
    data_in_words,
    filled,
    layouts,
    why_left_out,
)

FORMAT_VERSION = 1
OUTPUT = Path("runs/comparison")
FILES = ("comparison.md", "comparison.tex", "comparison.html", "comparison.json")

_DIFFERENCE = "difference"
_PHANTOM = (
    "The pictures are drawn and the reports are made up: the numbers say how runs compare on the phantom, nothing about"
    " radiographs of patients, and must not be set against the published rows."
)
_LONGEST = 80
"""Characters of a value in an error message."""


class CompareError(SavedResultsError):
    """The runs cannot be laid side by side; the message says why and what to do."""


@dataclass(frozen=True)
class Tested:
    """A row of the tables: a run's trained or untrained network.

    Attributes:
        name: label of the row.
        run: the run folder.
        suffix: "" or "_untrained".
        results: its results.json.
        predictions: what the numbers were computed from.
    """

    name: str
    run: Path
    suffix: str
    results: Mapping[str, Any]
    predictions: Predictions


@dataclass(frozen=True)
class Comparison:
    """Runs that were tested in the same way, with the uncertainty of their numbers.

    Attributes:
        rows: in the order of the tables.
        baseline: name of the row that is subtracted from the others; None: no differences.
        intervals: name -> path -> interval.
        differences: name of every row but the baseline -> path -> difference.
        n_draws: bootstrap draws.
        seed: of the draws.
    """

    rows: list[Tested]
    baseline: str | None
    intervals: dict[str, dict[str, Interval]]
    differences: dict[str, dict[str, Difference]]
    n_draws: int
    seed: int


def compare(
    runs: Sequence[Path],
    *,
    baseline: str | None = None,
    names: Sequence[str] | None = None,
    untrained: bool = False,
    n_draws: int = N_DRAWS,
    seed: int = 0,
) -> Comparison:
    """Read runs, make sure that they may be compared, and resample their patients.

    Args:
        runs: run folders.
        baseline: a row's name or one of the folders; None: no differences.
        names: of the rows; default: the folders' names.
        untrained: also the untrained network of each run, once where all have the same weights.
        n_draws: bootstrap draws of patients, the same for all rows.
        seed: of the draws.

    Raises:
        CompareError: runs of other protocols, data or counts, the difference named; unfit names; no such baseline.
        SavedResultsError: a run that is not tested, or whose files cannot be read.
    """
    rows = _read(runs, _names(runs, names), untrained)
    for row in rows[1:]:
        _require_same_test(rows[0], row)
    chosen = None if baseline is None else _baseline(rows, baseline)
    numbers: dict[str, Numbers] = {
        row.name: bootstrap_numbers(row.predictions, n_draws, seed) for row in rows
    }
    differences = {
        name: differences_of(numbers[name], numbers[chosen])
        for name in numbers
        if chosen is not None and name != chosen
    }
    intervals = {name: intervals_of(found) for name, found in numbers.items()}
    return Comparison(rows, chosen, intervals, differences, n_draws, seed)


def tables(comparison: Comparison, published: bool = True) -> list[Table]:
    """Tables 1, 3, 4, 5 and those of image-report retrieval, of what was measured, or those of classifiers.

    Args:
        comparison: of :func:`compare`.
        published: with the rows of the paper; those of another set are folded.
    """
    results = {row.name: row.results for row in comparison.rows}
    found = []
    for layout in layouts([row.results for row in comparison.rows]):
        table = filled(
            layout if published else replace(layout, published={}),
            results,
            comparison.intervals,
            paper_number,
        )
        found.append(_with_differences(table, layout, comparison))
    return found


def write_comparison(comparison: Comparison, output: Path, published: bool = True) -> str:
    """Write comparison.md, .tex, .html and .json; the same runs and seed give the same bytes.

    Returns:
        The Markdown.
    """
    shown = tables(comparison, published)
    markdown = _markdown(comparison, shown, published)
    write_text(markdown, output / "comparison.md")
    write_text(_latex(comparison, shown, published), output / "comparison.tex")
    write_text(_html(comparison, shown, published), output / "comparison.html")
    write_json(_json(comparison), output / "comparison.json")
    return markdown


def paper_number(value: Any, digits: int) -> str:
    """A number as the paper prints it: no zero before the point, ranks whole or halves; a dash for None."""
    if value is None:
        return NOTHING
    if digits == 0:
        return f"{round(2 * value) / 2:,.1f}".removesuffix(".0")
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        text = text.removeprefix("-")
    return text.replace("0.", ".", 1) if text.lstrip("-").startswith("0.") else text


def _names(runs: Sequence[Path], names: Sequence[str] | None) -> list[str]:
    folders = [run.resolve() for run in runs]
    twice = [str(run) for run, folder in zip(runs, folders, strict=True) if folders.count(folder) > 1]
    if twice:
        raise CompareError(f"{twice[0]} is given twice; give each run once")
    found = [name.strip() for name in names] if names is not None else [folder.name for folder in folders]
    if len(found) != len(runs):
        raise CompareError(f"--names needs one name for each of {len(runs)} runs: found {len(found)}")
    unfit = [name for name in found if not name or found.count(name) > 1]
    if unfit:
        raise CompareError(
            f"the rows need names that differ: found {unfit[0]!r} twice or empty; give them by --names a,b"
        )
    return found


def _read(runs: Sequence[Path], names: Sequence[str], untrained: bool) -> list[Tested]:
    trained = [_tested(run, name, "") for run, name in zip(runs, names, strict=True)]
    if not untrained:
        return trained
    others = [
        _tested(run, f"{name}, {UNTRAINED}", "_untrained") for run, name in zip(runs, names, strict=True)
    ]
    weights = {row.results["checkpoint"]["weights"] for row in others}
    for row in others:
        _require_same_test(trained[0], row)
    if len(weights) == 1:
        others = [replace(others[0], name=UNTRAINED)]
    clash = {row.name for row in trained} & {row.name for row in others}
    if clash:
        raise CompareError(f"a run is called {clash.pop()!r} like an untrained row; name the runs by --names")
    return [*trained, *others]


def _tested(run: Path, name: str, suffix: str) -> Tested:
    if not run.is_dir():
        raise CompareError(f"{run} does not exist; give the folder of a run, such as runs/demo")
    results = read_results(run, suffix)
    if results is None:
        untrained = "; it needs checkpoints/untrained.ckpt" if suffix else ""
        raise CompareError(
            f"{run}/results{suffix}.json is not there; made by: {command_of_test(run)}{untrained}"
        )
    return Tested(name, run, suffix, results, read_predictions(run, suffix))


def _require_same_test(first: Tested, other: Tested) -> None:
    """Refuse numbers that mean different things; an evaluation without numbers, such as a picture, may differ.

    A run that was tested before there was a retrieval of reports is compared in the rest.
    """
    measured = {
        section for row in (first, other) for section, found in row.results["metrics"].items() if found
    }
    if not all(REPORTS in row.results["metrics"] for row in (first, other)):
        measured -= {REPORTS}
    for part, keys in (("dataset", {"fingerprint"}), ("protocol", measured), ("counts", measured)):
        a, b = ({key: row.results[part].get(key) for key in keys} for row in (first, other))
        difference = next(_differences(a, b, part), None)
        if difference:
            key, mine, theirs = difference
            files = [f"{row.run}/results{row.suffix}.json" for row in (first, other)]
            raise CompareError(
                f"{files[1]} cannot be compared with {files[0]}: {key} is {theirs} there and {mine} here;"
                " test both with the same options on the same prepared set"
            )
    require_same_cases(other.predictions, first.predictions)


def _differences(a: Any, b: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """(path, value in a, value in b) wherever two parts of results.json differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}):
            yield from _differences(a.get(key), b.get(key), f"{path}.{key}")
    elif a != b:
        yield path, _short(a), _short(b)


def _short(value: Any) -> str:
    text = "not given" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _baseline(rows: Sequence[Tested], baseline: str) -> str:
    for row in rows:
        is_folder = not row.suffix and Path(baseline).resolve() == row.run.resolve()
        if row.name == baseline or is_folder:
            return row.name
    raise CompareError(
        f"--baseline {baseline} is none of the rows; give one of: {', '.join(row.name for row in rows)}"
        " (the untrained ones come with --untrained)"
    )


def _with_differences(table: Table, layout: Layout, comparison: Comparison) -> Table:
    """Rows of differences from the baseline, above the published ones."""
    if comparison.baseline is None:
        return table
    rows = [
        Row(
            f"{name} − {comparison.baseline}",
            _DIFFERENCE,
            [_difference_cell(found.get(column.path), column.digits) for column in layout.columns],
        )
        for name, found in comparison.differences.items()
    ]
    own = [row for row in table.rows if row.kind != PUBLISHED]
    divider = f"paired difference from {comparison.baseline}; * the interval excludes 0"
    return replace(
        table,
        rows=[*own, *rows, *table.rows[len(own) :]],
        dividers={**table.dividers, _DIFFERENCE: divider},
    )


def _difference_cell(difference: Difference | None, digits: int) -> Cell:
    """One decimal more than the numbers themselves have; ranks as they are."""
    if difference is None or difference.value is None:
        return Cell(NOTHING)
    places = digits + 1 if digits else 0
    if difference.low is None:
        return Cell(_signed(difference.value, places))
    mark = "*" if difference.excludes_zero else ""
    low, high = (_signed(bound, places) for bound in (difference.low, difference.high))
    return Cell(_signed(difference.value, places), f"[{low}, {high}]{mark}")


def _signed(value: float | None, digits: int) -> str:
    text = paper_number(value, digits)
    is_zero = not any(character in "123456789" for character in text)
    return text if is_zero or text.startswith("-") else f"+{text}"


def _facts(comparison: Comparison) -> Table:
    """Which networks the rows are."""
    rows = [
        Row(
            row.name,
            PLAIN,
            [
                Cell(str(text if text is not None else NOTHING))
                for text in (
                    row.run.resolve().name,
                    row.results["checkpoint"]["file"],
                    row.results["checkpoint"]["weights"],
                    _image_size(row),
                    row.results["precision"],
                    row.results["versions"].get("medclip_dcl"),
                )
            ],
        )
        for row in comparison.rows
    ]
    fingerprint = comparison.rows[0].results["dataset"].get("fingerprint")
    return Table(
        "Networks",
        ["run folder", "checkpoint", "weights", "images shown at", "precision", "medclip_dcl"],
        rows,
        f"All on the prepared set with fingerprint {fingerprint}.",
    )


def _image_size(row: Tested) -> str | None:
    """Side of the images that the test showed; of runs tested before it was recorded, that of the training."""
    if known := images_in_words(row.results):
        return known
    size = setting(read_config(row.run), "data.init_args.image_size")
    return None if size is None else f"{size} pixels"


def settings_that_differ(comparison: Comparison) -> dict[str, list[Any]]:
    """Dotted name of each setting in which the runs' config.yaml differ -> its value in each run, in their order.

    A path is shown by its last part.
    """
    configs = [read_config(row.run) for row in comparison.rows if not row.suffix]
    known = [config for config in configs if config is not None]
    names = {name for config in known[1:] for name in differing_settings(known[0], config)}
    return {name: [_without_place(setting(config, name)) for config in configs] for name in sorted(names)}


def _without_place(value: Any) -> Any:
    is_place = isinstance(value, str) and Path(value).is_absolute()
    return f".../{Path(value).name}" if is_place else value


def _settings(comparison: Comparison) -> Table:
    names = [row.name for row in comparison.rows if not row.suffix]
    rows = [
        Row(name, PLAIN, [Cell(_short(value).strip('"')) for value in values])
        for name, values in settings_that_differ(comparison).items()
    ]
    without = [row.name for row in comparison.rows if not row.suffix and read_config(row.run) is None]
    note = f"No config.yaml, so that the settings are not known: {', '.join(without)}." if without else ""
    return Table("Settings that differ", names, rows, note if rows or without else "None.")


def _explanation(comparison: Comparison) -> str:
    text = method(comparison.n_draws, comparison.seed, LEVEL)
    if comparison.baseline is not None:
        text += (
            " Differences are paired: each draw takes the same patients in both runs; * marks an interval that excludes"
            " 0, not corrected for the number of comparisons."
        )
    return text


def _notes(comparison: Comparison) -> list[str]:
    sections = (section for row in comparison.rows for section in row.results["notes"].values())
    notes = [note for section in sections for note in section]
    precisions = sorted({str(row.results["precision"]) for row in comparison.rows})
    if len(precisions) > 1:
        notes.append(f"the networks were tested in different precisions: {', '.join(precisions)}")
    sizes = dict.fromkeys(str(_image_size(row)) for row in comparison.rows)
    if len(sizes) > 1 or any("," in size for size in sizes):
        notes.append(f"sizes of the images differ: {', '.join(sizes)}")
    if names := settings_that_differ(comparison):
        notes.append(f"the settings of the runs differ in {', '.join(names)} (table below)")
    without = [row.name for row in comparison.rows if REPORTS not in row.results["metrics"]]
    if 0 < len(without) < len(comparison.rows):
        notes.append(
            f"tested before there was a retrieval of reports: {', '.join(without)}; test them again for these numbers"
        )
    return list(dict.fromkeys(notes))


def _is_phantom(comparison: Comparison) -> bool:
    return bool(comparison.rows[0].results["dataset"].get("phantom"))


def _left_out(comparison: Comparison, published: bool) -> str:
    """Why there are no published rows, where they were asked for."""
    return why_left_out(comparison.rows[0].results) if published else ""


def _markdown(comparison: Comparison, shown: Sequence[Table], published: bool) -> str:
    head = [f"Data: {markdown_text(data_in_words(comparison.rows[0].results))}.", _explanation(comparison)]
    if _is_phantom(comparison):
        head.append(f"**Phantom numbers are not patient numbers.** {_PHANTOM}")
    if notes := _notes(comparison):
        head.append("\n".join(f"- {note}" for note in notes))
    if reason := _left_out(comparison, published):
        head.append(f"{reason} They are left out.")
    every = [*shown, _facts(comparison), _settings(comparison)]
    return "\n\n".join([*head, *(to_markdown(table).rstrip() for table in every)]) + "\n"


def _latex(comparison: Comparison, shown: Sequence[Table], published: bool) -> str:
    data = data_in_words(comparison.rows[0].results)
    head = ["% \\usepackage{booktabs}", f"% Data: {data}", f"% {_explanation(comparison)}"]
    if reason := _left_out(comparison, published):
        head.append(f"% {reason} They are left out.")
    if names := settings_that_differ(comparison):
        head.append(f"% Settings that differ: {', '.join(names)}")
    if _is_phantom(comparison):
        head.append(f"% Phantom numbers are not patient numbers. {_PHANTOM}")
    return "\n".join([*head, "", *(to_latex(table) for table in shown)])


def _html(comparison: Comparison, shown: Sequence[Table], published: bool) -> str:
    first = comparison.rows[0].results
    return (
        page_environment()
        .get_template("compare.html")
        .render(
            names=[row.name for row in comparison.rows if not row.suffix],
            data=data_in_words(first),
            reason=_left_out(comparison, published),
            is_phantom=_is_phantom(comparison),
            phantom_note=_PHANTOM,
            method=_explanation(comparison),
            notes=_notes(comparison),
            tables=shown,
            facts=_facts(comparison),
            settings=_settings(comparison),
            protocol=json.dumps(first["protocol"], indent=2, ensure_ascii=False),
        )
    )


def _json(comparison: Comparison) -> dict[str, Any]:
    """Everything, also what the tables do not show: ACC per finding, categories, differences of the variants."""
    first = comparison.rows[0].results
    rows = {
        row.name: {
            "folder": row.run.resolve().name,
            "checkpoint": row.results["checkpoint"],
            "intervals": {k: v._asdict() for k, v in comparison.intervals[row.name].items()},
            "differences": {k: v._asdict() for k, v in comparison.differences.get(row.name, {}).items()},
        }
        for row in comparison.rows
    }
    return {
        "format_version": FORMAT_VERSION,
        "rows": rows,
        "baseline": comparison.baseline,
        "settings_that_differ": settings_that_differ(comparison),
        "bootstrap": {
            "unit": "patient",
            "interval": "percentile",
            "level": LEVEL,
            "draws": comparison.n_draws,
            "seed": comparison.seed,
            "policy": POLICY,
        },
        **{key: first[key] for key in ("dataset", "protocol", "counts")},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m medclip_dcl.report.compare",
        description="Lay tested runs side by side in the shape of SSD's tables 1, 3, 4 and 5, with bootstrap intervals"
        f" by patient; writes {', '.join(FILES)} and prints the Markdown.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a tested run")
    parser.add_argument(
        "--baseline",
        metavar="RUN",
        help="folder or name of the row from which the others' differences are taken",
    )
    parser.add_argument(
        "--names", metavar="A,B", help="names of the rows, by commas (default: the folders' names)"
    )
    parser.add_argument("--untrained", action="store_true", help="add the untrained network of each run")
    parser.add_argument("--draws", type=int, default=N_DRAWS, help="bootstrap draws (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws, 0 or more (default: %(default)s)")
    parser.add_argument("--no_published", action="store_true", help="leave the paper's rows out")
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, metavar="FOLDER", help="where to write (default: %(default)s)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the comparison; errors of the user's making are one line and status 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.seed < 0:
        parser.error(f"--seed must be 0 or more: found {options.seed}")
    try:
        if options.output.exists() and not options.output.is_dir():
            raise CompareError(f"--output {options.output} is a file; give a folder")
        comparison = compare(
            options.runs,
            baseline=options.baseline,
            names=options.names.split(",") if options.names is not None else None,
            untrained=options.untrained,
            n_draws=options.draws,
            seed=options.seed,
        )
        print(write_comparison(comparison, options.output, published=not options.no_published), end="")
    except SavedResultsError as error:
        print(f"medclip_dcl.report.compare: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from error
    print(f"written: {', '.join(str(options.output / name) for name in FILES)}", file=sys.stderr)


if __name__ == "__main__":
    main()
