"""Families of models that see images, tiny: their configurations, and what transformers' classes
are given for pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Glm46VConfig,
    Glm46VForConditionalGeneration,
    MiniMaxM3SparseForConditionalGeneration,
    MiniMaxM3VLConfig,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25Config
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25ForConditionalGeneration

from tests.engine.models.family import LATENT, SIZES
from tests.engine.models.sparse_families import SPARSE_FAMILIES

VOCAB = 128
IMAGE, START, END, VIDEO, ROW_END, LAST_ROW_END = 120, 121, 122, 123, 124, 125
MAX_LEN = 512
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_GREY = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
Inputs = dict[str, torch.Tensor]
Frames = list[np.ndarray]
"""Pictures, [height, width, 3] uint8."""


@dataclass(frozen=True)
class VisionFamily:
    """Describes a family.

    Attributes:
        inputs: Makes of pictures, normalised [3, height, width] float32, what the model is given.
        text, vision, whole: Of its configuration.
        files: Others of the checkpoint, by name.
        renamed: Names of tensors that transformers writes otherwise than they are published.
        types: The argument that tells tokens of images apart, if there is one.
        grids: Rows and columns of tokens that images may have; none: any.
        pairs_at_once: Of a video so many pairs of frames see each other.
        cache: Which cache transformers generates with, as it calls it; "": its usual one.
    """

    model: type[PreTrainedModel]
    config: type[PretrainedConfig]
    text: dict[str, Any]
    vision: dict[str, Any]
    inputs: Callable[[list[torch.Tensor], VisionFamily], Inputs]
    whole: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    types: str = ""
    patch_size: int = 14
    merge_size: int = 2
    shades: tuple[tuple[float, ...], tuple[float, ...]] = _CLIP
    row_ends: tuple[int, ...] = ()
    grids: tuple[tuple[int, int], ...] = ()
    cache: str = ""
    pairs_at_once: int = 1

    @property
    def unit(self) -> int:
        return self.patch_size * self.merge_size

    def make_config(self) -> PretrainedConfig:
        return self.config(text_config=self.text, vision_config=self.vision, **self.whole)

    def model_inputs(self, pictures: Frames) -> Inputs:
        """Returns what transformers' model is given for pictures."""
        return self.inputs([self.normalised(one) for one in pictures], self) if pictures else {}

    def normalised(self, picture: np.ndarray) -> torch.Tensor:
        """Returns [3, height, width] float32, as the reference processors have it."""
        scaled = (picture.astype(np.float64) * (1 / 255)).astype(np.float32)
        mean, std = (np.array(part, np.float32) for part in self.shades)
        return torch.from_numpy((scaled - mean) / std).permute(2, 0, 1)


def _cut(picture: torch.Tensor, patch: int, merge: int) -> torch.Tensor:
    """Returns [patches, 3, patch, patch], those of `merge` x `merge` together."""
    _, height, width = picture.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    cut = picture.view(3, rows, merge, patch, columns, merge, patch)
    return cut.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, patch, patch)


