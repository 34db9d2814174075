"""Families whose layers attend to the tokens, or blocks of tokens, that an indexer chooses: fewer
than prompts have."""

from __future__ import annotations

from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    MiniMaxM3SparseForConditionalGeneration,
    MiniMaxM3VLConfig,
)

from tests.engine.models.family import LATENT, YARN, Family

_INDEXER = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 20}
_SPARSE = {
    **LATENT, **_INDEXER, "q_lora_rank": 20, "n_shared_experts": 1, "eos_token_id": 0,
    "pad_token_id": 0,
}  # fmt: skip

_BLOCKS = {
    "sparse_num_index_heads": 2, "sparse_index_dim": 16, "sparse_block_size": 16,
    "sparse_topk_blocks": 2, "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1],
    "sparse_init_block": 0, "sparse_score_type": "max", "sparse_disable_index_value": [0, 1, 1],
}  # fmt: skip
V4 = {
    "num_hidden_layers": 5, "num_key_value_heads": 1, "head_dim": 32, "qk_rope_head_dim": 8,
    "q_lora_rank": 20, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "o_groups": 2, "o_lora_rank": 12, "hc_sinkhorn_iters": 8, "sliding_window": 17,
    "layer_types": [
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        "compressed_sparse_attention", "heavily_compressed_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "index_n_heads": 16, "index_head_dim": 32, "index_topk": 6, "num_hash_layers": 1,
    "swiglu_limit": 0.4, "num_nextn_predict_layers": 0, "rope_parameters": dict(YARN),
}  # fmt: skip
"""DeepSeek-V4 with rows of 4 tokens, of which a token sees six, and of 16."""
M3_TOWER = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "patch_size": 14,
}  # fmt: skip

SPARSE_FAMILIES = {
    "deepseek_v32": Family(
        DeepseekV32ForCausalLM,
        DeepseekV32Config,
        {
            **_SPARSE,
            "index_topk": 18,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v4": Family(DeepseekV4ForCausalLM, DeepseekV4Config, V4),
    "minimax_m3": Family(
        MiniMaxM3SparseForConditionalGeneration,
        MiniMaxM3VLConfig,
        {
            "intermediate_size": 24,
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 32,
            "head_dim": 16,
            "rotary_dim": 8,
            "partial_rotary_factor": 0.5,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_layer_freq": [0, 1, 1],
            "sparse_attention_config": _BLOCKS,
            "swiglu_limit": 0.4,
            "eos_token_id": None,
            "bos_token_id": None,
        },
        norm_center=0.0,
        vision=M3_TOWER,
        whole={"image_token_index": 1000, "video_token_index": 1001, "projector_hidden_size": 64},
    ),
    "glm_moe_dsa": Family(
        GlmMoeDsaForCausalLM,
        GlmMoeDsaConfig,
        {**_SPARSE, "n_group": 1, "topk_group": 1},
    ),
    "glm_moe_dsa_shared": Family(
        GlmMoeDsaForCausalLM,
        GlmMoeDsaConfig,
        {
            **_SPARSE,
            "num_hidden_layers": 5,
            "indexer_types": ["full", "shared", "shared", "full", "shared"],
        },
    ),
}
