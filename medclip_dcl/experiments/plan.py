"""The experiment file: a grid of runs, what is compared, and what is reported. Read and checked without Lightning."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from medclip_dcl.command.cli import lightning_cli
from medclip_dcl.common.command_line import nearest, unknown_key
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import read_yaml
from medclip_dcl.experiments.grid import (
    FACTS,
    PATHS,
    VALIDATION,
    Experiment,
    Level,
    Lines,
    Map,
    Outcome,
    Places,
    ReportTable,
    as_list,
)

# They become names of folders and of files.
_NAME = re.compile(r"[^\W_][\w.+ -]*")
_COLUMNS = {
    *("cell", "outcome", "value", *FACTS),
    *("x", "n", "mean", "sd", "low", "high", "p", "p_holm", "difference", "value_reference"),
    *("levels", "patients_low", "patients_high"),
}
"""Columns of results.parquet and of the tables made from it, which no axis may be called."""
_ANYTHING = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Settings:
    configs: str | list[str] = field(default_factory=list)
    settings: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class _Axis:
    set: str | list[str] = field(default_factory=list)
    values: int | list[Any] = field(default_factory=list)
    levels: dict[str, _Settings | None] | None = None


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    axis: str
    reference: Any


@dataclass(frozen=True, kw_only=True)
class _Choice:
    outcome: str
    for_each: str | None = None


@dataclass(frozen=True, kw_only=True)
class _File(_Settings):
    """The keys of an experiment file, see docs/experiments.md."""

    folder: str
    axes: dict[str, _Axis]
    base: str | None = None
    commands: list[Literal["fit", "validate", "test", "predict"]] = field(
        default_factory=lambda: ["fit", "test"]
    )
    pairs: str | None = None
    compare: _Comparison | None = None
    outcomes: dict[str, str | Outcome] | None = None
    tables: list[ReportTable] | None = None
    figures: list[dict[str, Any]] | None = None
    choose: str | _Choice | None = None
    patients: bool = False
    checkpoints: Literal["keep", "delete"] = "keep"


def read_experiment(file: Path) -> Experiment:
    """Read and check an experiment file."""
    given, files = _over_base(file)
    where = f"{file}:"
    read = _read(_File, given, where)
    if not read.axes:
        raise UserError(f"{where} axes is missing")
    axes = {name: _levels(name, axis, f"{where} axes.{name}", file) for name, axis in read.axes.items()}
    _check_separate(read.axes, where)
    compared = read.compare and read.compare.axis
    for key, axis in (("pairs", read.pairs), ("compare.axis", compared)):
        if axis is not None:
            _among(axis, axes, f"{where} {key}", "axis")
    if compared is not None and read.pairs == compared:
        raise UserError(f"{where} {compared} is both paired and compared; give two axes")
    reference = None
    if read.compare is not None:
        levels = {level.name: level for level in axes[read.compare.axis]}
        reference = levels[_among(str(read.compare.reference), levels, f"{where} compare.reference", "level")]
    outcomes = {
        name: Outcome(one) if isinstance(one, str) else one for name, one in (read.outcomes or {}).items()
    }
    for name, outcome in outcomes.items():
        _check_outcome(outcome, f"{where} outcomes.{name}")
    if not all(one.is_of_validation for one in outcomes.values()) and "test" not in read.commands:
        raise UserError(
            f"{where} outcomes are read from results.json, which `test` writes: add it to commands (those of the last "
            f"validation of training begin with {VALIDATION})"
        )
    chosen: _Choice | None = _Choice(outcome=read.choose) if isinstance(read.choose, str) else read.choose
    experiment = Experiment(
        files=files,
        folder=Path(read.folder),
        commands=tuple(read.commands),
        arguments=_arguments(read, file),
        axes=axes,
        pairs=read.pairs,
        compared=compared,
        reference=reference,
        outcomes=outcomes,
        tables=read.tables or [],
        figures=[
            _figure(figure, f"{where} figures.{place}") for place, figure in enumerate(read.figures or ())
        ],
        choice=None if chosen is None else chosen.outcome,
        choice_axis=None if chosen is None else chosen.for_each,
        has_patients=read.patients,
        keeps_checkpoints=read.checkpoints == "keep",
    )
    _check_axes_in_braces(experiment, where)
    if read.patients and all(one.is_of_validation for one in outcomes.values()):
        raise UserError(
            f"{where} patients: only outcomes of the test have intervals over patients, found none"
        )
    if chosen is not None:
        _check_choice(experiment, chosen, f"{where} choose")
    for place, table in enumerate(experiment.tables):
        _check_table(experiment, table, f"{where} tables.{place}")
    for place, figure in enumerate(experiment.figures):
        _check_figure(experiment, figure, f"{where} figures.{place}")
    if len({figure.name for figure in experiment.figures}) < len(experiment.figures):
        raise UserError(f"{where} figures: two have the same name")
    return experiment


def _figure(given: Mapping[str, Any], where: str) -> Lines | Map:
    kind = _read(Literal["lines", "differences", "map"], given.get("kind"), f"{where}.kind")
    return _read(Map if kind == "map" else Lines, given, where)


def check_cells(experiment: Experiment, modules: Sequence[str] = (), needs_sources: bool = False) -> None:
    """Parse the first command of a few cells that have every level, before anything is run."""
    command, where = experiment.commands[0], f"{experiment.file}: cell"
    runs = {
        f"{where} {cell.name}": [command, *cell.arguments, f"--run_folder={cell.folder}"]
        for cell in experiment.covering_cells()
    }
    lightning_cli().check(runs, modules, needs_sources)


def _over_base(file: Path, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """The keys of a file over those of its `base`, whose settings are merged and axes taken by name; all files read."""
    given: Any = read_yaml(file)
    _check_keys(given, _File, f"{file}:")
    if "base" not in given:
        return given, (*above, file)
    name = str(given.pop("base"))
    if Path(name).name != name or name in ("", "..") or file.with_name(name) in (*above, file):
        raise UserError(f"{file}: base: expected the name of another file in the same folder, found {name!r}")
    base, files = _over_base(file.with_name(name), (*above, file))
    axes = _read(_ANYTHING, base.get("axes") or {}, f"{file.with_name(name)}: axes")
    if "axes" in given:
        found = _read(_ANYTHING, given["axes"], f"{file}: axes")
        axes = {key: _axis_of_base(key, axis, axes, f"{file}: axes") for key, axis in found.items()}
    settings = [_read(_ANYTHING, x.get("settings") or {}, f"{file}: settings") for x in (base, given)]
    return {**base, **given, "settings": settings[0] | settings[1], "axes": axes}, files


def _axis_of_base(name: str, given: Any, base: Mapping[str, Any], where: str) -> Any:
    """An axis: that of the base, named levels of it, all of them with changed ones, or another."""
    is_changed = isinstance(given, Mapping) and "base" in given
    if given != "base" and not is_changed and not isinstance(given, list):
        return given
    if is_changed and (given["base"] is not True or given.keys() - {"base", "levels"}):
        raise UserError(f"{where}.{name}: expected base: true and levels, found {given!r}")
    of_base = _read(_ANYTHING, base[_among(name, base, where, "axis of the base")], f"{where}.{name}")
    if given == "base":
        return of_base
    if "levels" not in of_base:
        raise UserError(
            f"{where}.{name}: the axis of the base has values, not levels: take it whole (base), or give another"
        )
    where = f"{where}.{name}"
    levels = _read(_ANYTHING, of_base["levels"], where)
    if is_changed:
        return {"levels": levels | _read(_ANYTHING, given.get("levels"), f"{where}.levels")}
    names = [_among(str(level), levels, where, "level of the base") for level in given]
    return {"levels": {level: levels[level] for level in names}}


def _levels(name: str, axis: _Axis, where: str, file: Path) -> tuple[Level, ...]:
    """The levels of an axis: either of one setting (set, values) or each with its own configuration."""
    if not _NAME.fullmatch(name) or name in _COLUMNS:
        raise UserError(
            f"{where}: the name of an axis is part of folders' names, and a column of the tables that is not one of "
            f"{', '.join(sorted(_COLUMNS))}; rename it"
        )
    if axis.levels is not None:
        levels = [Level(key, key, _arguments(own or _Settings(), file)) for key, own in axis.levels.items()]
    else:
        values = list(range(axis.values)) if isinstance(axis.values, int) else axis.values
        are_numbers = all(isinstance(value, int | float) for value in values)  # a column has one type
        levels = [
            Level(
                _text(value),
                value if are_numbers else _text(value),
                tuple(_option(key, value) for key in as_list(axis.set)),
            )
            for value in values
        ]
    if (
        not levels
        or (axis.levels is None) == (not axis.set)
        or (axis.levels is not None and axis.values != [])
    ):
        raise UserError(f"{where}: expected set and values, or levels, at least one")
    names = [level.name for level in levels]
    for level in names:
        if not _NAME.fullmatch(level) or names.count(level) > 1:
            raise UserError(
                f"{where}: the level {level!r} cannot name a folder of its own; give it a name under levels:"
            )
    return tuple(levels)


def _check_separate(axes: Mapping[str, _Axis], where: str) -> None:
    """Refuse two axes of one setting: the later would silently win."""
    owner: dict[str, str] = {}
    for name, axis in axes.items():
        for key in as_list(axis.set):
            if key in owner:
                raise UserError(f"{where} the axes {owner[key]} and {name} both set {key}")
            owner[key] = name


def _check_axes_in_braces(experiment: Experiment, where: str) -> None:
    """Refuse a misspelled axis in the settings of a level, which would be taken as it stands."""
    levels = [level.arguments for levels in experiment.axes.values() for level in levels]
    for argument in (*experiment.arguments, *(one for arguments in levels for one in arguments)):
        for word in re.findall(r"{(\w+)}", argument):
            if word not in experiment.axes and (meant := nearest(word, experiment.axes)):
                raise UserError(f"{where} {argument.removeprefix('--')}: there is no axis {word}{meant}")


def _check_outcome(outcome: Outcome, where: str) -> None:
    if len({path.startswith(VALIDATION) for path in outcome.paths}) != 1:
        raise UserError(f"{where}.path: expected paths of the test, or of the validation ({VALIDATION})")
    known = [f"{section}/{name}" for section, names in PATHS.items() for name in names]
    tested = [section for section in PATHS if f"{section}/" != VALIDATION]
    for path in outcome.paths:
        # Others are of a user's evaluation, unless they are spelled almost like one of these.
        is_near = difflib.get_close_matches(path.partition("/")[0], tested, 1, 0.85)
        is_near += difflib.get_close_matches(path, known, 1, 0.9)
        if is_near and not any(fnmatchcase(path, one) for one in known):
            raise UserError(f"{where}: no evaluation writes {path}{nearest(path, known)}")


def _check_choice(experiment: Experiment, chosen: _Choice, where: str) -> None:
    outcome = experiment.outcomes[_among(chosen.outcome, experiment.outcomes, where, "outcome")]
    if outcome.higher_is_better is None:
        raise UserError(f"{where}: {chosen.outcome} needs higher_is_better: true or false")
    if not outcome.is_of_validation:
        raise UserError(
            f"{where}: {chosen.outcome} is an outcome of the test, whose patients must not decide; take one of the "
            f"validation, whose path begins with {VALIDATION}"
        )
    if chosen.for_each is not None:
        free = [axis for axis in experiment.axes if axis != experiment.pairs]
        _among(chosen.for_each, free, f"{where}.for_each", "axis to choose at")
    if not experiment.searched:
        raise UserError(f"{where}: there is no axis to choose on beside {experiment.pairs}")
    for axis in experiment.searched:
        for level in experiment.axes[axis]:
            if any(f"{{{experiment.pairs}}}" in argument for argument in level.arguments):
                raise UserError(
                    f"{where}: the settings of {axis} {level.name} name {experiment.pairs}, over which is averaged"
                )


def _check_table(experiment: Experiment, table: ReportTable, where: str) -> None:
    if experiment.compared is None or not table.outcomes:
        raise UserError(
            f"{where}: a table needs compare, whose levels are its rows, and outcomes, its columns"
        )
    for outcome in table.outcomes:
        _among(outcome, experiment.outcomes, where, "outcome")
    _check_where(experiment, table.where, [experiment.pairs], where)


def _check_figure(experiment: Experiment, figure: Lines | Map, where: str) -> None:
    if not _NAME.fullmatch(figure.name):
        raise UserError(f"{where}.name: {figure.name!r} cannot name a file")
    if isinstance(figure, Map):  # of one cell for each compared level
        _check_where(experiment, figure.where, [], where)
        return
    x, compared, has_differences = figure.x, experiment.compared, figure.kind == "differences"
    levels = [] if compared is None else [level.name for level in experiment.axes[compared]]
    if has_differences and (compared is None or experiment.pairs is None or isinstance(x, Places)):
        raise UserError(f"{where}: differences need compare (axis and reference), pairs and an axis as x")
    if isinstance(x, str):
        along = [*experiment.groups, *([compared] if compared and not has_differences else [])]
        _among(x, along, f"{where}.x", "axis")
    elif bool(x.outcomes) == bool(x.levels):
        raise UserError(f"{where}.x: expected outcomes or levels, each with its number")
    on_x = list(x.levels) if isinstance(x, Places) else []
    for level in (*on_x, *figure.across, *figure.levels):
        _among(str(level), levels, where, "compared level")
    if not figure.used:
        raise UserError(f"{where}.y is missing: the name of an outcome")
    for outcome in figure.used:
        _among(outcome, experiment.outcomes, where, "outcome")
    if figure.across and not on_x:
        raise UserError(f"{where}.across: lines across belong to levels as x")
    places = [x.outcomes, x.levels] if isinstance(x, Places) else []
    on_axis: list[Any] = [at for part in places for at in part.values()]
    if isinstance(x, str):
        on_axis = [level.value for level in experiment.axes[x]]
    if figure.log and (wrong := [at for at in on_axis if not (isinstance(at, int | float) and at > 0)]):
        raise UserError(f"{where}.log: a logarithmic axis needs numbers above 0, found {wrong[0]}")
    if figure.levels and (on_x or x == compared):
        raise UserError(f"{where}.levels: only where each compared level has a line of its own")
    _check_where(experiment, figure.where, [experiment.pairs, x], where)


def _check_where(
    experiment: Experiment, chosen: Mapping[str, Any], settled: Sequence[Any], where: str
) -> None:
    """Check the chosen levels; refuse to mix those of an axis that is neither chosen, settled nor compared."""
    for axis, level in chosen.items():
        _among(axis, experiment.axes, f"{where}.where", "axis")
        _among(str(level), [one.name for one in experiment.axes[axis]], f"{where}.where.{axis}", "level")
    known = (experiment.compared, *chosen, *settled)
    if free := [axis for axis in experiment.axes if axis not in known]:
        raise UserError(f"{where}.where: choose a level of {free[0]}, or its levels would be mixed")


def _read(hint: Any, given: Any, where: str) -> Any:
    """A value as the type that it should have: a dataclass from keys with values, each of which is read in this way."""
    if isinstance(hint, UnionType):
        hint = next((one for one in get_args(hint) if isinstance(given, _kind(one))), hint)
    inner, origin = get_args(hint), get_origin(hint)
    if origin is Literal and given not in inner:
        raise UserError(f"{where}: expected {', '.join(inner)}, found {given}{nearest(str(given), inner)}")
    if isinstance(hint, UnionType) or not isinstance(given, _kind(hint)):
        raise UserError(f"{where}: expected {_in_words(hint)}, found {given!r}")
    if origin is list:
        return [_read(inner[0], one, f"{where}.{place}") for place, one in enumerate(given)]
    if origin is dict:
        if len({str(key) for key in given}) < len(given):
            raise UserError(f"{where}: two keys are the same text: {', '.join(map(repr, given))}")
        return {str(key): _read(inner[1], one, f"{where}.{key}") for key, one in given.items()}
    if not dataclasses.is_dataclass(hint):
        return given
    _check_keys(given, hint, where)
    for one in dataclasses.fields(hint):
        if one.name not in given and one.default is one.default_factory is dataclasses.MISSING:
            raise UserError(f"{_of(where, one.name)} is missing")
    make, hints = cast(Any, hint), get_type_hints(hint)
    return make(**{key: _read(hints[key], one, _of(where, key)) for key, one in given.items()})


def _kind(hint: Any) -> Any:
    """The classes of values that may be read as this type."""
    if dataclasses.is_dataclass(hint):
        return dict
    return (
        object
        if hint is Any or get_origin(hint) is Literal
        else (int, float)
        if hint is float
        else get_origin(hint) or hint
    )


def _in_words(hint: Any) -> str:
    if isinstance(hint, UnionType):
        return " or ".join(map(_in_words, get_args(hint)))
    return {dict: "keys with values", NoneType: "null", (int, float): "a number"}.get(_kind(hint)) or _kind(
        hint
    ).__name__


def _check_keys(given: Any, kind: Any, where: str) -> None:
    if not isinstance(given, dict):
        raise UserError(f"{where} expected keys with values, found {given!r}")
    for key in given:
        if key not in (known := [one.name for one in dataclasses.fields(kind)]):
            raise UserError(_of(where, unknown_key(str(key), known)))


def _of(where: str, key: str) -> str:
    return f"{where} {key}" if where.endswith(":") else f"{where}.{key}"


def _among(name: str, known: Iterable[str], where: str, kind: str) -> str:
    if name not in (known := list(known)):
        raise UserError(
            f"{where}: there is no {kind} {name}{nearest(str(name), known)} (there are: {', '.join(known)})"
        )
    return name


def _arguments(given: _Settings, file: Path) -> tuple[str, ...]:
    """Options of the command line for configs, relative to the experiment file, and settings."""
    files = (f"--config={file.parent / name}" for name in as_list(given.configs))
    return (*files, *(_option(key, value) for key, value in (given.settings or {}).items()))


def _option(key: str, value: Any) -> str:
    return f"--{key}={_text(value)}"


def _text(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)
