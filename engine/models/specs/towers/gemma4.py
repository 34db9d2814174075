"""The tower of Gemma 4: each image keeps its shape and becomes up to 280 tokens.

In checkpoints whose text part says so, an image's tokens see each other in layers with a window.
The chat template writes <|image|> alone.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.images.vision_spec import BlockSpec, PatchPositions, PatchRope, PixelSpec, VisionSpec
from engine.models.specs.base import UnsupportedField
from engine.models.specs.towers.fields import TowerFile
from engine.models.specs.towers.gemma4_fields import Gemma4Tower, gemma4_tower
from engine.models.specs.towers.gemma4_videos import with_gemma4_videos

_LAYER = "vision_tower.encoder.layers.{}"
_NAMES = {
    "patch": "vision_tower.patch_embedder.input_proj",
    "positions": "vision_tower.patch_embedder.position_embedding_table",
    "blocks.norm1": f"{_LAYER}.input_layernorm",
    "blocks.attn.qkv": ",".join(f"{_LAYER}.self_attn.{name}_proj.linear" for name in "qkv"),
    "blocks.attn.q_norm": f"{_LAYER}.self_attn.q_norm",
    "blocks.attn.k_norm": f"{_LAYER}.self_attn.k_norm",
    "blocks.attn.proj": f"{_LAYER}.self_attn.o_proj.linear",
    "blocks.attn_norm": f"{_LAYER}.post_attention_layernorm",
    "blocks.norm2": f"{_LAYER}.pre_feedforward_layernorm",
    "blocks.mlp.gate": f"{_LAYER}.mlp.gate_proj.linear",
    "blocks.mlp.up": f"{_LAYER}.mlp.up_proj.linear",
    "blocks.mlp.down": f"{_LAYER}.mlp.down_proj.linear",
    "blocks.mlp_norm": f"{_LAYER}.post_feedforward_layernorm",
    "merger.standard": "vision_tower.std",
    "merger.first": "embed_vision.embedding_projection",
}
_RENAMED = (
    (r"position_embedding_table$", "position_embedding_table.weight"),
    (r"^vision_tower\.std_(bias|scale)$", r"vision_tower.std.\1"),
)
_IMAGE = 258_880
_MARKER = "<|image|>"
_FRAMED = f"<|image>{_MARKER}<image|>"
_GREY = (0.5, 0.5, 0.5)


def gemma4(file: TowerFile) -> VisionSpec:
    """Returns the tower. Raises `UnsupportedField`."""
    tower, rope = gemma4_tower(file)
    found = VisionSpec(
        names=_NAMES,
        renamed=_RENAMED,
        depth=tower.num_hidden_layers,
        hidden_size=tower.hidden_size,
        intermediate_size=tower.intermediate_size,
        num_heads=tower.num_attention_heads,
        out_hidden_size=file.text.hidden_size,
        pixels=_pixels(file, tower),
        block=BlockSpec(
            norm="rms",
            activation="gelu_pytorch_tanh",
            is_gated=True,
            has_bias=False,
            norms_heads=True,
            norms_outputs=True,
            is_clipped=tower.use_clipped_linears,
            eps=tower.rms_norm_eps,
        ),
        patch_shape=(3 * tower.patch_size**2,),
        patch_order="pixels",
        positions=PatchPositions(shape=(2, tower.position_embedding_size), resample="axes"),
        rope=PatchRope(pairs="apart", theta=rope.rope_theta),
        merger="scaled",
        merger_eps=tower.rms_norm_eps,
        standardizes=tower.standardize,
        **in_prompts(file, None),
    )
    return with_gemma4_videos(found, file)


def in_prompts(file: TowerFile, seen: str | None) -> dict[str, Any]:
    """Returns what of a tower is about prompts. `seen`: what an image's tokens see of it where the
    text part does not say."""
    text: dict[str, Any] = file.whole.get("text_config") or {}
    sees_whole = text.get("use_bidirectional_attention", seen) == "vision"
    return {
        "image_token_id": file.number("image_token_id", _IMAGE),
        "sees_whole": sees_whole,
        "sees_whole_in_windows": sees_whole,
        "marker": _MARKER,
        "framed": _FRAMED,
    }


def _pixels(file: TowerFile, tower: Gemma4Tower) -> PixelSpec:
    """Returns how images are prepared: shades are what the tower itself makes of them."""
    said = file.processor()
    count, merge = said.max_soft_tokens or 280, tower.pooling_kernel_size
    if said.pooling_kernel_size not in (None, merge):
        raise UnsupportedField(
            "pooling_kernel_size", f"tokens of {said.pooling_kernel_size}² patches"
        )
    if count < 1 or count * merge > tower.position_embedding_size:
        raise UnsupportedField("max_soft_tokens", f"images of {count} tokens")
    found = PixelSpec(
        patch_size=tower.patch_size,
        merge_size=merge,
        temporal_patch_size=1,
        fit="fill",
        most_tokens=count,
    )
    return msgspec.structs.replace(file.shades(said, found), mean=_GREY, std=_GREY)
