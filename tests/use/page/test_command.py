"""Mistakes on the command line are one line each, before anything is served."""

from __future__ import annotations

import socket
import sys

import pytest

from tests.program import shell

main = shell("page")


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_a_port_in_use(capsys, exported):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(capsys, str(exported), "--port", str(port))
    assert f"--port {port} cannot be used (Address already in use); choose another\n" in said
    assert said.count("\n") == 1


def test_a_missing_model(capsys, tmp_path, monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    said = refused(capsys, str(tmp_path / "nothing"), "--port", "0")
    assert said.startswith("medclip-dcl page: error: no file or folder") and said.count("\n") == 1
    assert "MODEL" in refused(capsys)


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_package(capsys, monkeypatch, package):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "medclip_dcl.use.page.app", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    said = refused(capsys, "m")
    line = f"the page needs the package {package}: pip install 'medclip_dcl[page]'\n"
    assert line in said.replace(".applications", "")
