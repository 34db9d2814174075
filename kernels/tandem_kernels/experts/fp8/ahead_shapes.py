"""Says where experts in e4m3 are multiplied by warps that do nothing else, without Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.device import has_warpgroup_mma
from tandem_kernels.elementwise.gate_form import GateForm, is_silu

HEIGHT = 128
"""The most rows of a tile."""
COLS = 256
"""Outputs of a tile; of gate and of up, half as many."""
_MEAN_ROWS = 64
"""Experts have more rows than this on average. On an H200 8,192 tokens of DeepSeek-V3 take 8.4 ms
in place of 10.8, and of Qwen3-30B-A3B 1.02 in place of 1.33; 1,100 of the latter 0.42 and 0.45."""
_LARGEST = 2**31


def multiplies_ahead(
    x: Tensor, w13: Tensor, num_pairs: int, *, biased: bool, gate: GateForm | None
) -> bool:
    """Returns whether `fp8_experts_ahead_kernel` computes both GEMMs: on Hopper, of many rows,
    where inputs and outputs are whole tiles and numbers are counted in 32 bits."""
    num_experts, _, width, hidden = w13.shape
    return (
        has_warpgroup_mma(x.device)
        and x.dtype in (torch.bfloat16, torch.float16)
        and num_pairs > _MEAN_ROWS * num_experts
        and width % (COLS // 2) == hidden % COLS == 0
        and 2 * num_experts * width < _LARGEST
        and num_pairs * max(width, hidden) // 128 < _LARGEST
        and not biased
        and is_silu(gate)
    )
