"""Answers clients that speak HTTP/1.0, which know no chunks: an answer of unknown length ends with
its connection."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Makes `cycle` write bodies as they are. It has not begun to answer."""
    send = cycle.send
    cycle.chunked_encoding = False

    async def send_unframed(message: Any) -> None:
        if message["type"] == "http.response.body":
            # Each piece is as long as it is: nothing is counted over all of them.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unframed  # type: ignore[method-assign]
