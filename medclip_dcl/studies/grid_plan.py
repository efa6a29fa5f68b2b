"""The experiment file: a grid of runs, what is compared, and what is reported. Read and checked without Lightning."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from medclip_dcl.command.cli import lightning_cli
from medclip_dcl.common.command_line import nearest, unknown_key
from medclip_dcl.common.errors import UserError, quoted
from medclip_dcl.common.files import read_yaml
from medclip_dcl.common.packaged import FoundFile, find_configuration
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.metrics.table import SECTIONS, place_of
from medclip_dcl.report.contrasts import ALPHA
from medclip_dcl.runs.saved import setting
from medclip_dcl.studies import grid

# They become names of folders.
_NAME = re.compile(r"[^\W_][\w.+ -]*")
_COLUMNS = {
    *("run", "outcome", "value", *grid.STEP_COLUMNS, *grid.FACTS),
    *("x", "n", "mean", "sd", "low", "high", "p", "p_holm", "difference", "value_reference"),
    *("levels", "patients_low", "patients_high", "is_difference"),
}
"""Columns of results.parquet and of the tables made from it, which no axis may be called."""


@dataclass(frozen=True, kw_only=True)
class _Settings:
    configs: str | list[str] = field(default_factory=list)
    optional_configs: str | list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> tuple[str, ...]:
        """Options of the command line for configs and settings."""
        there = (name for name in grid.as_list(self.optional_configs) if Path(name).is_file())
        files = (f"--config={name}" for name in (*grid.as_list(self.configs), *there))
        return (*files, *(_option(key, value) for key, value in self.settings.items()))


@dataclass(frozen=True, kw_only=True)
class _Axis:
    set: str | list[str] = field(default_factory=list)
    values: int | list[Any] = field(default_factory=list)
    levels: dict[str, _Settings] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _File(grid.Study, _Settings):
    axes: dict[str, _Axis]
    base: str | None = None


def read_experiment(file: Path) -> grid.Experiment:
    """Read and check an experiment file, or a packaged one by its name."""
    file = find_configuration(file, "experiments", "FILE").say_origin()
    given, files = _over_base(file)
    where = f"{file}:"
    read: _File = _read(_File, given, where)
    for (a, one), (b, other) in itertools.combinations(read.axes.items(), 2):
        for key in grid.as_list(one.set):
            if key in grid.as_list(other.set):  # the later would silently win
                raise UserError(f"{where} the axes {a} and {b} both set {key}")
    levels = {f"{axis} {name}": own for axis, one in read.axes.items() for name, own in one.levels.items()}
    experiment = grid.Experiment(
        files=files,
        optional=tuple(
            f"{name}: {file}{' does not exist: its other settings stay' * (not Path(file).is_file())}"
            for name, own in {"all runs": read, **levels}.items()
            for file in grid.as_list(own.optional_configs)
        ),
        arguments=read.arguments(),
        axes={name: _levels(name, axis, f"{where} axes.{name}") for name, axis in read.axes.items()},
        **{one.name: getattr(read, one.name) for one in dataclasses.fields(grid.Study)},
    )
    _check(experiment, where)
    return experiment


def _check(experiment: grid.Experiment, where: str) -> None:
    """Check what the keys of an experiment say of each other."""
    axes, compare, outcomes = experiment.axes, experiment.compare, experiment.outcomes
    if not axes:
        raise UserError(f"{where} axes is missing")
    if experiment.pairs is not None:
        _among(experiment.pairs, axes, f"{where} pairs", "axis")
    if compare is not None:
        free = [axis for axis in axes if axis != experiment.pairs]
        levels = axes[_among(compare.axis, free, f"{where} compare.axis", "axis")]
        names = [level.name for level in levels]
        _among(compare.reference, names, f"{where} compare.reference", "level")
    for name, outcome in outcomes.items():
        _check_outcome(outcome, f"{where} outcomes.{name}")
    if not all(one.is_of_validation for one in outcomes.values()) and "test" not in experiment.commands:
        raise UserError(
            f"{where} outcomes are read from results.json, which `test` writes: add it to commands (those of the last "
            f"validation of training begin with {grid.VALIDATION})"
        )
    _check_steps(experiment, where)
    if experiment.patients and all(one.is_of_validation for one in outcomes.values()):
        raise UserError(
            f"{where} patients: expected an outcome of the test, whose patients are drawn, found none"
        )
    # A misspelled axis in braces would be taken as it stands.
    levels_of_all = [level.arguments for levels in axes.values() for level in levels]
    for argument in (*experiment.arguments, *itertools.chain(*levels_of_all)):
        for word in re.findall(r"{(\w+)}", argument):
            if word not in axes and (meant := nearest(word, axes)):
                raise UserError(f"{where} {argument.removeprefix('--')}: there is no axis {word}{meant}")
    if experiment.choose is not None:
        _check_choice(experiment, experiment.choose, f"{where} choose")
    if experiment.learning_curve is not None:
        _check_learning_curve(experiment, experiment.learning_curve, f"{where} learning_curve")
    for name, tested in experiment.hypotheses.items():
        _check_hypothesis(experiment, tested, f"{where} hypotheses.{name}")
    if (shares := sum(one.alpha for one in experiment.hypotheses.values())) > ALPHA + 1e-9:
        raise UserError(
            f"{where} hypotheses: expected shares of alpha with a sum of at most {ALPHA}, found {shares:g}"
        )
    for place, table in enumerate(experiment.tables):
        for name in table.outcomes:
            _among(name, outcomes, f"{where} tables.{place}", "outcome")
        _check_where(experiment, table.where, [experiment.pairs], f"{where} tables.{place}")
    for place, plot in enumerate(experiment.plots):
        _check_plot(experiment, plot, f"{where} plots.{place}")
        if not _NAME.fullmatch(plot.name):
            raise UserError(f"{where} plots.{place}.name: {plot.name!r} cannot name a file")
    if len({plot.name for plot in experiment.plots}) < len(experiment.plots):
        raise UserError(f"{where} plots: two have the same name")


def check_cells(
    experiment: grid.Experiment, modules: Sequence[str] = (), needs_sources: bool = False
) -> None:
    """Parse the first command of a few runs that have every level, before anything is run."""
    commands_of = {
        f"run {run.name}": [experiment.commands[0], *run.arguments, f"--run_folder={run.folder}"]
        for run in experiment.covering_runs()
    }
    lightning_cli().check(commands_of, modules, needs_sources)
    if experiment.choose and needs_sources:
        _require_validation(experiment, experiment.outcomes[experiment.choice].paths[0])


def _require_validation(experiment: grid.Experiment, metric: str) -> None:
    """Refuse a search by a number of validate images that a set does not have, or does not label."""
    by_label = metric.removeprefix(grid.VALIDATION) in SECTIONS["classification"].names
    folders = (
        setting(grid.merged(run.arguments), "data.init_args.folder") for run in experiment.covering_runs()
    )
    for folder in {one for one in folders if one and (Path(one) / "images.parquet").is_file()}:
        rows = PreparedSet(folder).rows("cases" if by_label else "images", use=["validate"])
        if rows.empty or (by_label and rows.groupby("finding")["label"].nunique().max() < 2):
            raise UserError(
                f"{experiment.file}: choose: {metric} needs validate images{' with and without a finding' * by_label}, "
                f"{folder} has none; prepare it with more validate patients, or choose by another outcome"
            )


def _over_base(file: Path, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """The keys of a file over those of its `base`, whose settings are merged and axes taken by name; all files read."""
    where, given = f"{file}:", read_yaml(file)
    _check_keys(given, _File, where)
    for key in ("axes", "settings"):
        given[key] = _read(dict[str, Any], given.get(key) or {}, f"{where} {key}")
    if "base" not in given:
        return given, (*above, file)
    name = str(given.pop("base"))
    found = FoundFile(file.with_name(name)) if Path(name).name == name != ".." else None
    if found and not found.path.is_file():
        found = find_configuration(name, "experiments", f"{where} base")
    if found is None or found.path in (*above, file):
        raise UserError(
            f"{where} base: expected the name of another file in the same folder, or of a packaged one, found {name!r}"
        )
    base, files = _over_base(found.say_origin(), (*above, file))
    axes = {key: _axis_of_base(key, axis, base["axes"], where) for key, axis in given["axes"].items()}
    both = {"settings": base["settings"] | given["settings"], "axes": axes or base["axes"]}
    return {**base, **given, **both}, files


def _axis_of_base(name: str, given: Any, base: Mapping[str, Any], where: str) -> Any:
    """An axis: that of the base, named levels of it, all of them with changed ones, or another."""
    is_changed = isinstance(given, dict) and given.get("base") is True
    if not (is_changed or given == "base" or isinstance(given, list)):
        return given
    of_base = base[_among(name, base, f"{where} axes", "axis of the base")]
    if given == "base":
        return of_base
    where = f"{where} axes.{name}"
    of_base = _read(dict[str, Any], of_base, where)
    levels = _read(dict[str, Any], of_base.get("levels"), f"{where}: levels of the base")
    if is_changed:
        changed = {"levels": levels | _read(dict[str, Any], given.get("levels"), f"{where}.levels")}
        return {key: one for key, one in given.items() if key != "base"} | changed
    return {"levels": {str(x): levels[_among(x, levels, where, "level of the base")] for x in given}}


def _levels(name: str, axis: _Axis, where: str) -> tuple[grid.Level, ...]:
    """The levels of an axis: either of one setting (set, values) or each with its own configuration."""
    if name in _COLUMNS:
        raise UserError(f"{where}: this is a column of results.parquet; rename the axis")
    values = list(range(axis.values)) if isinstance(axis.values, int) else axis.values
    if not (axis.set and values and not axis.levels or axis.levels and not axis.set and not values):
        raise UserError(f"{where}: expected set and values, or levels, at least one")
    are_numbers = all(isinstance(value, int | float) for value in values)  # a column has one type
    levels = [grid.Level(key, key, own.arguments()) for key, own in axis.levels.items()]
    for value in values:
        text = _text(value)
        arguments = tuple(_option(key, value) for key in grid.as_list(axis.set))
        levels.append(grid.Level(text, value if are_numbers else text, arguments))
    found = [(level.name, level.value) for level in levels]
    for one, value in ((name, name), *found):  # 1 and 1.0 are one value in the table
        if not _NAME.fullmatch(one) or [other for _, other in found].count(value) > 1:
            raise UserError(f"{where}: {one!r} cannot name a folder of its own; give another name")
    return tuple(levels)


def _check_outcome(outcome: grid.Outcome, where: str) -> None:
    """Refuse a misspelled path; others are of a user's evaluation, unless they are spelled almost like a known one."""
    if len({path.startswith((grid.VALIDATION, grid.TRAINING)) for path in outcome.paths}) != 1:
        raise UserError(
            f"{where}.path: expected paths of the test, of the validation ({grid.VALIDATION}) or of training "
            f"({grid.TRAINING})"
        )
    if not (outcome.validate or grid.VALIDATION).startswith(grid.VALIDATION):
        raise UserError(f"{where}.validate: expected a path of the validation ({grid.VALIDATION})")
    tested = {section for path in grid.PATHS if f"{(section := path.partition('/')[0])}/" != grid.VALIDATION}
    for path in (*outcome.paths, *([outcome.validate] if outcome.validate else [])):
        is_near = difflib.get_close_matches(path.partition("/")[0], tested, 1, 0.85)
        is_near += difflib.get_close_matches(path, grid.PATHS, 1, 0.9)
        if is_near and not place_of(path):
            raise UserError(f"{where}: no evaluation writes {path}{nearest(path, grid.PATHS)}")


