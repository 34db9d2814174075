"""Holds what a sparse layer keeps of a token: its latent row, and a key by which it is found.

    page | latents [B, L + R] | index keys [B, D] | scales [B] |

Keys are float32, or e4m3 numbers behind which the page has a float32 scale for each. All are views
of the same pages, so a block of tokens travels as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from tandem_kernels.attention.kv_pages import PagedKV


@dataclass(frozen=True, slots=True)
class IndexPages:
    """The index keys of one layer.

    Attributes:
        keys: [N, B, D] float32 or e4m3.
        scales: [N, B] float32, of e4m3 keys; None: keys are float32.
    """

    keys: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class IndexedLatents:
    """The cache of a layer that has an indexer.

    Attributes:
        latents: [N, B, L + R].
        index: In the same pages.
    """

    latents: Tensor
    index: IndexPages


LayerCache: TypeAlias = PagedKV | IndexedLatents
"""Names what layers have as their caches."""
