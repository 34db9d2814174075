"""GEMMs of int8 rows on int8 weights: sums of int32, which are exact, times a scale for each row
and each output.

Few rows are computed by the kernel of FP8's few rows. For more, as many programs as SMs walk over
tiles of [ROWS, COLS] outputs; the copy engine (tensor descriptors) brings x [ROWS, DEPTH] and the
weight [PARTS, COLS, DEPTH]. Two parts are gate and up, whose sums lie in the registers of the same
thread: the activation is part of the launch. The library writes sums of four bytes for each output,
which another kernel would have to read and scale (`bench.engine.gemms`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem_kernels.device import has_copy_engine, num_programs
from tandem_kernels.gemm.fp8_gemm import fp8_small_m
from tandem_kernels.gemm.fp8_paths import takes_small
from tandem_kernels.gemm.fp8_tuning import fp8_tuning
from tandem_kernels.gemm.persistent_tiles import place_of_tile, rounded
from tandem_kernels.tunings.table import plain_table

SMALL_ROWS = 64
"""At most this many rows are few."""
TILES_DOWN = 16
"""See `persistent_tiles.place_of_tile`."""


@dataclass(frozen=True, slots=True)
class Int8Tuning:
    """Says how tiles are computed; `cols` counts gate and up together."""

    rows: int
    cols: int
    depth: int
    num_warps: int
    num_stages: int


_TABLE = plain_table("int8", Int8Tuning, ("num_rows", "large_tiles"))


def int8_tuning(device: torch.device, num_rows: int, num_outputs: int) -> Int8Tuning:
    """Chooses by rows, and by how many tiles of 128 x 256 outputs there would be."""
    return _TABLE.choose(device, num_rows, -(-num_rows // 128) * -(-num_outputs // 256))


@triton.jit
def _scaled(
    sums: tl.tensor,
    of_row: tl.tensor,
    w_scales: tl.tensor,
    bias: tl.tensor,
    col: tl.tensor,
    is_real: tl.tensor,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """Returns outputs in float32 of sums [ROWS, COLS]."""
    of_col = tl.load(w_scales + col, mask=is_real, other=0.0)
    scaled = sums.to(tl.float32) * of_col[None, :] * of_row[:, None]
    if HAS_BIAS:
        scaled += tl.load(bias + col, mask=is_real, other=0.0).to(tl.float32)[None, :]
    return scaled


@triton.jit(do_not_specialize=["num_rows"])
def int8_gemm_kernel(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    w_scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    inner: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    TILES_DOWN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IN_PAIRS: tl.constexpr,
) -> None:
    """Descriptors of x [T, K], weight [PARTS, width, K], out [T, width]. What lies behind row T,
    output `width` and input K reads as zero and is not written."""
    down = tl.cdiv(num_rows, ROWS)
    across = tl.cdiv(width, COLS)
    kind: tl.constexpr = out.dtype
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        row, first = place_of_tile(tile, down, across, ROWS, COLS, TILES_DOWN)
        sums = tl.zeros([ROWS, PARTS * COLS], tl.int32)
        for step in range(tl.cdiv(inner, DEPTH)):
            given = x.load([row, step * DEPTH])
            part = weight.load([0, first, step * DEPTH]).reshape(PARTS * COLS, DEPTH)
            sums = tl.dot(given, part.T, sums, out_dtype=tl.int32)
        own = row + tl.arange(0, ROWS)
        of_row = tl.load(x_scales + own, mask=own < num_rows, other=0.0)
        col = first + tl.arange(0, COLS)
        real = col < width
        if PARTS == 2:
            left, right = tl.split(sums.reshape(ROWS, 2, COLS).permute(0, 2, 1))
            gate = _scaled(left, of_row, w_scales, bias, col, real, False)
            up = _scaled(right, of_row, w_scales + width, bias, col, real, False)
            gate = rounded(gate, kind, IN_PAIRS).to(tl.float32)
            up = rounded(up, kind, IN_PAIRS).to(tl.float32)
            value = gate / (1.0 + tl.exp(-gate)) * up
        else:
            value = _scaled(sums, of_row, w_scales, bias, col, real, HAS_BIAS)
        out.store([row, first], rounded(value, kind, IN_PAIRS))


def int8_gemm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See `reference.int8.int8_gemm`; inner dimensions and outputs are multiples of 16."""
    out = torch.empty((len(x), len(weight)), dtype=out_dtype, device=x.device)
    if is_small(len(x), weight):
        few = fp8_tuning(x.device, len(x), *weight.shape, gated=False, blocks=False)
        return fp8_small_m(x, x_scales, weight, w_scales, bias, out, few)
    tuning = int8_tuning(x.device, len(x), len(weight))
    return int8_tiles(x, x_scales, weight, w_scales, bias, out, tuning)


def int8_gate_up(
    x: Tensor, x_scales: Tensor, weight: Tensor, w_scales: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """See `reference.int8.int8_gate_up`."""
    num_outputs, inner = len(weight) // 2, weight.shape[1]
    out = torch.empty((len(x), num_outputs), dtype=out_dtype, device=x.device)
    if is_small(len(x), weight):
        few = fp8_tuning(x.device, len(x), num_outputs, inner, gated=True, blocks=False)
        return fp8_small_m(x, x_scales, weight, w_scales, None, out, few, gated=True)
    tuning = int8_tuning(x.device, len(x), len(weight))
    return int8_tiles(x, x_scales, weight, w_scales, None, out, tuning, gated=True)


def is_small(num_rows: int, weight: Tensor) -> bool:
    """Returns whether the kernel of few rows computes this many."""
    return num_rows <= SMALL_ROWS and takes_small(weight)


def int8_tiles(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    w_scales: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tuning: Int8Tuning,
    *,
    gated: bool = False,
) -> Tensor:
    """Computes [T, K] x [N, K] into `out` [T, N], or [T, N / 2] when `gated`."""
    num_rows, width = out.shape
    if num_rows == 0:
        return out
    inner, parts = weight.shape[1], 2 if gated else 1
    cols = tuning.cols // parts
    by_part = weight.view(parts, width, inner)
    int8_gemm_kernel[(num_programs(x.device, 1),)](
        TensorDescriptor.from_tensor(x, [tuning.rows, tuning.depth]),
        x_scales,
        TensorDescriptor.from_tensor(by_part, [parts, cols, tuning.depth]),
        w_scales,
        bias,
        TensorDescriptor.from_tensor(out, [tuning.rows, cols]),
        num_rows,
        width,
        inner,
        ROWS=tuning.rows,
        COLS=cols,
        DEPTH=tuning.depth,
        PARTS=parts,
        TILES_DOWN=TILES_DOWN,
        HAS_BIAS=bias is not None,
        IN_PAIRS=out.dtype == torch.bfloat16 and has_copy_engine(x.device),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    return out
