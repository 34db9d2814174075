"""Tests a checkpoint whose file system does not answer: the log names the file that is awaited."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from engine.models import slow_reads
from engine.models.config.json_file import read_json
from engine.models.files.stored_tensors import read_header
from engine.models.slow_reads import telling_slow_reads

EMPTY_HEADER = (2).to_bytes(8, "little") + b"{}"


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_file_that_does_not_come_is_named_until_it_does(
    is_inside: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A pipe without a writer holds its reader as a dead server of files does. Of many files that
    are read one after the other, it is the one that is awaited."""
    path = tmp_path / "config.json"
    os.mkfifo(path)
    monkeypatch.setattr(slow_reads, "AFTER_S", 0.01)
    told = threading.Event()

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.set()

    handler = Seen()
    slow_reads.logger.addHandler(handler)
    found: list[object] = []

    def read() -> None:
        around = telling_slow_reads(tmp_path / "index") if is_inside else nullcontext()
        with around:
            found.append(read_json(path, dict[str, int]))

    reader = threading.Thread(target=read)
    try:
        reader.start()
        assert told.wait(30.0) and not found
        path.write_bytes(b'{"a": 1}')
        reader.join(30.0)
    finally:
        slow_reads.logger.removeHandler(handler)
    assert found == [{"a": 1}]
    assert f"{path} has been read" in caplog.text and "does its file system answer?" in caplog.text


def test_quick_reads_say_nothing_and_leave_no_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(EMPTY_HEADER)
    before = threading.active_count()
    assert read_header(path) == {}
    assert threading.active_count() == before and caplog.text == ""
