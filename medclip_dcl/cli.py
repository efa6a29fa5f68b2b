"""The command line: ``python -m medclip_dcl fit | validate | test | predict``.

LightningCLI with the project's rules about run folders added: a run folder (`trainer.default_root_dir`) holds one
run; `fit` on an unfinished one continues it, on a finished one does nothing, on another run's is refused. `test`
evaluates the untrained network beside the trained one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> None:
    """Run one command; errors of the user's making end with a message and status 2."""
    # Imported here: importing this module, as the console script does, should not cost six seconds.
    from medclip_dcl.run_command import run

    try:
        run(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"medclip_dcl: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
