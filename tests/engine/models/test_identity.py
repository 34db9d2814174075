"""Two checkpoints are one only if all their bytes are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.checkpoint import CheckpointError, load_model_config
from engine.models.files import content_digests
from engine.models.files.weight_files import WeightFiles
from tests.engine.models.digest_reads import watch_digests

NAME = "model.embed_tokens.weight"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Returns the names of tensors as they are read; every file is worth to be remembered."""
    monkeypatch.setattr(content_digests, "_LEAST_STORED", 1)
    monkeypatch.setattr(content_digests, "store_folder", lambda: tmp_path / "cache" / "digests")
    return watch_digests(monkeypatch)


@pytest.fixture
def make(checkpoints: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copies a checkpoint in which rows of the embedding are others."""

    def copy(name: str, rows: list[int]) -> Path:
        folder = tmp_path / name
        shutil.copytree(checkpoints / "llama", folder)
        tensors = load_file(folder / "model.safetensors")
        tensors[NAME][rows] += 0.01
        save_file(tensors, folder / "model.safetensors")
        return folder

    return copy


def identity(folder: Path) -> str:
    return load_model_config(folder).model_hash


def test_one_row_makes_another_model(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the size: tensors are read in pieces of a few bytes here."""
    monkeypatch.setattr(content_digests, "_READ_BYTES", 100)
    same, other = make("same", []), make("other", [57])
    assert identity(same) == identity(make("again", [])) != identity(other)


def test_a_file_that_has_not_changed_is_not_read_again(
    make: Callable[..., Path], reads: list[str]
) -> None:
    folder = make("one", [])
    before, count = identity(folder), len(reads)
    assert count == len(WeightFiles(folder).tensors)
    assert identity(folder) == before and len(reads) == count


def test_a_file_that_has_changed_is_read_again(make: Callable[..., Path], reads: list[str]) -> None:
    """Even where size and time of the last change are set back."""
    folder = make("one", [])
    path = folder / "model.safetensors"
    before, found = identity(folder), path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert path.stat().st_mtime_ns == found.st_mtime_ns
    assert identity(folder) != before


def test_a_store_that_cannot_be_used_costs_only_time(
    make: Callable[..., Path], reads: list[str], tmp_path: Path
) -> None:
    folder = make("one", [])
    before = identity(folder)
    [kept] = (tmp_path / "cache" / "digests").iterdir()
    for spoiled in (b"", b'{"format": 1}', kept.read_bytes().replace(b'"format":1', b'"format":0')):
        kept.write_bytes(spoiled)
        assert identity(folder) == before
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder")
    assert identity(folder) == before


def test_a_file_that_is_cut_off_while_it_is_read_is_named(make: Callable[..., Path]) -> None:
    folder = make("one", [])
    files = WeightFiles(folder)
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1000)
    with pytest.raises(CheckpointError, match="is cut off"):
        files.fingerprint()


def test_sharding_is_no_part_of_it(checkpoints: Path, tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    sharded = checkpoints / "llama3_rope_tied_sharded"
    shutil.copytree(sharded, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors: dict[str, torch.Tensor] = {}
    for file in sharded.glob("*.safetensors"):
        tensors |= load_file(file)
    save_file(tensors, folder / "model.safetensors")
    assert identity(folder) == identity(sharded)
