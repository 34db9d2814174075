"""A GGUF file is converted once, wherever it lies, and again when it holds something else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from engine.models.checkpoint import CheckpointError
from engine.models.files import content_digests
from engine.models.gguf import convert


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bytes]:
    """Returns what files hold, as they are converted."""
    found: list[bytes] = []

    def write(data: bytes, folder: Path) -> None:
        found.append(data)
        (folder / "config.json").write_bytes(data)

    monkeypatch.setattr(convert, "GgufFile", Path.read_bytes)
    monkeypatch.setattr(convert, "_write", write)
    monkeypatch.setattr(content_digests, "store_folder", lambda: tmp_path / "digests")
    monkeypatch.setattr(content_digests, "_LEAST_STORED", 1)
    monkeypatch.setattr(content_digests, "PIECE_BYTES", 100)
    return found


def test_what_a_file_holds_names_its_folder(conversions: list[bytes], tmp_path: Path) -> None:
    store, path = tmp_path / "store", tmp_path / "model.gguf"
    path.write_bytes(bytes(range(256)))
    folder = convert.converted(path, store)
    assert folder.name == "model" and (folder / "config.json").read_bytes() == path.read_bytes()
    os.utime(path, (1, 1))
    (tmp_path / "elsewhere").mkdir()
    again = shutil.copyfile(path, tmp_path / "elsewhere" / "model.gguf")
    assert {convert.converted(one, store) for one in (path, again)} == {folder}
    assert len(conversions) == 1
    found = path.stat()
    path.write_bytes(bytes([*range(255), 0]))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert convert.converted(path, store) != folder and len(conversions) == 2


def test_a_file_that_is_not_there(conversions: list[bytes], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        convert.converted(tmp_path / "model.gguf", tmp_path / "store")
