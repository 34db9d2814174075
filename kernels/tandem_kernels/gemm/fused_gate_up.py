"""Fused gate-up: both GEMMs of many rows, and the activation: silu(x gateᵀ) * (x upᵀ).

By itself the activation reads two numbers for each that it writes, all of which the GEMM has
just written: for 8192 tokens of Llama-3.1-8B 700 MB a layer. Here a tile's accumulator holds gates
and their ups, in the registers of the same thread.

As many programs as SMs walk over the tiles of [ROWS, COLS] outputs. The copy engine (tensor
descriptors) brings x [ROWS, DEPTH] and the weight [2, COLS, DEPTH], gate rows and up rows in one
piece, so that they are one operand. The two loops are one for the compiler: pieces of the next tile
are on their way while this one is activated.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem_kernels.device import has_copy_engine, num_programs
from tandem_kernels.gemm.fused_tuning import fused_tuning
from tandem_kernels.gemm.persistent_tiles import place_of_tile, rounded


@triton.jit
def _activated(
    gate: tl.tensor, up: tl.tensor, kind: tl.constexpr, IN_PAIRS: tl.constexpr
) -> tl.tensor:
    gate = rounded(gate, kind, IN_PAIRS).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate)) * rounded(up, kind, IN_PAIRS).to(tl.float32)).to(kind)


@triton.jit(do_not_specialize=["num_rows"])
def fused_gate_up_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    inner: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    TILES_DOWN: tl.constexpr,
    IN_PAIRS: tl.constexpr,
) -> None:
    """Descriptors of x [T, K], weight [2, I, K], out [T, I]. What lies behind row T reads as zero
    and is not written."""
    down = tl.cdiv(num_rows, ROWS)
    across = width // COLS
    kind: tl.constexpr = out.dtype
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        row, col = place_of_tile(tile, down, across, ROWS, COLS, TILES_DOWN)
        sums = tl.zeros([ROWS, 2 * COLS], tl.float32)
        for step in range(tl.cdiv(inner, DEPTH)):
            given = x.load([row, step * DEPTH])
            both = weight.load([0, col, step * DEPTH]).reshape(2 * COLS, DEPTH)
            sums = tl.dot(given, both.T, sums)
        gate, up = tl.split(sums.reshape(ROWS, 2, COLS).permute(0, 2, 1))
        out.store([row, col], _activated(gate, up, kind, IN_PAIRS))


def fused_gate_up(x: Tensor, weight: Tensor) -> Tensor:
    """See `reference.gemm.fused_gate_up`; only for what `fused_gate_up_shapes.takes` says."""
    num_rows, inner = x.shape
    width = len(weight) // 2
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    tuning = fused_tuning(x.device, gated=True)
    rows, cols, depth = tuning.rows, tuning.cols, tuning.depth
    fused_gate_up_kernel[(num_programs(x.device, 1),)](
        TensorDescriptor.from_tensor(x, [rows, depth]),
        TensorDescriptor.from_tensor(weight.view(2, width, inner), [2, cols, depth]),
        TensorDescriptor.from_tensor(out, [rows, cols]),
        num_rows,
        width,
        inner,
        **tuning.sizes,
        IN_PAIRS=x.dtype == torch.bfloat16 and has_copy_engine(x.device),
        **tuning.options,
    )
    return out
