"""Finds what the ranks of an engine cannot share of a model. All raise `CheckpointError`."""

from __future__ import annotations

from collections.abc import Iterable

from engine.config import ModelConfig, ParallelConfig
from engine.models.errors import CheckpointError
from engine.models.specs.states import StateSpec

_STATE_ALIGNMENT = 4
"""Bytes."""


def check_experts(model: ModelConfig, parallel: ParallelConfig, num_experts: int) -> None:
    """Refuses more ranks than a layer has experts, where each has some as a whole."""
    num_sharing = parallel.num_ranks // parallel.pipeline_parallel_size
    if parallel.enable_expert_parallel and 0 < num_experts < num_sharing:
        raise CheckpointError(
            model.path,
            f"has {num_experts} experts in a layer, which {num_sharing} ranks cannot share as a "
            "whole",
            "start fewer ranks, or without --enable-expert-parallel",
        )


def check_one_stage(model: ModelConfig, parallel: ParallelConfig, what: str) -> None:
    """Refuses stages of a pipeline, for a model whose layers need more than the one row of a token
    that the stage before gives: `what` it has."""
    if parallel.pipeline_parallel_size > 1:
        raise CheckpointError(
            model.path,
            f"has {what}, and a stage of a pipeline gives the next one a single row of a token",
            "start it with pipeline_parallel_size 1",
        )


def check_counts(
    model: ModelConfig, parallel: ParallelConfig, counts: Iterable[tuple[int, str]]
) -> None:
    """Refuses ranks that cannot share each count evenly; a name says what is counted."""
    tp_size = parallel.tensor_parallel_size
    for count, name in counts:
        if count % tp_size:
            raise CheckpointError(
                model.path,
                f"has {count} {name}, which {tp_size} tensor-parallel ranks cannot share evenly",
                "choose a tensor_parallel_size that divides them",
            )


def check_states(model: ModelConfig, parallel: ParallelConfig, states: StateSpec | None) -> None:
    """Refuses ranks that cannot share layers with a state: heads evenly, and what else is kept
    evenly or by repeating it."""
    if states is None:
        return
    check_counts(model, parallel, states.counts)
    tp_size = parallel.tensor_parallel_size
    planes = states.planes(model.dtype)
    for plane in planes:
        if not plane.can_be_split(tp_size):
            raise CheckpointError(
                model.path,
                f"keeps {plane.name} in {plane.heads} parts, which {tp_size} tensor-parallel ranks "
                "can neither share nor repeat evenly",
                "choose a tensor_parallel_size that divides them or is a multiple of them",
            )
    size = sum(plane.row_bytes * plane.heads_of_rank(0, tp_size).count for plane in planes)
    if size % _STATE_ALIGNMENT:
        raise CheckpointError(
            model.path,
            f"keeps {size} bytes of a request in a layer on each of {tp_size} ranks, and states of "
            "float32 lie at multiples of 4",
            "choose another tensor_parallel_size, or --dtype float32",
        )


def check_kv_heads(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuses ranks that can neither share key/value heads evenly nor repeat them."""
    tp_size = parallel.tensor_parallel_size
    for count in (heads.num_kv_heads for heads in model.kinds_of_heads):
        if count % tp_size and tp_size % count:
            raise CheckpointError(
                model.path,
                f"has {count} key/value heads, which {tp_size} tensor-parallel ranks can neither "
                "share nor repeat evenly",
                "choose a tensor_parallel_size that divides them or is a multiple of them",
            )
