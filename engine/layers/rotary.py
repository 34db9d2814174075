"""Rotary position embedding: the table of cosines and sines.

Pair i of a head turns by `position * theta ** (-2 i / dim)`; pair i is elements i and
i + head_dim / 2 ("neox" order). Checkpoints in another order are reordered when they are loaded
(`engine.rope.Rotary.head_order`). Sources: Su et al., RoFormer (arXiv 2104.09864); Peng et al.,
YaRN (arXiv 2309.00071); Ding et al., LongRoPE (arXiv 2402.13753); Llama 3's and Llama 4's scaling
as transformers' `modeling_rope_utils` and `modeling_llama4` compute them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.rope import (
    LinearRope,
    LongRope,
    ProportionalRope,
    QueryScale,
    RopeScaling,
    Rotary,
    YarnRope,
)


def cos_sin_cache(head_dim: int, num_positions: int, rotary: Rotary) -> Tensor:
    """Builds [num_positions, head_dim] float32: cosines in the first half, sines in the second.
    Pairs that stay have cosine 1 and sine 0."""
    frequencies, length = inverse_frequencies(rotary.dim, rotary.theta), 1.0
    match rotary.scaling:
        case RopeScaling() as scaling:
            frequencies = llama3_scaled(frequencies, scaling)
        case LinearRope() as scaling:
            frequencies = frequencies / scaling.factor
        case YarnRope() as scaling:
            frequencies, length = yarn_scaled(frequencies, rotary.theta, scaling)
        case ProportionalRope() as scaling:
            turning = torch.arange(len(frequencies)) < scaling.pairs
            frequencies = frequencies * turning / scaling.factor
        case LongRope() as scaling:
            frequencies = frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
            length = scaling.attention_factor
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    staying = (0, (head_dim - rotary.dim) // 2)
    cos = torch.nn.functional.pad(angles.cos() * length, staying, value=1.0)
    sin = torch.nn.functional.pad(angles.sin() * length, staying, value=0.0)
    return torch.cat((cos, sin), dim=-1)


def query_scales(num_positions: int, scale: QueryScale) -> Tensor:
    """Returns [num_positions] float32, by which the query at each position is multiplied."""
    positions = torch.arange(num_positions, dtype=torch.int64)
    if scale.power:
        return torch.exp(scale.power * torch.log1p((positions.float() + 1) / scale.length))
    lengths = positions // scale.length
    return 1.0 + scale.beta * torch.log1p(lengths.float())


def inverse_frequencies(dim: int, theta: float) -> Tensor:
    """Returns [dim / 2] radians per position, falling."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / theta**exponents


def llama3_scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Scales [dim / 2] frequencies as Llama 3.1 does for a longer context: slow pairs turn `factor`
    times slower still, fast pairs stay, and those between are interpolated by how often they turn
    in the original context.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = smooth.clamp(0.0, 1.0)
    return (1.0 - smooth) * frequencies / scaling.factor + smooth * frequencies


def yarn_scaled(frequencies: Tensor, theta: float, scaling: YarnRope) -> tuple[Tensor, float]:
    """Scales [dim / 2] frequencies as YaRN does; returns them and what multiplies their cosines and
    sines. Pairs between the two borders are interpolated by their number.
    """
    num_pairs = len(frequencies)

    def pair_that_turns(times: float) -> float:
        turn = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return 2 * num_pairs * math.log(turn) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    width = max(high - low, 0.001)
    slowed = ((torch.arange(num_pairs, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    scaled = frequencies / scaling.factor * slowed + frequencies * (1.0 - slowed)
    return scaled, scaling.attention_factor
