"""The name of a full block: a hash of everything that its KV depends on.

Chained: each hash covers the one before it, so two blocks have equal hashes exactly when their
tokens and all tokens before them are equal. The chain starts from the extra keys (tenant salt,
adapter), so tenants with different salts never share a block, nor do an adapter and the model. All
tokens of all images are one id: a block that has some is hashed with the images' digests.

SHA-256 and not a faster hash: a client that could craft two prompts with equal hashes could be
served another tenant's KV, and beside packing the tokens the difference is small.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from engine.contracts.prefix_holder import HashChains
from engine.contracts.request import Request
from engine.contracts.request_spec import RequestSpec
from engine.images.image_input import ImageSpan

BlockHash = bytes
"""A hash of 32 bytes, equal in every process and on every host."""


@dataclass(slots=True)
class NamedPrefix:
    """Stands for a prompt of which a peer has sent nothing but hashes."""

    block_hashes: HashChains


Named: TypeAlias = Request | NamedPrefix
"""Blocks can be named of these."""


def root_hash(spec: RequestSpec) -> BlockHash:
    """Returns the hash that the first block of a prompt is chained to.

    The extra keys are here and nowhere else: everything of a request, besides its tokens, that its
    KV depends on or that must keep it apart.
    """
    kind = b"tandem/kv-block/1"
    if spec.adapter is not None:
        kind += b"+" + bytes.fromhex(spec.adapter.digest)
    return hashlib.sha256(kind + b"\0" + spec.cache_salt.encode()).digest()


def pack_tokens(token_ids: list[int]) -> bytes:
    """Packs tokens as little-endian int32, as block hashes and `NewRequestData` take them."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def hash_block_tokens(parent: BlockHash, packed_tokens: bytes) -> BlockHash:
    """Returns the hash of a full block. `packed_tokens` are the tokens of one full block, by
    `pack_tokens`."""
    return hashlib.sha256(parent + packed_tokens).digest()


def extend_block_hashes(request: Named, block_size: int) -> list[BlockHash]:
    """Hashes the full blocks of `request.all_token_ids` that have none yet; returns all hashes."""
    if isinstance(request, NamedPrefix):
        return request.block_hashes[block_size]
    hashes = request.block_hashes.get(block_size)
    if hashes is None:
        hashes = request.block_hashes[block_size] = []
    tokens = request.all_token_ids
    start = len(hashes) * block_size
    stop = len(tokens) // block_size * block_size
    if start >= stop:
        return hashes
    parent = hashes[-1] if hashes else root_hash(request.spec)
    packed = pack_tokens(tokens[start:stop])
    width = 4 * block_size
    images = request.spec.images
    for offset in range(0, len(packed), width):
        extra = image_keys(images, start + offset // 4, block_size) if images else b""
        parent = hash_block_tokens(parent, packed[offset : offset + width] + extra)
        hashes.append(parent)
    return hashes


def image_keys(images: Sequence[ImageSpan], first: int, block_size: int) -> bytes:
    """Returns what a block's KV depends on besides its tokens: the digests of images that it has
    tokens of, where in the block they begin, and their times in a video."""
    return b"".join(
        image.digest + _PLACE.pack(image.offset - first, image.rows, image.columns, *_times(image))
        for image in images
        if image.offset < first + block_size and image.end > first
    )


def _times(image: ImageSpan) -> tuple[int, int]:
    """Returns when a pair of frames is, or which it is of those that see each other: these have
    text between them."""
    return (2, image.first) if image.first else (image.joins, image.time)


_PLACE = struct.Struct("<5i")