def _check_steps(experiment: grid.Experiment, where: str) -> None:
    """Refuse rules of steps that a run does not keep, or without the number that they choose by."""
    by_step = {name: one for name, one in experiment.outcomes.items() if one.step != ""}
    for run in experiment.covering_runs() if by_step else ():
        kept = grid.merged(run.arguments).get("kept_steps") or []
        for name, outcome in by_step.items():
            if outcome.step not in (grid.BEST, grid.END, *kept) or not kept:
                raise UserError(
                    f"{where} outcomes.{name}.step: expected {grid.BEST}, {grid.END} or one of kept_steps, {kept} in "
                    f"run {run.name}, found {outcome.step}"
                )
    for name, outcome in by_step.items():
        if outcome.step == grid.BEST and (not outcome.validate or outcome.is_higher_chosen is None):
            raise UserError(f"{where} outcomes.{name}: the best step needs validate and higher_is_better")
    if by_step and experiment.patients:
        raise UserError(
            f"{where} patients: expected false, as outcomes at steps have no intervals over patients"
        )


def _check_hypothesis(experiment: grid.Experiment, tested: grid.Hypothesis, where: str) -> None:
    if experiment.compared is None or experiment.pairs is None:
        raise UserError(f"{where}: needs compare and pairs")
    levels = [level.name for level in experiment.axes[experiment.compared]]
    for name in (tested.level, tested.minus):
        _among(name, levels, where, "compared level")
    _among(tested.outcome, experiment.outcomes, where, "outcome")
    _check_where(experiment, tested.where, [experiment.pairs], where)
    if not tested.alpha > 0:
        raise UserError(f"{where}.alpha: expected a share above 0, found {tested.alpha}")


