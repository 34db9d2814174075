"""The norm in front of a router, and the router, in one launch for few rows.

A norm multiplies a row by one number, so a router may sum up first and multiply by that number
last. Each program holds whole rows, and the weights of a few experts, in registers: it adds up the
row's squares beside its products, and nothing waits for a norm. Logits are of rows that nothing has
rounded. The experts need the normed rows themselves: each program writes some of their columns.

All weights are asked for before the kernel in front has ended (PDL). The next kernel may begin only
after that, `route_tokens` says why, and here only when logits are written: its programs, which fill
all SMs, would else lie beside those of this one on some.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import uses_pdl
from tandem_kernels.experts.router_shapes import FEW
from tandem_kernels.gemm.few_row_shapes import VECTOR

_COLUMN_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class RouterTuning:
    """Says how a router runs.

    Attributes:
        cols: Experts of a program.
        lanes: Numbers of a row that a thread holds.
    """

    cols: int = 2
    lanes: int = 16


TUNING, TUNING_OF_MANY = RouterTuning(), RouterTuning(cols=1)
"""The first has as many programs as `few_row_gemm` for a router. Of more than `FEW` rows, products
take longer than another program does: eight of gpt-oss-20b 3.4 us in place of 4.5."""


@triton.jit(do_not_specialize=["num_rows"])
def normed_router_kernel(
    x: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    logits: tl.tensor,
    normed: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    eps: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARE: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes, in program j, logits j * COLS and on of all rows, and normed columns j * SHARE and
    on."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, DEPTH)
    real_col = col < num_outputs
    real_row = row < num_rows
    inside = lane < inner
    places = weight + col.to(tl.int64)[:, None] * inner + lane[None, :]
    by = tl.load(places, mask=real_col[:, None] & inside[None, :], other=0.0)
    scale = tl.load(norm_weight + lane, mask=inside, other=0.0).to(tl.float32)
    added = 0.0
    if HAS_BIAS:
        added = tl.load(bias + col, mask=real_col, other=0.0)[:, None]
    if OVERLAP:
        gdc_wait()
    offsets = row.to(tl.int64)[:, None] * inner + lane[None, :]
    wide = tl.load(x + offsets, mask=real_row[:, None] & inside[None, :], other=0.0).to(tl.float32)
    given = (wide * scale[None, :]).reshape(1, ROWS, DEPTH // VECTOR, VECTOR)
    products = by.to(tl.float32).reshape(COLS, 1, DEPTH // VECTOR, VECTOR) * given
    acc = tl.sum(tl.sum(products, axis=3), axis=2)
    factor = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=1) / inner + eps)
    acc = acc * factor[None, :] + added
    to = logits + row.to(tl.int64)[None, :] * num_outputs + col[:, None]
    tl.store(to, acc, mask=real_col[:, None] & real_row[None, :])
    if OVERLAP:
        gdc_launch_dependents()
    own = inside & (lane >= tl.program_id(0) * SHARE) & (lane < (tl.program_id(0) + 1) * SHARE)
    out = (wide * factor[:, None] * scale[None, :]).to(normed.dtype.element_ty)
    tl.store(normed + offsets, out, mask=real_row[:, None] & own[None, :])


def normed_router(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `reference.experts.normed_router`; only for what `router_shapes.norms_rows` says."""
    logits = torch.empty((len(x), len(weight)), dtype=torch.float32, device=x.device)
    normed = torch.empty_like(x)
    tuning = TUNING if len(x) <= FEW else TUNING_OF_MANY
    run_normed_router(x, norm_weight, eps, weight, bias, logits, normed, tuning)
    return logits, normed


def run_normed_router(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    logits: Tensor,
    normed: Tensor,
    tuning: RouterTuning,
) -> None:
    """Computes one router into `logits` [T, E] and `normed` [T, H]."""
    num_rows, inner = x.shape
    depth = triton.next_power_of_2(inner)
    programs = triton.cdiv(len(weight), tuning.cols)
    share = triton.cdiv(triton.cdiv(inner, programs), _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE
    overlap = uses_pdl(x.device, num_rows)
    normed_router_kernel[(programs,)](
        x,
        norm_weight,
        weight,
        bias,
        logits,
        normed,
        num_rows,
        len(weight),
        inner,
        eps,
        ROWS=triton.next_power_of_2(num_rows),
        COLS=tuning.cols,
        DEPTH=depth,
        SHARE=share,
        VECTOR=VECTOR,
        HAS_BIAS=bias is not None,
        OVERLAP=overlap,
        num_warps=min(max(depth // (32 * tuning.lanes), 1), 16),
        **({"launch_pdl": True} if overlap else {}),
    )
