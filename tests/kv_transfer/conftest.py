"""KV transfer tests share harnesses: `import kv_loopback`, `import kv_nodes`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kv_transfer.transports.stream.h2 import receive_threads

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(autouse=True)
def _threads_read_small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of these tests are smaller than what nodes leave to threads: here threads read all but
    the smallest."""
    monkeypatch.setattr(receive_threads, "WORTH_BYTES", 1000)
