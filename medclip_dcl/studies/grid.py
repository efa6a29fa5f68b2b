"""The grid of an experiment: its axes, its runs and what identifies them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from medclip_dcl.common.command_line import yaml_value
from medclip_dcl.common.files import read_yaml
from medclip_dcl.common.findings import prompt_texts, read_prompts
from medclip_dcl.common.packaged import CONFIGS, find_configuration
from medclip_dcl.metrics.table import SECTIONS, STORED, bounds_of, is_higher_better
from medclip_dcl.studies.one_run import Run

FACTS = {
    "weights": "string", "dataset": "string", "precision": "string", "device": "string", "versions": "string",
    "protocol": "string", "epochs": "Float64", "steps": "Float64", "train_patients": "Float64",
    "fit_seconds": "Float64", "test_seconds": "Float64", "config": "string",
}  # fmt: skip
"""Columns of results.parquet beside the axes, outcome and value: what the value depends on."""


AT = " at "
"""In experiment.json, before the level of another axis on which the settings of a level depend."""

BEST, END = "best", "end"
"""Rules for the step of an outcome: that of its best validation, and the last kept one."""

STEP_COLUMNS = {"step": "Int64", "validate": "float64", "chosen": "bool"}
"""Columns of results.parquet: optimiser step, NA for results.json's; the validation at it; if the rule chooses it."""

VALIDATION = "validate/"
"""Prefix of the paths of outcomes of the last validation."""

TRAINING = "train/"
"""Prefix of the paths of outcomes of the last logged training step."""

_CONFIG = "--config="
PATHS = [
    f"{section}/{path}"
    for sections in (SECTIONS, STORED)
    for section, declared in sections.items()
    for path in declared.paths
]
"""Paths of the numbers of results.json and, after validate/, of metrics.csv; * stands for any name."""


@dataclass(frozen=True)
class Level:
    """A level of an axis: its value is a number where the axis lists numbers, else the name."""

    name: str
    value: int | float | str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """A number of each run: the mean over paths in results.json, or, after "validate/" or "train/", in metrics.csv.

    `higher_is_better`: None for the declared direction of the paths. `step`: of the weights that the run kept: "best"
    by the validation's number `validate`, "end" for the last, or a number; "" for results.json, of best.ckpt.
    """

    path: str | list[str]
    percent: bool = False
    higher_is_better: bool | None = None
    digits: int = 3
    step: str | int = ""
    validate: str = ""

    def __post_init__(self) -> None:
        known = {is_higher_better(path) for path in self.paths}
        if self.higher_is_better is None and len(known) == 1:
            object.__setattr__(self, "higher_is_better", known.pop())

    @property
    def rule(self) -> str:
        """The rule for the step, in words."""
        return {"": "", BEST: "best step", END: "last step"}.get(str(self.step), f"step {self.step}")

    @property
    def is_higher_chosen(self) -> bool | None:
        """Direction of `validate`: the known one of a metric of this package, else that of the outcome."""
        known = is_higher_better(self.validate)
        return self.higher_is_better if known is None else known

    @property
    def paths(self) -> list[str]:
        return as_list(self.path)

    @property
    def bounds(self) -> tuple[float, float]:
        """Range of the number."""
        return bounds_of(self.paths)

    @property
    def scale(self) -> int:
        return 100 if self.percent else 1

    @property
    def is_of_validation(self) -> bool:
        """Read from metrics.csv, which training writes."""
        return self.paths[0].startswith((VALIDATION, TRAINING))


@dataclass(frozen=True)
class ReportTable:
    """A table with the compared levels as rows and outcomes as columns."""

    outcomes: list[str]
    title: str = ""
    where: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Places:
    """Places on the x axis, of outcomes or of compared levels."""

    label: str
    outcomes: dict[str, float] = field(default_factory=dict)
    levels: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plot:
    """Means, paired differences from the reference, or the embedding maps of the compared levels.

    `x` is an axis or places; compared levels are lines `across`, or those that are drawn (`levels`; none: all).
    """

    kind: Literal["lines", "differences", "map"]
    name: str
    x: str | Places = ""
    y: str | list[str] = field(default_factory=list)
    across: list[Any] = field(default_factory=list)
    levels: list[Any] = field(default_factory=list)
    where: dict[str, Any] = field(default_factory=dict)
    title: str = ""
    log: bool = False

    @property
    def used(self) -> list[str]:
        """The outcomes that are drawn."""
        return list(self.x.outcomes) if isinstance(self.x, Places) and self.x.outcomes else as_list(self.y)


