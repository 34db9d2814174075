"""Says which way an FP8 GEMM is computed, by its number of rows; found by measurement.

small       a kernel of our own, one pass over the weights: on scales of blocks, few rows are
            multiplied in registers (`fp8_few_rows`)
unscaled    the library's fastest, which knows no scales of rows and outputs: the reader of the
            product next applies them
scaled      the library's, scales included
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Fp8Path = Literal["small", "unscaled", "scaled"]
SMALL_ROWS = 8
"""Our own kernel computes at most this many rows on scales of rows."""
SMALL_BLOCK_ROWS = 64
"""The same on scales of blocks, whose products the library cannot leave unscaled."""
FEW_BLOCK_ROWS = 4
"""The most rows for which products in registers take less time."""
_UNSCALED_ROWS = 1024
_INNER_MULTIPLE = 128
_OUTPUTS_MULTIPLE = 128


def fp8_path(num_rows: int, weight: Tensor, w_scales: Tensor) -> Fp8Path:
    """Returns the fastest way for `num_rows` x `weight` [N, K]."""
    blocks = w_scales.dim() == 2
    if num_rows <= (SMALL_BLOCK_ROWS if blocks else SMALL_ROWS) and takes_small(weight):
        return "small"
    return "scaled" if blocks or num_rows >= _UNSCALED_ROWS else "unscaled"


def takes_small(weight: Tensor) -> bool:
    """Returns whether our own kernel takes `weight` [N, K]: whole tiles."""
    num_outputs, inner = weight.shape
    return inner % _INNER_MULTIPLE == 0 and num_outputs % _OUTPUTS_MULTIPLE == 0
