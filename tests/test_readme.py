"""The README's commands exist: the demo's are the Makefile's, and those for MIMIC-CXR parse with other paths."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands(text: str) -> list[list[str]]:
    """Words of every `python -m` command in code blocks, continuation lines joined, comments dropped."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL))
    lines = blocks.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip().startswith("python -m")]


def dry_run() -> list[list[str]]:
    """Commands that `make demo` would run on a fresh machine, without its paths of the interpreter."""
    done = subprocess.run(
        ["make", "--always-make", "--dry-run", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = done.stdout.replace("\\\n", " ").splitlines()
    words = [shlex.split(line) for line in lines if "-m data_prep" in line or "-m medclip_dcl" in line]
    return [["python", *line[1:]] for line in words]


def shape(command: list[str]) -> tuple[str, ...]:
    """A command without its paths: the module, the subcommand and the names of its options."""
    return tuple(word for word in command if word.startswith("--") or "/" not in word)


def test_the_demo_runs_the_commands_of_the_readme():
    mine = [shape(command) for command in commands(README)]
    for command in dry_run():
        module = command[2]
        same_stage = [other for other in mine if other[2] == module]
        if module == "data_prep.phantom":
            continue
        options = {word for word in shape(command) if word.startswith("--")} - {"--data.init_args.folder"}
        assert any(options <= set(other) for other in same_stage), f"README lacks {' '.join(command)}"


@pytest.mark.parametrize("command", commands(README), ids=lambda words: " ".join(words[2:4]))
def test_every_module_of_the_readme_exists(command):
    module = command[2].replace(".", "/")
    assert (ROOT / f"{module}.py").is_file() or (ROOT / module / "__main__.py").is_file()


def test_every_file_of_the_readme_exists():
    links = re.findall(r"\]\(((?!http)[^)#]+)\)", README)
    configurations = re.findall(r"configs/[\w/]+\.(?:yaml|sbatch)", README)
    assert links and configurations
    for path in [*links, *configurations]:
        assert (ROOT / path).exists(), path
