"""Ask a trained model from the shell: ``python -m medclip_dcl.ask --model M IMAGE... --text "..." --output FOLDER``.

With ``--text``: for each image and text the heat map over the image as PNG, and the similarities in scores.csv. With
``--classify``: zero-shot scores, or calibrated probabilities, of images, folders or a list of files in one table, which
a killed command continues.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import re
import stat
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medclip_dcl.common.command_line import (
    add_import_option,
    available_cores,
    one_line_errors,
    progress_bar,
    whole_number,
)
from medclip_dcl.common.errors import MissingFileError, UserError

if TYPE_CHECKING:
    import torch

    from medclip_dcl.inference.model import ImageTextInference

SCORES_FILE = "scores.csv"
POSITIVE = " positive"
"""Ends the name of a column: 1 where the probability reaches the finding's threshold, else 0."""
COLUMNS = ("image", "text", "similarity", "lowest_cosine", "highest_cosine", "heat_map", "error", "warning")
DTYPES = ("float32", "bfloat16", "float16")
_PROGRAM = "medclip_dcl.ask"
_MOST_WORKERS = 8
# Digits of a score: batches of other sizes differ by less.
_DIGITS = 6
_MOST_LETTERS = 40
# Of an image's name in those of its heat maps: with the rest, and with what a file is called while it is written,
# they stay below 255.
_MOST_BYTES = 150


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; a mistake of the user is one line and status 2."""
    options = _parser().parse_args(arguments)
    try:
        with one_line_errors(f"{_PROGRAM}: error"), _plain_warnings():
            _check(options)
            if options.classify:
                classify_files(options)
            else:
                draw_heat_maps(options)
    except KeyboardInterrupt:
        # Heat maps are drawn again.
        again = "; the same command continues where it stopped" if options.classify else ""
        print(f"interrupted{again}", file=sys.stderr)
        raise SystemExit(130) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {_PROGRAM}",
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
    add("--prompts", metavar="FILE", help="YAML file of finding: [negative, positive] for --classify")
    add(
        "--output",
        type=Path,
        required=True,
        help=f"with --text a folder, for the heat maps and {SCORES_FILE}; with --classify a .csv or .parquet file",
    )
    add("--device", default="auto", help='"cpu", "cuda", "cuda:1", ...; default: a GPU if there is one')
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="of the encoders' arithmetic; default float32")
    add("--batch_size", type=whole_number(1), default=16, help="of --classify; default 16 images")
    workers = min(_MOST_WORKERS, available_cores())
    add(
        "--workers",
        type=whole_number(0),
        default=workers,
        help=f"processes that read images for --classify; 0: none of its own; default {workers} here",
    )
    add_import_option(parser)
    return parser


def _check(options: argparse.Namespace) -> None:
    """Refuse options that contradict each other, before anything slow is imported."""
    if not options.images and options.list is None:
        raise UserError("give image files or folders, or --list FILE")
    if not options.classify and options.output.suffix in (".csv", ".parquet"):
        raise UserError(
            f"--output {options.output}: expected a folder with --text, found the name of a table"
        )
    if (options.prompts is not None or options.calibrated) and not options.classify:
        raise UserError("--prompts and --calibrated belong to --classify; leave them out with --text")


def draw_heat_maps(options: argparse.Namespace) -> None:
    """Write the heat map of each text over each image, and scores.csv."""
    images = _images(options)
    _require_writable(options.output, options.output)
    earlier = options.output / SCORES_FILE
    if earlier.is_file() and not earlier.read_bytes().startswith(",".join(COLUMNS).encode()):
        raise UserError(f"{earlier} is not a table of heat maps; give another --output, or remove it")
    model = _load(options)
    model.embed_texts(options.text)  # A text that is too long is refused before the first image.
    from medclip_dcl.common.files import write_text

    table = io.StringIO()
    writer = csv.DictWriter(table, COLUMNS)
    writer.writeheader()
    taken: Counter[str] = Counter()
    reasons = []
    for image in images:
        rows, reason = _ask_image(model, image, options.text, options.output, taken)
        writer.writerows(rows)
        reasons += [reason] if reason else []
    if len(reasons) == len(images):
        raise UserError(reasons[0])
    with _writing(options.output):
        write_text(table.getvalue(), options.output / SCORES_FILE)
    print(f"written: {options.output / SCORES_FILE} and heat maps beside it", file=sys.stderr)


def _ask_image(
    model: ImageTextInference, image: str, texts: Sequence[str], folder: Path, taken: Counter[str]
) -> tuple[list[dict[str, Any]], str]:
    """Draw the texts' heat maps over one image; its rows of scores.csv, and why it cannot be used or ""."""
    from PIL import Image

    from medclip_dcl.ask.loading import read_image
    from medclip_dcl.ask.score_table import shown
    from medclip_dcl.common.files import replacing
    from medclip_dcl.pictures.inputs import constant

    grey = read_image(image)
    if isinstance(grey, str):
        print(f"warning: {shown(image)!r}: {grey}", file=sys.stderr)
        return [{"image": shown(image), "error": grey}], f"{shown(image)}: {grey}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        maps = model.heat_maps(grey, texts)
    low, high = maps.limits
    rows = []
    for place, text in enumerate(texts):
        file = folder / _file_name(image, text, place + 1, taken)
        with _writing(folder), replacing(file) as stream:
            # Smooth colours compress well at any level; higher ones take seconds.
            Image.fromarray(maps.overlay(place)).save(stream, format="PNG", compress_level=3)
        score = round(float(maps.similarity[place]), _DIGITS)
        rows.append(
            {
                "image": shown(image),
                "text": text,
                "similarity": score,
                "lowest_cosine": round(low, _DIGITS),
                "highest_cosine": round(high, _DIGITS),
                "heat_map": file.name,
                "warning": constant(grey),
            }
        )
        print(f"{score:7.3f}  {text}  {file}")
    return rows, ""


