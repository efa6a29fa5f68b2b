"""The experiment file: a grid of runs, what is compared, and what is reported. Read and checked without Lightning."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from medclip_dcl.command.cli import lightning_cli
from medclip_dcl.common.command_line import nearest, unknown_key
from medclip_dcl.common.errors import MissingFileError, UserError
from medclip_dcl.common.files import read_yaml
from medclip_dcl.experiments.grid import FACTS, PATHS, VALIDATION, Experiment, Level, Outcome

COMMANDS = ("fit", "validate", "test", "predict")
FIGURES: dict[str, dict[str, bool]] = {
    "lines": {
        **{"name": True, "x": True, "y": False, "across": False},
        **{"levels": False, "where": False, "title": False, "log": False},
    },
    "differences": {
        **{"name": True, "x": True, "y": True},
        **{"levels": False, "where": False, "title": False, "log": False},
    },
    "map": {"name": True, "file": False, "where": True, "title": False},
}
"""Kind of a figure -> its keys, True where they are required."""
_KEYS = (
    "folder",
    "commands",
    "configs",
    "settings",
    "axes",
    "pairs",
    "compare",
    "outcomes",
    "tables",
    "figures",
    "choose",
    "patients",
    "checkpoints",
)
_OUTCOME_KEYS = ("path", "percent", "higher_is_better", "digits")
_OUTCOME_TYPES = (
    ("percent", (bool,), "true or false"),
    ("higher_is_better", (bool, type(None)), "true, false or null"),
    ("digits", (int,), "a whole number"),
)
# They become names of folders and of files.
_NAME = re.compile(r"[^\W_][\w.+ -]*")
_COLUMNS = {
    *("cell", "outcome", "value", *FACTS),
    *("x", "n", "mean", "sd", "low", "high", "p", "p_holm", "difference", "value_reference"),
    *("levels", "patients_low", "patients_high"),
}
"""Columns of results.parquet and of the tables made from it, which no axis may be called."""


def read_experiment(file: Path) -> Experiment:
    """Read and check an experiment file.

    Raises:
        MissingFileError: the file, or a configuration that it names, does not exist.
        UserError: names the first mistake of the file.
    """
    given, files = _over_base(file)
    where = str(file)
    for key in ("folder", "axes"):
        if not given.get(key):
            raise UserError(f"{where}: {key} is missing")
    commands = tuple(_list(given.get("commands", ["fit", "test"])))
    if unknown := [name for name in commands if name not in COMMANDS]:
        raise UserError(f"{where}: commands: expected some of {', '.join(COMMANDS)}, found {unknown[0]}")
    axes = {
        str(name): _levels(axis, f"{where}: axes.{name}", file.parent)
        for name, axis in _mapping(given["axes"], f"{where}: axes").items()
    }
    _check_separate(given["axes"], where)
    compare = given.get("compare") or {}
    _check_keys(compare, ("axis", "reference"), f"{where}: compare")
    pairs, compared = (
        None if name is None else str(name) for name in (given.get("pairs"), compare.get("axis"))
    )
    for key, axis in (("pairs", pairs), ("compare.axis", compared)):
        if axis is not None and axis not in axes:
            raise UserError(f"{where}: {key}: there is no axis {axis}; the axes are {', '.join(axes)}")
    if pairs is not None and pairs == compared:
        raise UserError(f"{where}: {pairs} is both paired and compared; give two axes")
    levels = {} if compared is None else {level.name: level for level in axes[compared]}
    if levels and str(compare.get("reference")) not in levels:
        found = compare.get("reference")
        raise UserError(f"{where}: compare.reference: expected one of {', '.join(levels)}, found {found}")
    outcomes = {
        str(name): _outcome(one, f"{where}: outcomes.{name}")
        for name, one in _mapping(given.get("outcomes") or {}, f"{where}: outcomes").items()
    }
    if not all(one.is_of_validation for one in outcomes.values()) and "test" not in commands:
        raise UserError(
            f"{where}: outcomes are read from results.json, which `test` writes: add it to commands (those of the last "
            f"validation of training begin with {VALIDATION})"
        )
    choice, choice_axis = _choice(given.get("choose"), f"{where}: choose")
    if choice_axis is not None:
        _among(
            choice_axis,
            [axis for axis in axes if axis != pairs],
            f"{where}: choose.for_each",
            "axis to choose at",
        )
    if choice is not None:
        _among(choice, outcomes, f"{where}: choose", "outcome")
        if outcomes[choice].higher_is_better is None:
            raise UserError(f"{where}: outcomes.{choice}: choose needs higher_is_better: true or false")
        if not outcomes[choice].is_of_validation:
            raise UserError(
                f"{where}: choose: {choice} is an outcome of the test, whose patients must not decide; take one of the "
                f"validation, whose path begins with {VALIDATION}"
            )
    if not isinstance(has_patients := given.get("patients", False), bool):
        raise UserError(f"{where}: patients: expected true or false, found {has_patients!r}")
    if has_patients and all(one.is_of_validation for one in outcomes.values()):
        raise UserError(
            f"{where}: patients: only outcomes of the test have intervals over patients; there are none"
        )
    keeping = given.get("checkpoints", "keep")
    if keeping not in ("keep", "delete"):
        raise UserError(f"{where}: checkpoints: expected keep or delete, found {keeping}")
    experiment = Experiment(
        files=files,
        folder=Path(str(given["folder"])),
        commands=commands,
        arguments=_arguments(given, where, file.parent),
        axes=axes,
        pairs=pairs,
        compared=compared,
        reference=levels.get(str(compare.get("reference"))),
        outcomes=outcomes,
        tables=tuple(_with_lists(one, ("outcomes",)) for one in given.get("tables") or ()),
        figures=tuple(_with_lists(one, ("across", "levels")) for one in given.get("figures") or ()),
        choice=choice,
        choice_axis=choice_axis,
        has_patients=has_patients,
        keeps_checkpoints=keeping == "keep",
    )
    _check_files(experiment)
    if choice is not None:
        _check_searched(experiment, f"{where}: choose")
    for place, table in enumerate(experiment.tables):
        _check_table(experiment, table, f"{where}: tables.{place}")
    for place, figure in enumerate(experiment.figures):
        _check_figure(experiment, figure, f"{where}: figures.{place}")
    if len({figure["name"] for figure in experiment.figures}) < len(experiment.figures):
        raise UserError(f"{where}: figures: two have the same name")
    return experiment


def _over_base(file: Path, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """The keys of a file over those of its `base`, whose settings are merged and axes taken by name; all files read."""
    given = read_yaml(file)
    _check_keys(given, (*_KEYS, "base"), str(file))
    if "base" not in given:
        return given, (*above, file)
    name = str(given.pop("base"))
    if Path(name).name != name or name in ("", "..") or file.with_name(name) in (*above, file):
        raise UserError(f"{file}: base: expected the name of another file in the same folder, found {name!r}")
    base, files = _over_base(file.with_name(name), (*above, file))
    of_base = f"{file.with_name(name)}"
    axes = {str(key): axis for key, axis in _mapping(base.get("axes") or {}, f"{of_base}: axes").items()}
    if "axes" in given:
        found = _mapping(given["axes"], f"{file}: axes")
        axes = {str(key): _axis_of_base(str(key), axis, axes, f"{file}: axes") for key, axis in found.items()}
    settings = {
        **_mapping(base.get("settings") or {}, f"{of_base}: settings"),
        **_mapping(given.get("settings") or {}, f"{file}: settings"),
    }
    return {**base, **given, "settings": settings, "axes": axes}, files


def _axis_of_base(name: str, given: Any, base: Mapping[str, Any], where: str) -> Any:
    """An axis: that of the base, named levels of it, all of them with changed ones, or another."""
    is_changed = isinstance(given, Mapping) and "base" in given
    if given != "base" and not is_changed and not isinstance(given, list):
        return given
    _among(name, base, where, "axis of the base")
    if given == "base":
        return base[name]
    where = f"{where}.{name}"
    of_base = _mapping(base[name], where).get("levels")
    if not isinstance(of_base, Mapping):
        raise UserError(
            f"{where}: the axis of the base has values, not levels: take it whole (base), or give another"
        )
    levels = {str(level): settings for level, settings in of_base.items()}
    if is_changed:
        _check_keys(given, ("base", "levels"), where)
        if given["base"] is not True:
            raise UserError(f"{where}.base: expected true, found {given['base']!r}")
        changed = _mapping(given.get("levels"), f"{where}.levels")
        return {"levels": {**levels, **{str(level): settings for level, settings in changed.items()}}}
    names = [str(level) for level in given]
    for place, level in enumerate(names):
        _among(level, levels, where, "level of the base")
        if level in names[:place]:
            raise UserError(f"{where}: the level {level} is given twice")
    return {"levels": {level: levels[level] for level in names}}


def check_cells(experiment: Experiment, modules: Sequence[str] = ()) -> None:
    """Parse the first command of a few cells that have every level, before anything is run.

    Raises:
        UserError: names the cell and its first mistake.
    """
    command, where = experiment.commands[0], f"{experiment.file}: cell"
    runs = {
        f"{where} {cell.name}": [command, *cell.arguments, f"--run_folder={cell.folder}"]
        for cell in experiment.covering_cells()
    }
    lightning_cli().check(runs, modules)


def _levels(axis: Any, where: str, beside: Path) -> tuple[Level, ...]:
    """The levels of an axis: either of one setting (set, values) or each with its own configuration."""
    if not isinstance(axis, Mapping) or not ("levels" in axis) ^ ("set" in axis):
        raise UserError(f"{where}: expected set and values, or levels")
    _check_keys(axis, ("levels",) if "levels" in axis else ("set", "values"), where)
    if not _NAME.fullmatch(name := where.rpartition(".")[2]):
        raise UserError(
            f"{where}: {name!r} cannot be part of a folder's name; use letters, digits, . + - and _"
        )
    if name in _COLUMNS:
        raise UserError(
            f"{where}: {name} is a column of the tables that are made of the axes; rename the axis"
        )
    levels: list[Level] = []
    if "levels" in axis:
        for level, given in _mapping(axis["levels"], f"{where}.levels").items():
            _check_keys(given or {}, ("configs", "settings"), f"{where}.levels.{level}")
            arguments = _arguments(given or {}, f"{where}.levels.{level}", beside)
            levels.append(Level(str(level), str(level), arguments))
    else:
        values = axis.get("values")
        values = list(range(values)) if isinstance(values, int) else _list(values)
        keys = _list(axis["set"])
        if not keys:
            raise UserError(f"{where}: set: expected the name of a setting, or a list of names, found none")
        are_numbers = all(isinstance(value, int | float) for value in values)  # a column has one type
        for value in values:
            arguments = tuple(_option(key, value) for key in keys)
            levels.append(Level(_text(value), value if are_numbers else _text(value), arguments))
    if not levels:
        raise UserError(f"{where}: the axis is empty; give at least one level")
    for level in levels:
        if not _NAME.fullmatch(level.name):
            raise UserError(
                f"{where}: the level {level.name!r} cannot name a folder; give it a name under levels:"
            )
    names = [level.name for level in levels]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{where}: the level {twice[0]} is given twice")
    return tuple(levels)


def _arguments(given: Mapping[str, Any], where: str, beside: Path) -> tuple[str, ...]:
    """Options of the command line for configs, relative to the experiment file, and settings."""
    found = []
    for name in _list(given.get("configs")):
        found.append(f"--config={beside / str(name)}")
    settings = _mapping(given.get("settings") or {}, f"{where}: settings")
    return (*found, *(_option(key, value) for key, value in settings.items()))


def _check_files(experiment: Experiment) -> None:
    """Refuse configuration files that do not exist, and names in braces that are not of an axis."""
    where = experiment.file
    for argument in experiment.arguments:
        if argument.startswith("--config=") and any(f"{{{axis}}}" in argument for axis in experiment.axes):
            raise UserError(
                f"{where}: configs: an axis can be named in those of levels alone, found {argument[9:]}"
            )
    of_levels = (level.arguments for levels in experiment.axes.values() for level in levels)
    for argument in {*experiment.arguments, *itertools.chain.from_iterable(of_levels)}:
        for word in re.findall(r"{(\w+)}", argument):
            if word not in experiment.axes and (meant := nearest(word, experiment.axes)):
                raise UserError(f"{where}: {argument.removeprefix('--')}: there is no axis {word}{meant}")
    for cell in experiment.cells():
        for argument in cell.arguments:
            if argument.startswith("--config=") and not (file := Path(argument[9:])).is_file():
                raise MissingFileError(
                    f"{where}: cell {cell.name}: configs: no file {file} (paths are relative to the experiment file; "
                    "one that another command makes comes first)"
                )


def _check_searched(experiment: Experiment, where: str) -> None:
    """Refuse a choice among one combination, and of settings that differ over the paired axis."""
    if not experiment.searched:
        raise UserError(
            f"{where}: there is no axis to choose on beside {experiment.pairs or experiment.choice_axis}"
        )
    for axis in experiment.searched:
        for level in experiment.axes[axis]:
            if any(f"{{{experiment.pairs}}}" in argument for argument in level.arguments):
                raise UserError(
                    f"{where}: the settings of {axis} {level.name} name {experiment.pairs}, over which is averaged"
                )


def _choice(given: Any, where: str) -> tuple[str | None, str | None]:
    """Outcome by which the best levels are chosen, and the axis at each level of which they are."""
    if not isinstance(given, Mapping):
        return given, None
    _check_keys(given, ("outcome", "for_each"), where)
    if missing := [key for key in ("outcome", "for_each") if given.get(key) is None]:
        raise UserError(f"{where}: {missing[0]} is missing")
    return given["outcome"], str(given["for_each"])


def _check_separate(axes: Mapping[str, Any], where: str) -> None:
    """Refuse two axes of one setting: the later would silently win."""
    owner: dict[str, str] = {}
    for name, axis in axes.items():
        for key in _list(axis.get("set")):
            if key in owner:
                raise UserError(f"{where}: the axes {owner[key]} and {name} both set {key}")
            owner[key] = name


def _outcome(given: Any, where: str) -> Outcome:
    if isinstance(given, str):
        given = {"path": given}
    _check_keys(given, _OUTCOME_KEYS, where)
    paths = tuple(_list(given.get("path")))
    if not paths or not all(isinstance(path, str) for path in paths):
        raise UserError(f"{where}: path is missing: where in the metrics of results.json the number is")
    if len({path.startswith(VALIDATION) for path in paths}) > 1:
        raise UserError(f"{where}: path: a mean is either of the test or of the validation ({VALIDATION})")
    known = [f"{section}/{name}" for section, names in PATHS.items() for name in names]
    tested = [section for section in PATHS if f"{section}/" != VALIDATION]
    for path in paths:
        # Others are of a user's evaluation, unless they are spelled almost like one of these.
        is_near = difflib.get_close_matches(path.partition("/")[0], tested, 1, 0.85)
        is_near += difflib.get_close_matches(path, known, 1, 0.9)
        if is_near and not any(fnmatchcase(path, one) for one in known):
            raise UserError(f"{where}: no evaluation writes {path}{nearest(path, known)}")
    for key, kinds, expected in _OUTCOME_TYPES:
        if key in given and type(given[key]) not in kinds:
            raise UserError(f"{where}: {key}: expected {expected}, found {given[key]!r}")
    return Outcome(paths, **{key: value for key, value in given.items() if key != "path"})


def _check_table(experiment: Experiment, table: Any, where: str) -> None:
    _check_keys(table, ("title", "outcomes", "where"), where)
    if experiment.compared is None or not (used := _list(table.get("outcomes"))):
        raise UserError(
            f"{where}: a table needs compare, whose levels are its rows, and outcomes, its columns"
        )
    for outcome in used:
        _among(outcome, experiment.outcomes, where, "outcome")
    _check_free(experiment, [*_check_where(experiment, table, where), experiment.pairs], where)


def _check_figure(experiment: Experiment, figure: Any, where: str) -> None:
    kind = figure.get("kind") if isinstance(figure, Mapping) else None
    if kind not in FIGURES:
        raise UserError(f"{where}: kind: expected {', '.join(FIGURES)}, found {kind}")
    _check_keys(figure, ("kind", *FIGURES[kind]), where)
    if missing := [key for key, is_required in FIGURES[kind].items() if is_required and key not in figure]:
        raise UserError(f"{where}: a figure of kind {kind} needs {missing[0]}")
    if not _NAME.fullmatch(str(figure["name"])):
        raise UserError(f"{where}: name: {figure['name']!r} cannot name a file")
    if kind == "differences" and None in (experiment.compared, experiment.pairs):
        raise UserError(f"{where}: differences need compare (axis and reference) and pairs")
    named = _check_where(experiment, figure, where)
    x = figure.get("x")
    places = [] if kind == "map" else _check_x(experiment, figure, where)
    if not isinstance(is_log := figure.get("log", False), bool):
        raise UserError(f"{where}: log: expected true or false, found {is_log!r}")
    if is_log and (wrong := [one for one in places if not (isinstance(one, int | float) and one > 0)]):
        raise UserError(f"{where}: log: a logarithmic axis needs numbers above 0, found {wrong[0]}")
    free = [] if isinstance(x, Mapping) else [x]
    if kind != "map" or experiment.pairs is None:
        free.append(experiment.pairs)
    _check_free(experiment, [*named, *free], where)


def _check_x(experiment: Experiment, figure: Mapping[str, Any], where: str) -> list[Any]:
    """Check what stands along both axes of lines or differences; the places on x."""
    x, kind, compared = figure["x"], figure["kind"], experiment.compared
    used = _list(figure.get("y"))
    across, drawn = ([str(level) for level in _list(figure.get(key))] for key in ("across", "levels"))
    levels = [] if compared is None else [level.name for level in experiment.axes[compared]]
    for key, named in (("across", across), ("levels", drawn)):
        for level in named:
            _among(level, levels, f"{where}: {key}", "compared level")
    if isinstance(x, Mapping):
        if kind != "lines":
            raise UserError(f"{where}: x: only lines can have outcomes or levels as x")
        _check_keys(x, ("label", "outcomes", "levels"), f"{where}: x")
        [of] = found if len(found := [key for key in ("outcomes", "levels") if x.get(key)]) == 1 else [None]
        if of is None or "label" not in x:
            raise UserError(
                f"{where}: x: outcomes or levels as x need a label and at least one of them with its number"
            )
        places = list(_mapping(x[of], f"{where}: x.{of}").values())
        if of == "levels":
            for level in x["levels"]:
                _among(str(level), levels, f"{where}: x.levels", "compared level")
        else:
            used = list(x["outcomes"])
    else:
        _among(
            x,
            [*experiment.groups, *([compared] if kind == "lines" and compared else [])],
            f"{where}: x",
            "axis",
        )
        places = [level.value for level in experiment.axes[x]]
    if not used:
        raise UserError(f"{where}: y is missing: the name of an outcome")
    for outcome in used:
        _among(outcome, experiment.outcomes, where, "outcome")
    if across and not (isinstance(x, Mapping) and "levels" in x):
        raise UserError(f"{where}: across: lines across belong to levels as x")
    if drawn and kind == "differences" and drawn == [getattr(experiment.reference, "name", None)]:
        raise UserError(f"{where}: levels: the reference has no difference from itself; name others")
    if drawn and ((isinstance(x, Mapping) and "levels" in x) or x == compared):
        raise UserError(f"{where}: levels: only where each compared level has a line of its own")
    return places


def _check_where(experiment: Experiment, given: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The chosen level of each axis that is named."""
    named = _mapping(given.get("where") or {}, f"{where}: where")
    for axis, level in named.items():
        _among(axis, experiment.axes, f"{where}: where", "axis")
        _among(str(level), [one.name for one in experiment.axes[axis]], f"{where}: where.{axis}", "level")
    return named


