"""Checks what the operations of adapters must do, for any column of the dispatch table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernel_oracle as oracle
import torch
from torch import Tensor

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


def _delta(x: Tensor, a: Tensor, b: Tensor, ends: tuple[int, ...]) -> Tensor:
    rank, start, parts = b.shape[1], 0, []
    for index, end in enumerate(ends):
        shrunk = a[index * rank : (index + 1) * rank].double() @ x.double()
        parts.append(b[start:end].double() @ shrunk)
        start = end
    return torch.cat(parts)
