"""Checks what linear attention must do, in either column and on any device; the expected numbers
are float64, one token and one head at a time, and share no code with either."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from kernel_oracle import relative_error
from torch import Tensor

from tandem_kernels.batch.state_metadata import StateMetadata

Op = Callable[..., Any]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative, for what one token reads: chunks multiply numbers that are rounded to the dtype."""
OFF = 1 + 2**-21
"""Four units in the last place: of an approximate division, of a root, and of sums of squares."""
STATE_TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Sizes:
    """The shape of a layer."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 8
    value_dim: int = 12
    kernel: int = 4
    by_channel: bool = False
    """Each key channel decays by itself."""
    rate_scale: float = 1.0
    decay_floor: float = 0.0

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class Batch:
    """Requests by the tokens of this step and those before; the first `num_decodes` have one token.
    A request without tokens is padding."""

    lengths: tuple[int, ...]
    before: tuple[int, ...]
    num_decodes: int = 0

    def metadata(self, device: str) -> StateMetadata:
        count = len(self.lengths)
        starts = torch.tensor([0, *self.lengths]).cumsum(0)
        pairs = zip(self.lengths, self.before, strict=True)
        return StateMetadata(
            blocks=torch.randperm(count + 3)[:count].int().to(device),
            query_start_loc=starts.int().to(device),
            seq_lens=torch.tensor([n and n + m for n, m in pairs]).int().to(device),
            num_decodes=self.num_decodes,
        )

    def spans(self) -> list[tuple[int, int]]:
        """Returns (request, first token) of those that are no padding."""
        first, found = 0, []
        for r, length in enumerate(self.lengths):
            found += [(r, first)] if length else []
            first += length
        return found


DECODES = Batch((1, 1, 1, 0, 0), (5, 0, 900, 0, 0), num_decodes=5)
MIXED = Batch((1, 1, 70, 64, 0, 3, 130), (9, 0, 0, 31, 0, 6, 2), num_decodes=2)
BORDERS = Batch((2, 3, 4, 5, 63, 64, 65, 128), (0, 1, 0, 2, 0, 64, 3, 0))


def spoiled(states: Tensor, batch: Batch, blocks: Tensor) -> Tensor:
    """Returns states that are NaN where a request must begin with zeros, and where nobody may
    look."""
    used = [int(blocks[r]) for r, _ in batch.spans() if batch.before[r]]
    kept = torch.full_like(states, math.nan)
    kept[used] = states[used]
    return kept


def in_pages(states: Tensor) -> Tensor:
    """Returns a copy whose blocks lie apart, as a layer's do in the cache. How far decides which
    kernel is compiled, and with it the order of sums."""
    size = states[0].numel()
    pages = torch.empty(len(states), size + 4, dtype=states.dtype, device=states.device)
    copied = pages[:, :size].view(states.shape)
    return copied.copy_(states)


def causal_conv(
    op: Op,
    batch: Batch,
    sizes: Sizes,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    has_bias: bool = False,
    activates: bool = True,
) -> None:
    """Rows of the input lie apart, as a slice's do, and so do the blocks."""
    bias = torch.randn(sizes.channels, device=device).to(dtype) if has_bias else None
    metadata = batch.metadata(device)
    num_tokens, width = sum(batch.lengths), sizes.kernel
    wide = torch.randn(num_tokens, sizes.channels + 8, device=device).to(dtype)
    x = wide[:, : sizes.channels]
    weight = torch.randn(sizes.channels, width, device=device).to(dtype)
    pages = torch.randn(len(batch.lengths) + 3, sizes.channels * (width - 1) + 4, device=device)
    shape = (len(pages), sizes.channels, width - 1)
    states = pages.to(dtype)[:, : shape[1] * shape[2]].view(shape)
    states.copy_(spoiled(states.clone(), batch, metadata.blocks))
    before = states.clone()
    out = op(x, weight, states, metadata, bias, activates)
    # Small steps, one after the other, are for the CPU: a GPU waits at each.
    x, weight, out, states, before = (each.cpu() for each in (x, weight, out, states, before))
    rate = weight.double().t()
    expected_states = before.clone()
    for r, first in batch.spans():
        block = int(metadata.blocks[r])
        old = before[block].double().t() if batch.before[r] else torch.zeros(width - 1, shape[1])
        inputs = torch.cat((old, x[first : first + batch.lengths[r]].double()))
        expected_states[block] = inputs[len(inputs) - (width - 1) :].t().to(dtype)
        for i in range(batch.lengths[r]):
            total = (inputs[i : i + width] * rate).sum(0)
            total += 0 if bias is None else bias.cpu().double()
            expected = total / (1 + (-total).exp()) if activates else total
            error = relative_error(out[first + i], expected)
            assert error < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
    torch.testing.assert_close(states, expected_states, rtol=0, atol=0, equal_nan=True)


