"""Gemma 4 12B has no tower: squares of 48 x 48 pixels are projected, one for each token, with
learned positions and norms between. All else is as Gemma 4 has it.
"""

from __future__ import annotations

import msgspec

from engine.images.vision_spec import BlockSpec, PatchPositions, PixelSpec, VisionSpec
from engine.models.specs.base import UnsupportedField
from engine.models.specs.towers.fields import TowerFile, refuse
from engine.models.specs.towers.gemma4 import in_prompts
from engine.models.specs.towers.gemma4_videos import with_gemma4_videos

_NAMES = {
    "shade_norm": "vision_embedder.patch_ln1",
    "patch": "vision_embedder.patch_dense",
    "patch_norm": "vision_embedder.patch_ln2",
    "positions": "vision_embedder.pos_embedding",
    "position_norm": "vision_embedder.pos_norm",
    "merger.first": "embed_vision.embedding_projection",
}
_RENAMED = (
    (r"^embed_vision\.(patch|pos)_", r"vision_embedder.\1_"),
    (r"^embed_vision\.multimodal_embedder\.", "embed_vision."),
    (r"pos_embedding$", "pos_embedding.weight"),
)
"""The first two are names of transformers, where it does not write those that are published."""
_EPS = 1e-5


class _Patches(msgspec.Struct):
    """`vision_config`. What it leaves out is as transformers completes it."""

    patch_size: int = 16
    pooling_kernel_size: int = 3
    mm_embed_dim: int = 3840
    mm_posemb_size: int = 1120
    output_proj_dims: int = 3840
    rms_norm_eps: float = 1e-6


def gemma4_patches(file: TowerFile) -> VisionSpec:
    """Returns what makes tokens of images. Raises `UnsupportedField`."""
    said = file.section(_Patches)
    refuse(
        {
            "pooling_kernel_size": said.pooling_kernel_size < 1,
            "output_proj_dims": said.output_proj_dims != said.mm_embed_dim,
        },
        said,
    )
    side = said.patch_size * said.pooling_kernel_size
    found = VisionSpec(
        names=_NAMES,
        renamed=_RENAMED,
        depth=0,
        hidden_size=said.mm_embed_dim,
        intermediate_size=0,
        num_heads=1,
        out_hidden_size=file.text.hidden_size,
        pixels=_pixels(file, said),
        block=BlockSpec(norm="layer", activation="gelu", eps=_EPS),
        patch_shape=(3 * side**2,),
        patch_order="pixels",
        has_shade_norm=True,
        has_patch_bias=True,
        has_patch_norm=True,
        has_position_norm=True,
        positions=PatchPositions(shape=(said.mm_posemb_size, 2), resample="pairs"),
        rope=None,
        merger="plain",
        merger_eps=said.rms_norm_eps,
        **in_prompts(file, "vision"),
    )
    return with_gemma4_videos(found, file, patches=said.pooling_kernel_size)


def _pixels(file: TowerFile, own: _Patches) -> PixelSpec:
    """Returns how images are prepared: a token is one patch, of as many pixels as the processor
    makes of several."""
    said = file.processor()
    count, merge = said.max_soft_tokens or 280, own.pooling_kernel_size
    if said.pooling_kernel_size not in (None, merge):
        raise UnsupportedField(
            "pooling_kernel_size", f"tokens of {said.pooling_kernel_size}² patches"
        )
    if not 1 <= count <= own.mm_posemb_size:
        raise UnsupportedField("max_soft_tokens", f"images of {count} tokens")
    found = PixelSpec(
        patch_size=own.patch_size * merge,
        merge_size=1,
        temporal_patch_size=1,
        fit="fill",
        most_tokens=count,
    )
    return msgspec.structs.replace(file.shades(said, found), mean=(0.0,) * 3, std=(1.0,) * 3)
