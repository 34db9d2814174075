"""One message of a PullKV stream: a fixed header, then raw KV.

    0   magic "TDKV"        12  transfer id     header: 64 bytes, little-endian
    4   version             28  layer           payload: blocks of one layer of a group, each with
    5   kind                32  first block     its planes one after the other, and of each plane
    6   group               36  blocks          the heads that the puller takes: [heads,
    8   attempt             40  shape           block_size, row_bytes]
                            44  chunk bytes
    60  crc32c of header[0:60] and payload

Positions are logical: layers count within their group, blocks from the start of the prompt in the
sender's block size. A receiver maps them to blocks of its own, so a confused sender cannot write
into another request. What a block looks like follows from the two layouts; `shape` says which of
all that it could be the sender has sent.

Kinds: DATA carries KV. BLOCKS tells a puller of the same host, which has mapped the sender's cache,
where chunks lie: slot and number of a read lease (`transports/in_place/read_leases.py`), how many
chunks, their indices in the grid, then the sender's physical blocks of each span of a group that
occurs, in order and without those that the puller has; 32 bits each. All layers of a group lie in
the same blocks, so these come once. WINDOW tells a puller that chunks were copied into a slot of
memory that it may read (`transports/nixl/window.py`): the number of the slot, slot and number of a
read lease of what is in it now, how many chunks, and their indices in the grid; 32 bits each. In
the slot they lie in the order of the message, one directly behind the other and each as the payload
of DATA would be. HEARTBEAT says that the sender lives but has nothing yet. END
is the last message of a complete stream; a stream that ends without it is broken.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from kv_transfer.errors import CorruptChunk
from kv_transfer.planes import PageShape
from kv_transfer.wire import crc32c

MAGIC = b"TDKV"
VERSION = 3
HEADER = struct.Struct("<4sBBBxI16sIIIIII8xI")
_CRC_AT = HEADER.size - 4

ByteArray = npt.NDArray[np.uint8]
AnyArray = npt.NDArray[np.generic]


class ChunkKind(IntEnum):
    DATA = 0
    HEARTBEAT = 1
    END = 2
    BLOCKS = 3
    WINDOW = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHeader:
    """Says what the payload is.

    Attributes:
        transfer_id: 32 hex digits.
        layer: Within the group.
        first_block, num_blocks: In blocks of the sender, counted from the start of the prompt.
        shape: `shape_code` of a block of the payload; BLOCKS, WINDOW: of the blocks of all groups.
        chunk_bytes: The sender's setting, from which its grid follows (`ChunkGrid.of`).
    """

    kind: ChunkKind
    transfer_id: str
    attempt: int
    group: int = 0
    layer: int = 0
    first_block: int = 0
    num_blocks: int = 0
    shape: int = 0
    chunk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A message that passed all checks. `payload` is a view of the message."""

    header: ChunkHeader
    payload: ByteArray


@lru_cache(maxsize=256)
def shape_code(*pages: PageShape) -> int:
    """Returns a number that tells these shapes of blocks from others."""
    return crc32c.value(msgspec.msgpack.encode(pages))


def encode_chunk(header: ChunkHeader, parts: Sequence[AnyArray] = ()) -> bytes:
    """Returns a whole message.

    `parts`: C-contiguous arrays that make up the payload in order.
    """
    views = [part.data for part in parts]
    return b"".join((chunk_head(header, views), *views))


def mark(kind: ChunkKind, transfer_id: str, attempt: int, chunk_bytes: int) -> bytes:
    """Returns a message without KV. `chunk_bytes`: the sender's, from which its grid follows."""
    return encode_chunk(
        ChunkHeader(kind=kind, transfer_id=transfer_id, attempt=attempt, chunk_bytes=chunk_bytes)
    )


def chunk_head(header: ChunkHeader, parts: Sequence[memoryview]) -> bytes:
    """Returns what goes before the payload `parts`."""
    payload_bytes = sum(part.nbytes for part in parts)
    return _pack(header, payload_bytes, _checksum(_pack(header, payload_bytes), parts))


def fill_header(message: ByteArray, header: ChunkHeader) -> None:
    """Completes a message whose payload lies behind the place of its header already."""
    head = chunk_head(header, [message[HEADER.size :].data])
    message[: HEADER.size] = np.frombuffer(head, np.uint8)


class Checksum:
    """Checks a chunk whose payload comes in parts. `head`: its header; of one that is too short,
    nothing is right."""

    __slots__ = ("_crc", "_expected")

    def __init__(self, head: bytes) -> None:
        self._crc: int = crc32c.value(head[:_CRC_AT])
        self._expected: int = HEADER.unpack(head)[-1] if len(head) == HEADER.size else -1

    def extend(self, part: memoryview) -> None:
        self._crc = crc32c.extend(self._crc, part)

    def check(self) -> None:
        """Raises `CorruptChunk` unless header and payload are as they were sent."""
        if self._crc != self._expected:
            raise CorruptChunk("the checksum does not match")


def _checksum(head: bytes, parts: Sequence[memoryview]) -> int:
    crc: int = crc32c.value(head[:_CRC_AT])
    for part in parts:
        crc = crc32c.extend(crc, part)
    return crc


def _pack(header: ChunkHeader, payload_bytes: int, crc: int = 0) -> bytes:
    return HEADER.pack(
        MAGIC,
        VERSION,
        header.kind,
        header.group,
        header.attempt,
        bytes.fromhex(header.transfer_id),
        header.layer,
        header.first_block,
        header.num_blocks,
        header.shape,
        header.chunk_bytes,
        payload_bytes,
        crc,
    )


def decode_chunk(message: ByteArray) -> Chunk:
    """Raises `CorruptChunk` unless every byte is as it was sent."""
    head, payload = message[: HEADER.size].tobytes(), message[HEADER.size :]
    header = decode_head(head, len(message))
    checksum = Checksum(head)
    checksum.extend(payload.data)
    checksum.check()
    return Chunk(header, payload)


def decode_head(head: bytes, message_bytes: int) -> ChunkHeader:
    """Reads the head of a message whose payload may still be on its way: `Checksum` must follow.
    Raises `CorruptChunk` for what cannot be a chunk of `message_bytes`."""
    if len(head) < HEADER.size:
        raise CorruptChunk(f"a message of {message_bytes} bytes cannot hold a header")
    (magic, version, kind, group, *numbers, payload_bytes, _) = HEADER.unpack(head)
    if magic != MAGIC or version != VERSION:
        raise CorruptChunk(f"not a chunk of version {VERSION}")
    if payload_bytes != message_bytes - HEADER.size:
        raise CorruptChunk(
            f"{message_bytes - HEADER.size} bytes follow a header that announces {payload_bytes}"
        )
    return _header_of(kind, group, numbers)


def _header_of(kind: int, group: int, numbers: list[int | bytes]) -> ChunkHeader:
    if kind > max(ChunkKind):
        raise CorruptChunk(f"unknown kind {kind}")
    attempt, transfer_id, layer, first, blocks, shape, chunk_bytes = numbers
    assert isinstance(transfer_id, bytes)
    return ChunkHeader(
        kind=ChunkKind(kind),
        transfer_id=transfer_id.hex(),
        attempt=int(attempt),
        group=group,
        layer=int(layer),
        first_block=int(first),
        num_blocks=int(blocks),
        shape=int(shape),
        chunk_bytes=int(chunk_bytes),
    )
