"""Says what a layer with heads keeps of a token."""

from __future__ import annotations

from engine.config import Dtype
from engine.head_sizes import HeadSizes
from kv_transfer.layout import Plane, attention_group


def planes_of_heads(heads: HeadSizes, dtype: Dtype) -> tuple[Plane, ...]:
    """Returns the planes of keys and of values."""
    group = attention_group(
        layers=(),
        heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        v_head_dim=heads.v_head_dim,
        dtype=dtype,
        block_size=1,
    )
    return group.planes
