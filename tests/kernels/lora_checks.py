"""Checks what the operations of adapters must do, for any column of the dispatch table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernel_oracle as oracle
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem_kernels.lora.lora_gemm_shapes import num_counters

Op = Callable[..., Any]

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def slots_of_tokens(op: Op, device: str = "cpu") -> None:
    """Requests of no, one and many tokens, rows without a slot, padding, and tokens behind."""
    row_slots = torch.tensor([2, -1, 0, 1], dtype=torch.int32, device=device)
    idx_mapping = torch.tensor([3, 0, 1, 2, -1], dtype=torch.int32, device=device)
    counts = [300, 1, 2, 0, 4]
    bounds = torch.tensor([0, *counts], device=device).cumsum(0).int()
    out = torch.full((320,), 7, dtype=torch.int32, device=device)
    op(row_slots, idx_mapping, bounds, out)
    slots = torch.tensor([1, 2, -1, 0, -1, -1])
    expected = slots.repeat_interleave(torch.tensor([*counts, 320 - sum(counts)]))
    assert out.tolist() == expected.tolist()


def shrink_and_expand(
    shrink: Op,
    expand: Op,
    num_tokens: int,
    inner: int,
    counts: tuple[int, ...],
    rank: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """Several slots and none, mixed; matrices lie apart in a slot; the rest of `out` stays. In
    fixed order a token has the same bits alone."""
    num_slots, num_outputs = 3, sum(counts)
    x = torch.randn(num_tokens, 2 * inner, device=device).to(dtype)[:, :inner]
    rows = len(counts) * rank
    a, b = (
        (torch.randn(num_slots, size + 64, device=device) * width**-0.5).to(dtype)[:, :size]
        for size, width in ((rows * inner, inner), (num_outputs * rank, rank))
    )
    a, b = a.view(num_slots, rows, inner), b.view(num_slots, num_outputs, rank)
    slots = torch.randint(-1, num_slots, (num_tokens,), dtype=torch.int32, device=device)
    slots[:1] = 1
    ends = tuple(torch.tensor(counts).cumsum(0).tolist())
    before = torch.randn(num_tokens, num_outputs, device=device).to(dtype)
    expected = before.double()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[token] += _delta(x[token], a[slot], b[slot], ends)
    for fixed in (False, True):

        def run(part: slice, fixed: bool = fixed) -> Tensor:
            out, own = before[part].clone(), slots[part]
            shrunk = shrink(x[part], a, own, fixed_order=fixed)
            assert shrunk.dtype == torch.float32
            expand(shrunk, b, own, ends, out, fixed_order=fixed)
            return out

        found = run(slice(None))
        assert oracle.relative_error(found, expected) < TOLERANCE[dtype]
        assert torch.equal(found[slots < 0], before[slots < 0])
    assert torch.equal(run(slice(0, 1)), found[:1])


def few_tokens(
    shrink: Op,
    expand: Op,
    gated: Op,
    num_tokens: int,
    inner: int,
    counts: tuple[int, ...],
    rank: int,
    dtype: torch.dtype,
    device: str = "cpu",
    num_slots: int = 3,
    most_pieces: int = 16,
) -> None:
    """Does what the other expand does, and the same before an activation; slots that nobody has
    are not read."""
    num_outputs, rows = sum(counts), len(counts) * rank
    x = torch.randn(num_tokens, inner, device=device).to(dtype)
    a = (torch.randn(num_slots, rows, inner, device=device) * inner**-0.5).to(dtype)
    b = (torch.randn(num_slots, num_outputs, rank, device=device) * rank**-0.5).to(dtype)
    slots = torch.randint(-1, num_slots, (num_tokens,), dtype=torch.int32, device=device)
    slots[slots == 1] = 0
    a[1] = b[1] = float("nan")
    ends = tuple(torch.tensor(counts).cumsum(0).tolist())
    before = torch.randn(num_tokens, num_outputs, device=device).to(dtype)
    expected = before.double()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[token] += _delta(x[token], a[slot], b[slot], ends)
    shrunk = shrink(x, a, slots, most_pieces=most_pieces)
    assert len(shrunk) <= most_pieces
    out = before.clone()
    expand(shrunk, b, slots, ends, out)
    assert oracle.relative_error(out, expected) < TOLERANCE[dtype]
    assert torch.equal(out[slots < 0], before[slots < 0])
    if len(counts) != 2:
        return
    gate, up = expected.chunk(2, dim=1)
    for is_gelu in (False, True):
        made = F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)
        found = gated(shrunk, b, slots, before, is_gelu=is_gelu)
        assert oracle.relative_error(found, made * up) < 2 * TOLERANCE[dtype]


def one_launch(
    gemm: Op,
    gate_up: Op,
    num_tokens: int,
    inner: int,
    counts: tuple[int, ...],
    rank: int,
    num_slots: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """The layer, its bias and adapters, time and again with the same counters; slots that nobody
    has are not read."""
    num_outputs, rows = sum(counts), len(counts) * rank

    def random(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, device=device) * scale).to(dtype)

    x = random(num_tokens, 2 * inner)[:, :inner]
    weight, bias = random(num_outputs, inner, scale=inner**-0.5), random(num_outputs)
    a = random(num_slots, rows, inner, scale=inner**-0.5)
    b = random(num_slots, num_outputs, rank, scale=rank**-0.5)
    a[1] = b[1] = float("nan")
    ends = tuple(torch.tensor(counts).cumsum(0).tolist())
    counters = torch.zeros(num_counters(num_outputs), dtype=torch.int32, device=device)
    for some in ([0, -1], [-1], list(range(-1, num_slots))):
        choice = torch.tensor(some, dtype=torch.int32, device=device)
        slots = choice[torch.randint(0, len(some), (num_tokens,), device=device)]
        slots[slots == 1] = 0
        plain = x.double() @ weight.double().T
        added = torch.zeros_like(plain)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                added[token] = _delta(x[token], a[slot], b[slot], ends)
        for given in (bias,) if len(some) > 1 else (None,):
            expected = plain + added if given is None else plain + added + given.double()
            out = gemm(x, weight, given, a, b, slots, ends, counters)
            assert oracle.relative_error(out, expected) < TOLERANCE[dtype]
            assert not counters.any()
        if len(counts) != 2:
            continue
        gate, up = (plain + added).chunk(2, dim=1)
        for is_gelu in (False, True):
            made = F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)
            out = gate_up(x, weight, a, b, slots, counters, is_gelu=is_gelu)
            assert oracle.relative_error(out, made * up) < 2 * TOLERANCE[dtype]
            assert not counters.any()


def _delta(x: Tensor, a: Tensor, b: Tensor, ends: tuple[int, ...]) -> Tensor:
    rank, start, parts = b.shape[1], 0, []
    for index, end in enumerate(ends):
        shrunk = a[index * rank : (index + 1) * rank].double() @ x.double()
        parts.append(b[start:end].double() @ shrunk)
        start = end
    return torch.cat(parts)
