"""A model is found by run folder, checkpoint, exported folder or repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from medclip_dcl.common.errors import MissingFileError, UserError
from medclip_dcl.common.find_model import FoundModel, find_model


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Files of all kinds; the hub has every repository, but gives it only where it is asked."""
    for name in (
        *("run/checkpoints/best.ckpt", "run/checkpoints/last.ckpt", "begun/checkpoints/last.ckpt"),
        *("empty/checkpoints/.new.ckpt.tmp", "plain/a.ckpt", "several/a.ckpt", "several/b.ckpt"),
        *("bert/model.safetensors", "run/config.yaml", "begun/config.yaml", "loads/checkpoints/a.ckpt"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("exported", "both/checkpoints", "owner/here"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("exported", "both"):
        (tmp_path / name / "config.json").write_text('{"image_encoder": {}}')
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: f"hub/{name}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:.*begun has no best.ckpt by validation")
@pytest.mark.parametrize(
    ("model", "path", "run"),
    [
        ("run", "run/checkpoints/best.ckpt", "run"),
        ("begun", "begun/checkpoints/last.ckpt", "begun"),
        ("begun/checkpoints", "begun/checkpoints/last.ckpt", "begun"),
        ("run/checkpoints/last.ckpt", "run/checkpoints/last.ckpt", "run"),
        ("plain", "plain/a.ckpt", None),
        ("plain/a.ckpt", "plain/a.ckpt", None),
        ("loads/checkpoints/a.ckpt", "loads/checkpoints/a.ckpt", None),
        ("exported", "exported", None),
        ("both", "both", None),
        ("bert", "bert", None),  # its reader names the file that is missing
    ],
)
def test_what_exists_is_found(models, model, path, run):
    for given in (model, models / model):
        found = find_model(given)
        assert models / found.path == models / path and not found.is_downloaded
        assert (found.run and models / found.run) == (run and models / run)
        assert found.folder == (found.run or (found.path if (models / path).is_dir() else None))


def test_a_checkpoint_in_the_working_folder_has_its_run(models, monkeypatch):
    monkeypatch.chdir(models / "run/checkpoints")
    assert find_model("best.ckpt").run == models / "run"


def test_a_repository_is_downloaded(models):
    assert find_model("nobody/here") == FoundModel(Path("hub/nobody/here"), is_downloaded=True)


def test_a_run_without_a_best_checkpoint_warns(models):
    with pytest.warns(UserWarning, match=r"begun has no best.ckpt by validation: using .*last.ckpt"):
        find_model("begun")


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        ("owner/gone", MissingFileError, "no file or folder owner/gone$"),
        ("gone", MissingFileError, "no file or folder gone$"),
        ("./gone", MissingFileError, "no file or folder ./gone$"),
        ("empty", MissingFileError, "empty/checkpoints holds neither best.ckpt nor last.ckpt"),
        ("several", UserError, "several holds several checkpoints: a.ckpt, b.ckpt; give one"),
        ("run/checkpoints", UserError, "holds several checkpoints: best.ckpt, last.ckpt"),
    ],
)
def test_what_names_no_model_is_refused(models, model, error, words):
    with pytest.raises(error, match=words):
        find_model(model)


def test_a_repository_out_of_reach_is_missing(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("offline\nlong advice")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(MissingFileError, match=r"nobody/nothing, and no Hugging .* \(offline\); check"):
        find_model("nobody/nothing")
