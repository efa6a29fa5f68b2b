"""The command line: ``python -m medclip_dcl fit | validate | test | predict``.

LightningCLI with the project's rules about run folders added: a run folder (`run_folder`) holds one
run; `fit` on an unfinished one continues it, on a finished one does nothing, on another run's is refused. `test`
evaluates the untrained network beside the trained one.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path


def main(args: Sequence[str] | None = None) -> None:
    """Run one command; errors of the user's making end with a message and status 2."""
    # Imported here: importing this module, as the console script does, should not cost six seconds.
    from medclip_dcl.run_command import run

    try:
        run(args)
    except (ValueError, FileNotFoundError) as error:
        # An error that our own code raised is about the user's input; any other is a fault and keeps its traceback.
        if not _is_ours(error):
            raise
        print(f"medclip_dcl: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _is_ours(error: BaseException) -> bool:
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    return raised_in.is_relative_to(Path(__file__).resolve().parent)


if __name__ == "__main__":
    main()
