"""Keeps a gRPC channel that shows certificates of today.

1. dialled     when first asked for
2. replaced    at the first call after the certificates were renewed; calls in motion stay on the
               old channel, which is closed when the longest of them must be over
3. closed      with all of it
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio

from edge.security.credentials import Credentials

_LONGEST_CALL_S = 900.0


class RenewedChannel:
    """Calls `dial` for a channel that shows what `credentials` are now."""

    def __init__(self, dial: Callable[[], grpc.aio.Channel], credentials: Credentials) -> None:
        self._dial = dial
        self._credentials = credentials
        self._version = -1
        self._channel: grpc.aio.Channel | None = None
        self._retired: set[asyncio.Task[None]] = set()

    def get(self) -> grpc.aio.Channel:
        """Returns a channel for one call. Raises what `dial` does."""
        version = self._credentials.version
        if self._channel is None or version != self._version:
            old = self._channel
            self._channel = self._dial()
            self._version = version
            if old is not None:
                task = asyncio.create_task(_close_later(old))
                self._retired.add(task)
                task.add_done_callback(self._retired.discard)
        return self._channel

    async def close(self) -> None:
        """Closes it. Calls in motion fail."""
        for task in self._retired:
            task.cancel()
        await asyncio.gather(*self._retired, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()
            self._channel = None


async def _close_later(channel: grpc.aio.Channel) -> None:
    try:
        await asyncio.sleep(_LONGEST_CALL_S)
    finally:
        await channel.close()
