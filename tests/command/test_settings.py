"""The short help lists settings of LightningCLI that exist, with the defaults that they have."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import pytest

from medclip_dcl.__main__ import VERBS, main
from medclip_dcl.command.lightning_cli import FinishedRun, MedclipCLI
from medclip_dcl.command.settings import settings_of
from medclip_dcl.data import ImageTextDataModule
from medclip_dcl.models import ImageTextModel

CLASSES: dict[str, Any] = {"data": ImageTextDataModule, "model": ImageTextModel}


@pytest.mark.parametrize("verb", [name for name, verb in VERBS.items() if not verb.options])
def test_listed_settings_are_real_with_their_defaults(verb):
    defaults: dict[str, Any] = {}

    class Parser(MedclipCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            defaults.update(self._parser(verb).get_defaults().items())
            raise FinishedRun

    with suppress(FinishedRun):
        Parser([verb])
    listed = settings_of(verb)
    assert len(listed) > 10
    for name, (default, _) in listed.items():
        setting = name.split()[0]
        part, _, argument = setting.partition(".init_args.")
        actual = defaults[setting] if not argument else None
        if argument:
            actual = inspect.signature(CLASSES[part]).parameters[argument].default
            actual = "required" if actual is inspect.Parameter.empty else actual
        assert actual == default and type(actual) is type(default), setting


def test_the_long_help_is_that_of_the_parser(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--help-all"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: medclip-dcl") and "--trainer.gradient_clip_val" in shown
    assert len(shown.splitlines()) > 300
