"""The tower of GLM-4.1V, GLM-4.5V and GLM-4.6V, beside experts and beside dense layers."""

from __future__ import annotations

import math

import msgspec

from engine.images.vision_spec import BlockSpec, PatchPositions, PatchRope, PixelSpec, VisionSpec
from engine.models.specs.towers.fields import Rope, TowerFile, is_odd_head, refuse
from engine.models.specs.towers.mrope import rope_axes
from engine.models.specs.towers.videos import with_glm_videos

_BLOCK = "visual.blocks.{}"
_NAMES = {
    "patch": "visual.patch_embed.proj",
    "patch_norm": "visual.post_conv_layernorm",
    "positions": "visual.embeddings.position_embedding",
    "blocks.norm1": f"{_BLOCK}.norm1",
    "blocks.attn.qkv": f"{_BLOCK}.attn.qkv",
    "blocks.attn.proj": f"{_BLOCK}.attn.proj",
    "blocks.norm2": f"{_BLOCK}.norm2",
    "blocks.mlp.gate": f"{_BLOCK}.mlp.gate_proj",
    "blocks.mlp.up": f"{_BLOCK}.mlp.up_proj",
    "blocks.mlp.down": f"{_BLOCK}.mlp.down_proj",
    "norm": "visual.post_layernorm",
    "merger.strided": "visual.downsample",
    "merger.first": "visual.merger.proj",
    "merger.norm": "visual.merger.post_projection_norm",
    "merger.gate": "visual.merger.gate_proj",
    "merger.up": "visual.merger.up_proj",
    "merger.down": "visual.merger.down_proj",
}
_IMAGE, _IMAGE_OF_DENSE = 151_363, 151_343


class _Tower(msgspec.Struct):
    """`vision_config`. What it leaves out is as transformers completes it."""

    depth: int = 24
    hidden_size: int = 1536
    hidden_act: str = "silu"
    attention_bias: bool = False
    num_heads: int = 12
    in_channels: int = 3
    image_size: int = 336
    patch_size: int = 14
    rms_norm_eps: float = 1e-5
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    out_hidden_size: int = 4096
    intermediate_size: int = 13_696
    rope_parameters: Rope | None = None


def glm4v_dense(file: TowerFile) -> VisionSpec:
    """Returns the tower beside dense layers. Raises `UnsupportedField`."""
    return with_glm_videos(_glm4v(file, _IMAGE_OF_DENSE), file, is_dense=True)


def glm4v(file: TowerFile) -> VisionSpec:
    """Returns the tower beside experts. Raises `UnsupportedField`."""
    return with_glm_videos(_glm4v(file, _IMAGE), file, is_dense=False)


def _glm4v(file: TowerFile, image_token_id: int) -> VisionSpec:
    """Returns the tower. `image_token_id`: where config.json does not say."""
    tower = file.section(_Tower)
    faults = {
        "hidden_act": tower.hidden_act != "silu",
        "in_channels": tower.in_channels != 3,
        "num_heads": is_odd_head(tower.hidden_size, tower.num_heads),
        "out_hidden_size": tower.out_hidden_size != file.text.hidden_size,
    }
    refuse(faults, tower)
    side = tower.patch_size
    return VisionSpec(
        names=_NAMES,
        depth=tower.depth,
        hidden_size=tower.hidden_size,
        intermediate_size=tower.out_hidden_size,
        num_heads=tower.num_heads,
        out_hidden_size=tower.out_hidden_size,
        pixels=_pixels(file, tower),
        block=BlockSpec(
            norm="rms",
            activation="silu",
            is_gated=True,
            has_bias=False,
            has_qkv_bias=tower.attention_bias,
            eps=tower.rms_norm_eps,
        ),
        patch_shape=(3, tower.temporal_patch_size, side, side),
        has_patch_bias=True,
        has_patch_norm=True,
        positions=PatchPositions(shape=((tower.image_size // side) ** 2,), resample="cubic"),
        rope=PatchRope(theta=(tower.rope_parameters or Rope()).rope_theta),
        has_final_norm=True,
        merger="gated",
        merger_size=tower.intermediate_size,
        image_token_id=file.number("image_token_id", image_token_id),
        rope_axes=rope_axes(file, (8, 12, 12), is_interleaved=False),
    )


def _pixels(file: TowerFile, tower: _Tower) -> PixelSpec:
    """Returns how images are prepared: its processor counts the pixels of all frames that an image
    stands for."""
    said, frames = file.processor(), tower.temporal_patch_size
    least = said.sides.shortest_edge or 112 * 112
    found = PixelSpec(
        patch_size=tower.patch_size,
        merge_size=tower.spatial_merge_size,
        temporal_patch_size=frames,
        min_pixels=math.ceil(least / frames),
        max_pixels=(said.sides.longest_edge or 28 * 28 * 15_000) // frames,
        keeps_token=True,
    )
    return file.shades(said, found)
