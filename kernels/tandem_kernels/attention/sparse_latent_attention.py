"""Latent attention to chosen tokens, absorbed: all heads of a token read the same chosen rows.

    positions ── block tables ─▶ slots    `slots_kernel`
    slots, queries, latents ─▶ attended   `sparse_latent_kernel`

A program owns ROWS heads of one token, and walks a part of what it attends to, wherever in the
cache that lies: slots are known before, so that rows are asked for ahead, and nothing waits for a
table. A row is loaded once and serves as key and as value. With few tokens the chosen
are cut into SPLITS parts, joined by `latent_merge_kernel`; how many depends on shapes alone, so
steps can be recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.chosen_slots import chosen_slots, part_of_chosen
from tandem_kernels.attention.kv_scales import KVScales, pointers
from tandem_kernels.attention.latent_merge import latent_merge_kernel
from tandem_kernels.attention.latent_tile import attend_rows, latent_queries, store_attended
from tandem_kernels.attention.prefill_attention import LOG2_E
from tandem_kernels.attention.sparse_latents_ahead import sparse_ahead_kernel
from tandem_kernels.attention.sparse_latents_pieces import sparse_pieces_kernel
from tandem_kernels.device import has_warpgroup_mma, num_programs
from tandem_kernels.product_precision import precision_of
from tandem_kernels.tunings.table import plain_table

_TURNED_HEADS = 16
"""Up to this many heads are multiplied with the context on the left."""


@dataclass(frozen=True, slots=True)
class SparseTuning:
    """Says how one shape runs.

    Attributes:
        rows: Heads of a program.
        tile: Chosen tokens at once.
        programs_per_sm: The chosen are cut until there are this many programs.
        most_splits: Parts of them; a power of two.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 2
    most_splits: int = 16


def copies_ahead(
    q_latent: Tensor, q_rope: Tensor, metadata: AttentionMetadata, kv_scales: KVScales | None
) -> bool:
    """Returns whether a kernel that says itself when copies begin attends, `sparse_pieces_kernel`,
    or for up to 16 heads `sparse_ahead_kernel`: on Hopper, to latents of halves of DeepSeek's
    sizes, for which they have memory; for up to 16 heads only where their tokens fill the device,
    and not in fixed order, which must not depend on their number."""
    num_tokens, num_heads, latent = q_latent.shape
    if q_latent.element_size() > 2 or kv_scales is not None:
        return False
    if (latent, q_rope.shape[2]) != (512, 64) or not has_warpgroup_mma(q_latent.device):
        return False
    is_full = num_tokens >= num_programs(q_latent.device, 2) and not metadata.fixed_order
    return num_heads > _TURNED_HEADS or is_full


def kernel_of_copies_ahead(num_heads: int) -> Any:
    """Returns the kernel that attends where copies are begun ahead."""
    return sparse_pieces_kernel if num_heads > _TURNED_HEADS else sparse_ahead_kernel


_TABLE = plain_table("sparse_latents", SparseTuning, ("num_heads", "itemsize", "is_ahead"))


def sparse_tuning(
    device: torch.device, num_heads: int, itemsize: int, *, is_ahead: bool = False
) -> SparseTuning:
    """Chooses by the heads of a token and the bytes of a number.

    Args:
        is_ahead: See `copies_ahead`.
    """
    return _TABLE.choose(device, num_heads, itemsize, is_ahead)


