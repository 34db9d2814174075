"""The heads of a layer's attention. Torch-free; crosses processes as JSON."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """Heads of one layer, over all ranks.

    Attributes:
        num_heads: Query heads, a multiple of the others.
        num_kv_heads: Heads of keys and values.
        head_dim: Numbers of a query and of a key.
        v_head_dim: Numbers of a value, and of what a head attends to.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    @classmethod
    def alike(cls, num_heads: int, num_kv_heads: int, head_dim: int) -> HeadSizes:
        """Returns heads whose values are as wide as their keys."""
        return cls(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=head_dim
        )
