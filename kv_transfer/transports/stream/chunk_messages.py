"""Producer: chunks as the messages that go over the wire.

A staged chunk is a message already. For a puller that wants less of it, a smaller one is made.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edge.h2.out_message import Buffer
from kv_transfer.errors import CorruptChunk
from kv_transfer.layout import KVLayout
from kv_transfer.planes import PageShape
from kv_transfer.transports.base import Export
from kv_transfer.transports.stream.stream_export import SentChunk, StreamPull
from kv_transfer.wire.chunk import (
    HEADER,
    ByteArray,
    ChunkHeader,
    ChunkKind,
    decode_chunk,
    encode_chunk,
    shape_code,
)
from kv_transfer.wire.chunk_grid import ChunkPlace


class ChunkMessages:
    """The messages of one rank."""

    def __init__(self, layout: KVLayout, rank: int, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._pages = tuple(layout.page(group, rank) for group in range(len(layout.groups)))
        self._codes = [shape_code(page) for page in self._pages]

    def header(self, export: Export, place: ChunkPlace) -> ChunkHeader:
        """Returns that of a whole chunk with its KV."""
        blocks = export.grid.blocks_of(place)
        return ChunkHeader(
            kind=ChunkKind.DATA,
            transfer_id=export.transfer_id,
            attempt=export.attempt,
            group=place.group,
            layer=place.layer,
            first_block=blocks.start,
            num_blocks=len(blocks),
            shape=self._codes[place.group],
            chunk_bytes=self._chunk_bytes,
        )

    def message_for(self, pull: StreamPull, entry: SentChunk) -> Buffer:
        """Returns what of a staged chunk the puller wants: the staged memory itself, if that is
        all of it.

        Raises:
            CorruptChunk: It is a repeat of what was displaced from staging memory.
        """
        message = entry.chunk.message
        if message is None:
            raise CorruptChunk("the chunk has left staging memory and cannot be repeated")
        place = pull.grid.position(entry.index)
        share, blocks = pull.share[place.group], pull.grid.blocks_of(place)
        num_staged = (message.nbytes - HEADER.size) // self._pages[place.group].num_bytes
        if share == self._pages[place.group] and num_staged == len(blocks):
            return message.data
        return self._narrow(message, share, num_staged - len(blocks))

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
