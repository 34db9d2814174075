"""The vision tower of a checkpoint, read from config.json and preprocessor_config.json.

    Qwen2_5_VLForConditionalGeneration    RMSNorm, gated feed-forward, windows
    Qwen3VLForConditionalGeneration       LayerNorm, learned positions, "deepstack"

Of other models that take images, the text part alone is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.images.vision_spec import PixelSpec, TowerKind, VisionSpec
from engine.models.json_file import read_json
from engine.models.specs.base import UnsupportedField

_KINDS: dict[str, TowerKind] = {
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5",
    "Qwen3VLForConditionalGeneration": "qwen3",
}
_ACTIVATIONS = {"qwen2_5": "silu", "qwen3": "gelu_pytorch_tanh"}
_SHADE = 1 / 255
_DEFAULT_SECTION = {"qwen2_5": (16, 24, 24), "qwen3": (24, 20, 20)}


class _Tower(msgspec.Struct):
    """`vision_config`. What it leaves out is as Qwen2.5-VL has been published."""

    depth: int = 32
    hidden_size: int = 1280
    num_heads: int = 16
    intermediate_size: int = 3420
    out_hidden_size: int | None = None
    hidden_act: str | None = None
    patch_size: int | None = None
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    in_channels: int = 3
    window_size: int = 112
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)


class _Size(msgspec.Struct, frozen=True):
    shortest_edge: int | None = None
    longest_edge: int | None = None


class _Processor(msgspec.Struct):
    """`preprocessor_config.json`."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    size: _Size = _Size()
    rescale_factor: float = _SHADE
    image_mean: tuple[float, float, float] = PixelSpec(patch_size=1).mean
    image_std: tuple[float, float, float] = PixelSpec(patch_size=1).std


def read_vision(
    folder: Path, architecture: str, whole: Mapping[str, Any], head_dim: int, hidden_size: int
) -> VisionSpec | None:
    """Returns the tower of a whole model; None: it has none that is here.

    Args:
        architecture: Of the whole model.
        whole: What its config.json says.
        head_dim, hidden_size: Of the text part.

    Raises:
        UnsupportedField: A field asks for what tandem does not have.
    """
    kind = _KINDS.get(architecture)
    if kind is None or "vision_config" not in whole:
        return None
    try:
        tower = msgspec.convert(whole["vision_config"], _Tower)
    except msgspec.ValidationError as error:
        raise UnsupportedField("vision_config", f"a vision tower of which {error}") from error
    _check(kind, tower, hidden_size)
    is_windowed = kind == "qwen2_5"
    return VisionSpec(
        kind=kind,
        depth=tower.depth,
        hidden_size=tower.hidden_size,
        intermediate_size=tower.intermediate_size,
        num_heads=tower.num_heads,
        out_hidden_size=hidden_size,
        pixels=_pixels(folder, tower, 14 if is_windowed else 16),
        window_size=tower.window_size if is_windowed else 0,
        full_layers=tower.fullatt_block_indexes if is_windowed else (),
        num_positions=0 if is_windowed else tower.num_position_embeddings,
        tapped_layers=() if is_windowed else tower.deepstack_visual_indexes,
        image_token_id=int(whole.get("image_token_id") or 151_655),
        rope_axes=_rope_axes(kind, whole, head_dim),
    )


def _check(kind: TowerKind, tower: _Tower, hidden_size: int) -> None:
    side = round(tower.num_position_embeddings**0.5)
    faults = {
        "hidden_act": tower.hidden_act not in (None, _ACTIVATIONS[kind]),
        "in_channels": tower.in_channels != 3,
        "num_heads": tower.num_heads < 1 or tower.hidden_size % (4 * max(1, tower.num_heads)) != 0,
        "out_hidden_size": tower.out_hidden_size not in (None, hidden_size),
        "num_position_embeddings": side**2 != tower.num_position_embeddings,
    }
    for name, is_wrong in faults.items():
        if is_wrong:
            value = getattr(tower, name)
            raise UnsupportedField(f"vision_config.{name}", f"a vision tower with {value!r}")


def _pixels(folder: Path, tower: _Tower, default_patch: int) -> PixelSpec:
    path = folder / "preprocessor_config.json"
    said = read_json(path, _Processor) if path.is_file() else _Processor()
    if said.rescale_factor != _SHADE:
        raise UnsupportedField("rescale_factor", f"shades of {said.rescale_factor}")
    defaults = PixelSpec(patch_size=tower.patch_size or default_patch)
    return msgspec.structs.replace(
        defaults,
        merge_size=tower.spatial_merge_size,
        temporal_patch_size=tower.temporal_patch_size,
        min_pixels=said.min_pixels or said.size.shortest_edge or defaults.min_pixels,
        max_pixels=said.max_pixels or said.size.longest_edge or defaults.max_pixels,
        mean=said.image_mean,
        std=said.image_std,
    )


def _rope_axes(kind: TowerKind, whole: Mapping[str, Any], head_dim: int) -> tuple[int, ...]:
    """Returns the axis of each pair of a head: in three blocks, or taken in turn as long as rows
    and columns last."""
    text = whole.get("text_config") or whole
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    section = tuple(rope.get("mrope_section") or _DEFAULT_SECTION[kind])
    if len(section) != 3 or sum(section) != head_dim // 2:
        raise UnsupportedField(
            "mrope_section", f"rotary positions {section} of heads with {head_dim} elements"
        )
    if kind == "qwen2_5":
        return tuple(axis for axis, count in enumerate(section) for _ in range(count))
    axes = [0] * (head_dim // 2)
    for axis in (1, 2):
        for pair in range(axis, min(3 * section[axis], len(axes)), 3):
            axes[pair] = axis
    return tuple(axes)
