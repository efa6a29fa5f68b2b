"""Results and length of a run."""

from __future__ import annotations

import pytest
import torch

from medclip_dcl.common.files import write_json
from medclip_dcl.runs.run_folder import RunFolder, RunFolderError


def test_other_results_have_a_folder_of_their_own(tmp_path):
    run, other = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    for one in (run, other):
        one.claim({"model": {}, "kept_steps": [3]}, {})
    own, foreign = run.checkpoints / "best.ckpt", other.checkpoints / "best.ckpt"
    assert run.folder_of_test(own) == run.folder == run.folder_of_test(run.checkpoints / "last.ckpt")
    assert run.folder_of_test(own, "set_0f") == run.folder / "tests/on_set_0f"
    kept = run.checkpoints / "step_3.ckpt"
    kept.parent.mkdir()
    kept.touch()
    assert run.folder_of_test(kept) == run.folder / "steps/3"
    assert run.folder_of_test(kept, "set_0f") == run.folder / "tests/step_3_on_set_0f"
    names = [run.folder_of_test(file).name for file in (foreign, run.checkpoints / "untrained.ckpt")]
    assert names[0].startswith("b_best_") and names[1].startswith("a_untrained_")
    assert run.folder_of_test(foreign, "set_0f").name == f"{names[0]}_on_set_0f"
    # A folder without a run takes any results.
    nothing = RunFolder(tmp_path / "c")
    assert nothing.folder_of_test(own) == nothing.folder


ENDED = {"epochs": 2, "complete_epochs": 1, "steps": 4, "timed_out": False}
"""Four steps in epochs of three."""


def settings(epochs: int, steps: int = -1, **others: object) -> dict[str, object]:
    return {"trainer": {"max_epochs": epochs, "max_steps": steps, **others}, "model": {}}


@pytest.mark.parametrize(
    ("before", "end", "now", "is_longer"),
    [
        (settings(-1, 4), ENDED, settings(-1, 7), True),
        (settings(-1, 4), ENDED, settings(2), True),
        (settings(-1, 4), ENDED, settings(1), False),
        (settings(-1, 4), ENDED, settings(-1, 3), False),
        (settings(5, 4), ENDED, settings(9, 4), False),
        (settings(-1, 6), ENDED | {"complete_epochs": 2, "steps": 6}, settings(2), False),
        (settings(2), ENDED | {"complete_epochs": 2, "steps": 6}, settings(3), True),
        (settings(2), ENDED | {"complete_epochs": 2, "steps": 6}, settings(3, 6), False),
        (settings(9), ENDED | {"timed_out": True}, settings(12), False),
        (settings(2), {"epochs": 2, "steps": 6}, settings(3), True),
        (settings(9), {}, settings(12), True),
        (settings(9), {}, settings(4), False),
        (settings(-1, 9), {}, settings(-1, 12), True),
        (settings(9), ENDED, settings(12, deterministic=True), False),
    ],
)
def test_run_is_longer_by_epochs_or_steps(before, end, now, is_longer, tmp_path):
    run = RunFolder(tmp_path / "run")
    run.claim(before, {})
    if end:
        write_json(end, run.folder / "fit.json")
    if is_longer:
        assert run.check(now, {})
    else:
        with pytest.raises(RunFolderError, match="already holds another run"):
            run.check(now, {})


def test_a_longer_run_names_what_it_started_from(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.claim({**settings(2), "ckpt_path": "other.ckpt"}, {})
    run.checkpoints.mkdir()
    torch.save({"loops": {}}, run.checkpoints / "last.ckpt")
    run.extend(
        {**settings(3), "ckpt_path": "run/checkpoints/last.ckpt"},
    )
    assert run.saved_config() == {**settings(3), "ckpt_path": "other.ckpt"}


def test_weights_written_at_an_earlier_end_are_renamed_too(tmp_path):
    """A language model in the folder would be taken for that of the longer training."""
    (tmp_path / "language_model").mkdir()
    assert RunFolder(tmp_path).set_aside("2_epochs") == ["language_model"]
    assert (tmp_path / "language_model_2_epochs").is_dir() and not (tmp_path / "language_model").exists()


def test_run_folder_that_is_a_file(tmp_path):
    (tmp_path / "run").write_text("notes")
    with pytest.raises(RunFolderError, match="--run_folder: expected a folder, found the file .*run"):
        RunFolder(tmp_path / "run").check(settings(2), {})


@pytest.mark.parametrize(
    ("before", "end", "advice"),
    [
        (settings(-1, 4), ENDED, r"a larger --trainer.max_steps \(it had 4\)"),
        (settings(2), ENDED | {"steps": 6}, r"a larger --trainer.max_epochs \(it had 2\)"),
        (settings(9), ENDED, r"\(it had 9\) trains it longer, until a callback ends it again, as in epoch 2"),
        (settings(9), ENDED | {"timed_out": True}, r"max_time\) is used up; choose another"),
    ],
)
def test_advice_names_setting_that_ended_run(before, end, advice, tmp_path):
    run = RunFolder(tmp_path / "run")
    run.claim(before, {})
    write_json(end, run.folder / "fit.json")
    with pytest.raises(RunFolderError, match=advice):
        run.check({**before, "model": {"another": 1}}, {})
