"""The two tasks of `medclip-dcl ask`: heat maps of texts, and a table of findings' scores."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import stat
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import UInt8
from PIL import Image

from medclip_dcl import __version__
from medclip_dcl.common.command_line import digests_of_imports, progress_bar
from medclip_dcl.common.devices import without_tf32
from medclip_dcl.common.errors import MissingFileError, UserError
from medclip_dcl.common.files import read_text, replacing, require_writable, write_text
from medclip_dcl.pictures.grey import RULES
from medclip_dcl.pictures.inputs import doubts
from medclip_dcl.use.loading import image_files_in, read_image, read_in_batches
from medclip_dcl.use.model import UNKNOWN_TEXT, FindingScorer, LoadedModel, load
from medclip_dcl.use.options import Ask
from medclip_dcl.use.score_table import ERROR, IMAGE, STATE, SUFFIXES, WARNING, Row, ScoreTable, shown

SCORES_FILE = "scores.csv"
COLUMNS = ("image", "text", "similarity", "lowest_cosine", "highest_cosine", "heat_map", "error", "warning")
POSITIVE = " positive"
"""Ends the name of a column: 1 where the probability reaches the finding's threshold, else 0."""
# Digits of a score: batches of other sizes differ by less.
_DIGITS = 6
_MAX_LETTERS = 40
# Of an image's name in those of its heat maps, which stay below 255 with the rest.
_MAX_BYTES = 150


def run(options: Ask) -> None:
    if options.classify:
        classify_files(options)
    else:
        draw_heat_maps(options)


def draw_heat_maps(options: Ask) -> None:
    """Write the heat map of each text over each image, and scores.csv."""
    images = _images(options)
    require_writable(options.output)
    file = options.output / SCORES_FILE
    if file.is_file() and not file.read_bytes().startswith(",".join(COLUMNS).encode()):
        raise UserError(f"{file} is not a table of heat maps; give another --output, or remove it")
    model = _load(options)
    model.embed_texts(options.texts)  # A text that is too long is refused before the first image.
    table = io.StringIO()
    writer = csv.DictWriter(table, COLUMNS)
    writer.writeheader()
    reasons = []
    for number, image in enumerate(images, start=1):
        grey = read_image(image)
        if isinstance(grey, str):
            reasons.append(f"{shown(image)}: {grey}")
            print(f"warning: {shown(image)!r}: {grey}", file=sys.stderr)
            writer.writerow({"image": shown(image), "error": grey})
        else:
            writer.writerows(_ask_image(model, image, grey, number, options))
    if len(reasons) == len(images):
        raise UserError(reasons[0])
    write_text(table.getvalue(), file)
    print(f"written: {file} and heat maps beside it", file=sys.stderr)


