"""Says where experts in four-bit floats are multiplied while the next ones are widened, without
Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.device import has_warpgroup_mma
from tandem_kernels.elementwise.gate_form import GateForm, is_silu
from tandem_kernels.gemm.fp4_tiles import TILE_WORDS

HEIGHT = 128
"""The most rows of a tile."""
_MEAN_ROWS = 64
"""Experts have more rows than this on average."""
_COLS = 256
"""Outputs of a tile; of gate and of up, half as many."""
_FEWEST_STEPS = 8
_LARGEST = 2**31


def multiplies_ahead(
    x: Tensor, w13: Tensor, width: int, num_pairs: int, *, biased: bool, gate: GateForm | None
) -> bool:
    """Returns whether `fp4_experts_ahead_kernel` computes both GEMMs: on Hopper, of MXFP4 and many
    rows in bf16, where inputs and outputs are whole tiles and numbers are counted in 32 bits."""
    num_experts, hidden = len(w13), x.shape[1]
    return (
        has_warpgroup_mma(x.device)
        and x.dtype == torch.bfloat16
        and x.is_contiguous()
        and w13.shape[-1] == TILE_WORDS
        and num_pairs > _MEAN_ROWS * num_experts
        and width % _COLS == hidden % _COLS == 0
        and min(width, hidden) >= 64 * _FEWEST_STEPS
        and num_pairs * max(width, hidden) < _LARGEST
        and not biased
        and is_silu(gate)
    )
