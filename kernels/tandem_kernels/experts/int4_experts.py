"""Experts with 4-bit weights (`int4_packing`), for all tokens of a step; see `fused_experts`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.experts.expert_gate import activated
from tandem_kernels.experts.expert_plan import ExpertPlan
from tandem_kernels.experts.expert_rows import ExpertRows, rows_of_program
from tandem_kernels.experts.expert_sums import sum_pairs
from tandem_kernels.experts.expert_tuning import ExpertShape, ExpertTuning
from tandem_kernels.gemm.int4_packing import block_size, packed_group_size
from tandem_kernels.gemm.int4_tiles import gate_and_up, multiplied_strip, strip_columns

FORMAT = "int4"
FIXED = ExpertTuning(rows=64, cols=64, depth=256, num_warps=4, num_stages=2)
"""One choice for all batches, where a row must have the same bits in any company."""
LATE_ROWS = 16
"""Tiles of at most this many rows multiply sums by scales."""


@triton.jit(do_not_specialize=["num_pairs", "num_row_tiles"])
def int4_expert_gemm_kernel(
    x: tl.tensor,
    packed: tl.tensor,
    groups: tl.tensor,
    pair_weights: tl.tensor,
    experts: tl.tensor,
    order: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    num_blocks: tl.tensor,
    x_stride: tl.tensor,
    num_row_tiles: tl.tensor,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,
    EXPERTS: tl.constexpr,
    GATED: tl.constexpr,
    SORTED: tl.constexpr,
    BY_PAIR: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    LATE: tl.constexpr,
) -> None:
    """Computes one tile of pairs times one tile of outputs in each program.

    GATED: x [T, H], packed [E, 2 * num_outputs, H' / 4], silu(gate) * up. Else x [pairs, I], packed
    [E, num_outputs, I' / 4], times the pair's weight. `groups` are words [E, H' / GROUP, outputs].
    """
    num_col_tiles = tl.cdiv(2 * num_outputs if GATED else num_outputs, COLS)
    expert, pair, col_tile = rows_of_program(
        experts, order, counts, num_pairs, num_experts, num_row_tiles, num_col_tiles,
        ROWS, TILE_GROUP, PAIRS, TILES, EXPERTS, SORTED, BY_PAIR, GATED, OVERLAP,
    )  # fmt: skip
    if tl.min(pair, axis=0) >= num_pairs:
        return
    real = pair < num_pairs
    row = pair
    if GATED:
        row = pair // TOP_K
    row = tl.where(real, row, 0)
    col, real_col = strip_columns(col_tile, num_outputs, COLS, GATED)
    width = num_outputs
    if GATED:
        width = 2 * num_outputs
    acc = multiplied_strip(
        x + row.to(tl.int64) * x_stride,
        packed + (expert.to(tl.int64) * width + col) * (num_blocks * (BLOCK // 4)),
        groups + expert.to(tl.int64) * (num_blocks * (BLOCK // GROUP)) * width + col,
        real,
        real_col,
        inner,
        width,
        0,
        num_blocks,
        ROWS,
        COLS,
        BLOCK,
        GROUP,
        True,
        EVEN,
        IN_PAIRS,
        LATE,
        BLOCK // 4,
    )
    if GATED:
        gate, up = gate_and_up(acc, ROWS, COLS)
        result = activated(gate, up, 0.0, 0.0, 0)
        out_col = col_tile * (COLS // 2) + tl.arange(0, COLS // 2)
    else:
        result = acc * tl.load(pair_weights + pair, mask=real, other=0.0)[:, None]
        out_col = col
    to = out + pair.to(tl.int64)[:, None] * num_outputs + out_col[None, :]
    written = real[:, None] & (out_col < num_outputs)[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=written)


def int4_experts(
    x: Tensor,
    packed13: Tensor,
    groups13: Tensor,
    packed2: Tensor,
    groups2: Tensor,
    weights: Tensor,
    experts: Tensor,
    fixed_order: bool = False,
    summed: bool = True,
    ranks: int = 1,
) -> Tensor:
    """See `reference.int4.int4_experts`; halves only."""
    num_tokens, hidden_size = x.shape
    num_experts, doubled, _ = packed13.shape
    num_pairs = experts.numel()
    if num_tokens == 0:
        return torch.empty_like(x)
    shape = ExpertShape(num_experts, doubled // 2, hidden_size, FORMAT)
    plan = ExpertPlan.of(experts, shape, FIXED if fixed_order else None, ranks)
    hidden = torch.empty((num_pairs, doubled // 2), dtype=x.dtype, device=x.device)
    parts = torch.empty((num_pairs, hidden_size), dtype=x.dtype, device=x.device)
    int4_expert_gemm(x, (packed13, groups13), weights, plan.rows, hidden, plan.gate_up, gated=True)
    int4_expert_gemm(hidden, (packed2, groups2), weights, plan.rows, parts, plan.down, gated=False)
    return sum_pairs(parts, experts) if summed else parts


def int4_expert_gemm(
    x: Tensor,
    weight: tuple[Tensor, Tensor],
    pair_weights: Tensor,
    rows: ExpertRows,
    out: Tensor,
    tuning: ExpertTuning,
    *,
    gated: bool,
) -> None:
    """Computes one of the two GEMMs.

    Args:
        x: [T, H] when `gated`, else [T * k, I].
        weight: Packed numbers and groups of all experts.
        pair_weights: [T, k].
        out: [T * k, I], or [T * k, H].
    """
    packed, groups = weight
    num_pairs, num_outputs = out.shape
    num_experts, inner = packed.shape[0], x.shape[1]
    group_size = packed_group_size(packed[0], groups[0])
    block = block_size(group_size)
    row_tiles, constants = rows.tiles(tuning.rows)
    grid = (row_tiles * triton.cdiv(packed.shape[1], tuning.cols),)
    int4_expert_gemm_kernel[grid](
        x,
        packed,
        groups.view(torch.int32),
        pair_weights,
        rows.experts,
        rows.order,
        rows.counts,
        out,
        num_pairs,
        num_experts,
        num_outputs,
        inner,
        packed.shape[2] * 4 // block,
        x.stride(0),
        row_tiles,
        TOP_K=rows.experts.shape[1],
        COLS=tuning.cols,
        TILE_GROUP=tuning.group,
        GATED=gated,
        BLOCK=block,
        GROUP=group_size,
        EVEN=inner % block == 0 and packed.shape[1] % tuning.cols == 0,
        IN_PAIRS=x.is_cuda,
        LATE=tuning.rows <= LATE_ROWS,
        **constants,
        **tuning.options,
        **rows.launch,
    )
