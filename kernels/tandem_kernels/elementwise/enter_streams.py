"""Residual streams, from what one block gives to the norm that the next one reads.

    streams, what a block gives ─ streams ─ logits and square sums of parts   `mix_streams_kernel`,
                                                         of more than 8 tokens `mix_many_kernel`
    logits ─┬─ weights ─ sum of streams ─ norm                                `norm_streams_kernel`
            └─ post, comb                                                    `share_streams_kernel`

By how much the streams take a block's output in is asked for when the block has ended, and takes
longest to find: twenty turns of divisions, one behind the other. So it is a launch of its own,
which may run beside the block.

`streams` does the same in other launches, one of which adds up a token's parts one by one and finds
all its weights before it reads a stream. Streams of up to 8 tokens lie in new memory behind each
block: programs read what others have replaced.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.device import is_gpu, num_programs
from tandem_kernels.elementwise.mix_many import mix_many_kernel
from tandem_kernels.elementwise.norm_forms import Norm
from tandem_kernels.elementwise.rms_norm import normed_row
from tandem_kernels.elementwise.streams import sigmoid, sum_of_logits, write_shares
from tandem_kernels.product_precision import precision_of
from tandem_kernels.small_launches import in_turn, take_turn
from tandem_kernels.stream_forms import (
    FEW_ROWS,
    MANY_COUNT,
    GivenToStreams,
    StreamForm,
    StreamWeights,
)

_COLUMNS, _COLUMNS_OF_WIDE, _WIDE = 32, 64, 4096
"""Columns of a program, and of streams that are wider than this: a part of logits has as many."""

_MANY_ROWS, _MANY_COLUMNS = 64, 32
"""Tokens, and columns at once, of a program where tokens are many."""
_MANY_OPTIONS = {"num_warps": 8, "num_stages": 4}
_SOME, _SOME_ROWS = 8, 16
"""A program multiplies as many tokens by matrix units where there are more than the first: 16 take
4.4 us in place of 7.5, 64 take 5.7 in place of 21.1 (one H200, four streams of 4096)."""
_MOST_SPLITS = 32


@triton.jit(do_not_specialize=["num_tokens"])
def mix_streams_kernel(
    streams: tl.tensor,
    x: tl.tensor,
    beside: tl.tensor,
    post: tl.tensor,
    comb: tl.tensor,
    fn: tl.tensor,
    out: tl.tensor,
    logits: tl.tensor,
    squares: tl.tensor,
    num_tokens: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    beside_stride: tl.tensor,
    COUNT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    MIXES: tl.constexpr,
    HAS_BESIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Mixes, in program (s, t), columns s * COLUMNS and on of token t, and multiplies them.

    Weights are on their way before the kernel in front has ended. Products are sums in float32:
    tensor cores would wait for weights that are turned in shared memory. Programs of several tokens
    read weights less often, and are slower by a fifth.
    """
    split = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    output = tl.arange(0, LANES)
    one = tl.arange(0, COUNT)
    column = split * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    kind = streams.dtype.element_ty
    place = fn + output[:, None, None] * (COUNT * width) + one[None, :, None] * width
    used = (output < OUTPUTS)[:, None, None] & inside[None, None, :]
    by = tl.load(place + column[None, None, :], mask=used, other=0.0)
    take_turn(OVERLAP)
    at = token * (COUNT * width) + column
    every = one[:, None] * width + at[None, :]
    if MIXES:
        given = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_BESIDE:
            place = beside + token * beside_stride + column
            given += tl.load(place, mask=inside, other=0.0).to(tl.float32)
            given = given.to(kind).to(tl.float32)
        wide = tl.load(post + token * COUNT + one)[:, None] * given[None, :]
        for j in tl.static_range(COUNT):
            own = tl.load(streams + at + j * width, mask=inside, other=0.0).to(tl.float32)
            wide += tl.load(comb + (token * COUNT + j) * COUNT + one)[:, None] * own[None, :]
        found = wide.to(kind)
        tl.store(out + every, found, mask=inside[None, :])
    else:
        found = tl.load(streams + every, mask=inside[None, :], other=0.0)
    wide = tl.reshape(found.to(tl.float32), [1, COUNT * COLUMNS])
    by = tl.reshape(by, [LANES, COUNT * COLUMNS])
    to = (split * num_tokens + token).to(tl.int64)
    tl.store(logits + to * OUTPUTS + output, tl.sum(wide * by, axis=1), mask=output < OUTPUTS)
    tl.store(squares + to, tl.sum(tl.sum(wide * wide, axis=1), axis=0))


