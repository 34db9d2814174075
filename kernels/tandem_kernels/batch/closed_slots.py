"""Slots of the rows that tokens close, where a row stands for several; and ids of tokens that have
a slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.small_launches import in_turn, take_turn

_BLOCK = 256


@triton.jit(do_not_specialize=["num_tokens"])
def closed_slots_kernel(
    slot_mapping: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes BLOCK tokens in each program."""
    take_turn(OVERLAP)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = token < num_tokens
    slot = tl.load(slot_mapping + token, mask=real, other=-1)
    closes = (slot >= 0) & (slot % TOKENS == TOKENS - 1)
    tl.store(out + token, tl.where(closes, slot // TOKENS, -1), mask=real)


def closed_slots(slot_mapping: Tensor, tokens: int) -> Tensor:
    """See `reference.token_rows.closed_slots`."""
    out = torch.empty_like(slot_mapping)
    num_tokens = len(slot_mapping)
    if num_tokens == 0:
        return out
    closed_slots_kernel[(triton.cdiv(num_tokens, _BLOCK),)](
        slot_mapping,
        out,
        num_tokens,
        TOKENS=tokens,
        BLOCK=_BLOCK,
        num_warps=4,
        **in_turn(slot_mapping.device, num_tokens),
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def placed_ids_kernel(
    slot_mapping: tl.tensor,
    input_ids: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Writes BLOCK tokens in each program."""
    take_turn(OVERLAP)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = token < num_tokens
    slot = tl.load(slot_mapping + token, mask=real, other=-1)
    own = tl.load(input_ids + token, mask=real, other=0).to(tl.int64)
    tl.store(out + token, tl.where(slot < 0, -1, own), mask=real)


def placed_ids(slot_mapping: Tensor, input_ids: Tensor) -> Tensor:
    """See `reference.token_rows.placed_ids`."""
    out = torch.empty_like(slot_mapping)
    num_tokens = len(slot_mapping)
    if num_tokens > 0:
        placed_ids_kernel[(triton.cdiv(num_tokens, _BLOCK),)](
            slot_mapping,
            input_ids,
            out,
            num_tokens,
            BLOCK=_BLOCK,
            num_warps=4,
            **in_turn(slot_mapping.device, num_tokens),
        )
    return out
