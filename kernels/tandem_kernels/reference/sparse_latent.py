"""Latent attention to chosen tokens in plain torch, absorbed. Source: DeepSeek-V3.2, 2025 (arXiv
2512.02556), 2.1."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_scales import KVScales
from tandem_kernels.reference.latent import head_scores, latent_rows, summed_rows
from tandem_kernels.reference.layouts import ATTENTION, KV_SCALES, kernel_takes


@kernel_takes(
    q_latent="T H | _",
    q_rope="T H | _",
    kv_cache="_ | _ _",
    chosen="T _: int32",
    metadata=ATTENTION,
    kv_scales=KV_SCALES,
)
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
        counted = _counted(seq_len - (end - start), seq_len, chosen.shape[1], rows.device)
        own_places = torch.where(counted, chosen[start:end].long(), -1)
        for step in range(end - start) if metadata.fixed_order else (None,):
            if step is None:
                seen = rows
                places = own_places
                hidden = torch.ones(end - start, seq_len + 1, dtype=torch.bool, device=rows.device)
                hidden.scatter_(1, torch.where(places < 0, seq_len, places), False)
                own, hides = slice(None), hidden[:, :seq_len]
            else:
                places = own_places[step]
                seen = rows[places[places >= 0]]
                own, hides = slice(step, step + 1), None
            scores = head_scores(queries[own], seen) * scale
            if hides is not None:
                scores.masked_fill_(hides, float("-inf"))
            attended = summed_rows(scores.softmax(-1), seen[:, :size])
            out[start:end][own] = attended.to(out.dtype)
    return out


@lru_cache(maxsize=8)
def _counted(first: int, seq_len: int, most: int, device: torch.device) -> Tensor:
    """Returns which of `most` chosen positions count for the tokens from `first` on, [T, most]: as
    many as each sees."""
    last = torch.arange(first, seq_len, device=device)[:, None]
    return torch.arange(most, device=device) <= last
