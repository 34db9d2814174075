"""Cuts a step that no graph holds into two that graphs hold: its decodes, then its prompts.

Launched one by one, the kernels of a step take the host 20 to 80 ms, and every answer waits for
them. Where decodes draft, states lack tokens that those of prompts have, so no graph holds both: a
node would launch each step one by one in which a request begins. Two replays read the weights
twice, which takes less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.nn.functional import pad

from engine.batch.input_batch import BatchOrder
from engine.batch.places import NO_TOKEN, Int32Array
from engine.contracts.steps.step_launches import GraphKey, StepLaunches
from engine.sample.sampler import SamplerOutput

Part = tuple[BatchOrder, GraphKey | None]


def parts_of(
    order: BatchOrder,
    find: Callable[[BatchOrder], GraphKey | None],
    launches: StepLaunches,
    only_draws: Callable[[Int32Array], bool],
) -> list[Part]:
    """Returns what is run of a step, in order, each with the graph that `find` has for it. A step
    is cut where `launches` say so, and where its rows need no more than draws."""
    key, num_prompts = find(order), len(order.rows) - order.num_decodes
    if key is not None or not order.num_decodes or not num_prompts:
        return [(order, key)]
    counts = order.query_lens[order.num_decodes :].tolist()
    ends = order.seq_lens[order.num_decodes :].tolist()
    parts = zip(ends, counts, strict=True)
    work = sum(launches.one_by_one.work(end - count, count) for end, count in parts)
    if not launches.is_cut(work) or not only_draws(order.rows):
        return [(order, None)]
    halves = [(half, find(half)) for half in (_decodes(order), _prompts(order))]
    return halves if all(found is not None for _, found in halves) else [(order, None)]


def _decodes(order: BatchOrder) -> BatchOrder:
    count = order.num_decodes
    return replace(
        order,
        rows=order.rows[:count],
        query_lens=order.query_lens[:count],
        seq_lens=order.seq_lens[:count],
        num_sampled=count,
    )


def _prompts(order: BatchOrder) -> BatchOrder:
    count = order.num_decodes
    return replace(
        order,
        rows=order.rows[count:],
        query_lens=order.query_lens[count:],
        seq_lens=order.seq_lens[count:],
        num_decodes=0,
        num_sampled=order.num_sampled - count,
        has_pending=False,
    )


def joined(found: Sequence[SamplerOutput | None]) -> SamplerOutput | None:
    """Returns one result of a step's parts; None: none of them sampled."""
    sampled = [each for each in found if each is not None]
    if len(sampled) < 2:
        return sampled[0] if sampled else None
    width = max(each.token_ids.shape[1] for each in sampled)
    tokens = [
        pad(each.token_ids, (0, width - each.token_ids.shape[1]), value=NO_TOKEN)
        for each in sampled
    ]
    drafts = any(each.num_drafts is not None for each in sampled)
    features = [each.draft_features for each in sampled if each.draft_features is not None]
    return SamplerOutput(
        torch.cat(tokens),
        None,
        num_drafts=torch.cat([_num_drafts(each) for each in sampled]) if drafts else None,
        draft_features=torch.cat(features) if features else None,
    )


def _num_drafts(found: SamplerOutput) -> torch.Tensor:
    """Returns [S] int32; prompts have none."""
    if found.num_drafts is not None:
        return found.num_drafts
    return found.token_ids.new_zeros(len(found.token_ids), dtype=torch.int32)
