"""The first half of LoRA: tokens by A of their slots, in pieces of the inner dimension."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import uses_pdl
from tandem_kernels.lora.lora_tiles import DEPTH, MOST_PIECES, shrink_tiles
from tandem_kernels.product_precision import precision_of


@triton.jit(do_not_specialize=["num_tokens"])
def lora_shrink_kernel(
    x: tl.tensor,
    a: tl.tensor,
    token_slots: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    slot_stride: tl.tensor,
    piece: tl.tensor,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes a tile of tokens and outputs, over one piece of the inner dimension and for one
    slot, in each program."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    col_tiles = tl.cdiv(num_outputs, COLS)
    row = tl.program_id(0) // col_tiles * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) % col_tiles * COLS + tl.arange(0, COLS)
    number, slot = tl.program_id(1), tl.program_id(2)
    slots = tl.load(token_slots + row, mask=row < num_tokens, other=-1)
    own = slots == slot
    if tl.max(own.to(tl.int32), 0) > 0:
        real_row, real_col = own[:, None], (col < num_outputs)[:, None]
        inputs = x + row.to(tl.int64)[:, None] * x_stride
        factors = a + slot.to(tl.int64) * slot_stride + col.to(tl.int64)[:, None] * inner
        acc = tl.zeros([ROWS, COLS], tl.float32)
        first = number * piece
        last = tl.minimum(first + piece, inner)
        for start in range(first, last, DEPTH):
            k = (start + tl.arange(0, DEPTH))[None, :]
            given = tl.load(inputs + k, mask=real_row & (k < last), other=0.0)
            own_a = tl.load(factors + k, mask=real_col & (k < last), other=0.0)
            acc = tl.dot(given, tl.trans(own_a), acc, input_precision=PRECISION)
        at = number.to(tl.int64) * num_tokens + row
        to = out + at[:, None] * num_outputs + col[None, :]
        tl.store(to, acc, mask=real_row & (col < num_outputs)[None, :])


def lora_shrink(
    x: Tensor,
    a: Tensor,
    token_slots: Tensor,
    *,
    fixed_order: bool = False,
    most_pieces: int = MOST_PIECES,
) -> Tensor:
    """See `reference.lora.lora_shrink`."""
    num_tokens, inner = x.shape
    num_slots, num_outputs, _ = a.shape
    tiles = shrink_tiles(num_tokens, num_outputs, inner, fixed_order, most_pieces)
    shape = (tiles.pieces, num_tokens, num_outputs)
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    programs = triton.cdiv(num_tokens, tiles.rows) * triton.cdiv(num_outputs, tiles.cols)
    overlap = uses_pdl(x.device, num_tokens)
    lora_shrink_kernel[(programs, tiles.pieces, num_slots)](
        x,
        a,
        token_slots,
        out,
        num_tokens,
        num_outputs,
        inner,
        x.stride(0),
        a.stride(0),
        tiles.piece,
        PRECISION=precision_of(x),
        ROWS=tiles.rows,
        COLS=tiles.cols,
        DEPTH=DEPTH if x.dtype != torch.float32 else DEPTH // 2,
        OVERLAP=overlap,
        num_warps=4,
        num_stages=3,
        **({"launch_pdl": True} if overlap else {}),
    )
    return out
