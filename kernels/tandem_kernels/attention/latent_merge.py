"""The second kernel of attention that cuts what a row attends to into SPLITS parts."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem_kernels.attention.latent_tile import joined_parts
from tandem_kernels.small_launches import take_turn


@triton.jit
def latent_merge_kernel(
    parts: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Joins the parts of one row in each program."""
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK_LATENT)
    joined = joined_parts(parts, state, row, 0, LATENT, BLOCK_LATENT, SPLITS)
    tl.store(out + row * LATENT + dim, joined.to(out.dtype.element_ty), mask=dim < LATENT)
