"""What the KV cache of one rank looks like."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.layout import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """One rank's cache: per layer `[num_blocks, 2, local_kv_heads, block_size, head_dim]`."""

    num_layers: int
    local_kv_heads: int
    block_size: int
    head_dim: int
    dtype: str

    @property
    def layer_block_bytes(self) -> int:
        return 2 * self.local_kv_heads * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * self.layer_block_bytes
