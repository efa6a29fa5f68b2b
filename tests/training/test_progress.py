"""The time left: estimated from the steps so far, in the bar of a terminal and in lines of a log."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from pytorch_lightning.callbacks import TQDMProgressBar

from medclip_dcl.command.cli import main
from medclip_dcl.training import progress
from medclip_dcl.training.progress import TimeLeft, progress_bar
from tests.command.small_runs import small


@pytest.fixture
def said(monkeypatch):
    """Lines of a log of a run, whose clock moves by 100 s a step."""
    lines: list[str] = []
    seconds = iter(range(0, 10**6, 100))
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    monkeypatch.setattr(progress, "rank_zero_info", lines.append)
    return lines


def test_a_log_has_the_time_left(build, data, trainer, said):
    trainer([TimeLeft()]).fit(build(), data)
    assert said == [
        "step 1 of 6 (17%): 8 min left",
        "step 2 of 6 (33%): 7 min left",
        "step 3 of 6 (50%): 5 min left",
        "step 4 of 6 (67%): 3 min left",
        "step 5 of 6 (83%): 2 min left",
    ]


def test_a_bar_has_it_in_minutes(build, data, trainer, said):
    fit = trainer([TimeLeft()], enable_progress_bar=True)
    fit.fit(build(), data)
    assert said == [] and fit.progress_bar_metrics["minutes_left"] == pytest.approx(1 / 60 * 100 * 1)
    assert "minutes_left" not in fit.logged_metrics


@pytest.mark.parametrize(("minutes", "left"), [(2.35, "02:21"), (0.0, "00:00"), (125.5, "2:05:30")])
def test_the_bar_shows_minutes_and_seconds(minutes, left, monkeypatch):
    shown = {"train/loss": 2.5, "minutes_left": minutes}
    monkeypatch.setattr(TQDMProgressBar, "get_metrics", lambda *_: dict(shown))
    bar: Any = progress_bar(True)[0]
    assert bar.get_metrics(None, None) == {"train/loss": 2.5, "left": left}


SHORT = ("--trainer.max_steps", "1", "--trainer.limit_val_batches", "0", "--untrained", "false")


@pytest.mark.parametrize(
    ("is_terminal", "is_wanted", "has_bar"),
    [(True, None, True), (True, False, False), (False, None, False), (False, True, True)],
)
def test_a_terminal_has_a_bar(is_terminal, is_wanted, has_bar, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert bool(progress_bar(is_wanted)) == has_bar


@pytest.mark.slow
def test_command_has_a_bar_or_users_own(small_set, small_bert, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    arguments = ["fit", *small(tmp_path, small_set, small_bert, *SHORT)]
    own = ["--trainer.callbacks", "pytorch_lightning.callbacks.TQDMProgressBar"]
    with pytest.raises(SystemExit):
        main([*arguments, *own, "--trainer.enable_progress_bar", "false"])
    assert "TQDMProgressBar" in capsys.readouterr().err
    main([*arguments, *own, "--trainer.enable_progress_bar", "null"])
    assert "train/loss=" in capsys.readouterr().out
    shutil.rmtree(tmp_path)
    main([*arguments, "--trainer.callbacks", "[]", "--trainer.enable_progress_bar", "null"])
    assert "train/loss=" in capsys.readouterr().out


def test_a_bar_reads_every_tenth_loss(build, data, trainer, monkeypatch):
    reads = 0

    def metrics(self, *arguments):
        nonlocal reads
        reads += 1
        return {}

    monkeypatch.setattr(TQDMProgressBar, "get_metrics", metrics)
    trainer(progress_bar(True), enable_progress_bar=True, max_epochs=1, limit_val_batches=0).fit(
        build(), data
    )
    assert reads == 2  # of 3 steps: at the last one, and at the end of the epoch
