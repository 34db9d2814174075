"""Draws a bench's random weights as vLLM draws its own: uniformly between -0.001 and 0.001.

At the power limit a GPU's clock depends on the numbers that it multiplies: with these weights
prefill of the 8B shape is 1 % faster than with ours, whose deviation is 0.02 (docs/method.md). So
figures beside such a peer's are comparable if both have the same weights. It is for a worker in
this process, as `UniprocExecutor` has it. Source: `initialize_single_dummy_weight` of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from engine.layers.shard import CheckpointWeight, TensorSlice
from engine.models import dummy_weights

_LIMIT = 1e-3


@contextmanager
def peer_weights() -> Iterator[None]:
    """Replaces how dummy weights are drawn meanwhile; those in other formats than floats stay."""
    drawn_by_us = dummy_weights._dummy

    def drawn(part: TensorSlice, weight: CheckpointWeight) -> Tensor:
        numbers = drawn_by_us(part, weight)
        if part.dummy is None and numbers.is_floating_point():
            numbers.uniform_(-_LIMIT, _LIMIT)
        return numbers

    dummy_weights._dummy = drawn
    try:
        yield
    finally:
        dummy_weights._dummy = drawn_by_us
