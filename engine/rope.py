"""The scalings of rotary frequencies that checkpoints ask for. Torch-free; `engine.layers.rotary`
computes with them."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, tag="llama3"):
    """Llama 3's frequency-dependent scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class LongRope(msgspec.Struct, frozen=True, kw_only=True, tag="longrope"):
    """Scaling by a factor for each pair (`rope_type: longrope`, or `su`).

    Attributes:
        factors: [head_dim / 2], which each pair turns slower.
        attention_factor: Multiplies cosines and sines.
    """

    factors: tuple[float, ...]
    attention_factor: float


AnyRopeScaling: TypeAlias = RopeScaling | LongRope