def few_row_conv(
    op: Op, rows: int, width: int, dtype: torch.dtype, device: str = "cpu", *, has_bias: bool
) -> None:
    """Checks a projection with its convolution against both by themselves. Rows of padding, and one
    whose sequence begins, are among them; outputs in front of and behind the channels are none."""
    inner, first, channels, others = 64, 8, 40, 24
    blocks = torch.arange(rows, dtype=torch.int32, device=device) + 1
    seq_lens = torch.tensor([7, 1, 0, 3][:rows], dtype=torch.int32, device=device)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    metadata = StateMetadata(blocks, starts, seq_lens, rows)
    x = torch.randn(rows, inner, device=device).to(dtype)
    weight = torch.randn(first + channels + others, inner, device=device).to(dtype) / 8
    taps = torch.randn(channels, width, device=device).to(dtype)
    bias = torch.randn(channels, device=device).to(dtype) if has_bias else None
    states = in_pages(torch.randn(rows + 2, channels, width - 1, device=device).to(dtype))
    before = states.cpu().double()
    found = op(x, weight, taps, states, metadata, first, bias).cpu()
    expected_states = before.clone()
    for r, seq_len in enumerate(seq_lens.tolist()):
        if seq_len == 0:
            continue
        expected = x[r].cpu().double() @ weight.cpu().double().t()
        own = expected[first : first + channels]
        old = before[r + 1] if seq_len > 1 else torch.zeros_like(before[r + 1])
        inputs = torch.cat((old, own[:, None]), dim=1)
        expected_states[r + 1] = inputs[:, 1:]
        total = (inputs * taps.cpu().double()).sum(1)
        total += 0 if bias is None else bias.cpu().double()
        expected[first : first + channels] = total / (1 + (-total).exp())
        assert relative_error(found[r], expected) < TOLERANCE[dtype]
    assert relative_error(states.cpu(), expected_states) < STATE_TOLERANCE[dtype]
    torch.testing.assert_close(states[-1].cpu().double(), before[-1], rtol=0, atol=0)


