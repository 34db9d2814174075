"""Families whose layers attend to the tokens that an indexer chooses: fewer than prompts have."""

from __future__ import annotations

from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
)

from tests.engine.models.family import LATENT, YARN, Family

_INDEXER = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 20}
_SPARSE = {
    **LATENT, **_INDEXER, "q_lora_rank": 20, "n_shared_experts": 1, "eos_token_id": 0,
    "pad_token_id": 0,
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
