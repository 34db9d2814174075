"""Attention of images whose tokens see each other, also those behind them (Gemma 3; Gemma 4, in
layers with a window).

    text text image image image image text         a query at 2 .. 5 sees 0 .. 5, at 6 as always
              └────── see 0 .. 5 ─────┘

All tokens of a step are attended causally first; then the rows of images are computed again, each
image over its own context, from the cache. Such an image is never cut between steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.attention.backend import AttentionSpec, WholeImage
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_pages import PagedKV
from tandem_kernels.reference.attention import gather_context


def attend_images(
    attended: Tensor,
    spec: AttentionSpec,
    heads: Tensor,
    kv_cache: PagedKV,
    metadata: AttentionMetadata,
    images: Sequence[WholeImage],
) -> None:
    """Replaces the rows of images in what a step attends to.

    Args:
        attended: [T, Hq, Dv], filled causally; rows of images are replaced.
        heads: [T, Hq D + ...] as `AttentionBackend.attend` is given them.
        kv_cache: [N, 2, Hkv, B, D], or its pages, with the step's own keys and values.
    """
    queries, window = spec.queries(heads), metadata.window
    for image in images:
        if image.in_windows and window is None:
            continue
        num_queries = image.rows.stop - image.rows.start
        begin = image.end - num_queries
        first = 0 if window is None else max(0, begin - window + 1)
        count = image.end - first
        place = torch.tensor([[first], [0], [count]], device=heads.device, dtype=torch.int32)
        # In plain torch, of which nothing is compiled when the first image comes.
        keys, values = gather_context(
            kv_cache,
            metadata.block_tables[image.request : image.request + 1],
            place[0],
            place[1:].flatten(),
            count,
            heads.dtype,
            spec.kv_scales,
        )
        mask = None if window is None else _seen(image, begin, first, window, heads.device)
        step = 1 if metadata.fixed_order else num_queries
        for start in range(0, num_queries, step):
            rows = slice(image.rows.start + start, image.rows.start + start + step)
            found = F.scaled_dot_product_attention(
                queries[rows].transpose(0, 1).unsqueeze(0),
                keys.transpose(0, 1).unsqueeze(0),
                values.transpose(0, 1).unsqueeze(0),
                attn_mask=None if mask is None else mask[start : start + step],
                scale=spec.scale,
                enable_gqa=spec.num_heads != spec.num_kv_heads,
            )
            attended[rows] = found[0].transpose(0, 1)


def _seen(image: WholeImage, begin: int, first: int, window: int, device: torch.device) -> Tensor:
    """Returns [queries, keys] bool: which keys from `first` on each token from `begin` on sees."""
    queries = torch.arange(begin, image.end, device=device).unsqueeze(1)
    keys = torch.arange(first, image.end, device=device)
    return keys > queries - window
