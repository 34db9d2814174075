"""Holds what a client asked for, once all of it is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.request.info import RequestInfo
from router.request.request_history import RequestHistory
from router.request.trace import RequestTrace


def _counts_nowhere() -> None:
    """Is for a request that needs no room."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """Is one request. `headers` have lower-case names. `kept` is what a node gets of a
    response that this router keeps, as a header; empty: nothing. `leave_room` gives back what its
    body needs while no node has it (`router.models.open_request_limit`)."""

    info: RequestInfo
    headers: Mapping[str, str]
    body: bytes
    record: RequestHistory
    kept: str = ""
    leave_room: Callable[[], None] = _counts_nowhere

    @property
    def trace(self) -> RequestTrace:
        return self.record.trace
