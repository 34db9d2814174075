"""Reads what `vision_config` and the processor of all of Qwen's towers say."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.images.vision_spec import PixelSpec
from engine.models.specs.towers.fields import TowerFile, is_odd_head, refuse


class QwenTower(msgspec.Struct):
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
    tokens_per_second: float = 2
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)


def checked(file: TowerFile, activation: str) -> QwenTower:
    """Returns `vision_config`. Raises `UnsupportedField`."""
    tower = file.section(QwenTower)
    side = round(tower.num_position_embeddings**0.5)
    faults = {
        "hidden_act": tower.hidden_act not in (None, activation),
        "in_channels": tower.in_channels != 3,
        "num_heads": is_odd_head(tower.hidden_size, tower.num_heads),
        "out_hidden_size": tower.out_hidden_size not in (None, file.text.hidden_size),
        "num_position_embeddings": side**2 != tower.num_position_embeddings,
    }
    refuse(faults, tower)
    return tower


def sizes(file: TowerFile, tower: QwenTower, patch_size: int) -> dict[str, Any]:
    """Returns what towers of all of these say alike."""
    pixels = _pixels(file, tower, patch_size)
    side = pixels.patch_size
    return {
        "depth": tower.depth,
        "hidden_size": tower.hidden_size,
        "intermediate_size": tower.intermediate_size,
        "num_heads": tower.num_heads,
        "out_hidden_size": file.text.hidden_size,
        "pixels": pixels,
        "patch_shape": (3, pixels.temporal_patch_size, side, side),
    }


def _pixels(file: TowerFile, tower: QwenTower, patch_size: int) -> PixelSpec:
    said = file.processor()
    plain = PixelSpec(patch_size=tower.patch_size or patch_size)
    found = msgspec.structs.replace(
        plain,
        merge_size=tower.spatial_merge_size,
        temporal_patch_size=tower.temporal_patch_size,
        min_pixels=said.min_pixels or said.sides.shortest_edge or plain.min_pixels,
        max_pixels=said.max_pixels or said.sides.longest_edge or plain.max_pixels,
    )
    return file.shades(said, found)
