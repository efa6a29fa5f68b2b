"""Pages of the reference, made from the program: its verbs, the settings of configurations, the public names."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from argparse import SUPPRESS
from collections.abc import Iterable
from typing import Any

from jsonargparse import ArgumentParser
from pytorch_lightning import LightningDataModule, LightningModule, Trainer

from medclip_dcl import networks, objectives, unimodal
from medclip_dcl.__main__ import VERBS
from medclip_dcl.command.lightning_cli import RunOptions
from medclip_dcl.evaluation.callback import Evaluation
from medclip_dcl.training.best_checkpoint import BestCheckpoint

PACKAGES = "use objectives networks metrics scoring models data evaluation unimodal"
FURTHER = (
    "common.distributed.gather_with_grad common.find_model.find_model data.link.LinkedDataModule "
    "data.samplers.EpochDataModule evaluation.callback.Evaluation report.subgroups.subgroup_table"
)
SETTINGS: dict[str, tuple[type, ...]] = {
    "": (RunOptions,),
    "model": (LightningModule,),
    "model.init_args.image_encoder": (networks.RegionEncoder, unimodal.SmallImageEncoder),
    "model.init_args.text_encoder": (networks.SentenceEncoder,),
    "model.init_args.similarity": (networks.Similarity,),
    "model.init_args.class_probability": (objectives.ClassProbability,),
    "model.init_args.negative_weights": (objectives.NegativeWeights,),
    "model.init_args.near_texts": (objectives.NearTexts,),
    "model.init_args.loss": (objectives.AnchorLoss,),
    "model.init_args.objective": (unimodal.ViewsObjective,),
    "data": (LightningDataModule,),
    "trainer.callbacks": (Evaluation,),
    "checkpoint": (BestCheckpoint,),
    "trainer": (Trainer,),
}


def named(path: str) -> Any:
    """The class or function of a dotted name."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def public() -> dict[str, list[str]]:
    """Public names of each package, dotted."""
    packages = ["medclip_dcl", *(f"medclip_dcl.{name}" for name in PACKAGES.split())]
    found = {name: [f"{name}.{one}" for one in dir(importlib.import_module(name))] for name in packages}
    return found | {"Further names": [f"medclip_dcl.{name}" for name in FURTHER.split()]}


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    """A table of Markdown, whose first column is code."""
    cells = [
        [re.sub(r"\s+", " ", str(cell)).replace("|", r"\|").replace("<", "&lt;") for cell in row]
        for row in rows
    ]
    lines = [f"| `{first}` | {' | '.join(others).replace('*', chr(92) + '*')} |" for first, *others in cells]
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *lines, "", ""])


def commands() -> dict[str, str]:
    """Page of each verb: its docstring and its options."""
    pages = {}
    for name, verb in VERBS.items():
        text = f"To {verb.help}. `--help` shows the [settings](../settings.md) that people change, `--help-all` all.\n"
        if verb.options:
            options, rows = named(verb.options_path), []
            for field in dataclasses.fields(options):
                flag = field.metadata.get("flag", f"--{field.name}")
                value = (
                    field.metadata.get("metavar")
                    or "{" + ",".join(map(str, field.metadata.get("choices", ()))) + "}"
                )
                value = "" if field.default is False or value == "{}" else f" {value}"
                rows.append(
                    (
                        f"{flag}{value}" if flag else value.strip() or field.name,
                        field.metadata["help"].replace(SUPPRESS, "as said above"),
                    )
                )
            text = re.sub(r"docs/(\w+\.md)", r"[\1](../../\1)", inspect.cleandoc(options.__doc__))
            text = f"{text}\n\n{table('| option | meaning |', rows)}"
        pages[name] = f"# medclip-dcl {name}\n\n{text}"
    return pages


def settings() -> str:
    """Page of the settings: arguments of the classes that a configuration names, as the command line takes them."""
    text = [
        "# Settings of configurations",
        "",
        "Keys of a YAML file, and options of `fit`, `validate`, `test` and `predict`.",
    ]
    paths = {path: named(path) for names in public().values() for path in names if path.count(".") == 2}
    for place, kinds in SETTINGS.items():
        text += ["", f"## {place or 'Of a run'}", ""]
        known = {x: one for x, one in paths.items() if inspect.isclass(one) and issubclass(one, kinds)}
        for path, one in (known or dict.fromkeys([""], kinds[0])).items():
            if inspect.isabstract(one) or (one in kinds and len(known) > 1):
                continue  # the base of others
            parser = ArgumentParser(add_help=False)
            parser.add_class_arguments(one, "of")
            given = {x.name for x in inspect.signature(one).parameters.values() if x.default is x.empty}
            rows = [
                (
                    x,
                    "required" if x in given else f"`{json.dumps(action.default, default=str)}`",
                    action.help or "",
                )
                for action in parser._actions
                if action.default != SUPPRESS and (x := action.dest.partition(".")[2])
            ]
            if path:
                text += [f"### {path.rpartition('.')[2]}\n", f"`{path}`{'' if rows else ': no settings'}"]
            text += ["", table("| setting | default | meaning |", rows)] if rows else []
    return "\n".join(text)


def names() -> dict[str, str]:
    """Page of each package: its public names with their docstrings."""
    pages = {}
    for package, paths in public().items():
        kinds = {path: "autoclass" if inspect.isclass(named(path)) else "autofunction" for path in paths}
        lines = [f".. {kind}:: {path}\n" for path, kind in kinds.items()]
        pages[package] = "\n".join([f"# {package}\n", "```{eval-rst}", *lines, "```\n"])
    return pages