@dataclass(frozen=True)
class Comparison:
    """The axis whose levels are compared, and the level that is subtracted from the others."""

    axis: str
    reference: Any


@dataclass(frozen=True)
class Hypothesis:
    """The difference of two compared levels in an outcome, tested at a share `alpha` of 0.05."""

    level: Any
    minus: Any
    outcome: str
    alpha: float
    alternative: Literal["two-sided", "greater", "less"] = "two-sided"
    where: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """The outcome by which the best levels are chosen: once, or at each level of an axis."""

    outcome: str
    for_each: str | None = None


@dataclass(frozen=True)
class LearningCurve:
    """The axis of `label_fraction`, which is drawn as a number of patients, and the outcome that is judged."""

    axis: str
    outcome: str


@dataclass(frozen=True, kw_only=True)
class Study:
    """The keys of an experiment file beside its settings and axes, see docs/experiments.md."""

    folder: Path
    commands: list[Literal["fit", "validate", "test", "predict"]] = field(
        default_factory=lambda: ["fit", "test"]
    )
    pairs: str | None = None
    compare: Comparison | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    hypotheses: dict[str, Hypothesis] = field(default_factory=dict)
    tables: list[ReportTable] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    choose: Choice | None = None
    learning_curve: LearningCurve | None = None
    patients: bool = False
    checkpoints: Literal["keep", "delete"] = "keep"


@dataclass(frozen=True, kw_only=True)
class Experiment(Study):
    """A checked experiment file: itself and its bases, arguments of all runs, levels of each axis, lines on files."""

    files: tuple[Path, ...]
    arguments: tuple[str, ...]
    axes: Mapping[str, tuple[Level, ...]]
    optional: tuple[str, ...] = ()

    @property
    def file(self) -> Path:
        """The experiment file itself."""
        return self.files[0]

    @property
    def own_file(self) -> str:
        """The file for a user to edit, or how to copy a packaged one."""
        if not self.file.is_relative_to(CONFIGS):
            return str(self.file)
        return f"a copy of it (medclip-dcl configs experiments/{self.file.stem} --output FILE)"

    @property
    def compared(self) -> str | None:
        """Axis whose levels are compared."""
        return self.compare.axis if self.compare else None

    @property
    def reference(self) -> Level | None:
        """Level that is subtracted from the others."""
        return self.level(self.compare.axis, self.compare.reference) if self.compare else None

    @property
    def choice(self) -> str:
        """Outcome by which the best levels are chosen; "" without a choice."""
        return self.choose.outcome if self.choose else ""

    @property
    def choice_axis(self) -> str | None:
        """Axis at each level of which they are chosen; None: once for all."""
        return self.choose.for_each if self.choose else None

    @property
    def groups(self) -> list[str]:
        """Axes that are neither paired nor compared: each combination of their levels is a comparison by itself."""
        return [name for name in self.axes if name not in (self.pairs, self.compared)]

    @property
    def rows(self) -> list[str]:
        """Axes of a mean: the groups, then the compared axis."""
        return [*self.groups, *([self.compared] if self.compared else [])]

    @property
    def searched(self) -> list[str]:
        """Axes on which a choice is made."""
        return [name for name in self.axes if name not in (self.pairs, self.choice_axis)]

    def level(self, axis: str, name: object) -> Level:
        """The level of an axis by its name, which a file may give as a number."""
        return next(level for level in self.axes[axis] if level.name == str(name))

    def runs(self) -> list[Run]:
        """All runs; the paired axis changes last, so that what is finished first is balanced over the others."""
        order = sorted(self.axes, key=lambda name: name != self.pairs)
        return [
            self._cell(dict(zip(order, levels, strict=True)))
            for levels in itertools.product(*(self.axes[name] for name in order))
        ]

    def covering_runs(self) -> list[Run]:
        """A few runs in which each level of each axis occurs."""
        n = max(map(len, self.axes.values()))
        return [
            self._cell({name: levels[i % len(levels)] for name, levels in self.axes.items()})
            for i in range(n)
        ]

    def _cell(self, levels: Mapping[str, Level]) -> Run:
        names = {axis: levels[axis].name for axis in self.axes}
        arguments = itertools.chain(self.arguments, *(levels[axis].arguments for axis in self.axes))
        folder = self.folder / "runs" / ",".join(f"{axis}={name}" for axis, name in names.items())
        return Run(names, folder, self.filled(tuple(arguments), names))

    def filled(self, arguments: Iterable[str], names: Mapping[str, str]) -> tuple[str, ...]:
        """Arguments in which the level stands for the name of an axis in braces, and paths of files beside this one."""
        found = list(arguments)
        for axis, name in names.items():
            found = [argument.replace(f"{{{axis}}}", name) for argument in found]
        own = {argument: self.file.parent / argument.removeprefix(_CONFIG) for argument in found}
        return tuple(
            f"{_CONFIG}{own[one]}" if one.startswith(_CONFIG) and own[one].is_file() else one for one in found
        )

    def identity(self) -> dict[str, Any]:
        """Content of experiment.json: what the runs were made with, the content of files and of prompts included."""
        axes = {
            axis: {name: settings for level in levels for name, settings in self._settings(axis, level)}
            for axis, levels in self.axes.items()
        }
        return {
            "commands": self.commands,
            "order": list(self.axes),  # it makes the names of the runs
            "settings": with_prompt_texts(merged(self.filled(self.arguments, {}))),
            "axes": with_prompt_texts(axes),
        }

    def _settings(self, axis: str, level: Level) -> Iterator[tuple[str, dict[str, Any]]]:
        """Its name and settings; at each level of another axis where its configuration files are named after that."""
        files = [argument for argument in level.arguments if argument.startswith(_CONFIG)]
        named = [name for name in self.axes if name != axis and any(f"{{{name}}}" in file for file in files)]
        for others in itertools.product(*(self.axes[name] for name in named)):
            names = {name: other.name for name, other in zip(named, others, strict=True)}
            where = "".join(f"{AT}{name}={other}" for name, other in names.items())
            yield f"{level.name}{where}", merged(self.filled(level.arguments, {**names, axis: level.name}))


