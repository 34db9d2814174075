"""LoRA in plain torch: what adapters add to the outputs of a linear layer.

Each token of a step has the adapter of one slot, or none (-1). A layer may be several projections
of one input: each has its own A and B, which lie behind each other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem_kernels.reference.elementwise import gelu_tanh_and_mul, silu_and_mul
from tandem_kernels.reference.gemm import invariant_gemm
from tandem_kernels.reference.layouts import kernel_takes

NO_SLOT = -1


@kernel_takes(
    row_slots="_: int32", idx_mapping="R: int32", query_start_loc="R+1: int32", out="_: int32"
)
def lora_slots_of_tokens(
    row_slots: Tensor, idx_mapping: Tensor, query_start_loc: Tensor, out: Tensor
) -> None:
    """Writes the slot of each token of a step; -1 behind the last one.

    Args:
        row_slots: [rows] int32.
        idx_mapping: [R] int32, request of the step -> row; -1: padding.
        query_start_loc: [R + 1] int32.
        out: [T] int32.
    """
    slots = torch.where(idx_mapping < 0, NO_SLOT, row_slots[idx_mapping.clamp(min=0).long()])
    counts = query_start_loc.diff().long()
    found = slots.int().repeat_interleave(counts)
    out.fill_(NO_SLOT)
    out[: len(found)] = found[: len(out)]


@kernel_takes(x="T | K", a="_ | _ K", token_slots="T: int32")
def lora_shrink(
    x: Tensor,
    a: Tensor,
    token_slots: Tensor,
    *,
    fixed_order: bool = False,
    most_pieces: int = 16,
) -> Tensor:
    """Multiplies each token by A of its slot: [T, K] -> [1, T, P * r] float32.

    Args:
        a: [slots, P * r, K].
        token_slots: [T] int32; of tokens without a slot nothing is defined.
        fixed_order: A token's bits do not depend on the others.
        most_pieces: K is cut in this many at most.

    The result is the sum over its first dimension: kernels cut K in pieces.
    """
    out = x.new_zeros((1, x.shape[0], a.shape[1]), dtype=torch.float32)
    for slot in set(token_slots.tolist()):
        if slot != NO_SLOT:
            of_slot = token_slots == slot
            out[0, of_slot] = _product(x[of_slot].float(), a[slot].float(), fixed_order)
    return out


@kernel_takes(shrunk="_ T _: float32", b="_ | N _", token_slots="T: int32", out="T | N")
def lora_expand(
    shrunk: Tensor,
    b: Tensor,
    token_slots: Tensor,
    ends: tuple[int, ...],
    out: Tensor,
    *,
    fixed_order: bool = False,
) -> None:
    """Adds to `out` [T, N] in place what adapters make of `shrunk`, as `lora_shrink` returns it.

    Args:
        b: [slots, N, r].
        ends: Where the outputs of each of the P projections end; the last is N.
    """
    rank = b.shape[2]
    whole = shrunk.sum(0)
    for slot in set(token_slots.tolist()):
        if slot == NO_SLOT:
            continue
        of_slot = token_slots == slot
        start = 0
        for part, end in enumerate(ends):
            h = whole[of_slot, part * rank : (part + 1) * rank].to(b.dtype)
            delta = _product(h.float(), b[slot, start:end].float(), fixed_order)
            out[of_slot, start:end] = (out[of_slot, start:end].float() + delta).to(out.dtype)
            start = end


@kernel_takes(shrunk="_ T _: float32", b="_ | N _", token_slots="T: int32", out="T | N")
def lora_expand_few(
    shrunk: Tensor, b: Tensor, token_slots: Tensor, ends: tuple[int, ...], out: Tensor
) -> None:
    """Does what `lora_expand` does; kernels do it faster for few tokens."""
    lora_expand(shrunk, b, token_slots, ends, out)


@kernel_takes(shrunk="_ T _: float32", b="_ | N _", token_slots="T: int32", both="T | N")
def lora_expand_gated(
    shrunk: Tensor, b: Tensor, token_slots: Tensor, both: Tensor, *, is_gelu: bool
) -> Tensor:
    """Adds what adapters make of `shrunk` to `both` [T, 2 * N], gate and then up, and returns
    `activation(gate) * up` [T, N]. `both` stays.

    Args:
        b: [slots, 2 * N, r].
    """
    half = both.shape[1] // 2
    added = both.clone()
    lora_expand(shrunk, b, token_slots, (half, 2 * half), added)
    return gelu_tanh_and_mul(added) if is_gelu else silu_and_mul(added)


@kernel_takes(
    x="T | K",
    weight="N K",
    bias="N",
    a="S | _ K",
    b="S | N _",
    token_slots="T: int32",
    counters="_: int32",
)
def lora_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    token_slots: Tensor,
    ends: tuple[int, ...],
    counters: Tensor,
) -> Tensor:
    """Multiplies few rows by a layer's weight [N, K], and adds its bias [N] and what adapters make
    of them: [T, K] -> [T, N].

    Args:
        counters: [`num_counters(N)`] int32, zeros, which kernels use and leave zero. No two
            launches at a time may have the same.
    """
    out = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    lora_expand(lora_shrink(x, a, token_slots), b, token_slots, ends, out)
    return out.to(x.dtype)


@kernel_takes(
    x="T | K",
    weight="N K",
    a="S | _ K",
    b="S | N _",
    token_slots="T: int32",
    counters="_: int32",
)
def lora_gate_up(
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    token_slots: Tensor,
    counters: Tensor,
    *,
    is_gelu: bool,
) -> Tensor:
    """Does the same with gate and up behind it, weight [2 * N, K], and returns
    `activation(gate) * up` [T, N]."""
    half = len(weight) // 2
    both = lora_gemm(x, weight, None, a, b, token_slots, (half, 2 * half), counters)
    return gelu_tanh_and_mul(both) if is_gelu else silu_and_mul(both)


def _product(x: Tensor, weight: Tensor, fixed_order: bool) -> Tensor:
    return invariant_gemm(x, weight) if fixed_order else F.linear(x, weight)
