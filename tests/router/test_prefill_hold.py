"""Whether a prompt waits for a prefill node is decided by the nodes that it would be placed on."""

from __future__ import annotations

import random

import pytest

from router.models.per_model import PerModel
from router.nodes.address import NodeRole
from router.nodes.registry import NodeRegistry
from router.placement.candidates.node_pool import NodePool
from router.relay.prefill_hold import PrefillHold
from router.scaling.scaling_signal import ScalingObjectives, ScalingSignal
from tests.router.factories import Fleet, request

PROMPT = request(model="demo", num_prompt_tokens=4000)


def hold_of(fleet: Fleet) -> PrefillHold:
    signals = PerModel(
        lambda model: ScalingSignal(
            objectives=ScalingObjectives(0.01, 0.1),
            nodes=fleet.registry.nodes,
            num_drained=lambda role: 0,
            state=fleet.registry.state,
            clock=fleet.clock,
        ),
        is_used=lambda signal: signal.has_held,
    )
    return PrefillHold(
        pool=NodePool(registry=fleet.registry),
        signals=signals,
        limit_s=60.0,
        start_s=0.01,
        default_tokens_per_s=0.1,
        rng=random.Random(1),
        clock=fleet.clock,
    )


def test_prefill_nodes_that_work_for_the_model_under_another_name_count() -> None:
    """The prompt is placed on them: waiting for others would be in vain."""
    fleet = Fleet()
    fleet.add("d", fingerprint="f")
    hold = hold_of(fleet)
    assert hold._is_worth_it(PROMPT)
    fleet.add("other", NodeRole.PREFILL, fingerprint="g")
    assert hold._is_worth_it(PROMPT)
    fleet.add("p", NodeRole.PREFILL, fingerprint="f", model_name="weights")
    assert not hold._is_worth_it(PROMPT)


async def test_prompts_that_need_not_wait_do_not_look_at_all_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet()
    fleet.add("d", fingerprint="f")
    fleet.add("p", NodeRole.PREFILL, fingerprint="f")
    hold = hold_of(fleet)
    hold.pool.decodes("demo")
    monkeypatch.delattr(NodeRegistry, "nodes")
    monkeypatch.delattr(NodeRegistry, "all_nodes")
    for _ in range(100):
        await hold.wait(PROMPT, time_left_s=60.0)