def _ask_image(
    model: LoadedModel, image: str, grey: Image.Image, number: int, options: Ask
) -> Iterator[dict[str, Any]]:
    """Draw the texts' heat maps over one image; its rows of scores.csv."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        maps = model.heat_maps(grey, options.texts)
    low, high = maps.limits
    are_unknown = model.image_text.text_encoder.are_unknown(options.texts)
    stem = re.sub(r"[\x00-\x1f\x7f]", "_", shown(Path(image).stem)).encode()[:_MAX_BYTES]
    for place, text in enumerate(options.texts):
        words = re.sub(r"[^a-z0-9]+", "_", text.lower())[:_MAX_LETTERS].strip("_")
        file = options.output / f"{number}_{stem.decode(errors='ignore')}_{place + 1}_{words}.png"
        with replacing(file) as stream:
            # Smooth colours compress well at any level; higher ones take seconds.
            Image.fromarray(maps.overlay(place)).save(stream, format="PNG", compress_level=3)
        score = round(float(maps.similarity[place]), _DIGITS)
        print(f"{score:7.3f}  {text}  {file}")
        yield {
            "image": shown(image),
            "text": text,
            "similarity": score,
            "lowest_cosine": round(low, _DIGITS),
            "highest_cosine": round(high, _DIGITS),
            "heat_map": file.name,
            "warning": "; ".join(
                filter(None, (doubts(grey), f"the text {UNKNOWN_TEXT}" * are_unknown[place]))
            ),
        }


def classify_files(options: Ask) -> None:
    """Write one table of scores of findings; finished rows of a killed command are kept."""
    if options.output.suffix not in SUFFIXES or options.output.is_dir():
        raise UserError(f"--output {options.output}: scores are written to a file, .csv or .parquet")
    images = _images(options)
    require_writable(options.output.parent)
    model = _load(options)
    scorer = model.scorer(options.prompts, options.ensemble, options.is_calibrated)
    if taken := sorted({IMAGE, ERROR, WARNING} & {*scorer.findings}):
        raise UserError(f"--prompts {options.prompts}: a finding cannot be called {taken[0]!r}; rename it")
    # Inputs besides the images that determine the scores.
    identity = model.network.fingerprint()
    meaning: dict[str, Any] = {
        "model": identity.pop("weights"),
        "settings of the model": identity.pop("settings"),
        "image size": [*identity.values()],
        "dtype": options.dtype,
        "rules for images": RULES,
        "code of --import": digests_of_imports(options.imported),
    }
    columns = scorer.findings
    if scorer.calibration is not None:
        columns = [*columns, *(f"{finding}{POSITIVE}" for finding in columns)]
        meaning["calibration"] = json.loads(scorer.calibration.to_json())
    meaning |= {} if scorer.zero_shot is None else scorer.zero_shot.identity()
    with ScoreTable(options.output, columns, meaning) as table:
        missing = table.missing(images)
        if not missing and table.is_written:
            print(f"{options.output} is finished: {len(images):,} images", file=sys.stderr)
            return
        done = len(images) - len(missing)
        with progress_bar(total=len(images), initial=done, desc="classify", unit=" images") as bar:
            for files in read_in_batches(missing, model.network.view, options.batch_size, options.workers):
                squares = [file.square for file in files if file.square is not None]
                scores = iter(_scores(model, scorer, np.stack(squares)) if squares else ())
                rows = [
                    dict.fromkeys(columns)
                    | (next(scores) if file.square is not None else {})
                    | {
                        IMAGE: file.name,
                        ERROR: file.error or None,
                        WARNING: file.warning or None,
                        STATE: file.state,
                    }
                    for file in files
                ]
                table.add(rows)
                bar.update(len(files))
        frame = table.finish(images, model=str(options.model), medclip_dcl=__version__)
    n_errors, n_warnings = int(frame[ERROR].notna().sum()), int(frame[WARNING].notna().sum())
    notes = [f"{n:,} with {what}" for n, what in ((n_errors, "an error"), (n_warnings, "a warning")) if n]
    print(f"written: {options.output} ({', '.join([f'{len(images):,} images', *notes])})", file=sys.stderr)


def _scores(
    model: LoadedModel, scorer: FindingScorer, inputs: UInt8[np.ndarray, "image side side"]
) -> list[Row]:
    """A row of scores, or of probabilities and sides of the threshold, for each image of a batch."""
    table = scorer.answers(model.encode_inputs(inputs)).astype("float64")
    if scorer.calibration is not None:
        thresholds = pd.Series(scorer.calibration.thresholds)
        is_positive = table.ge(thresholds).astype(float).where(table.notna())
        table = table.join(is_positive.add_suffix(POSITIVE))
    rows = table.round(_DIGITS).astype(object)
    return rows.where(rows.notna(), None).to_dict("records")  # type: ignore[return-value]


def _images(options: Ask) -> list[str]:
    """Distinct image files in their order; folders are searched."""
    found: list[str] = []
    for name in map(os.path.expanduser, options.images):
        try:
            is_folder = stat.S_ISDIR(os.stat(name).st_mode)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise MissingFileError(f"{name}: no such image file or folder; check the path") from error
        except OSError:
            is_folder = False  # its row has the reason
        found += map(str, image_files_in(Path(name)) if is_folder else [Path(name)])
    if options.listed is not None:
        lines = filter(None, map(str.strip, read_text(options.listed).split("\n")))
        found += [str(Path(os.path.expanduser(line))) for line in lines]
    if not found:
        raise UserError(
            "found no image; give image files or folders, or --list FILE with a path in each line"
        )
    unique: dict[str, str] = {}
    for name in found:
        unique.setdefault(os.path.abspath(name), name)
    return list(unique.values())


def _load(options: Ask) -> LoadedModel:
    without_tf32()  # as a calibration was fitted
    if options.is_calibrated and options.dtype != "float32":
        print(f"warning: --dtype {options.dtype}: the calibration was fitted in float32", file=sys.stderr)
    return load(options.model, options.device, getattr(torch, options.dtype), options.calibration)
