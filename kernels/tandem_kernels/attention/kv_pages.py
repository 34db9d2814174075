"""A layer's keys and values in the pages of its cache.

Where both are of one width the cache is a tensor [N, 2, Hkv, B, D]. Else a page has the keys of all
heads and behind them the values of all heads, and `KVPages` has a view of each:

    page | keys [Hkv, B, D] | values [Hkv, B, Dv] |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVPages:
    """Keys and values of different widths.

    Attributes:
        k: [N, Hkv, B, D], rows of a head adjacent.
        v: [N, Hkv, B, Dv], in the same pages.
    """

    k: Tensor
    v: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.k.dtype

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def is_cuda(self) -> bool:
        return self.k.is_cuda

    def view(self, dtype: torch.dtype) -> KVPages:
        """Returns the same bytes as numbers of another type."""
        return KVPages(self.k.view(dtype), self.v.view(dtype))


PagedKV: TypeAlias = Tensor | KVPages


class PageSizes(NamedTuple):
    """Says what pages hold of a layer, in heads of this rank, tokens and numbers."""

    num_kv_heads: int
    block_size: int
    key_dim: int
    value_dim: int


def sizes_of(kv_cache: PagedKV) -> PageSizes:
    if isinstance(kv_cache, KVPages):
        _, heads, block_size, width = kv_cache.k.shape
        return PageSizes(heads, block_size, width, kv_cache.v.shape[3])
    _, _, heads, block_size, width = kv_cache.shape
    return PageSizes(heads, block_size, width, width)


def strides_of(kv_cache: PagedKV) -> tuple[int, int, int]:
    """Returns the steps from a block to the next, from keys to values, and from one head's keys to
    the next's."""
    if isinstance(kv_cache, KVPages):
        keys, values = kv_cache.k, kv_cache.v
        behind = int(values.storage_offset()) - int(keys.storage_offset())
        return keys.stride(0), behind, keys.stride(1)
    block, value, head = kv_cache.stride()[:3]
    return block, value, head


def apart(kv_cache: PagedKV) -> KVPages:
    """Returns keys and values, whatever their widths."""
    return kv_cache if isinstance(kv_cache, KVPages) else KVPages(*kv_cache.unbind(1))


def first_of(kv_cache: PagedKV) -> Tensor:
    """Returns what begins where the pages do, for kernels that find the rest by strides."""
    return kv_cache.k if isinstance(kv_cache, KVPages) else kv_cache
