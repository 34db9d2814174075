"""The tower of MiniMax-M3: heads turn by time, row and column, and patches are projected before
they are merged. The chat template writes the placeholder alone.
"""

from __future__ import annotations

import msgspec

from engine.images.vision_spec import BlockSpec, PatchRope, PixelSpec, VisionSpec
from engine.models.specs.towers.fields import Rope, TowerFile, is_uneven, refuse
from engine.models.specs.towers.minimax_videos import with_minimax_videos

_TOWER = "vision_tower.vision_model"
_LAYER = f"{_TOWER}.encoder.layers.{{}}"
_NAMES = {
    "patch": f"{_TOWER}.embeddings.patch_embedding",
    "patch_norm": f"{_TOWER}.pre_layrnorm",
    "blocks.norm1": f"{_LAYER}.layer_norm1",
    "blocks.attn.qkv": ",".join(f"{_LAYER}.self_attn.{name}_proj" for name in "qkv"),
    "blocks.attn.proj": f"{_LAYER}.self_attn.out_proj",
    "blocks.norm2": f"{_LAYER}.layer_norm2",
    "blocks.mlp.up": f"{_LAYER}.mlp.fc1",
    "blocks.mlp.down": f"{_LAYER}.mlp.fc2",
    "merger.first": "multi_modal_projector.linear_1",
    "merger.second": "multi_modal_projector.linear_2",
    "merger.third": "patch_merge_mlp.linear_1",
    "merger.fourth": "patch_merge_mlp.linear_2",
}
_IMAGE = 200_025
_MARKER = "]<]image[>["
_FRAMED = f"]<]start of image[>[{_MARKER}]<]end of image[>["
_PROJECTOR = 6144


class _Tower(msgspec.Struct):
    """`vision_config`. What it leaves out is as transformers completes it."""

    hidden_size: int = 1280
    intermediate_size: int = 5120
    num_hidden_layers: int = 32
    num_attention_heads: int = 16
    num_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    rope_parameters: Rope | None = None


def minimax_m3(file: TowerFile) -> VisionSpec:
    """Returns the tower. Raises `UnsupportedField`."""
    tower = file.section(_Tower)
    refuse(
        {
            "hidden_act": tower.hidden_act != "gelu",
            "num_channels": tower.num_channels != 3,
            "num_attention_heads": is_uneven(tower.hidden_size, 2 * tower.num_attention_heads),
        },
        tower,
    )
    found = VisionSpec(
        names=_NAMES,
        depth=tower.num_hidden_layers,
        hidden_size=tower.hidden_size,
        intermediate_size=tower.intermediate_size,
        num_heads=tower.num_attention_heads,
        out_hidden_size=file.text.hidden_size,
        pixels=_pixels(file, tower),
        block=BlockSpec(norm="layer", activation="gelu", eps=tower.layer_norm_eps),
        patch_shape=(3, tower.temporal_patch_size, tower.patch_size, tower.patch_size),
        has_patch_norm=True,
        rope=PatchRope(pairs="thirds", theta=(tower.rope_parameters or Rope()).rope_theta),
        merger="twice",
        merger_size=file.number("projector_hidden_size", _PROJECTOR),
        image_token_id=file.number("image_token_index", file.number("image_token_id", _IMAGE)),
        marker=_MARKER,
        framed=_FRAMED,
    )
    return with_minimax_videos(found, file)


def _pixels(file: TowerFile, tower: _Tower) -> PixelSpec:
    said = file.processor()
    found = PixelSpec(
        patch_size=tower.patch_size,
        merge_size=tower.spatial_merge_size,
        temporal_patch_size=tower.temporal_patch_size,
        min_pixels=said.min_pixels or said.sides.shortest_edge or 4 * 28 * 28,
        max_pixels=said.max_pixels or said.sides.longest_edge or 451_584,
    )
    return file.shades(said, found)
