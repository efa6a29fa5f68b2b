"""Shared fixtures; shapes are checked by jaxtyping and beartype while the tests run.

What the fixtures need is imported inside them: pytest-xdist's first process reads this file alone, runs no test, and
its workers wait for it.
"""

from __future__ import annotations

import gc
import inspect
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from jaxtyping import config as jaxtyping_config
from jaxtyping import install_import_hook

if TYPE_CHECKING:
    from medclip_dcl.use.model import LoadedModel

ROOT = Path(__file__).resolve().parent.parent


def modules_with_shapes() -> list[str]:
    """The project's modules that annotate shapes."""
    files = [file for package in ("medclip_dcl", "data_prep") for file in (ROOT / package).rglob("*.py")]
    with_shapes = [file for file in files if "from jaxtyping import" in file.read_text(encoding="utf-8")]
    return [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in with_shapes]


# Before anything of the project is imported: their functions then check their arguments and results.
install_import_hook(modules_with_shapes(), "beartype.beartype")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules stay: searching them for garbage, at import and again in each full collection, is slow.

    Building a parser leaves thousands of objects that live on, so that Python's 700 between collections are few.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000)
        gc.enable()


FORKING = (
    *("studies/test_grid_run.py", "studies/test_grid_steps.py", "models/test_two_processes.py"),
    "evaluation/test_two_processes.py",
    *("training/test_two_processes.py", "data_prep/test_kills.py", "data_prep/test_score_sentences.py"),
    "data_prep/phantom/test_release.py",
)
"""Files that fork processes from the server of `processes.py`, whose imports take seconds: one worker runs them all.

The two_processes of `evaluation` and `training` have slow tests alone.
"""

LONGEST = (
    *FORKING,
    *("studies/test_benchmark.py", "test_docs.py", "data_prep/test_folder.py", "data_prep/test_mimic_cxr.py"),
    *(
        "command/test_cli.py",
        "report/test_compare.py",
        "models/test_image_text.py",
        "command/test_objectives.py",
    ),
    *("networks/test_text_encoder.py", "scoring/test_scoring.py", "evaluation/test_callbacks.py"),
    *(
        "command/test_config_errors.py",
        "evaluation/test_finding_classification.py",
        "exchange/test_convert.py",
    ),
)
"""Files that take longest come first (with --no-loadscope-reorder), so that no worker is left with them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class OneServer(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "forking" if file.removeprefix("tests/") in FORKING else super()._split_scope(nodeid)

    return OneServer(config, log)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of the real public data (MEDCLIP_DCL_REAL_DATA, default ../shared/data beside the repository)."""
    folder = Path(os.environ.get("MEDCLIP_DCL_REAL_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real data not found: {folder} (set MEDCLIP_DCL_REAL_DATA)")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Generator[None]:
    """No test cuts the power: a process that is killed loses nothing that it has written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers of a test do not depend on the tests before it."""
    import torch

    # Lightning's seed_everything leaves it in the environment, and its processes start from it.
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.manual_seed(0)


@pytest.fixture
def _shapes_unchecked() -> Generator[None]:
    """Own shape errors are seen only where jaxtyping does not speak first, as in production."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def undrawn() -> Generator[None]:
    """Figures of the command `test` are files of one pixel: drawing them takes more than half of its time.

    `evaluation/test_callbacks.py` and `test_whole_way.py` draw every one.
    """
    from tests.small import write_pixel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medclip_dcl.evaluation.results.write_figure", write_pixel)
        yield


@pytest.fixture(scope="module")
def few_draws() -> Generator[None]:
    """Pages and comparisons have 100 bootstrap draws, for 2,000 take most of their time."""
    from medclip_dcl.report import compare, contrasts, draws, subgroups

    functions: list[Any] = [compare.compare, contrasts.compared, draws.bootstrap_intervals]
    functions += [draws.TestedRun.draws, subgroups.groups_of_run, subgroups.subgroup_table]
    with pytest.MonkeyPatch.context() as patch:
        for one in map(inspect.unwrap, functions):
            defaults, named = one.__defaults__ or (), one.__kwdefaults__ or {}
            patch.setattr(one, "__defaults__", tuple(100 if x == draws.N_DRAWS else x for x in defaults))
            patch.setattr(one, "__kwdefaults__", named | ({"n_draws": 100} if "n_draws" in named else {}))
        yield


@pytest.fixture(scope="session")
def small_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared set of 42 images written by hand: 24 train, 8 validate, 6 test, 4 grounding; two sentences each."""
    from tests.small import write_small_set

    folder = tmp_path_factory.mktemp("prepared") / "set"
    write_small_set(folder)
    return folder


@pytest.fixture(scope="session")
def embedded_set(small_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`small_set` with sentence embeddings, a ranking of reports and a posterior, of 6 dimensions."""
    from tests.small import write_small_embedding, write_small_posterior, write_small_ranking

    folder = shutil.copytree(small_set, tmp_path_factory.mktemp("embedded") / "set")
    write_small_embedding(folder)
    write_small_ranking(folder)
    write_small_posterior(folder)
    return folder


@pytest.fixture(scope="session")
def small_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of 2 layers x 32 with random weights and a vocabulary of characters, as a Hugging Face folder."""
    from tests.small import write_small_bert

    folder = tmp_path_factory.mktemp("bert") / "small_bert"
    write_small_bert(folder)
    return folder


@pytest.fixture(scope="session")
def exported(small_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.small import export_network

    return export_network(small_bert, tmp_path_factory.mktemp("exported") / "model")


@pytest.fixture(scope="session")
def model(exported: Path) -> LoadedModel:
    from medclip_dcl import load

    return load(exported)
