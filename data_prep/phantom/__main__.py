"""Write a digital phantom: stylised chest radiographs with reports, labels, boxes and the truth about them.

    medclip-dcl phantom --output RAW --studies N --seed N

RAW gets the raw layout of MIMIC-CXR-JPG 2.0.0 and MS-CXR v1.0.0. No patients are in it. The same options give the same
files; a finished folder is left alone, an unfinished one is completed.
"""

from __future__ import annotations

from collections.abc import Sequence

from data_prep.phantom.options import Settings
from medclip_dcl.common.command_line import parse_options, run_command


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, see `--help`."""
    settings = parse_options(Settings, "phantom", __doc__, arguments)
    from data_prep.phantom.release import write_phantom

    if write_phantom(settings.output, settings, settings.workers):
        print(f"{settings.output}: {settings.studies:,} studies written (a phantom: no patients)")
    else:
        print(f"{settings.output}: finished already with these options, nothing to do")


if __name__ == "__main__":
    run_command(main)
