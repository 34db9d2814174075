"""The models that drafters of `parity.py` draft for: one for each kind of what layers keep."""

from __future__ import annotations

from typing import Any

from tests.drafts.draft_requests import EOS, MAX_LEN, VOCAB

LAYER: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "eos_token_id": EOS,
}
"""A layer of a Llama, of which drafters are made, too."""
_HYBRID = {
    **LAYER,
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
}

_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "attention": {**LAYER, "num_hidden_layers": 3, "num_nextn_predict_layers": 1},
    "gated_delta": {
        **_HYBRID,
        "architectures": ["Qwen3_5ForCausalLM"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "linear_conv_kernel_dim": 4,
        "mtp_num_hidden_layers": 1,
    },
    "kimi_delta": {
        **_HYBRID,
        **_LATENT,
        "architectures": ["KimiLinearForCausalLM"],
        "linear_num_heads": 2,
        "linear_head_dim": 4,
        "linear_conv_kernel_dim": 4,
    },
    "kimi_k3": {
        **_HYBRID,
        **_LATENT,
        "architectures": ["KimiK3ForCausalLM"],
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 2,
        "routed_expert_hidden_size": 16,
        "latent_moe_use_norm": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "num_heads": 2,
            "head_dim": 4,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
    },
    "mamba": {
        **_HYBRID,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "shared_intermediate_size": 48,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_head": 16,
        "mamba_d_state": 4,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "num_local_experts": 0,
    },
    "token_rows": {
        **LAYER,
        "architectures": ["DeepseekV4ForCausalLM"],
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 12,
        "o_groups": 2,
        "o_lora_rank": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "num_hash_layers": 1,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 6,
        "hc_eps": 1e-6,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 4,
        "sliding_window": 20,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 16,
        },
        "num_nextn_predict_layers": 1,
    },
    "short_conv": {
        **_HYBRID,
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "conv_L_cache": 4,
        "block_auto_adjust_ff_dim": False,
    },
    "lightning": {
        **_HYBRID,
        **_LATENT,
        "architectures": ["BailingMoeV2_5ForCausalLM"],
        "group_norm_size": 2,
        "num_nextn_predict_layers": 1,
    },
    "ling": {
        **_HYBRID,
        **_LATENT,
        "architectures": ["BailingMoeV3ForCausalLM"],
        "num_nextn_predict_layers": 1,
    },
    "nemotron": {
        **LAYER,
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "MEM*EM",
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 4,
        "n_groups": 2,
        "mamba_head_dim": 16,
        "ssm_state_size": 4,
        "conv_kernel": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "moe_latent_size": 16,
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": "*E",
    },
}
"""Maps what most layers keep to a model."""
TARGETS = tuple(CONFIGS)
_BESIDE_STATES = {"none", "planted", "ngram", "medusa"}
"""Drafters that keep nothing of a token: over each kind of states they are tried once."""
_WITH_HEADS = {"eagle", "eagle3", "draft_model"}
_NOT_FITTING = {
    "kimi_delta": {"mtp", *_WITH_HEADS},
    "kimi_k3": {"mtp", *_WITH_HEADS},
    "mamba": {"mtp"},
    "short_conv": {"mtp"},
    "token_rows": _WITH_HEADS,
    "lightning": _WITH_HEADS,
    "ling": _BESIDE_STATES | _WITH_HEADS,
    "nemotron": _BESIDE_STATES | _WITH_HEADS,
}
"""Maps a target to drafters that its family has none of: layers that predict ahead are read of few,
and beside latents, or rows of several tokens, no drafter has keys and values."""


def fits(target: str, method: str) -> bool:
    """Returns whether a drafter can draft for a target."""
    return method not in _NOT_FITTING.get(target, ())
