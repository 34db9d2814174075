"""Checks attention's front of few rows in one launch, for any column of the dispatch table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import kernel_oracle as oracle
import torch
from kernel_checks import ELEMENTWISE
from torch import Tensor

EPS = 1e-5
POSITIONS = 64


def few_row_qkv(
    op: Callable[..., Any],
    num_rows: int,
    inner: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    bias: bool = True,
    norm: bool = True,
) -> None:
    """Checks heads (Hq, Hkv, D) of rows that lie apart, and the cache: the last row is padding
    where there are several, and nothing but the others' slots changes."""
    num_q_heads, num_kv_heads, head_dim = heads
    num_outputs = (num_q_heads + 2 * num_kv_heads) * head_dim
    x = (torch.randn(num_rows, 2 * inner, device=device) * 3).to(dtype)[:, :inner]
    weight = (torch.randn(num_outputs, inner, device=device) * inner**-0.5).to(dtype)
    added = torch.randn(num_outputs, device=device).to(dtype) if bias else None
    norm_weight = torch.randn(inner, device=device).to(dtype) if norm else None
    angles = oracle.rope_angles(POSITIONS, head_dim).to(device)
    positions = torch.randint(1, POSITIONS, (num_rows,), device=device)
    slots = torch.randperm(3 * 16, device=device)[:num_rows]
    slots[1:][-1:] = -1
    # Blocks lie apart, as those of a layer among others do.
    wide = torch.full((3, 3, num_kv_heads, 16, head_dim), math.nan, device=device).to(dtype)
    kv_cache = wide[:, :2]
    normed = x.double() if norm_weight is None else oracle.rms_norm(x, norm_weight, EPS)
    exact = normed @ weight.double().t() + (0.0 if added is None else added.double())
    parts = exact.view(num_rows, -1, head_dim).split([num_q_heads, num_kv_heads, num_kv_heads], 1)
    turned = [oracle.rotate(part, angles[positions]) for part in parts[:2]]
    table = oracle.cos_sin_cache(angles)
    found = op(x, weight, added, positions, table, kv_cache, slots, norm_weight, EPS)

    assert found.shape == (num_rows, num_q_heads + 2 * num_kv_heads, head_dim)
    assert found.dtype == dtype
    within = ELEMENTWISE[dtype]
    real = slots >= 0
    assert oracle.relative_error(found[:, :num_q_heads], turned[0]) < within
    expected = torch.stack((turned[1], parts[2]), 1)[real]
    written = torch.stack(found[:, num_q_heads:].split(num_kv_heads, 1), 1)[real]
    assert oracle.relative_error(written[:, 0], expected[:, 0]) < within
    assert oracle.relative_error(written[:, 1], expected[:, 1]) < within
    _check_cache(wide, slots[real], written)


def _check_cache(wide: Tensor, slots: Tensor, written: Tensor) -> None:
    """`wide` [N, 3, Hkv, B, D] has `written` [n, 2, Hkv, D] in its slots, and else nothing."""
    by_slot = wide.permute(0, 3, 1, 2, 4).flatten(0, 1)
    assert torch.equal(by_slot[slots, :2], written)
    others = torch.ones(len(by_slot), dtype=torch.bool, device=wide.device)
    others[slots] = False
    assert by_slot[others].isnan().all() and by_slot[:, 2].isnan().all()
