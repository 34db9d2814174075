"""Puts together what says how many nodes there should be, and what holds prompts until they are."""

from __future__ import annotations

import random

from router.config import RouterSettings
from router.models.per_model import PerModel
from router.nodes.address import NodeRole
from router.nodes.node import Node, NodeState
from router.nodes.partners import decodes_of, prefills_of
from router.nodes.registry import NodeRegistry
from router.placement.candidates.node_pool import NodePool
from router.relay.prefill_hold import PrefillHold
from router.scaling.scaling_signal import ScalingObjectives, ScalingSignal


def make_scaling(settings: RouterSettings, registry: NodeRegistry) -> PerModel[ScalingSignal]:
    """Returns a signal for each model, which sees its nodes."""
    objectives = ScalingObjectives(settings.slo_ttft_ms / 1e3, settings.slo_itl_ms / 1e3)

    def is_drained(node: Node) -> bool:
        return registry.state(node) is NodeState.DRAINED

    def make(model: str) -> ScalingSignal:
        def all_nodes(role: NodeRole) -> list[Node]:
            decodes = registry.nodes(NodeRole.DECODE)
            if role is NodeRole.DECODE:
                return decodes_of(model, decodes)
            return prefills_of(model, registry.nodes(role), decodes)

        def nodes(role: NodeRole) -> list[Node]:
            return [node for node in all_nodes(role) if not is_drained(node)]

        def num_drained(role: NodeRole) -> int:
            return sum(map(is_drained, all_nodes(role)))

        return ScalingSignal(
            objectives=objectives,
            nodes=nodes,
            num_drained=num_drained,
            state=registry.state,
            clock=registry.clock,
            num_routers=settings.num_routers,
        )

    return PerModel(make, is_used=lambda signal: signal.has_held)


def make_prefill_hold(
    settings: RouterSettings,
    pool: NodePool,
    scaling: PerModel[ScalingSignal],
    rng: random.Random,
) -> PrefillHold:
    return PrefillHold(
        pool=pool,
        signals=scaling,
        limit_s=settings.prefill_hold_s,
        start_s=settings.prefill_start_s,
        default_tokens_per_s=settings.default_prefill_tokens_per_s,
        rng=rng,
        clock=pool.registry.clock,
    )