def classify_files(options: argparse.Namespace) -> None:
    """Write one table of zero-shot scores; finished rows of a killed command are kept."""
    from medclip_dcl.ask.score_table import ERROR, IMAGE, WARNING, ScoreTable, check_table_file
    from medclip_dcl.common.findings import CHEX5, read_prompts

    check_table_file(options.output)
    prompts = read_prompts(CHEX5 if options.prompts is None else options.prompts, "--prompts")
    if taken := sorted({IMAGE, ERROR, WARNING} & prompts.keys()):
        raise UserError(f"--prompts {options.prompts}: a finding cannot be called {taken[0]!r}; rename it")
    images = _images(options)
    _require_writable(options.output, options.output.parent)
    model = _load(options)
    meaning, columns = _meaning(model, options.dtype), list(prompts)
    if options.calibrated:
        calibration = model.require_calibration()
        prompts = calibration.prompts(options.prompts)
        columns = [*prompts, *(f"{finding}{POSITIVE}" for finding in prompts)]
        meaning["calibration"] = json.loads(calibration.to_json())
    meaning["prompts"] = {finding: [list(texts) for texts in pair] for finding, pair in prompts.items()}
    with _writing(options.output):
        table = ScoreTable(options.output, columns, meaning)
    with table:
        if table.is_finished(images):
            print(f"{options.output} is finished: {len(images):,} images", file=sys.stderr)
            return
        _add_missing(table, _scorer(model, prompts, options.calibrated), model.network.view, images, options)
        with _writing(options.output):
            frame = table.finish(images, model=str(options.model))
    n_errors, n_warnings = int(frame[ERROR].notna().sum()), int(frame[WARNING].notna().sum())
    notes = [f"{n:,} with {what}" for n, what in ((n_errors, "an error"), (n_warnings, "a warning")) if n]
    print(f"written: {options.output} ({', '.join([f'{len(images):,} images', *notes])})", file=sys.stderr)


def _scorer(
    model: ImageTextInference, prompts: Any, is_calibrated: bool
) -> Callable[[Any], list[dict[str, float | None]]]:
    """A function from a batch of network inputs to a row of scores for each image."""
    import pandas as pd

    differences = model.scorer(prompts)

    def score(inputs: Any) -> list[dict[str, float | None]]:
        table = pd.DataFrame(differences(inputs).astype("float64"), columns=list(prompts))
        if is_calibrated:
            calibration = model.require_calibration()
            table = calibration.probabilities(table)
            for finding in prompts:
                threshold = calibration.findings[finding].threshold
                is_positive = None if threshold is None else (table[finding] >= threshold).astype(float)
                table[f"{finding}{POSITIVE}"] = is_positive
        rows = table.round(_DIGITS).astype(object)
        names = list(rows.columns)
        values = rows.where(rows.notna(), None).itertuples(index=False, name=None)
        return [dict(zip(names, row, strict=True)) for row in values]

    return score


