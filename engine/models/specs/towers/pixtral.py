"""Pixtral: the tower of Mistral Small 3.1 to 4, Ministral 3 and Mistral Medium 3.5.

Tokens of an image are in rows as the picture is: [IMG] for each, [IMG_BREAK] behind a row,
[IMG_END] behind the last. Positions are those of text.
"""

from __future__ import annotations

import msgspec

from engine.images.vision_spec import BlockSpec, PatchRope, PixelSpec, VisionSpec
from engine.models.specs.base import UnsupportedField
from engine.models.specs.towers.fields import Rope, TowerFile, is_odd_head, refuse, token_ids

_LAYER = "vision_tower.transformer.layers.{}"
_NAMES = {
    "patch": "vision_tower.patch_conv",
    "patch_norm": "vision_tower.ln_pre",
    "blocks.norm1": f"{_LAYER}.attention_norm",
    "blocks.attn.qkv": ",".join(f"{_LAYER}.attention.{name}_proj" for name in "qkv"),
    "blocks.attn.proj": f"{_LAYER}.attention.o_proj",
    "blocks.norm2": f"{_LAYER}.ffn_norm",
    "blocks.mlp.gate": f"{_LAYER}.feed_forward.gate_proj",
    "blocks.mlp.up": f"{_LAYER}.feed_forward.up_proj",
    "blocks.mlp.down": f"{_LAYER}.feed_forward.down_proj",
    "merger.norm": "multi_modal_projector.norm",
    "merger.strided": "multi_modal_projector.patch_merger.merging_layer",
    "merger.first": "multi_modal_projector.linear_1",
    "merger.second": "multi_modal_projector.linear_2",
}
_EPS = 1e-5
_IMAGE, _ROW_ENDS = 10, (12, 13)


class _Tower(msgspec.Struct):
    """`vision_config`. What it leaves out is as transformers completes it."""

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 1540
    patch_size: int = 14
    hidden_act: str = "gelu"
    head_dim: int | None = None
    rope_theta: float | None = None
    rope_parameters: Rope | None = None


def pixtral(file: TowerFile) -> VisionSpec:
    """Returns the tower. Raises `UnsupportedField`."""
    tower, whole = file.section(_Tower), file.whole
    head_dim = tower.hidden_size // max(1, tower.num_attention_heads)
    faults = {
        "hidden_act": tower.hidden_act not in ("silu", "gelu"),
        "num_channels": tower.num_channels != 3,
        "num_attention_heads": is_odd_head(tower.hidden_size, tower.num_attention_heads),
        "head_dim": tower.head_dim not in (None, head_dim),
    }
    refuse(faults, tower)
    if whole.get("vision_feature_layer", -1) != -1:
        layer = whole["vision_feature_layer"]
        raise UnsupportedField("vision_feature_layer", f"outputs of the tower's layer {layer}")
    if whole.get("projector_hidden_act", "gelu") != "gelu":
        raise UnsupportedField("projector_hidden_act", str(whole["projector_hidden_act"]))
    theta = tower.rope_theta or (tower.rope_parameters or Rope()).rope_theta
    return VisionSpec(
        names=_NAMES,
        depth=tower.num_hidden_layers,
        hidden_size=tower.hidden_size,
        intermediate_size=tower.intermediate_size,
        num_heads=tower.num_attention_heads,
        out_hidden_size=file.text.hidden_size,
        pixels=_pixels(file, tower),
        block=BlockSpec(
            norm="rms",
            activation="silu" if tower.hidden_act == "silu" else "gelu",
            is_gated=True,
            has_bias=False,
            eps=_EPS,
        ),
        patch_shape=(3, tower.patch_size, tower.patch_size),
        has_patch_norm=True,
        rope=PatchRope(pairs="shared", theta=theta),
        merger="strided",
        merger_eps=file.text.eps,
        has_merger_bias=bool(whole.get("multimodal_projector_bias")),
        image_token_id=file.number("image_token_index", file.number("image_token_id", _IMAGE)),
        row_end_ids=token_ids(file.folder, ("[IMG_BREAK]", "[IMG_END]"), _ROW_ENDS),
    )


def _pixels(file: TowerFile, tower: _Tower) -> PixelSpec:
    said = file.processor()
    size = said.sides
    if size.height != size.width:
        raise UnsupportedField("size", f"images in {size.height} x {size.width} pixels")
    found = PixelSpec(
        patch_size=tower.patch_size,
        merge_size=file.number("spatial_merge_size", 2),
        temporal_patch_size=1,
        fit="longest",
        longest_edge=size.longest_edge or size.height or tower.image_size,
    )
    return file.shades(said, found)
