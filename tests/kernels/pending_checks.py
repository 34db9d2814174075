"""Checks that drafts change nothing of a state: rows compute tokens of which some are wrong, by
chance, beside prompts and padding, and read and keep what they do with one token after the other.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from delta_checks import Sizes, in_pages
from kernel_oracle import relative_error
from torch import Tensor

from tandem_kernels.batch.state_metadata import KeptInputs, PendingTokens, StateMetadata

Op = Callable[..., Any]
_ROWS, _LENGTH = 4, 26


@dataclass
class Rows:
    """Sequences of inputs, and how far each row is. `most`: tokens of a decode; `per_head`: gates
    of each head."""

    sizes: Sizes
    dtype: torch.dtype
    device: str
    most: int
    fixed_order: bool
    per_head: int = 2
    rng: random.Random = field(default_factory=lambda: random.Random(3))

    def __post_init__(self) -> None:
        heads, channels, width = self.sizes.value_heads, self.sizes.channels, self.sizes.kernel

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, device=self.device)

        self.inputs = randn(_ROWS, _LENGTH, channels).to(self.dtype)
        self.gates = (2 * randn(_ROWS, _LENGTH, self.per_head * heads)).to(self.dtype)
        self.weight = randn(channels, width).to(self.dtype)
        each = max(1, self.per_head - 1)
        self.a_log, self.dt_bias = randn(heads) - 1, randn(each * heads)
        shape = _ROWS + 2, heads, self.sizes.key_dim, self.sizes.value_dim
        nothing = torch.full(shape, math.nan, device=self.device)
        self.states = in_pages(nothing)
        last = torch.full((_ROWS + 2, channels, width - 1), math.nan, device=self.device)
        self.last = in_pages(last.to(self.dtype))
        self.kept = KeptInputs.allocate(
            _ROWS + 1, self.most, channels, self.per_head * heads,
            torch.full((1,), math.nan).to(self.inputs),
        )  # fmt: skip
        self.num_taken = torch.zeros(_ROWS + 1, dtype=torch.int32, device=self.device)
        self.done = [0] * _ROWS

    def step(
        self, conv: Op, rule: Op, decodes: list[tuple[int, int]], query_len: int,
        chunks: list[tuple[int, int]],
    ) -> list[tuple[int, int, Tensor]]:  # fmt: skip
        """Computes decodes (row, right tokens) and chunks (row, tokens). Returns (row, first place,
        what its right tokens read)."""
        parts, lengths = [], []
        for row, right in decodes:
            parts.append(self._tokens(row, right, query_len))
            lengths.append(query_len)
        for row, count in chunks:
            parts.append(self._tokens(row, count, count))
            lengths.append(count)
        padded = 1 if not chunks else 0
        bounds = torch.tensor([0, *lengths, *[0] * padded]).cumsum(0)
        rows = [row for row, _ in (*decodes, *chunks)]
        lens = [self.done[row] + n for row, n in zip(rows, lengths, strict=True)]

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        metadata = StateMetadata(
            ints([row + 1 for row in rows] + [0] * padded),
            bounds.int().to(self.device),
            ints(lens + [0] * padded),
            num_decodes=len(decodes) + padded,
            decode_query_len=query_len,
            pending=PendingTokens(ints(rows + [-1] * padded), self.num_taken, self.most),
        )
        x, gates = (torch.cat(part) for part in zip(*parts, strict=True))
        mixed = conv(x, self.weight, self.last, metadata, kept=self.kept.convolved)
        read = rule(
            mixed, gates, self.a_log, self.dt_bias, self.states, metadata, self.fixed_order,
            self.kept.gates,
        )  # fmt: skip
        found = []
        for r, (row, right) in enumerate((*decodes, *chunks)):
            start, first = int(bounds[r]), self.done[row]
            found.append((row, first, read[start : start + right]))
            is_decode = r < len(decodes)
            self.num_taken[row] = first + (0 if is_decode else right)
            self.done[row] += right
        return found

    def _tokens(self, row: int, right: int, count: int) -> tuple[Tensor, Tensor]:
        first = self.done[row]
        found = []
        for of_row in (self.inputs[row], self.gates[row]):
            wrong = torch.randn(count - right, of_row.shape[1], device=self.device)
            found.append(torch.cat((of_row[first : first + right], wrong.to(self.dtype))))
        return found[0], found[1]

    def one_by_one(self, conv: Op, rule: Op, row: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what a row's first tokens read without drafts, and the state and the last inputs
        that it had before the last of them."""
        # As many blocks: those of a single one lie at another distance.
        states, last = in_pages(self.states), in_pages(self.last)
        read = []
        for first, length in ((0, 2), *((place, 1) for place in range(2, count))):
            metadata = StateMetadata(
                torch.zeros(1, dtype=torch.int32, device=self.device),
                torch.tensor([0, length], dtype=torch.int32, device=self.device),
                torch.tensor([first + length], dtype=torch.int32, device=self.device),
                num_decodes=int(length == 1),
            )
            before = states[0].clone(), last[0].clone()
            x, gates = (of[row, first : first + length] for of in (self.inputs, self.gates))
            mixed = conv(x.contiguous(), self.weight, last, metadata)
            read.append(
                rule(mixed, gates.contiguous(), self.a_log, self.dt_bias, states, metadata,
                     self.fixed_order)
            )  # fmt: skip
        return torch.cat(read), *before


