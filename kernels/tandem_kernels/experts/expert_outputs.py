"""The last part of a GEMM of experts: bias, activation or the pair's weight, and the store."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.experts.expert_gate import activated


@triton.jit
def write_pairs(
    acc: tl.tensor,
    second: tl.tensor,
    pair: tl.tensor,
    col: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    of_part: tl.tensor,
    pair_weights: tl.tensor,
    num_pairs: tl.tensor,
    num_outputs: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
) -> None:
    """Writes sums [ROWS, COLS] of the outputs `col` of `pair`, with the bias of the part of an
    expert that begins at `of_part`, and activated with `second`, or times the pair's weight."""
    real, real_col = pair < num_pairs, col < num_outputs
    if HAS_BIAS:
        of_col = bias + of_part + col
        acc += tl.load(of_col, mask=real_col, other=0.0).to(tl.float32)[None, :]
        if GATED and GATE != 4:
            of_up = tl.load(of_col + num_outputs, mask=real_col, other=0.0)
            second += of_up.to(tl.float32)[None, :]
    if GATED:
        acc = activated(acc, second, limit, alpha, GATE)
    else:
        acc *= tl.load(pair_weights + pair, mask=real, other=0.0)[:, None]
    to = out + pair.to(tl.int64)[:, None] * num_outputs + col[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & real_col[None, :])
