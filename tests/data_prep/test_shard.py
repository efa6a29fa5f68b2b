"""A set in shards is the set that it was in files: bytes, order, fingerprint, batches; and what is refused."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import tarfile
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from data_prep import shard
from data_prep.command import one_process_in
from data_prep.sources.check import check_set
from data_prep.sources.image_checks import check_files
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import digest_of_file
from medclip_dcl.data import identity, shards
from medclip_dcl.data.images import Images
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.encoding.encode import encode
from medclip_dcl.encoding.options import Encode
from tests.data.test_labelled import datamodule
from tests.data_prep.killing import content, differing
from tests.data_prep.small_release import image_path, write_release
from tests.program import verb

main = verb("shard")
prepare = verb("prepare mimic-cxr")


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shard, "SHARD_BYTES", 25_000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def files(small_set: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_set, tmp_path / "set"))


@pytest.fixture
def sharded(files: Path) -> Path:
    main([str(files)])
    return files


def paths_of(folder: Path) -> list[str]:
    return PreparedSet(folder).table("images")["path"].tolist()


def images_of(folder: Path) -> dict[str, bytes]:
    paths = paths_of(folder)
    stored = PreparedSet(folder).stored_images(paths)
    return {path: stored[place] for place, path in enumerate(paths)}


def test_shards_hold_the_same_bytes_in_order(small_set, sharded):
    tars = sorted((sharded / "shards").glob("*.tar"))
    assert len(tars) == 4 and not (sharded / "images").exists()
    assert images_of(sharded) == images_of(small_set)
    prepared = PreparedSet(sharded)
    assert prepared.fingerprint == PreparedSet(small_set).fingerprint and prepared.changes == ""
    paths = pd.read_parquet(small_set / "image_files.parquet")["path"]
    index = pd.read_parquet(sharded / "shards.parquet")
    assert index["path"].tolist() == paths.tolist()
    for row in range(0, 42, 5):
        place = index.iloc[row]
        raw = tars[place["shard"]].read_bytes()[place["offset"] :][: place["bytes"]]
        assert raw == (small_set / "images" / paths[row]).read_bytes()


def test_any_order_copies_and_threads_read_alike(small_set, sharded):
    paths = paths_of(small_set)[::-1]
    stored = PreparedSet(sharded).stored_images(paths)
    expected = [(small_set / "images" / path).read_bytes() for path in paths]
    with ThreadPoolExecutor(8) as pool:  # they open the shards together
        assert list(pool.map(stored.__getitem__, range(len(paths)))) == expected
    assert isinstance(stored, shards.ShardedImages) and len(stored._open) == 4
    again = pickle.loads(pickle.dumps(stored))
    part = again.part(5, 7)
    assert [*map(again.__getitem__, range(len(paths)))] == expected and [part[0], part[1]] == expected[5:7]


def test_tar_itself_reads_a_shard(small_set, sharded, tmp_path):
    paths = pd.read_parquet(small_set / "image_files.parquet")["path"]
    for tar in (sharded / "shards").glob("*.tar"):
        subprocess.run(["tar", "-xf", tar, "-C", tmp_path], check=True)
    found = sorted(tmp_path.glob("*.jpg"))
    assert [file.name for file in found] == [f"{row:08d}.jpg" for row in range(len(paths))]
    assert all(
        file.read_bytes() == (small_set / "images" / p).read_bytes()
        for file, p in zip(found, paths, strict=True)
    )


def test_webdataset_reads_images_with_their_reports(small_set, files):
    webdataset = pytest.importorskip("webdataset")
    main([str(files), "--texts"])
    tars = sorted(map(str, (files / "shards").glob("*.tar")))
    samples = list(webdataset.WebDataset(tars, shardshuffle=False))
    paths = pd.read_parquet(small_set / "image_files.parquet")["path"]
    assert [sample["__key__"] for sample in samples] == [f"{row:08d}" for row in range(len(paths))]
    assert [sample["jpg"] for sample in samples] == [
        (small_set / "images" / path).read_bytes() for path in paths
    ]
    assert all(sample["txt"].decode().count("\n") == 1 for sample in samples)


@pytest.mark.slow
def test_texts_stand_beside_images_only_on_request(small_set, files):
    main([str(files)])
    for tar in (files / "shards").glob("*.tar"):
        with tarfile.open(tar) as members:
            assert all(name.endswith(".jpg") for name in members.getnames())
    with pytest.raises(UserError, match="--texts: the shards of .* were made without it"):
        main([str(files), "--texts"])
    main([str(files), "--undo"])
    main([str(files), "--texts"])
    prepared = PreparedSet(files)
    reports = prepared.table("reports").merge(prepared.table("sentences"), on="sentence_id")
    row, study = 17, prepared.table("images")["study_id"][17]
    report = "\n".join(reports[reports["study_id"] == study].sort_values("position")["text"])
    with tarfile.open(
        shards.shard_file(files, int(pd.read_parquet(files / "shards.parquet")["shard"][row]))
    ) as tar:
        found = tar.extractfile(f"{row:08d}.txt")
        assert found is not None and found.read().decode() == report
    assert images_of(files) == images_of(small_set)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_batches_equal_those_of_files(small_set, sharded, workers):
    def batches(folder: Path) -> list[dict]:
        data = datamodule(folder, num_workers=workers)
        data.setup("fit")
        return [batch for loader in (data.train_dataloader(), data.val_dataloader()) for batch in loader]

    for one, other in zip(batches(small_set), batches(sharded), strict=True):
        assert one["dicom_id"] == other["dicom_id"] and torch.equal(one["images"], other["images"])


def test_features_are_those_of_files(small_set, sharded, exported, tmp_path):
    plain = shutil.copytree(small_set, tmp_path / "plain")
    of_files, of_shards = (
        encode(Encode(model=str(exported), data=folder, device="cpu", batch_size=5))
        for folder in (plain, sharded)
    )
    assert differing(content(of_files), content(of_shards)) == []


def noted(files: list[Path]) -> Callable[[Path], str]:
    """`digest_of_file` that notes its files."""

    def digest_of(file: Path) -> str:
        files.append(file)
        return digest_of_file(file)

    return digest_of


def rewrite_index(folder: Path, **columns: Callable[[pa.Array], pa.Array]) -> None:
    table = pq.read_table(folder / "shards.parquet")
    for place, name in enumerate(table.column_names):
        if name in columns:
            table = table.set_column(place, name, columns[name](table[name].combine_chunks()))
    pq.write_table(table, folder / "shards.parquet")


def exchange_paths(folder: Path) -> None:
    rewrite_index(folder, path=lambda paths: paths.take(pa.array([1, 0, *range(2, len(paths))])))


def cut(folder: Path) -> None:
    tar = shards.shard_file(folder, 1)
    os.truncate(tar, tar.stat().st_size - 10_240)


def exchange(folder: Path) -> None:
    tar = shards.shard_file(folder, 1)
    found = bytearray(tar.read_bytes())
    found[600] ^= 1
    tar.write_bytes(found)


def of_another_set(folder: Path) -> None:
    table = pq.read_table(folder / "shards.parquet")
    about = table.schema.metadata[b"medclip_dcl_shards"].replace(b'"image_files": "', b'"image_files": "0')
    pq.write_table(table.replace_schema_metadata({b"medclip_dcl_shards": about}), folder / "shards.parquet")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            cut,
            r"00001\.tar: expected 30,720 bytes .* found 20,480 bytes; its \d+ images \(files/.*\.jpg to .*\.jpg\)",
        ),
        (
            exchange_paths,
            r"shards\.parquet: expected the index .*; make it again from the shards: medclip-dcl shard",
        ),
        (exchange, r"00001\.tar: expected .* found another content of this size; its \d+ images \(files/"),
        (
            lambda folder: shards.shard_file(folder, 1).unlink(),
            r"00001\.tar: .* found no file; its \d+ images",
        ),
        (
            of_another_set,
            r"shards\.parquet: expected the index of this set's shards, found that of another set",
        ),
        (
            lambda folder: (folder / "shards.parquet").write_bytes(b"PAR1"),
            r"shards\.parquet: .*; make it again from the shards",
        ),
        (
            lambda folder: shutil.copy(folder / "cases.parquet", folder / "shards.parquet"),
            r"shards\.parquet: expected the columns .*dicom_id",
        ),
    ],
)
def test_damaged_shards_are_refused_by_name(sharded, damage, message):
    damage(sharded)
    with pytest.raises(UserError, match=message):
        _ = PreparedSet(sharded).fingerprint


def test_reading_notices_what_does_not_fit(sharded):
    paths = paths_of(sharded)
    for damage, found in (
        (cut, "expected a shard of 30,720 bytes, found 20,480"),
        (None, "found another content"),
    ):
        if damage is None:  # a shard in the place of another, of equal size
            one, other = (shards.shard_file(sharded, number) for number in (0, 2))
            assert one.stat().st_size == other.stat().st_size
            shutil.copy(one, other)
        else:
            damage(sharded)
        images = Images(PreparedSet(sharded).stored_images(paths), 40, False)
        table = pd.read_parquet(sharded / "shards.parquet")
        broken = int(table.query(f"shard == {1 if damage else 2}").index[0])
        with pytest.raises(
            UserError, match=rf"shards/0000.\.tar: {broken:08d}.jpg \(files/.*{found}.*restore it"
        ):
            images[broken]


def test_full_check_names_images_changed_in_a_shard(sharded):
    prepared = PreparedSet(sharded)
    tables = {name: prepared.table(name) for name in ("images", "image_files")}
    assert check_files(prepared, tables, True, None)[0] == []
    tar, times = shards.shard_file(sharded, 1), shards.shard_file(sharded, 1).stat()
    exchange(sharded)
    os.utime(tar, ns=(times.st_atime_ns, times.st_mtime_ns))  # of equal size and time
    problems, _ = check_files(prepared, tables, True, None)
    assert len(problems) == 1
    assert re.match(
        r"shards/: an image was changed after the set was made: 1 of 42 \(first: shards/00001\.tar: 000000..\.jpg \(",
        problems[0],
    )


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_copy_of_other_times_is_compared_once(sharded, tmp_path, monkeypatch, capsys, is_writable):
    expected = PreparedSet(sharded).fingerprint
    compared: list[Path] = []
    for tar in (sharded / "shards").glob("*.tar"):
        os.utime(tar, (2e9, 2e9))
    times, write = (sharded / "shards/times.json").read_bytes(), shards.write_json

    def refuse(value: dict, file: Path) -> None:
        if sharded in file.parents and not is_writable:
            raise PermissionError
        write(value, file)

    monkeypatch.setattr(shards, "write_json", refuse)
    monkeypatch.setattr(shards, "digest_of_file", noted(compared))
    capsys.readouterr()
    for number in (4, 0):
        compared.clear()
        assert PreparedSet(sharded).fingerprint == expected and len(compared) == number
    assert capsys.readouterr().err.count("4 of 4 shards have other times, as in a copy") == 1
    assert ((sharded / "shards/times.json").read_bytes() == times) != is_writable
    assert (tmp_path / "cache").exists() != is_writable


def test_times_compared_anywhere_are_known(sharded, monkeypatch):
    expected, cached = PreparedSet(sharded).fingerprint, identity._stamps(sharded / "dataset.json")[1]
    shards.write_json({f"0000{number}.tar": 1 for number in range(4)}, cached.with_suffix(".json"))
    compared: list[Path] = []
    monkeypatch.setattr(shards, "digest_of_file", noted(compared))
    assert PreparedSet(sharded).fingerprint == expected and compared == []
    for tar in (sharded / "shards").glob("*.tar"):
        os.utime(tar, ns=(1, 1))
    assert PreparedSet(sharded).fingerprint == expected and compared == []


def test_sizes_are_compared_before_digests(sharded, monkeypatch):
    compared: list[Path] = []
    monkeypatch.setattr(shards, "digest_of_file", noted(compared))
    os.utime(shards.shard_file(sharded, 0), (2e9, 2e9))
    cut(sharded)
    with pytest.raises(UserError, match="found 20,480 bytes"):
        _ = PreparedSet(sharded).fingerprint
    assert compared == []


def test_undo_gives_the_files_back(small_set, sharded, monkeypatch):
    main([str(sharded), "--undo"])
    found = {name: data for name, data in content(sharded).items() if name != ".lock"}
    assert differing(found, content(small_set)) == []
    hashed: list[Path] = []
    monkeypatch.setattr(identity, "digest_of_file", noted(hashed))
    assert PreparedSet(sharded).fingerprint == PreparedSet(small_set).fingerprint
    assert not any(file.suffix == ".jpg" and sharded in file.parents for file in hashed)


def test_a_copy_is_locked_until_it_is_renamed(files, tmp_path, monkeypatch):
    refused: list[str] = []

    def replace_locked(source: Path, target: Path, replace: Callable = os.replace) -> None:
        if target == tmp_path / "copy":
            with (
                pytest.raises(UserError, match="is being written by another process"),
                one_process_in(source),
            ):
                pass
            refused.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_locked)
    main([str(files), "--output", str(tmp_path / "copy")])
    assert refused == ["copy"] and images_of(tmp_path / "copy") == images_of(files)


def test_a_lost_index_is_made_again(files):
    main([str(files), "--texts"])
    before = content(files)
    (files / "shards.parquet").unlink()
    with pytest.raises(UserError, match=r"00000\.tar: .*first: 00000000\.txt.* --texts if"):
        main([str(files)])
    main([str(files), "--texts"])
    assert differing(content(files), before) == []


@pytest.mark.parametrize(
    "damage", [exchange_paths, of_another_set, lambda x: (x / "shards.parquet").write_bytes(b"")]
)
def test_a_damaged_index_is_made_again(sharded, damage):
    before = content(sharded)
    damage(sharded)
    main([str(sharded)])
    assert differing(content(sharded), before) == []


def of_a_shard(folder: Path, change: Callable[[bytes, int], bytes]) -> None:
    """Change the second shard and lose the index; 512 bytes before and behind the place begin its third image."""
    place = pd.read_parquet(folder / "shards.parquet").query("shard == 1").iloc[2]
    tar = shards.shard_file(folder, 1)
    tar.write_bytes(change(tar.read_bytes(), int(place["offset"])))
    (folder / "shards.parquet").unlink()


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (lambda tar, place: tar[:place] + b"damaged" + tar[place + 7 :], 1),
        (lambda tar, place: tar[: place - 500] + b"damaged" + tar[place - 493 :], 1),  # its header
        (lambda tar, place: tar[: place + 100], 9),  # it and all behind it
    ],
)
@pytest.mark.parametrize("words", [[], ["--texts"]])
def test_undo_takes_all_that_is_sound(small_set, files, tmp_path, change, lost, words):
    main([str(files), *words])
    index = pd.read_parquet(files / "shards.parquet")
    row = index.query("shard == 1").index[2]
    if lost > 1:
        lost = int((index["shard"] == 1).sum()) - 2
    of_a_shard(files, change)
    with pytest.raises(UserError, match=rf"00001\.tar: .*first: {row:08d}\.jpg.*--undo"):
        main([str(files), *words])
    copy = ["--output", str(tmp_path / "copy")]
    for further in ([], [], copy):
        with pytest.raises(
            UserError, match=rf"{lost} of 42 images .*{row:08d}\.jpg, in or behind .*00001\.tar"
        ):
            main([str(files), "--undo", *further])
        sound, expected = content(files / "images"), content(small_set / "images")
        assert len(sound) == 42 - lost and sound.items() <= expected.items()
        assert len(list((files / "shards").glob("*.tar"))) == index["shard"].nunique()
    shutil.copytree(small_set / "images", files / "images", dirs_exist_ok=True)
    main([str(files), "--undo"])
    assert differing(content(files), content(small_set)) in ([".lock"], [])


def test_undo_reads_behind_a_damaged_header(small_set, sharded):
    place = pd.read_parquet(sharded / "shards.parquet").query("shard == 1").iloc[2]
    tar = shards.shard_file(sharded, 1)
    found = bytearray(tar.read_bytes())
    found[place["offset"] - 400] ^= 1  # neither its name nor its image
    tar.write_bytes(found)
    main([str(sharded), "--undo"])
    assert content(sharded / "images") == content(small_set / "images")


def test_undo_deletes_no_other_file(files):
    (files / "shards").mkdir()
    others = [files / "shards/notes.txt", files / "shards/backup.tar", files / "shards/00001.tar.gz"]
    for other in others:
        other.write_text("mine")
    main([str(files)])
    main([str(files), "--undo"])
    assert sorted((files / "shards").iterdir()) == sorted(others)
    assert PreparedSet(files).changes == ""


@pytest.mark.parametrize("words", [[], ["--undo"]])
def test_a_copy_of_a_protected_set_is_writable(sharded, small_set, tmp_path, words):
    (sharded / "log_p").chmod(0o555)
    sharded.chmod(0o555)
    for file in sharded.glob("*.parquet"):
        file.chmod(0o444)
    main([str(sharded), "--output", str(tmp_path / "copy"), *words])
    places = [tmp_path / "copy", tmp_path / "copy/log_p", *(tmp_path / "copy").glob("*.parquet")]
    assert all(place.stat().st_mode & 0o200 for place in places)
    assert images_of(tmp_path / "copy") == images_of(small_set)


def test_files_are_said_to_stay_only_where_any_do(files, tmp_path, capsys):
    (files / "images").rename(tmp_path / "images")
    (files / "images").symlink_to(tmp_path / "images")  # another disk: the folder stays
    main([str(files)])
    assert "files stay" not in capsys.readouterr().out and not any((tmp_path / "images").iterdir())


def test_kept_files_are_removed_by_a_later_run(small_set, files, capsys):
    main([str(files), "--keep_files"])
    tars = {tar: tar.stat().st_mtime_ns for tar in (files / "shards").glob("*.tar")}
    assert content(files / "images") == content(small_set / "images")
    (files / "images" / paths_of(files)[0]).unlink()  # shards are read
    assert images_of(files) == images_of(small_set)
    main([str(files)])
    assert not (files / "images").exists() and {tar: tar.stat().st_mtime_ns for tar in tars} == tars
    main([str(files)])
    assert "the images are in shards: nothing to do" in capsys.readouterr().out


def test_a_changed_image_is_refused_and_nothing_lost(files, small_set):
    path = paths_of(files)[-1]
    (files / "images" / path).write_bytes(b"other")
    with pytest.raises(UserError, match=rf"images/{path} cannot be read \(its digest is another than"):
        main([str(files)])
    (files / "images" / path).unlink()
    with pytest.raises(UserError, match=rf"images/{path} cannot be read .*No such file"):
        main([str(files)])
    finished = {tar: tar.stat().st_mtime_ns for tar in (files / "shards").glob("*.tar")}
    assert len(finished) == 3 and not (files / "shards.parquet").exists()
    shutil.copy(small_set / "images" / path, files / "images" / path)
    main([str(files)])
    assert all(tar.stat().st_mtime_ns == time for tar, time in finished.items())
    assert images_of(files) == images_of(small_set)


def test_too_little_room_is_refused(files, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(50_000))
    with pytest.raises(UserError, match="files and shards: 0.00 GB more are needed, 0.00 GB are free; free"):
        main([str(files)])
    assert not (files / "shards").exists()


def test_a_read_only_set_is_copied(small_set, files, tmp_path):
    (files / "features/images").mkdir(parents=True)  # as by `encode --name images`
    (files / "features/images/features.json").write_text("{}")
    before, output = content(files), tmp_path / "copy"
    main([str(files), "--output", str(output)])
    assert (output / "features/images/features.json").is_file()
    assert content(files) == before and images_of(output) == images_of(small_set)
    assert PreparedSet(output).fingerprint == PreparedSet(files).fingerprint
    with pytest.raises(UserError, match=f"--output: {output} is there already"):
        main([str(files), "--output", str(output)])
    main([str(output), "--undo", "--output", str(tmp_path / "files")])
    assert differing(content(tmp_path / "files"), before) == [".lock"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--undo", "--texts"], "--texts: of no use with --undo"),
        (["--undo", "--keep_files"], "--keep_files: of no use with --undo"),
        (["--output", "x", "--keep_files"], "--keep_files: of no use with --output"),
    ],
)
def test_options_that_contradict_each_other(words, message):
    with pytest.raises(UserError, match=message):
        main(["set", *words])


def test_a_prepared_release_in_shards(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shard, "SHARD_BYTES", 3_000)
    raw, output = write_release(tmp_path / "raw"), tmp_path / "set"
    words = [
        "--source",
        str(raw),
        "--output",
        str(output),
        "--size",
        "16",
        "--workers",
        "1",
        "--rejected_share",
        "1",
    ]
    prepare([*words[:2], "--output", str(tmp_path / "files"), *words[4:]])
    prepare([*words, "--shards"])
    of_files, of_shards = PreparedSet(tmp_path / "files"), PreparedSet(output)
    assert of_shards.info == of_files.info and of_shards.fingerprint == of_files.fingerprint
    assert images_of(output) == images_of(tmp_path / "files")
    before = content(output)
    for further in ([], ["--shards"]):
        capsys.readouterr()
        prepare([*words, *further])
        assert "nothing to do" in capsys.readouterr().out and content(output) == before
    image_path(raw, 4).unlink()  # it stays in the set
    prepare(words)
    assert "(1 image no longer in the source, kept in the set)" in capsys.readouterr().out
    assert content(output) == before and check_set(output, full=True)[1] == []
    os.utime(image_path(raw, 3))
    with pytest.raises(
        UserError, match=r"1 changed image.*: its images are in shards.* medclip-dcl shard .* --undo"
    ):
        prepare([*words, "--complete"])
    assert content(output) == before
    main([str(output), "--undo"])
    prepare([*words, "--complete", "--shards"])
    assert images_of(output) == images_of(tmp_path / "files")
