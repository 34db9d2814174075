"""Towers of Qwen2.5-VL, Qwen3-VL and Qwen3.5.

Qwen2.5-VL             RMSNorm, gated feed-forward, windows
Qwen3-VL, with experts or without      LayerNorm, learned positions, "deepstack"
Qwen3.5, 3.6, 3.8      Qwen3-VL's without "deepstack"
"""

from __future__ import annotations

import msgspec

from engine.images.vision_spec import BlockSpec, PatchPositions, VisionSpec
from engine.models.specs.towers.fields import TowerFile
from engine.models.specs.towers.mrope import rope_axes
from engine.models.specs.towers.qwen_fields import QwenTower, checked, sizes
from engine.models.specs.towers.videos import with_qwen2_5_videos, with_qwen3_videos

_NAMES = {
    "patch": "visual.patch_embed.proj",
    "blocks.norm1": "visual.blocks.{}.norm1",
    "blocks.attn.qkv": "visual.blocks.{}.attn.qkv",
    "blocks.attn.proj": "visual.blocks.{}.attn.proj",
    "blocks.norm2": "visual.blocks.{}.norm2",
}
_NAMES_2_5 = _NAMES | {
    "blocks.mlp.gate": "visual.blocks.{}.mlp.gate_proj",
    "blocks.mlp.up": "visual.blocks.{}.mlp.up_proj",
    "blocks.mlp.down": "visual.blocks.{}.mlp.down_proj",
    "merger.norm": "visual.merger.ln_q",
    "merger.first": "visual.merger.mlp.0",
    "merger.second": "visual.merger.mlp.2",
}
_NAMES_3 = _NAMES | {
    "positions": "visual.pos_embed",
    "blocks.mlp.up": "visual.blocks.{}.mlp.linear_fc1",
    "blocks.mlp.down": "visual.blocks.{}.mlp.linear_fc2",
    "merger.norm": "visual.merger.norm",
    "merger.first": "visual.merger.linear_fc1",
    "merger.second": "visual.merger.linear_fc2",
    "taps.norm": "visual.deepstack_merger_list.{}.norm",
    "taps.first": "visual.deepstack_merger_list.{}.linear_fc1",
    "taps.second": "visual.deepstack_merger_list.{}.linear_fc2",
}
_IMAGE, _IMAGE_3_5 = 151_655, 248_056


def qwen2_5_vl(file: TowerFile) -> VisionSpec:
    """Returns the tower of Qwen2.5-VL. Raises `UnsupportedField`."""
    tower = checked(file, "silu")
    found = VisionSpec(
        names=_NAMES_2_5,
        block=BlockSpec(norm="rms", activation="silu", is_gated=True),
        window_size=tower.window_size,
        full_layers=tower.fullatt_block_indexes,
        image_token_id=file.number("image_token_id", _IMAGE),
        rope_axes=rope_axes(file, (16, 24, 24), is_interleaved=False),
        **sizes(file, tower, 14),
    )
    return with_qwen2_5_videos(found, file, tower.tokens_per_second)


def qwen3_vl(file: TowerFile) -> VisionSpec:
    """Returns the tower of Qwen3-VL. Raises `UnsupportedField`."""
    tower = checked(file, "gelu_pytorch_tanh")
    found = _learned(file, tower, (24, 20, 20), _IMAGE)
    found = msgspec.structs.replace(found, tapped_layers=tower.deepstack_visual_indexes)
    return with_qwen3_videos(found, file)


def qwen3_5(file: TowerFile) -> VisionSpec:
    """Returns the tower of Qwen3.5 and of those behind it. Raises `UnsupportedField`."""
    tower = checked(file, "gelu_pytorch_tanh")
    return with_qwen3_videos(_learned(file, tower, (11, 11, 10), _IMAGE_3_5), file, is_3_5=True)


def _learned(
    file: TowerFile, tower: QwenTower, section: tuple[int, int, int], image: int
) -> VisionSpec:
    count = tower.num_position_embeddings
    return VisionSpec(
        names=_NAMES_3,
        block=BlockSpec(norm="layer", activation="gelu_pytorch_tanh"),
        has_patch_bias=True,
        positions=PatchPositions(shape=(count,), resample="linear"),
        image_token_id=file.number("image_token_id", image),
        rope_axes=rope_axes(file, section, is_interleaved=True),
        **sizes(file, tower, 16),
    )
