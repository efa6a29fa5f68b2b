"""What the pages of this package share: the look and the show of a table."""

from __future__ import annotations

from pathlib import Path

import jinja2


def page_environment() -> jinja2.Environment:
    """Templates of this folder; what is put into them is escaped, and a name that is not there is an error."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
