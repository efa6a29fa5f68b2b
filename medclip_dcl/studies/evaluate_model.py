"""Test a model on a prepared set from Python: ``medclip_dcl.evaluate``."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pandas as pd
import torch

from medclip_dcl.common.devices import usable_device
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import write_json, write_shared_parquet
from medclip_dcl.common.findings import Ensemble, PromptSource, read_prompts
from medclip_dcl.common.packaged import find_packaged
from medclip_dcl.common.processes import stop
from medclip_dcl.common.weight_files import read_model
from medclip_dcl.data.lineage import Lineage
from medclip_dcl.report.failures import failures
from medclip_dcl.report.subgroups import groups_of_run, rows_of
from medclip_dcl.runs.run_folder import DATA_FILE, IMAGES_FILE, stated_data
from medclip_dcl.runs.saved import notes_of_test, other_pictures
from medclip_dcl.studies import benchmark_plan as plan
from medclip_dcl.studies.benchmark_page import place_of
from medclip_dcl.studies.one_run import run_one
from medclip_dcl.use.model import LoadedModel

_ONE_AT_A_TIME = threading.Lock()
"""A test has the output, the random states and the environment of the process."""


def evaluate(
    model: str | Path | LoadedModel,
    data: str | Path,
    output: str | Path | None = None,
    *,
    prompts: PromptSource | None = None,
    ensemble: Ensemble = "scores",
    device: str = "auto",
) -> pd.DataFrame:
    """Test a model on a prepared set by the protocol of ``medclip-dcl benchmark``, in float32.

    >>> from medclip_dcl import evaluate, load                          # doctest: +SKIP
    >>> model = load("runs/demo")                                       # doctest: +SKIP
    >>> evaluate(model, "data/phantom").query("metric == 'classification/auc'")  # doctest: +SKIP

    The numbers are those of ``benchmark`` on the same model, set, prompts and device. Random states, TF32 settings and
    the seed in the environment stay as they were.

    Args:
        model: run folder, checkpoint, exported folder or Hugging Face repository (owner/name), or a loaded model,
            which is tested with its weights as they are in memory.
        data: folder of a prepared set.
        output: folder for results, predictions and log, which may be that of a benchmark: a finished test of the same
            files (of a loaded model those that it is saved as), set and prompts is not repeated. None: a temporary
            folder, which is removed.
        prompts: of the findings, as in `LoadedModel.classify`, None: the packaged `public`; a classifier scores its own
            findings.
        ensemble: of several prompts a side.
        device: auto (a GPU if there is one), cpu, cuda or cuda:N.

    Returns:
        A row for each number of the test: finding ("" for a mean over findings, boxes or queries); metric, its path in
        results.json without the finding; value, low and high, its 95% interval over patients (NaN for a finding of
        fewer than 20 patients); positives, the cases of the finding (images with the label 1, boxes, or images with a
        region); patients with a case, of the rarer class. Sets that name no patients count images. Results by
        group have metrics such as classification/view/PA/auc and, of the gap, classification/view/AP − PA/auc;
        `attrs["where_it_fails"]` holds sentences.

    Raises:
        UserError: no such model, set or device; a model that has no finding of the set; a loaded model whose folder is
            gone or has other data; a test that failed, such as on images that the model was trained on.
        KeyboardInterrupt: the test was interrupted.

    Warns:
        UserWarning: findings without prompts; a training on images of this set in another set, or on images that are
            not known; images of another geometry.
    """
    if not isinstance(model, (str, Path, LoadedModel)):
        raise UserError(
            f"model: expected a path or what load returned, found {type(model).__name__}; write it by "
            "trainer.save_checkpoint(FILE) and give load(FILE)"
        )
    usable_device(device)
    used = read_prompts(find_packaged("public", "prompts") if prompts is None else prompts)
    [(name, prepared)] = plan.read_sets([Path(data)]).items()
    with TemporaryDirectory() as temporary:
        folder = Path(model if isinstance(model, (str, Path)) else _saved(model, Path(temporary)))
        [one] = plan.read_models([folder], None)
        if one.findings and not {*one.findings} & {*prepared.findings}:
            raise UserError(
                f"{data}: expected labels of the model's findings ({', '.join(one.findings)}), found labels of "
                f"{', '.join(prepared.findings) or 'none'}"
            )
        answer = one.lineage.of_set(prepared)
        without = [] if one.is_classifier else [x for x in prepared.findings if x not in used]
        notes = [
            prepared.changes,
            f"{name}: no prompts, so no zero-shot AUC: {', '.join(without)}" if without else "",
            f"{one.name} was trained on: {answer}" if answer.elsewhere or not answer.is_known else "",
        ]
        where = Path(temporary if output is None else output)
        how = (used, ensemble, _own_modules(one), where, device)
        run, prepare = plan.test_of(one, name, prepared, *how)
        with _ONE_AT_A_TIME, _unchanged():
            end = run_one(run, ("test",), prepare=prepare)
        if end.state == "stopped":
            raise KeyboardInterrupt
        if end.state != "done":
            raise UserError(
                end.error or f"{run.folder}: another process is testing it; repeat this after its end"
            )
        tested = plan.BenchmarkedRun(run.folder, one)
        for note in filter(None, [*notes, *other_pictures(tested.tested), *notes_of_test(tested.tested)]):
            warnings.warn(note, stacklevel=2)
        return _table(tested)


def _saved(model: LoadedModel, temporary: Path) -> Path:
    """The weights in memory as an exported folder, with the lineage of the model that they were loaded from."""
    folder = temporary / "models" / Path(model.name).resolve().name
    model.network.save_pretrained(folder)
    if model.origin is not None:
        path, stated = model.origin
        saved = read_model(path) if path.exists() else None
        if saved is None or stated_data(saved) != stated:
            raise UserError(
                f"{path}, its {DATA_FILE} or {IMAGES_FILE} is gone or has changed; load {model.name} again"
            )
        lineage = Lineage.of(saved)
        write_json(lineage.record, folder / DATA_FILE)
        write_shared_parquet(lineage.images, folder / IMAGES_FILE)
    return folder


def _own_modules(model: plan.Model) -> list[str]:
    """Modules of the user's own classes in a network, which are imported by now."""
    from medclip_dcl.command.config_files import KNOWN

    parts = (part["class_path"] for part in model.saved.network.values() if isinstance(part, Mapping))
    modules = {path.rpartition(".")[0] for path in parts}
    return sorted(one for one in modules if not f"{one}.".startswith(tuple(f"{known}." for known in KNOWN)))


