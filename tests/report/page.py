"""A page of HTML as a test reads it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np

SVG = "{http://www.w3.org/2000/svg}"


class Page(HTMLParser):
    """Tables as lists of rows of cell texts, all visible text, and every address that the page refers to.

    `wrong` and `open` hold tags that are closed in the wrong order or never; `widths` the columns of each table's rows;
    `mute` headings without scope and pictures without a text.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.tables: list[list[list[str]]] = []
        self.widths: list[list[int]] = []
        self.text = ""
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.mute: list[dict[str, str | None]] = []
        self._cell: list[str] | None = None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        self.addresses += [values[name] for name in ("src", "href", "xlink:href") if name in values]
        self.ids += [values["id"]] if "id" in values else []
        if (name := {"th": "scope", "img": "alt", "svg": "aria-label"}.get(tag)) and not values.get(name):
            self.mute.append(values)
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
            self.widths.append([])
        elif tag == "tr":
            self.tables[-1].append([])
            self.widths[-1].append(0)
        elif tag in ("td", "th"):
            self._cell = []
            self.widths[-1][-1] += int(values.get("colspan", 1))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)
        if tag in ("td", "th") and self._cell is not None:
            self.tables[-1][-1].append("".join(self._cell))
            self._cell = None

    def handle_data(self, data):
        self.text += data
        if self._cell is not None:
            self._cell.append(data)

    def forest(self, title: str) -> dict[str, list[tuple[float, float]]]:
        """Legend -> AUC and row (0: the first) of each mark of a forest plot, read off its axis."""
        start = self.html.index(f'<svg role="img" aria-label="{title}: AUC"')
        svg = ElementTree.fromstring(self.html[start : self.html.index("</svg>", start) + 6])
        groups = {one.get("id", "").partition("-")[2]: one for one in svg.iter(f"{SVG}g")}

        def places(name: str) -> list[tuple[float, float]]:
            return [
                (float(one.get("x", 0)), float(one.get("y", 0))) for one in groups[name].iter(f"{SVG}use")
            ]

        def texts(name: str) -> list[str]:
            return [one.text or "" for one in groups[name].iter(f"{SVG}text")]

        ticks = [name for name in groups if re.fullmatch(r"xtick_\d+", name)]
        scale = np.polyfit([places(x)[0][0] for x in ticks], [float(texts(x)[0]) for x in ticks], 1)
        rows = sorted(places(name)[0][1] for name in groups if re.fullmatch(r"ytick_\d+", name))
        (legend,) = (texts(name) for name in groups if name.startswith("legend"))
        return {
            side: [
                (float(np.polyval(scale, x)), float(np.argmin(np.abs(np.subtract(rows, y)))))
                for x, y in places(f"side-{place}")
            ]
            for place, side in enumerate(legend)
        }

    def row(self, table: int, label: str) -> list[str]:
        (row,) = [row for row in self.tables[table] if row and row[0] == label]
        return row[1:]
