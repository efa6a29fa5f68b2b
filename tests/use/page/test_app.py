"""The page's answers over HTTP."""

from __future__ import annotations

import asyncio
import base64
import gc
import http.client
import io
import json
import os
import re
import socket
import sys
import urllib.error
import urllib.request
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from medclip_dcl.common.errors import UserError
from medclip_dcl.pictures.overlay import overlay
from medclip_dcl.use.page import app


def post(url: str, content: bytes | dict[str, Any]) -> bytes:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as response:
        return response.read()


def ask(url: str, content: bytes | dict[str, Any]) -> Any:
    return json.loads(post(url, content))


def refusal(url: str, content: bytes | dict[str, Any]) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(url, content)
    return caught.value.code, json.loads(caught.value.read())["error"]


def picture(answer: str) -> np.ndarray:
    kind, content = answer.split(",")
    assert kind == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))


def test_the_page_blends_what_overlay_draws(url, model, image_file):
    grey = np.asarray(Image.open(image_file))
    opened = ask(f"{url}/image", image_file.read_bytes())
    assert (opened["height"], opened["width"]) == grey.shape
    np.testing.assert_array_equal(picture(opened["picture"]), grey)
    texts = ["No pneumothorax.", "Mild pulmonary edema."]
    heat_maps = [model.heat_map(grey, text) for text in texts]
    low, high = float(np.nanmin(heat_maps)), float(np.nanmax(heat_maps))
    threshold = low + 0.4 * (high - low)
    found = ask(f"{url}/maps", {"image": opened["image"], "sentences": texts, "threshold": threshold})
    assert (found["low"], found["high"]) == pytest.approx((low, high), abs=1e-6)
    for heat_map, drawn in zip(heat_maps, found["maps"], strict=True):
        assert drawn["low"] == pytest.approx(np.nanmin(heat_map), abs=1e-6)
        blended = 0.55 * grey[..., None] + 0.45 * picture(drawn["picture"])
        expected = overlay(grey, heat_map, opacity=0.45, threshold=threshold, limits=(low, high))
        assert np.abs(blended - expected).max() <= 1


def test_unreadable_sentence_does_not_hide_others(url, image_file):
    image = ask(f"{url}/image", image_file.read_bytes())["image"]
    question = {"image": image, "sentences": ["", "Mild pulmonary edema.", "a " * 40], "threshold": None}
    empty, drawn, long = ask(f"{url}/maps", question)["maps"]
    assert empty["error"].startswith("Type a sentence")
    assert picture(drawn["picture"]).shape == (90, 130, 3)
    assert "longer than the model reads" in long["error"]
    assert "low" not in ask(f"{url}/maps", {**question, "sentences": [""]})


def test_doubts_about_picture_and_sentence_are_said(url):
    values = np.linspace(0, 3000, 4000).astype(np.uint16).reshape(50, 80)
    values[0, :5] = 65535
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    opened = ask(f"{url}/image", file.getvalue())
    assert opened["notes"].startswith("hot or burnt-in pixels")
    question = {"image": opened["image"], "sentences": ["肺炎", "No pneumothorax."], "threshold": None}
    unknown, known = ask(f"{url}/maps", question)["maps"]
    assert unknown["note"].startswith("The sentence holds no word, or") and known["note"] == ""


def test_saved_picture_holds_all_sentences_side_by_side(url, image_file):
    image = ask(f"{url}/image", image_file.read_bytes())["image"]
    sizes = []
    for sentences in (["No edema."], ["No edema.", "Costs $5 and $6"]):
        question = {"image": image, "sentences": sentences, "threshold": 0.0, "opacity": 0.45}
        saved = Image.open(io.BytesIO(post(f"{url}/picture", question)))
        assert saved.format == "PNG"
        sizes.append(saved.width)
    assert sizes[1] - sizes[0] == pytest.approx(640, abs=2)
    code, error = refusal(f"{url}/picture", {**question, "sentences": [""]})
    assert code == 422 and "is empty; give a sentence" in error


