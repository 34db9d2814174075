"""Attention of a mixed step: its decodes and its longer queries by a kernel each."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tandem_kernels.attention_metadata import AttentionMetadata
from tandem_kernels.decode_attention import decode_attention
from tandem_kernels.prefill_attention import fixed_tuning, prefill_attention


def paged_attention(
    q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, softcap: float = 0.0
) -> Tensor:
    """See `reference.attention.paged_attention`. The heads of one query token must be adjacent.

    In fixed order all queries go through the kernel of long ones with one size of tiles: it walks
    a context from its beginning, and what lies behind a query's own position adds nothing. With a
    window they do so too: there is too little to see to share it out over programs. So do decodes
    with drafts.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if metadata.fixed_order:
        tuning = fixed_tuning(q.shape[-1], kv_cache.dtype)
        prefill_attention(
            q, kv_cache, replace(metadata, num_decodes=0), scale, out, tuning, softcap
        )
        return out
    if metadata.window is not None or metadata.decode_query_len > 1:
        prefill_attention(q, kv_cache, replace(metadata, num_decodes=0), scale, out, None, softcap)
        return out
    if metadata.num_decodes > 0:
        decodes = q[: metadata.num_decodes]
        decode_attention(decodes, kv_cache, metadata, scale, out, None, softcap)
    if metadata.num_decodes < metadata.seq_lens.shape[0]:
        prefill_attention(q, kv_cache, metadata, scale, out, None, softcap)
    return out
