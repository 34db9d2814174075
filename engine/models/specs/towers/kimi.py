"""MoonViT: the tower of Kimi K2.5 to K2.7, under Moonshot's names and transformers'. Source:
Kimi-VL (arXiv 2504.07491)."""

from __future__ import annotations

import msgspec

from engine.images.vision_spec import BlockSpec, PatchPositions, PatchRope, PixelSpec, VisionSpec
from engine.models.specs.base import UnsupportedField
from engine.models.specs.towers.fields import Rope, TowerFile, is_odd_head, refuse

_BLOCK = "vision_tower.encoder.blocks.{}"
_NAMES = {
    "patch": "vision_tower.patch_embed.proj",
    "positions": "vision_tower.patch_embed.pos_emb",
    "blocks.norm1": f"{_BLOCK}.norm0",
    "blocks.attn.qkv": f"{_BLOCK}.wqkv",
    "blocks.attn.proj": f"{_BLOCK}.wo",
    "blocks.norm2": f"{_BLOCK}.norm1",
    "blocks.mlp.up": f"{_BLOCK}.mlp.fc0",
    "blocks.mlp.down": f"{_BLOCK}.mlp.fc1",
    "norm": "vision_tower.encoder.final_layernorm",
    "merger.norm": "mm_projector.pre_norm",
    "merger.first": "mm_projector.proj.0",
    "merger.second": "mm_projector.proj.2",
}
_RENAMED = ((r"^vision_tower\.encoder\.patch_embed\.", "vision_tower.patch_embed."),)
"""transformers 5.24 writes it so."""
_PUBLISHED = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_hidden_layers": "num_hidden_layers",
    "vt_num_attention_heads": "num_attention_heads",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
}
_EPS, _IMAGE, _GREY = 1e-5, 163_605, (0.5, 0.5, 0.5)


class _Tower(msgspec.Struct):
    """`vision_config`, by transformers' names. What it leaves out is as K2.5 was published."""

    patch_size: int = 14
    pos_emb_height: int = 64
    pos_emb_width: int = 64
    num_attention_heads: int = 16
    num_hidden_layers: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    hidden_act: str = "gelu_pytorch_tanh"
    merge_kernel_size: tuple[int, int] = (2, 2)
    mm_projector_type: str = "patchmerger"
    projector_ln_eps: float = _EPS
    rope_parameters: Rope | None = None


class _Media(msgspec.Struct):
    """`media_proc_cfg`."""

    in_patch_limit: int = 16_384
    patch_limit_on_one_side: int = 512
    fixed_output_tokens: int | None = None
    image_mean: tuple[float, float, float] = _GREY
    image_std: tuple[float, float, float] = _GREY


def moonvit(file: TowerFile) -> VisionSpec:
    """Returns the tower. Raises `UnsupportedField`."""
    tower = file.section(_Tower, _PUBLISHED)
    faults = {
        "hidden_act": tower.hidden_act != "gelu_pytorch_tanh",
        "num_attention_heads": is_odd_head(tower.hidden_size, tower.num_attention_heads),
        "pos_emb_width": tower.pos_emb_width != tower.pos_emb_height,
        "merge_kernel_size": len(set(tower.merge_kernel_size)) != 1,
        "mm_projector_type": tower.mm_projector_type != "patchmerger",
    }
    refuse(faults, tower)
    table = (tower.pos_emb_height, tower.pos_emb_width)
    eps = file.whole.get("projection_layer_norm_eps") or tower.projector_ln_eps
    image = file.number("image_token_id", _IMAGE)
    return VisionSpec(
        names=_NAMES,
        renamed=_RENAMED,
        depth=tower.num_hidden_layers,
        hidden_size=tower.hidden_size,
        intermediate_size=tower.intermediate_size,
        num_heads=tower.num_attention_heads,
        out_hidden_size=file.text.hidden_size,
        pixels=_pixels(file, tower),
        block=BlockSpec(norm="layer", activation="gelu_pytorch_tanh", eps=_EPS),
        patch_shape=(3, tower.patch_size, tower.patch_size),
        has_patch_bias=True,
        positions=PatchPositions(shape=table, resample="cubic"),
        rope=PatchRope(pairs="adjacent", theta=(tower.rope_parameters or Rope()).rope_theta),
        has_final_norm=True,
        merger_eps=eps,
        image_token_id=file.number("media_placeholder_token_id", image),
    )


def _pixels(file: TowerFile, tower: _Tower) -> PixelSpec:
    said = file.processor()
    media = file.convert("media_proc_cfg", said.media_proc_cfg, _Media)
    if media.fixed_output_tokens is not None:
        raise UnsupportedField("fixed_output_tokens", "images of one number of tokens")
    found = PixelSpec(
        patch_size=tower.patch_size,
        merge_size=tower.merge_kernel_size[0],
        temporal_patch_size=1,
        fit="patches",
        max_patches=said.max_patches or media.in_patch_limit,
        longest_edge=(said.sides.max_height or media.patch_limit_on_one_side) * tower.patch_size,
        mean=media.image_mean,
        std=media.image_std,
    )
    return file.shades(said, found)
