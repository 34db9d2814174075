"""Holds what layers that keep a state share: the inputs of a step, and how a page holds a state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tandem_kernels.batch.state_metadata import StateMetadata

_STATE_BYTES = 4
"""States are kept in float32: they are sums over the whole sequence."""


class TokenPlaces(NamedTuple):
    """Says how far each token rotates: `positions` [T] int64 are rows of `cos_sin_cache` [M, D]
    float32."""

    positions: Tensor
    cos_sin_cache: Tensor


@dataclass(frozen=True, slots=True)
class StateInputs:
    """Holds what all layers with a state share in one step.

    Attributes:
        slot_mapping: [T] int64; -1 marks padding.
        metadata: Whose tokens these are.
        places: Of tokens, where they rotate; None: they do not.
    """

    slot_mapping: Tensor
    metadata: StateMetadata
    places: TokenPlaces | None = None


def views_of_pages(
    kv_cache: Tensor, dtype: torch.dtype, state: tuple[int, ...], last: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Returns the states, [N, *state] float32, and the last inputs of a convolution behind them,
    [N, *last] of `dtype`, in pages, [N, bytes of a page] uint8."""
    num_bytes = math.prod(state) * _STATE_BYTES
    states = states_of_pages(kv_cache[:, :num_bytes], state)
    return states, last_inputs_of_pages(kv_cache[:, num_bytes:], dtype, last)


def states_of_pages(kv_cache: Tensor, state: tuple[int, ...]) -> Tensor:
    """Returns the states, [N, *state] float32, in what pages have of them, [N, bytes] uint8."""
    return kv_cache.view(torch.float32).view(-1, *state)


def last_inputs_of_pages(kv_cache: Tensor, dtype: torch.dtype, last: tuple[int, int]) -> Tensor:
    """Returns the last inputs of a convolution, [N, *last] of `dtype`, in what pages have of them,
    [N, bytes] uint8."""
    return kv_cache.view(dtype).view(-1, *last)
