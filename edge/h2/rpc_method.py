"""Methods of a service, whatever carries the calls: `edge.h2.server`, grpcio or a local socket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from edge.h2.out_message import OutMessage


class ServerCall(ABC):
    """The call that a handler answers, and what it may do with it. `bytes_to_come`: about how much
    will follow what was written; the less, the sooner it is sent where calls share a connection."""

    bytes_to_come: int = 0

    @abstractmethod
    async def write(self, message: OutMessage) -> None:
        """Returns when another message should follow. The message says itself when it is sent."""

    @property
    @abstractmethod
    def headers(self) -> Mapping[str, str]:
        """Returns what the caller sent ahead of its request."""

    @abstractmethod
    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """Ends the call with a status."""


@dataclass(frozen=True, slots=True)
class RpcMethod:
    """`handle(request, call)` returns the answer, or None after it has written a stream of raw
    messages (`serialize` is None)."""

    handle: Callable[[Any, ServerCall], Awaitable[Any]]
    parse: Callable[[bytes], Any]
    serialize: Callable[[Any], bytes] | None = None
    max_request_bytes: int = 1 << 20
