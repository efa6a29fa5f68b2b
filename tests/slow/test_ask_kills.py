"""kill -9 of `ask --classify`: a rerun keeps the finished rows, and no process stays behind."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences
from tests.slow.test_kills import start

pytestmark = pytest.mark.slow


def processes_of(output: Path) -> list[int]:
    """Running processes whose command names the output."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(output).encode() in words:
            found.append(int(folder.name))
    return found


def rows_in(partial: Path) -> int:
    return partial.read_bytes().count(b"\n") - 1 if partial.is_file() else 0


def test_repeated_kills_give_table_of_one_run(small_bert, tmp_path):
    torch.manual_seed(0)
    parts = (
        ResNetRegions(dim=16, stride=16, width=8),
        BertSentences(str(small_bert), dim=16),
        LSENonLocal(dim=16),
    )
    ImageTextNetwork(*parts, image_size=256).save_pretrained(tmp_path / "model")
    generator = np.random.default_rng(0)
    for place in range(150):
        Image.fromarray(generator.integers(0, 256, (300, 280)).astype(np.uint8)).save(
            tmp_path / f"{place}.png"
        )

    def ask(output: Path) -> subprocess.Popen[bytes]:
        options = ["--classify", "--batch_size", "3", "--workers", "2", "--output", str(output)]
        return start(["medclip_dcl", "ask", str(tmp_path / "model"), str(tmp_path), *options])

    whole, output = tmp_path / "out/whole.csv", tmp_path / "out/scores.csv"
    assert ask(whole).wait() == 0
    partial = output.with_name("scores.csv.partial")
    for least in (20, 60, 100):
        process = ask(output)
        while rows_in(partial) < least:
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.005)
        # Alone: a batch system kills the command, not its loader processes.
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 20
        while processes_of(output):
            assert time.monotonic() < deadline, "loader processes are still there"
            time.sleep(0.1)
    kept = rows_in(partial)
    assert 100 <= kept < 150
    assert ask(output).wait() == 0
    found, expected = pd.read_csv(output), pd.read_csv(whole)
    assert list(found["image"]) == list(expected["image"]) and len(found) == 150
    np.testing.assert_allclose(found.iloc[:, 1:6], expected.iloc[:, 1:6], atol=2e-6)
