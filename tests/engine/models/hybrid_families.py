"""Families of which most layers keep a state instead of keys and values."""

from __future__ import annotations

from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.engine.models.family import Family
from tests.engine.models.image_families import QWEN_TOKENS, QWEN_TOWER

_HYBRID = {
    "num_hidden_layers": 4, "head_dim": 24,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip

_MROPE = {
    "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 1], "mrope_interleaved": True,
}  # fmt: skip

HYBRID_FAMILIES = {
    "qwen3_next": Family(
        Qwen3NextForCausalLM, Qwen3NextConfig, {**_HYBRID, **_EXPERTS}, norm_center=0.0
    ),
    "qwen3_5_tied": Family(
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        {**_HYBRID, "tie_word_embeddings": True, "linear_conv_kernel_dim": 3},
        norm_center=0.0,
    ),
    "qwen3_5_moe_images": Family(
        Qwen3_5MoeForConditionalGeneration,
        Qwen3_5MoeConfig,
        {**_HYBRID, **_EXPERTS, "linear_num_value_heads": 2, "rope_parameters": _MROPE},
        norm_center=0.0,
        vision={**QWEN_TOWER, "num_position_embeddings": 16},
        whole=QWEN_TOKENS,
        stacks_experts=True,
    ),
}
