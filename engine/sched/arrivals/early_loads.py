"""Requests that compute while their KV is still being loaded from host memory, layer by layer.

    HostKV: first layers are there, and nothing else has anything to compute
        │ begin: the request gets a row; the step waits before each layer (`LoadTicket`)
        ▼
      EARLY ──── load is right, or the step's result is here ───▶ an ordinary row
        │  └──── it leaves its row for another reason ──────────▶ nothing to do
        └─────── load fails ──▶ preempted; only then the step may go on, and its result is dropped

A layer is marked after its checksums were found right, so a result that comes back by itself is
right. Until one of these is known, nothing is notified of the request's KV: chunks that a peer
waits for are withheld, and its blocks cannot be found in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.contracts.request import Request
from kv_transfer.base import ChunkLike, KVConnectorScheduler
from kv_transfer.metadata import KVConnectorMetadata, LoadTicket


@dataclass(slots=True)
class _Early:
    job: int
    chunks: list[tuple[int, ChunkLike]] = field(default_factory=list)
    """Withheld, with their steps."""


class EarlyLoads:
    """`preempt` takes a running request's row; set once, before the first step."""

    def __init__(self, connector: KVConnectorScheduler) -> None:
        self._connector = connector
        self.preempt: Callable[[Request], None] = _never
        self._early: dict[str, _Early] = {}  # [request id]
        self._ticket: LoadTicket | None = None
        """The next step waits with it."""

    def begin(self, request: Request, job: int, ticket: LoadTicket) -> None:
        """Records that the request computes in the next step, and nothing else does."""
        self._early[request.request_id] = _Early(job)
        self._ticket = ticket

    def build_meta(self, step_id: int, chunks: list[ChunkLike]) -> KVConnectorMetadata | None:
        """Tells of the chunks of exports that are certain to be right. Returns what workers must
        know of the step."""
        if not self._early:
            return self._connector.build_connector_meta(step_id, chunks)
        certain, is_any_withheld = list[ChunkLike](), False
        for chunk in chunks:
            early = self._early.get(chunk.request.request_id)
            if early is None:
                certain.append(chunk)
            else:
                early.chunks.append((step_id, chunk))
                is_any_withheld = True
        kv = self._connector.build_connector_meta(step_id, certain)
        ticket, self._ticket = self._ticket, None
        if not is_any_withheld and ticket is None:
            return kv
        return KVConnectorMetadata(is_any_withheld or (kv is not None and kv.save_kv), ticket)

    def settle(self, request: Request) -> None:
        """Tells what was withheld, since the request's KV is right."""
        early = self._early.pop(request.request_id, None)
        for step_id, chunk in early.chunks if early is not None else ():
            self._connector.build_connector_meta(step_id, [chunk])

    def left(self, request: Request) -> None:
        """Forgets a request that leaves its row."""
        self._early.pop(request.request_id, None)

    def load_done(self, request: Request, job: int, *, is_right: bool) -> None:
        """Ends the wait, if this is the load that the request computes with."""
        early = self._early.get(request.request_id)
        if early is None or early.job != job:
            return
        if is_right:
            self.settle(request)
        else:
            self.preempt(request)

    def leftovers(self) -> list[str]:
        return [f"request {name} that computes before its KV is there" for name in self._early]


def _never(request: Request) -> None:
    raise AssertionError("nobody preempts before there are rows")
