"""The program ``medclip-dcl VERB`` (``python -m medclip_dcl VERB``): its table of verbs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from medclip_dcl.common.command_line import nearest, run_command
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.processes import let_threads_sleep


class Verb(NamedTuple):
    """A verb, the module that is imported to run it, and one line of help."""

    name: str
    module: str
    help: str


_CLI = "medclip_dcl.command.cli"
GROUPS = {
    "prepare data": (
        Verb("prepare mimic-cxr", "data_prep.mimic_cxr", "a set of MIMIC-CXR-JPG, or of a phantom"),
        Verb("prepare folder", "data_prep.folder", "a set of images or reports with a table"),
        Verb("prepare openi", "data_prep.openi", "a set of Open-i"),
        Verb("prepare public", "data_prep.public.__main__", "a set of a public release: NIH, CheXpert, ..."),
        Verb("phantom", "data_prep.phantom.__main__", "write synthetic radiographs with reports"),
        Verb("check", "data_prep.check", "verify a prepared set and count its contents"),
    ),
    "score sentences, encode sets": (
        Verb("score", "data_prep.score_sentences", "likelihood of sentences under a language model"),
        Verb("embed", "data_prep.embed_sentences", "sentence embeddings of a language model"),
        Verb("similar", "data_prep.text_similarity", "choose thresholds for the similarity of texts"),
        Verb("eta", "data_prep.eta_report", "class probabilities that follow from scores"),
        Verb("encode", "data_prep.encode", "outputs of frozen encoders, to train heads on"),
    ),
    "train and evaluate": (
        Verb("fit", _CLI, "train a model, or continue its training"),
        Verb("validate", _CLI, "evaluate on validate patients"),
        Verb("test", _CLI, "evaluate on test patients"),
        Verb("predict", _CLI, "write scores and embeddings of a set"),
        Verb("calibrate", "medclip_dcl.command.calibrate", "fit probabilities and thresholds of findings"),
    ),
    "compare": (
        Verb("report", "medclip_dcl.report.report", "page of a run"),
        Verb("compare", "medclip_dcl.report.compare", "tables of tested runs, with differences"),
        Verb("benchmark", "medclip_dcl.studies.benchmark", "test models on sets, on one page"),
        Verb("study", "medclip_dcl.studies.study", "train and compare a grid of runs"),
    ),
    "use a model": (
        Verb("ask", "medclip_dcl.ask.__main__", "heat maps and scores of image files"),
        Verb("page", "medclip_dcl.page.__main__", "heat maps of sentences in a browser"),
        Verb("export", "medclip_dcl.exchange.export", "folder of a model to share: card, ONNX, Hugging Face"),
        Verb("convert", "medclip_dcl.exchange.convert", "read a published CLIP, SigLIP, open_clip or BioViL"),
    ),
}
VERBS = {verb.name: verb for verbs in GROUPS.values() for verb in verbs}
_TWO_WORDS = {name.split()[0] for name in VERBS if " " in name}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb; a mistake of the user ends with one line and status 2."""
    let_threads_sleep()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in ([], ["--help"], ["-h"]):
        print(_help())
        return
    run_command(lambda: _run(words))


def _run(words: list[str]) -> None:
    n_words = 2 if words[0] in _TWO_WORDS else 1
    name = " ".join(words[:n_words])
    if name not in VERBS:
        raise UserError(
            f"VERB: expected one of {', '.join(VERBS)}, found {name!r}{nearest(name, VERBS)}; medclip-dcl --help"
        )
    module = VERBS[name].module
    importlib.import_module(module).main(words if module == _CLI else words[n_words:])


def _help() -> str:
    lines = ["usage: medclip-dcl VERB ...; options of a verb: medclip-dcl VERB --help"]
    for group, verbs in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {verb.name:<18} {verb.help}" for verb in verbs)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