@dataclass
class Layer:
    """The inputs of one call, and what it must give."""

    batch: Batch
    metadata: StateMetadata
    mixed: Tensor
    gates: Tensor
    a_log: Tensor
    dt_bias: Tensor
    states: Tensor
    decays: Tensor | None = None
    rate_scale: float = 1.0
    decay_floor: float = 0.0

    @classmethod
    def random(cls, batch: Batch, sizes: Sizes, dtype: torch.dtype, device: str) -> Layer:
        metadata = batch.metadata(device)
        num_tokens, heads = sum(batch.lengths), sizes.value_heads

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device)

        shape = (len(batch.lengths) + 3, heads, sizes.key_dim, sizes.value_dim)
        states = in_pages(randn(*shape))
        states.copy_(spoiled(states.clone(), batch, metadata.blocks))
        mixed = randn(num_tokens, sizes.channels).to(dtype)
        gates = (2 * randn(num_tokens, 2 * heads)).to(dtype)
        numbers, decays = (randn(heads) - 1, randn(heads)), None
        if sizes.by_channel:
            # Some channels forget at once, others hardly. Rows lie apart, as slices do.
            gates = gates[:, heads:]
            each = heads * sizes.key_dim
            decays = (2 * randn(num_tokens, each + 8)).to(dtype)[:, :each]
            decays[:: max(1, num_tokens // 3), 0] = 90.0
            numbers = torch.linspace(-6.0, 2.5, heads, device=device), randn(each)
        more = decays, sizes.rate_scale, sizes.decay_floor
        return cls(batch, metadata, mixed, gates, *numbers, states, *more)

    @property
    def how(self) -> dict[str, Any]:
        """Returns what kinds of layers differ in."""
        numbers = {"rate_scale": self.rate_scale, "decay_floor": self.decay_floor}
        return {"decays": self.decays, **numbers}

    def expected(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Returns what every token reads [T, Hv, V], and the states, by steps of one token in
        `dtype`."""
        _, num_values, key_dim, value_dim = self.states.shape
        num_keys = (self.mixed.shape[1] - num_values * value_dim) // (2 * key_dim)
        device, wide = self.mixed.device, self.mixed.cpu().to(dtype)
        queries, keys = (
            wide[:, i * num_keys * key_dim :][:, : num_keys * key_dim].unflatten(1, (num_keys, -1))
            for i in range(2)
        )
        queries, keys = (
            (of / (of.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(
                num_values // num_keys, dim=1
            )
            for of in (queries, keys)
        )
        values = wide[:, 2 * num_keys * key_dim :].unflatten(1, (num_values, -1))
        gates = self.gates.cpu().to(dtype)
        b = gates[:, :num_values]
        a = gates[:, num_values:] if self.decays is None else self.decays.cpu().to(dtype)
        a = (a + self.dt_bias.cpu().to(dtype)).unflatten(1, (num_values, -1))
        scale = self.a_log.cpu().to(dtype).exp()[:, None]
        decay = (-scale * a.exp().log1p()).exp()
        if self.decay_floor:
            decay = (self.decay_floor * (scale * a).sigmoid()).exp()
        rate = self.rate_scale / (1 + (-b).exp())
        read = torch.full(values.shape, math.nan, dtype=dtype)
        states = self.states.cpu().to(dtype, copy=True)
        for r, first in self.batch.spans():
            block = int(self.metadata.blocks[r])
            if not self.batch.before[r]:
                states[block] = 0
            for t in range(first, first + self.batch.lengths[r]):
                state = decay[t][:, :, None] * states[block]
                found = torch.einsum("hk,hkv->hv", keys[t], state)
                change = rate[t][:, None] * (values[t] - found)
                states[block] = state + keys[t][:, :, None] * change[:, None]
                read[t] = torch.einsum("hk,hkv->hv", queries[t], states[block]) / key_dim**0.5
        return read.to(device), states.to(device)

    def check(
        self,
        op: Op,
        fixed_order: bool = False,
        widen: float = 1.0,
        lost: tuple[float, float] = (0.0, 0.0),
    ) -> Tensor:
        """Runs `op` and compares; returns what was read. `lost`: relative errors of what is read
        and of states that steps of one token have in float32, and `widen` times as much is
        right."""
        expected, expected_states = self.expected()
        untouched = self.states.clone()
        out = op(
            self.mixed, self.gates, self.a_log, self.dt_bias, self.states, self.metadata,
            fixed_order, **self.how,
        )  # fmt: skip
        dtype = self.mixed.dtype
        assert out.dtype == dtype
        used = torch.zeros(len(self.states), dtype=torch.bool, device=out.device)
        for r, first in self.batch.spans():
            rows = slice(first, first + self.batch.lengths[r])
            error = relative_error(out[rows], expected[rows])
            assert error < widen * max(TOLERANCE[dtype], lost[0])
            block = int(self.metadata.blocks[r])
            found = relative_error(self.states[block], expected_states[block])
            assert found < widen * max(STATE_TOLERANCE[dtype], lost[1])
            used[block] = True
        torch.testing.assert_close(
            self.states[~used], untouched[~used], rtol=0, atol=0, equal_nan=True
        )
        return out


def gated_delta_rule(
    op: Op,
    batch: Batch,
    sizes: Sizes,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    fixed_order: bool = False,
) -> None:
    Layer.random(batch, sizes, dtype, device).check(op, fixed_order)


def repeated_tokens(op: Op, sizes: Sizes, dtype: torch.dtype, device: str = "cpu") -> None:
    """All tokens alike, nothing forgotten and everything taken in: the worst conditioned system
    that there is, whose solution is small and whose powers are not."""
    layer = Layer.random(Batch((150,), (0,)), sizes, dtype, device)
    layer.mixed[:] = layer.mixed[0]
    layer.gates[:, : sizes.value_heads] = 8.0
    (layer.gates[:, sizes.value_heads :] if layer.decays is None else layer.decays)[:] = -12.0
    exact, exact_states = layer.expected()
    block = int(layer.metadata.blocks[0])
    # With rates of 2 a token turns the state round, and little is left of an even number of them:
    # of that float32 has fewer digits, whatever order it computes in, and each unit by which the
    # last place of a rate is off counts for every token.
    others = (
        layer.expected(torch.float32),
        replace(layer, rate_scale=layer.rate_scale * OFF).expected(),
    )
    lost = (
        max(relative_error(read, exact) for read, _ in others),
        max(relative_error(states[block], exact_states[block]) for _, states in others),
    )
    layer.check(op, widen=3.0, lost=lost)


def keys_of_any_size(op: Op, sizes: Sizes, dtype: torch.dtype, device: str = "cpu") -> None:
    """Queries and keys are taken at unit length, however long they come; some are zero."""
    layer = Layer.random(Batch((40, 70), (3, 0)), sizes, dtype, device)
    lengths = torch.tensor([0.0, 1e-2, 1.0, 100.0], device=device)[torch.arange(110) % 4, None]
    layer.mixed[:, : 2 * sizes.key_heads * sizes.key_dim] *= lengths.to(dtype)
    layer.check(op)


def cut_anywhere(op: Op, sizes: Sizes, device: str = "cpu") -> None:
    """In fixed order a request's bits do not depend on how its tokens are cut into steps."""
    whole = Layer.random(Batch((90,), (0,)), sizes, torch.float32, device)
    given = whole.gates, whole.mixed, whole.gates if whole.decays is None else whole.decays
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
        gates, mixed, decays = (part[done : done + count] for part in given)
        how = {**whole.how, "decays": None if whole.decays is None else decays}
        out = op(mixed, gates, whole.a_log, whole.dt_bias, states, metadata, True, **how)
        assert torch.equal(out, expected[done : done + count])
        done += count
    assert torch.equal(states[block], whole.states[block])


def convolution_cut_anywhere(op: Op, sizes: Sizes, dtype: torch.dtype, device: str) -> None:
    """The same of the convolution, whichever kernel a step takes."""
    x = torch.randn(90, sizes.channels, device=device).to(dtype)
    weight = torch.randn(sizes.channels, sizes.kernel, device=device).to(dtype)
    states = torch.zeros(2, sizes.channels, sizes.kernel - 1, device=device).to(dtype)

    def run(first: int, count: int) -> Tensor:
        metadata = StateMetadata(
            torch.ones(1, device=device).int(),
            torch.tensor([0, count], device=device).int(),
            torch.tensor([first + count], device=device).int(),
            int(count == 1),
        )
        return op(x[first : first + count], weight, states, metadata)

    expected, last = run(0, 90), states[1].clone()
    done = 0
    for count in (1, 1, 61, 2, 1, 24):
        assert torch.equal(run(done, count), expected[done : done + count])
        done += count
    assert torch.equal(states[1], last)


def gated_rms_norm(
    op: Op, rows: int, heads: int, dim: int, dtype: torch.dtype, device: str,
    *, is_sigmoid: bool = False,
) -> None:  # fmt: skip
    x = (3 * torch.randn(rows, heads, dim, device=device)).to(dtype)
    gate = torch.randn(rows, 2 * heads * dim, device=device).to(dtype)[:, heads * dim :]
    weight = torch.randn(dim, device=device).to(dtype)
    wide, steep = x.double(), gate.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    expected = normed.flatten(1) * (1 if is_sigmoid else steep) / (1 + (-steep).exp())
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
    out = op(x, gate, weight, 1e-6, is_sigmoid)
    assert out.dtype == dtype and relative_error(out, expected) < tolerance


def gate_and_mul(
    sigmoid: Op, softplus: Op, rows: int, width: int, dtype: torch.dtype, device: str
) -> None:
    """A gate is for one number, or for all of a head; some are large."""
    x = torch.randn(rows, width, device=device).to(dtype)
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
    for count in (width, 4):
        gate = (8 * torch.randn(rows, 3 * count, device=device)).to(dtype)[:, :count]
        wide = gate.double().repeat_interleave(width // count, dim=1)
        factors = (sigmoid, wide.sigmoid()), (softplus, torch.nn.functional.softplus(wide))
        for op, factor in factors:
            assert relative_error(op(x.clone(), gate), x.double() * factor) < tolerance


def row_gate(op: Op, rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    """Rows have the same bits alone."""
    x, wide = torch.randn(2, rows, 2 * width, device=device).to(dtype)
    x, given = x[:, :width], wide[:, width:]
    weight = (4 * torch.randn(1, width, device=device) / width**0.5).to(dtype)
    expected = x.double() * (given.double() @ weight.double().T).sigmoid()
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
    found = op(x.clone(), given, weight)
    assert relative_error(found, expected) < tolerance
    for row in (0, rows - 1):
        alone = op(x[row : row + 1].clone(), given[row : row + 1], weight)
        assert torch.equal(alone, found[row : row + 1])