def _check_free(experiment: Experiment, settled: Iterable[Any], where: str) -> None:
    """Refuse to mix the levels of an axis that is neither settled nor compared."""
    free = [axis for axis in experiment.axes if axis != experiment.compared and axis not in settled]
    if free:
        raise UserError(f"{where}: where: choose a level of {free[0]}, or its levels would be mixed")


def _among(name: Any, known: Iterable[str], where: str, kind: str) -> None:
    if name not in (known := list(known)):
        raise UserError(
            f"{where}: there is no {kind} {name}{nearest(str(name), known)} (there are: {', '.join(known)})"
        )


def _check_keys(given: Any, known: Sequence[str], where: str) -> None:
    for key in _mapping(given, where):
        if key not in known:
            raise UserError(f"{where}: {unknown_key(str(key), known)}")


def _mapping(given: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(given, Mapping):
        raise UserError(f"{where}: expected keys with values, found {given!r}")
    return given


def _list(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [] if given is None else [given]


def _with_lists(declared: Any, keys: Sequence[str]) -> Any:
    """A table or figure in which these keys have lists, where they may be given as one value."""
    if not isinstance(declared, Mapping):
        return declared
    return {**declared, **{key: _list(declared[key]) for key in keys if key in declared}}


def _option(key: Any, value: Any) -> str:
    return f"--{key}={_text(value)}"


def _text(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)
