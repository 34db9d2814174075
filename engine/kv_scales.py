"""The scales of an FP8 cache: what its numbers are multiplied by. Torch-free.

`engine.models.kv_scale_files` finds them before anything starts. Two nodes must have the same, so
their digest is part of the layout that they compare.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

HeadScales = tuple[float, ...]
"""One number for all KV heads of a layer, or one for each, of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVScaleTable:
    """Scales of keys and values by layer.

    Attributes:
        k, v: Numbers that float32 has; empty: all are 1.
        source: Says for the log where they come from.
        beside: The cache has them beside its numbers: there are none here.
    """

    k: tuple[HeadScales, ...] = ()
    v: tuple[HeadScales, ...] = ()
    source: str = "1.0"
    beside: bool = False

    def of_layer(self, layer: int, num_heads: int) -> tuple[HeadScales, HeadScales]:
        """Returns a number for each of all `num_heads` heads, for keys and for values."""
        if not self.k:
            return (1.0,) * num_heads, (1.0,) * num_heads
        keys, values = (
            scales * num_heads if len(scales) == 1 else scales
            for scales in (self.k[layer], self.v[layer])
        )
        return keys, values

    @property
    def digest(self) -> str:
        """Returns a text that is equal exactly for tables of equal numbers."""
        if self.beside:
            return "exponents"
        layers = [_shortest(scales) for scales in (*self.k, *self.v)]
        if all(scales == (1.0,) for scales in layers):
            return "1.0"
        packed = (struct.pack(f"<i{len(scales)}f", len(scales), *scales) for scales in layers)
        return xxhash.xxh3_64_hexdigest(b"".join(packed))


def _shortest(scales: HeadScales) -> HeadScales:
    return scales[:1] if len(set(scales)) == 1 else scales
