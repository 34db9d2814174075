"""The second half of LoRA for few tokens: all adapters of a tile in one product, and gate·up with
its activation in the same launch.

`lora_expand` looks at one slot in each program and sums the shrink's pieces one by one: for few
tokens most of its programs have nothing to do, and the others wait for one load after another.
Here a program asks for its part of B before the kernel in front has ended (PDL), since weights
depend on nothing, and for all pieces at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import uses_pdl
from tandem_kernels.lora.lora_lanes import factors_of, in_lanes, slots_at_once
from tandem_kernels.product_precision import precision_of

_ROWS = 16
_COLS = 64
_GATED_COLS = 32
"""Columns of gate, and as many of up."""


@triton.jit
def _sums(
    shrunk: tl.tensor,
    slots: tl.tensor,
    row: tl.tensor,
    part: tl.tensor,
    num_tokens: tl.tensor,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    PIECES: tl.constexpr,
) -> tl.tensor:
    """Returns the sums of the shrink's pieces, [ROWS, RANK] float32."""
    width: tl.constexpr = PARTS * RANK
    at = row.to(tl.int64)[:, None] * width + part * RANK + tl.arange(0, RANK)[None, :]
    real = (slots >= 0)[:, None]
    total = tl.load(shrunk + at, mask=real, other=0.0)
    for number in tl.static_range(1, PIECES):
        further = shrunk + number * num_tokens.to(tl.int64) * width
        total += tl.load(further + at, mask=real, other=0.0)
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def lora_expand_few_kernel(
    shrunk: tl.tensor,
    b: tl.tensor,
    token_slots: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    first_end: tl.tensor,
    second_end: tl.tensor,
    num_outputs: tl.tensor,
    slot_stride: tl.tensor,
    out_stride: tl.tensor,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    ALL_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr,
    PIECES: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Adds to a tile of tokens and outputs in each program. A tile lies in one of the layer's
    projections: [0, first_end), up to second_end, up to num_outputs."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slots = tl.load(token_slots + row, mask=row < num_tokens, other=-1)
    tile = tl.program_id(1)
    part, begin, end = 0, 0, first_end
    if PARTS > 1:
        tiles = tl.cdiv(first_end, COLS)
        if tile >= tiles:
            part, begin, end, tile = 1, first_end, second_end, tile - tiles
            if PARTS > 2:
                tiles = tl.cdiv(second_end - first_end, COLS)
                if tile >= tiles:
                    part, begin, end, tile = 2, second_end, num_outputs, tile - tiles
    col = begin + tile * COLS + tl.arange(0, COLS)
    by = factors_of(b, slots, 0, col, end, slot_stride, SLOTS, RANK)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    to = out + row.to(tl.int64)[:, None] * out_stride + col[None, :]
    real = (slots >= 0)[:, None] & (col < end)[None, :]
    before = tl.load(to, mask=real, other=0.0).to(tl.float32)
    sums = _sums(shrunk, slots, row, part, num_tokens, PARTS, RANK, PIECES).to(by.dtype)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, ALL_SLOTS, SLOTS):
        given = in_lanes(sums, slots, first, SLOTS, RANK)
        acc = tl.dot(given, tl.trans(by), acc, input_precision=PRECISION)
        if ALL_SLOTS > SLOTS:
            by = factors_of(b, slots, first + SLOTS, col, end, slot_stride, SLOTS, RANK)
    tl.store(to, (before + acc).to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["num_tokens"])
