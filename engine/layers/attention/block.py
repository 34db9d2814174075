"""The attention block of a decoder: projections around `Attention`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from engine.layers.attention.layer import Attention, AttentionInputs
from engine.layers.linear import QKVParallelLinear, RowParallelLinear
from engine.layers.norm import RMSNorm
from engine.layers.residual import ResidualStream
from engine.layers.shard import CheckpointWeight, Shard
from kv_transfer.layout import heads_of_rank


class AttentionBlock(nn.Module):
    """Adds grouped-query attention to the residual stream.

    Args:
        num_heads, num_kv_heads: Of all ranks.
        bias: Queries, keys and values have one.
        head_norm: RMSNorm over each head of queries and keys, before RoPE.
        eps: Of those norms.
    """

    q_norm: RMSNorm | None
    k_norm: RMSNorm | None

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        shard: Shard,
        *,
        bias: bool,
        head_norm: bool,
        eps: float,
    ) -> None:
        super().__init__()
        _, local_heads = shard.part(num_heads)
        kv_heads = heads_of_rank(num_kv_heads, shard.tp.rank, shard.tp.size)
        self.eps = eps
        self.qkv_proj = QKVParallelLinear(
            hidden_size, head_dim, num_heads, num_kv_heads, kv_heads, shard, bias=bias
        )
        self.q_norm = RMSNorm(head_dim, eps, shard) if head_norm else None
        self.k_norm = RMSNorm(head_dim, eps, shard) if head_norm else None
        self.attention = Attention(local_heads, kv_heads.count, head_dim)
        self.o_proj = RowParallelLinear(num_heads * head_dim, hidden_size, shard)

    def forward(
        self, x: Tensor, stream: ResidualStream, kv_cache: Tensor, inputs: AttentionInputs
    ) -> None:
        """Attends for the normed `x`: [T, H]."""
        attended: Tensor = self.attention(
            self.qkv_proj(x),
            kv_cache,
            inputs,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.eps,
        )
        self.o_proj.add_to(stream, attended)

    def checkpoint_weights(self, prefix: str, *, is_fused: bool) -> Iterator[CheckpointWeight]:
        """Lists the checkpoint's tensors; `is_fused` says that queries, keys and values are one
        tensor.
        """
        names = ("qkv_proj",) if is_fused else ("q_proj", "k_proj", "v_proj")
        yield from self.qkv_proj.checkpoint_weights(*(f"{prefix}.{name}" for name in names))
        yield from self.o_proj.checkpoint_weights(f"{prefix}.o_proj")
        for norm, name in ((self.q_norm, "q_norm"), (self.k_norm, "k_norm")):
            if norm is not None:
                yield from norm.checkpoint_weights(f"{prefix}.{name}")
