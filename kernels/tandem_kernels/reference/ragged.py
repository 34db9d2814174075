"""Attention of queries to keys without pages, in plain torch, and the join of its parts."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.attention.ragged_batch import RaggedBatch
from tandem_kernels.reference.layouts import BATCH, kernel_takes


@kernel_takes(chosen="T _: int32", first="R: int32", batch=BATCH)
def chosen_bits(chosen: Tensor, batch: RaggedBatch, first: Tensor) -> Tensor:
    """Returns which keys of a batch each query attends to, as bits.

    Args:
        chosen: [T, K] int32 positions, ascending; -1 behind the last.
        first: [R] int32, the position of each request's first key.

    Returns:
        [T, W] int32, an even number of words: bit i of word w is that of key 32 w + i of the
        query's request.
    """
    queries, keys, begins = (x.tolist() for x in (batch.query_bounds, batch.key_bounds, first))
    seen = torch.zeros(len(chosen), -(-batch.max_key_len // 64) * 64 + 1, device=chosen.device)
    for r, begin in enumerate(begins):
        place = chosen[queries[r] : queries[r + 1]].long() - begin
        is_key = (place >= 0) & (place < keys[r + 1] - keys[r])
        place = torch.where(is_key, place, seen.shape[1] - 1)
        seen[queries[r] : queries[r + 1]].scatter_(1, place, 1.0)
    words = seen[:, :-1].long().reshape(len(chosen), -1, 32)
    bits: Tensor = (words << torch.arange(32, device=chosen.device)).sum(2)
    return bits.to(torch.int32)


@kernel_takes(q="T H | D", k="S H | D", v="S H | _", batch=BATCH, chosen_bits="T | _: int32")
def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: RaggedBatch,
    scale: float,
    chosen_bits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attends within each request.

    Args:
        q: [T, H, D].
        k: [S, H, D].
        v: [S, H, V].
        scale: Multiplies the scores.
        chosen_bits: As `chosen_bits` returns them, none of a key that its query does not see; None:
            queries attend to all that they see.

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
        if chosen_bits is not None:
            lane = torch.arange(32, device=q.device)
            mask = (chosen_bits[own, :, None] >> lane & 1).flatten(1)[:, :num_keys] > 0
            scores.masked_fill_(~mask, -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        out[own] = torch.einsum("hts,shv->thv", weights, v[seen].float()).to(out.dtype)
        log_sums[:, own] = scores.logsumexp(-1)
    return out, log_sums


@kernel_takes(out="T H V", log_sums="H | T: float32", part="T H V", part_log_sums="H | T: float32")
def merge_attention(out: Tensor, log_sums: Tensor, part: Tensor, part_log_sums: Tensor) -> None:
    """Joins attention to other keys of the same requests into `out`, in place.

    Args:
        out, part: [T, H, V]; zero where their sums are.
        log_sums, part_log_sums: [H, T] float32, as `ragged_attention` returns them. `log_sums`
            becomes that of both.
    """
    total = torch.logaddexp(log_sums, part_log_sums)
    finite = total.clamp(min=torch.finfo(total.dtype).min)
    own, other = ((sums - finite).exp().t().unsqueeze(-1) for sums in (log_sums, part_log_sums))
    out.copy_(out.float() * own + part.float() * other)
    log_sums.copy_(total)


@kernel_takes(attended="T H V", log_sums="H | T: float32", sinks="H: float32")
def add_sinks(attended: Tensor, log_sums: Tensor, sinks: Tensor) -> None:
    """Makes attention, in place, what it is where the softmax has counted sinks as well.

    Args:
        attended: [T, H, V], contiguous.
        log_sums: [H, T] float32, logarithms of the sums that it was divided by.
        sinks: [H] float32.
    """
    attended.mul_(torch.sigmoid(log_sums.t() - sinks)[..., None])
