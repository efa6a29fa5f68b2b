"""Options of `demo` and `configs`, declared without torch and pandas."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from medclip_dcl.common.command_line import option, positional
from medclip_dcl.common.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Go the whole way on the digital phantom: data, language model, scores, training, test, calibration, report.

    Each step is a command that is printed before it runs. The same command continues a demo that was stopped; finished
    steps are skipped.
    """

    folder: Path = option("folder that gets data/ and runs/ (.)", Path("."), type=Path, metavar="FOLDER")


@dataclass(frozen=True, kw_only=True)
class Configs:
    """List the packaged configurations, experiments, prompts and batch files, or copy one to edit it.

    Other commands take these names without the folder of the kind: --config mimic_cxr, --config objective/dcl_lm,
    study digits, --prompts public. A file of such a name in the working directory is taken instead.
    """

    name: str | None = positional(
        "print this one, by its name in the list, or copy it to --output", None, nargs="?", metavar="NAME"
    )
    output: Path | None = option("copy it to this file, a new one", None)

    def __post_init__(self) -> None:
        if self.output and not self.name:
            raise UserError("--output: expected a NAME to copy; medclip-dcl configs lists them")
