"""Finds where turns of /v1/messages were compacted: what was before that is in no prompt."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def last_compaction(turns: list[Json]) -> tuple[int, int] | None:
    """Returns the turn and the block of the last compaction."""
    for i in reversed(range(len(turns))):
        content = turns[i].get("content")
        blocks = content if isinstance(content, list) else []
        for j in reversed(range(len(blocks))):
            if isinstance(blocks[j], dict) and blocks[j].get("type") == "compaction":
                return i, j
    return None
