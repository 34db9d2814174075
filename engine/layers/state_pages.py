"""Holds what layers that keep a state share: the inputs of a step, and how a page holds a state."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_kernels.batch.state_metadata import StateMetadata

_STATE_BYTES = 4
"""States are kept in float32: they are sums over the whole sequence."""


@dataclass(frozen=True, slots=True)
class StateInputs:
    """Holds what all layers with a state share in one step.

    Attributes:
        slot_mapping: [T] int64; -1 marks padding.
        metadata: Whose tokens these are.
    """

    slot_mapping: Tensor
    metadata: StateMetadata


def views_of_pages(
    kv_cache: Tensor, dtype: torch.dtype, state: tuple[int, ...], last: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Returns the states, [N, *state] float32, and the last inputs of a convolution behind them,
    [N, *last] of `dtype`, in pages, [N, bytes of a page] uint8."""
    num_bytes = math.prod(state) * _STATE_BYTES
    states = kv_cache[:, :num_bytes].view(torch.float32)
    return states.view(-1, *state), last_inputs_of_pages(kv_cache[:, num_bytes:], dtype, last)


def last_inputs_of_pages(kv_cache: Tensor, dtype: torch.dtype, last: tuple[int, int]) -> Tensor:
    """Returns the last inputs of a convolution, [N, *last] of `dtype`, in what pages have of them,
    [N, bytes] uint8."""
    return kv_cache.view(dtype).view(-1, *last)