def _grids(pictures: list[torch.Tensor], patch: int) -> torch.Tensor:
    return torch.tensor([[1, one.shape[1] // patch, one.shape[2] // patch] for one in pictures])


def _in_frames(pictures: list[torch.Tensor], family: VisionFamily) -> Inputs:
    """Qwen and GLM: each patch twice, flat."""
    patch = family.patch_size
    patches = torch.cat([_cut(one, patch, family.merge_size) for one in pictures])
    frames = patches.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1)
    return {"pixel_values": frames, "image_grid_thw": _grids(pictures, patch)}


def _padded(pictures: list[torch.Tensor], family: VisionFamily) -> Inputs:
    """Pixtral: whole pictures, all in the size of the largest."""
    height, width = (max(one.shape[axis] for one in pictures) for axis in (1, 2))
    padded = [
        torch.nn.functional.pad(one, (0, width - one.shape[2], 0, height - one.shape[1]))
        for one in pictures
    ]
    sizes = torch.tensor([list(one.shape[1:]) for one in pictures])
    return {"pixel_values": torch.stack(padded), "image_sizes": sizes}


def _whole(pictures: list[torch.Tensor], family: VisionFamily) -> Inputs:
    """Gemma 3: squares of one size."""
    return {"pixel_values": torch.stack(pictures)}


def _in_rows(pictures: list[torch.Tensor], family: VisionFamily) -> Inputs:
    """Kimi: patches row by row."""
    patches = torch.cat([_cut(one, family.patch_size, 1) for one in pictures])
    return {"pixel_values": patches, "image_grid_thw": _grids(pictures, family.patch_size)}


def _by_frame(pictures: list[torch.Tensor], family: VisionFamily) -> Inputs:
    """Muse: patches row by row, each frame whole, flat."""
    patches = torch.cat([_cut(one, family.patch_size, 1) for one in pictures])
    frames = patches.unsqueeze(1).expand(-1, 2, -1, -1, -1).flatten(1)
    return {"pixel_values": frames, "image_grid_thw": _grids(pictures, family.patch_size)}


def _by_pixel(pictures: list[torch.Tensor], family: VisionFamily) -> Inputs:
    """Gemma 4: patches row by row with each pixel's channels together, and places; padded."""
    side = family.patch_size
    patches = [_cut(one, side, 1).permute(0, 2, 3, 1).flatten(1) for one in pictures]
    grids = [(one.shape[1] // side, one.shape[2] // side) for one in pictures]
    places = [torch.cartesian_prod(torch.arange(h), torch.arange(w)).flip(1) for h, w in grids]
    unit, most = family.merge_size**2, max(map(len, patches))
    most = -(-most // unit) * unit

    def padded(parts: list[torch.Tensor], value: float) -> torch.Tensor:
        pad = torch.nn.functional.pad
        return torch.stack([pad(one, (0, 0, 0, most - len(one)), value=value) for one in parts])

    return {"pixel_values": padded(patches, 0.0), "image_position_ids": padded(places, -1)}


_TEXT = SIZES | {"vocab_size": VOCAB, "max_position_embeddings": MAX_LEN}
_TEXT |= dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
_TURNS = {**_MROPE, "mrope_interleaved": True}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
_TOWER |= {"depth": 3}
_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 3,
}  # fmt: skip
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_QWEN: dict[str, Any] = {"whole": _TOKENS, "types": "mm_token_type_ids", "inputs": _in_frames}
_QWEN3_TEXT = {**_TEXT, "head_dim": 16, "rope_parameters": _TURNS}
_LAYERS = ["linear_attention", "linear_attention", "full_attention"]
_ROW_END_TOKENS = {
    str(ROW_END): {"content": "[IMG_BREAK]"}, str(LAST_ROW_END): {"content": "[IMG_END]"},
}  # fmt: skip

_GEMMA4_TEXT = {
    **_TEXT, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 2,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8, "hidden_size_per_layer_input": 0, "pad_token_id": 0,
}  # fmt: skip
_GEMMA4_TOWER = {
    **_SIZES, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 14, "pooling_kernel_size": 2,
    "position_embedding_size": 600,
}  # fmt: skip
_GEMMA4: dict[str, Any] = {
    "inputs": _by_pixel,
    "whole": {
        "image_token_id": IMAGE, "video_token_id": VIDEO, "boi_token_id": START,
        "eoi_token_id": END, "audio_token_id": 119, "audio_config": None,
    },
    "types": "mm_token_type_ids",
    "shades": ((0.0,) * 3, (1.0,) * 3),
}  # fmt: skip

FAMILIES = {
    "qwen2_5": VisionFamily(
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig,
        {**_TEXT, "rope_parameters": _MROPE},
        {**_TOWER, "fullatt_block_indexes": [1]},
        **_QWEN,
    ),
    "qwen3": VisionFamily(
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig,
        _QWEN3_TEXT,
        {**_TOWER, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 25},
        patch_size=16,
        **_QWEN,
    ),
    "qwen3_moe": VisionFamily(
        Qwen3VLMoeForConditionalGeneration,
        Qwen3VLMoeConfig,
        {**_QWEN3_TEXT, **_EXPERTS},
        {**_TOWER, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 16},
        patch_size=16,
        **_QWEN,
    ),
    "qwen3_5_moe": VisionFamily(
        Qwen3_5MoeForConditionalGeneration,
        Qwen3_5MoeConfig,
        {
            **_TEXT, **_EXPERTS, "head_dim": 32, "layer_types": _LAYERS,
            "shared_expert_intermediate_size": 32,
            "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "rope_parameters": {
                **_TURNS, "partial_rotary_factor": 0.375, "mrope_section": [2, 2, 2],
            },
        },
        {**_TOWER, "num_position_embeddings": 16},
        patch_size=16,
        **_QWEN,
    ),
    "pixtral": VisionFamily(
        Mistral3ForConditionalGeneration,
        Mistral3Config,
        {**_TEXT, "model_type": "mistral", "head_dim": 24, "sliding_window": None},
        {**_SIZES, "model_type": "pixtral", "head_dim": 16, "hidden_act": "silu",
         "patch_size": 14, "image_size": 308},
        _padded,
        whole={"image_token_index": IMAGE, "tie_word_embeddings": False},
        files={"tokenizer_config.json": {"added_tokens_decoder": _ROW_END_TOKENS}},
        row_ends=(ROW_END, LAST_ROW_END),
    ),
    "glm4v": VisionFamily(
        Glm4vMoeForConditionalGeneration,
        Glm4vMoeConfig,
        {
            **_TEXT, "head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 3,
            "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "n_group": 1, "topk_group": 1,
            "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5},
        },
        {**_TOWER, "image_size": 70},
        _in_frames,
        whole={"image_token_id": IMAGE, "video_token_id": VIDEO, "image_start_token_id": START,
               "image_end_token_id": END},
        types="mm_token_type_ids",
    ),
    "glm46v": VisionFamily(
        Glm46VForConditionalGeneration,
        Glm46VConfig,
        {
            **_TEXT, "model_type": "glm4v_text",
            "rope_parameters": {
                **_MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5,
            },
        },
        {**_TOWER, "model_type": "glm4v_vision", "image_size": 70},
        _in_frames,
        whole={"image_token_id": IMAGE, "video_token_id": VIDEO, "image_start_token_id": START,
               "image_end_token_id": END},
        types="mm_token_type_ids",
    ),
    "kimi": VisionFamily(
        Kimi_K25ForConditionalGeneration,
        Kimi_K25Config,
        {**_TEXT, **LATENT, "model_type": "deepseek_v3", "n_group": 1, "topk_group": 1,
         "q_lora_rank": 16},
        {**_SIZES, "pos_emb_height": 5, "pos_emb_width": 5},
        _in_rows,
        whole={"image_token_id": IMAGE, "projection_hidden_size": 32, "tie_word_embeddings": False},
        renamed=(
            (r"^language_model\.model\.blocks\.", "language_model.model.layers."),
            (r"^vision_tower\.encoder\.patch_embed\.", "vision_tower.patch_embed."),
            (r"^model\.mm_projector\.", "mm_projector."),
        ),
        shades=_GREY,
    ),
    "minimax_m3": VisionFamily(
        MiniMaxM3SparseForConditionalGeneration,
        MiniMaxM3VLConfig,
        {**_TEXT, **SPARSE_FAMILIES["minimax_m3"].changes},
        {**_SIZES, "patch_size": 14, "num_attention_heads": 1},
        _in_frames,
        whole={"image_token_index": IMAGE, "video_token_index": VIDEO, "projector_hidden_size": 40},
        files={"video_preprocessor_config.json": {"vision_segment_max_frames": 2}},
        pairs_at_once=2,
    ),
    "gemma4": VisionFamily(
        Gemma4ForConditionalGeneration,
        Gemma4Config,
        {**_GEMMA4_TEXT, "attention_k_eq_v": True, "use_bidirectional_attention": "vision"},
        {**_GEMMA4_TOWER, "standardize": True},
        grids=((5, 6), (2, 3), (1, 11)),
        **_GEMMA4,
    ),
    "gemma4_small": VisionFamily(
        Gemma4ForConditionalGeneration,
        Gemma4Config,
        {
            **_GEMMA4_TEXT, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB,
            "use_double_wide_mlp": True,
        },
        {**_GEMMA4_TOWER, "use_clipped_linears": True},
        **_GEMMA4,
    ),
    "gemma4_patches": VisionFamily(
        Gemma4UnifiedForConditionalGeneration,
        Gemma4UnifiedConfig,
        {**_GEMMA4_TEXT, "attention_k_eq_v": True},
        {"patch_size": 7, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 300,
         "output_proj_dims": 32},
        patch_size=14,
        merge_size=1,
        grids=((5, 6), (2, 3), (1, 11)),
        cache="static",
        **_GEMMA4,
    ),
    "muse": VisionFamily(
        MuseGlimmerForConditionalGeneration,
        MuseGlimmerConfig,
        {**_TEXT, "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 5,
         "output_multiplier": 0.5, "final_logit_softcapping": 8.0},
        {**_SIZES, "pos_emb_height": 4, "pos_emb_width": 4},
        _by_frame,
        whole={"image_token_id": IMAGE, "video_token_id": VIDEO, "out_hidden_size": 128,
               "projector_hidden_size": 40},
        shades=_GREY,
    ),
    "gemma3": VisionFamily(
        Gemma3ForConditionalGeneration,
        Gemma3Config,
        {
            **_TEXT, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 12,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        {**_SIZES, "patch_size": 14, "image_size": 168, "vision_use_head": False},
        _whole,
        whole={"mm_tokens_per_image": 9, "image_token_index": IMAGE},
        types="token_type_ids",
        merge_size=4,
        shades=_GREY,
        grids=((3, 3),),
    ),
}  # fmt: skip
