"""Write the sections of RESULTS.md, one for each benchmark."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).resolve().with_name("RESULTS.md")


def write_section(title: str, lines: list[str]) -> None:
    """Replace this benchmark's section of RESULTS.md, or add it."""
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.is_file() else "# Benchmarks, as measured\n"
    head = f"\n## {title}\n"
    before, _, rest = text.partition(head)
    _, separator, after = rest.partition("\n## ")
    body = head + "\n" + "\n".join(lines) + "\n"
    RESULTS.write_text(
        before.rstrip("\n") + "\n" + body + (separator + after if separator else ""), encoding="utf-8"
    )
