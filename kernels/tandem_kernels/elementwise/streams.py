"""Residual streams beside each other: their weights, what a layer reads, and how they take it in.

    x [T, n H] ─ logits and square sums of parts [SPLITS, T, ...]    `stream_logits_kernel`
    logits ─ weights ─ sum of streams [T, H]                         `read_streams_kernel`
    streams, what a layer gives ─ streams                            `write_streams_kernel`

The logits are one matrix product with few outputs, so the inputs are cut into parts where tokens
are few. Weights of a token are a few numbers, which all threads of its program have.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.device import num_programs
from tandem_kernels.stream_forms import StreamForm

_DEPTH, _BLOCK = 128, 1024
_ROWS, _ROWS_OF_MANY, _MANY = 16, 64, 128
"""Tokens of a program, and of steps with this many: each reads all weights."""
_MOST_SPLITS = 32


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def stream_logits_kernel(
    x: tl.tensor,
    fn: tl.tensor,
    logits: tl.tensor,
    squares: tl.tensor,
    num_tokens: tl.tensor,
    inner: tl.tensor,
    splits: tl.tensor,
    OUTPUTS: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Multiplies, in program (i, s), part s of the numbers of ROWS tokens.

    Logits lie in columns, so weights are the operand whose rows tensor cores read as they are. With
    64 rows of that operand four warps would multiply together, where the compiler overwrites what
    they still read (`warpgroup_waits`).
    """
    tl.static_assert(LANES < 64)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    output = tl.arange(0, LANES)
    depth = tl.arange(0, DEPTH)
    real, is_output = token < num_tokens, output < OUTPUTS
    acc = tl.zeros([LANES, ROWS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    part = tl.cdiv(tl.cdiv(inner, DEPTH), splits) * DEPTH
    rows = x + token.to(tl.int64)[:, None] * inner
    for start in range(split * part, tl.minimum((split + 1) * part, inner), DEPTH):
        at = start + depth
        inside = at < inner
        mask = real[:, None] & inside[None, :]
        own = tl.load(rows + at[None, :], mask=mask, other=0.0).to(tl.float32)
        mask = is_output[:, None] & inside[None, :]
        weight = tl.load(fn + output[:, None] * inner + at[None, :], mask=mask, other=0.0)
        if PRECISION == "tf32":
            # Tensor cores leave out the last 13 bits. With half of what those count they round,
            # where all products would be too small.
            weight = (weight.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
        acc = tl.dot(weight, tl.trans(own), acc, input_precision=PRECISION)
        total += tl.sum(own * own, axis=1)
    at = split * num_tokens + token
    to = logits + at.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    tl.store(to, acc, mask=real[None, :] & is_output[:, None])
    tl.store(squares + at, total, mask=real)


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def doubly_stochastic(given: tl.tensor, eps: tl.tensor, ITERATIONS: tl.constexpr) -> tl.tensor:
    """Returns weights [n, n] whose rows and columns were divided by their sums in turns."""
    mixed = tl.exp(given - tl.max(given, axis=1)[:, None])
    mixed = mixed / tl.sum(mixed, axis=1)[:, None] + eps
    mixed = mixed / (tl.sum(mixed, axis=0)[None, :] + eps)
    for _ in range(ITERATIONS - 1):
        mixed = mixed / (tl.sum(mixed, axis=1)[:, None] + eps)
        mixed = mixed / (tl.sum(mixed, axis=0)[None, :] + eps)
    return mixed


@triton.jit
def sum_of_logits(
    parts: tl.tensor, place: tl.tensor, step: tl.tensor, splits: tl.tensor, SPLITS: tl.constexpr
) -> tl.tensor:
    """Sums up number `place` [N] of each part. All are loaded at once: a walk over them would wait
    for memory as often as there are parts."""
    split = tl.arange(0, SPLITS)[:, None]
    found = tl.load(parts + split * step + place[None, :], mask=split < splits, other=0.0)
    return tl.sum(found, axis=0)


@triton.jit
def write_shares(
    of_post: tl.tensor,
    of_comb: tl.tensor,
    base: tl.tensor,
    scale: tl.tensor,
    post: tl.tensor,
    comb: tl.tensor,
    token: tl.tensor,
    eps: tl.tensor,
    COUNT: tl.constexpr,
    ITERATIONS: tl.constexpr,
) -> None:
    """Writes `post` [n] and `comb` [n, n] of a token, from their logits [n] and [n * n]. Nothing is
    stored before all is loaded, since loads are never moved before a store."""
    one = tl.arange(0, COUNT)
    pair = tl.arange(0, COUNT * COUNT)
    of_post = of_post * tl.load(scale + 1) + tl.load(base + COUNT + one)
    of_comb = of_comb * tl.load(scale + 2) + tl.load(base + 2 * COUNT + pair)
    tl.store(post + token * COUNT + one, 2.0 * sigmoid(of_post))
    mixed = doubly_stochastic(tl.reshape(of_comb, [COUNT, COUNT]), eps, ITERATIONS)
    tl.store(comb + token * (COUNT * COUNT) + one[:, None] * COUNT + one[None, :], mixed)


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def read_streams_kernel(
    x: tl.tensor,
    logits: tl.tensor,
    squares: tl.tensor,
    base: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    post: tl.tensor,
    comb: tl.tensor,
    num_tokens: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    norm_eps: tl.tensor,
    splits: tl.tensor,
    COUNT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Finds the weights of token t in program t, and sums up its streams.

    OUTPUTS: Logits of a token: COUNT of a head, which has no `post` and no `comb`.
    SPLITS: Parts of logits at most.
    """
    token = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    one = tl.arange(0, COUNT)
    square = tl.load(squares + split * num_tokens + token, mask=split < splits, other=0.0)
    length = 1.0 / tl.sqrt_rn(tl.sum(square, axis=0) / (COUNT * width) + norm_eps)
    own = logits + token * OUTPUTS
    step = num_tokens * OUTPUTS
    given = sum_of_logits(own, one, step, splits, SPLITS) * length
    pre = sigmoid(given * tl.load(scale) + tl.load(base + one)) + eps
    if OUTPUTS > COUNT:
        pair = tl.arange(0, COUNT * COUNT)
        of_post = sum_of_logits(own + COUNT, one, step, splits, SPLITS) * length
        of_comb = sum_of_logits(own + 2 * COUNT, pair, step, splits, SPLITS) * length
        write_shares(of_post, of_comb, base, scale, post, comb, token, eps, COUNT, ITERATIONS)
    lane = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        column = start + lane
        inside = column < width
        place = x + (token * COUNT + one)[:, None] * width + column[None, :]
        streams = tl.load(place, mask=inside[None, :], other=0.0).to(tl.float32)
        row = tl.sum(streams * pre[:, None], axis=0)
        tl.store(out + token * width + column, row.to(out.dtype.element_ty), mask=inside)


@triton.jit
def write_streams_kernel(
    streams: tl.tensor,
    x: tl.tensor,
    post: tl.tensor,
    comb: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Mixes, in program (t, j), columns j * BLOCK and on of the streams of token t."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < width)[None, :]
    one = tl.arange(0, COUNT)
    place = streams + (token * COUNT + one)[:, None] * width + column[None, :]
    own = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(x + token * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
    pair = one[:, None] * COUNT + one[None, :]
    mixed = tl.load(comb + token * (COUNT * COUNT) + pair)
    share = tl.load(post + token * COUNT + one)
    found = tl.sum(mixed[:, :, None] * own[:, None, :], axis=0)
    found += share[:, None] * given[None, :]
    # No thread may read what another has written.
    tl.debug_barrier()
    tl.store(place, found.to(streams.dtype.element_ty), mask=inside)


def read_streams(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, form: StreamForm
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.streams.read_streams`."""
    num_tokens, count, _ = streams.shape
    post = torch.empty((num_tokens, count), dtype=torch.float32, device=streams.device)
    comb = torch.empty((num_tokens, count, count), dtype=torch.float32, device=streams.device)
    return _read(streams, fn, base, scale, form, post, comb), post, comb


def join_streams(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, form: StreamForm
) -> Tensor:
    """See `reference.streams.join_streams`."""
    return _read(streams, fn, base, scale, form, None, None)


def _read(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    form: StreamForm,
    post: Tensor | None,
    comb: Tensor | None,
) -> Tensor:
    num_tokens, count, width = streams.shape
    outputs, device = len(fn), streams.device
    out = torch.empty((num_tokens, width), dtype=streams.dtype, device=device)
    if num_tokens == 0:
        return out
    rows, splits = _cut(num_tokens, count * width, device, form.fixed_order)
    tiles = triton.cdiv(num_tokens, rows)
    parts = splits, num_tokens
    logits = torch.empty((*parts, outputs), dtype=torch.float32, device=device)
    squares = torch.empty(parts, dtype=torch.float32, device=device)
    stream_logits_kernel[(tiles, splits)](
        streams,
        fn,
        logits,
        squares,
        num_tokens,
        count * width,
        splits,
        OUTPUTS=outputs,
        LANES=max(16, triton.next_power_of_2(outputs)),
        ROWS=rows,
        DEPTH=_DEPTH,
        PRECISION=_precision(streams.dtype, rows),
        num_warps=4,
        num_stages=3,
    )
    read_streams_kernel[(num_tokens,)](
        streams,
        logits,
        squares,
        base,
        scale,
        out,
        post,
        comb,
        num_tokens,
        width,
        form.eps,
        form.norm_eps,
        splits,
        COUNT=count,
        OUTPUTS=outputs,
        ITERATIONS=form.iterations,
        SPLITS=1 if splits == 1 else _MOST_SPLITS,
        BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
        num_warps=4,
    )
    return out


def _cut(num_tokens: int, inner: int, device: torch.device, fixed_order: bool) -> tuple[int, int]:
    """Returns the tokens of a program, and into how many parts the `inner` inputs are cut."""
    if fixed_order:
        return _ROWS, 1
    programs = num_programs(device, 2)
    rows = _ROWS_OF_MANY if num_tokens >= _MANY else _ROWS
    free = programs // triton.cdiv(num_tokens, rows)
    most = min(_MOST_SPLITS, triton.next_power_of_2(triton.cdiv(inner, _DEPTH)))
    return rows, min(int(most), 1 << max(free.bit_length() - 1, 0))


def _precision(dtype: torch.dtype, rows: int) -> str:
    """Returns how a program multiplies. Three products for one leave as good as nothing out; where
    there are many tokens, they would be what takes time."""
    if dtype == torch.float32:
        return "ieee"
    return "tf32x3" if rows == _ROWS else "tf32"


def write_streams(streams: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> None:
    """See `reference.streams.write_streams`."""
    num_tokens, count, width = streams.shape
    if num_tokens == 0:
        return
    block = min(_BLOCK // 2, triton.next_power_of_2(width))
    write_streams_kernel[(num_tokens, triton.cdiv(width, block))](
        streams, x, post, comb, width, x.stride(0), COUNT=count, BLOCK=block, num_warps=4
    )
