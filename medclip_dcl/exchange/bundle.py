"""A folder that installs medclip_dcl and a model on a machine without a network: ``medclip-dcl bundle``."""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory

from medclip_dcl import __version__
from medclip_dcl.common.errors import UserError
from medclip_dcl.exchange import bundle_install, export
from medclip_dcl.exchange.options import Bundle, Export


def run(options: Bundle) -> None:
    """Write the bundle of a model.

    Raises:
        UserError: the output exists, the wheel is not that of this installation, or pip failed.
    """
    folder, wheel = options.output, options.wheel
    if folder.exists():
        raise UserError(f"--output {folder}: expected a new folder, found an existing one")
    if not wheel.is_file() or wheel.name.split("-")[:2] != ["medclip_dcl", __version__]:
        raise UserError(
            f"--wheel {wheel}: expected the file medclip_dcl-{__version__}-py3-none-any.whl, from which this version "
            "was installed; in a checkout: pip wheel --no-deps --wheel-dir dist ."
        )
    try:
        export.run(Export(model=options.model, output=folder / "model"))
        _collect(wheel, options.extras, folder / "wheels")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    wheels = sorted((folder / "wheels").glob("*.whl"))
    pins = [
        f"{'=='.join(file.name.split('-')[:2])} --hash=sha256:{bundle_install.sha256(file)}"
        for file in wheels
    ]
    (folder / bundle_install.REQUIREMENTS).write_text("\n".join(pins) + "\n")
    machine = bundle_install.machine()
    made = {"medclip_dcl": __version__, **machine, "made_on": platform.platform()}
    (folder / bundle_install.BUNDLE).write_text(json.dumps(made, indent=2) + "\n")
    shutil.copy(bundle_install.__file__, folder / "install.py")
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    sums = "".join(f"{bundle_install.sha256(file)}  {file.relative_to(folder)}\n" for file in files)
    (folder / bundle_install.SUMS).write_text(sums)
    size = sum(file.stat().st_size for file in files) / 1e9
    print(
        f"bundle: {folder}, {size:.2f} GB, {len(wheels)} wheels for {' '.join(machine.values())}\n"
        f"sha256 of {bundle_install.SUMS}: {hashlib.sha256(sums.encode()).hexdigest()} (send it by another way)\n"
        f"install: python3 -I {shlex.quote(f'{folder.name}/install.py')} ENVIRONMENT"
    )


def _collect(wheel: Path, extras: str, folder: Path) -> None:
    """Wheels of the installed versions of everything that the wheel needs."""
    versions: dict[str, str] = {}
    for one in distributions():
        versions.setdefault(one.name, one.version)  # the first is the one that is imported
    pins = [f"{name}=={version}" for name, version in versions.items() if name != "medclip_dcl"]
    with TemporaryDirectory() as place:
        constraints = Path(place) / "constraints.txt"
        constraints.write_text("\n".join(pins))
        words = [
            "--wheel-dir",
            str(folder),
            "--constraint",
            str(constraints),
            str(wheel) + (f"[{extras}]" if extras else ""),
        ]
        if subprocess.run([sys.executable, "-m", "pip", "wheel", *words]).returncode:
            raise UserError(
                "pip could not collect the wheels, see above; PIP_INDEX_URL and PIP_FIND_LINKS say where from"
            )
