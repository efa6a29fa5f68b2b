"""Short help of the verbs whose options LightningCLI declares, without importing it."""

from __future__ import annotations

import json
from pathlib import Path

from medclip_dcl.common.files import read_yaml

ALL = "--help-all"
_HELP = """\
usage: medclip-dcl {verb} --config FILE [--config FILE ...] [--SETTING VALUE ...]
       medclip-dcl {verb} RUN [--SETTING VALUE ...]

{purpose}. Settings that people change, with their defaults where no
configuration sets others (those of data and model: of ImageTextDataModule and ImageTextModel):

{settings}

All settings: medclip-dcl {verb} {all}
Those of a class: medclip-dcl {verb} --model.help CLASS, --data.help CLASS
Their values in a command: the same command with --print_config"""


def settings_of(verb: str) -> dict[str, tuple[object, str]]:
    """Name and placeholder of each setting -> default and meaning."""
    listed = read_yaml(Path(__file__).with_suffix(".yaml"))
    return {name: pair for verbs, of in listed.items() if verb in verbs.split() for name, pair in of.items()}


def short_help(verb: str, purpose: str) -> str:
    lines = []
    for name, (default, meaning) in settings_of(verb).items():
        shown = "" if default is None else f" ({json.dumps(default)})".replace('"', "")
        lines.append(f"  --{name:<38} {meaning}{shown}")
    purpose = purpose[:1].upper() + purpose[1:]
    return _HELP.format(verb=verb, purpose=purpose, settings="\n".join(lines), all=ALL)
