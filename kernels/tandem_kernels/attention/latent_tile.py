"""Holds what kernels of latent attention share: their queries, the walk's step over a tile of rows,
and what they write."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.attention.fp8_cache import in_half


@triton.jit
def latent_queries(
    q_latent: tl.tensor,
    q_rope: tl.tensor,
    real: tl.tensor,
    FP8: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Loads both parts of the queries, [ROWS, ...]: in half precision for e4m3 rows.

    Args:
        q_latent, q_rope: Pointers to the beginning of each row's, [ROWS, 1].
        real: Which rows are, [ROWS].
    """
    dim = tl.arange(0, BLOCK_LATENT)
    rot = tl.arange(0, BLOCK_ROPE)
    mask = real[:, None] & (dim < LATENT)[None, :]
    query = tl.load(q_latent + dim[None, :], mask=mask, other=0.0)
    mask = real[:, None] & (rot < ROPE)[None, :]
    rotated = tl.load(q_rope + rot[None, :], mask=mask, other=0.0)
    if FP8:
        query, rotated = in_half(query), in_half(rotated)
    return query, rotated


@triton.jit
def attend_rows(
    query: tl.tensor,
    rotated: tl.tensor,
    latents: tl.tensor,
    keys: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    TURNED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Takes rows of the cache into a softmax state (peak, sum, accumulator): `latents` [TILE, L],
    which are keys and values, and `keys` [TILE, R].

    Args:
        seen: Which are attended to, [ROWS, TILE], [1, TILE], or TURNED the other way round.
        scale: Of scores, in powers of two.
    """
    latents, keys = latents.to(query.dtype), keys.to(query.dtype)
    if TURNED:
        scores = tl.dot(latents, tl.trans(query), input_precision=PRECISION)
        scores = tl.dot(keys, tl.trans(rotated), scores, input_precision=PRECISION)
        scores = tl.where(seen, scores * scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=0))
        weights = tl.exp2(scores - higher[None, :])
        added = tl.sum(weights, axis=0)
        share = tl.trans(weights.to(latents.dtype))
    else:
        scores = tl.dot(query, tl.trans(latents), input_precision=PRECISION)
        scores = tl.dot(rotated, tl.trans(keys), scores, input_precision=PRECISION)
        scores = tl.where(seen, scores * scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        added = tl.sum(weights, axis=1)
        share = weights.to(latents.dtype)
    shrink = tl.exp2(peak - higher)
    total = total * shrink + added
    acc = tl.dot(share, latents, acc * shrink[:, None], input_precision=PRECISION)
    return higher, total, acc


@triton.jit
def store_attended(
    out: tl.tensor,
    state: tl.tensor,
    index: tl.tensor,
    split: tl.tensor,
    real: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Writes rows `index` of `out`; with SPLITS > 1 their part `split`, float32, and its softmax
    state."""
    dim = tl.arange(0, BLOCK_LATENT)
    writes = real[:, None] & (dim < LATENT)[None, :]
    if SPLITS == 1:
        total = tl.where(total > 0.0, total, 1.0)
        attended = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + index[:, None] * LATENT + dim[None, :], attended, mask=writes)
    else:
        index = index * SPLITS + split
        tl.store(out + index[:, None] * LATENT + dim[None, :], acc, mask=writes)
        tl.store(state + index * 2, peak, mask=real)
        tl.store(state + index * 2 + 1, total, mask=real)


@triton.jit
def joined_parts(
    parts: tl.tensor,
    state: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
) -> tl.tensor:
    """Returns WIDTH numbers of row `row` from `first` on in float32, of whose parts
    `store_attended` has written all."""
    dim = first + tl.arange(0, WIDTH)
    of_part = row * SPLITS + tl.arange(0, SPLITS)
    peak = tl.load(state + of_part * 2)
    share = tl.exp2(peak - tl.max(peak, axis=0))
    total = tl.sum(share * tl.load(state + of_part * 2 + 1), axis=0)
    place = parts + of_part[:, None] * LATENT + dim[None, :]
    found = tl.load(place, mask=(dim < LATENT)[None, :], other=0.0)
    return tl.sum(found * share[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
