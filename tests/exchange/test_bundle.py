"""A bundle of the checkout's wheel and two small packages: its files, the check before installation, installation."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from medclip_dcl import __version__
from medclip_dcl.exchange import bundle_install
from tests.program import shell, verb
from tests.wheel import Environment, build_wheel


def write_wheel(folder: Path, name: str, requires: str = "") -> None:
    """A wheel of one empty module."""
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        info = f"{name}-1.0.dist-info"
        file.writestr(f"{name}.py", "")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def own_wheel(tmp_path_factory) -> Path:
    """The wheel of the checkout, which needs two small packages in place of torch and the others."""
    built = build_wheel(tmp_path_factory.mktemp("built"))
    wheel = tmp_path_factory.mktemp("wheel") / built.name
    with zipfile.ZipFile(built) as source, zipfile.ZipFile(wheel, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("/METADATA"):
                data = re.sub(rb"Requires-Dist: (?!.*extra ==).*\n", b"", data)
                data = data.replace(b"\nVersion:", b"\nRequires-Dist: small_a==1.0\nVersion:", 1)
                data = re.sub(rb"Requires-Dist: .*extra == \"page\".*\n", b"", data)
            target.writestr(name, data)
    return wheel


def version(wheel: Path) -> str:
    return wheel.name.split("-")[1]


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    write_wheel(folder, "small_a", "small_b")
    write_wheel(folder, "small_b")
    return folder


@pytest.fixture(scope="module")
def bundle(own_wheel, index, exported, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(index))
        # An editable install keeps the version of the day on which it was made.
        patch.setattr("medclip_dcl.exchange.bundle.__version__", version(own_wheel))
        verb("bundle")([str(exported), "--output", str(folder), "--wheel", str(own_wheel)])
    return folder


@pytest.mark.slow
def test_bundle_holds_pinned_wheels_model_and_sums(bundle, exported, own_wheel):
    pins = (bundle / "requirements.txt").read_text().splitlines()
    assert [pin.partition(" --hash=sha256:")[0] for pin in pins] == [
        f"medclip_dcl=={version(own_wheel)}",
        "small_a==1.0",
        "small_b==1.0",
    ]
    assert pins[0].endswith(bundle_install.sha256(own_wheel))
    assert (bundle / "model/model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    made = json.loads((bundle / "bundle.json").read_text())
    assert made["python"] == "{}.{}".format(*sys.version_info[:2]) and made["medclip_dcl"] == version(
        own_wheel
    )
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=bundle, check=True)
    listed = (bundle / "SHA256SUMS").read_text().count("\n")
    assert listed == sum(file.is_file() for file in bundle.rglob("*")) - 1


@pytest.fixture
def small_bundle(tmp_path) -> Path:
    """Files as of a bundle, written by hand."""
    folder = tmp_path / "bundle"
    (folder / "model").mkdir(parents=True)
    write_wheel(folder, "small_b")
    (folder / "bundle.json").write_text(json.dumps(bundle_install.machine() | {"made_on": "here"}))
    lines = [f"{bundle_install.sha256(file)}  {file.name}\n" for file in folder.glob("*.*")]
    (folder / "SHA256SUMS").write_text("".join(lines))
    return folder


def rewritten(name: str, **values: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda folder: (folder / "model/.DS_Store").touch(), ""),
        (lambda folder: (folder / "SHA256SUMS").unlink(), "SHA256SUMS: is missing"),
        (lambda folder: None, ""),
        (
            rewritten("bundle.json", python="3.7"),
            "python: expected 3.7, for which this bundle was made, found 3.",
        ),
        (rewritten("bundle.json", system="Plan 9"), "system: expected Plan 9, "),
        (lambda folder: (folder / "bundle.json").write_text("{"), "bundle.json: is damaged"),
        (lambda folder: (folder / "bundle.json").write_text("{}"), "bundle.json: its SHA-256 is not that of"),
        (rewritten("bundle.json", made_on="elsewhere"), "bundle.json: its SHA-256 is not that of SHA256SUMS"),
        (
            lambda folder: (folder / "model/calibration.json").touch(),
            "model/calibration.json: is not listed in",
        ),
        (
            lambda folder: next(folder.glob("small_b*")).unlink(),
            "small_b-1.0-py3-none-any.whl: is missing",
        ),
    ],
)
def test_problem_names_another_machine_and_changed_files(small_bundle, change, line):
    change(small_bundle)
    found = bundle_install.problem(small_bundle)
    assert found.startswith(line) and bool(found) == bool(line)


@pytest.mark.parametrize("name", ["json", "pathlib", "venv/__init__"])
def test_an_added_module_is_named_and_not_run(name, small_bundle, tmp_path):
    (small_bundle / f"{name}.py").parent.mkdir(exist_ok=True)
    (small_bundle / f"{name}.py").write_text("raise SystemExit('this ran')")
    shutil.copy(bundle_install.__file__, small_bundle / "install.py")
    (tmp_path / "linked").symlink_to(small_bundle)
    with (small_bundle / "SHA256SUMS").open("a") as sums:
        sums.write(f"{bundle_install.sha256(small_bundle / 'install.py')}  install.py\n")
    for place, script in ((tmp_path, "linked/install.py"), (small_bundle, "install.py")):
        words = [sys.executable, script, tmp_path / "new"]
        done = subprocess.run(words, cwd=place, capture_output=True, text=True)
        assert done.stderr.startswith(f"install.py: {name}.py: is not listed"), done.stderr


@pytest.mark.parametrize(
    ("output", "wheel", "words"),
    [
        ("", "medclip_dcl-0.0.1-py3-none-any.whl", ": expected a new folder, found an existing one"),
        (
            "new",
            "medclip_dcl-0.0.1-py3-none-any.whl",
            f"expected the file medclip_dcl-{__version__}-py3-none-any.whl",
        ),
    ],
)
def test_a_folder_that_exists_and_another_wheel_are_refused(output, wheel, words, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        shell("bundle")(["model", "--output", str(tmp_path / output), "--wheel", str(tmp_path / wheel)])
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_package_that_pip_lacks_leaves_no_folder(own_wheel, exported, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr("medclip_dcl.exchange.bundle.__version__", version(own_wheel))
    with pytest.raises(ValueError, match="pip could not collect the wheels"):
        words = ["--output", str(tmp_path / "new"), "--wheel", str(own_wheel), "--extras", ""]
        verb("bundle")([str(exported), *words])
    assert "small_a" in capfd.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.slow
def test_install_needs_no_network_and_its_model_answers(bundle, tmp_path):
    words = [sys.executable, bundle / "install.py"]
    refused = subprocess.run([*words, bundle / "inside"], capture_output=True, text=True)
    assert refused.returncode == 1 and refused.stderr.startswith("install.py: expected one argument")
    words += [tmp_path / "environment"]
    failed = subprocess.run(
        words, env={**os.environ, "PIP_NO_BINARY": ":all:"}, capture_output=True, text=True
    )
    assert failed.returncode == 1 and "pip failed" in failed.stderr
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    environment = Environment(tmp_path / "environment")
    (site,) = environment.folder.glob("lib/python*/site-packages")
    assert (site / "small_b.py").is_file()
    # Torch and the others, which the two small packages stand for.
    (site / "present.pth").write_text(sysconfig.get_paths()["purelib"])
    environment.run(["-c", "from PIL import Image; Image.new('L', (64, 64)).save('a.png')"], tmp_path)
    answer = ["ask", bundle / "model", "a.png", "--classify", "--output", "scores.csv"]
    environment.run(["-m", "medclip_dcl", *answer], tmp_path)
    assert (tmp_path / "scores.csv").read_text().count("\n") == 2
