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


@triton.jit(do_not_specialize=["num_reqs"])
def causal_conv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    states: tl.tensor,
    blocks: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
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
        r = request_of(query_start_loc, tile, 0, num_reqs, TILE)
    start = tl.load(query_start_loc + r)
    num_tokens = tl.load(query_start_loc + r + 1) - start
    first = (tile - start // TILE - r) * TILE if TILE > 1 else 0
    seq_len = tl.load(seq_lens + r)
    if (first >= num_tokens) | (seq_len == 0):
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
        value = _input(inputs[None, :], kept[None, :], place, goes_on, x_stride, real, WIDTH)
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


def causal_conv(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    bias: Tensor | None = None,
    activates: bool = True,
) -> Tensor:
    """See `reference.delta_rule.causal_conv`. Rows of padding are anything."""
    num_tokens, num_channels = x.shape
    out = torch.empty((num_tokens, num_channels), dtype=x.dtype, device=x.device)
    num_reqs = metadata.seq_lens.shape[0]
    if num_tokens == 0:
        return out
    one_each = metadata.num_decodes == num_reqs
    width = weight.shape[1]
    tile = 1 if one_each else max(TILE, triton.next_power_of_2(width - 1))
    tiles = num_reqs if one_each else triton.cdiv(num_tokens, tile) + num_reqs
    overlap = one_each and uses_pdl(x.device, num_tokens)
    causal_conv_kernel[(tiles, triton.cdiv(num_channels, CHANNELS))](
        x,
        weight,
        bias,
        states,
        metadata.blocks,
        metadata.query_start_loc,
        metadata.seq_lens,
        out,
        num_reqs,
        num_channels,
        x.stride(0),
        states.stride(0),
        WIDTH=width,
        WIDTHS=triton.next_power_of_2(width - 1),
        TILE=tile,
        CHANNELS=CHANNELS,
        ACTIVATES=activates,
        OVERLAP=overlap,
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )
    return out
