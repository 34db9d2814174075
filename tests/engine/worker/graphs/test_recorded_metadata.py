"""Tests that a recorded step has the attention metadata of each step that its graph is replayed as:
all forms are the same, and no bound is exceeded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.engine.models.shapes import SHAPES, shape_config
from engine.batch.input_batch import BatchOrder, InputBatch
from engine.config import EngineConfig
from engine.contracts.steps.step_launches import GraphKey
from engine.layers.attention.backend import AttentionBackend, PrefillChunk
from engine.models.recorded_steps import recorded_steps
from engine.worker.attention_of_model import attention_of
from kv_transfer.layout import own_groups
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.device import KNOWN_GPUS, as_on

NUM_DRAWN = 24
ON_THE_DEVICE = {"hidden", "num_decodes", "decode_query_len"}
"""These say who decodes: of recorded steps with prompts only the device knows it."""


def drawn(
    chance: random.Random, config: EngineConfig, attention: AttentionBackend
) -> BatchOrder | None:
    """Returns a step of decodes, whole prompts and chunks; None: too large a one."""
    limits, width = config.scheduler, config.decode_query_len
    decodes = [
        chance.randint(width, 20_000) for _ in range(chance.choice((0, 0, 0, 1, 2, 14, 50, 200)))
    ]
    longest, is_cached = chance.choice((4, 60, 700, 3000)), chance.random() < 0.5
    chunks = [
        PrefillChunk(
            -1, round(longest ** chance.random()), chance.choice((0, 9, 15_000)) * is_cached
        )
        for _ in range(chance.choice((0, 1, 2, 4, 30)))
    ]
    chunks = attention.order(chunks)
    queries = [width] * len(decodes) + [chunk.num_tokens for chunk in chunks]
    contexts = decodes + [chunk.num_tokens + chunk.num_computed for chunk in chunks]
    if not 0 < len(queries) <= limits.max_num_seqs or sum(queries) > limits.max_num_batched_tokens:
        return None
    return BatchOrder(
        np.arange(len(queries), dtype=np.int32),
        np.array(queries, np.int32),
        np.array(contexts, np.int32),
        len(decodes),
        len(queries),
        decode_query_len=width,
    )


def metadata_of(
    attention: AttentionBackend, order: BatchOrder, config: EngineConfig
) -> list[AttentionMetadata]:
    """Returns what each KV group's layers are told; of tensors nothing is looked at."""
    count, num_tokens = len(order.rows), int(order.query_lens.sum())
    zeros = torch.zeros(max(count + 1, num_tokens), dtype=torch.int32)
    of_tokens, of_reqs = zeros[:num_tokens], zeros[:count]
    seen = of_reqs, zeros[: count + 1], of_tokens, of_tokens, of_tokens, of_reqs
    return [
        attention.metadata(
            InputBatch(order, num_tokens, *seen, of_reqs[:, None].expand(-1, 200), group.window)
        )
        for group in own_groups(config.kv_layout.groups)
        if not group.is_state
    ]


def not_held(recorded: Any, replayed: Any, name: str, key: GraphKey) -> Iterator[str]:
    """Names what of a replayed step the recorded one has otherwise."""
    if isinstance(recorded, Tensor):
        return
    if is_dataclass(recorded) and type(recorded) is type(replayed):
        skipped = set() if key.decodes else ON_THE_DEVICE
        for field in fields(recorded):
            if field.name not in skipped | {"usual_seq_len"}:
                ours, theirs = (getattr(one, field.name) for one in (recorded, replayed))
                yield from not_held(ours, theirs, f"{name}.{field.name}", key)
    elif isinstance(recorded, tuple) and len(recorded) == len(replayed):
        for index, (ours, theirs) in enumerate(zip(recorded, replayed, strict=True)):
            yield from not_held(ours, theirs, f"{name}[{index}]", key)
    elif isinstance(recorded, slice) and recorded.start == replayed.start:
        yield from not_held(recorded.stop, replayed.stop, f"{name}.max", key)
    elif name.rpartition(".")[2].startswith(("max", "num_")):
        if recorded < replayed:
            yield f"{name} is {recorded}, and {replayed} of a step that {key} holds"
    elif recorded != replayed:
        yield f"{name} is {recorded}, and {replayed} of a step that {key} holds"


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_graph_knows_holds_for_all_that_it_is_replayed_as(shape: str) -> None:
    config = shape_config(shape, max_model_len=24_576)
    has_state = any(group.is_state for group in config.kv_layout.groups)
    changes: list[dict[str, Any]] = [
        {},
        {"device": replace(config.device, deterministic=True)},
        {"decode_query_len": 1 if has_state else 4},
    ]
    for change in changes:
        changed = replace(config, **change)
        chance, found = random.Random(shape), []
        with as_on(KNOWN_GPUS["h200"]):
            launches = recorded_steps(changed)
            attention = attention_of(changed, torch.device("cpu"), launches.most_prompt_tokens)
            for order in (drawn(chance, changed, attention) for _ in range(NUM_DRAWN)):
                key = "" if order is None else launches.find(order.parts())
                if order is None or not isinstance(key, GraphKey):
                    continue
                if not key.decodes and not attention.graph_ok(order):
                    continue
                found.append(key)
                recorded = metadata_of(attention, BatchOrder.of_graph(key), changed)
                replayed = metadata_of(attention, order, changed)
                for ours, theirs in zip(recorded, replayed, strict=True):
                    assert not [*not_held(ours, theirs, type(ours).__name__, key)]
        assert len(found) >= NUM_DRAWN / 4
