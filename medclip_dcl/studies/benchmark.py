"""Test models on prepared sets by one protocol, and compare them on one page.

    medclip-dcl benchmark MODEL... --sets SET... --output FOLDER

Tests that are finished are kept: the same command continues after a kill, and one with a further model or set tests
only that. Writes benchmark.html and benchmark.csv of the models and sets of the command.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, get_args

from medclip_dcl.common.command_line import add_import_option, in_words, run_command
from medclip_dcl.common.findings import Ensemble

PROMPTS = Path("configs/prompts/public.yaml")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; status 1 where a test failed, 2 for a mistake of the user, 143 if stopped."""
    options = _parser().parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    # Here, so that --help is quick.
    from medclip_dcl.common.errors import UserError
    from medclip_dcl.common.findings import read_prompts
    from medclip_dcl.runs.saved import SavedResultsError, other_geometry
    from medclip_dcl.statistics.draws import require_same_cases
    from medclip_dcl.studies import benchmark_plan as plan
    from medclip_dcl.studies.benchmark_page import write_page
    from medclip_dcl.studies.one_run import LOG_FILE, run_one

    models = plan.read_models(options.models, options.names and options.names.split(","))
    sets, prompts = plan.read_sets(options.sets), read_prompts(options.prompts, "--prompts")
    names = [model.name for model in models]
    baseline = names[0] if options.baseline is None else options.baseline
    if baseline not in names:
        raise UserError(f"--baseline: expected one of {', '.join(names)}, found {baseline!r}")
    notes: list[str] = []
    failures: list[str] = []
    runs: dict[str, list[plan.BenchmarkedRun]] = {}
    trained = {
        (name, model.name): model.lineage.of_set(prepared)
        for name, prepared in sets.items()
        for model in models
    }
    for name, prepared in sets.items():
        if prepared.changes:
            notes.append(prepared.changes)
        if without := [finding for finding in prepared.findings if finding not in prompts]:
            notes.append(f"{name}: no prompts, so no zero-shot AUC: {', '.join(without)} (--prompts)")
        for model in models:
            if model.findings and not {*model.findings} & {*prepared.findings}:
                known_findings = ", ".join(model.findings)
                notes.append(
                    f"{model.name} on {name}: not applicable, the set labels none of {known_findings}"
                )
                print(notes[-1], flush=True)
                continue
            how = (prompts, options.ensemble, options.imported)
            run, prepare = plan.test_of(model, name, prepared, *how, options.output)
            end = run_one(run, ("test",), modules=options.imported, prepare=prepare)
            if end.state == "stopped":
                print("stopped; the same command continues where it stopped", file=sys.stderr)
                raise SystemExit(128 + signal.SIGTERM)
            done = f"tested in {in_words(end.seconds)}" if end.seconds is not None else "is tested already"
            problem, tested = "", plan.BenchmarkedRun(run.folder, model)
            if end.state == "busy":
                problem = "another process is testing it; give the same command after its end"
            elif end.state != "done":
                problem = f"{end.error} ({run.folder / LOG_FILE})"
            elif end.seconds is not None and plan.has_changed(run, model):
                problem = "the model was changed during its test; the same command tests it again"
            else:
                try:
                    for other in [tested, *runs.get(name, [])]:
                        require_same_cases(tested.predictions, other.predictions)
                except SavedResultsError as error:
                    problem = f"{error}; or delete {run.folder} and give the same command"
            print(f"{model.name} on {name}: {problem or done}", flush=True)
            if problem:
                failures.append(f"{model.name} on {name}: {problem}")
                continue
            runs.setdefault(name, []).append(tested)
            if geometry := other_geometry(tested.tested):
                notes.insert(0, f"{model.name} on {name}: {geometry}")
            if marks := plan.marks(trained[name, model.name]):
                notes.append(f"{marks} {model.name} on {name}: trained on {trained[name, model.name]}")
    if not runs and not failures:  # an earlier page in the folder is not that of this command
        raise UserError("MODEL: expected one that applies to a set of --sets, found none; nothing was tested")
    unknown = [model.name for model in models if not model.lineage.is_known]
    if unknown:
        notes.append(f"not known on which images they were trained: {', '.join(unknown)}")
    if runs:
        page = write_page(runs, baseline, trained, notes, failures, options.output)
        print(f"page: {page}")
    if failures:
        print(
            f"tests failed: {len(failures)}; the same command tries them again",
            file=sys.stderr,
        )
        raise SystemExit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medclip-dcl benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("models", type=Path, nargs="+", metavar="MODEL", help="run folder, checkpoint or exported folder")
    add("--sets", type=Path, nargs="+", required=True, metavar="SET", help="prepared sets")
    add("--output", type=Path, required=True, metavar="FOLDER", help="where tests and page go")
    add("--names", metavar="A,B", help="names of the models, by commas; default: of their folders")
    add("--baseline", metavar="NAME", help="model that is subtracted from the others; default: the first")
    add("--prompts", type=Path, default=PROMPTS, metavar="FILE", help=f"of findings; default {PROMPTS}")
    words = "several prompts a side: the mean of scores (default) or of embeddings, as in CLIP"
    add("--ensemble", choices=get_args(Ensemble), default="scores", help=words)
    add_import_option(parser)
    return parser


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """Lightning would end a test at a signal as one that failed, and the next would begin."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    run_command(main)
