"""Asks for the attention backend that fits a model's spec."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.batch.input_batch import InputBatch
from engine.config import EngineConfig
from engine.layers.attention.backend import AttentionBackend
from engine.layers.attention.selection import choose_attention
from engine.models.base import GroupInputs
from engine.models.registry import spec_of
from kv_transfer.layout import KVGroup, of_every_group, own_groups
from tandem_kernels.attention.attention_thresholds import masked_tokens
from tandem_kernels.attention.index_pages import (
    CachesByGroup,
    IndexedKV,
    IndexedLatents,
    LayerCache,
    OpenRows,
)
from tandem_kernels.attention.token_rows import NarrowRows


def attention_of(
    config: EngineConfig, device: torch.device, recorded_tokens: int
) -> AttentionBackend:
    """Returns the backend that the model, the settings and the device ask for.

    Args:
        recorded_tokens: The tokens of the largest step with prompts that is a CUDA graph.
    """
    spec = spec_of(config.model)
    return choose_attention(
        config,
        device,
        rare_attention=spec.rare_attention,
        has_sinks=spec.has_sinks,
        latent=spec.latent_shape,
        dense_tokens=spec.dense_tokens,
        masked_tokens=masked_tokens_of(config, device),
        recorded_tokens=recorded_tokens,
    )


def masked_tokens_of(config: EngineConfig, device: torch.device) -> int:
    """Returns `LatentBackend.masked_tokens` of a model; 0: nothing is masked."""
    spec = spec_of(config.model)
    if spec.latent_shape is None or spec.dense_tokens is None or config.device.deterministic:
        return 0
    heads = config.model.heads_of(config.kv_layout.groups[0].layers[0]).num_heads
    return masked_tokens(device, heads // config.parallel.tensor_parallel_size)


def prepare_attention(
    attention: AttentionBackend, config: EngineConfig, attended: LayerCache
) -> None:
    """Lets a backend prepare for the largest step there may be, over the cache of the first layer
    of the first group: such layers see everything, if any do."""
    heads = config.model.heads_of(config.kv_layout.groups[0].layers[0])
    num_heads = heads.num_heads // config.parallel.tensor_parallel_size
    longest = min(config.model.max_model_len, config.scheduler.max_num_batched_tokens)
    match attended:
        case IndexedLatents(latents=kept) | IndexedKV(kv=kept):
            attended = kept
    if isinstance(attended, OpenRows | CachesByGroup | NarrowRows):
        return
    attention.prepare(num_heads, attended, getattr(torch, config.model.dtype), longest)


def group_inputs(
    groups: Sequence[KVGroup],
    by_group: Sequence[InputBatch],
    attention: AttentionBackend,
    *,
    num_taken: torch.Tensor | None = None,
    most: int = 1,
    keeps_ends: bool = False,
) -> tuple[GroupInputs, ...]:
    """Returns a pass over a batch, which is given as each KV group with blocks of its own sees it,
    for the layers of all groups. `num_taken` [rows] int32, `most`: see `InputBatch.state_metadata`.
    `keeps_ends`: the last layer attends for `InputBatch.ends` alone."""
    own = tuple(
        GroupInputs(batch.slot_mapping, batch.state_metadata(num_taken, most))
        if group.is_state
        else GroupInputs(
            batch.slot_mapping,
            attention.metadata(batch),
            attention.metadata(batch.ends()) if keeps_ends else None,
        )
        for group, batch in zip(own_groups(groups), by_group, strict=True)
    )
    return of_every_group(groups, own)
