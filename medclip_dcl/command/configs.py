"""List and copy the packaged configurations: ``medclip-dcl configs``."""

from __future__ import annotations

import sys

from medclip_dcl.command.options import Configs
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import read_text, write_text
from medclip_dcl.common.packaged import Kind, find_packaged, packaged_files

_TAKERS: dict[Kind, str] = {
    "": "--config NAME",
    "experiments": "study NAME, without experiments/",
    "prompts": "--prompts NAME, --templates NAME, without prompts/",
    "slurm": "batch files, to copy and submit",
}


def run(options: Configs) -> None:
    """Print the names with the first line of each file, or print or copy one."""
    if options.name is None:
        lines = []
        for kind, taker in _TAKERS.items():
            lines.append(f"{taker}:")
            for name, file in packaged_files(kind).items():
                comment = next(line[2:] for line in read_text(file).splitlines() if line.startswith("# "))
                path = f"{kind}/{name}" if kind else name
                lines.append(f"  {path:<34} {comment.rstrip(':')}")
        print("\n".join(lines))
        return
    text = read_text(find_packaged(options.name))
    if options.output is None:
        sys.stdout.write(text)
        return
    if options.output.exists():
        raise UserError(f"--output: {options.output} exists; give a new file, or delete this one")
    write_text(text, options.output)
    print(options.output)
