"""Attention of queries to keys without pages, in plain torch, and the join of its parts."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.attention.ragged_batch import RaggedBatch


def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, scale: float
) -> tuple[Tensor, Tensor]:
    """Attends within each request.

    Args:
        q: [T, H, D].
        k: [S, H, D].
        v: [S, H, V].
        scale: Multiplies the scores.

    Returns:
        ([T, H, V], [H, T] float32): what was attended to, and the logarithms of the softmax's sums.
        Of queries that see nothing, zero and -inf.
    """
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    log_sums = torch.full(q.shape[1::-1], -torch.inf, dtype=torch.float32, device=q.device)
    queries, keys = batch.query_bounds.tolist(), batch.key_bounds.tolist()
    for r in range(len(queries) - 1):
        own, seen = slice(queries[r], queries[r + 1]), slice(keys[r], keys[r + 1])
        num_queries, num_keys = own.stop - own.start, seen.stop - seen.start
        if num_queries == 0 or num_keys == 0:
            continue
        scores = torch.einsum("thd,shd->hts", q[own].float(), k[seen].float()) * scale
        if batch.causal:
            mask = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
            scores.masked_fill_(~mask.tril_(num_keys - num_queries), -torch.inf)
        out[own] = torch.einsum("hts,shv->thv", scores.softmax(-1), v[seen].float()).to(out.dtype)
        log_sums[:, own] = scores.logsumexp(-1)
    return out, log_sums


def merge_attention(out: Tensor, log_sums: Tensor, part: Tensor, part_log_sums: Tensor) -> None:
    """Joins attention to other keys of the same requests into `out`, in place.

    Args:
        out, part: [T, H, V].
        log_sums, part_log_sums: [H, T] float32, as `ragged_attention` returns them. `log_sums`
            becomes that of both; it is nowhere -inf.
    """
    total = torch.logaddexp(log_sums, part_log_sums)
    own, other = ((sums - total).exp().t().unsqueeze(-1) for sums in (log_sums, part_log_sums))
    out.copy_(out.float() * own + part.float() * other)
    log_sums.copy_(total)


def add_sinks(attended: Tensor, log_sums: Tensor, sinks: Tensor) -> None:
    """Makes attention, in place, what it is where the softmax has counted sinks as well.

    Args:
        attended: [T, H, V], contiguous.
        log_sums: [H, T] float32, logarithms of the sums that it was divided by.
        sinks: [H] float32.
    """
    attended.mul_(torch.sigmoid(log_sums.t() - sinks)[..., None])
