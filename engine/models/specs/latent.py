"""Describes latent attention, apart from the rest of its model."""

from __future__ import annotations

import msgspec


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The sizes of latent attention; see `LatentSizes` of `latent_block.py`. Nodes
    compare its repr, which a new field must not change.

    Attributes:
        gated: What a head attends to is multiplied by a gate.
        gates_numbers: Each of its numbers has a gate of its own.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    scale: float
    gated: bool = False
    gates_numbers: bool = False

    @property
    def gates(self) -> int:
        """Returns the gates of a head."""
        if not self.gated:
            return 0
        return self.value if self.gates_numbers else 1
