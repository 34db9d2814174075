"""Multi-head latent attention in plain torch, in its absorbed form: what the cache keeps of a token
is one vector for all heads, which is key and value at once, and a few more numbers of the key that
are rotated.

Source: DeepSeek-V2, 2024.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_scales import KVScales
from tandem_kernels.reference.fp8_cache import dequantise, quantise
from tandem_kernels.reference.layouts import ATTENTION, KV_SCALES, kernel_takes
from tandem_kernels.reference.slots import places_of


@kernel_takes(
    q_rope="T _ | P",
    kv="T | W",
    weight="_",
    positions="T: int",
    cos_sin_cache="_ P: float32",
    kv_cache="_ | _ W",
    slot_mapping="T: int",
    kv_scales=KV_SCALES,
)
def latent_rope_and_cache(
    q_rope: Tensor,
    kv: Tensor,
    weight: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    kv_scales: KVScales | None = None,
) -> None:
    """Rotates queries in place, and writes normalised latents and rotated keys into the cache.

    Args:
        q_rope: [T, H, R].
        kv: [T, L + R], latents and then keys that are to be rotated.
        weight: [L], of the latents' RMSNorm.
        positions: [T] int64.
        cos_sin_cache: [M, R] float32, cosines in the first half, sines in the second.
        kv_cache: [N, B, L + R], written at `slot_mapping`.
        slot_mapping: [T] int64, `block * B + offset`; -1 writes nothing.
        eps: Of the norm.
        kv_scales: The cache has e4m3 numbers of this one scale; None: it has those of `kv`.
    """
    size = len(weight)
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    heads = q_rope.shape[1]
    turned = _rotated(torch.cat((q_rope, kv[:, None, size:]), dim=1), cos, sin)
    q_rope.copy_(turned[:, :heads])
    latent = F.rms_norm(kv[:, :size].float(), (size,), weight.float(), eps)
    places = places_of(slot_mapping, kv_cache.shape[1])
    rows = places.of(torch.cat((latent, turned[:, heads]), dim=-1))
    if kv_scales is None:
        rows = rows.to(kv_cache.dtype)
    else:
        rows = quantise(rows, kv_scales.k).view(torch.uint8)
        kv_cache = kv_cache.view(torch.uint8)
    kv_cache.index_put_(places.at, rows)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@kernel_takes(
    q_latent="T H | _",
    q_rope="T H | _",
    kv_cache="_ | _ _",
    metadata=ATTENTION,
    kv_scales=KV_SCALES,
)
def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    kv_scales: KVScales | None = None,
) -> Tensor:
    """Computes the causal attention of the step's query tokens over their requests' latents.

    Args:
        q_latent: [T, H, L].
        q_rope: [T, H, R], rotated.
        kv_cache: [N, B, L + R]; the step's own rows are already written.
        metadata: The ragged batch.
        scale: Multiplies the scores.
        kv_scales: See `latent_rope_and_cache`.

    Returns:
        [T, H, L] in the dtype of `q_latent`: weighted sums of latents. Rows of requests with
        `seq_lens` 0 are zero.
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
        first = seq_len - (end - start)
        for step in range(end - start) if metadata.fixed_order else (None,):
            own = slice(None) if step is None else slice(step, step + 1)
            seen = rows if step is None else rows[: first + step + 1]
            scores = head_scores(queries[own], seen) * scale
            if step is None:
                mask = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
                scores.masked_fill_(~mask.tril_(first), float("-inf"))
            attended = summed_rows(scores.softmax(-1), seen[:, :size])
            out[start:end][own] = attended.to(out.dtype)
    return out


def head_scores(queries: Tensor, rows: Tensor) -> Tensor:
    """Multiplies queries [T, H, D] with rows [L, D] -> [H, T, L]: `einsum` takes twice as long."""
    count, heads, width = queries.shape
    by_head = queries.transpose(0, 1).reshape(1, heads * count, width)
    return torch.bmm(by_head, rows.t()[None]).view(heads, count, len(rows))


def summed_rows(shares: Tensor, rows: Tensor) -> Tensor:
    """Sums rows [L, D] by their shares [H, T, L] -> [T, H, D]."""
    heads, count, length = shares.shape
    by_token = shares.transpose(0, 1).reshape(1, count * heads, length)
    return torch.bmm(by_token, rows[None]).view(count, heads, rows.shape[1])


def latent_rows(
    kv_cache: Tensor, block_table: Tensor, seq_len: int, kv_scales: KVScales | None
) -> Tensor:
    """Returns the first `seq_len` rows of a request, [seq_len, L + R] float32."""
    blocks = block_table[: -(-seq_len // kv_cache.shape[1])].long()
    rows = _stored(kv_cache, kv_scales)[blocks].flatten(0, 1)[:seq_len]
    return rows.float() if kv_scales is None else dequantise(rows, kv_scales.k)


def _stored(kv_cache: Tensor, kv_scales: KVScales | None) -> Tensor:
    """Returns the cache as it can be indexed: e4m3 numbers as bytes."""
    return kv_cache if kv_scales is None else kv_cache.view(torch.uint8)


@kernel_takes(
    kv_cache="_ | _ _",
    first="R: int32",
    bounds="R+1: int32",
    block_tables=">=R | _: int32",
    keys="_ _ | P",
    kv_scales=KV_SCALES,
)
def gather_latents(
    kv_cache: Tensor,
    block_tables: Tensor,
    first: Tensor,
    bounds: Tensor,
    keys: Tensor,
    kv_scales: KVScales | None = None,
) -> Tensor:
    """Reads a range of positions of each of R requests from the cache.

    Args:
        kv_cache: [N, B, L + R].
        block_tables: [R, max_blocks] int32.
        first: [R] int32, the first position of each request.
        bounds: [R + 1] int32, request r owns rows `bounds[r] : bounds[r + 1]` of the result. Rows
            behind the last become zero.
        keys: [S, H, R], written: the part of the keys that is rotated, which all heads share.
        kv_scales: See `latent_rope_and_cache`.

    Returns:
        [S, L], the latents.
    """
    block_size, size = kv_cache.shape[1], kv_cache.shape[2] - keys.shape[2]
    latents = keys.new_zeros(len(keys), size)
    keys.zero_()
    starts, ends = first.tolist(), bounds.tolist()
    for r, start in enumerate(starts):
        positions = torch.arange(ends[r + 1] - ends[r], device=kv_cache.device) + start
        blocks = block_tables[r].long()[positions // block_size]
        rows = _stored(kv_cache, kv_scales)[blocks, positions % block_size]
        if kv_scales is not None:
            rows = dequantise(rows, kv_scales.k)
        own = slice(ends[r], ends[r + 1])
        latents[own] = rows[:, :size]
        keys[own] = rows[:, None, size:]
    return latents
