"""The time left: estimated from the steps so far, in the bar of a terminal and in lines of a log."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from pytorch_lightning.callbacks import TQDMProgressBar

from medclip_dcl.cli import main
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


def test_a_terminals_bar_has_it_in_minutes(build, data, trainer, said, monkeypatch):
    fit = trainer([TimeLeft()], enable_progress_bar=True)
    fit.fit(build(), data)
    assert said == [] and fit.progress_bar_metrics["minutes_left"] == pytest.approx(1 / 60 * 100 * 1)
    assert "minutes_left" not in fit.logged_metrics


@pytest.mark.parametrize(
    ("is_terminal", "asked", "has_bar"), [(True, "null", True), (False, "null", False), (False, "true", True)]
)
def test_a_terminal_has_a_bar(
    is_terminal, asked, has_bar, small_set, small_bert, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    main(["fit", *small(tmp_path, small_set, small_bert), "--trainer.enable_progress_bar", asked])
    assert ("train/loss=" in capsys.readouterr().out) == has_bar


def test_a_bar_reads_the_loss_of_every_tenth_step():
    (bar,) = progress_bar(True)
    assert isinstance(bar, TQDMProgressBar) and bar.refresh_rate == 10
