"""One export over NIXL: chunks on their way from the blocks through a window to pullers.

    1. `open_pull`   the blocks stay as they are until the export has ended
    2. a `WindowPull` takes a slot for chunks that are ready, as many as fit; without one it waits
                     for its turn
    3. messages      say which chunks a slot holds, once it is filled
    4. a slot is read, or its call has broken off, or the export ends: then it is free. A pull that
       reads nothing, while others wait for slots, is broken off
    5. a repeat      fills slots anew, and what its stream was given before is released

A call that has announced all its chunks ends; its last slots are still read then. Where all of an
export was staged before the pull came, its blocks may serve another already: the pull is refused
with `NotServed`, and comes again over the stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from edge.h2.out_message import OutMessage
from kv_transfer.errors import NotServed, TransferTimeout
from kv_transfer.layout import BlockIds
from kv_transfer.memory.devices.copy_stream import Numbers
from kv_transfer.transports.base import Export, ExportOwner, ProducerTransfer
from kv_transfer.transports.nixl.filled_slots import FilledSlot, FilledSlots, SlotUser
from kv_transfer.transports.nixl.packed_chunks import chunk_sizes, num_that_fit
from kv_transfer.transports.nixl.window_message import WindowMessage
from kv_transfer.transports.open_pull import OpenPull, PullTerms
from kv_transfer.wire.chunk import HEADER, ChunkHeader, ChunkKind, encode_chunk, shape_code
from kv_transfer.wire.chunk_grid import ChunkPlace

_MOST_CHUNKS = 512
"""Chunks of one message."""


class WindowExport(ProducerTransfer):
    """One export whose KV goes through the slots of `filled`; None: NIXL did not start.

    `named`: chunks that are ready, in the order in which they became so.
    """

    def __init__(
        self, export: Export, filled: FilledSlots | None, owner: ExportOwner, chunk_bytes: int
    ) -> None:
        self.export = export
        self.owner = owner
        self.chunk_bytes = chunk_bytes
        self.named: list[int] = []
        self._filled = filled
        self._pulls: list[WindowPull] = []
        """Those that are open, and those whose last slots are still read."""
        self._arrays: tuple[BlockIds, list[Numbers]] = ((), [])

    @property
    def blocks_are_free(self) -> bool:
        return not self.export.keeps_blocks

    @property
    def block_ids(self) -> list[Numbers]:
        """Returns the physical blocks of the export, by group."""
        known, arrays = self._arrays
        if known is not self.export.block_ids:
            known = self.export.block_ids
            arrays = [np.array(ids, np.int64) for ids in known]
            self._arrays = known, arrays
        return arrays

    def ready(self, indices: Sequence[int]) -> None:
        self.named += indices
        for pull in self._pulls:
            pull.wake.set()

    def narrow(self) -> None:
        return

    def open_pull(self, terms: PullTerms) -> OpenPull:
        if self._filled is None:
            raise NotServed("NIXL did not start here")
        if not self.export.keeps_blocks and self.export.is_staged:
            raise NotServed("the blocks serve others already: all of it was copied out")
        self.export.keeps_blocks = True
        pull = WindowPull(self, self._filled, terms)
        for other in self._pulls:
            if terms.spec.repeat and other.stream == pull.stream:
                other.release()
        self._pulls.append(pull)
        return pull

    def close_pull(self, pull: OpenPull) -> None:
        for other in self._pulls:
            if other is pull:
                other.close()

    def drop(self, pull: WindowPull) -> None:
        """It has ended, and none of its slots is read any more."""
        self._pulls = [other for other in self._pulls if other is not pull]

    def end(self, then: Callable[[], None]) -> None:
        pulls, self._pulls = self._pulls, []
        for pull in pulls:
            pull.release()
        then()


class WindowPull(OpenPull, SlotUser):
    """A call whose messages say which chunks are in a slot."""

    def __init__(self, part: WindowExport, filled: FilledSlots, terms: PullTerms) -> None:
        super().__init__(terms)
        self.stream = terms.spec.rank, terms.spec.tp_size, terms.spec.stream
        self._part = part
        self._filled = filled
        self._shape = shape_code(*self.share)
        self._cursor = 0
        self._ready: list[int] = []
        """Chunks that are ready, and in no slot yet."""
        self._unsent: deque[FilledSlot] = deque()
        """Slots whose chunks are copied, and which no message has announced."""
        self._slots: set[FilledSlot] = set()
        """All that are not read yet, those among them that are being filled."""
        self._num_filling = 0
        self._is_closed = False
        self._is_released = False
        self._is_late = False

    @property
    def is_complete(self) -> bool:
        is_all_sent = not self._ready and not self._unsent and self._num_filling == 0
        return is_all_sent and super().is_complete

    def next_message(self) -> OutMessage | None:
        if self._is_late:
            raise TransferTimeout("the slots of this pull were not read, and others wait for slots")
        self._fill_slots()
        if not self._unsent:
            return None
        filled = self._unsent.popleft()
        message = self._message(filled)
        export, owner = self._part.export, self._part.owner
        num_bytes = len(message) - HEADER.size

        def on_end(is_sent: bool) -> None:
            if is_sent:
                owner.was_sent(export, num_bytes)

        return OutMessage([message], on_end)

    def close(self) -> None:
        """Its call has ended. What was announced to the end may still be read."""
        self._is_closed = True
        self._filled.window.slots.leave(self)
        if not self.is_complete:
            self.release()
        self._drop_if_over()

    def release(self) -> None:
        """Nothing reads its slots any more."""
        self._is_released = True
        self._filled.window.slots.leave(self)
        slots, self._slots = self._slots, set()
        self._unsent.clear()
        for filled in slots:
            self._filled.release(filled)
        self._drop_if_over()

    def was_filled(self, filled: FilledSlot) -> None:
        self._num_filling -= 1
        self._unsent.append(filled)
        layers, _ = self.grid.layers_and_spans(filled.indices)
        for group, layer in layers:
            self._part.export.saved(ChunkPlace(group, layer, 0))
        self.wake.set()

    def was_read(self, filled: FilledSlot) -> None:
        self._slots.discard(filled)
        self._drop_if_over()

    def was_late(self) -> None:
        self._is_late = True
        self.release()
        self.wake.set()

    def _fill_slots(self) -> None:
        """Fills slots until there is one to tell of, or no KV, or no slot. The next is filled while
        that one is read."""
        part, window = self._part, self._filled.window
        named = part.named
        if self._cursor < len(named):
            self._ready += self.take_all(named[self._cursor :])
            self._cursor = len(named)
        while self._ready and not self._unsent and not self._is_released:
            slot = window.slots.take(self, self.wake.set)
            if slot is None:
                return
            filled = FilledSlot(slot, self._pop_ready(), self)
            self._slots.add(filled)
            self._num_filling += 1
            self._filled.fill(filled, self.grid, self.share, part.block_ids)

    def _pop_ready(self) -> list[int]:
        """Returns as many chunks as a slot holds."""
        first = self._ready[:_MOST_CHUNKS]
        sizes = chunk_sizes(self.grid, self.share, np.array(first))
        count = num_that_fit(sizes, self._filled.window.slot_bytes)
        self._ready = self._ready[count:]
        return first[:count]

    def _drop_if_over(self) -> None:
        if self._is_closed and not self._slots:
            self._part.drop(self)

    def _message(self, filled: FilledSlot) -> bytes:
        assert filled.lease is not None
        lease = filled.lease.slot, filled.lease.number
        words = WindowMessage(filled.slot, lease, np.array(filled.indices)).words()
        export = self._part.export
        header = ChunkHeader(
            kind=ChunkKind.WINDOW,
            transfer_id=export.transfer_id,
            attempt=export.attempt,
            shape=self._shape,
            chunk_bytes=self._part.chunk_bytes,
        )
        return encode_chunk(header, [words])
