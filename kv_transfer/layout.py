"""The shape of a node's KV cache, as far as a peer must know it.

Per layer a rank holds `[num_blocks, 2, local_kv_heads, block_size, head_dim]` (2: keys, values).
Heads are numbered over all ranks of a node, so two nodes with different tensor-parallel sizes
agree on ranges of heads; tokens are numbered from the start of the prompt, so different block
sizes agree on ranges of tokens.
"""

from __future__ import annotations

import msgspec

from kv_transfer.errors import HandshakeMismatch

PROTOCOL_VERSION = 1
"""Raised with every change of a wire message. History: 1, the first."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class HeadRange(msgspec.Struct, frozen=True):
    """Global KV heads [start, start + count)."""

    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What one node says of its KV cache. `num_kv_heads` counts over all ranks."""

    model_hash: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    tp_size: int
    protocol_version: int = PROTOCOL_VERSION

    def heads_of_rank(self, rank: int) -> HeadRange:
        """Heads that `rank` stores. With more ranks than heads, neighbours share one head."""
        if self.tp_size <= self.num_kv_heads:
            count = self.num_kv_heads // self.tp_size
            return HeadRange(rank * count, count)
        return HeadRange(rank * self.num_kv_heads // self.tp_size, 1)

    @property
    def local_kv_heads(self) -> int:
        return self.heads_of_rank(0).count

    @property
    def head_block_bytes(self) -> int:
        """Bytes of the keys (or values) of one head in one block of one layer."""
        return self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer on one rank."""
        return 2 * self.local_kv_heads * self.head_block_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def check_compatible(self, peer: KVLayout) -> None:
        """Raises `HandshakeMismatch` naming the first field that must agree and does not."""
        for name in _MUST_AGREE:
            ours, theirs = getattr(self, name), getattr(peer, name)
            if ours != theirs:
                raise HandshakeMismatch(name, ours, theirs)


_MUST_AGREE = (
    "protocol_version",
    "model_hash",
    "dtype",
    "num_layers",
    "num_kv_heads",
    "head_dim",
)


def head_sources(ours: KVLayout, rank: int, peer: KVLayout) -> list[tuple[int, HeadRange]]:
    """Which ranks of `peer` hold the heads of our `rank`: [(peer rank, heads to pull)].

    Every head of ours appears exactly once. Where several peer ranks hold the same head
    (more ranks than heads), the lowest is asked.
    """
    wanted = ours.heads_of_rank(rank)
    sources: list[tuple[int, HeadRange]] = []
    covered = wanted.start
    for peer_rank in range(peer.tp_size):
        held = peer.heads_of_rank(peer_rank)
        if held.start <= covered < held.stop:
            stop = min(held.stop, wanted.stop)
            sources.append((peer_rank, HeadRange(covered, stop - covered)))
            covered = stop
            if covered == wanted.stop:
                break
    return sources