@triton.jit
def _length(
    squares: tl.tensor,
    of_part: tl.tensor,
    there: tl.tensor,
    width: tl.tensor,
    norm_eps: tl.tensor,
    COUNT: tl.constexpr,
) -> tl.tensor:
    """Returns what logits of a token are multiplied by."""
    square = tl.sum(tl.load(squares + of_part, mask=there, other=0.0), axis=0)
    return 1.0 / tl.sqrt_rn(square / (COUNT * width) + norm_eps)


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def norm_streams_kernel(
    streams: tl.tensor,
    logits: tl.tensor,
    squares: tl.tensor,
    base: tl.tensor,
    scale: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    norm_eps: tl.tensor,
    row_eps: tl.tensor,
    splits: tl.tensor,
    COUNT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Sums up the streams of token t by their weights, in program t, and normalises the sum."""
    token = tl.program_id(0).to(tl.int64)
    one = tl.arange(0, COUNT)
    split = tl.arange(0, SPLITS)
    there = split < splits
    column = tl.arange(0, BLOCK)
    inside = column < width
    by = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    take_turn(OVERLAP)
    of_part = split * num_tokens + token
    length = _length(squares, of_part, there, width, norm_eps, COUNT)
    given = logits + (of_part * OUTPUTS)[:, None]
    place = streams + (token * COUNT + one)[:, None] * width + column[None, :]
    own = tl.load(place, mask=inside[None, :], other=0.0).to(tl.float32)
    found = tl.sum(tl.load(given + one[None, :], mask=there[:, None], other=0.0), axis=0)
    pre = sigmoid(found * length * tl.load(scale) + tl.load(base + one)) + eps
    kind = out.dtype.element_ty
    row = tl.sum(own * pre[:, None], axis=0).to(kind)
    normed = normed_row(row, by, width, row_eps)
    tl.store(out + token * width + column, normed.to(kind), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def share_streams_kernel(
    logits: tl.tensor,
    squares: tl.tensor,
    base: tl.tensor,
    scale: tl.tensor,
    post: tl.tensor,
    comb: tl.tensor,
    num_tokens: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    norm_eps: tl.tensor,
    splits: tl.tensor,
    COUNT: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Finds `post` and `comb` of token t, in program t."""
    take_turn(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    one = tl.arange(0, COUNT)
    pair = tl.arange(0, COUNT * COUNT)
    split = tl.arange(0, SPLITS)
    there = split < splits
    of_part = split * num_tokens + token
    length = _length(squares, of_part, there, width, norm_eps, COUNT)
    OUTPUTS: tl.constexpr = COUNT * (2 + COUNT)
    own, step = logits + token * OUTPUTS + COUNT, num_tokens * OUTPUTS
    of_post = sum_of_logits(own, one, step, splits, SPLITS) * length
    of_comb = sum_of_logits(own + COUNT, pair, step, splits, SPLITS) * length
    write_shares(of_post, of_comb, base, scale, post, comb, token, eps, COUNT, ITERATIONS)


def mix_streams(
    streams: Tensor, given: GivenToStreams | None, weights: StreamWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.streams.mix_streams`."""
    num_tokens, count, _ = streams.shape
    if num_tokens > _SOME and count == MANY_COUNT:
        return _mixed_in_place(streams, given, weights.fn)
    return _mixed(streams, given, weights.fn)


def _mixed(
    streams: Tensor, given: GivenToStreams | None, fn: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, count, width = streams.shape
    outputs = len(fn)
    columns = _COLUMNS_OF_WIDE if width > _WIDE else _COLUMNS
    splits = triton.cdiv(width, columns)
    logits, squares = fn.new_empty(splits, num_tokens, outputs), fn.new_empty(splits, num_tokens)
    mixed, beside = streams, None
    parts: tuple[Tensor | None, ...] = (None,) * 4
    strides = [width, width]
    if given is not None:
        mixed, beside = torch.empty_like(streams), given.beside
        parts = given.x, beside, given.post, given.comb
        strides = [width if one is None else one.stride(0) for one in (given.x, beside)]
    if num_tokens == 0:
        return mixed, logits, squares
    mix_streams_kernel[(splits, num_tokens)](
        streams,
        *parts,
        fn,
        mixed,
        logits,
        squares,
        num_tokens,
        width,
        *strides,
        COUNT=count,
        OUTPUTS=outputs,
        LANES=triton.next_power_of_2(outputs),
        COLUMNS=columns,
        MIXES=given is not None,
        HAS_BESIDE=beside is not None,
        num_warps=columns // 8,
        **in_turn(streams.device, num_tokens),
    )
    return mixed, logits, squares


def _mixed_in_place(
    streams: Tensor, given: GivenToStreams | None, fn: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Does as `_mixed`, for more than few tokens."""
    num_tokens, _, width = streams.shape
    outputs, rows, columns, options = len(fn), _MANY_ROWS, _MANY_COLUMNS, _MANY_OPTIONS
    if num_tokens > FEW_ROWS:
        free = max(num_programs(streams.device, 1) // triton.cdiv(num_tokens, rows), 1)
        most = triton.next_power_of_2(triton.cdiv(width, columns))
        splits = min(_MOST_SPLITS, most, 1 << free.bit_length() - 1)
    else:
        rows, columns = _SOME_ROWS, _COLUMNS_OF_WIDE if width > _WIDE else _COLUMNS
        splits, options = triton.cdiv(width, columns), _some_options(columns)
    logits, squares = fn.new_empty(splits, num_tokens, outputs), fn.new_empty(splits, num_tokens)
    beside = None if given is None else given.beside
    parts = (None,) * 4 if given is None else (given.x, beside, given.post, given.comb)
    mix_many_kernel[(triton.cdiv(num_tokens, rows), splits)](
        streams,
        *parts,
        fn,
        logits,
        squares,
        num_tokens,
        width,
        width if given is None else given.x.stride(0),
        width if beside is None else beside.stride(0),
        splits,
        OUTPUTS=outputs,
        LANES=max(16, triton.next_power_of_2(outputs)),
        ROWS=rows,
        COLUMNS=columns,
        MIXES=given is not None,
        HAS_BESIDE=beside is not None,
        PRECISION=precision_of(streams),
        IN_PAIRS=is_gpu(streams.device) and streams.element_size() == 2,
        **options,
    )
    return streams, logits, squares


def _some_options(columns: int) -> dict[str, int]:
    return {"num_warps": columns // 16, "num_stages": 1}


def norm_streams(
    streams: Tensor,
    logits: Tensor,
    squares: Tensor,
    weights: StreamWeights,
    form: StreamForm,
    norm: Norm,
) -> Tensor:
    """See `reference.streams.norm_streams`."""
    num_tokens, count, width = streams.shape
    out = torch.empty((num_tokens, width), dtype=streams.dtype, device=streams.device)
    block = triton.next_power_of_2(width)
    # Of many tokens, programs that share an SM hide what each waits for.
    columns_of_warp = 512 if num_tokens <= FEW_ROWS else 1024
    if num_tokens > 0:
        norm_streams_kernel[(num_tokens,)](
            streams,
            logits,
            squares,
            weights.base,
            weights.scale,
            norm.weight,
            out,
            num_tokens,
            width,
            form.eps,
            form.norm_eps,
            norm.eps,
            len(squares),
            COUNT=count,
            OUTPUTS=len(weights.fn),
            SPLITS=_lanes_of_parts(squares),
            BLOCK=block,
            num_warps=min(max(block // columns_of_warp, 1), 16),
            **in_turn(streams.device, num_tokens),
        )
    return out


def share_streams(
    logits: Tensor, squares: Tensor, weights: StreamWeights, form: StreamForm, width: int
) -> tuple[Tensor, Tensor]:
    """See `reference.streams.share_streams`."""
    splits, num_tokens, _ = logits.shape
    count = weights.fn.shape[1] // width
    post = logits.new_empty(num_tokens, count)
    comb = logits.new_empty(num_tokens, count, count)
    if num_tokens > 0:
        share_streams_kernel[(num_tokens,)](
            logits,
            squares,
            weights.base,
            weights.scale,
            post,
            comb,
            num_tokens,
            width,
            form.eps,
            form.norm_eps,
            splits,
            COUNT=count,
            ITERATIONS=form.iterations,
            SPLITS=_lanes_of_parts(squares),
            num_warps=4,
            **in_turn(logits.device, num_tokens),
        )
    return post, comb


def _lanes_of_parts(squares: Tensor) -> int:
    """Returns how many parts of logits and squares [S, T] a program reads at once."""
    splits, num_tokens = squares.shape
    if num_tokens > FEW_ROWS and 1 < splits <= _MOST_SPLITS:
        # How many there are depends on the tokens, and each number would compile a kernel.
        return _MOST_SPLITS
    return int(triton.next_power_of_2(splits))
