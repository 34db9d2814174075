"""Writes 4-bit weights out as halves, for one GEMM of the library.

With many rows a GEMM spends its time in the matrix units, and the library feeds them better than a
kernel that unpacks each weight once for each tile of rows. Writing a layer's weights out, and
reading them again, costs that of about 200 rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.gemm.int4_numbers import four_numbers, group_factors, weights_of
from tandem_kernels.gemm.int4_packing import block_size, packed_group_size

_COLS = 32
_NUM_WARPS = 4


@triton.jit
def int4_dequantise_kernel(
    packed: tl.tensor,
    groups: tl.tensor,
    out: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    num_blocks: tl.tensor,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    IN_PAIRS: tl.constexpr,
) -> None:
    """Writes, in program (i, b), block b of outputs i * COLS and on."""
    block = tl.program_id(1)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    real_col = col < num_outputs
    QUARTER: tl.constexpr = BLOCK // 4
    lane = tl.arange(0, QUARTER)
    kind: tl.constexpr = out.dtype.element_ty
    strip = packed + col.to(tl.int64)[:, None] * (num_blocks * QUARTER) + lane[None, :]
    places = tl.load(strip + block * QUARTER, mask=real_col[:, None], other=0)
    numbers = four_numbers(places, kind, IN_PAIRS)
    for quarter in tl.static_range(4):
        start = block * BLOCK + quarter * QUARTER
        of_group = groups + (start // GROUP).to(tl.int64) * num_outputs + col
        word = tl.load(of_group, mask=real_col, other=0)
        scale, zero = group_factors(word, kind, IN_PAIRS)
        weights = weights_of(numbers[quarter], scale[:, None], zero[:, None], kind, IN_PAIRS)
        k = start + lane
        to = out + col.to(tl.int64)[:, None] * num_inputs + k[None, :]
        tl.store(to, weights, mask=real_col[:, None] & (k < num_inputs)[None, :])


def int4_dequantise(packed: Tensor, groups: Tensor, num_inputs: int) -> Tensor:
    """See `reference.int4.int4_dequantise`; halves only."""
    num_outputs = packed.shape[0]
    group_size = packed_group_size(packed, groups)
    block = block_size(group_size)
    num_blocks = packed.shape[1] * 4 // block
    out = torch.empty((num_outputs, num_inputs), dtype=groups.dtype, device=packed.device)
    int4_dequantise_kernel[(triton.cdiv(num_outputs, _COLS), num_blocks)](
        packed,
        groups.view(torch.int32),
        out,
        num_outputs,
        num_inputs,
        num_blocks,
        COLS=_COLS,
        BLOCK=block,
        GROUP=group_size,
        IN_PAIRS=packed.is_cuda,
        num_warps=_NUM_WARPS,
    )
    return out
