"""Divides the layers of a model among the stages of a pipeline."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

ALL_LAYERS = range(1 << 20)
"""Are more than any model has."""


def positions_of(layers: Sequence[int], wanted: range) -> range:
    """Returns which of `layers`, which ascend, are wanted."""
    return range(bisect_left(layers, wanted.start), bisect_left(layers, wanted.stop))


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """Returns the layers of a pipeline stage. Of layers that stages cannot share evenly, the first
    stages have one more: the last one samples as well."""
    each, more = divmod(num_layers, num_stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


def stage_starts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Returns the first layer of each stage; empty: there is only one."""
    if num_stages == 1:
        return ()
    stages = range(num_stages)
    return tuple(layers_of_stage(num_layers, stage, num_stages).start for stage in stages)
