"""The command line: ``python -m medclip_dcl fit | validate | test | predict``.

LightningCLI with the project's rules about run folders added: a run folder (`run_folder`) holds one
run; `fit` on an unfinished one continues it, on a finished one does nothing, on another run's is refused. `test`
evaluates the untrained network beside the trained one.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path


def main(args: Sequence[str] | None = None) -> None:
    """Run one command; errors of the user's making end with a message and status 2."""
    # Imported here: importing this module, as the console script does, should not cost six seconds.
    from medclip_dcl.run_command import run

    try:
        run(args)
    except (ValueError, FileNotFoundError) as error:
        # An error that our own code raised is about the user's input; any other is a fault and keeps its traceback.
        ours = next((cause for cause in _causes(error) if _is_ours(cause)), None)
        if ours is None:
            raise
        print(f"medclip_dcl: error: {ours}", file=sys.stderr)
        raise SystemExit(2) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from; the configuration parser wraps errors of the classes that it builds."""
    while error is not None:
        yield error
        error = error.__cause__


def _is_ours(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(
        Path(__file__).resolve().parent
    )


if __name__ == "__main__":
    main()
