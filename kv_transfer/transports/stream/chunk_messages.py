"""Producer: chunks as the messages that go over the wire.

A staged chunk is a message already. For a puller that wants less of it, a smaller one is made; for
one that reads our blocks itself, one that says where they lie.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kv_transfer.errors import CorruptChunk
from kv_transfer.layout import KVLayout, PageShape
from kv_transfer.producer.send_transfer import Pull, SendTransfer, SentChunk
from kv_transfer.transports.cuda_ipc.read_leases import ReadLeases
from kv_transfer.wire.chunk import (
    ByteArray,
    ChunkHeader,
    ChunkKind,
    decode_chunk,
    encode_chunk,
    shape_code,
)
from kv_transfer.wire.chunk_grid import ChunkPlace
from kv_transfer.wire.out_message import Buffer


class ChunkMessages:
    """The messages of one rank."""

    def __init__(self, layout: KVLayout, rank: int, chunk_bytes: int, holds: ReadLeases) -> None:
        self._holds = holds
        self._chunk_bytes = chunk_bytes
        self._pages = tuple(layout.page(group, rank) for group in range(len(layout.groups)))
        self._codes = [shape_code(page) for page in self._pages]

    def header(self, transfer: SendTransfer, place: ChunkPlace) -> ChunkHeader:
        """Returns that of a whole chunk with its KV."""
        blocks = transfer.grid.blocks_of(place)
        return ChunkHeader(
            kind=ChunkKind.DATA,
            transfer_id=transfer.transfer_id,
            attempt=transfer.attempt,
            group=place.group,
            layer=place.layer,
            first_block=blocks.start,
            num_blocks=len(blocks),
            shape=self._codes[place.group],
            chunk_bytes=self._chunk_bytes,
        )

    def mark(self, kind: ChunkKind, transfer_id: str, attempt: int) -> bytes:
        """A message without KV."""
        return encode_chunk(self._bare_header(kind, transfer_id, attempt))

    def message_for(self, pull: Pull, entries: list[SentChunk]) -> Buffer:
        """What of a staged chunk the puller wants: the staged memory itself, if that is all of it.
        Or where chunks lie that were not staged.

        Raises:
            CorruptChunk: It is a repeat of what was displaced from staging memory.
        """
        transfer, chunk = pull.transfer, entries[0].chunk
        if chunk is None:
            return self._where_blocks_are(pull, entries)
        if chunk.message is None:
            raise CorruptChunk("the chunk has left staging memory and cannot be repeated")
        place = transfer.grid.position(entries[0].index)
        num_held = pull.grid.blocks_of(place).start - transfer.grid.blocks_of(place).start
        share = pull.share[place.group]
        if share == self._pages[place.group] and num_held == 0:
            return chunk.message.data
        return self._narrow(chunk.message, share, num_held)

    def _where_blocks_are(self, pull: Pull, entries: list[SentChunk]) -> bytes:
        transfer, grid = pull.transfer, pull.grid
        if not pull.wish.direct:
            raise CorruptChunk("the chunk was not staged, because other pullers read its blocks")
        indices = [entry.index for entry in entries]
        hold = transfer.hold = transfer.hold or self._holds.hold()
        words = [hold.slot, hold.number, len(indices), *indices]
        places = (grid.position(index) for index in indices)
        for group, span in sorted({(place.group, place.span) for place in places}):
            blocks = grid.groups[group].blocks_of(span)
            words += transfer.block_ids[group][blocks.start : blocks.stop]
        header = replace(
            self._bare_header(ChunkKind.BLOCKS, transfer.transfer_id, transfer.attempt),
            shape=shape_code(*pull.share),
        )
        return encode_chunk(header, [np.array(words, "<u4")])

    def _narrow(self, message: ByteArray, share: PageShape, num_held: int) -> bytes:
        """Returns it without heads of the puller's other ranks, and leading blocks that it has."""
        chunk = decode_chunk(message)
        held = self._pages[chunk.header.group]
        blocks = chunk.payload.reshape(chunk.header.num_blocks, held.num_bytes)[num_held:]
        parts = []
        for plane, wanted in zip(held.planes, share.planes, strict=True):
            if wanted.heads.count:
                start = plane.offset_of(wanted.heads.start)
                parts.append(blocks[:, start : start + wanted.num_bytes])
        header = replace(
            chunk.header,
            first_block=chunk.header.first_block + num_held,
            num_blocks=len(blocks),
            shape=shape_code(share),
        )
        return encode_chunk(header, [np.concatenate(parts, axis=1)])

    def _bare_header(self, kind: ChunkKind, transfer_id: str, attempt: int) -> ChunkHeader:
        return ChunkHeader(
            kind=kind, transfer_id=transfer_id, attempt=attempt, chunk_bytes=self._chunk_bytes
        )