def test_an_image_needs_its_own_token(url, image_file):
    first, second = (ask(f"{url}/image", image_file.read_bytes())["image"] for _ in range(2))
    assert first != second
    question = {"sentences": ["No edema."], "threshold": None}
    assert refusal(f"{url}/maps", {"image": "guessed", **question})[0] == 410
    ask(f"{url}/forget", first.encode())
    code, error = refusal(f"{url}/maps", {"image": first, **question})
    assert code == 410 and "Drop it again" in error
    assert ask(f"{url}/maps", {"image": second, **question})["maps"]


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_body_beyond_the_limit_is_refused(url, is_announced):
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    if is_announced:
        connection.request("POST", "/image", headers={"Content-Length": str(2**30)})
    else:
        connection.request("POST", "/maps", iter([b" " * 2**15] * 3), encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


MALFORMED: list[bytes | dict[str, Any]] = [
    b"",
    b"\xff",
    b"[]",
    b"null",
    b"[" * 60_000,
    b"1" * 5000,
    b"{}",
    {"sentences": "text"},
    {"sentences": []},
    {"sentences": {"a": 1}},
    {"sentences": [1]},
    {"sentences": ["\ud800"]},
    {"image": ["a"]},
    {"image": None},
    {"threshold": "a"},
    {"threshold": [1]},
    {"threshold": 10**400},
    {"opacity": "a"},
    {"opacity": None},
    {"opacity": 7},
    {"opacity": float("nan")},
]


@pytest.mark.parametrize("path", ["maps", "picture"])
def test_a_malformed_question_is_refused_in_words(url, path):
    whole = {"image": "a", "sentences": ["No edema."], "threshold": None, "opacity": 0.5}
    for question in MALFORMED:
        body = question if isinstance(question, bytes) else json.dumps({**whole, **question}).encode()
        code, error = refusal(f"{url}/{path}", body)
        assert code == 422 and error.startswith("The request is not one of this page."), question
    assert refusal(f"{url}/{path}", whole)[0] == 410
    assert ask(f"{url}/forget", b"\xff") == {}


def test_a_broken_off_request_leaves_no_traceback(url, caplog):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /image HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\na")
    ask(f"{url}/forget", b"")
    assert "Exception" not in caplog.text


def test_other_sites_cannot_send_images(url, image_file):
    for origin in ("https://elsewhere.example", "null", "http://127.0.0.1:1"):
        request = urllib.request.Request(f"{url}/image", image_file.read_bytes(), {"Origin": origin})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request)
    request = urllib.request.Request(f"{url}/image", image_file.read_bytes(), {"Origin": url})
    assert urllib.request.urlopen(request).status == 200


def test_a_refused_image_leaves_the_memory():
    seen = []

    def answer(content):
        seen.append(weakref.ref(found := np.frombuffer(content, np.uint8)))
        raise UserError(f"{found.size} bytes")

    class Sent:
        headers = {"host": "localhost"}
        base_url = "http://localhost/"

        async def body(self):
            return b"image"

    gc.disable()
    try:
        response = asyncio.run(app._answering(answer)(Sent()))
    finally:
        gc.enable()
    assert response.status_code == 422 and seen[0]() is None


def test_page_names_no_other_host(url):
    with urllib.request.urlopen(f"{url}/") as response:
        page, headers = response.read().decode(), response.headers
    files = [(app.FOLDER / "files" / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")]
    for text in (page, *files):
        assert not re.search(r"""https?:|["'`(]//""", text)
    assert headers["Cache-Control"] == "no-store"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "tiny" in page and "Research only, not for clinical use" in page
    for name, _, _ in app._EXAMPLES:
        with urllib.request.urlopen(f"{url}/files/examples/{name}.jpg") as response:
            content = response.read()
        assert len(content) < 20_000 and min(Image.open(io.BytesIO(content)).size) > 400


def test_a_host_name_that_leads_here_is_refused(url):
    request = urllib.request.Request(url, headers={"Host": "elsewhere.example"})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request)


class Watch:
    """Files opened for writing and addresses connected to while it is active, by Python code of this process."""

    def __init__(self) -> None:
        self.is_active = False
        self.written: list[Any] = []
        self.connected: list[Any] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_active:
            return
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self.written.append(arguments[0])
        if event == "socket.connect":
            self.connected.append(arguments[1])


def test_nothing_is_written_and_nobody_is_called(url, image_file, tmp_path):
    pydicom = pytest.importorskip("pydicom")
    files = [image_file.read_bytes()]
    # Above 1 MiB servers that parse forms write to a temporary file.
    noise = np.random.default_rng(0).integers(0, 256, (1100, 1000)).astype(np.uint8)
    for kind in ("PNG", "TIFF"):
        content = io.BytesIO()
        Image.fromarray(noise).save(content, kind)
        assert len(content.getvalue()) > 2**20
        files.append(content.getvalue())
    files.append(Path(pydicom.data.get_testdata_file("JPEG2000.dcm")).read_bytes())

    def use(content: bytes, saves: bool) -> None:
        image = ask(f"{url}/image", content)["image"]
        question = {"image": image, "sentences": ["No edema."], "threshold": None, "opacity": 0.4}
        assert ask(f"{url}/maps", question)["maps"][0]["picture"]
        if saves:
            assert post(f"{url}/picture", question)

    use(files[0], saves=True)  # libraries write their own files on first use: matplotlib its list of fonts
    watch = Watch()
    watch.is_active = True
    try:
        for content in files:
            use(content, saves=content is files[-1])
        (tmp_path / "seen").touch()
    finally:
        watch.is_active = False
    assert watch.written == [str(tmp_path / "seen")]
    assert {address[0] for address in watch.connected} == {"127.0.0.1"}
