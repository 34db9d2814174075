"""`tandem download` fetches a model of the hub, and says when all of it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from cli import download
from engine.models.files import hub


def test_the_mark_is_made_when_all_is_there(
    demo_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mark = tmp_path / "marks" / "a"
    asked: list[str | None] = []

    def fetch(name: str, *, revision: str | None, **patterns: Any) -> str:
        assert name == "org/model" and not mark.exists()
        asked.append(revision)
        return str(demo_checkpoint)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    assert download.main(["org/model", "--revision", "v1", f"--mark={mark}"]) == 0
    assert mark.is_file() and set(asked) == {"v1"}
    assert capsys.readouterr().out == f"{demo_checkpoint}\n"


def test_no_mark_is_made_of_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(name: str, **options: Any) -> str:
        raise LocalEntryNotFoundError(name)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    assert download.main(["org/model", f"--mark={tmp_path / 'mark'}"]) == 1
    assert "check the network and HF_TOKEN" in capsys.readouterr().err
    assert not (tmp_path / "mark").exists()
