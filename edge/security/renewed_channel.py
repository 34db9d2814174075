"""Keeps a gRPC channel that shows certificates of today.

1. dialled     when first asked for
2. replaced    at the first call after the certificates were renewed, or after the peer has learned
               TLS (`Credentials.version`); calls in motion stay on the old channel, which is closed
               when the longest of them must be over
3. closed      with all of it
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio

from edge.security.credentials import Credentials

_LONGEST_CALL_S = 900.0


class RenewedChannel:
    """Calls `dial` for a channel to `address` that shows what `credentials` are now."""

    def __init__(
        self, dial: Callable[[], grpc.aio.Channel], address: str, credentials: Credentials
    ) -> None:
        self._dial = dial
        self._address = address
        self._credentials = credentials
        self._version: tuple[int, bool] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._retired: set[asyncio.Task[None]] = set()

    async def get(self) -> grpc.aio.Channel:
        """Returns a channel for one call. Raises what `dial` does."""
        await self._credentials.meet(self._address)
        version = self._credentials.version(self._address)
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
