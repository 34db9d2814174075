"""Describes Kimi Delta Attention, apart from the rest of its model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from engine.models.specs.linear import DeltaSpec


class KimiDeltaSpec(DeltaSpec, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Kimi Delta Attention: key channels decay each by itself.

    Attributes:
        is_narrow: Gates are projected through few numbers, as many as a head has.
        is_mixed: Of narrow gates, those of what is read are projected at once.
        floor: The least decay, a logarithm; 0: there is none.
    """

    module: ClassVar[str] = "self_attn"

    is_narrow: bool = True
    floor: float = 0.0
    is_mixed: bool = False

    def projections(self, hidden_size: int) -> Iterator[tuple[str, int, int]]:
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        yield "q_proj", hidden_size, 2 * keys + values
        narrow, decays = self.key_dim, self.value_heads * self.key_dim
        if self.is_mixed:
            yield "f_a_proj", hidden_size, narrow + values + self.value_heads
            yield "f_b_proj", narrow, decays
        elif self.is_narrow:
            yield "f_a_proj", hidden_size, 2 * narrow + self.value_heads
            yield "f_b_proj", narrow, decays
            yield "g_b_proj", narrow, values
        else:
            yield "f_proj", hidden_size, decays + values + self.value_heads
        yield "o_proj", values, hidden_size
