"""Families whose layers have heads of several kinds."""

from __future__ import annotations

from transformers import (
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LagunaConfig,
    LagunaForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    Step3p7Config,
    Step3p7ForConditionalGeneration,
)

from tests.engine.models.family import YARN, Family

_NO_TOKENS = {"eos_token_id": 0, "pad_token_id": 0}
_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
_FULL, _WINDOW = "full_attention", "sliding_attention"

_LAGUNA = {
    **_NO_TOKENS,
    **_EXPERTS,
    "num_experts": 10,
    "shared_expert_intermediate_size": 32,
    "moe_routed_scaling_factor": 1.5,
    "head_dim": 16,
    "num_attention_heads_per_layer": [4, 8, 8, 4],
    "num_hidden_layers": 4,
    "layer_types": [_FULL, _WINDOW] * 2,
    "sliding_window": 17,
    "rope_parameters": {
        _FULL: {**YARN, "partial_rotary_factor": 0.5},
        _WINDOW: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
    },
}

_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "sliding_window": 17,
    "num_hidden_layers": 4,
    "layer_types": [_WINDOW, _FULL, _WINDOW, _FULL],
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
}

LAYERED_FAMILIES = {
    "gemma3n": Family(
        Gemma3nForCausalLM,
        Gemma3nTextConfig,
        {
            "head_dim": 16,
            "sliding_window": 17,
            "num_hidden_layers": 6,
            "layer_types": [_WINDOW, _FULL, _WINDOW] * 2,
            "num_kv_shared_layers": 3,
            "altup_num_inputs": 3,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.95, 0.6, 0.0, 0.0, 0.9, 0.0],
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 60,
        },
        seed=22,
    ),
    "gemma4": Family(Gemma4ForCausalLM, Gemma4TextConfig, _GEMMA4),
    "gemma4_apart": Family(
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        {**_GEMMA4, "attention_k_eq_v": False, "global_head_dim": 40, "num_hidden_layers": 2}
        | {"layer_types": [_WINDOW, _FULL], "tie_word_embeddings": False},
    ),
    "gemma4_experts": Family(
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        {**_GEMMA4, "enable_moe_block": True, "num_experts": 10, "top_k_experts": 3}
        | {"moe_intermediate_size": 24},
    ),
    "gemma4_shared": Family(
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        {**_GEMMA4, "attention_k_eq_v": False, "num_hidden_layers": 6, "num_kv_shared_layers": 3}
        | {"layer_types": [_WINDOW, _FULL, _WINDOW] * 2, "num_key_value_heads": 1}
        | {"use_double_wide_mlp": True, "num_global_key_value_heads": None}
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 101},
    ),
    "laguna": Family(LagunaForCausalLM, LagunaConfig, _LAGUNA),
    "laguna_gated_by_element": Family(
        LagunaForCausalLM,
        LagunaConfig,
        {**_LAGUNA, "gating": "per-element", "num_hidden_layers": 2}
        | {"num_attention_heads_per_layer": [4, 8], "layer_types": [_FULL, _WINDOW]},
    ),
    "step3p7": Family(
        Step3p7ForConditionalGeneration,
        Step3p7Config,
        {
            **_NO_TOKENS,
            **_EXPERTS,
            "head_dim": 16,
            "num_sliding_attention_heads": 8,
            "n_routed_experts": 10,
            "share_expert_dim": 32,
            "moe_router_scaling_factor": 1.5,
            "sliding_window": 17,
            "num_hidden_layers": 4,
            "layer_types": [_FULL, _WINDOW] * 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "swiglu_limits": [None, None, 0.3, 0.2],
            "swiglu_limits_shared": [None, 0.2, None, 0.3],
            "rope_parameters": {
                _FULL: {**YARN, "partial_rotary_factor": 0.5},
                _WINDOW: {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        norm_center=0.0,
        vision={"width": 16, "heads": 2, "layers": 1, "image_size": 28, "patch_size": 14},
        whole={"tie_word_embeddings": False},
    ),
    "mimo_v2": Family(
        MiMoV2FlashForCausalLM,
        MiMoV2FlashConfig,
        {
            **_NO_TOKENS,
            **_EXPERTS,
            "n_routed_experts": 10,
            "num_attention_heads": 8,
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 17,
            "num_hidden_layers": 4,
            "layer_types": [_FULL, _WINDOW, _WINDOW, _FULL],
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}
                for kind, theta in ((_FULL, 5_000_000.0), (_WINDOW, 10_000.0))
            },
        },
    ),
}
