"""Attention of a mixed step: its decodes and its longer queries by a kernel each."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.attention_metadata import AttentionMetadata
from tandem_kernels.decode_attention import decode_attention
from tandem_kernels.prefill_attention import prefill_attention


def paged_attention(
    q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """See `reference.attention.paged_attention`. The heads of one query token must be adjacent."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if metadata.num_decodes > 0:
        decodes = q[: metadata.num_decodes]
        decode_attention(decodes, kv_cache, metadata, scale, out)
    if metadata.num_decodes < metadata.seq_lens.shape[0]:
        prefill_attention(q, kv_cache, metadata, scale, out)
    return out