@triton.jit(do_not_specialize=["num_reqs"])
def sparse_latent_kernel(
    q_latent: tl.tensor,
    q_rope: tl.tensor,
    kv_cache: tl.tensor,
    slots: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    kv_scale: tl.tensor,
    out: tl.tensor,
    state: tl.tensor,
    num_reqs: tl.tensor,
    latent_token_stride: tl.tensor,
    latent_head_stride: tl.tensor,
    rope_token_stride: tl.tensor,
    rope_head_stride: tl.tensor,
    block_stride: tl.tensor,
    scale: tl.tensor,
    TOP_K: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    """Walks, in program (t, i, s), part s of what token t attends to, for its i-th tile of heads.
    Writes [T, H, L], or with SPLITS > 1 float32 [T, H, SPLITS, L] and its softmax state.
    """
    token = tl.program_id(0)
    split = tl.program_id(2)
    first, end = part_of_chosen(
        query_start_loc, seq_lens, token, split, num_reqs, QUERY_LEN, TOP_K, TILE, SPLITS
    )
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = head < NUM_HEADS
    at = token.to(tl.int64)
    dim = tl.arange(0, BLOCK_LATENT)
    rot = tl.arange(0, BLOCK_ROPE)
    is_latent = (dim < LATENT)[None, :]
    is_rope = (rot < ROPE)[None, :]
    query, rotated = latent_queries(
        q_latent + at * latent_token_stride + head[:, None] * latent_head_stride,
        q_rope + at * rope_token_stride + head[:, None] * rope_head_stride,
        real, FP8, LATENT, BLOCK_LATENT, ROPE, BLOCK_ROPE,
    )  # fmt: skip
    if FP8:
        own_scale = tl.load(kv_scale)
        scale = scale * own_scale
    peak = tl.full([ROWS], -3.0e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_LATENT], tl.float32)
    lane = tl.arange(0, TILE)
    places = slots + at * TOP_K
    for start in range(first, end, TILE):
        inside = start + lane < end
        slot = tl.load(places + start + lane, mask=inside, other=0)
        block = (slot // BLOCK_SIZE).to(tl.int64)
        line = kv_cache + block * block_stride + slot % BLOCK_SIZE * (LATENT + ROPE)
        mask = inside[:, None] & is_latent
        latents = tl.load(line[:, None] + dim[None, :], mask=mask, other=0.0)
        mask = inside[:, None] & is_rope
        keys = tl.load(line[:, None] + LATENT + rot[None, :], mask=mask, other=0.0)
        peak, total, acc = attend_rows(
            query,
            rotated,
            latents,
            keys,
            inside[None, :],
            scale,
            peak,
            total,
            acc,
            False,
            PRECISION,
        )
    if FP8:
        acc = acc * own_scale
    index = at * NUM_HEADS + head
    store_attended(out, state, index, split, real, peak, total, acc, LATENT, BLOCK_LATENT, SPLITS)


def sparse_latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    chosen: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    kv_scales: KVScales | None = None,
) -> Tensor:
    """See `reference.sparse_latent.sparse_latent_attention`.

    In fixed order nothing is cut into parts: what a token attends to is added up from the first.
    """
    num_tokens, num_heads, latent = q_latent.shape
    top_k = chosen.shape[1]
    out = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
    is_ahead = copies_ahead(q_latent, q_rope, metadata, kv_scales)
    tuning = sparse_tuning(q_latent.device, num_heads, q_latent.element_size(), is_ahead=is_ahead)
    head_tiles = triton.cdiv(num_heads, tuning.rows)
    splits = 1
    if not metadata.fixed_order:
        splits = _num_splits(q_latent.device, tuning, num_tokens * head_tiles, top_k)
    target, state = out, None
    if splits > 1:
        parts = num_tokens, num_heads, splits
        target, state = (q_rope.new_empty(*parts, n, dtype=torch.float32) for n in (latent, 2))
    slots = chosen_slots(chosen, metadata, kv_cache.shape[1])
    given = q_latent, q_rope, kv_cache, slots, metadata.query_start_loc, metadata.seq_lens
    strides = *q_latent.stride()[:2], *q_rope.stride()[:2], kv_cache.stride(0)
    rest = target, state, len(metadata.seq_lens), *strides, scale * LOG2_E
    shape = {
        "TOP_K": top_k,
        "QUERY_LEN": metadata.uniform_query_len,
        "NUM_HEADS": num_heads,
        "ROWS": tuning.rows,
        "LATENT": latent,
        "ROPE": q_rope.shape[2],
        "BLOCK_SIZE": kv_cache.shape[1],
        "TILE": tuning.tile,
        "SPLITS": splits,
        "num_warps": tuning.num_warps,
    }
    widths = {"LATENT": latent, "BLOCK_LATENT": triton.next_power_of_2(latent), "SPLITS": splits}
    if is_ahead:
        ahead = kernel_of_copies_ahead(num_heads)
        ahead[(num_tokens * head_tiles, splits)](*given, *rest, TILES=head_tiles, **shape)
    else:
        sparse_latent_kernel[(num_tokens, head_tiles, splits)](
            *given,
            pointers(kv_scales)[0],
            *rest,
            BLOCK_ROPE=max(16, triton.next_power_of_2(q_rope.shape[2])),
            PRECISION=precision_of(q_latent),
            FP8=kv_scales is not None,
            num_stages=tuning.num_stages,
            **shape | widths,
        )
    if state is not None:
        grid = (num_tokens * num_heads,)
        latent_merge_kernel[grid](target, state, out, OVERLAP=False, num_warps=4, **widths)
    return out


def _num_splits(device: torch.device, tuning: SparseTuning, num_tiles: int, top_k: int) -> int:
    """Returns into how many parts the chosen are cut when there are this many tiles of heads."""
    free = num_programs(device, tuning.programs_per_sm) // num_tiles
    most = min(tuning.most_splits, triton.next_power_of_2(triton.cdiv(top_k, tuning.tile)))
    return min(int(most), 1 << max(free.bit_length() - 1, 0))