def lora_expand_gated_kernel(
    shrunk: tl.tensor,
    b: tl.tensor,
    token_slots: tl.tensor,
    both: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    width: tl.tensor,
    slot_stride: tl.tensor,
    both_stride: tl.tensor,
    RANK: tl.constexpr,
    ALL_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr,
    PIECES: tl.constexpr,
    PRECISION: tl.constexpr,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Adds to a tile of gate and to the same one of up, and writes the activation of both."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slots = tl.load(token_slots + row, mask=row < num_tokens, other=-1)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    by_gate = factors_of(b, slots, 0, col, width, slot_stride, SLOTS, RANK)
    by_up = factors_of(b, slots, 0, width + col, 2 * width, slot_stride, SLOTS, RANK)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    real = (row < num_tokens)[:, None] & (col < width)[None, :]
    base = both + row.to(tl.int64)[:, None] * both_stride + col[None, :]
    gate = tl.load(base, mask=real, other=0.0)
    up = tl.load(base + width, mask=real, other=0.0)
    of_gate = _sums(shrunk, slots, row, 0, num_tokens, 2, RANK, PIECES).to(by_gate.dtype)
    of_up = _sums(shrunk, slots, row, 1, num_tokens, 2, RANK, PIECES).to(by_up.dtype)
    gate_acc = tl.zeros([ROWS, COLS], tl.float32)
    up_acc = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, ALL_SLOTS, SLOTS):
        given = in_lanes(of_gate, slots, first, SLOTS, RANK)
        gate_acc = tl.dot(given, tl.trans(by_gate), gate_acc, input_precision=PRECISION)
        given = in_lanes(of_up, slots, first, SLOTS, RANK)
        up_acc = tl.dot(given, tl.trans(by_up), up_acc, input_precision=PRECISION)
        if ALL_SLOTS > SLOTS:
            next_slots = first + SLOTS
            by_gate = factors_of(b, slots, next_slots, col, width, slot_stride, SLOTS, RANK)
            by_up = factors_of(
                b, slots, next_slots, width + col, 2 * width, slot_stride, SLOTS, RANK
            )
    # Sums are rounded before the activation, as where it reads them from memory.
    wide = (gate.to(tl.float32) + gate_acc).to(gate.dtype).to(tl.float32)
    other = (up.to(tl.float32) + up_acc).to(up.dtype).to(tl.float32)
    steep = wide
    if GELU:
        steep = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    activated = wide / (1.0 + tl.exp(-steep)) * other
    to = out + row.to(tl.int64)[:, None] * width + col[None, :]
    tl.store(to, activated.to(gate.dtype), mask=real)


def lora_expand_few(
    shrunk: Tensor, b: Tensor, token_slots: Tensor, ends: tuple[int, ...], out: Tensor
) -> None:
    """See `reference.lora.lora_expand_few`."""
    num_tokens = out.shape[0]
    starts = (0, *ends[:-1])
    tiles = sum(triton.cdiv(end - start, _COLS) for start, end in zip(starts, ends, strict=True))
    lora_expand_few_kernel[(triton.cdiv(num_tokens, _ROWS), tiles)](
        shrunk,
        b,
        token_slots,
        out,
        num_tokens,
        ends[0],
        ends[min(1, len(ends) - 1)],
        b.shape[1],
        b.stride(0),
        out.stride(0),
        PARTS=len(ends),
        COLS=_COLS,
        **_shape(shrunk, b),
        **_launch(out, num_tokens),
    )


def lora_expand_gated(
    shrunk: Tensor, b: Tensor, token_slots: Tensor, both: Tensor, *, is_gelu: bool
) -> Tensor:
    """See `reference.lora.lora_expand_gated`."""
    num_tokens, width = both.shape[0], both.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=both.dtype, device=both.device)
    lora_expand_gated_kernel[(triton.cdiv(num_tokens, _ROWS), triton.cdiv(width, _GATED_COLS))](
        shrunk,
        b,
        token_slots,
        both,
        out,
        num_tokens,
        width,
        b.stride(0),
        both.stride(0),
        GELU=is_gelu,
        COLS=_GATED_COLS,
        **_shape(shrunk, b),
        **_launch(both, num_tokens),
    )
    return out


def _shape(shrunk: Tensor, b: Tensor) -> dict[str, int]:
    num_slots, _, rank = b.shape
    slots = slots_at_once(num_slots, rank)
    return {"RANK": rank, "ALL_SLOTS": num_slots, "SLOTS": slots, "PIECES": shrunk.shape[0]}


def _launch(x: Tensor, num_tokens: int) -> dict[str, object]:
    overlap = uses_pdl(x.device, num_tokens)
    return {
        "PRECISION": precision_of(x),
        "ROWS": _ROWS,
        "OVERLAP": overlap,
        "num_warps": 4,
        **({"launch_pdl": True} if overlap else {}),
    }
