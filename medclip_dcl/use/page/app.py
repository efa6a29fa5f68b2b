"""The page's server: starlette and uvicorn, one HTML file, one style sheet, one script.

An image arrives as the body of a request and stays in memory: forms (and gradio and streamlit) write uploads to
temporary files. No cookie, no log of requests, nothing from another host.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jaxtyping import UInt8
from PIL import Image
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medclip_dcl.common.errors import UserError
from medclip_dcl.pictures.figure import PANEL_INCHES, draw_heat_maps
from medclip_dcl.pictures.inputs import doubts
from medclip_dcl.pictures.overlay import overlay
from medclip_dcl.use.heat_maps import limits
from medclip_dcl.use.model import LoadedModel
from medclip_dcl.use.page.viewer import MAX_SENTENCES, ForgottenImageError, Viewer

FOLDER = Path(__file__).parent
MAX_BYTES = 100 * 2**20
"""Larger image files are refused."""

_MAX_BYTES_OF_TEXT = 2**16
_PANEL_PIXELS = 640
"""Width of an image in the saved picture."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    # Neither images nor heat maps enter the browser's cache on disk.
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_EXAMPLES = (
    ("pleural_effusion", "Pleural effusion", "Moderate right pleural effusion."),
    ("cardiomegaly", "Cardiomegaly", "Mildly enlarged cardiac silhouette."),
    ("pneumothorax", "Pneumothorax", "Left apical pneumothorax."),
)
"""Radiographs of the phantom: file, name, sentence."""


def make_app(model: LoadedModel, name: str) -> Starlette:
    """The page of a model, which serves everybody who opens the page."""
    viewer = Viewer(model)
    page = jinja2.Template(
        (FOLDER / "page.html").read_text(encoding="utf-8"), autoescape=True, undefined=jinja2.StrictUndefined
    ).render(
        model=name,
        is_classifier=viewer.is_classifier,
        title="Findings of a radiograph" if viewer.is_classifier else "Heat maps of sentences",
        calibration=viewer.calibration,
        unlabelled=", ".join(viewer.unlabelled),
        examples=_EXAMPLES,
        colours=_png_url(_colour_bar()),
        max_sentences=MAX_SENTENCES,
        max_bytes=MAX_BYTES,
    )

    async def show_page(request: Request) -> Response:
        return HTMLResponse(page)

    def open_image(content: bytes) -> dict[str, Any]:
        token, shown, scores = viewer.open(content)
        return {
            "image": token,
            "width": shown.grey.width,
            "height": shown.grey.height,
            "picture": _png_url(np.asarray(shown.grey)),
            "notes": doubts(shown.grey),
            "scores": [{"finding": finding, **score._asdict()} for finding, score in scores.items()],
        }

    def forget_image(content: bytes) -> dict[str, Any]:
        viewer.forget(content.decode(errors="replace"))
        return {}

    def draw_maps(content: bytes) -> dict[str, Any]:
        asked = _question(content)
        shown = viewer.image(asked["image"])
        grey = np.asarray(shown.grey)
        errors = {sentence: viewer.problem(sentence) for sentence in asked["sentences"]}
        readable = [sentence for sentence, error in errors.items() if error is None]
        if not readable:
            return {"maps": [{"error": errors[sentence]} for sentence in asked["sentences"]]}
        heat_maps = viewer.heat_maps(shown, readable)
        low, high = limits(heat_maps)
        threshold = asked["threshold"]
        found = {sentence: {"error": error} for sentence, error in errors.items()} | {
            sentence: {
                "low": float(np.nanmin(heat_map)),
                "high": float(np.nanmax(heat_map)),
                "note": viewer.note(sentence),
                # The page blends this picture with the grey one: the same as `overlay` at the page's opacity.
                "picture": _png_url(
                    overlay(grey, heat_map, opacity=1.0, threshold=threshold, limits=(low, high))
                ),
            }
            for sentence, heat_map in zip(readable, heat_maps, strict=True)
        }
        return {"low": low, "high": high, "maps": [found[sentence] for sentence in asked["sentences"]]}

    def save_picture(content: bytes) -> Response:
        asked = _question(content)
        shown = viewer.image(asked["image"])
        grey = np.asarray(shown.grey)
        heat_maps = viewer.heat_maps(shown, asked["sentences"])
        figure = draw_heat_maps(
            grey,
            heat_maps,
            asked["sentences"],
            limits=limits(heat_maps),
            opacity=asked["opacity"],
            threshold=asked["threshold"],
            note=f"medclip_dcl, model {name}. Research only, not for clinical use.",
        )
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=_PANEL_PIXELS / PANEL_INCHES)
        return Response(png.getvalue(), media_type="image/png")

    return Starlette(
        routes=[
            Route("/", show_page),
            Route("/image", _answering(open_image), methods=["POST"], max_body_size=MAX_BYTES),
            Route("/forget", _answering(forget_image), methods=["POST"], max_body_size=_MAX_BYTES_OF_TEXT),
            Route("/maps", _answering(draw_maps), methods=["POST"], max_body_size=_MAX_BYTES_OF_TEXT),
            Route("/picture", _answering(save_picture), methods=["POST"], max_body_size=_MAX_BYTES_OF_TEXT),
            Mount("/files", StaticFiles(directory=FOLDER / "files")),
        ],
        middleware=[
            # Refuses pages of other hosts whose names lead to this machine.
            Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"]),
            Middleware(_WithHeaders),
        ],
    )


class _WithHeaders:
    """Adds `_HEADERS` to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self.app(scope, receive, send_with_headers)


def _answering(answer: Callable[[bytes], Response | dict[str, Any]]) -> Callable[..., Any]:
    """An endpoint that answers the body of a request from this page; the user's mistakes become messages."""

    def respond(content: bytes) -> Response:
        # Here, since an exception that leaves the thread keeps the image in memory until garbage is collected.
        try:
            found = answer(content)
        except UserError as error:
            code = 410 if isinstance(error, ForgottenImageError) else 422
            return JSONResponse({"error": str(error)}, status_code=code)
        return found if isinstance(found, Response) else JSONResponse(found)

    async def endpoint(request: Request) -> Response:
        if request.headers.get("origin") not in (None, str(request.base_url).rstrip("/")):
            return JSONResponse({"error": "Another site sent this request."}, status_code=403)
        try:
            content = await request.body()
        except ClientDisconnect:
            return Response(status_code=400)
        return await run_in_threadpool(respond, content)

    return endpoint


def _question(content: bytes) -> dict[str, Any]:
    """Read the image's token, sentences, threshold and opacity of a request in JSON."""
    try:
        asked = {"opacity": 1, **json.loads(content)}
        sentences, threshold = asked["sentences"][:MAX_SENTENCES], asked["threshold"]
        asked["sentences"], asked["opacity"] = sentences, float(asked["opacity"])
        asked["threshold"] = None if threshold is None else float(threshold)
        if isinstance(sentences, list) and sentences and 0 <= asked["opacity"] <= 1:
            "".join([asked["image"], *sentences]).encode()
            return asked
    # Not JSON, other keys or types, numbers or nesting beyond Python's, half of a Unicode pair.
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
        pass
    raise UserError("The request is not one of this page. Load the page again.")


def _colour_bar() -> UInt8[np.ndarray, "1 256 3"]:
    """The colours from the lowest to the highest cosine."""
    levels = np.linspace(0, 1, 256, dtype=np.float32)[None]
    return overlay(np.zeros(levels.shape, np.uint8), levels, limits=(0.0, 1.0), opacity=1.0)


def _png_url(picture: UInt8[np.ndarray, "height width *channels"]) -> str:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
