"""Move the images of a prepared set from files into shards, and back (`medclip_dcl.data.shards`).

Either can be killed at any time and continues: nothing is removed before what replaces it was compared with the digests
of the table "image_files". The index, written last and removed first, tells a set in shards from one in files.
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import chain, takewhile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from data_prep.command import one_process_in, progress
from data_prep.options import Shard
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import digest, digest_of_file, new_folder, replacing, sync_folder, write_bytes
from medclip_dcl.data.identity import IMAGE_FILES
from medclip_dcl.data.prepared import PreparedDataError, PreparedSet
from medclip_dcl.data.shards import COLUMNS, FOLDER, HEADER, INDEX, TIMES, ShardIndex, member, shard_file

SHARD_BYTES = 1_000_000_000
"""A shard ends with the image that reaches this size."""
_THREADS, _AT_ONCE = 16, 256
_TARS = f"{FOLDER}/{'[0-9]' * 5}.tar"


def run(options: Shard) -> None:
    """Move the images of a set, or of a copy at --output, or say that there is nothing to do."""
    prepared = PreparedSet(options.data)
    if prepared.table(IMAGE_FILES).empty:
        raise PreparedDataError(f"{options.data} has no images")
    with ExitStack() as locked, ExitStack() as renamed:  # the lock ends after the renaming
        target = options.data
        if options.output is not None:
            form = "files" if options.undo else "texts" if options.texts else "shards"
            copy = new_folder(options.output, "--output", f"{prepared.info.get('fingerprint')}.{form}")
            target = renamed.enter_context(copy)
        locked.enter_context(one_process_in(target))
        if options.output is not None:
            everywhere = shutil.ignore_patterns(".lock", ".*.tmp")

            def skipped(folder: str, names: list[str]) -> set[str]:
                own = {"images", FOLDER, INDEX} if Path(folder) == options.data else set()
                return everywhere(folder, names) | (own & {*names})

            shutil.copytree(options.data, target, False, skipped, shutil.copyfile, dirs_exist_ok=True)
            for folder, _, _ in os.walk(target):  # those of SET may be write-protected
                os.chmod(folder, os.stat(folder).st_mode | 0o700)
        if options.undo:
            to_files(prepared, target)
        else:
            to_shards(prepared, target, options.texts, options.keep_files)


def to_shards(prepared: PreparedSet, target: Path, texts: bool, keep_files: bool = False) -> None:
    """Write the images of a set into shards of `target`, its own folder or that of a copy; remove the files there.

    Args:
        texts: write the report of an image, a sentence a line, after it.
        keep_files: leave the files.
    """
    files, index, images = prepared.table(IMAGE_FILES), None, target / "images"
    with suppress(UserError):  # a damaged index is made again, and so is that of another set
        index = ShardIndex.read(target)
    if index is not None and index.image_files != prepared.info["digests"].get(IMAGE_FILES, ""):
        index = None
    if index is not None and index.texts != texts:
        raise UserError(
            f"--texts: the shards of {target} were made {'with' if index.texts else 'without'} it; first go back to "
            f"files: medclip-dcl shard {target} --undo"
        )
    if index is not None and (keep_files or not images.is_dir()):
        print(f"{target}: the images are in shards: nothing to do")
        return
    reports = _reports(prepared) if texts else {}
    # A header, and what fills the last block, of image and report.
    sizes = np.array([size + len(reports.get(row, b"")) for row, size in enumerate(files["bytes"])])
    sizes += 2 * HEADER * (1 + texts)
    by_size = np.unique((sizes.cumsum() - sizes) // SHARD_BYTES, return_inverse=True)[1]
    shard_of = by_size if index is None else index.rows["shard"].to_numpy()
    tars = [shard_file(target, shard) for shard in range(int(shard_of.max()) + 1)]
    _require_room(target, int(sizes.sum()) - sum(tar.stat().st_size for tar in tars if tar.is_file()))
    places, shards = [], []
    for shard, tar in enumerate(progress(tars, len(tars), "shards", "shards")):
        rows = np.flatnonzero(shard_of == shard)
        found, wrong = _places(tar, rows, files["digest"], reports)
        if wrong and index is None and (target != prepared.folder or images.is_dir()):
            _write(tar, zip(rows.tolist(), _contents(prepared, files, rows), strict=True), reports)
            found, wrong = _places(tar, rows, files["digest"], reports)
        if wrong:
            raise UserError(
                f"{tar}: {len(wrong):,} members are missing or not as written (first: {wrong[0]}); give --texts if it "
                f"was made with them, or go back to files, of all that is sound: medclip-dcl shard {target} --undo"
            )
        places += [(shard, *place) for place in found]
        shards.append((tar.stat().st_size, digest_of_file(tar)))
    table = pa.table([files["path"].tolist(), *np.array(places).T], pa.schema([*COLUMNS.items()]))
    ShardIndex(target, table, shards, texts, prepared.info["digests"].get(IMAGE_FILES, "")).write()
    sync_folder(target)
    for stale in {*target.glob(_TARS)} - {*tars}:
        stale.unlink()
    if not keep_files:
        for path in files["path"]:
            (images / path).unlink(missing_ok=True)
        for folder, _, _ in os.walk(images, topdown=False):
            with suppress(OSError):  # other files are in it
                os.rmdir(folder)
    still = "; files stay in images/" if any(images.glob("*")) else ""
    print(f"{len(files):,} images, number of shards {len(tars):,}; all digests are equal{still}")


def to_files(prepared: PreparedSet, target: Path) -> None:
    """Write the images of a set into files of `target`, its own folder or that of a copy; remove the shards there."""
    files = prepared.table(IMAGE_FILES)
    paths = [target / "images" / path for path in files["path"]]

    def others() -> np.ndarray:
        with ThreadPoolExecutor(_THREADS) as pool:
            return np.flatnonzero(files["digest"] != list(pool.map(digest_of_file, paths)))

    left = others()
    _require_room(target, int(files["bytes"].iloc[left].sum()))
    for row, content in progress(_sound_images(prepared, left), len(left), "images", "images"):
        write_bytes(content, paths[row], durable=False)
    os.sync()
    if len(left := others()):
        first = member(left[0])
        tars = [tar for tar in prepared.folder.glob(_TARS) if next(_members(tar), ("~",))[0] <= first]
        raise UserError(
            f"{len(left):,} of {len(files):,} images are missing or not as written (first: {first}, in or behind "
            f"{max(tars, default='no shard')}); put {paths[left[0]]} there from a copy (all others are), repeat this"
        )
    (target / INDEX).unlink(missing_ok=True)
    sync_folder(target)
    for file in (*target.glob(_TARS), target / FOLDER / TIMES):
        file.unlink(missing_ok=True)
    with suppress(OSError):  # other files are in it
        (target / FOLDER).rmdir()
    os.utime(target / "dataset.json")  # all images were compared after it was written
    print(f"{len(files):,} images in files; all digests are equal")


def _sound_images(prepared: PreparedSet, rows: np.ndarray) -> Iterator[tuple[int, bytes]]:
    """Rows with images that a file or a shard has as they were written; shards need neither index nor each header."""
    files, left = prepared.table(IMAGE_FILES), {member(row): row for row in rows.tolist()}

    def stored() -> Iterator[tuple[str, int, bytes]]:
        with suppress(UserError):  # no index, or a damaged one
            images = prepared.stored_images(files["path"].iloc[rows].tolist())
            for place, name in enumerate([*left]):
                with suppress(OSError):
                    yield name, 0, images[place]

    found = chain(stored(), *map(_members, sorted(prepared.folder.glob(_TARS))))
    for name, _, content in takewhile(lambda _: left, found):
        if name in left and digest(content) == files["digest"][left[name]]:
            yield left.pop(name), content


def _contents(prepared: PreparedSet, files: pd.DataFrame, rows: np.ndarray) -> Iterator[bytes]:
    """Images by rows of the table "image_files"; refuses one that is not as it was written."""
    stored, digests = prepared.stored_images(files["path"].iloc[rows].tolist()), files["digest"].iloc[rows]

    def content(place: int) -> bytes:
        try:
            found = stored[place]
            if digest(found) != digests.iloc[place]:
                raise OSError("its digest is another than when it was written")
        except OSError as error:
            raise PreparedDataError(stored.problem(place, error)) from error
        return found

    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(rows), _AT_ONCE):
            yield from pool.map(content, range(len(rows))[start : start + _AT_ONCE])


def _reports(prepared: PreparedSet) -> dict[int, bytes]:
    """Row of the table "image_files" -> sentences of the image's report, a sentence a line, by section and position."""
    said = prepared.table("reports").merge(prepared.table("sentences"), on="sentence_id")
    said = said.sort_values(["study_id", "section", "position"])
    report = said.groupby("study_id")["text"].agg("\n".join).to_dict()
    study = prepared.table("images").set_index("path")["study_id"].to_dict()
    paths = enumerate(prepared.table(IMAGE_FILES)["path"])
    return {row: report[study[path]].encode() for row, path in paths if study.get(path) in report}


