"""The page in a real browser. Skipped where chromium and chromedriver are not installed."""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="no browser: apt-get install chromium chromium-driver"
    ),
]
FLAGS = (
    "headless=new",
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "disable-dev-shm-usage",
    "window-size=1440,900",
)
SECONDS = 20


@pytest.fixture(scope="module")
def downloads(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def browser(tmp_path_factory, downloads) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install -e '.[test]' installs selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(f"--{flag}")
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser, url) -> Any:
    """A fresh page; the records of what the browser requested and complained of begin with it."""
    browser.get(url)
    for log in ("performance", "browser"):
        browser.get_log(log)
    browser.get(url)
    return browser


def until(condition: Callable[[], Any]) -> Any:
    """Result of the condition as soon as it is true."""
    end = time.monotonic() + SECONDS
    while not (result := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return result


def all_of(page: Any, selector: str) -> list[Any]:
    return page.find_elements("css selector", selector)


def one(page: Any, selector: str) -> Any:
    return page.find_element("css selector", selector)


def drop(page: Any, name: str, content: bytes) -> None:
    """Drop a file onto the page, as the mouse does."""
    page.execute_script(
        """const bytes = Uint8Array.from(atob(arguments[1]), (letter) => letter.charCodeAt(0));
        const dataTransfer = new DataTransfer();
        dataTransfer.items.add(new File([bytes], arguments[0]));
        document.querySelector(".frame").dispatchEvent(
            new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));""",
        name,
        base64.b64encode(content).decode(),
    )


def write(page: Any, sentence: str, place: int = 0) -> None:
    field = all_of(page, ".sentence textarea")[place]
    field.clear()
    field.send_keys(sentence)


def drawn(page: Any, place: int = 0) -> str | None:
    """Address of the heat map, None where there is none."""
    colours = all_of(page, ".colours")[place]
    return colours.get_attribute("src") if colours.is_displayed() else None


def caption(page: Any, place: int = 0) -> str:
    return all_of(page, "figcaption")[place].text


def set_slider(page: Any, name: str, value: int) -> None:
    page.execute_script(
        "const slider = document.getElementById(arguments[0]); slider.value = arguments[1];"
        "slider.dispatchEvent(new Event('input'));",
        name,
        value,
    )


def test_drop_image_type_sentences_save_picture(page, image_file, downloads):
    assert one(page, ".empty").is_displayed() and not one(page, "#save").is_enabled()
    drop(page, "chest.png", image_file.read_bytes())
    until(lambda: one(page, ".grey").is_displayed())
    rows = [row.text for row in until(lambda: all_of(page, "#scores tr"))]
    assert [row.rsplit(maxsplit=1)[0] for row in rows][:2] == ["Cardiomegaly", "Edema"] and len(rows) == 5
    assert "Uncalibrated" in one(page, "#scores").text
    assert drawn(page) is None

    write(page, "Mild pulmonary edema.")
    alone = until(lambda: drawn(page))
    assert caption(page).startswith("Cosine from ") and len(all_of(page, "#ticks span")) == 5

    one(page, "#add").click()
    write(page, "No pneumothorax.", place=1)
    until(lambda: drawn(page, 1))
    # Common limits: the ends of the colour bar are the lowest and the highest cosine of both.
    numbers = [
        word.replace("−", "-") for i in (0, 1) for word in caption(page, i).split() if word[-1].isdigit()
    ]
    ticks = [tick.text.replace("−", "-") for tick in all_of(page, "#ticks span")]
    values = sorted(map(float, numbers))
    assert (float(ticks[0]), float(ticks[-1])) == (values[0], values[-1])

    both = drawn(page)
    set_slider(page, "threshold", 60)
    until(lambda: drawn(page) != both)
    set_slider(page, "opacity", 80)
    assert one(page, ".colours").value_of_css_property("opacity") == "0.8"
    assert (one(page, "#opacity-value").text, one(page, "#threshold-value").text != "off") == ("80 %", True)

    one(page, "#save").click()
    saved = until(lambda: list(downloads.glob("heat_map*.png")))
    until(lambda: saved[0].stat().st_size > 0)
    assert Image.open(saved[0]).width > 2 * 640

    one(page, ".remove").click()
    assert len(all_of(page, "figure")) == 1 and not one(page, ".remove").is_displayed()
    set_slider(page, "threshold", 0)
    until(lambda: drawn(page) not in (None, alone, both))


def test_an_example_brings_its_sentence(page):
    all_of(page, ".examples button")[1].click()
    until(lambda: drawn(page))
    assert one(page, ".sentence textarea").get_attribute("value") == "Mildly enlarged cardiac silhouette."


def test_after_a_wrong_file_the_page_stays_usable(page, image_file):
    drop(page, "report.png", b"The heart is enlarged.")
    said = until(lambda: one(page, "#message").text)
    assert said.startswith("report.png: not an image file of a known format")
    drop(page, "good.png", image_file.read_bytes())
    write(page, "Mild pulmonary edema.")
    until(lambda: drawn(page))
    assert not one(page, "#message").is_displayed()


def test_forgotten_image_is_sent_again(page, url, image_file, monkeypatch):
    drop(page, "chest.png", image_file.read_bytes())
    write(page, "Mild pulmonary edema.")
    before = until(lambda: drawn(page))
    page.execute_script("navigator.sendBeacon('forget', image.token)")
    write(page, "No pneumothorax.")
    until(lambda: drawn(page) not in (None, before))
    assert not one(page, "#message").is_displayed()


def test_the_browser_asks_this_machine_alone(page, url, image_file):
    drop(page, "chest.png", image_file.read_bytes())
    write(page, "Mild pulmonary edema.")
    until(lambda: drawn(page))
    one(page, "#save").click()
    events = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    paths = {address.removeprefix(url) for address in asked if not address.startswith(("data:", "blob:"))}
    assert {"/", "/image", "/maps", "/files/page.css", "/files/page.js"} <= paths
    assert all(path.startswith("/") for path in paths), paths
    assert page.get_log("browser") == [], "the browser complains of nothing"
    assert page.get_cookies() == []
