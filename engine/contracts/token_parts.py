"""Cuts long lists of token ids into parts, where something is done to every id: one call on all of
them holds Python's lock, and with it the event loop that passes tokens on, for as long as it takes.
A million ids take 15 ms to check and 30 ms to read from a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

MOST_TOGETHER = 1 << 14
"""Ids that are worked on in one go, which takes a quarter of a millisecond or two. Work on more
belongs beside the event loop (`edge.http.event_loop.long_work`)."""


def token_parts(token_ids: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Returns `token_ids` in parts of `MOST_TOGETHER`, in order; one part if they are few."""
    for start in range(0, len(token_ids), MOST_TOGETHER):
        yield token_ids[start : start + MOST_TOGETHER]
