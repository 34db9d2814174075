"""Checks what layers of Mamba 2 must do, in either column and on any device; the expected numbers
are float64, one token and one head at a time, and share no code with either."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from delta_checks import STATE_TOLERANCE, TOLERANCE, Batch, in_pages, spoiled
from kernel_oracle import relative_error
from torch import Tensor

from tandem_kernels.batch.state_metadata import StateMetadata

Op = Callable[..., Any]


@dataclass(frozen=True)
class Sizes:
    """The shape of a layer."""

    heads: int = 4
    groups: int = 2
    size: int = 8
    head_dim: int = 12

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim + 2 * self.groups * self.size


@dataclass
class Layer:
    """The inputs of one call, and what it must give."""

    batch: Batch
    sizes: Sizes
    metadata: StateMetadata
    mixed: Tensor
    steps: Tensor
    numbers: tuple[Tensor, Tensor, Tensor]
    states: Tensor

    @classmethod
    def random(cls, batch: Batch, sizes: Sizes, dtype: torch.dtype, device: str) -> Layer:
        """Rows lie apart, as slices of a projection do. Some heads forget at once, others hardly,
        and some steps are so large that their exponential is not finite."""
        metadata = batch.metadata(device)
        num_tokens, heads = sum(batch.lengths), sizes.heads

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device)

        states = in_pages(randn(len(batch.lengths) + 3, heads, sizes.size, sizes.head_dim))
        states.copy_(spoiled(states.clone(), batch, metadata.blocks))
        wide = randn(num_tokens, sizes.channels + heads + 8).to(dtype)
        steps = wide[:, sizes.channels + 8 :]
        steps[:: max(1, num_tokens // 3), 0] = 90.0
        a_log = torch.linspace(-6.0, 2.5, heads, device=device)
        return cls(
            batch,
            sizes,
            metadata,
            wide[:, : sizes.channels],
            steps,
            (a_log, randn(heads) - 2, randn(heads)),
            states,
        )

    def expected(self) -> tuple[Tensor, Tensor]:
        """Returns what every token reads [T, H, P], and the states."""
        sizes = self.sizes
        inner, keys = sizes.heads * sizes.head_dim, sizes.groups * sizes.size
        device, wide = self.mixed.device, self.mixed.cpu().double()
        x = wide[:, :inner].unflatten(1, (sizes.heads, sizes.head_dim))
        b, c = (
            wide[:, first : first + keys]
            .unflatten(1, (sizes.groups, sizes.size))
            .repeat_interleave(sizes.heads // sizes.groups, dim=1)
            for first in (inner, inner + keys)
        )
        a_log, dt_bias, skip = (number.cpu().double() for number in self.numbers)
        dt = torch.nn.functional.softplus(self.steps.cpu().double() + dt_bias)
        decay = (-a_log.exp() * dt).exp()
        read = torch.full(x.shape, math.nan, dtype=torch.float64)
        states = self.states.cpu().double()
        for r, first in self.batch.spans():
            block = int(self.metadata.blocks[r])
            if not self.batch.before[r]:
                states[block] = 0
            for t in range(first, first + self.batch.lengths[r]):
                kept = decay[t][:, None, None] * states[block]
                states[block] = kept + b[t][:, :, None] * (dt[t][:, None] * x[t])[:, None]
                read[t] = torch.einsum("hn,hnp->hp", c[t], states[block]) + skip[:, None] * x[t]
        return read.to(device), states.to(device)

    def call(self, op: Op, fixed_order: bool = False) -> Tensor:
        return op(
            self.mixed, self.steps, *self.numbers, self.states, self.metadata, fixed_order
        )  # fmt: skip

    def check(self, op: Op, fixed_order: bool = False) -> Tensor:
        """Runs `op` and compares; returns what was read."""
        expected, expected_states = self.expected()
        untouched = self.states.clone()
        out = self.call(op, fixed_order)
        dtype = self.mixed.dtype
        assert out.dtype == dtype
        used = torch.zeros(len(self.states), dtype=torch.bool, device=out.device)
        for r, first in self.batch.spans():
            rows = slice(first, first + self.batch.lengths[r])
            assert relative_error(out[rows], expected[rows]) < TOLERANCE[dtype]
            block = int(self.metadata.blocks[r])
            found = relative_error(self.states[block], expected_states[block])
            assert found < STATE_TOLERANCE[dtype]
            used[block] = True
        torch.testing.assert_close(
            self.states[~used], untouched[~used], rtol=0, atol=0, equal_nan=True
        )
        return out


def mamba_scan(
    op: Op,
    batch: Batch,
    sizes: Sizes,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    fixed_order: bool = False,
) -> None:
    Layer.random(batch, sizes, dtype, device).check(op, fixed_order)


def cut_anywhere(op: Op, sizes: Sizes, dtype: torch.dtype, device: str = "cpu") -> None:
    """In fixed order a request's bits do not depend on how its tokens are cut into steps."""
    whole = Layer.random(Batch((90,), (0,)), sizes, dtype, device)
    expected = whole.check(op, fixed_order=True)
    states, block = in_pages(torch.full_like(whole.states, math.nan)), int(whole.metadata.blocks[0])
    done = 0
    for count in (1, 63, 2, 1, 23):
        metadata = StateMetadata(
            whole.metadata.blocks,
            torch.tensor([0, count], device=device).int(),
            torch.tensor([done + count], device=device).int(),
            int(count == 1),
        )
        mixed, steps = (part[done : done + count] for part in (whole.mixed, whole.steps))
        out = op(mixed, steps, *whole.numbers, states, metadata, True)
        assert torch.equal(out, expected[done : done + count])
        done += count
    assert torch.equal(states[block], whole.states[block])


def gated_group_norm(
    norm: Op, sums: Op, rows: int, shape: tuple[int, int], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Groups are whole, or half of them is another rank's; gates are in front of the norm, or
    behind it."""
    groups, width = shape
    x = (3 * torch.randn(rows, groups * width, device=device)).to(dtype)
    gate = torch.randn(rows, 2 * groups * width, device=device).to(dtype)[:, groups * width :]
    weight = torch.randn(groups * width, device=device).to(dtype)
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
    others = torch.rand(rows, groups, device=device) * width
    wide, steep = x.double(), gate.double()
    for is_behind in (False, True):
        before = wide if is_behind else wide * torch.nn.functional.silu(steep)
        behind = steep.sigmoid() if is_behind else 1.0
        parts = before.unflatten(1, (groups, width))
        squares = parts.square().sum(-1)
        assert relative_error(sums(x, gate, groups, is_behind), squares) < 1e-6
        for means, given in (
            (squares / width, None),
            ((squares + others) / (2 * width), ((squares + others) / (2 * width)).float()),
        ):
            normed = parts / (means + 1e-6).sqrt()[:, :, None]
            out = norm(x, gate, weight, 1e-6, groups, given, is_behind)
            expected = normed.flatten(1) * weight.double() * behind
            assert out.dtype == dtype and relative_error(out, expected) < tolerance
