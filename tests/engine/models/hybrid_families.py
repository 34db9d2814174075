"""Families of which most layers keep a state instead of keys and values."""

from __future__ import annotations

from transformers import (
    BailingHybridConfig,
    BailingHybridForCausalLM,
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Lfm3Config,
    Lfm3ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.engine.models.family import LATENT, Family
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

_GRANITE = {
    "num_hidden_layers": 4, "head_dim": 24,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "shared_intermediate_size": 48,
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
    "logits_scaling": 2.0, "intermediate_size": 24, "num_experts_per_tok": 3,
}  # fmt: skip

_NEMOTRON = {
    "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8,
    "time_step_min": 1e-9,
}  # fmt: skip

_LFM = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}


_KIMI = {
    **LATENT, "num_hidden_layers": 4, "layer_types": _HYBRID["layer_types"],
    "linear_head_dim": 8, "linear_num_heads": 4, "num_experts": 8, "n_group": 1, "topk_group": 1,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_KIMI_PUBLISHED = {
    "linear_attn_config": {
        "kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 4, "head_dim": 8,
        "short_conv_kernel_size": 3,
    },
    "layer_types": None, "mlp_layer_types": None, "first_k_dense_replace": 1,
    "linear_head_dim": 3, "linear_num_heads": 3, "linear_conv_kernel_dim": 7,
    "mla_use_nope": True, "moe_router_activation_func": "sigmoid", "head_dim": 72,
}  # fmt: skip

_LING = {
    **LATENT, "num_hidden_layers": 4, "layer_types": _HYBRID["layer_types"], "head_dim": 8,
    "pad_token_id": 0, "eos_token_id": 0, "num_local_experts": 8,
}  # fmt: skip

_OLMO = {
    "num_hidden_layers": 4, "layer_types": _HYBRID["layer_types"], "num_key_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def _kinds(pattern: str) -> list[str]:
    """Returns a name for each layer, by the letters of Nemotron-H."""
    names = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
    return [names[letter] for letter in pattern]


_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8}

HYBRID_FAMILIES = {
    "bamba": Family(
        BambaForCausalLM,
        BambaConfig,
        {**_MAMBA, "num_hidden_layers": 4, "attn_layer_indices": [2], "mamba_n_groups": 2},
    ),
    "falcon_h1": Family(
        FalconH1ForCausalLM,
        FalconH1Config,
        {
            **_MAMBA,
            "mamba_d_ssm": 128,
            "mamba_n_groups": 2,
            "lm_head_multiplier": 0.3,
            "embedding_multiplier": 2.5,
            "mlp_multipliers": [0.6, 0.7],
            "key_multiplier": 0.4,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.8,
            "ssm_multipliers": [0.7, 0.5, 1.3, 0.9, 1.1],
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.6,
        },
    ),
    "falcon_h1_normed": Family(
        FalconH1ForCausalLM,
        FalconH1Config,
        {
            **_MAMBA,
            "mamba_d_ssm": 128,
            "mamba_n_groups": 1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "ssm_out_multiplier": 0.6,
        },
    ),
    "granite_hybrid": Family(
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        {
            **_GRANITE,
            "num_local_experts": 8,
            "mamba_n_groups": 1,
            "mamba_conv_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granite_hybrid_dense": Family(
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        {
            **_GRANITE,
            "num_local_experts": 0,
            "mamba_n_groups": 2,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "position_embedding_type": "rope",
        },
        published={"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    ),
    "lfm2": Family(
        Lfm2ForCausalLM,
        Lfm2Config,
        {**_LFM, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3},
    ),
    "lfm2_moe": Family(
        Lfm2MoeForCausalLM,
        Lfm2MoeConfig,
        {
            **_LFM,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "lfm3": Family(
        Lfm3ForCausalLM,
        Lfm3Config,
        {
            "num_hidden_layers": 5,
            "head_dim": 24,
            "sliding_window": 17,
            "conv_L_cache": 4,
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "layer_types": ["conv", "sliding_attention", "conv", "full_attention", "conv"],
        },
    ),
    "nemotron_h": Family(
        NemotronHForCausalLM,
        NemotronHConfig,
        {
            **_NEMOTRON,
            "layers_block_type": _kinds("ME*-MEM"),
            "n_groups": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 48,
            "moe_latent_size": 32,
            "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron_h_dense": Family(
        NemotronHForCausalLM,
        NemotronHConfig,
        {
            **_NEMOTRON,
            "layers_block_type": _kinds("M-M*-M-"),
            "n_groups": 1,
            "use_conv_bias": False,
        },
        published={"hybrid_override_pattern": "M-M*-M-", "layers_block_type": None},
    ),
    "kimi_linear": Family(
        KimiLinearForCausalLM,
        KimiLinearConfig,
        {**_KIMI, "mlp_layer_types": ["dense", *["sparse"] * 3]},
        seed=23,
    ),
    "kimi_linear_published": Family(
        KimiLinearForCausalLM,
        KimiLinearConfig,
        {**_KIMI, "q_lora_rank": 20, "linear_conv_kernel_dim": 3, "n_group": 4, "topk_group": 2},
        published=_KIMI_PUBLISHED,
        seed=23,
    ),
    "ling3": Family(
        BailingHybridForCausalLM,
        BailingHybridConfig,
        # A chunk of transformers subtracts sums of decays, which must not be large to be exact.
        {**_LING, "kda_lower_bound": -0.5},
    ),
    "ling3_published": Family(
        BailingHybridForCausalLM,
        BailingHybridConfig,
        {**_LING, "q_lora_rank": 20, "kda_safe_gate": False, "num_mtp_layers": 0},
        published={
            "architectures": ["BailingMoeV3ForCausalLM"],
            "layer_types": None,
            "layer_group_size": 3,
            "no_kda_lora": True,
            "expert_swiglu_limit_list": [0.0] * 4,
            "moe_shared_expert_intermediate_size": 24,
            "score_function": "sigmoid",
            "gated_attention_proj_granularity_type": "head_wise",
        },
        seed=22,
    ),
    "olmo_hybrid": Family(
        OlmoHybridForCausalLM,
        OlmoHybridConfig,
        {**_OLMO, "rope_parameters": {"rope_theta": None, "rope_type": "default"}},
        cuts_convolutions=True,
        seed=22,
    ),
    "olmo_hybrid_rotates": Family(
        OlmoHybridForCausalLM,
        OlmoHybridConfig,
        {**_OLMO, "linear_value_head_dim": 8, "linear_allow_neg_eigval": False},
        seed=24,
    ),
    "qwen3_next": Family(
        Qwen3NextForCausalLM, Qwen3NextConfig, {**_HYBRID, **_EXPERTS}, norm_center=0.0, seed=22
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
