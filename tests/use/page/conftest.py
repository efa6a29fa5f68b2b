"""A tiny model and its page on a free port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from medclip_dcl import load
from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences
from medclip_dcl.use.model import LoadedModel
from tests.small import platt_calibration

uvicorn = pytest.importorskip("uvicorn", reason="pip install -e '.[test]' installs uvicorn")
pytest.importorskip("starlette", reason="pip install -e '.[test]' installs starlette")


@pytest.fixture(scope="session")
def exported(small_bert, tmp_path_factory) -> Path:
    """A network that sees the middle square of 64 x 64 pixels, with sentences of at most 32 tokens."""
    torch.manual_seed(0)
    text = BertSentences(str(small_bert), dim=16, max_tokens=32)
    network = ImageTextNetwork(
        ResNetRegions(dim=16, stride=16, width=8),
        text,
        LSENonLocal(dim=16),
        image_size=64,
        geometry="shortest",
    )
    folder = tmp_path_factory.mktemp("page") / "model"
    network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model(exported) -> LoadedModel:
    return load(exported)


@pytest.fixture(scope="session")
def calibrated(exported) -> LoadedModel:
    """The model with a calibration of all findings but Edema."""
    model = load(exported)
    model.calibration = platt_calibration(
        *(model.image_text, 0.02, 0.1, 0.5, ["Edema"]), patients=50, folder="phantom"
    )
    return model


@pytest.fixture(scope="session")
def image_file(tmp_path_factory) -> Path:
    """A PNG file of 90 x 130 pixels (height x width)."""
    file = tmp_path_factory.mktemp("images") / "chest.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 130)).astype(np.uint8)).save(file)
    return file


@pytest.fixture(scope="session")
def url(model) -> Iterator[str]:
    """Address of the page."""
    from medclip_dcl.use.page.app import make_app

    config = uvicorn.Config(make_app(model, "tiny"), log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()
