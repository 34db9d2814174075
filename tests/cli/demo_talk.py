"""Checks what `tandem demo` prints, wherever it runs."""

from __future__ import annotations

import re


def check_talk(said: str) -> None:
    """Checks that a session of two turns and a prompt were answered, by both tiers."""
    assert "a session of two turns" in said
    assert said.count("assistant:") == 3
    assert said.count("first token") == 3
    assert "remote prefill" in said
    assert re.search(r"[1-9]\d* cached tokens", said), "the second turn reuses the first"
