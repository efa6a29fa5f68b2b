"""Configuration files are UTF-8, each key stands once, and they import nothing by themselves."""

from __future__ import annotations

import locale
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from medclip_dcl import evaluation, networks
from medclip_dcl.command.cli import main
from medclip_dcl.command.config_files import allow_imports, with_packaged_files
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import read_yaml
from medclip_dcl.common.packaged import CONFIGS
from tests.command.small_runs import DEMO, refused

PROMPTS = {"Edema": ["Kein Hinweis für Ödem", "Hinweis für Ödem"]}
CALLBACK = {"class_path": "medclip_dcl.evaluation.ZeroShotClassification", "init_args": {"prompts": PROMPTS}}
ENCODER = {"class_path": "medclip_dcl.networks.ResNetRegions", "init_args": {"depth": 18}}
FIT = ["fit", "--config", DEMO, "--run_folder", "run", "--print_config"]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def stranger(tmp_path, monkeypatch) -> Iterator[Path]:
    """Module of a folder that somebody sent; with its file, written when it is imported."""
    code = "from pathlib import Path\nfrom pytorch_lightning import Callback\nPath('ran').touch()\n"
    (tmp_path / "stranger.py").write_text(f"{code}class X(Callback): pass\ndef f(*_): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "ran"
    sys.modules.pop("stranger", None)


def test_public_classes_are_known_by_name(monkeypatch) -> None:
    for package, name in ((networks, "TimmRegions"), (evaluation, "EmbeddingMap")):
        monkeypatch.delitem(vars(package), name, raising=False)
        allow_imports([])
        assert name in vars(package)


def error_of(capsys, *arguments: str) -> str:
    said = refused(capsys, [*FIT, *arguments])
    assert len(said.splitlines()) == 1
    return said


def test_files_are_utf_8_in_any_locale(capsys):
    Path("first.yaml").write_text(
        yaml.safe_dump({"trainer": {"callbacks": [CALLBACK]}}, allow_unicode=True), "utf-8"
    )
    Path("encoder.yaml").write_text(f"# für\n{yaml.safe_dump(ENCODER)}", "utf-8-sig")
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        with pytest.raises(SystemExit) as end:
            main([*FIT, "--config", "first.yaml", "--model.init_args.image_encoder", "encoder.yaml"])
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    assert end.value.code in (None, 0)
    found = yaml.safe_load(capsys.readouterr().out)
    assert found["trainer"]["callbacks"][0]["init_args"]["prompts"] == PROMPTS
    assert found["model"]["init_args"]["image_encoder"]["init_args"]["depth"] == 18


def test_a_file_that_cannot_be_read_is_named():
    Path("latin.yaml").write_bytes("# für".encode("cp1252"))
    with pytest.raises(UserError, match="latin.yaml is not UTF-8"):
        read_yaml(Path("latin.yaml"))
    Path("grid.yaml").write_text("folder: a\naxes:\n  seed: 1\n  seed: 2\n")
    with pytest.raises(UserError, match="grid.yaml, line 4: seed is listed more than once"):
        read_yaml(Path("grid.yaml"))


@pytest.mark.parametrize("option", ["--config", "--model.init_args.image_encoder"])
def test_a_duplicate_key_is_an_error(option, capsys):
    Path("twice.yaml").write_text("seed_everything: 1\nseed_everything: 2\n")
    assert "twice.yaml, line 2: seed_everything is listed more than once" in error_of(
        capsys, option, "twice.yaml"
    )


STATE = {"class_path": "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler"}
STATE["init_args"] = {"entrypoint": "touch", "args": ["ran"], "env": {}, "stdout": None, "stderr": None}  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("trainer", "module"),
    [
        ({"callbacks": [{"class_path": "stranger.X"}]}, "stranger"),
        (
            {"callbacks": [{"class_path": "LambdaCallback", "init_args": {"on_fit_start": "stranger.f"}}]},
            "stranger",
        ),
        (
            {"strategy": {"class_path": "DDPStrategy", "init_args": {"ddp_comm_state": STATE}}},
            "torch.distributed",
        ),
    ],
)
def test_a_configuration_file_imports_nothing_by_itself(trainer, module, stranger, capsys):
    Path("sent.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    assert f"does not import {module}" in error_of(capsys, "--config", "sent.yaml")
    assert not stranger.exists()


def test_import_is_an_option_of_the_command_alone(stranger, capsys):
    Path("own.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": ["stranger.X"]}}))
    Path("sent.yaml").write_text("import: stranger")
    assert "import: there is no such key" in error_of(capsys, "--config", "sent.yaml")
    assert "--import nowhere: there is no module nowhere" in error_of(capsys, "--import", "nowhere")
    assert not stranger.exists()
    with pytest.raises(SystemExit) as end:
        main([*FIT, "--import", "./stranger.py", "--config", "own.yaml"])
    assert end.value.code in (None, 0)
    found = yaml.safe_load(capsys.readouterr().out)
    assert found["trainer"]["callbacks"] == [{"class_path": "stranger.X"}] and "import" not in found


def test_a_command_without_options_names_the_first(capsys):
    assert "run_folder is missing: give --run_folder" in refused(capsys, ["fit"])
    said = refused(capsys, ["fit", "--run_folder", "run"])
    assert "fit.model missing; give them by a configuration, e.g. --config" in said


@pytest.mark.parametrize(
    ("given", "run", "checkpoint", "is_said"),
    [
        (["fit", "--config=b/config.yaml"], "b", "x.ckpt", True),
        (["test", "-c", "b/config.yaml"], "b", None, True),
        (["fit", "--config=link/config.yaml"], "link", "x.ckpt", False),
        (["test", "--config=alone/config.yaml"], "./a", "x.ckpt", False),
        (["test", "--config=c/test.yaml"], "c", "x.ckpt", True),
        (["predict", "b", "--seed_everything", "3"], "b", None, False),
        (["fit", "--run_folder", "d", "--seed_everything=3", "--config=b/config.yaml"], "d", "x.ckpt", False),
        (["fit", "--config=other.yaml", "--config=b/config.yaml"], "b", "x.ckpt", True),
        (["validate", "--ckpt_path", "y", "--config=b/config.yaml", "--config=other.yaml"], "d", "y", True),
        (["test", "b", "--config=other.yaml"], "b", None, False),
    ],
)
def test_a_runs_configuration_means_its_folder(given, run, checkpoint, is_said, capfd):
    config = read_yaml(CONFIGS / "demo.yaml") | {"run_folder": "./a", "ckpt_path": "x.ckpt"}
    config["share_patient_data"] = True
    names = ("a/metrics.csv", "b/checkpoints", "c/asked.json", "alone/results.json")
    for place in map(Path, names):
        place.mkdir(parents=True)
        name = "test.yaml" if place.parent.name == "c" else "config.yaml"
        place.with_name(name).write_text(yaml.safe_dump(config))
    Path("link").symlink_to("a")
    Path("other.yaml").write_text("run_folder: d")
    with pytest.raises(SystemExit) as end:
        main([*given, "--print_config"])
    assert end.value.code in (None, 0)
    found = yaml.safe_load(capfd.readouterr().out)
    assert (found["run_folder"], found["ckpt_path"]) == (run, checkpoint)
    # Whoever sends a run shares no patients of those who test it.
    is_sent = given[0] != "fit" and (run == "b" or checkpoint == "y")
    assert found["share_patient_data"] is not is_sent
    assert any("read as --run_folder" in line for line in with_packaged_files(given)[1]) == is_said
