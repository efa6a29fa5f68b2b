"""Test models on prepared sets by one protocol, and compare them on one page."""

from __future__ import annotations

import signal
import sys

from pandas import DataFrame

from medclip_dcl.common.command_line import in_words
from medclip_dcl.common.devices import usable_device, without_tf32
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import read_prompts
from medclip_dcl.common.processes import stop
from medclip_dcl.data.lineage import Answer
from medclip_dcl.report.draws import require_same_cases
from medclip_dcl.runs.saved import notes_of_test, other_pictures
from medclip_dcl.studies import benchmark_plan as plan
from medclip_dcl.studies.benchmark_page import write_page
from medclip_dcl.studies.benchmark_probe import Probes, shares_of
from medclip_dcl.studies.one_run import LOG_FILE, run_one
from medclip_dcl.studies.options import Benchmark


def run(options: Benchmark) -> None:
    """Test and compare; status 1 where a test failed, 143 if stopped."""
    # Lightning would end a test at a signal as one that failed, and the next would begin.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    usable_device(options.device)
    without_tf32()  # features of probes, too
    models = plan.read_models(options.models, options.names and options.names.split(","), options.probe)
    sets, prompts = plan.read_sets(options.sets), read_prompts(options.prompts, "--prompts")
    names = [model.name for model in models if not model.is_encoder]
    names += [model.probe for model in models if options.probe]
    baseline = names[0] if options.baseline is None else options.baseline
    if baseline not in names:
        raise UserError(f"--baseline: expected one of {', '.join(names)}, found {baseline!r}")
    notes = ["Intervals of probes are over test patients: not over draws of train patients"] * options.probe
    failures: list[str] = []
    runs: dict[str, list[plan.BenchmarkedRun]] = {}
    trained: dict[tuple[str, str], Answer] = {}
    fits: list[DataFrame] = []
    for name, prepared in sets.items():
        if prepared.changes:
            notes.append(prepared.changes)
        if without := [finding for finding in prepared.findings if finding not in prompts]:
            notes.append(f"{name}: no prompts, so no zero-shot AUC: {', '.join(without)} (--prompts)")
        tables = {table for table in ("boxes", "masks") if prepared.has(table)}
        if not tables and {"test", "grounding"}.isdisjoint(prepared.table("images")["use"]):
            advice = "prepare it with --split_shares, or --official_validate_as_test, to another --output"
            failures.append(f"{name}: no image of {prepared.folder} is for test; {advice}")
            print(failures[-1], flush=True)
            continue
        for model in (
            Probes(name, prepared, options).each(models, notes, failures, fits) if options.probe else models
        ):
            where = f"{model.name} on {name}"
            trained[name, model.name] = model.lineage.of_set(prepared)
            if model.findings and not {*model.findings} & {*prepared.findings}:
                notes.append(f"{where}: not applicable, the set labels none of {', '.join(model.findings)}")
                print(notes[-1], flush=True)
                continue
            how = (prompts, options.ensemble, options.imported)
            to = (options.output, options.device, options.counts_blank)
            run, prepare = plan.test_of(model, name, prepared, *how, *to)
            end = run_one(run, ("test",), prepare=prepare)
            if end.state == "stopped":
                print("stopped; the same command continues where it stopped", file=sys.stderr)
                raise SystemExit(128 + signal.SIGTERM)
            done = f"tested in {in_words(end.seconds)}" if end.seconds is not None else "is tested already"
            problem, tested = "", plan.BenchmarkedRun(run.folder, model)
            if end.state == "busy":
                problem = "another process is testing it; give the same command after its end"
            elif end.state != "done":
                problem = f"{end.error} ({run.folder / LOG_FILE})"
            elif end.seconds is not None and plan.asked_for(run.folder).get("model") != model.digest():
                problem = "the model was changed during its test; the same command tests it again"
            else:
                try:
                    for other in [tested, *runs.get(name, [])]:
                        require_same_cases(tested.predictions, other.predictions)
                except UserError as error:
                    problem = f"{error}; or delete {run.folder} and give the same command"
            print(f"{where}: {problem or done}", flush=True)
            if problem:
                failures.append(f"{where}: {problem}")
                continue
            runs.setdefault(name, []).append(tested)
            for note in other_pictures(tested.tested):
                notes.insert(0, f"{where}: {note}")
            notes += [f"{where}: {note}" for note in notes_of_test(tested.tested)]
            if marks := plan.marks(trained[name, model.name]):
                notes.append(f"{marks} {where}: trained on {trained[name, model.name]}")
    if not runs and not failures:  # an earlier page in the folder is not that of this command
        raise UserError("MODEL: expected one that applies to a set of --sets, found none; nothing was tested")
    unknown = dict.fromkeys(name for (_, name), answer in trained.items() if not answer.is_known)
    if unknown:
        notes.append(f"not known on which images they were trained: {', '.join(unknown)}")
    if runs:
        (options.output / "probe_shares.csv").unlink(missing_ok=True)  # of an earlier page
        shares = shares_of(fits, options.output) if fits and options.probe_shares else {}
        print(f"page: {write_page(runs, baseline, trained, notes, failures, options.output, shares)}")
    if failures:
        print(f"tests failed: {len(failures)}; the same command tries them again", file=sys.stderr)
        raise SystemExit(1)
