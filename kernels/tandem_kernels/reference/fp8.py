"""FP8 in plain torch: rows of e4m3 numbers, and the scales that they share."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem_kernels.reference.layouts import kernel_takes

E4M3_MAX = 448.0
"""The largest number of e4m3; a conversion of a larger one gives NaN in some releases of torch."""
GROUP = 128
"""Numbers of a row that share a scale, where a row has several."""
BLOCK = 128
"""Outputs and inputs of a block of weights that share a scale."""


@kernel_takes(x="T | K")
def quantise_fp8(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """Quantises rows: each, or each `group` numbers of it, by its largest number.

    Args:
        x: [T, K].
        group: 0: a row has one scale.

    Returns:
        e4m3 numbers [T, K], and float32 scales [1, T] or [K / group, T]. Of a row the largest
        number becomes the largest of e4m3; zeros alone have scale 1.
    """
    wide = x.float()
    size = group or x.shape[1]
    groups = -(-x.shape[1] // size)
    padded = torch.nn.functional.pad(wide, (0, groups * size - x.shape[1]))
    parts = padded.view(len(x), groups, size)
    largest = parts.abs().amax(dim=-1)
    scales = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
    scaled = (parts / scales[:, :, None]).flatten(1)[:, : x.shape[1]]
    return to_e4m3(scaled), scales.t().contiguous()


def to_e4m3(x: Tensor) -> Tensor:
    """Rounds to e4m3; what is larger than its largest number becomes that."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def dequantise_rows(numbers: Tensor, scales: Tensor) -> Tensor:
    """Returns what `quantise_fp8` means, in float32, [T, K]."""
    size = -(-numbers.shape[1] // len(scales))
    wide = scales.t().repeat_interleave(size, dim=1)
    return numbers.float() * wide[:, : numbers.shape[1]]


def dequantise_weight(weight: Tensor, scales: Tensor) -> Tensor:
    """Returns weights [N, K] in float32.

    Args:
        weight: e4m3.
        scales: [N], or of each 128 x 128 [N / 128, K / 128 or more].
    """
    if scales.dim() == 1:
        return weight.float() * scales[:, None]
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * wide[: weight.shape[0], : weight.shape[1]]