def drafts(
    conv: Op, rule: Op, sizes: Sizes, dtype: torch.dtype, device: str = "cpu",
    *, most: int = 4, fixed_order: bool = True, tolerance: float = 0.0, per_head: int = 2,
) -> None:  # fmt: skip
    """All but the last row decode, in steps of any number of tokens and in changing company; the
    last row's prompt comes in chunks beside them."""
    rows = Rows(sizes, dtype, device, most, fixed_order, per_head)
    rng, decoding = rows.rng, _ROWS - 1
    found: dict[int, list[Tensor]] = {row: [] for row in range(_ROWS)}

    def take(one: list[tuple[int, int, Tensor]]) -> None:
        for row, _, read in one:
            found[row].append(read)

    take(rows.step(conv, rule, [], most, [(row, 2 + row) for row in range(decoding)]))
    while True:
        able = [row for row in range(decoding) if rows.done[row] + most < _LENGTH]
        if not able:
            break
        here = rng.sample(able, rng.randint(1, len(able)))
        query_len = rng.randint(1, most)
        decodes = [(row, rng.randint(1, query_len)) for row in here]
        left = _LENGTH - rows.done[-1]
        chunks = [(decoding, min(left, 3))] if left and rng.random() < 0.4 else []
        take(rows.step(conv, rule, decodes, query_len, chunks))
    # One step more takes in what the last one has left.
    take(rows.step(conv, rule, [(row, 1) for row in range(decoding)], 1, []))
    for row in range(decoding):
        read, state, last = rows.one_by_one(conv, rule, row, rows.done[row])
        assert torch.equal(rows.last[row + 1], last)
        pairs = (torch.cat(found[row]), read), (rows.states[row + 1], state)
        for got, expected in pairs:
            if tolerance:
                assert relative_error(got, expected.double()) < tolerance
            else:
                assert torch.equal(got, expected)
    if rows.done[-1]:
        read = rows.one_by_one(conv, rule, decoding, rows.done[-1])[0]
        assert relative_error(torch.cat(found[decoding]), read.double()) < max(tolerance, 1e-5)


def kda_drafts(
    conv: Op, delta: Op, dtype: torch.dtype, device: str = "cpu", *, sizes: Sizes | None = None,
    most: int = 4, fixed_order: bool = True, tolerance: float = 0.0,
) -> None:  # fmt: skip
    """The same where each key channel decays by itself."""
    sizes = sizes or Sizes(key_heads=4)
    heads = sizes.value_heads

    def rule(mixed: Tensor, gates: Tensor, *rest: Any) -> Tensor:
        return delta(mixed, gates[:, :heads], *rest, decays=gates[:, heads:])

    given = {"most": most, "fixed_order": fixed_order, "tolerance": tolerance}
    drafts(conv, rule, sizes, dtype, device, **given, per_head=1 + sizes.key_dim)


def mamba_drafts(
    conv: Op, scan: Op, dtype: torch.dtype, device: str = "cpu", *, sizes: Sizes | None = None,
    most: int = 4, fixed_order: bool = True, tolerance: float = 0.0,
) -> None:  # fmt: skip
    """The same of Mamba 2: key heads are groups, and keys and values B and x, of other places."""
    sizes = sizes or Sizes()
    skip = torch.randn(sizes.value_heads, device=device)

    def rule(mixed: Tensor, steps: Tensor, a_log: Tensor, dt_bias: Tensor, *rest: Any) -> Tensor:
        return scan(mixed, steps, a_log, dt_bias, skip, *rest)

    given = {"most": most, "fixed_order": fixed_order, "tolerance": tolerance, "per_head": 1}
    drafts(conv, rule, sizes, dtype, device, **given)
