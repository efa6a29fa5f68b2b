"""Serve the page on this machine: ``medclip-dcl page --model runs/demo``."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from medclip_dcl.common.command_line import one_line_errors, option, parse_options, whole_number
from medclip_dcl.common.errors import UserError

ADDRESS = "127.0.0.1"
PORT = 8501
INSTALL = "pip install -e '.[page]'"


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    model: str = option("run folder, checkpoint, exported folder, or Hugging Face repository id")
    calibration: Path | None = option(
        "of calibrate --output; default: the model's", None, type=Path, metavar="FILE"
    )
    port: int = option(f"of {ADDRESS}, default {PORT}; 0 takes a free one", PORT, type=whole_number(0, 65535))


def serve(model: str, port: int, calibration: Path | None = None) -> None:
    """Load a model and serve its page on 127.0.0.1 until interrupted."""
    try:
        import uvicorn

        from medclip_dcl.page.app import make_app
    except ModuleNotFoundError as error:
        raise UserError(f"the page requires {error.name}: {INSTALL}") from error
    from medclip_dcl.inference.model import load

    # Before the model is loaded, and held from here on.
    with _listening(port) as listening:
        print(f"loading {model}", flush=True)
        app = make_app(load(model, calibration=calibration), Path(model).resolve().name)
        # Requests are not logged: nothing of a patient reaches a terminal or a file.
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none")
        address = f"http://{ADDRESS}:{listening.getsockname()[1]}"
        print(f"{address} shows the page on this machine alone; Ctrl+C stops it", flush=True)
        uvicorn.Server(config).run(sockets=[listening])


def _listening(port: int) -> socket.socket:
    try:
        return socket.create_server((ADDRESS, port), backlog=100)
    except OSError as error:
        raise UserError(
            f"--port {port} cannot be used ({os.strerror(error.errno or 0)}); choose another"
        ) from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the page; a mistake of the user is one line and status 2."""
    description = (
        "Serve a page on this machine: heat maps of sentences over an image, or the findings of a classifier."
    )
    options = parse_options(Options, "page", description, arguments, has_own_classes=True)
    try:
        with one_line_errors("medclip_dcl.page: error"):
            serve(options.model, options.port, options.calibration)
    except KeyboardInterrupt:
        print("stopped")


if __name__ == "__main__":
    main()
