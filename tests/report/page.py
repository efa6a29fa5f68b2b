"""A page of HTML as a test reads it."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Tables as lists of rows of cell texts, all visible text, and every address that the page refers to.

    `wrong` and `open` hold tags that are closed in the wrong order or never; `widths` the columns of each table's rows.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.widths: list[list[int]] = []
        self.text = ""
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self._cell: list[str] | None = None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        self.addresses += [values[name] for name in ("src", "href", "xlink:href") if name in values]
        self.ids += [values["id"]] if "id" in values else []
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

    def row(self, table: int, label: str) -> list[str]:
        (row,) = [row for row in self.tables[table] if row and row[0] == label]
        return row[1:]
