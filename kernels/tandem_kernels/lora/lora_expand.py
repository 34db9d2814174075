"""The second half of LoRA: what the first left, by B of each token's slot, is added to a layer's
outputs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import uses_pdl
from tandem_kernels.lora.lora_tiles import expand_cols, expand_rows
from tandem_kernels.product_precision import precision_of

_MOST_DEPTH = 64


@triton.jit(do_not_specialize=["num_tokens", "pieces"])
def lora_expand_kernel(
    shrunk: tl.tensor,
    b: tl.tensor,
    token_slots: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    pieces: tl.tensor,
    first_end: tl.tensor,
    second_end: tl.tensor,
    num_outputs: tl.tensor,
    slot_stride: tl.tensor,
    out_stride: tl.tensor,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Adds to a tile of tokens and outputs, for one slot, in each program. A tile lies in one of
    the layer's projections: [0, first_end), up to second_end, up to num_outputs."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile, slot = tl.program_id(1), tl.program_id(2)
    slots = tl.load(token_slots + row, mask=row < num_tokens, other=-1)
    own = slots == slot
    if tl.max(own.to(tl.int32), 0) > 0:
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
        real_col = col < end
        factors = b + slot.to(tl.int64) * slot_stride + col.to(tl.int64)[:, None] * RANK
        acc = tl.zeros([ROWS, COLS], tl.float32)
        for start in tl.static_range(0, RANK, DEPTH):
            lane = (start + tl.arange(0, DEPTH))[None, :]
            real = own[:, None] & (lane < RANK)
            given = tl.zeros([ROWS, DEPTH], tl.float32)
            for number in range(pieces):
                at = (number * num_tokens + row).to(tl.int64)[:, None] * (PARTS * RANK)
                given += tl.load(shrunk + at + part * RANK + lane, mask=real, other=0.0)
            own_b = tl.load(factors + lane, mask=real_col[:, None] & (lane < RANK), other=0.0)
            half = given.to(own_b.dtype)
            acc = tl.dot(half, tl.trans(own_b), acc, input_precision=PRECISION)
        to = out + row.to(tl.int64)[:, None] * out_stride + col[None, :]
        real = own[:, None] & real_col[None, :]
        before = tl.load(to, mask=real, other=0.0).to(tl.float32)
        tl.store(to, (before + acc).to(out.dtype.element_ty), mask=real)


def lora_expand(
    shrunk: Tensor,
    b: Tensor,
    token_slots: Tensor,
    ends: tuple[int, ...],
    out: Tensor,
    *,
    fixed_order: bool = False,
) -> None:
    """See `reference.lora.lora_expand`."""
    num_tokens = out.shape[0]
    num_slots, num_outputs, rank = b.shape
    rows, cols = expand_rows(num_tokens, fixed_order), expand_cols(num_tokens)
    starts = (0, *ends[:-1])
    tiles = sum(triton.cdiv(end - start, cols) for start, end in zip(starts, ends, strict=True))
    overlap = uses_pdl(out.device, num_tokens)
    lora_expand_kernel[(triton.cdiv(num_tokens, rows), tiles, num_slots)](
        shrunk,
        b,
        token_slots,
        out,
        num_tokens,
        shrunk.shape[0],
        ends[0],
        ends[min(1, len(ends) - 1)],
        num_outputs,
        b.stride(0),
        out.stride(0),
        PARTS=len(ends),
        RANK=rank,
        PRECISION=precision_of(b),
        ROWS=rows,
        COLS=cols,
        DEPTH=max(16, min(_MOST_DEPTH, rank)),
        OVERLAP=overlap,
        num_warps=4,
        num_stages=2,
        **({"launch_pdl": True} if overlap else {}),
    )
