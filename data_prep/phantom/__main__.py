"""Command line of the phantom."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from data_prep.command import run_command
from data_prep.phantom.options import LEAST_RARE, MOST_RARE, Options
from data_prep.phantom.people import SEXES
from data_prep.phantom.rates import RARE_FINDINGS
from medclip_dcl.command_line import available_cores


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
    parser.add_argument(
        "--false_negatives",
        type=float,
        metavar="SHARE",
        help="mean share of training images of which a training report's sentence is true (rho), by fewer or more "
        "normal sentences and rarer findings: about 0.03 to 0.7 (default: no change, which gives 0.43)",
    )
    parser.add_argument(
        "--rare_findings",
        type=float,
        metavar="SHARE",
        help=f"make each of {', '.join(RARE_FINDINGS)} so rare outside the test studies: {LEAST_RARE} to {MOST_RARE} "
        "of the studies (default: no change)",
    )
    settings = parser.parse_args(arguments)
    from data_prep.phantom.release import summary, write_phantom

    options = Options(
        settings.studies,
        settings.seed,
        settings.size,
        settings.degraded_sex,
        settings.false_negatives,
        settings.rare_findings,
    )
    if write_phantom(settings.output, options, settings.workers):
        print(f"{settings.output}: {options.studies:,} studies written (a phantom: no patients)")
        for line in summary(settings.output):
            print(line)
    else:
        print(f"{settings.output}: finished already with these options, nothing to do")


if __name__ == "__main__":
    run_command(main)
