"""FP8 in plain torch: numbers in e4m3, and the scales that they share."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
"""The largest number of e4m3; a conversion of a larger one gives NaN in some releases of torch."""


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns e4m3 numbers of the shape of `x` [T, K] and a float32 scale for each row, [T].

    The largest number of a row becomes the largest of e4m3; a row of zeros has scale 1.
    """
    wide = x.float()
    scales = _scales(wide.abs().amax(dim=-1))
    return _to_e4m3(wide / scales[:, None]), scales


def _scales(largest: Tensor) -> Tensor:
    return torch.where(largest > 0, largest / E4M3_MAX, 1.0)


def _to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
