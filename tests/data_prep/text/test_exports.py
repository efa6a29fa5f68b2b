"""Marks of an export in report text."""

from __future__ import annotations

import pytest

from data_prep.text.plain_text import plain_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FINDINGS:_x000D_\nClear.", "FINDINGS:\r\nClear."),
        # HTML: known tags and entities alone.
        ('<p class="a"><b>FINDINGS:</b><br />Clear.</p>', "<p>FINDINGS:<br>Clear.<p>"),
        ("&lt;b&gt;3&nbsp;&plusmn; 1 mm&lt;/b&gt;&#13;&amp;lt;5", "3 ± 1 mm\r<5"),
        *((text, text) for text in ("~3 cm, <5 mm, >2 cm, a^b, x|y, R&D; A&B", "p <b and c>, &notable;", "a\\n b")),
        ("<style><!-- p {} --></style><o:p>A</o:p><![CDATA[B]]><td>C", "AB C"),
        # RTF: a whole document, and words of one.
        (
            "{\\rtf1\\ansi\\ansicpg1252{\\fonttbl{\\f0 Arial;}}{\\*\\generator X;}\r\n\\pard{\\b FINDINGS:}\\par\r\n"
            "Gr\\'f6\\'dfe \\u8804?3\\endash 5 cm\\line \\{x\\}}",
            "FINDINGS:\nGröße ≤3–5 cm\n{x}",
        ),
        ("{\\rtf1\\ansicpg1251{\\i}\\'cf\\'f0 \\u-10179?\\u-8704?", "Пр 😀"),
        ("\\par \\b FINDINGS:\\b0 Gr\\'f6\\'dfer", "\n   FINDINGS:  Größer"),
        ("Right\\normal left\\bones, l\\'absence, patient\\'s", "Right\\normal left\\bones, l'absence, patient's"),
        # HL7.
        ("A\\T\\B \\H\\x\\N\\ 3\\S\\4\\X0D\\y\\E\\z\\.sp2\\w\\.br\\v", "A&B x 3^4\ry\\z\\.br\\w\\.br\\v"),
        ("{\\E\\rtf1 Clear\\E\\par}", "Clear\n"),
        # Invisible characters, and accents of their own.
        ("F\0I\0N\u200bD\ufeffINGS\xa0:\x0bRe\u0301sultat", "FINDINGS :\nRésultat"),
    ],
)  # fmt: skip
def test_known_marks_of_an_export_are_taken_off(text: str, expected: str) -> None:
    assert plain_text(text) == expected