def _check_choice(experiment: grid.Experiment, choose: grid.Choice, where: str) -> None:
    outcome = experiment.outcomes[_among(choose.outcome, experiment.outcomes, where, "outcome")]
    if outcome.higher_is_better is None or not all(x.startswith(grid.VALIDATION) for x in outcome.paths):
        raise UserError(
            f"{where}: expected an outcome of the validation ({grid.VALIDATION}), as patients of the test must not "
            f"decide, with higher_is_better, found {choose.outcome}"
        )
    if choose.for_each is not None:
        _among(choose.for_each, experiment.axes, f"{where}.for_each", "axis")
    if not experiment.searched:
        raise UserError(f"{where}: there is no axis to choose on beside {experiment.pairs}")
    for axis in experiment.searched:
        for level in experiment.axes[axis]:
            if any(f"{{{experiment.pairs}}}" in argument for argument in level.arguments):
                raise UserError(
                    f"{where}: the settings of {axis} {level.name} name {experiment.pairs}, over which is averaged"
                )


def _check_learning_curve(experiment: grid.Experiment, curve: grid.LearningCurve, where: str) -> None:
    levels = experiment.axes[_among(curve.axis, experiment.axes, f"{where}.axis", "axis")]
    outcome = experiment.outcomes[_among(curve.outcome, experiment.outcomes, f"{where}.outcome", "outcome")]
    if not outcome.higher_is_better or outcome.is_of_validation or outcome.step != "":
        raise UserError(
            f"{where}.outcome: expected one of the test with higher_is_better and without step, found {curve.outcome}"
        )
    if experiment.pairs is None or experiment.compared == curve.axis:
        raise UserError(f"{where}: expected pairs, such as the seed, and another axis as compare")
    if grid.last_doubling(levels) is None or not any("label_fraction=" in one for one in levels[0].arguments):
        names = ", ".join(level.name for level in levels)
        raise UserError(
            f"{where}.axis: expected values of label_fraction, the last twice another, found {names}"
        )


