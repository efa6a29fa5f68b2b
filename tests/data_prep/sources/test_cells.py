"""Cells that hold another thing than a text, and texts that only look like it."""

from __future__ import annotations

import base64
from pathlib import Path

import pandas as pd
import pytest

from data_prep.sources.cells import kind_of_cell, text_of_cell, with_texts
from data_prep.sources.rows import NO_REPORT, TableCheck

TEXT = "FINDINGS: Größe normal. No effusion."


def packed(content: bytes) -> str:
    return base64.b64encode(content).decode()


KINDS = {
    "a Python list": [
        "['a b']", '["a"]', "['a' 'b']", "array(['a'], dtype=object)", "('a',)", "[nan, 'x']", "[]", "[['a']]",
        "[b'a']", "['Cut off by the ex", "[101, 2054, 102]", "[0.1 -3.4e-05\n 0.5]", "[ 'a' ]",
        "[np.str_('a'), np.str_('b')]", "np.str_('a')", "(np.str_('a'),)",
    ],
    "JSON or a Python dict": ["{'a': 'b'}", '{"a": 1}', '{\n "a": 1', '[{"a": 1}]', "{}"],
    "bytes": ["b'x y'", 'b"x"', "bytearray(b'x')", "\\x436c656172206c756e6773", "0x436C656172206C756E6773"],
    "HL7 segments": ["MSH|^~\\&|A|B", "OBX|1|TX|36643-5^XR||Clear.", "NTE|1||Clear."],
    "base64": [
        packed(TEXT.encode()), packed(TEXT.encode("utf-16")), base64.encodebytes(TEXT.encode() * 5).decode().strip(),
        base64.urlsafe_b64encode(TEXT.encode() * 3).decode(), packed(TEXT.encode() * 900)[:32767],
        packed(b"Clear it"), packed(b"%PDF-1.4 \xff\xd8"), "RklORElOR1M6IENs\nZWFyLiBObyBlZmZ1c2lvbi4=",
    ],
    "XML": ["<?xml version='1.0'?><report>Clear.</report>", '<ClinicalDocument xmlns="urn:hl7-org:v3">'],
    "": [
        TEXT, "[**2112-3-4**] clear", "[DATE], lungs clear", "[x] Clear [ ] effusion", "[ ] effusion [x] clear", "XXXX",
        "[1] Normal.", "(portable) chest", '("portable") chest is clear.', "PA|LAT|clear", "B. Clear", "{{name}} clear",
        "Cardiomegaly", "Infiltration", "Hypertension", "hepatosplenomegalie", "Thoraxröntgenaufnahme", "antibiotics",
        "unremarkablechestradiograph", "NORMALCHESTXRAY1", "'Clear' lungs", "## Findings\nClear.", "",
        "Cardiomegaly\nPneumonia\nEffusion",
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_cells(kind: str) -> None:
    assert {cell: kind_of_cell(cell) for cell in KINDS[kind]} == dict.fromkeys(KINDS[kind], kind)


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("['Clear.\\nNormal.']", "Clear.\nNormal."),
        ("array(['Clear.'], dtype=object)", "Clear."),
        ("b'Clear.\\nGr\\xc3\\xb6\\xc3\\x9fe.'", "Clear.\nGröße."),
        ("b'Gr\\xf6\\xdfe.'", "Größe."),
        ("[b'Clear.']", "Clear."),
        ("[np.str_('Clear.')]", "Clear."),
        (str("Größe.".encode("utf-16")), "Größe."),
        ("[np.str_('Clear.'), np.str_('Normal.')]", None),
        ("[]", ""),
        ("['Clear.' 'Normal.']", None),
        ("['Clear.', 'Normal.']", None),
        ("['Clear", None),
        ("[nan, 'x']", None),
        ("b'{\"findings\": 1}'", None),
        ("[" * 5000, None),
        ('{"findings": "Clear."}', None),
    ],
)
def test_texts_in_bytes_and_lists_of_one(cell: str, text: str | None) -> None:
    assert text_of_cell(cell) == text


def test_half_of_a_column_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = ["b'Clear.'", '{"a": "Clear."}', "['Clear.', 'secret']", *["Clear."] * 3, "", "Clear."]
    rows = pd.DataFrame({"text": cells}, index=pd.RangeIndex(2, 10, name="row"))
    check = TableCheck(tmp_path / "t.csv", columns={"text": "Befund"})
    read = with_texts(rows, "text", check)
    assert read["text"].tolist() == ["Clear.", "", "", *cells[3:]]
    assert read[NO_REPORT].tolist()[:4] == [
        "", "row 3, column Befund: JSON or a Python dict, not a text",
        "row 4, column Befund: a Python list, not a text", "",
    ]  # fmt: skip
    said = capsys.readouterr().err
    assert "(3 of 7 cells, first in row 2); read, as bytes or lists of one: 1; no reports: 2; write" in said
    assert not check.problems
    with_texts(rows.iloc[:-2], "text", check)
    assert (
        "(3 of 6 cells" in check.problems[0]
        and "write the report's own text into each cell" in check.problems[0]
    )
    assert "secret" not in said + check.problems[0]
