"""Serve the page on this machine: ``medclip-dcl page runs/demo``."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from medclip_dcl.common.errors import UserError, needs_extra
from medclip_dcl.use.options import Page

ADDRESS = "127.0.0.1"


def run(options: Page) -> None:
    """Load a model and serve its page on 127.0.0.1 until Ctrl+C."""
    try:
        import uvicorn

        from medclip_dcl.use.page.app import make_app
    except ModuleNotFoundError as error:
        raise UserError(needs_extra("the page", error.name, "page")) from error
    from medclip_dcl.common.devices import without_tf32
    from medclip_dcl.use.model import load

    without_tf32()  # as a calibration was fitted
    # Before the model is loaded, and held from here on.
    with suppress(KeyboardInterrupt), _listening(options.port) as listening:
        print(f"loading {options.model}", flush=True)
        model = load(options.model, calibration=options.calibration)
        app = make_app(model, Path(options.model).resolve().name)
        # Requests are not logged: nothing of a patient reaches a terminal or a file.
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none")
        address = f"http://{ADDRESS}:{listening.getsockname()[1]}"
        print(f"{address} shows the page on this machine alone; Ctrl+C stops it", flush=True)
        uvicorn.Server(config).run(sockets=[listening])
    print("stopped")


def _listening(port: int) -> socket.socket:
    try:
        return socket.create_server((ADDRESS, port), backlog=100)
    except OSError as error:
        raise UserError(
            f"--port {port} cannot be used ({os.strerror(error.errno or 0)}); choose another"
        ) from error
