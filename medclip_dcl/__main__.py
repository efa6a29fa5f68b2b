"""The program ``medclip-dcl VERB`` (``python -m medclip_dcl VERB``): its table of verbs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from medclip_dcl import __version__
from medclip_dcl.common.command_line import nearest, parse_options, run_command
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.processes import let_threads_sleep


class Verb(NamedTuple):
    """A verb: the function that runs it, the dataclass of its options, one line of help.

    The options stand in options.py of the function's room, which imports neither torch nor pandas; the function's
    module is imported to run the verb alone, not for its help. LightningCLI declares the options of `fit`, `validate`,
    `test` and `predict`, whose function takes the words.
    """

    function: str
    options: str
    help: str

    @property
    def options_path(self) -> str:
        """Import path of the dataclass."""
        top, room, *_ = self.function.split(".")
        own = f"{top}.{room}" if top == "medclip_dcl" or room == "phantom" else top
        return f"{own}.options.{self.options}"


_CLI, _SETTINGS = "medclip_dcl.command.cli.main", "medclip_dcl.command.settings"
GROUPS = {
    "try": {
        "demo": Verb("medclip_dcl.command.demo.run", "Demo", "the whole way on a phantom, in minutes"),
    },
    "prepare data": {
        "prepare mimic-cxr": Verb("data_prep.mimic_cxr.prepare", "MimicCxr", "MIMIC-CXR-JPG, or a phantom"),
        "prepare folder": Verb("data_prep.folder.prepare", "Folder", "images or reports with a table"),
        "prepare openi": Verb("data_prep.openi.prepare", "OpenI", "Open-i"),
        "prepare public": Verb("data_prep.public.command.prepare", "Public", "NIH, CheXpert, RSNA, ..."),
        "shard": Verb("data_prep.shard.run", "Shard", "store a set's images in a few tar files, or undo it"),
        "phantom": Verb("data_prep.phantom.release.run", "Phantom", "synthetic radiographs with reports"),
        "check": Verb("data_prep.sources.check.run", "Check", "verify a prepared set and count its contents"),
    },
    "score sentences, encode sets": {
        "score": Verb("medclip_dcl.encoding.score_sentences.run", "Score", "likelihood of sentences"),
        "embed": Verb("medclip_dcl.encoding.embed_sentences.embed_sentences", "Embed", "sentence embeddings"),
        "similar": Verb(
            "medclip_dcl.encoding.text_similarity.run", "Similar", "choose thresholds of text similarity"
        ),
        "rank": Verb(
            "medclip_dcl.encoding.rank_reports.rank_reports",
            "Rank",
            "which reports fit a sentence, from the reports",
        ),
        "eta": Verb(
            "medclip_dcl.encoding.eta_report.write_report",
            "Eta",
            "class probabilities that follow from scores",
        ),
        "encode": Verb(
            "medclip_dcl.encoding.encode.encode", "Encode", "outputs of frozen encoders, to train heads on"
        ),
    },
    "train and evaluate": {
        "fit": Verb(_CLI, "", "train a model, or continue its training"),
        "validate": Verb(_CLI, "", "evaluate on validate patients"),
        "test": Verb(_CLI, "", "evaluate on test patients"),
        "predict": Verb(_CLI, "", "write scores and embeddings of a set"),
        "calibrate": Verb(
            "medclip_dcl.evaluation.calibrate.run", "Calibrate", "probabilities and thresholds of findings"
        ),
    },
    "compare": {
        "report": Verb("medclip_dcl.report.report.run", "Report", "page of a run"),
        "compare": Verb("medclip_dcl.report.compare.run", "Compare", "tables of tested runs"),
        "benchmark": Verb("medclip_dcl.studies.benchmark.run", "Benchmark", "test models on sets, on a page"),
        "configs": Verb(
            "medclip_dcl.command.configs.run", "Configs", "list packaged configurations, copy one"
        ),
        "study": Verb("medclip_dcl.studies.study.run", "Study", "train and compare a grid of runs"),
    },
    "use a model": {
        "ask": Verb("medclip_dcl.use.ask.run", "Ask", "heat maps and scores of image files"),
        "page": Verb("medclip_dcl.use.page.serve.run", "Page", "heat maps of sentences in a browser"),
        "export": Verb("medclip_dcl.exchange.export.run", "Export", "a folder to share, ONNX, Hugging Face"),
        "bundle": Verb(
            "medclip_dcl.exchange.bundle.run", "Bundle", "wheels and a model for a machine without a network"
        ),
        "convert": Verb("medclip_dcl.exchange.convert.run", "Convert", "a published model"),
    },
}
VERBS = {name: verb for verbs in GROUPS.values() for name, verb in verbs.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb; a mistake of the user ends with one line and status 2."""
    let_threads_sleep()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in ([], ["--help"], ["-h"]):
        print(_help(GROUPS))
    elif words[:1] == ["--version"]:
        print(f"medclip-dcl {__version__}")
    elif words[:1] == ["prepare"] and words[1:2] in ([], ["--help"], ["-h"]):
        print(_help(["prepare data"]))
    else:
        run_command(f"medclip-dcl {_verb(words)}".strip(), partial(run, words))


def run(words: Sequence[str]) -> None:
    """Run a verb and raise its errors.

    Raises:
        UserError: no such verb.
    """
    name = _verb(words)
    if not name:
        given = " ".join(words[: 2 if words[:1] == ["prepare"] else 1])
        raise UserError(f"VERB: expected one of {', '.join(VERBS)}, found {given!r}{nearest(given, VERBS)}")
    verb = VERBS[name]
    if not verb.options:
        if {"-h", "--help"} & {*words}:
            print(_named(f"{_SETTINGS}.short_help")(name, verb.help))
        else:
            _named(verb.function)(["--help" if word == "--help-all" else word for word in words])
        return
    options = parse_options(_named(verb.options_path), f"medclip-dcl {name}", words[name.count(" ") + 1 :])
    _named(verb.function)(options)


def _verb(words: Sequence[str]) -> str:
    """Name of the verb that the words begin with, or ""."""
    return next((name for name in VERBS if [*words[: name.count(" ") + 1]] == name.split()), "")


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _help(groups: Iterable[str]) -> str:
    lines = ["usage: medclip-dcl VERB ...; the options of a verb: medclip-dcl VERB --help; also --version"]
    for group in groups:
        verbs = GROUPS[group].items()
        lines += ["", f"{group}:", *(f"  {name:<18} {verb.help}" for name, verb in verbs)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