def _check_plot(experiment: grid.Experiment, plot: grid.Plot, where: str) -> None:
    x, compared, pairs = plot.x, experiment.compared, experiment.pairs
    if plot.kind == "map":  # of one run for each compared level
        if plot != grid.Plot(plot.kind, plot.name, where=plot.where, title=plot.title):
            raise UserError(f"{where}: expected name, title and where alone for a map")
        _check_where(experiment, plot.where, [], where)
        return
    has_differences, on_x = plot.kind == "differences", [*x.levels] if isinstance(x, grid.Places) else []
    if has_differences and (compared is None or pairs is None or isinstance(x, grid.Places)):
        raise UserError(f"{where}: differences need compare (axis and reference), pairs and an axis as x")
    if x == "step":
        for name in plot.used:
            if name in experiment.outcomes and experiment.outcomes[name].step != grid.BEST:
                raise UserError(
                    f"{where}.x: over step, {name} needs step: {grid.BEST}; other rules have one step"
                )
    elif isinstance(x, str):
        along = [*experiment.groups, *([compared] if compared and not has_differences else [])]
        _among(x, along, f"{where}.x", "axis")
    elif bool(x.outcomes) == bool(x.levels):
        raise UserError(f"{where}.x: expected outcomes or levels, each with its number")
    places = [level.value for level in experiment.axes[x]] if isinstance(x, str) and x != "step" else []
    places += [*x.outcomes.values(), *x.levels.values()] if isinstance(x, grid.Places) else []
    if plot.log and (wrong := [at for at in places if isinstance(at, str) or at <= 0]):
        raise UserError(f"{where}.log: expected numbers above 0 on x, found {wrong[0]}")
    if not plot.used:
        raise UserError(f"{where}.y is missing: the name of an outcome")
    for outcome in plot.used:
        _among(outcome, experiment.outcomes, where, "outcome")
    levels = [level.name for level in experiment.axes[compared]] if compared else []
    for name in (*on_x, *plot.across, *plot.levels):
        _among(name, levels, where, "compared level")
    if (plot.across and not on_x) or (plot.levels and (on_x or x == compared)):
        raise UserError(
            f"{where}: expected across with levels as x, and levels where each compared level has a line"
        )
    _check_where(experiment, plot.where, [pairs, x], where)


