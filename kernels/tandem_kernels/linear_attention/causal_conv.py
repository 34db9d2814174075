"""The short convolution in front of layers that keep a state, over tokens and what a request kept
of the last ones.

Tokens of a request are cut into tiles. Only its first tile reads what was kept, and the same
program replaces it, with the last inputs of all tiles: no other program touches it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.attention.prefill_attention import request_of
from tandem_kernels.batch.state_metadata import StateMetadata
from tandem_kernels.device import uses_pdl

CHANNELS = 128
"""Channels that one program computes."""
TILE = 32
"""Tokens of one program where requests have several."""


@triton.jit
def _input(
    x: tl.tensor,
    kept: tl.tensor,
    position: tl.tensor,
    goes_on: tl.tensor,
    x_stride: tl.tensor,
    real: tl.tensor,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Returns inputs at positions of a request, which are negative for what was kept.

    `x` points at channels of the request's first token, `kept` at those channels of its block.
    """
    new = tl.load(x + position.to(tl.int64) * x_stride, mask=real & (position >= 0), other=0.0)
    old = tl.load(
        kept + (WIDTH - 1) + position,
        mask=real & (position < 0) & (position > -WIDTH) & goes_on,
        other=0.0,
    )
    return tl.where(position >= 0, new, old)


@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def causal_conv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    states: tl.tensor,
    blocks: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    first_req: tl.tensor,
    num_reqs: tl.tensor,
    num_channels: tl.tensor,
    x_stride: tl.tensor,
    state_stride: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTHS: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes, in program (i, j), the i-th tile of tokens for channels j * CHANNELS and on."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0)
    r = tile
    if TILE > 1:
        r = request_of(query_start_loc, tile, first_req, num_reqs, TILE)
    start = tl.load(query_start_loc + r)
    num_tokens = tl.load(query_start_loc + r + 1) - start
    first = 0
    if TILE > 1:
        # Decodes in front, which have several tokens each, leave tiles that are no request's.
        first = (tile - (start - first_req) // TILE - (r - first_req)) * TILE
    seq_len = tl.load(seq_lens + r)
    if (first < 0) | (first >= num_tokens) | (seq_len == 0):
        return
    goes_on = seq_len > num_tokens
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < num_channels
    block = tl.load(blocks + r).to(tl.int64)
    kept = states + block * state_stride + channel * (WIDTH - 1)
    inputs = x + start.to(tl.int64) * x_stride + channel

    token = first + tl.arange(0, TILE)
    real = (token < num_tokens)[:, None] & inside[None, :]
    total = tl.zeros([TILE, CHANNELS], tl.float32)
    for tap in tl.static_range(WIDTH):
        factor = tl.load(weight + channel * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
        place = (token - (WIDTH - 1) + tap)[:, None]
        # A tile behind the first holds all its inputs: loads from a block would be a half of what
        # its threads do, though nothing comes of them.
        if first == 0:
            value = _input(inputs[None, :], kept[None, :], place, goes_on, x_stride, real, WIDTH)
        else:
            value = tl.load(inputs[None, :] + place.to(tl.int64) * x_stride, mask=real, other=0.0)
        total += value.to(tl.float32) * factor[None, :]
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    if ACTIVATES:
        total = total / (1.0 + tl.exp(-total))
    to = out + (start + token).to(tl.int64)[:, None] * num_channels + channel[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=real)

    if first == 0:
        last = (num_tokens - (WIDTH - 1) + tl.arange(0, WIDTHS))[:, None]
        column = tl.arange(0, WIDTHS)[:, None]
        is_kept = (column < WIDTH - 1) & inside[None, :]
        newest = _input(inputs[None, :], kept[None, :], last, goes_on, x_stride, is_kept, WIDTH)
        # Everything that is replaced has been read by all threads.
        tl.debug_barrier()
        tl.store(kept[None, :] + column, newest.to(states.dtype.element_ty), mask=is_kept)


@triton.jit
def _pending_input(
    x: tl.tensor,
    kept: tl.tensor,
    last: tl.tensor,
    place: tl.tensor,
    first: tl.tensor,
    taken: tl.tensor,
    x_stride: tl.tensor,
    num_channels: tl.tensor,
    real: tl.tensor,
    WIDTH: tl.constexpr,
    PENDING: tl.constexpr,
) -> tl.tensor:
    """Returns inputs at places of a sequence: of the step from `first` on, pending ones from
    `taken` on, and what the block has of those in front of them."""
    new = tl.load(
        x + (place - first).to(tl.int64) * x_stride, mask=real & (place >= first), other=0.0
    )
    is_pending = real & (place >= taken) & (place < first)
    pending = tl.load(kept + place % PENDING * num_channels, mask=is_pending, other=0.0)
    is_old = real & (place < taken) & (place > taken - WIDTH) & (taken > 0)
    old = tl.load(last + (WIDTH - 1) + place - taken, mask=is_old, other=0.0)
    return tl.where(place >= first, new, tl.where(place >= taken, pending, old))


@triton.jit
def pending_conv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    states: tl.tensor,
    kept: tl.tensor,
    blocks: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    rows: tl.tensor,
    num_taken: tl.tensor,
    out: tl.tensor,
    num_channels: tl.tensor,
    x_stride: tl.tensor,
    state_stride: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTHS: tl.constexpr,
    PENDING: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes, in program (r, j), the tokens of decode r, pending ones among them, for channels
    j * CHANNELS and on."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    r = tl.program_id(0)
    start = tl.load(query_start_loc + r)
    count = tl.load(query_start_loc + r + 1) - start
    seq_len = tl.load(seq_lens + r)
    if (count == 0) | (seq_len == 0):
        return
    first = seq_len - count
    row = tl.load(rows + r).to(tl.int64)
    taken = tl.load(num_taken + row)
    # A row behind its end computes anything, and stays in what is its own.
    taken = first - tl.minimum(tl.maximum(first - taken, 0), PENDING)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < num_channels
    last = states + tl.load(blocks + r).to(tl.int64) * state_stride + channel * (WIDTH - 1)
    own = kept + row * (PENDING * num_channels) + channel
    inputs = x + start.to(tl.int64) * x_stride + channel

    lane = tl.arange(0, TILE)
    place = first - PENDING + lane
    real = ((place >= taken) & (place < first + count))[:, None] & inside[None, :]
    total = tl.zeros([TILE, CHANNELS], tl.float32)
    for tap in tl.static_range(WIDTH):
        factor = tl.load(weight + channel * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
        value = _pending_input(
            inputs[None, :], own[None, :], last[None, :], (place - (WIDTH - 1) + tap)[:, None],
            first, taken, x_stride, num_channels, real, WIDTH, PENDING,
        )  # fmt: skip
        total += value.to(tl.float32) * factor[None, :]
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    if ACTIVATES:
        total = total / (1.0 + tl.exp(-total))
    line = (r * (PENDING + count) + lane).to(tl.int64)
    to = out + line[:, None] * num_channels + channel[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=real)

    column = tl.arange(0, WIDTHS)[:, None]
    is_kept = (column < WIDTH - 1) & inside[None, :]
    newest = _pending_input(
        inputs[None, :], own[None, :], last[None, :], first - (WIDTH - 1) + column,
        first, taken, x_stride, num_channels, is_kept, WIDTH, PENDING,
    )  # fmt: skip
    is_new = (place >= first)[:, None] & real
    new = tl.load(
        inputs[None, :] + (place - first)[:, None].to(tl.int64) * x_stride, mask=is_new, other=0.0
    )
    # Everything that is replaced has been read by all threads.
    tl.debug_barrier()
    tl.store(last[None, :] + column, newest.to(states.dtype.element_ty), mask=is_kept)
    to = own[None, :] + (place % PENDING)[:, None] * num_channels
    tl.store(to, new.to(kept.dtype.element_ty), mask=is_new)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    bias: Tensor | None = None,
    activates: bool = True,
    kept: Tensor | None = None,
) -> Tensor:
    """See `reference.delta_rule.causal_conv`. Rows of padding are anything."""
    num_tokens, num_channels = x.shape
    ahead = metadata.num_pending_rows
    out = torch.empty((num_tokens + ahead, num_channels), dtype=x.dtype, device=x.device)
    num_reqs, num_decodes = metadata.seq_lens.shape[0], metadata.num_decodes
    if num_tokens == 0:
        return out
    drafting = num_decodes if kept is not None else 0
    if kept is not None and drafting > 0:
        _pending_conv(x, weight, bias, states, metadata, activates, kept, out)
    if drafting == num_reqs:
        return out
    one_each = num_decodes == num_reqs
    width = weight.shape[1]
    tile = 1 if one_each else max(TILE, _widths(width))
    tiles = num_reqs
    if not one_each:
        tiles = triton.cdiv(num_tokens - drafting, tile) + num_reqs - drafting
    overlap = one_each and uses_pdl(x.device, num_tokens)
    causal_conv_kernel[(tiles, triton.cdiv(num_channels, CHANNELS))](
        x,
        weight,
        bias,
        states,
        metadata.blocks,
        metadata.query_start_loc,
        metadata.seq_lens,
        out[ahead:],
        drafting,
        num_reqs,
        num_channels,
        x.stride(0),
        states.stride(0),
        WIDTH=width,
        WIDTHS=_widths(width),
        TILE=tile,
        CHANNELS=CHANNELS,
        ACTIVATES=activates,
        OVERLAP=overlap,
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )
    return out


def _pending_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    metadata: StateMetadata,
    activates: bool,
    kept: Tensor,
    out: Tensor,
) -> None:
    """Computes the decodes of a step whose earlier tokens may be pending."""
    pending, width, num_channels = metadata.pending, weight.shape[1], x.shape[1]
    assert pending is not None
    overlap = uses_pdl(x.device, len(x))
    grid = metadata.num_decodes, triton.cdiv(num_channels, CHANNELS)
    pending_conv_kernel[grid](
        x,
        weight,
        bias,
        states,
        kept,
        metadata.blocks,
        metadata.query_start_loc,
        metadata.seq_lens,
        pending.rows,
        pending.num_taken,
        out,
        num_channels,
        x.stride(0),
        states.stride(0),
        WIDTH=width,
        WIDTHS=_widths(width),
        PENDING=pending.most,
        TILE=triton.next_power_of_2(2 * pending.most),
        CHANNELS=CHANNELS,
        ACTIVATES=activates,
        OVERLAP=overlap,
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )


def _widths(width: int) -> int:
    """Returns room for the inputs that are kept, which kernels count in powers of two. A width of 1
    keeps none."""
    return int(triton.next_power_of_2(max(1, width - 1)))
