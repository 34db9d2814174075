"""Joins two parts of an attention by the logarithms of their softmax's sums."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(
    do_not_specialize=["log_sums_stride", "part_log_sums_stride"],
    do_not_specialize_on_alignment=["log_sums"],
)
def merge_attention_kernel(
    out: tl.tensor,
    log_sums: tl.tensor,
    part: tl.tensor,
    part_log_sums: tl.tensor,
    log_sums_stride: tl.tensor,
    part_log_sums_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
) -> None:
    """Joins one head of one token in each program (token, head)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    own_place = log_sums + head * log_sums_stride + token
    own = tl.load(own_place)
    other = tl.load(part_log_sums + head * part_log_sums_stride + token)
    # Where there is nothing in either part, both shares are zero.
    peak = tl.maximum(tl.maximum(own, other), -3.0e38)
    own_share = tl.exp(own - peak)
    other_share = tl.exp(other - peak)
    total = own_share + other_share
    dim = tl.arange(0, BLOCK_VALUE)
    inside = dim < VALUE
    place = (token * NUM_HEADS + head) * VALUE + dim
    value = tl.load(out + place, mask=inside, other=0.0).to(tl.float32) * own_share
    value += tl.load(part + place, mask=inside, other=0.0).to(tl.float32) * other_share
    value = value / tl.where(total > 0.0, total, 1.0)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
    tl.store(own_place, peak + tl.log(total))


def merge_attention(out: Tensor, log_sums: Tensor, part: Tensor, part_log_sums: Tensor) -> None:
    """See `reference.ragged.merge_attention`. `out` and `part` are contiguous."""
    num_tokens, num_heads, value = out.shape
    merge_attention_kernel[(num_tokens, num_heads)](
        out,
        log_sums,
        part,
        part_log_sums,
        log_sums.stride(0),
        part_log_sums.stride(0),
        NUM_HEADS=num_heads,
        VALUE=value,
        BLOCK_VALUE=triton.next_power_of_2(value),
        num_warps=1,
    )
