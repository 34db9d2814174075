"""gRPC channels from a puller to the transfer processes of its peers.

Every channel has a connection of its own (`use_local_subchannel_pool`): streams that share one
also share its congestion window and its lock. Channels are made when first needed, closed when a
peer is lost (so that the next attempt dials at once instead of waiting out a backoff) and when
nothing has used them for a while.
"""

from __future__ import annotations

import time

import grpc.aio

from edge.grpc_answers import asked_twice
from edge.security.config import PlaintextRefused, Role
from edge.security.credentials import Credentials
from edge.security.renewed_channel import RenewedChannel
from kv_transfer.errors import PeerLost
from kv_transfer.wire.service_paths import SERVICE

CHANNELS_PER_ADDRESS = 4
"""More connections to one process only add cache misses (measured: 2 to 4 are best)."""

CONTROL = -1
"""Slot of the channel for releases, which must not wait behind KV."""

_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]

_MAX_MESSAGE_BYTES = 128 << 20

CLIENT_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    *_KEEPALIVE,
    *asked_twice(SERVICE, ["Release"]),
]

SERVER_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    *_KEEPALIVE,
]


def slot_of(stream: int, sender_processes: int) -> int:
    """Returns the channel of a stream: neighbouring streams to one process use different
    connections."""
    return stream // sender_processes % CHANNELS_PER_ADDRESS


def new_channel(address: str, credentials: Credentials) -> grpc.aio.Channel:
    """Raises `PeerLost` if it would be plaintext that nothing wanted."""
    try:
        return credentials.channel(address, Role.PREFILL, CLIENT_OPTIONS)
    except PlaintextRefused as error:
        raise PeerLost(str(error)) from error


class ChannelPool:
    """Channels by (address, slot)."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._channels: dict[tuple[str, int], RenewedChannel] = {}
        self._used_at: dict[tuple[str, int], float] = {}

    def __len__(self) -> int:
        return len(self._channels)

    async def get(self, address: str, slot: int) -> grpc.aio.Channel:
        """Raises `PeerLost` if it would be plaintext that nothing wanted."""
        key = (address, slot)
        if key not in self._channels:
            self._channels[key] = RenewedChannel(
                lambda: new_channel(address, self._credentials), address, self._credentials
            )
        self._used_at[key] = time.monotonic()
        return await self._channels[key].get()

    async def drop(self, address: str) -> None:
        """Drops the channel to a peer that was lost. Calls in motion on it fail."""
        await self._close([key for key in self._channels if key[0] == address])

    async def close_idle(self, idle_s: float) -> None:
        """Closes channels on which no call began for this long. It must be longer than any call."""
        horizon = time.monotonic() - idle_s
        await self._close([key for key, used_at in self._used_at.items() if used_at < horizon])

    async def close(self) -> None:
        await self._close(list(self._channels))

    async def _close(self, keys: list[tuple[str, int]]) -> None:
        channels = [self._channels.pop(key) for key in keys]
        for key in keys:
            del self._used_at[key]
        for channel in channels:
            await channel.close()
