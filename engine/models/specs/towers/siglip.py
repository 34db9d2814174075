"""SigLIP: the tower of Gemma 3 (arXiv 2503.19786).

Each image becomes a square of one size and as many tokens, which see each other whatever their
order. The chat template writes <start_of_image> alone.
"""

from __future__ import annotations

import math

import msgspec

from engine.images.vision_spec import BlockSpec, PatchPositions, PixelSpec, VisionSpec
from engine.models.specs.base import UnsupportedField
from engine.models.specs.towers.fields import TowerFile, is_uneven, refuse

_LAYER = "vision_tower.encoder.layers.{}"
_NAMES = {
    "patch": "vision_tower.embeddings.patch_embedding",
    "positions": "vision_tower.embeddings.position_embedding",
    "blocks.norm1": f"{_LAYER}.layer_norm1",
    "blocks.attn.qkv": ",".join(f"{_LAYER}.self_attn.{name}_proj" for name in "qkv"),
    "blocks.attn.proj": f"{_LAYER}.self_attn.out_proj",
    "blocks.norm2": f"{_LAYER}.layer_norm2",
    "blocks.mlp.up": f"{_LAYER}.mlp.fc1",
    "blocks.mlp.down": f"{_LAYER}.mlp.fc2",
    "norm": "vision_tower.post_layernorm",
    "merger.norm": "multi_modal_projector.mm_soft_emb_norm",
    "merger.first": "multi_modal_projector.mm_input_projection",
}
_RENAMED = (
    (r"^vision_tower\.vision_model\.", "vision_tower."),
    (r"mm_input_projection_weight$", "mm_input_projection.weight"),
)
_IMAGE = 262_144
_MARKER = "<start_of_image>"
_FRAMED = f"\n\n{_MARKER}<image_soft_token><end_of_image>\n\n"


class _Tower(msgspec.Struct):
    """`vision_config`. What it leaves out is as transformers completes it."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6


def siglip(file: TowerFile) -> VisionSpec:
    """Returns the tower. Raises `UnsupportedField`."""
    tower = file.section(_Tower)
    side = tower.image_size // tower.patch_size
    num_tokens = file.number("mm_tokens_per_image", 256)
    row = math.isqrt(num_tokens)
    refuse(
        {
            "hidden_act": tower.hidden_act != "gelu_pytorch_tanh",
            "num_channels": tower.num_channels != 3,
            "num_attention_heads": is_uneven(tower.hidden_size, tower.num_attention_heads),
            "image_size": is_uneven(tower.image_size, tower.patch_size),
        },
        tower,
    )
    if row < 1 or row * row != num_tokens or side % row:
        raise UnsupportedField("mm_tokens_per_image", f"{num_tokens} tokens of {side}² patches")
    return VisionSpec(
        names=_NAMES,
        renamed=_RENAMED,
        depth=tower.num_hidden_layers,
        hidden_size=tower.hidden_size,
        intermediate_size=tower.intermediate_size,
        num_heads=tower.num_attention_heads,
        out_hidden_size=file.text.hidden_size,
        pixels=_pixels(file, tower, side // row),
        block=BlockSpec(norm="layer", activation="gelu_pytorch_tanh", eps=tower.layer_norm_eps),
        patch_shape=(3, tower.patch_size, tower.patch_size),
        has_patch_bias=True,
        positions=PatchPositions(shape=(side * side,), resample="cubic"),
        rope=None,
        has_final_norm=True,
        merger="pooled",
        merger_eps=tower.layer_norm_eps,
        image_token_id=file.number("image_token_index", file.number("image_token_id", _IMAGE)),
        sees_whole=True,
        marker=_MARKER,
        framed=_FRAMED,
    )


def _pixels(file: TowerFile, tower: _Tower, merge_size: int) -> PixelSpec:
    said = file.processor()
    if said.do_pan_and_scan:
        raise UnsupportedField("do_pan_and_scan", "images in several pieces")
    found = PixelSpec(
        patch_size=tower.patch_size,
        merge_size=merge_size,
        temporal_patch_size=1,
        fit="square",
        longest_edge=tower.image_size,
        resample="bilinear",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )
    return file.shades(said, found)
