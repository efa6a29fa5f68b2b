"""Prompts as users give them: pairs, and files of pairs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import CHEX5, CHEXPERT, read_prompts

ROOT = Path(__file__).parents[2]


def test_chexpert_file_has_all_findings_and_ssds_five():
    file = ROOT / "configs/prompts/chexpert14.yaml"
    prompts = read_prompts(file)
    assert set(prompts) == set(CHEXPERT)
    assert list(prompts)[:5] == list(CHEX5)
    assert {finding: prompts[finding] for finding in CHEX5} == read_prompts(CHEX5)
    pairs = {texts for pair in prompts.values() for texts in pair}
    assert len(pairs) == 28  # each says something of its own
    # Each line says where its prompts are from.
    lines = [line for line in file.read_text().splitlines() if re.match(r"[A-Z].*:", line)]
    assert [line.split("# ")[1].startswith("SSD") for line in lines] == [
        finding in CHEX5 for finding in prompts
    ]
    assert sum("# choice" in line for line in lines) == 9


def test_a_file_may_hold_ensembles(tmp_path):
    (tmp_path / "prompts.yaml").write_text("Edema: [No edema, [Edema, Wet lungs]]\n")
    expected = {"Edema": (("No edema",), ("Edema", "Wet lungs"))}
    assert read_prompts(str(tmp_path / "prompts.yaml")) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "prompts name no finding"),
        ("- Edema", r"expected finding: \[negative, positive\], found \['Edema'\]"),
        ("Edema: Wet lungs", "Edema needs a negative and a positive prompt: found 'Wet lungs'"),
        ("Edema: [Edema]", "Edema needs a negative and a positive prompt"),
        ("Edema: [no, Edema]", r"Edema needs .* found \[False, 'Edema'\]"),
        ("Edema: [No edema, {a: b}]", "Edema needs a negative and a positive prompt"),
        ("Edema: [No edema, [Edema, Edema]]", "Edema has a duplicate prompt"),
        ("Edema: [No edema, Edema]\nx: [no x, x]\nEdema: [Dry, Wet]", "Edema is listed more than once"),
        ("Edema: [no, " + 9000 * "y" + "]", r"Edema needs .* found \[False, '.{,60}'\]$"),
        ("1: [no x, x]\n'1': [no y, y]", "two findings have one name"),
        ("Edema: [No edema", "is not readable YAML"),
        (None, ""),
    ],
)
def test_an_error_names_the_file_and_the_finding(tmp_path, text, message):
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=f"{file}.*{message}"):
        read_prompts(file)
