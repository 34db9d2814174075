"""Says which way an FP8 GEMM is computed, by its number of rows (`tunings/*/fp8_paths.json`).

few         a kernel of our own that multiplies in registers, on scales of blocks (`fp8_few_rows`)
small       a kernel of our own on matrix units, one pass over the weights
unscaled    the library's fastest, which knows no scales of rows and outputs: the reader of the
            product next applies them
scaled      the library's, scales included
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tandem_kernels.tunings.table import plain_table

Fp8Path = Literal["few", "small", "unscaled", "scaled"]
_INNER_MULTIPLE = 128
_OUTPUTS_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class _Way:
    path: Fp8Path


_TABLE = plain_table("fp8_paths", _Way, ("num_rows", "blocks", "whole_tiles"))


def fp8_path(num_rows: int, weight: Tensor, w_scales: Tensor) -> Fp8Path:
    """Returns the fastest way for `num_rows` x `weight` [N, K]."""
    given = num_rows, w_scales.dim() == 2, takes_small(weight)
    return _TABLE.choose(weight.device, *given).path


def is_own(num_rows: int, weight: Tensor, w_scales: Tensor) -> bool:
    """Returns whether the fastest way is a kernel of our own."""
    return fp8_path(num_rows, weight, w_scales) in ("few", "small")


def takes_small(weight: Tensor) -> bool:
    """Returns whether our own kernel takes `weight` [N, K]: whole tiles."""
    num_outputs, inner = weight.shape
    return inner % _INNER_MULTIPLE == 0 and num_outputs % _OUTPUTS_MULTIPLE == 0
