"""The page's answers over HTTP."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from medclip_dcl.page import app
from medclip_dcl.pictures.overlay import overlay


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


def test_a_sentence_that_cannot_be_read_does_not_hide_the_others(url, image_file):
    image = ask(f"{url}/image", image_file.read_bytes())["image"]
    question = {"image": image, "sentences": ["", "Mild pulmonary edema.", "a " * 40], "threshold": None}
    empty, drawn, long = ask(f"{url}/maps", question)["maps"]
    assert empty["error"].startswith("Type a sentence")
    assert picture(drawn["picture"]).shape == (90, 130, 3)
    assert "longer than the model reads" in long["error"]
    assert "low" not in ask(f"{url}/maps", {**question, "sentences": [""]})


def test_the_saved_picture_holds_all_sentences_side_by_side(url, image_file):
    image = ask(f"{url}/image", image_file.read_bytes())["image"]
    sizes = []
    for sentences in (["No edema."], ["No edema.", "Costs $5 and $6"]):
        question = {"image": image, "sentences": sentences, "threshold": 0.0, "opacity": 0.45}
        saved = Image.open(io.BytesIO(post(f"{url}/picture", question)))
        assert saved.format == "PNG"
        sizes.append(saved.width)
    # Small images are enlarged to 640 pixels.
    assert sizes[1] - sizes[0] == pytest.approx(640 + 24, abs=2)
    code, error = refusal(f"{url}/picture", {**question, "sentences": [""]})
    assert code == 422 and error.startswith("Type a sentence")


def test_an_image_needs_its_own_token(url, image_file):
    first, second = (ask(f"{url}/image", image_file.read_bytes())["image"] for _ in range(2))
    assert first != second
    question = {"sentences": ["No edema."], "threshold": None}
    assert refusal(f"{url}/maps", {"image": "guessed", **question})[0] == 410
    ask(f"{url}/forget", first.encode())
    code, error = refusal(f"{url}/maps", {"image": first, **question})
    assert code == 410 and "Drop it again" in error
    assert ask(f"{url}/maps", {"image": second, **question})["maps"]


def test_wrong_files_are_refused(url):
    code, error = refusal(f"{url}/image", b"The heart is enlarged.")
    assert code == 422 and error.startswith("Not an image file of a known format.")


def test_a_file_beyond_the_limit_is_not_taken_into_memory(model):
    answering = app._answering(lambda content: {"bytes": len(content)}, most_bytes=1000)
    parts = iter([b"x" * 600] * 9)

    class Parts:
        async def stream(self):
            for part in parts:
                yield part

    response = asyncio.run(answering(Parts()))
    assert response.status_code == 413 and len(list(parts)) == 7


def test_the_page_names_no_other_host_and_is_not_cached(url):
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
