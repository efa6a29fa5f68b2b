"""Ask a trained model from the shell: ``medclip-dcl ask --model M IMAGE... --text "..." --output FOLDER``."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

from medclip_dcl.common.command_line import (
    add_import_option,
    available_cores,
    one_line_errors,
    whole_number,
)
from medclip_dcl.common.findings import Ensemble

DTYPES = ("float32", "bfloat16", "float16")
_PROGRAM = "medclip_dcl.ask"
_MAX_WORKERS = 8


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; a mistake of the user is one line and status 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.calibrated |= options.calibration is not None
    if (options.prompts or options.calibrated or options.ensemble) and not options.classify:
        parser.error(
            "--prompts, --ensemble and --calibrated belong to --classify; leave them out with --text"
        )
    try:
        with one_line_errors(f"{_PROGRAM}: error"), _plain_warnings():
            # Here, so that --help is quick.
            from medclip_dcl.ask import tasks

            if options.classify:
                tasks.classify_files(options)
            else:
                tasks.draw_heat_maps(options)
    except KeyboardInterrupt:
        # Heat maps are drawn again.
        again = "; the same command continues where it stopped" if options.classify else ""
        print(f"interrupted{again}", file=sys.stderr)
        raise SystemExit(130) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medclip-dcl ask",
        description="Ask a trained model about radiographs (JPEG, PNG, TIFF, DICOM): heat maps and similarities of"
        " texts, or zero-shot scores of findings.",
    )
    add = parser.add_argument
    add(
        "images",
        nargs="*",
        metavar="IMAGE",
        help="image file, or folder (its image files, also in subfolders)",
    )
    add("--list", type=Path, metavar="FILE", help="text file with the path of an image in each line")
    add("--model", required=True, help="run folder, checkpoint, exported folder or Hugging Face repository")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--text", action="append", help="sentence to look for; may be given several times")
    task.add_argument("--classify", action="store_true", help="zero-shot scores of CheX5, or of --prompts")
    add(
        "--calibrated",
        action="store_true",
        help="with --classify: probabilities, and whether they reach the threshold, by the model's calibration.json",
    )
    words = "calibrate --output: with --classify: as --calibrated, by this file in place of the model's"
    add("--calibration", type=Path, metavar="FILE", help=words)
    add("--prompts", metavar="FILE", help="YAML file of finding: [negative, positive] for --classify")
    words = "several prompts a side: the mean of scores (default) or of embeddings; with --calibrated as calibrated"
    add("--ensemble", choices=get_args(Ensemble), help=words)
    add(
        "--output",
        type=Path,
        required=True,
        help="with --text a folder, for the heat maps and scores.csv; with --classify a .csv or .parquet file",
    )
    add("--device", default="auto", help='"cpu", "cuda", "cuda:1", ...; default: a GPU if there is one')
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="of the encoders' arithmetic; default float32")
    add("--batch_size", type=whole_number(1), default=16, help="of --classify; default 16 images")
    workers = min(_MAX_WORKERS, available_cores())
    add(
        "--workers",
        type=whole_number(0),
        default=workers,
        help=f"processes that read images for --classify; 0: none of its own; default {workers} here",
    )
    add_import_option(parser)
    return parser


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings as one line each, without the program's source."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
        yield


if __name__ == "__main__":
    main()