def _write(file: Path, images: Iterable[tuple[int, bytes]], reports: Mapping[int, bytes]) -> None:
    with (
        replacing(file) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for row, image in images:
            for ending, content in (("jpg", image), ("txt", reports.get(row, b""))):
                if content:
                    info = tarfile.TarInfo(member(row, ending))
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def _places(
    file: Path, rows: np.ndarray, digests: pd.Series, reports: Mapping[int, bytes]
) -> tuple[list[tuple[int, int]], list[str]]:
    """Offset and bytes of each image in a shard, and names of members that are missing or not as they should be."""
    expected = {member(row): digests[row] for row in rows.tolist()}
    expected |= {member(row, "txt"): digest(reports[row]) for row in rows.tolist() if row in reports}
    found = {name: (start, len(content), digest(content)) for name, start, content in _members(file)}
    wrong = [name for name in {**expected, **found} if found.get(name, ("",))[-1] != expected.get(name)]
    return [] if wrong else [found[member(row)][:2] for row in rows.tolist()], sorted(wrong)


def _members(file: Path) -> Iterator[tuple[str, int, bytes]]:
    """Name, offset and content of the members of a shard, also of those behind a damaged one."""
    with suppress(OSError, tarfile.TarError), tarfile.open(file, "r:", ignore_zeros=True) as tar:
        for one in tar:
            if (stream := tar.extractfile(one)) is not None:
                yield one.name, one.offset_data, stream.read()


def _require_room(target: Path, needed: int) -> None:
    """Say how much of the disk is needed and free, and refuse where that is not enough."""
    free = shutil.disk_usage(target).free
    room = f"{max(0, needed) / 1e9:,.2f} GB more are needed, {free / 1e9:,.2f} GB are free"
    if needed > free:
        raise UserError(f"{target}: files and shards: {room}; free some, or give --output on another disk")
    print(f"files and shards beside each other: {room}")
