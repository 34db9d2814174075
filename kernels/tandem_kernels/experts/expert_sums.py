"""The sum of what experts give a token: by itself, or where the residual stream is normed.

A token's outputs lie beside each other, one of each of its experts, as the second GEMM has written
them. By themselves sum and norm would write a tensor and read it again; together they are one
launch, which gives the same bits. So do what a shared expert has computed beside them, and its sum
with theirs.

What takes time is memory that answers, so all is asked for at once: which pairs exist before the
kernel in front has ended (PDL), and a thread has few enough numbers of the row for registers to
hold them of all pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.elementwise.rms_norm import normed_row
from tandem_kernels.small_launches import in_turn, take_turn

_NUMBERS = 8
"""A thread has as many of a row: one vector of each pair."""
_REGISTERS = 128
"""Bounds those of a thread, which needs fewer. Without a bound the assembler takes so few that most
vectors are asked for only when others have arrived (`findings/triton_maxnreg_asks_at_once.sh`)."""


@triton.jit
def experts_of_token(
    experts: tl.tensor, token: tl.tensor, TOP_K: tl.constexpr, IN_PAIRS: tl.constexpr
) -> tl.tuple:
    """Loads a token's experts, none where there are sums. A kernel behind the second GEMM may do so
    before it waits: the first one lets others begin when experts are known. Reads past the SM's own
    cache, which may hold what was there before."""
    chosen: tl.tuple = ()
    if IN_PAIRS:
        for place in tl.static_range(TOP_K):
            chosen += (tl.load(experts + token * TOP_K + place, cache_modifier=".cg"),)
    return chosen


@triton.jit
def sum_of_token(
    parts: tl.tensor,
    chosen: tl.tuple,
    beside: tl.tensor,
    token: tl.tensor,
    col: tl.tensor,
    inside: tl.tensor,
    width: tl.tensor,
    kind: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    HAS_BESIDE: tl.constexpr,
) -> tl.tensor:
    """Returns columns `col` [BLOCK] of a token's sum, as `kind` rounds them, in float32.

    chosen: `experts_of_token`.
    IN_PAIRS: Else TOP_K is 1, and `parts` are sums.
    """
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        real = inside
        if IN_PAIRS:
            real = inside & (chosen[place] >= 0)
        total += tl.load(parts + pair * width + col, mask=real, other=0.0).to(tl.float32)
    total = total.to(kind).to(tl.float32)
    if HAS_BESIDE:
        own = tl.load(beside + token * width + col, mask=inside, other=0.0).to(tl.float32)
        total = (total + own).to(kind).to(tl.float32)
    return total


def forms_of(experts: Tensor | None, beside: Tensor | None) -> dict[str, int | bool]:
    """Returns the constants of `sum_of_token` for these."""
    return {
        "TOP_K": 1 if experts is None else experts.shape[1],
        "IN_PAIRS": experts is not None,
        "HAS_BESIDE": beside is not None,
    }


@triton.jit
def sum_pairs_kernel(
    parts: tl.tensor,
    experts: tl.tensor,
    beside: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    TOP_K: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    HAS_BESIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Sums, in program (t, j), columns j * BLOCK and on of token t over its experts."""
    token = tl.program_id(0).to(tl.int64)
    chosen = experts_of_token(experts, token, TOP_K, IN_PAIRS)
    take_turn(OVERLAP)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    kind = out.dtype.element_ty
    total = sum_of_token(
        parts, chosen, beside, token, col, inside, width, kind, TOP_K, BLOCK, IN_PAIRS, HAS_BESIDE
    )
    tl.store(out + token * width + col, total.to(kind), mask=inside)


@triton.jit
def pairs_add_rms_norm_kernel(
    parts: tl.tensor,
    experts: tl.tensor,
    beside: tl.tensor,
    given: tl.tensor,
    gate: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    residual_stride: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    TOP_K: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    HAS_BESIDE: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Adds, in program t, token t's sum to its row of the residual stream, and normalises it. The
    next kernel begins when the ones in front have ended: `route_tokens` says why."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < width
    scale = tl.load(weight + col, mask=inside, other=0.0).to(tl.float32)
    chosen = experts_of_token(experts, token, TOP_K, IN_PAIRS)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    kind = out.dtype.element_ty
    place = residual + token * residual_stride + col
    carried = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    # What has a gate is not added in there.
    adds: tl.constexpr = HAS_BESIDE and not HAS_GATE
    total = sum_of_token(
        parts, chosen, beside, token, col, inside, width, kind, TOP_K, BLOCK, IN_PAIRS, adds
    )
    if HAS_GATE:
        at = token * width + col
        own = tl.load(beside + at, mask=inside, other=0.0).to(tl.float32)
        read = tl.load(given + at, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(gate + col, mask=inside, other=0.0).to(tl.float32)
        odds = 1.0 + tl.exp(-tl.sum(read * factor, axis=0))
        total = (total + (own / odds).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    value = (total + carried).to(kind)
    tl.store(place, value, mask=inside)
    normed = normed_row(value, scale, width, eps)
    tl.store(out + token * width + col, normed.to(kind), mask=inside)


def sum_pairs(parts: Tensor, experts: Tensor | None, beside: Tensor | None = None) -> Tensor:
    """See `reference.experts.sum_pairs`."""
    num_tokens, width = len(parts if experts is None else experts), parts.shape[1]
    out = torch.empty((num_tokens, width), dtype=parts.dtype, device=parts.device)
    if num_tokens == 0:
        return out
    block = min(1024, triton.next_power_of_2(width))
    grid = (num_tokens, triton.cdiv(width, block))
    sum_pairs_kernel[grid](
        parts,
        experts,
        beside,
        out,
        width,
        BLOCK=block,
        **forms_of(experts, beside),
        maxnreg=_REGISTERS,
        **in_turn(out.device),
    )
    return out


def pairs_add_rms_norm(
    parts: Tensor,
    experts: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    beside: Tensor | None = None,
    gate: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """See `reference.experts.pairs_add_rms_norm`."""
    num_tokens, width = residual.shape
    out = torch.empty((num_tokens, width), dtype=residual.dtype, device=residual.device)
    if num_tokens == 0:
        return out
    block = triton.next_power_of_2(width)
    pairs_add_rms_norm_kernel[(num_tokens,)](
        parts,
        experts,
        beside,
        *((None, None) if gate is None else gate),
        residual,
        weight,
        out,
        residual.stride(0),
        width,
        eps,
        HAS_GATE=gate is not None,
        BLOCK=block,
        **forms_of(experts, beside),
        num_warps=min(max(block // (32 * _NUMBERS), 1), 16),
        maxnreg=_REGISTERS,
        **in_turn(out.device),
    )
    return out
