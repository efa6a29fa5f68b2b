"""Features of images and sentences: those of the model's encoders, in their rows, whatever kills the command."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import medclip_dcl.encoding.encode
from medclip_dcl.common.journal import Journal
from medclip_dcl.data.features import Features
from medclip_dcl.data.prepared import PreparedSet
from medclip_dcl.encoding import model_results
from medclip_dcl.encoding.encode import PROGRESS_FILE
from medclip_dcl.encoding.model_results import RowFile
from medclip_dcl.pictures.transforms import GreyCrop, batch_of, centre_crop, load_grey
from medclip_dcl.use.model import load
from tests.data_prep.killing import content
from tests.program import verb
from tests.small import export_network

main = verb("encode")


@pytest.fixture(scope="module")
def encoded(small_set, exported, tmp_path_factory) -> Path:
    """A copy of `small_set` with features of the middle 48 of 64 pixels."""
    folder = shutil.copytree(small_set, tmp_path_factory.mktemp("encoded") / "set")
    main([*arguments(folder, exported), "--evaluation_crop", "48", "--name", "middle"])
    return folder


def arguments(folder: Path, model: Path) -> list[str]:
    return [str(model), str(folder), "--device", "cpu", "--batch_size", "5"]


def test_rows_are_those_of_single_examples(encoded, exported):
    network, prepared = load(exported).image_text, PreparedSet(encoded)
    found = Features(prepared, "middle")
    images = prepared.table("images").sample(4, random_state=0)
    rows = found.of_images(found.rows_of_images(images["dicom_id"].tolist()))
    assert rows.dtype == torch.float16 and rows.shape == (4, 64, 3, 3)
    sentences = prepared.table("sentences")[::-1]
    states = found.of_sentences(sentences["sentence_id"].tolist())
    with torch.no_grad():
        for path, row in zip(images["path"], rows, strict=True):
            seen = batch_of([GreyCrop(centre_crop(load_grey(prepared.read_image(path), 64), 48))])["images"]
            torch.testing.assert_close(row.float(), network.image_features(seen)[0], rtol=1e-3, atol=1e-4)
            projected = network.image_encoder.project(network.image_features(seen))
            torch.testing.assert_close(projected, network.feature_map(seen))
        for text, state in zip(sentences["text"], states, strict=True):
            tokens, lengths = network.tokenize([text])
            torch.testing.assert_close(
                state, network.text_encoder.states(tokens, lengths)[0], rtol=1e-4, atol=1e-5
            )
            embedded = network.text_encoder.project(network.text_encoder.states(tokens, lengths))
            torch.testing.assert_close(embedded, network.embed_texts([text]))


def test_finished_features_stay_and_others_are_refused(encoded, exported, small_bert, tmp_path, capsys):
    folder = encoded / "features/middle"
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    main([*arguments(encoded, exported), "--evaluation_crop", "48", "--name", "middle"])
    assert "nothing to do" in capsys.readouterr().out
    other = export_network(small_bert, tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=r"middle/features.json differs in encoders; choose another --name"):
        main([*arguments(encoded, other), "--evaluation_crop", "48", "--name", "middle"])
    with pytest.raises(ValueError, match="differs in evaluation_size; choose"):
        main([*arguments(encoded, exported), "--name", "middle"])
    with pytest.raises(ValueError, match="expected at most 64 pixels .* stride, 16; found 40"):
        main([*arguments(encoded, exported), "--evaluation_crop", "40"])
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    with pytest.raises(ValueError, match=r"no finished features named best \(there: middle\)"):
        Features(PreparedSet(encoded), "best")


def test_an_interrupted_command_continues_and_ends_alike(encoded, exported, monkeypatch, capsys):
    whole, again = encoded / "features/middle", encoded / "features/again"
    of_images = medclip_dcl.encoding.encode._features

    def interrupted(network, batches) -> Iterator[np.ndarray]:
        for number, part in enumerate(of_images(network, batches)):
            if number == 3:
                raise KeyboardInterrupt
            yield part

    words = [*arguments(encoded, exported), "--evaluation_crop", "48", "--name", "again"]
    monkeypatch.setattr("medclip_dcl.encoding.encode._features", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(words)
    with pytest.raises(ValueError, match="no finished features named again"):
        Features(PreparedSet(encoded), "again")
    monkeypatch.setattr("medclip_dcl.encoding.encode._features", of_images)
    main(words)
    said = capsys.readouterr().out
    assert "continuing: 15 of 42 images were done before" in said and "9 of 9 sentences" in said
    assert content(again) == content(whole)


def test_kill_9_costs_no_row_that_was_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(model_results, "KEEP_EVERY", 0.0)
    rows = np.random.default_rng(0).normal(size=(23, 2, 3)).astype(np.float16)

    def parts(start: int, killed_at: int | None) -> Iterator[np.ndarray]:
        for first in range(start, 23, 4):
            if first == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield rows[first : first + 4]

    def written(killed_at: int | None) -> int:
        """Rows that were there at the beginning."""
        file = RowFile(tmp_path / "rows.npy", 23, Journal(tmp_path / PROGRESS_FILE, {"of": "these"}, ""))
        done = file.done
        file.write(parts(done, killed_at), 6, "rows")
        return done

    for killed_at in (8, 20):
        if (child := os.fork()) == 0:
            written(killed_at)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert written(None) == 20
    np.testing.assert_array_equal(np.load(tmp_path / "rows.npy"), rows)


def test_features_beyond_the_range_of_float16_are_refused(tmp_path):
    file = RowFile(tmp_path / "images.npy", 2, Journal(tmp_path / PROGRESS_FILE, {}, ""))
    with np.errstate(over="ignore"):
        rows = np.array([[1.0], [1e6]]).astype(np.float16)
    with pytest.raises(ValueError, match="images: expected finite features, found others in row 1 .float16"):
        file.write(iter([rows]), 2, "images")


def test_continued_file_needs_its_finished_rows(tmp_path):
    def continued() -> None:
        file = RowFile(tmp_path / "rows.npy", 20, Journal(tmp_path / PROGRESS_FILE, {}, ""))
        file.write((np.ones((2, 3), np.float16) for _ in range(file.done, 20, 2)), 10, "rows")

    def stopping() -> Iterator[np.ndarray]:
        yield np.ones((10, 3), np.float16)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RowFile(tmp_path / "rows.npy", 20, Journal(tmp_path / PROGRESS_FILE, {}, "")).write(
            stopping(), 10, "rows"
        )
    os.truncate(tmp_path / "rows.npy", 150)
    with pytest.raises(ValueError, match="rows.npy: expected 10 finished rows, found fewer"):
        continued()
    (tmp_path / "rows.npy").unlink()
    continued()
    np.testing.assert_array_equal(np.load(tmp_path / "rows.npy"), 1)
