"""Holds what a sparse layer keeps of a token: its latent row, or its keys and values, and a key by
which it is found.

    page | latents [B, L + R] | index keys [B, D] | scales [B] |
    page | keys [Hkv, B, D] | values [Hkv, B, Dv] | index keys [B, D] |

Index keys of latents are float32, or e4m3 numbers behind which the page has a float32 scale for
each; those beside keys and values have the model's type. All are views of the same pages, so a
block of tokens travels as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from tandem_kernels.attention.kv_pages import PagedKV
from tandem_kernels.attention.token_rows import NarrowRows, RowPages


@dataclass(frozen=True, slots=True)
class IndexPages:
    """The index keys of one layer.

    Attributes:
        keys: [N, B, D].
        scales: [N, B] float32, of e4m3 keys; None: keys are of a wider type.
    """

    keys: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class IndexedLatents:
    """The cache of a layer that has an indexer.

    Attributes:
        latents: [N, B, L + R]; only rows of several tokens may be narrow.
        index: In the same pages.
    """

    latents: RowPages
    index: IndexPages


@dataclass(frozen=True, slots=True)
class IndexedKV:
    """The cache of a layer with heads that has an indexer.

    Attributes:
        kv: Keys and values.
        index: [N, B, bytes] uint8 in the same pages: index keys in the model's type, whatever that
            of keys and values.
    """

    kv: PagedKV
    index: Tensor


@dataclass(frozen=True, slots=True)
class OpenRows:
    """Holds what is still to become a row that stands for several tokens.

    Attributes:
        planes: [N, B, numbers of a token] each, in the order of the group's planes.
    """

    planes: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class CachesByGroup:
    """The cache of a layer that is in several groups.

    Attributes:
        caches: In the order of the groups.
    """

    caches: tuple[GroupCache, ...]


GroupCache: TypeAlias = PagedKV | IndexedLatents | IndexedKV | OpenRows | NarrowRows
"""Names what a layer has in one group."""
LayerCache: TypeAlias = GroupCache | CachesByGroup
"""Names what layers have as their caches."""