def _add_missing(
    table: Any,
    score: Callable[[Any], list[dict[str, float | None]]],
    view: Any,
    images: Sequence[str],
    options: argparse.Namespace,
) -> None:
    """Score the images that have no row yet."""
    import numpy as np

    from medclip_dcl.ask.loading import read_in_batches
    from medclip_dcl.ask.score_table import ERROR, IMAGE, WARNING

    missing = table.missing(images)
    done = len(images) - len(missing)
    with progress_bar(total=len(images), initial=done, desc="classify", unit=" images") as bar:
        for files in read_in_batches(missing, view, options.batch_size, options.workers):
            squares = [file.square for file in files if file.square is not None]
            scores = iter(score(np.stack(squares)) if squares else ())
            rows = [
                {
                    IMAGE: file.name,
                    **dict.fromkeys(table.columns),
                    **(next(scores) if file.square is not None else {}),
                    ERROR: file.error or None,
                    WARNING: file.warning or None,
                }
                for file in files
            ]
            with _writing(options.output):
                table.add(rows)
            bar.update(len(files))


def _meaning(model: ImageTextInference, dtype: str) -> dict[str, Any]:
    """Inputs besides the images that determine the scores."""
    from medclip_dcl.networks.bert_folder import weights_fingerprint

    view = model.network.view
    return {
        "model": weights_fingerprint(model.network),
        "image size": [view.size, view.geometry, view.prepared],
        "dtype": dtype,
    }


def _images(options: argparse.Namespace) -> list[str]:
    """Distinct image files in their order; folders are searched."""
    from medclip_dcl.common.files import read_text

    found: list[str] = []
    for name in map(os.path.expanduser, options.images):
        try:
            is_folder = stat.S_ISDIR(os.stat(name).st_mode)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise MissingFileError(f"{name}: no such image file or folder; check the path") from error
        except OSError:
            is_folder = False  # its row has the reason
        if is_folder:
            from medclip_dcl.ask.loading import image_files_in

            found += map(str, image_files_in(Path(name)))
        else:
            found.append(str(Path(name)))
    if options.list is not None:
        text = read_text(options.list)
        if "\0" in text:
            raise UserError(f"--list {options.list}: expected text, found NUL characters; save it in UTF-8")
        lines = list(filter(None, map(str.strip, text.split("\n"))))
        if not lines:
            raise UserError(f"--list {options.list} is empty; give one path in each line")
        found += [str(Path(os.path.expanduser(line))) for line in lines]
    return list(dict.fromkeys(found))


def _load(options: argparse.Namespace) -> ImageTextInference:
    import torch

    from medclip_dcl.inference.model import load

    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: torch.dtype = getattr(torch, options.dtype)
    return load(options.model, device=device, dtype=dtype)


def _file_name(image: str, text: str, place: int, taken: Counter[str]) -> str:
    """A heat map's file name, with a number where another has it, also on a disk that ignores capital letters."""
    from medclip_dcl.ask.score_table import shown

    stem = re.sub(r"[\x00-\x1f\x7f]", "_", shown(Path(image).stem))
    first = name = f"{stem.encode()[:_MOST_BYTES].decode(errors='ignore')}_{place}_{_slug(text)}"
    while name.casefold() in taken:
        taken[first.casefold()] += 1
        name = f"{first}_{taken[first.casefold()]}"
    taken[name.casefold()] += 1
    return f"{name}.png"


def _slug(text: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
    return words[:_MOST_LETTERS].strip("_") or "text"


def _require_writable(output: Path, folder: Path) -> None:
    """Make the folder of the output, and refuse one that cannot be written before anything slow."""
    if folder.is_file():
        raise UserError(f"--output {output}: {folder} is a file; give a folder")
    with _writing(output):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    """Errors of the system as one line about the output."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--output {output} cannot be written ({error.strerror or error}); give another place"
        ) from error


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings as one line each, without the program's source."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
        yield


if __name__ == "__main__":
    main()
