"""Check this bundle and install it without a network: python3 -I install.py ENVIRONMENT (a new folder).

It runs by the standard library alone, and up to the check of the version by any Python 3.
"""

# ruff: noqa: E402
import os
import sys

# Without -I a file that was added beside this one, such as json.py, would run before the check.
_HERE = os.path.dirname(os.path.realpath(__file__))
sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder) != _HERE]

import hashlib
import json
import platform
import shlex
import shutil
import subprocess
import venv
from pathlib import Path

BUNDLE, SUMS, REQUIREMENTS = "bundle.json", "SHA256SUMS", "requirements.txt"


def machine() -> "dict[str, str]":
    """System, processor and Python, which a bundle and the machine that installs it have in common."""
    python = "{}.{}".format(*sys.version_info[:2])
    return {"system": platform.system(), "processor": platform.machine(), "python": python}


def sha256(file: Path) -> str:
    """SHA-256 of a file in hexadecimal digits, as sha256sum prints it."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def problem(folder: Path) -> str:
    """The line about a bundle of another machine, or one with a changed, missing or added file; "" if it is whole."""
    for name in (BUNDLE, SUMS):
        if not (folder / name).is_file():
            return f"{name}: is missing; copy the bundle again"
    try:
        made = json.loads((folder / BUNDLE).read_text())
    except ValueError:
        return f"{BUNDLE}: is damaged; copy the bundle again"
    for name, here in machine().items():
        if made.get(name, here) != here:
            return f"{name}: expected {made[name]}, for which this bundle was made, found {here}"
    lines = (folder / SUMS).read_text().splitlines()
    sums = {name: value for value, _, name in (line.partition("  ") for line in lines)}
    files = {str(file.relative_to(folder)) for file in folder.rglob("[!.]*") if file.is_file()}
    for name in sorted(files ^ {*sums, SUMS}):
        return (
            f"{name}: {'is not listed in ' + SUMS if name in files else 'is missing'}; copy the bundle again"
        )
    for name, value in sums.items():
        if sha256(folder / name) != value:
            return f"{name}: its SHA-256 is not that of {SUMS}; copy the bundle again"
    return ""


def install(folder: Path, environment: Path) -> str:
    """Install the wheels into a new environment; the line about a failure, "" if there was none."""
    try:
        venv.create(environment, with_pip=True)
    except OSError as error:
        return f"{environment}: {error.strerror}; give another folder"
    except subprocess.CalledProcessError:
        return (
            f"{environment}: no environment with pip; Debian and Ubuntu have it in the package python3-venv"
        )
    offline = ("--no-index", "--find-links", str(folder / "wheels"), "--require-hashes")
    pip = (str(environment / "bin/python"), "-I", "-m", "pip", "install", *offline)
    if subprocess.run([*pip, "-r", str(folder / REQUIREMENTS)]).returncode:
        made_on = json.loads((folder / BUNDLE).read_text())["made_on"]
        return f"pip failed, see above; the bundle was made on {made_on}, this is {platform.platform()}"
    return ""


if __name__ == "__main__":
    here = Path(_HERE)
    if len(sys.argv) != 2 or Path(sys.argv[1]).exists() or here in Path(sys.argv[1]).resolve().parents:
        sys.exit("install.py: expected one argument, a new folder outside of the bundle for the environment")
    target = Path(sys.argv[1]).resolve()
    failure = "interrupted"
    try:
        failure = problem(here) or install(here, target)
    finally:
        if failure:  # so that the same command can be repeated
            shutil.rmtree(str(target), ignore_errors=True)
    if failure:
        sys.exit(f"install.py: {failure}")
    program, model = (shlex.quote(str(path)) for path in (target / "bin/medclip-dcl", here / "model"))
    print(f"installed; next: {program} ask {model} IMAGE --classify --output scores.csv")
