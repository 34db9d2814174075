"""Families that are nearly another one: each has what is particular in it."""

from __future__ import annotations

from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tests.engine.models.family import LATENT, YARN, Family
from tests.engine.models.parity_cases import MAX_LEN

_NO_TOKENS = {"eos_token_id": 0, "pad_token_id": 0}
_KIMI_YARN = {
    "rope_type": "yarn", "rope_theta": 50_000.0, "factor": 8.0, "beta_fast": 1.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 24,
}  # fmt: skip

_LONG_FACTORS = [1.0, 1.2, 1.5, 2.0, 2.8, 4.0]
"""One for each pair that turns; the short ones are alike: `reference_models` says why."""

MORE_FAMILIES = {
    "phi4_mini": Family(
        Phi3ForCausalLM,
        Phi3Config,
        {
            **_NO_TOKENS,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": _LONG_FACTORS,
                "long_factor": _LONG_FACTORS,
            },
            "original_max_position_embeddings": 150,
            "tie_word_embeddings": True,
            "sliding_window": MAX_LEN,
        },
    ),
    "olmo3": Family(
        Olmo3ForCausalLM,
        Olmo3Config,
        {
            **_NO_TOKENS,
            "num_hidden_layers": 4,
            "sliding_window": 17,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "smollm3": Family(
        SmolLM3ForCausalLM, SmolLM3Config, {**_NO_TOKENS, "no_rope_layers": [1, 0, 1]}
    ),
    "granite_tied": Family(
        GraniteForCausalLM,
        GraniteConfig,
        {
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.15,
            "logits_scaling": 1.5,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4_5": Family(
        Ernie4_5ForCausalLM, Ernie4_5Config, {"head_dim": 24, "tie_word_embeddings": False}
    ),
    "glm4_without_biases": Family(
        Glm4ForCausalLM, Glm4Config, {**_NO_TOKENS, "head_dim": 24, "attention_bias": False}
    ),
    "seed_oss": Family(SeedOssForCausalLM, SeedOssConfig, {**_NO_TOKENS, "head_dim": 24}),
    "ministral3": Family(
        Ministral3ForCausalLM,
        Ministral3Config,
        {
            **_NO_TOKENS,
            "head_dim": 24,
            "rope_parameters": {
                **YARN,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "qwen3_moe_some_layers_tied": Family(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "head_dim": 24,
            "num_hidden_layers": 4,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "tie_word_embeddings": True,
        },
    ),
    "glm4_moe_lite": Family(
        Glm4MoeLiteForCausalLM,
        Glm4MoeLiteConfig,
        {
            **LATENT,
            **_NO_TOKENS,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "kimi_k2": Family(
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            **LATENT,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 16,
            "routed_scaling_factor": 2.827,
            "rope_parameters": _KIMI_YARN,
        },
        older_config=True,
        published={
            "model_type": "kimi_k2",
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0,
            "seq_aux": True,
        },
    ),
}
