"""Attention of a mixed step: its decodes and its longer queries by a kernel each, and decodes whose
window is small by one of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.decode_attention import decode_attention
from tandem_kernels.attention.kv_pages import PagedKV, sizes_of
from tandem_kernels.attention.kv_scales import KVScales
from tandem_kernels.attention.prefill_attention import prefill_attention
from tandem_kernels.attention.prefill_tuning import fixed_tuning
from tandem_kernels.attention.window_attention import takes_window, window_attention

_UNCUT_WINDOW = 256
"""Up to this many positions a window is walked by one program: cutting it would take a merge, and
there is little to walk."""


DecodeKernel = Literal["window", "decode", "prefill"]


def kernel_of_decode(q: Tensor, kv_cache: PagedKV, metadata: AttentionMetadata) -> DecodeKernel:
    """Returns which kernel attends decodes. In fixed order, and with drafts, it is that of long
    queries, together with those; a window that is small but does not fit into registers is not
    worth cutting either."""
    if metadata.fixed_order or metadata.decode_query_len > 1:
        return "prefill"
    if takes_window(q, kv_cache, metadata.window):
        return "window"
    is_small = metadata.window is not None and metadata.window <= _UNCUT_WINDOW
    return "prefill" if is_small else "decode"


def paged_attention(
    q: Tensor,
    kv_cache: PagedKV,
    metadata: AttentionMetadata,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_scales: KVScales | None = None,
) -> Tensor:
    """See `reference.attention.paged_attention`. The heads of one query token must be adjacent.

    In fixed order all queries go through the kernel of long ones with one size of tiles: it walks
    a context from its beginning, and what lies behind a query's own position adds nothing. So do
    decodes with drafts, those whose window is small but does not fit into registers, and those that
    a recorded step hides, where they are seen through a window.
    """
    shape = *q.shape[:2], sizes_of(kv_cache).value_dim
    out = torch.empty(shape, dtype=q.dtype, device=q.device)
    num_decodes = metadata.num_decodes
    rare = softcap, sinks, kv_scales
    if metadata.fixed_order or metadata.decode_query_len > 1:
        tuning = fixed_tuning(q.shape[-1], q.dtype) if metadata.fixed_order else None
        together = replace(metadata, num_decodes=0)
        short = metadata.max_query_len == 1
        prefill_attention(q, kv_cache, together, scale, out, tuning, *rare, overlaps=short)
        return out
    if metadata.hidden is not None and metadata.window is None:
        count = len(metadata.seq_lens)
        decodes = replace(metadata, seq_lens=metadata.hidden.seq_lens)
        decode_attention(q[:count], kv_cache, decodes, scale, out[:count], None, *rare)
        # Behind the decodes: what these leave of other rows is zeros.
        metadata = replace(metadata, query_start_loc=metadata.hidden.query_start_loc)
    if num_decodes > 0:
        queries, attended = q[:num_decodes], out[:num_decodes]
        kernel = kernel_of_decode(q, kv_cache, metadata)
        if kernel == "window":
            window_attention(queries, kv_cache, metadata, scale, attended, softcap, sinks)
        elif kernel == "prefill":
            alone = _decodes_alone(metadata)
            prefill_attention(queries, kv_cache, alone, scale, attended, None, *rare, overlaps=True)
        else:
            decode_attention(queries, kv_cache, metadata, scale, attended, None, *rare)
    if num_decodes < metadata.seq_lens.shape[0]:
        prefill_attention(q, kv_cache, metadata, scale, out, None, *rare)
    return out


def _decodes_alone(metadata: AttentionMetadata) -> AttentionMetadata:
    """Returns the decodes of a step as queries of one token."""
    count = metadata.num_decodes
    return replace(
        metadata,
        block_tables=metadata.block_tables[:count],
        query_start_loc=metadata.query_start_loc[: count + 1],
        seq_lens=metadata.seq_lens[:count],
        num_decodes=0,
        max_query_len=1,
    )
