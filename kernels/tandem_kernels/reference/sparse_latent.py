"""Latent attention to chosen tokens in plain torch, absorbed. Source: DeepSeek-V3.2, 2025 (arXiv
2512.02556), 2.1."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_scales import KVScales
from tandem_kernels.reference.latent import latent_rows


def sparse_latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    chosen: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    kv_scales: KVScales | None = None,
) -> Tensor:
    """Computes the attention of the step's query tokens over chosen latents of their requests.

    Args:
        chosen: [T, K] int32 positions, ascending, as `index.index_topk` returns them. Behind the
            number of tokens that a query sees they may be anything.

    Other arguments and the result are those of `latent.latent_attention`.
    """
    out = torch.zeros_like(q_latent)
    size = q_latent.shape[2]
    bounds = metadata.query_start_loc.tolist()
    for r, seq_len in enumerate(metadata.seq_lens.tolist()):
        start, end = bounds[r], bounds[r + 1]
        if start == end or seq_len == 0:
            continue
        rows = latent_rows(kv_cache, metadata.block_tables[r], seq_len, kv_scales)
        queries = torch.cat((q_latent[start:end], q_rope[start:end]), dim=-1).float()
        last = torch.arange(seq_len - (end - start), seq_len, device=rows.device)[:, None]
        counted = torch.arange(chosen.shape[1], device=rows.device) <= last
        own_places = torch.where(counted, chosen[start:end].long(), -1)
        for step in range(end - start) if metadata.fixed_order else (None,):
            if step is None:
                seen = rows
                places = own_places
                mask = torch.zeros(end - start, seq_len + 1, dtype=torch.bool, device=rows.device)
                mask.scatter_(1, torch.where(places < 0, seq_len, places), True)
                own, mask = slice(None), mask[:, :seq_len]
            else:
                places = own_places[step]
                seen = rows[places[places >= 0]]
                own = slice(step, step + 1)
                mask = torch.ones(1, len(seen), dtype=torch.bool, device=rows.device)
            scores = torch.einsum("thd,ld->htl", queries[own], seen) * scale
            scores.masked_fill_(~mask, float("-inf"))
            attended = torch.einsum("htl,ld->thd", scores.softmax(-1), seen[:, :size])
            out[start:end][own] = attended.to(out.dtype)
    return out
