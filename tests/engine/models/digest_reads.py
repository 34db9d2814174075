"""Which tensors are read for a checkpoint's identity alone."""

from __future__ import annotations

from typing import Any

import pytest

from engine.models.files import content_digests
from engine.models.files.stored_tensors import StoredTensor


def watch_digests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the names of tensors, to which each is added as it is read."""
    found: list[str] = []
    digest = content_digests._digest

    def watched(block: tuple[StoredTensor, int, int], file: Any) -> bytes:
        found.append(block[0].name)
        return digest(block, file)

    monkeypatch.setattr(content_digests, "_digest", watched)
    return found
