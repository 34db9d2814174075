"""RMSNorm of groups of numbers that have a gate, and of groups that ranks share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.small_launches import in_turn, take_turn

TILE = 1024
"""Numbers of a group that are read at once."""


@triton.jit
def _numbers(
    x: tl.tensor, gate: tl.tensor, first: tl.tensor, column: tl.tensor, WIDTH: tl.constexpr,
    BEHIND: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns numbers of a group that begins at `first`, times the SiLU of their gates if these are
    in front of the norm."""
    inside = column < WIDTH
    value = tl.load(x + first + column, mask=inside, other=0.0).to(tl.float32)
    if not BEHIND:
        steep = tl.load(gate + first + column, mask=inside, other=0.0).to(tl.float32)
        value *= steep / (1.0 + tl.exp(-steep))
    return value


@triton.jit
def gated_group_norm_kernel(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    means: tl.tensor,
    out: tl.tensor,
    gate_stride: tl.tensor,
    eps: tl.tensor,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ONLY_SUMS: tl.constexpr,
    BEHIND: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes group j of token i in program (i, j), or its sum of squares alone, to `out`."""
    take_turn(OVERLAP)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, lane = group * WIDTH, tl.arange(0, TILE)
    own, gates = x + token * (GROUPS * WIDTH), gate + token * gate_stride
    total = 0.0
    if means is None:
        squares = tl.zeros([TILE], tl.float32)
        for start in tl.static_range(0, WIDTH, TILE):
            value = _numbers(own, gates, first, start + lane, WIDTH, BEHIND)
            squares += value * value
        total = tl.sum(squares, axis=0)
    if ONLY_SUMS:
        tl.store(out + token * GROUPS + group, total)
    else:
        mean = total / WIDTH if means is None else tl.load(means + token * GROUPS + group)
        scale = 1.0 / tl.sqrt_rn(mean + eps)
        for start in tl.static_range(0, WIDTH, TILE):
            column = start + lane
            inside = column < WIDTH
            value = _numbers(own, gates, first, column, WIDTH, BEHIND) * scale
            value *= tl.load(weight + first + column, mask=inside, other=0.0).to(tl.float32)
            if BEHIND:
                steep = tl.load(gates + first + column, mask=inside, other=0.0).to(tl.float32)
                value *= 1.0 / (1.0 + tl.exp(-steep))
            to = out + token * (GROUPS * WIDTH) + first + column
            tl.store(to, value.to(out.dtype.element_ty), mask=inside)


def gated_square_sums(x: Tensor, gate: Tensor, groups: int, is_behind: bool = False) -> Tensor:
    """See `reference.mamba.gated_square_sums`."""
    sums = torch.empty((len(x), groups), dtype=torch.float32, device=x.device)
    _launch(x, gate, None, 0.0, groups, None, is_behind, sums)
    return sums


def gated_group_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    groups: int,
    means: Tensor | None = None,
    is_behind: bool = False,
) -> Tensor:
    """See `reference.mamba.gated_group_norm`."""
    out = torch.empty_like(x)
    _launch(x, gate, weight, eps, groups, means, is_behind, out)
    return out


def _launch(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    groups: int,
    means: Tensor | None,
    is_behind: bool,
    out: Tensor,
) -> None:
    """Computes the norm, or without a `weight` the sums."""
    num_tokens, width = len(x), x.shape[1] // groups
    if num_tokens > 0:
        gated_group_norm_kernel[(num_tokens, groups)](
            x,
            gate,
            weight,
            means,
            out,
            gate.stride(0),
            eps,
            GROUPS=groups,
            WIDTH=width,
            TILE=min(TILE, triton.next_power_of_2(width)),
            ONLY_SUMS=weight is None,
            BEHIND=is_behind,
            num_warps=4,
            **in_turn(x.device, num_tokens),
        )
