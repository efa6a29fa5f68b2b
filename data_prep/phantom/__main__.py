"""Command line of the phantom."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from data_prep.command import available_cores, run_command
from data_prep.phantom.people import SEXES


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a digital phantom: stylised chest radiographs with reports, labels, boxes and the truth about them."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.phantom",
        description="Write stylised chest radiographs with reports, labels and boxes in the raw layout of "
        "MIMIC-CXR-JPG 2.0.0 and MS-CXR v1.0.0. No patients are in it. The same options give the same files; a "
        "finished folder is left alone, an unfinished one is completed.",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--studies", type=int, required=True, help="number of studies (about 1.2 images each)"
    )
    parser.add_argument("--seed", type=int, required=True, help="0 or more; another seed gives other studies")
    parser.add_argument(
        "--size", type=int, default=512, help="longer side of the images, px, give or take 6%% (default 512)"
    )
    parser.add_argument(
        "--workers", type=int, default=available_cores(), help="processes (default: the CPU cores)"
    )
    parser.add_argument(
        "--degraded_sex",
        choices=SEXES,
        help="degrade the test images of this sex (default none): a gap that tables by group must find",
    )
    settings = parser.parse_args(arguments)
    from data_prep.phantom.release import Options, write_phantom

    options = Options(settings.studies, settings.seed, settings.size, settings.degraded_sex)
    if write_phantom(settings.output, options, settings.workers):
        print(f"{settings.output}: {options.studies:,} studies written (a phantom: no patients)")
    else:
        print(f"{settings.output}: finished already with these options, nothing to do")


if __name__ == "__main__":
    run_command(main)
