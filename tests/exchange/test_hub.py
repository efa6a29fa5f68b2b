"""Upload to the Hub: private unless asked otherwise, and the export's files alone."""

from __future__ import annotations

from types import SimpleNamespace

import huggingface_hub
import pytest

from medclip_dcl.common.terms import SOURCE_CARD
from medclip_dcl.exchange.folder import FILES
from tests.program import shell

main = shell("export")


class FakeHub:
    """Repositories by name with their visibility, and what was uploaded."""

    def __init__(self) -> None:
        self.private: dict[str, bool] = {}
        self.uploaded: list[dict] = []

    def create_repo(self, repository, *, private, exist_ok):
        assert exist_ok
        self.private.setdefault(repository, private)
        return f"https://hub.example/{repository}"

    def repo_info(self, repository):
        return SimpleNamespace(private=self.private[repository])

    def upload_folder(self, **options):
        self.uploaded.append(options)


@pytest.fixture
def hub(monkeypatch) -> FakeHub:
    hub = FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    return hub


def test_a_new_repository_is_private_and_complete(hub, run, tmp_path, capsys):
    out = tmp_path / "out"
    main([str(run), "--output", str(out), "--push_to_hub", "me/mine"])
    assert hub.private == {"me/mine": True}
    (uploaded,) = hub.uploaded
    assert sorted(uploaded["allow_patterns"]) == sorted(file.name for file in out.iterdir())
    assert uploaded["delete_patterns"] == [*FILES, SOURCE_CARD] and uploaded["folder_path"] == out
    assert 'load("me/mine")' in (out / "README.md").read_text()
    said = capsys.readouterr()
    assert "uploaded: https://hub.example/me/mine" in said.out
    assert "may be credentialed" in said.err
    main([str(out), "--output", str(out), "--push_to_hub", "me/open", "--public"])
    assert hub.private["me/open"] is False and len(hub.uploaded) == 2


def test_an_existing_public_repository_gets_nothing(hub, run, tmp_path, capsys):
    hub.private["me/mine"] = False
    with pytest.raises(SystemExit):
        main([str(run), "--output", str(tmp_path / "out"), "--push_to_hub", "me/mine"])
    assert "me/mine is public, and nothing was uploaded" in capsys.readouterr().err
    assert hub.uploaded == []


@pytest.mark.parametrize("repository, reason", [("me/mine", ""), ("me and you", "Repo id must")])
def test_no_network_and_bad_names_are_one_line(run, tmp_path, repository, reason, monkeypatch, capsys):
    # Nothing listens on port 9.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    with pytest.raises(SystemExit) as stopped:
        main([str(run), "--output", str(tmp_path / "out"), "--push_to_hub", repository])
    assert stopped.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert (
        f"out was written, but not uploaded to {repository} ({reason}" in error
        and "run the command again" in error
    )
    assert (tmp_path / "out/model.safetensors").is_file()
