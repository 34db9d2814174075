"""Families whose text part alone is served: tiny ones with a vision tower, as transformers writes
them."""

from __future__ import annotations

from typing import Any

from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from tests.engine.models.family import Family

_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
_TOWER |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
QWEN_TOWER |= {"out_hidden_size": 64}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
_NO_TOKENS: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
QWEN_TOKENS = {
    "image_token_id": 1000,
    "video_token_id": 1001,
    "vision_start_token_id": 1002,
    "vision_end_token_id": 1003,
}
"""Not in the vocabulary: no prompt of a test happens to have an image."""

IMAGE_FAMILIES = {
    "gemma3_images": Family(
        Gemma3ForConditionalGeneration,
        Gemma3Config,
        {
            "head_dim": 16,
            "sliding_window": 17,
            "query_pre_attn_scalar": 12,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        norm_center=0.0,
        vision=_TOWER,
        whole={"mm_tokens_per_image": 1, "image_token_index": 1000},
    ),
    "mistral3_images": Family(
        Mistral3ForConditionalGeneration,
        Mistral3Config,
        {"model_type": "mistral", "sliding_window": None, "head_dim": 24},
        shard_size="60KB",
        vision={**_TOWER, "model_type": "pixtral", "head_dim": 8},
        whole={"image_token_index": 1000, "tie_word_embeddings": False},
    ),
    "qwen2_5_images": Family(
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig,
        {**_NO_TOKENS, "rope_parameters": _MROPE},
        vision={**QWEN_TOWER, "fullatt_block_indexes": [0]},
        whole=QWEN_TOKENS,
    ),
    "qwen3_images_tied": Family(
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig,
        {"head_dim": 16, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        vision={**QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        whole={**QWEN_TOKENS, "tie_word_embeddings": True},
    ),
}
