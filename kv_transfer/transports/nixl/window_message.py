"""The two ends of NIXL say this to each other beside the KV.

holder ── WINDOW: slot, read lease, chunks ──▶ reader     a message of the PullKV call
holder ◀── the read lease ──────────────────── reader     a notice of NIXL, once all was read
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from kv_transfer.errors import CorruptChunk
from kv_transfer.memory.devices.copy_stream import Numbers
from kv_transfer.transports.in_place.read_leases import NUM_LEASES, LeaseName
from kv_transfer.wire.chunk import AnyArray, ByteArray

WORD_BYTES = 4
NUM_FIRST_WORDS = 4
_NOTICE = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class WindowMessage:
    """These chunks lie in this slot of the holder's window, as long as the lease lasts."""

    slot: int
    lease: LeaseName
    indices: Numbers

    def words(self) -> AnyArray:
        """Returns the payload, as `kv_transfer/wire/chunk.py` has it."""
        first = (self.slot, *self.lease, len(self.indices))
        return np.concatenate((np.array(first, np.int64), self.indices)).astype("<u4")


def read_window_message(payload: ByteArray) -> WindowMessage:
    """Raises `CorruptChunk` for what is cut off, or names no lease or no chunk."""
    if payload.nbytes < NUM_FIRST_WORDS * WORD_BYTES or payload.nbytes % WORD_BYTES:
        raise CorruptChunk("a message about a window is cut off")
    words = payload.view("<u4").astype(np.int64)
    slot, lease, number, num_chunks = words[:NUM_FIRST_WORDS].tolist()
    if num_chunks < 1 or num_chunks != len(words) - NUM_FIRST_WORDS:
        raise CorruptChunk("a message about a window has not as many chunks as it says")
    if lease >= NUM_LEASES or number == 0:
        raise CorruptChunk("a message about a window names an unknown lease")
    return WindowMessage(slot, (lease, number), words[NUM_FIRST_WORDS:])


def notice_of(lease: LeaseName) -> bytes:
    """Returns what tells the holder that all was read for which it took this lease."""
    return _NOTICE.pack(*lease)


def read_notice(notice: bytes) -> LeaseName | None:
    """Returns the lease that a notice names; None: it is no such notice."""
    if len(notice) != _NOTICE.size:
        return None
    slot, number = _NOTICE.unpack(notice)
    return slot, number
