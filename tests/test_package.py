"""What is published: links, version, and what the git host's continuous integration calls."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
URL = "https://example.org/own/name"


def read_setup(folder: Path) -> ConfigParser:
    setup = ConfigParser()
    assert setup.read(folder / "setup.cfg", encoding="utf-8")
    return setup


def test_links_of_the_published_page_lead_to_files(tmp_path):
    for name in ("README.md", "setup.cfg"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run([sys.executable, ROOT / ".ci/links.py", tmp_path, f"{URL}/"], check=True)
    setup, original = read_setup(tmp_path), read_setup(ROOT)
    urls = dict(line.split(" = ") for line in setup["metadata"].pop("project_urls").split("\n") if line)
    assert setup == original
    assert urls.pop("Repository") == URL and urls.pop("Issues") == f"{URL}/issues"
    link = re.compile(r"\]\(([^)]+)\)")
    links = [*urls.values(), *link.findall((tmp_path / "README.md").read_text(encoding="utf-8"))]
    parts = [one.removeprefix(f"{URL}/").split("/", 2) for one in links]
    assert len(parts) > 25 and {tag for _, tag, _ in parts} == {f"v{original['metadata']['version']}"}
    assert {kind: kind == "raw" for kind, _, _ in parts} == {"raw": True, "blob": False}
    files = [file.partition("#")[0] for _, _, file in parts]
    assert [file for file in files if not (ROOT / file).exists()] == []
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for ours, published in zip(link.findall(readme), links[len(urls) :], strict=True):
        assert published.endswith(f"/README.md{ours}" if ours.startswith("#") else f"/{ours}")


def test_without_a_url_nothing_changes_and_that_is_said(tmp_path):
    for name in ("README.md", "setup.cfg"):
        shutil.copy(ROOT / name, tmp_path)
    words = [sys.executable, ROOT / ".ci/links.py", tmp_path]
    assert "REPOSITORY_URL" in subprocess.run(words, check=True, capture_output=True, text=True).stdout
    for name in ("README.md", "setup.cfg"):
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes()


def test_the_changelog_begins_with_the_version():
    """It is in setup.cfg alone; the tag of what is published is checked against it."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changelog, re.M)[0] == read_setup(ROOT)["metadata"]["version"]


def test_integration_tests_the_named_pythons():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    versions = jobs["fast"]["strategy"]["matrix"]["python"]
    classifiers = read_setup(ROOT)["metadata"]["classifiers"]
    assert versions == re.findall(r"Python :: (3\.\d+)", classifiers)
    assert read_setup(ROOT)["options"]["python_requires"] == f">={versions[0]}"


@pytest.mark.parametrize("file", [".ci/run", ".pre-commit-config.yaml", *ROOT.glob(".github/workflows/*")])
def test_called_targets_exist(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    targets = re.findall(r"(?<!`)\bmake ([a-z./-]+)", text)
    targets += "".join(re.findall(r"target: \[(.*)\]", text)).split(", ")
    for target in filter(None, targets):
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_oldest_versions_are_those_of_setup(tmp_path):
    """`make build/oldest.txt` pins each package with a lower bound, and no other."""
    said = subprocess.run(
        ["make", "--dry-run", "-B", "build/oldest.txt"], cwd=ROOT, capture_output=True, text=True
    )
    (command,) = [line for line in said.stdout.splitlines() if line.startswith("sed")]
    pins = subprocess.run(
        command.split(" > ")[0], shell=True, cwd=ROOT, capture_output=True, text=True
    ).stdout
    setup = read_setup(ROOT)
    lines = "\n".join([setup["options"]["install_requires"], *setup["options.extras_require"].values()])
    bounds = dict(re.split(r"(?:\[\w+\])?>=", line.split(",")[0]) for line in lines.split() if ">=" in line)
    assert dict(line.split("==") for line in pins.split()) == bounds and len(bounds) > 25
