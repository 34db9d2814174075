"""Describes latent attention, apart from the rest of its model."""

from __future__ import annotations

import msgspec


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of latent attention; see `engine.layers.attention.latent_block.LatentSizes`."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    scale: float
