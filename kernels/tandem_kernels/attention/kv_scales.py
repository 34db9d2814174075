"""The scales of a quantised KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class KVScales:
    """Holds the factors of the numbers in one layer's cache, by KV head of this rank.

    Attributes:
        k, v: [Hkv] float32, contiguous, on the cache's device. A cache that keeps one vector for
            both has them alike.
    """

    k: Tensor
    v: Tensor


def pointers(scales: KVScales | None) -> tuple[Tensor | None, Tensor | None]:
    """Returns those of keys and of values, as kernels take them."""
    return (None, None) if scales is None else (scales.k, scales.v)
