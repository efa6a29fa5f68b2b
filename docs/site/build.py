"""Build the documentation as a site in build/docs/html: `make docs`.

The pages are Markdown that reads well on a git host. A copy is staged in which each file that a page links to is a page
as well: a configuration or source file as code, a folder as a list, a notebook with its outputs. Tables and pictures
stay files. Sphinx builds the copy and treats each warning as an error.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS, OUTPUT = ROOT / "docs", ROOT / "build/docs"
LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)((?:#[^)\s]*)?)\)")
CODE = {".py": "python", ".yaml": "yaml", ".sbatch": "bash"}
FILES = (".csv", ".png", ".jpg")
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed|object|input)\b[^>]*?\s(?:src|srcset|data)=["']?(?:https?:)?//
    |<link\b(?![^>]*rel=["']?(?:canonical|next|prev|search|index)\b)[^>]*?\shref=["']?(?:https?:)?//
    |url\(\s*["']?(?:https?:)?// | @import\s+["'](?:https?:)?//
    |(?:fetch|import|importScripts)\(\s*["'`](?:https?:)?//""",
    re.IGNORECASE | re.VERBOSE,
)


def loaded_from_elsewhere(folder: Path) -> list[str]:
    """Places at which a page makes a browser load from another host; links to click do not count."""
    return [
        f"{file.relative_to(folder)}: {text[match.start() : match.end() + 60]}"
        for file in sorted(folder.rglob("*"))
        if file.suffix in (".html", ".css", ".js", ".svg")
        for text in [file.read_text(encoding="utf-8")]
        for match in LOADED.finditer(text)
    ]


def navigation(pages: Iterable[object], caption: str = "") -> str:
    """The directive that puts pages below the present one."""
    head = ["\n\n```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join([*head, "", *map(str, pages), "```\n"])


def listing(title: str, pages: dict[str, str]) -> str:
    """A page that links to others."""
    lines = [f"# {title}", "", *(f"- [{name}]({page})" for name, page in pages.items())]
    return "\n".join(lines) + navigation(page for page in pages.values() if page.endswith(".md"))


class Stage:
    """A folder with the staged pages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages: dict[Path, Path] = {}

    def page(self, source: Path, start: Path) -> str:
        """Link from `start` to the page of a file, which is staged first, with all that it links to."""
        place = self.folder / source.relative_to(DOCS if source.is_relative_to(DOCS) else ROOT)
        if source.is_dir():
            place /= "index.md"
        elif source.suffix not in (".md", ".ipynb", *FILES):
            place = place.with_name(f"{place.name}.md")
        if source not in self.pages:
            self.pages[source] = place
            place.parent.mkdir(parents=True, exist_ok=True)
            if source.suffix in FILES:
                shutil.copy(source, place)
            else:
                place.write_text(self.text(source, place), encoding="utf-8")
        return os.path.relpath(place, start.parent)

    def text(self, source: Path, place: Path) -> str:
        """Content of the page of a file or folder."""
        name = str(source.relative_to(ROOT))
        if source.is_dir():
            files = [
                file for file in sorted(source.iterdir()) if file.is_dir() or file.suffix in (*CODE, *FILES)
            ]
            return listing(name, {file.name: self.page(file, place) for file in files if file.name[0] != "_"})
        text = source.read_text(encoding="utf-8")
        if source.suffix not in (".md", ".ipynb"):
            return f"# {name}\n\n``````{CODE.get(source.suffix, 'text')}\n{text}``````\n"

        def staged(match: re.Match[str]) -> str:
            file = (source.parent / match[1]).resolve()  # Sphinx reports one that does not exist
            return f"]({self.page(file, place)}{match[2]})" if file.exists() else match[0]

        text = LINK.sub(staged, text)
        if source == DOCS / "index.md":
            text = text.replace("## Reference\n", "## Reference\n\n" + self.reference())
            for part, pages in re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", text, re.M):
                links = re.findall(r"^- \[([^]]*)\]\(([^)#]+)", pages, re.M)
                text += navigation((f"{title} <{page}>" for title, page in links), part)
            text += navigation(["sources.md"])
        return text

    def reference(self) -> str:
        """Stage the pages that are made from the program, and list them."""
        sys.path[:0] = [str(DOCS / "site"), str(ROOT)]
        import reference

        for kind, pages in {"commands": reference.commands(), "python": reference.names()}.items():
            files = {name: f"{name.replace(' ', '_')}.md" for name in pages}
            (self.folder / "reference" / kind).mkdir(parents=True)
            for name, text in pages.items():
                (self.folder / "reference" / kind / files[name]).write_text(text, encoding="utf-8")
            title = kind.capitalize()
            (self.folder / "reference" / kind / "index.md").write_text(
                listing(title, files), encoding="utf-8"
            )
        (self.folder / "reference/settings.md").write_text(reference.settings(), encoding="utf-8")
        return (
            "- [Commands](reference/commands/index.md): the options of each verb\n"
            "- [Settings](reference/settings.md): the keys of configurations, with defaults\n"
            "- [Python](reference/python/index.md): the public names\n"
        )


def main() -> None:
    """Stage the pages, build the site, and end with status 1 where anything is wrong."""
    from sphinx.cmd.build import main as sphinx

    shutil.rmtree(OUTPUT, ignore_errors=True)
    stage = Stage(OUTPUT / "pages")
    for page in sorted(DOCS.glob("*.md")):  # Sphinx reports one that the start page does not list
        stage.page(page, stage.folder)
    code = [one for one in sorted(stage.pages) if one.suffix not in (*FILES, ".md", ".ipynb")]
    code = [one for one in code if not one.is_relative_to(ROOT / "configs") and one != DOCS / "results"]
    sources = {str(one.relative_to(ROOT)): stage.page(one, stage.folder / "sources.md") for one in code}
    (stage.folder / "sources.md").write_text(listing("Source files", sources), encoding="utf-8")
    options = ["-W", "--keep-going", "-q", "-c", str(DOCS / "site")]
    status = sphinx([*options, str(stage.folder), str(OUTPUT / "html")])
    foreign = loaded_from_elsewhere(OUTPUT / "html")
    if status or foreign:
        sys.exit("\n".join(["the site has mistakes: see the warnings above", *foreign]))
    print(f"open {OUTPUT.relative_to(ROOT)}/html/index.html")


if __name__ == "__main__":
    main()
