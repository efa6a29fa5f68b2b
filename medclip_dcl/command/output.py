"""Output of a command: no advertisements or remarks of Lightning, and each warning once."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[1]
_LOGGERS = ("pytorch_lightning.utilities.rank_zero", "lightning_fabric.utilities.seed")
_REMARKS = re.compile(
    r"💡|Seed set to |[A-Z]PU available: |Loading `train_dataloader` to estimate"
    r"|Restoring states from|Restored all states from"
)
_WARNINGS = (
    # Lightning's own use of a deprecated function, in every step.
    r".*isinstance.treespec, LeafSpec.*",
    # Sums of all processes are reduced before they are logged.
    r"It is recommended to use `self.log\('validate/loss'",
    # `LastEpoch` writes the last rows.
    r"The number of training batches \(\d+\) is smaller than the logging interval",
    # A run that is continued.
    r"Checkpoint directory .* exists and is not empty",
    # `medclip_dcl.command.cli.main` is called with a list from Python, as the notebooks do.
    r"LightningCLI's args parameter is intended to run from within Python",
    # A checkpoint of another folder is tested.
    r"The dirpath has changed from",
    # `Throughput` warns if the loader is too slow.
    r"The '\w+' does not have many workers",
    r"Precision .* is not supported by the model summary",
)


@contextmanager
def plain_output() -> Iterator[None]:
    """Show each warning once, as one line, and write log lines to the standard error of now."""
    said: set[tuple[type, str]] = set()
    handlers = [one for name in _LOGGERS for one in logging.getLogger(name.split(".")[0]).handlers]
    streams = [(one, one.setStream(sys.stderr)) for one in handlers if type(one) is logging.StreamHandler]
    loggers, formatted = [logging.getLogger(name) for name in _LOGGERS], warnings.formatwarning
    with warnings.catch_warnings():
        for message in _WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        show = warnings.showwarning

        def once(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
            if (category, str(message)) not in said:
                said.add((category, str(message)))
                show(message, category, *where, **options)

        def one_line(
            message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None
        ) -> str:
            if Path(filename).resolve().is_relative_to(_PACKAGE):
                return f"medclip-dcl: warning: {message}\n"
            return formatted(message, category, filename, lineno, line)

        warnings.showwarning, warnings.formatwarning = once, one_line
        for logger in loggers:
            logger.addFilter(_is_worth_saying)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(_is_worth_saying)
            warnings.formatwarning = formatted
            for handler, stream in streams:
                if stream is not None:
                    handler.setStream(stream)


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return not _REMARKS.match(record.getMessage())
