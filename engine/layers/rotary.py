"""Rotary position embedding: the table of cosines and sines.

Pair i of a head turns by `position * theta ** (-2 i / head_dim)`; pair i is elements i and
i + head_dim / 2 ("neox" order). Source: Su et al., RoFormer, 2021.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.rope import AnyRopeScaling, LongRope, RopeScaling


def cos_sin_cache(
    head_dim: int, num_positions: int, theta: float, scaling: AnyRopeScaling | None
) -> Tensor:
    """Builds [num_positions, head_dim] float32: cosines in the first half, sines in the second."""
    frequencies, length = inverse_frequencies(head_dim, theta), 1.0
    if isinstance(scaling, RopeScaling):
        frequencies = llama3_scaled(frequencies, scaling)
    if isinstance(scaling, LongRope):
        frequencies = frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
        length = scaling.attention_factor
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * length


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """Returns [head_dim / 2] radians per position, falling."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / theta**exponents


def llama3_scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Scales frequencies as Llama 3.1 does for a longer context: slow pairs turn `factor` times
    slower still, fast pairs stay, and those between are interpolated by how often they turn in the
    original context.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = smooth.clamp(0.0, 1.0)
    return (1.0 - smooth) * frequencies / scaling.factor + smooth * frequencies