@contextmanager
def _unchanged() -> Iterator[None]:
    """Leave random states, TF32 and environment of the process as they were; an interruption ends the test alone."""
    from pytorch_lightning.utilities.seed import isolate_rng

    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    tf32 = convolutions.allow_tf32, products.allow_tf32
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, stop) if is_main else None
    try:
        with isolate_rng(), patch.dict(os.environ):
            yield
    finally:
        convolutions.allow_tf32, products.allow_tf32 = tf32
        if is_main:
            signal.signal(signal.SIGINT, before)


def _table(run: plan.BenchmarkedRun) -> pd.DataFrame:
    rows, groups = [], groups_of_run(run)
    numbers = [("", path, found) for path, found in run.intervals.items()]
    for group, path, found in [*numbers, *rows_of(groups)]:
        section, finding, metric = place_of(path, group).values()
        # Cases by single prompts are those of the classification; groups have further sections.
        cases = run.predictions.tables.get(section.replace("prompts", "classification"))
        positives: int | None = None
        if finding and not group and cases is not None:
            is_positive = cases["label"] == 1 if "label" in cases else True
            kind = "reader" if "/by_reader/" in path else "category"
            of = cases["finding" if "finding" in cases else kind]
            positives = int(((of == finding) & is_positive).sum())
        patients = found.n_patients
        if cases is not None and not (finding or group):
            patients = cases["subject_id"].nunique()
        rows.append((finding, f"{section}/{metric}", found.value, found.low, found.high, positives, patients))
    table = pd.DataFrame(rows, columns=["finding", "metric", "value", "low", "high", "positives", "patients"])
    table.attrs["where_it_fails"] = [x.text for x in failures(run.predictions, run.draws(), groups)]
    kinds = dict.fromkeys(("value", "low", "high"), "float64") | dict.fromkeys(
        ("positives", "patients"), "Int64"
    )
    return table.astype(kinds)
