"""Shows a connection to one of its answers, and parts them again.

An answer may take a while to end when its connection has gone, and a connection lives on when its
answer has ended. What each holds of the other is cut then: memory is free when they are gone, not
when a collection of garbage comes.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

WRITE_DIRECTLY = "write_directly"
"""The key, in a request's state, of what writes a piece of the answer's body to the connection, as
`EventWriter` does."""


class Ending(Protocol):
    """Is a connection that can end in two ways. `cycle` is the answer that is being given; there is
    none when the connection has ended."""

    transport: asyncio.Transport
    cycle: RequestResponseCycle

    def end_gently(self) -> None: ...
    def close(self) -> None: ...


class AnswerTransport:
    """Is closed by an answer, which may end without having read its whole request. It does not hold
    the answer, which holds it."""

    def __init__(self, protocol: Ending) -> None:
        self._protocol = protocol
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing

    def close(self) -> None:
        cycle = self._protocol.cycle
        if cycle and cycle.more_body and cycle.response_complete:
            self._protocol.end_gently()
        else:
            self._protocol.close()


def write_directly(cycle: RequestResponseCycle, data: bytes) -> bool:
    """Writes a piece of an answer that has begun, in chunks. Returns False where uvicorn has to be
    asked: the client has gone or reads slowly, or the answer is of another kind."""
    is_open = cycle.response_started and not (cycle.response_complete or cycle.disconnected)
    if not is_open or not cycle.chunked_encoding or cycle.flow.write_paused:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True


def cut_loops(cycle: RequestResponseCycle) -> None:
    """Takes from an answer that has ended what leads back to it."""
    cycle.scope["state"].pop(WRITE_DIRECTLY, None)
    vars(cycle).pop("send", None)


def detach(cycle: RequestResponseCycle, transport: asyncio.Transport) -> None:
    """Takes its connection, which has gone, from an answer."""
    cut_loops(cycle)
    cycle.transport = transport
    cycle.on_response = _nothing


def _nothing() -> None:
    """Stands for what an ended connection would do."""
