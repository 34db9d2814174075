"""Producer: chunks as the messages that go over the wire.

A staged chunk is a message already. For a puller that wants less of it, a smaller one is made; for
one that reads our blocks itself, one that says where they lie.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kv_transfer.errors import CorruptChunk
from kv_transfer.layout import HeadRange, KVLayout
from kv_transfer.memory.block_holds import BlockHolds
from kv_transfer.producer.send_transfer import Pull, SendTransfer, SentChunk
from kv_transfer.wire.chunk import ByteArray, ChunkHeader, ChunkKind, decode_chunk, encode_chunk
from kv_transfer.wire.out_message import Buffer


class ChunkMessages:
    """Of one rank, which holds `heads`."""

    def __init__(
        self, layout: KVLayout, heads: HeadRange, blocks_per_chunk: int, holds: BlockHolds
    ) -> None:
        self._holds = holds
        self._layout = layout
        self._heads = heads
        self._blocks_per_chunk = blocks_per_chunk

    def header(self, transfer: SendTransfer, layer: int, group: int) -> ChunkHeader:
        """Of a whole chunk with its KV."""
        blocks = transfer.grid.blocks_of(group)
        return ChunkHeader(
            kind=ChunkKind.DATA,
            dtype=self._layout.groups[0].dtype,
            transfer_id=transfer.transfer_id,
            attempt=transfer.attempt,
            layer=layer,
            first_block=blocks.start,
            num_blocks=len(blocks),
            head_start=self._heads.start,
            num_heads=self._heads.count,
            block_size=self._layout.groups[0].block_size,
            blocks_per_chunk=self._blocks_per_chunk,
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
        num_held = _num_held(pull, transfer.grid.position(entries[0].index)[1])
        if pull.wish.heads == self._heads and num_held == 0:
            return chunk.message.data
        return self._narrow(chunk.message, pull.wish.heads, num_held)

    def _where_blocks_are(self, pull: Pull, entries: list[SentChunk]) -> bytes:
        transfer, heads = pull.transfer, pull.wish.heads
        if not pull.wish.direct:
            raise CorruptChunk("the chunk was not staged, because other pullers read its blocks")
        grid = transfer.grid.starting_at(pull.first_block)
        indices = [entry.index for entry in entries]
        hold = transfer.hold = transfer.hold or self._holds.hold()
        words = [hold.slot, hold.number, len(indices), *indices]
        for group in sorted({grid.position(index)[1] for index in indices}):
            blocks = grid.blocks_of(group)
            words += transfer.block_ids[blocks.start : blocks.stop]
        header = replace(
            self._bare_header(ChunkKind.BLOCKS, transfer.transfer_id, transfer.attempt),
            head_start=heads.start,
            num_heads=heads.count,
        )
        return encode_chunk(header, [np.array(words, "<u4")])

    def _narrow(self, message: ByteArray, wanted: HeadRange, num_held: int) -> bytes:
        """Without heads of the puller's other ranks, and leading blocks that it has."""
        chunk, held = decode_chunk(message), self._heads
        blocks = chunk.payload.reshape(chunk.header.num_blocks, 2, held.count, -1)
        first = wanted.start - held.start
        part = blocks[num_held:, :, first : first + wanted.count].copy()
        return encode_chunk(_narrowed(chunk.header, wanted, num_held), [part])

    def _bare_header(self, kind: ChunkKind, transfer_id: str, attempt: int) -> ChunkHeader:
        return ChunkHeader(
            kind=kind,
            dtype=self._layout.groups[0].dtype,
            transfer_id=transfer_id,
            attempt=attempt,
            block_size=self._layout.groups[0].block_size,
            blocks_per_chunk=self._blocks_per_chunk,
        )


def _num_held(pull: Pull, group: int) -> int:
    """Leading blocks of the group that the puller has."""
    return max(0, pull.first_block - pull.transfer.grid.blocks_of(group).start)


def _narrowed(header: ChunkHeader, heads: HeadRange, num_held: int) -> ChunkHeader:
    return replace(
        header,
        first_block=header.first_block + num_held,
        num_blocks=header.num_blocks - num_held,
        head_start=heads.start,
        num_heads=heads.count,
    )
