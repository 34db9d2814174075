"""Bounds of sizes, and objects inside `config.json` that one family has."""

from __future__ import annotations

import msgspec

MOST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 14,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "n_routed_experts": 1 << 14,
    "moe_num_experts": 1 << 14,
    "max_position_embeddings": 1 << 28,
    "model_max_length": 1 << 28,
}
"""Sizes far above those of any model: beyond them memory would end before an error is raised."""


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
    gate_lower_bound: float | None = None
    use_full_rank_gate: bool = False


class KimiFields(msgspec.Struct, kw_only=True):
    """Holds what Kimi Linear says, as transformers and as Moonshot say it, and what Kimi K3 has
    besides."""

    linear_num_heads: int | None = None
    linear_head_dim: int | None = None
    linear_attn_config: LinearAttentionFields | None = None
    model_max_length: int | None = None
    mla_use_nope: bool | None = None
    num_experts_per_token: int | None = None
    moe_renormalize: bool | None = None
    num_expert_group: int | None = None
    moe_router_activation_func: str | None = None
    attn_res_block_size: int | None = None
    """Layers of a block; see `engine.layers.streams.attention_residual`."""
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None
    mla_use_output_gate: bool = False


class ScaledResiduals(KimiFields, kw_only=True):
    """Holds by how much MiniMax-Text-01 multiplies residuals, and what its blocks add to them, as
    its authors and as transformers say it."""

    attn_type_list: list[int] | None = None
    """It is 1 for a layer with attention, 0 for one with a state."""
    postnorm: bool | None = None
    layernorm_full_attention_alpha: float | None = None
    layernorm_full_attention_beta: float | None = None
    layernorm_linear_attention_alpha: float | None = None
    layernorm_linear_attention_beta: float | None = None
    layernorm_mlp_alpha: float | None = None
    layernorm_mlp_beta: float | None = None
    full_attn_alpha_factor: float | None = None
    full_attn_beta_factor: float | None = None
    linear_attn_alpha_factor: float | None = None
    linear_attn_beta_factor: float | None = None
    mlp_alpha_factor: float | None = None
    mlp_beta_factor: float | None = None
