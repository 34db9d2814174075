"""One transfer on the consumer's side, as one transfer process sees it."""

from __future__ import annotations

import asyncio
import time

from kv_transfer.consumer.path_meter import PathMeter, PathMoment, rate_between
from kv_transfer.metadata import RecvMeta, TransferStats
from kv_transfer.transports.pull_stream import PullStream


class RecvTransfer:
    """Its streams, and what was measured."""

    def __init__(self, meta: RecvMeta, path: PathMeter) -> None:
        self.meta = meta
        self._path = path
        self._begun: PathMoment | None = None
        self._computed: PathMoment | None = None
        self._received: PathMoment | None = None
        self.streams: list[PullStream] = []
        self._replaced: list[PullStream] = []
        """Were not served; copies that they issued may be on their way."""
        self.num_planned = 0
        """Streams that there will be, once the peer has answered."""
        self.is_planned = False
        """The streams are known. A process may have none."""
        self.num_bytes = 0
        self.first_byte_at = 0.0
        self.last_byte_at = 0.0
        self._waits_since = 0.0
        """The wait for KV counts from here, if none comes later."""
        self.task: asyncio.Task[None] | None = None
        self.has_begun = False
        self.abort_requested = False
        self.is_over = False
        """No stream is left, and how it ended is certain; copies may be on their way."""

    @property
    def num_open_streams(self) -> int:
        """Streams whose end has not come."""
        if not self.is_planned:
            return self.num_planned
        return sum(not stream.is_done for stream in self.streams)

    @property
    def stats(self) -> TransferStats:
        rate, was_full = rate_between(self._begun, self._computed, self._received)
        return TransferStats(
            self.num_bytes,
            len(self.streams),
            self.first_byte_at,
            self.last_byte_at,
            self._received.at if self._received else 0.0,
            path_bytes_per_s=rate,
            path_was_full=was_full,
        )

    def count(self, num_bytes: int) -> bool:
        """Returns whether these were the first."""
        self.last_byte_at = time.monotonic()
        self.num_bytes += num_bytes
        self._path.num_bytes += num_bytes
        if self.first_byte_at > 0:
            return False
        self.first_byte_at = self.last_byte_at
        self._begun = PathMoment(self._path.num_bytes, self.first_byte_at)
        return True

    def has_received(self) -> float:
        """Notes that the last byte has come, and returns in how many seconds they all came."""
        self._received = PathMoment(self._path.num_bytes, time.monotonic())
        return self._received.at - self.first_byte_at

    @property
    def num_tokens_complete(self) -> int:
        """Returns the leading tokens of which our share is in our blocks, when all copies are
        done."""
        if not self.is_planned:
            return self.meta.first_token
        known = (stream for stream in self.streams if stream.chunk_bytes is not None)
        told = {stream.peer_rank: stream.chunk_bytes for stream in known}
        complete = (
            stream.num_tokens_complete(told.get(stream.peer_rank)) for stream in self.streams
        )
        return min(complete, default=self.meta.num_tokens)

    def replace(self, streams: list[PullStream]) -> None:
        """These have come to nothing: others bring what they should have brought."""
        self._replaced += streams
        self.streams = [stream for stream in self.streams if stream not in streams]

    def close_streams(self) -> None:
        """No copy is on its way."""
        for stream in (*self.streams, *self._replaced):
            stream.close()

    def release(self) -> None:
        """It has ended. Streams know their transfer, and what they received into would stay until
        garbage is collected, which is seldom."""
        self.streams, self._replaced = [], []
        self.task = None

    def extend_silence_deadline(self) -> None:
        """Time starts anew for all streams."""
        self._waits_since = time.monotonic()
        for stream in self.streams:
            stream.last_message_at = self._waits_since

    def prompt_is_computed(self) -> None:
        """Ends the time in which a pause has a reason. Until then KV comes as it is computed."""
        self._waits_since = time.monotonic()
        self._computed = PathMoment(self._path.num_bytes, self._waits_since)

    def has_stalled(self, timeout_s: float) -> bool:
        """Returns whether no stream brought KV for that long though all of it is computed."""
        if self._computed is None or self.num_open_streams == 0:
            return False
        progress = max((stream.last_kv_at for stream in self.streams), default=0.0)
        return max(progress, self._waits_since) < time.monotonic() - timeout_s

    def silent_streams(self, timeout_s: float) -> list[PullStream]:
        horizon = time.monotonic() - timeout_s
        return [
            stream
            for stream in self.streams
            if not stream.is_done and stream.last_message_at < horizon
        ]
