"""Norms around the residual stream in one launch: of what a block gives, and of the new stream for
all that read it.

A row is a few numbers for each thread, which has them in registers from the first norm to the last.
One by one they are up to eight launches of Gemma 4's layer: two norms, sums and products between
them, and three norms for dense block, router and experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.attention.cache_lines import prefetch_lines
from tandem_kernels.elementwise.norm_forms import Norm, PairedExperts
from tandem_kernels.elementwise.rms_norm import normed_row
from tandem_kernels.experts.expert_sums import experts_of_token, sum_of_token
from tandem_kernels.small_launches import in_turn

MOST_READERS = 3
_LINE = tl.constexpr(32)
"""Numbers of float32 in a line of the cache."""


@triton.jit
def add_normed_kernel(
    x: tl.tensor,
    parts: tl.tensor,
    experts: tl.tensor,
    dense_weight: tl.tensor,
    sparse_weight: tl.tensor,
    weight: tl.tensor,
    residual: tl.tensor,
    scale: tl.tensor,
    weight_1: tl.tensor,
    weight_2: tl.tensor,
    weight_3: tl.tensor,
    out_1: tl.tensor,
    out_2: tl.tensor,
    out_3: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    width: tl.tensor,
    dense_eps: tl.tensor,
    sparse_eps: tl.tensor,
    eps: tl.tensor,
    eps_1: tl.tensor,
    eps_2: tl.tensor,
    eps_3: tl.tensor,
    READERS: tl.constexpr,
    PAIRED: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Adds, in program t, the norm of row t to the stream, and norms that for READERS. The next
    kernel begins when the ones in front have ended: `route_tokens` says why."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < width
    kind: tl.constexpr = residual.dtype.element_ty
    by = tl.load(weight + col, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if SCALED:
        factor = tl.load(scale).to(tl.float32)
    chosen = experts_of_token(experts, row, TOP_K, PAIRED and IN_PAIRS)
    if OVERLAP:
        # Nothing else reads them in a step: they come from memory while the kernels in front run.
        line = tl.minimum(tl.arange(0, BLOCK // _LINE) * _LINE, width - 1)
        if PAIRED:
            prefetch_lines(dense_weight + line)
            prefetch_lines(sparse_weight + line)
        if READERS > 0:
            prefetch_lines(weight_1 + line)
        if READERS > 1:
            prefetch_lines(weight_2 + line)
        if READERS > 2:
            prefetch_lines(weight_3 + line)
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row * x_stride + col, mask=inside, other=0.0)
    place = residual + row * residual_stride + col
    carried = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if PAIRED:
        sums = sum_of_token(
            parts, chosen, parts, row, col, inside, width, kind, TOP_K, BLOCK, IN_PAIRS, False
        )
        of_dense = tl.load(dense_weight + col, mask=inside, other=0.0).to(tl.float32)
        of_sparse = tl.load(sparse_weight + col, mask=inside, other=0.0).to(tl.float32)
        dense = normed_row(value, of_dense, width, dense_eps).to(kind).to(tl.float32)
        sparse = normed_row(sums, of_sparse, width, sparse_eps).to(kind).to(tl.float32)
        value = (dense + sparse).to(kind)
    added = normed_row(value, by, width, eps).to(kind).to(tl.float32)
    total = (added + carried).to(kind)
    if SCALED:
        total = (total.to(tl.float32) * factor).to(kind)
    tl.store(place, total, mask=inside)
    to = row * width + col
    if READERS > 0:
        own = tl.load(weight_1 + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_1 + to, normed_row(total, own, width, eps_1).to(kind), mask=inside)
    if READERS > 1:
        own = tl.load(weight_2 + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_2 + to, normed_row(total, own, width, eps_2).to(kind), mask=inside)
    if READERS > 2:
        own = tl.load(weight_3 + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_3 + to, normed_row(total, own, width, eps_3).to(kind), mask=inside)


def add_normed(
    x: Tensor,
    residual: Tensor,
    by: Norm,
    readers: tuple[Norm, ...] = (),
    scale: Tensor | None = None,
    paired: PairedExperts | None = None,
) -> tuple[Tensor, ...]:
    """See `reference.norms.add_normed`."""
    num_rows, width = x.shape
    outs = tuple(
        torch.empty((num_rows, width), dtype=residual.dtype, device=x.device) for _ in readers
    )
    if num_rows == 0:
        return outs
    block = triton.next_power_of_2(width)
    none: tuple[None, ...] = (None,) * (MOST_READERS - len(readers))
    of_pair: tuple[Tensor | None, ...] = (None,) * 4
    if paired is not None:
        of_pair = paired.parts, paired.experts, paired.dense.weight, paired.sparse.weight
    experts = None if paired is None else paired.experts
    add_normed_kernel[(num_rows,)](
        x,
        *of_pair,
        by.weight,
        residual,
        scale,
        *(one.weight for one in readers),
        *none,
        *outs,
        *none,
        x.stride(0),
        residual.stride(0),
        width,
        0.0 if paired is None else paired.dense.eps,
        0.0 if paired is None else paired.sparse.eps,
        by.eps,
        *(one.eps for one in readers),
        *(0.0 for _ in none),
        READERS=len(readers),
        PAIRED=paired is not None,
        IN_PAIRS=experts is not None,
        TOP_K=1 if experts is None else experts.shape[1],
        SCALED=scale is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **in_turn(x.device, num_rows),
    )
    return outs