def _check_where(
    experiment: grid.Experiment, chosen: Mapping[str, Any], settled: Sequence[Any], where: str
) -> None:
    """Check the chosen levels; refuse to mix those of an axis that is neither chosen, settled nor compared."""
    for axis, level in chosen.items():
        _among(axis, experiment.axes, f"{where}.where", "axis")
        _among(level, [one.name for one in experiment.axes[axis]], f"{where}.where.{axis}", "level")
    known = (experiment.compared, *chosen, *settled)
    if free := [axis for axis in experiment.axes if axis not in known]:
        raise UserError(f"{where}.where: choose a level of {free[0]}, or its levels would be mixed")


def _read(hint: Any, given: Any, where: str) -> Any:
    """A value as the type that it should have: a dataclass from keys with values, each of which is read in this way."""
    kinds = [one for one in get_args(hint) if one is not NoneType] if isinstance(hint, UnionType) else [hint]
    hint = next((one for one in kinds if isinstance(given, _kind(one))), None)
    if hint is None:
        names = [_kind(one)[0].__name__.replace("dict", "keys with values") for one in kinds]
        raise UserError(f"{where}: expected {' or '.join(names)}, found {quoted(given)}")
    inner, origin = get_args(hint), get_origin(hint)
    if origin is Literal and given not in inner:
        raise UserError(f"{where}: expected {', '.join(inner)}, found {given}{nearest(str(given), inner)}")
    if origin is list:
        return [_read(inner[0], one, f"{where}.{place}") for place, one in enumerate(given)]
    if origin is dict:
        if len({str(key) for key in given}) < len(given):
            raise UserError(f"{where}: two keys are the same text: {quoted([*given])[1:-1]}")
        return {str(key): _read(inner[1], one, f"{where}.{key}") for key, one in given.items()}
    if not dataclasses.is_dataclass(hint):
        return Path(given) if hint is Path else given
    if isinstance(given, str):
        given = {dataclasses.fields(hint)[0].name: given}
    _check_keys(given or {}, hint, where)
    given = {key: one for key, one in (given or {}).items() if one is not None}
    for one in dataclasses.fields(hint):
        if one.name not in given and one.default is one.default_factory is dataclasses.MISSING:
            raise UserError(f"{_of(where, one.name)} is missing")
    make, hints = cast(Any, hint), get_type_hints(hint)
    return make(**{key: _read(hints[key], one, _of(where, key)) for key, one in given.items()})


def _kind(hint: Any) -> tuple[type, ...]:
    """Classes of values that may be read as this type; text alone is the path of an outcome, or a choice."""
    if dataclasses.is_dataclass(hint):
        return dict, str if hint in (grid.Outcome, grid.Choice) else NoneType
    if hint is Any or get_origin(hint) is Literal:
        return (object,)
    return {float: (float, int), Path: (str,)}.get(hint) or (get_origin(hint) or hint,)


def _check_keys(given: Mapping[str, Any], kind: Any, where: str) -> None:
    for key in given:
        if key not in (known := [one.name for one in dataclasses.fields(kind)]):
            raise UserError(_of(where, unknown_key(str(key), known)))


def _of(where: str, key: str) -> str:
    return f"{where} {key}" if where.endswith(":") else f"{where}.{key}"


def _among(name: object, known: Iterable[str], where: str, kind: str) -> str:
    if str(name) not in (known := list(known)):
        near = nearest(str(name), known)
        raise UserError(f"{where}: there is no {kind} {name}{near} (there are: {', '.join(known)})")
    return str(name)


def _option(key: str, value: Any) -> str:
    return f"--{key}={_text(value)}"


def _text(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)
