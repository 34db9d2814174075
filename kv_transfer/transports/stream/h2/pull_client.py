"""PullKV calls over connections of our own (`kv_transfer.transports.stream.h2.connection`)."""

from __future__ import annotations

import time
from collections import defaultdict

from edge.security.credentials import Credentials
from kv_transfer.transports.stream.h2.connection import CallRefused, H2Connection
from kv_transfer.transports.stream.h2.receive_threads import ReceiveThreads
from kv_transfer.wire.pull_client import MessageSink, PullClient, refusal
from kv_transfer.wire.service_paths import PULL_PATH
from tandem_pb import kv_transfer_pb2 as pb


class H2PullClient(PullClient):
    """As many connections to an address as there were streams at the same time. `source`: our
    address that they leave from; empty: any. `receive_threads`: 0: the event loop reads all."""

    def __init__(
        self, credentials: Credentials, source: str = "", receive_threads: int = 0
    ) -> None:
        self._credentials = credentials
        self._source = source
        self._threads = ReceiveThreads(receive_threads)
        self._idle: dict[str, list[H2Connection]] = defaultdict(list)
        self._busy: set[H2Connection] = set()

    async def pull(
        self, address: str, slot: int, request: pb.PullRequest, sink: MessageSink
    ) -> None:
        connection = self._reuse(address) or await H2Connection.connect(
            address, self._credentials, self._threads, self._source
        )
        self._busy.add(connection)
        try:
            await connection.call(
                PULL_PATH, request.SerializeToString(), sink, self._credentials.metadata()
            )
        except CallRefused as error:
            raise refusal(address, error.code, error.details) from error
        finally:
            self._busy.discard(connection)
            if connection.is_usable:
                self._idle[address].append(connection)

    async def forget(self, addresses: set[str]) -> None:
        """Calls in motion are left alone: they notice themselves."""
        for address in addresses:
            for connection in self._idle.pop(address, []):
                connection.close()

    async def close_idle(self, idle_s: float) -> None:
        horizon = time.monotonic() - idle_s
        for address, connections in list(self._idle.items()):
            for connection in connections:
                if connection.used_at < horizon:
                    connection.close()
            self._idle[address] = [one for one in connections if one.is_usable]
            if not self._idle[address]:
                del self._idle[address]

    async def close(self) -> None:
        await self.forget(set(self._idle))
        for connection in list(self._busy):
            connection.close()
        self._threads.close()

    def _reuse(self, address: str) -> H2Connection | None:
        idle = self._idle[address]
        while idle:
            connection = idle.pop()
            if connection.is_usable:
                return connection
        return None
