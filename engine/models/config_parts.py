"""Objects inside `config.json` that one family has."""

from __future__ import annotations

import msgspec


class SparseAttentionFields(msgspec.Struct):
    """Holds what MiniMax-M3 says of its indexers; lists have a number for each layer."""

    sparse_num_index_heads: int | None = None
    sparse_index_dim: int | None = None
    sparse_block_size: int | None = None
    sparse_topk_blocks: int | None = None
    sparse_local_block: int | None = None
    sparse_init_block: int = 0
    sparse_score_type: str = "max"
    sparse_attention_freq: list[int] | None = None
    sparse_disable_index_value: list[int] | None = None


class LinearAttentionFields(msgspec.Struct):
    """Holds what Kimi Linear says of layers that keep a state; layers count from 1."""

    kda_layers: list[int] | None = None
    full_attn_layers: list[int] | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    short_conv_kernel_size: int | None = None
