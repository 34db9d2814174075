"""Families that share nearly all with another one, under names of their own."""

from __future__ import annotations

import math
from typing import Any

from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    BeamConfig,
    BeamForCausalLM,
    DeepseekV3ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Glm4MoeForCausalLM,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    HYV3Config,
    HYV3ForCausalLM,
    InternLM3Config,
    IQuestCoderConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SarvamMLAConfig,
    SarvamMoEConfig,
    SolarOpenConfig,
    SolarOpenForCausalLM,
)

from tests.engine.models.family import LATENT, YARN, Family
from tests.engine.models.image_families import QWEN_TOKENS, QWEN_TOWER

_NO_TOKENS = {"eos_token_id": 0, "pad_token_id": 0}
_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
_GROUPS = {**_EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
_SECTION = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}


def _published(name: str, **more: Any) -> dict[str, Any]:
    """Returns keys of config.json under which a family is published that transformers has as
    another one."""
    return {"architectures": [name], **more}


_LATENT_ONE_GROUP = {**LATENT, "n_group": 1, "topk_group": 1}
_DEEPSEEK_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}

NEARBY_FAMILIES = {
    "muse_glimmer": Family(
        MuseGlimmerForConditionalGeneration,
        MuseGlimmerConfig,
        {
            "head_dim": 16,
            "sliding_window": 17,
            "num_hidden_layers": 5,
            "output_multiplier": 2.0,
            "final_logit_softcapping": 1.0,
            "eos_token_id": None,
            "bos_token_id": None,
        },
        norm_center=0.0,
        seed=24,
        vision={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        whole={
            "image_token_id": 1000,
            "video_token_id": 1001,
            "out_hidden_size": 32,
            "projector_hidden_size": 32,
        },
    ),
    "beam": Family(
        BeamForCausalLM,
        BeamConfig,
        {
            "head_dim": 16,
            "sliding_window": 17,
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 4,
            "topk_group": 2,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "eos_token_id": None,
            "bos_token_id": None,
            "pad_token_id": None,
        },
    ),
    "afmoe": Family(
        AfmoeForCausalLM,
        AfmoeConfig,
        {
            **_NO_TOKENS,
            **_EXPERTS,
            "num_experts": 8,
            "num_shared_experts": 2,
            "num_dense_layers": 1,
            "route_scale": 1.3,
            "head_dim": 24,
            "num_hidden_layers": 4,
            "global_attn_every_n_layers": 2,
            "sliding_window": 17,
            "mup_enabled": True,
        },
        published={"route_norm": True, "score_func": "sigmoid", "n_group": 1, "topk_group": 1},
    ),
    "mistral4": Family(
        Mistral4ForCausalLM,
        Mistral4Config,
        {
            **_LATENT_ONE_GROUP,
            "q_lora_rank": 20,
            "rope_parameters": {**_DEEPSEEK_YARN, "llama_4_scaling_beta": 0.4},
        },
    ),
    "sarvam_mla": Family(
        DeepseekV3ForCausalLM,
        SarvamMLAConfig,
        {
            **_NO_TOKENS,
            **_LATENT_ONE_GROUP,
            "q_lora_rank": None,
            "rope_parameters": _DEEPSEEK_YARN,
        },
        published=_published(
            "SarvamMLAForCausalLM", num_experts=8, num_shared_experts=1, head_dim=32
        ),
    ),
    "telechat3": Family(
        LlamaForCausalLM,
        LlamaConfig,
        {
            **_NO_TOKENS,
            "head_dim": 24,
            "rope_parameters": {**YARN, "attention_factor": 1.0 + 0.07 * math.log(4.0)},
        },
        published=_published("TeleChat3ForCausalLM"),
    ),
    "exaone4": Family(
        Exaone4ForCausalLM,
        Exaone4Config,
        {
            **_NO_TOKENS,
            "head_dim": 24,
            "num_hidden_layers": 4,
            "sliding_window": 17,
            "sliding_window_pattern": "LLLG",
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
    ),
    "exaone4_without_windows": Family(
        Exaone4ForCausalLM,
        Exaone4Config,
        {
            **_NO_TOKENS,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "layer_types": ["full_attention"] * 3,
        },
    ),
    "dots1": Family(
        Dots1ForCausalLM,
        Dots1Config,
        {
            **_NO_TOKENS,
            **_GROUPS,
            "head_dim": 24,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
        },
    ),
    "solar_open": Family(
        SolarOpenForCausalLM,
        SolarOpenConfig,
        {**_NO_TOKENS, **_EXPERTS, "n_routed_experts": 8, "head_dim": 24, "rope_parameters": YARN},
    ),
    "ernie4_5_moe": Family(
        Ernie4_5_MoeForCausalLM,
        Ernie4_5_MoeConfig,
        {
            **_NO_TOKENS,
            "head_dim": 24,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 2,
            "tie_word_embeddings": False,
        },
    ),
    "hy_v3": Family(
        HYV3ForCausalLM,
        HYV3Config,
        {**_NO_TOKENS, **_EXPERTS, "num_experts": 8, "head_dim": 24, "router_scaling_factor": 1.7},
    ),
    "internlm3": Family(
        LlamaForCausalLM,
        InternLM3Config,
        {**_NO_TOKENS, "head_dim": 24},
        published=_published("InternLM3ForCausalLM", qkv_bias=False, bias=False),
    ),
    "iquestcoder": Family(
        LlamaForCausalLM,
        IQuestCoderConfig,
        {**_NO_TOKENS, "head_dim": 24, "num_key_value_heads": 1},
        published=_published("IQuestCoderForCausalLM", clip_qkv=None),
    ),
    "mimo": Family(
        Qwen2ForCausalLM,
        Qwen2Config,
        {**_NO_TOKENS, "head_dim": 24},
        published=_published("MiMoForCausalLM", num_nextn_predict_layers=1),
    ),
    "sarvam_moe": Family(
        Glm4MoeForCausalLM,
        SarvamMoEConfig,
        {
            **_NO_TOKENS,
            **_GROUPS,
            "head_dim": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
        published=_published(
            "SarvamMoEForCausalLM", num_experts=8, num_shared_experts=1, use_qkv_bias=False
        ),
    ),
    "qwen3_moe_images": Family(
        Qwen3VLMoeForConditionalGeneration,
        Qwen3VLMoeConfig,
        {
            **_EXPERTS,
            "num_experts": 8,
            "head_dim": 16,
            "rope_parameters": {**_SECTION, "mrope_interleaved": True},
        },
        vision={**QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        whole={**QWEN_TOKENS, "tie_word_embeddings": False},
    ),
    "glm4v_images": Family(
        Glm4vForConditionalGeneration,
        Glm4vConfig,
        {
            "eos_token_id": None,
            "bos_token_id": None,
            "pad_token_id": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [2, 1, 1],
                "partial_rotary_factor": 0.5,
            },
        },
        seed=22,
        vision={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 64,
            "image_size": 28,
        },
        whole={
            "image_token_id": 1000,
            "video_token_id": 1001,
            "image_start_token_id": 1002,
            "image_end_token_id": 1003,
            "video_start_token_id": 1004,
            "video_end_token_id": 1005,
        },
    ),
    "glm4_moe_images": Family(
        Glm4vMoeForConditionalGeneration,
        Glm4vMoeConfig,
        {
            **_GROUPS,
            "head_dim": 32,
            "n_shared_experts": 1,
            "rope_parameters": {**_SECTION, "partial_rotary_factor": 0.5},
        },
        vision={**QWEN_TOWER, "out_hidden_size": 64, "image_size": 28, "num_heads": 2},
        whole={**QWEN_TOKENS, "tie_word_embeddings": False},
    ),
}