def last_doubling(levels: Sequence[Level]) -> tuple[Level, Level] | None:
    """The largest level and the one of half its value; None without such a pair."""
    of_value = {level.value: level for level in levels if not isinstance(level.value, str)}
    whole = of_value.get(max(of_value, default=0))
    half = whole and of_value.get(whole.value / 2)  # type: ignore[operator]
    return (whole, half) if whole and half else None


def as_list(given: Any) -> list[Any]:
    """The values of a key that may have one or several."""
    return given if isinstance(given, list) else [] if given is None else [given]


def merged(arguments: Sequence[str]) -> dict[str, Any]:
    """The settings that arguments of the command line give, the content of their configuration files included."""
    parts = []
    for argument in arguments:
        name, _, value = argument.removeprefix("--").partition("=")
        if name == "config":
            parts.append(read_yaml(find_configuration(value, "", "configs").path))
        else:
            parts.append(
                reduce(lambda inner, key: {key: inner}, reversed(name.split(".")), yaml_value(value))
            )
    return reduce(_over, parts, {})


def with_prompt_texts(settings: Any) -> Any:
    """Settings in which texts stand for the names and paths of prompts, which a later version or an edit may change."""
    if isinstance(settings, list):
        return [with_prompt_texts(one) for one in settings]
    if not isinstance(settings, Mapping):
        return settings
    found = {key: with_prompt_texts(value) for key, value in settings.items()}
    if isinstance(given := found.get("prompts"), str):
        found["prompts"] = prompt_texts(read_prompts(find_configuration(given, "prompts", "prompts").path))
    return found


def _over(first: Any, second: Any) -> Any:
    """Settings over others: keys are merged, also those of lists of equal length, as the command line does it."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        both = {key: _over(first[key], second[key]) for key in first.keys() & second.keys()}
        return {**first, **second, **both}
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [_over(*pair) for pair in zip(first, second, strict=True)]
    return second
