"""Products of few rows with a weight of each head, for both halves of latent attention.

A program has a few outputs of one head and all of the inner dimension. Its weights depend on
nothing, so they are on their way before the kernel in front has ended (PDL): what is left to wait
for is a row. Where an output's weights lie beside each other, threads multiply those that they have
loaded, as `few_row_gemm` does: a matrix unit would wait for them to go through shared memory first,
and then take a head's inputs one product after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem_kernels.device import uses_pdl
from tandem_kernels.gemm.few_row_gemm import load_words, products_in_registers, word_places
from tandem_kernels.product_precision import precision_of

_NUMBERS = 8192
"""A program has this many weights, which stay in registers while it waits."""
_REGISTERS = 128
"""Bounds those of a thread, which needs fewer. Without a bound the assembler takes so few that most
weights are asked for only when others have arrived (`findings/triton_maxnreg_asks_at_once.sh`)."""


@triton.jit(do_not_specialize=["num_rows"])
def head_gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    x_token_stride: tl.tensor,
    x_head_stride: tl.tensor,
    weight_head_stride: tl.tensor,
    in_stride: tl.tensor,
    out_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes, in program (j, h), outputs j * COLS and on of head h, of all rows. IN_REGISTERS:
    the inputs of a row and of an output lie beside each other, two in each word."""
    head = tl.program_id(1)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    lane = tl.arange(0, BLOCK_INNER)
    row = tl.arange(0, ROWS)
    line = row.to(tl.int64) * tl.num_programs(1) + head
    if OVERLAP:
        gdc_launch_dependents()
    if IN_REGISTERS:
        WORDS: tl.constexpr = BLOCK_INNER // 2
        word = tl.arange(0, WORDS)
        of_head = weight + head.to(tl.int64) * weight_head_stride
        words = word_places(of_head, tl.minimum(col, NUM_OUTPUTS - 1), out_stride, word)
        ahead = load_words(words, word, 0, WORDS, INNER)
        rows = word_places(
            x + head * x_head_stride, tl.minimum(row, num_rows - 1), x_token_stride, word
        )
        acc, _ = products_in_registers(
            ahead, words, rows, None, word, COLS, ROWS, WORDS, INNER,
            weight.dtype.element_ty, False, OVERLAP,
        )  # fmt: skip
        written = (row < num_rows)[None, :] & (col < NUM_OUTPUTS)[:, None]
        to = out + line[None, :] * NUM_OUTPUTS + col[:, None]
        tl.store(to, acc.to(out.dtype.element_ty), mask=written)
        return
    places = weight + head.to(tl.int64) * weight_head_stride
    places += lane[:, None] * in_stride + col[None, :] * out_stride
    is_weight = (lane < INNER)[:, None] & (col < NUM_OUTPUTS)[None, :]
    by = tl.load(places, mask=is_weight, other=0.0)
    if OVERLAP:
        gdc_wait()
    places = x + row.to(tl.int64)[:, None] * x_token_stride + head * x_head_stride + lane[None, :]
    real = (row < num_rows)[:, None]
    given = tl.load(places, mask=real & (lane < INNER)[None, :], other=0.0)
    acc = tl.dot(given, by, input_precision=PRECISION)
    to = out + line[:, None] * NUM_OUTPUTS + col[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real & (col < NUM_OUTPUTS)[None, :])


def head_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """See `reference.gemm.head_gemm`; only for what `few_row_shapes.takes_by_head` says."""
    num_rows = len(x)
    num_heads, inner, num_outputs = weight.shape
    out = torch.empty((num_rows, num_heads, num_outputs), dtype=x.dtype, device=x.device)
    block_inner = max(16, triton.next_power_of_2(inner))
    cols = max(16, min(_NUMBERS // block_inner, triton.next_power_of_2(num_outputs)))
    overlap = uses_pdl(x.device, num_rows)
    even = inner, *x.stride()[:2], x.storage_offset(), weight.stride(0), weight.stride(2)
    in_registers = weight.stride(1) == 1 and not any(
        number % 2 for number in (*even, weight.storage_offset())
    )
    head_gemm_kernel[(triton.cdiv(num_outputs, cols), num_heads)](
        x,
        weight,
        out,
        num_rows,
        *x.stride()[:2],
        *weight.stride(),
        ROWS=max(1 if in_registers else 16, triton.next_power_of_2(num_rows)),
        COLS=cols,
        INNER=inner,
        BLOCK_INNER=block_inner,
        NUM_OUTPUTS=num_outputs,
        IN_REGISTERS=in_registers,
        PRECISION=precision_of(x),
        OVERLAP=overlap,
        num_warps=4,
        maxnreg=_REGISTERS,
        **({"launch_pdl": True} if overlap else {}),
    )
    return out
