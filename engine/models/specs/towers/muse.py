"""The tower of Muse Glimmer: windows of 32 x 32 patches in three layers of four, and a token for
each 28 x 28 pixels, normed as embeddings of text are. The chat template writes <|patch|> alone.
"""

from __future__ import annotations

import msgspec

from engine.images.vision_spec import BlockSpec, PatchPositions, PatchRope, PixelSpec, VisionSpec
from engine.models.specs.base import UnsupportedField
from engine.models.specs.towers.fields import Rope, TowerFile, is_odd_head, is_uneven, refuse
from engine.models.specs.towers.muse_videos import with_muse_videos

_LAYER = "vision_tower.layers.{}"
_NAMES = {
    "patch": "vision_tower.patch_embedder.patch_embedding",
    "positions": "vision_tower.patch_embedder.position_embedding_table",
    "position_norm": "vision_tower.ln_pre",
    "blocks.norm1": f"{_LAYER}.norm1",
    "blocks.attn.qkv": ",".join(f"{_LAYER}.attn.{name}_proj" for name in "qkv"),
    "blocks.attn.proj": f"{_LAYER}.attn.proj",
    "blocks.norm2": f"{_LAYER}.norm2",
    "blocks.mlp.up": f"{_LAYER}.mlp.fc1",
    "blocks.mlp.down": f"{_LAYER}.mlp.fc2",
    "norm": "vision_tower.ln_post",
    "merger.first": "vision_adapter.fc1",
    "merger.second": "vision_adapter.fc2",
    "merger.third": "vision_projection",
}
_EPS, _GREY = 1e-5, (0.5, 0.5, 0.5)
_IMAGE, _MARKER = 200_092, "<|patch|>"
_FRAMED = f"<|image_start|>{_MARKER}<|image_end|>"


class _Tower(msgspec.Struct):
    """`vision_config`. What it leaves out is as transformers completes it."""

    patch_size: int = 14
    patch_temporal: int = 2
    merge_size: int = 2
    pos_emb_height: int = 32
    pos_emb_width: int = 32
    hidden_size: int = 1536
    intermediate_size: int = 8960
    num_hidden_layers: int = 50
    num_attention_heads: int = 16
    hidden_act: str = "gelu"
    layer_norm_eps: float = _EPS
    layer_types: tuple[str, ...] | None = None
    rope_parameters: Rope | None = None

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Returns the layers that see the whole image: the last one is among them."""
        if self.layer_types is not None:
            return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")
        last = self.num_hidden_layers - 1
        return tuple(i for i in range(last + 1) if (i + 1) % 4 == 0 or i == last)


def muse_glimmer(file: TowerFile) -> VisionSpec:
    """Returns the tower. Raises `CheckpointError`, `UnsupportedField`."""
    tower = file.section(_Tower)
    merged = tower.hidden_size * tower.merge_size**2
    refuse(
        {
            "hidden_act": tower.hidden_act != "gelu",
            "layer_norm_eps": tower.layer_norm_eps != _EPS,
            "num_attention_heads": is_odd_head(tower.hidden_size, tower.num_attention_heads),
            "pos_emb_height": is_uneven(tower.pos_emb_height, tower.merge_size),
            "pos_emb_width": tower.pos_emb_width != tower.pos_emb_height,
            "hidden_size": merged != file.number("out_hidden_size", 6144),
        },
        tower,
    )
    if (activation := file.whole.get("projector_hidden_act", "gelu")) != "gelu":
        raise UnsupportedField("projector_hidden_act", f"a projector with {activation!r}")
    found = VisionSpec(
        names=_NAMES,
        depth=tower.num_hidden_layers,
        hidden_size=tower.hidden_size,
        intermediate_size=tower.intermediate_size,
        num_heads=tower.num_attention_heads,
        out_hidden_size=file.text.hidden_size,
        pixels=_pixels(file, tower),
        block=BlockSpec(norm="layer", activation="gelu", eps=_EPS),
        patch_shape=(3 * tower.patch_temporal * tower.patch_size**2,),
        patch_order="frames",
        has_position_norm=True,
        positions=PatchPositions(shape=(tower.pos_emb_height**2,), resample="crossed"),
        rope=PatchRope(pairs="columns", theta=(tower.rope_parameters or Rope()).rope_theta),
        window_size=tower.pos_emb_height * tower.patch_size,
        full_layers=tower.full_layers,
        has_final_norm=True,
        merger="folded",
        merger_size=file.number("projector_hidden_size", 4096),
        merger_eps=file.text.eps,
        image_token_id=file.number("image_token_id", _IMAGE),
        marker=_MARKER,
        framed=_FRAMED,
    )
    return with_muse_videos(found, file)


def _pixels(file: TowerFile, tower: _Tower) -> PixelSpec:
    said = file.processor()
    found = PixelSpec(
        patch_size=tower.patch_size,
        merge_size=tower.merge_size,
        temporal_patch_size=tower.patch_temporal,
        fit="nearest",
        most_tokens=said.max_image_tokens or 4096,
        resample="lanczos",
        mean=_GREY,
        std=_GREY,
    )
    return file.shades(said, found)
