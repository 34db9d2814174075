"""Rows of the embedding table, picked while the first layer is put into place.

This kernel itself begins when all in front of it has ended, as any launch does that asks for
nothing else. So kernels behind it may read what a step was prepared with, lengths, places and
blocks, before their own wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from tandem_kernels.device import uses_pdl

_COLS = 1024


@triton.jit(do_not_specialize=["num_rows", "first"])
def embedding_kernel(
    token_ids: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    first: tl.tensor,
    WIDTH: tl.constexpr,
    COLS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Copies, in program (t, j), columns j * COLS and on of token t's row."""
    if OVERLAP:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = col < WIDTH
    row = tl.load(token_ids + t).to(tl.int64) - first
    exists = (row >= 0) & (row < num_rows)
    numbers = tl.load(table + row * WIDTH + col, mask=inside & exists, other=0.0)
    tl.store(out + t * WIDTH + col, numbers, mask=inside)


def embedding(token_ids: Tensor, table: Tensor, first: int | None = None) -> Tensor:
    """See `reference.elementwise.embedding`."""
    num_tokens, width = len(token_ids), table.shape[1]
    out = torch.empty((num_tokens, width), dtype=table.dtype, device=table.device)
    if num_tokens > 0:
        embedding_kernel[(num_tokens, triton.cdiv(width, _COLS))](
            token_ids, table, out, len(table), first or 0, WIDTH=width, COLS=_COLS, num_warps=4,
            OVERLAP=uses_pdl(table.device, num_tokens),
        )  # fmt: skip
    return out
