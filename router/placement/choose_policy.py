"""Makes the policy that the settings name."""

from __future__ import annotations

import random
from enum import StrEnum

from router.nodes.registry import NodeRegistry
from router.placement.base_policy import BasePolicy
from router.placement.simple_policies import LeastLoadedPolicy, RoundRobinPolicy, StickyPolicy
from router.placement.tandem_policy import TandemParameters, TandemPolicy


class PolicyName(StrEnum):
    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"
    STICKY = "sticky"
    TANDEM = "tandem"


_SIMPLE: dict[PolicyName, type[BasePolicy]] = {
    PolicyName.ROUND_ROBIN: RoundRobinPolicy,
    PolicyName.LEAST_LOADED: LeastLoadedPolicy,
    PolicyName.STICKY: StickyPolicy,
}


def choose_policy(
    name: PolicyName,
    registry: NodeRegistry,
    rng: random.Random,
    parameters: TandemParameters,
    *,
    decode_choices: int = 2,
    max_prefill_candidates: int = 3,
) -> BasePolicy:
    """Returns the policy `name`. `parameters` are for `tandem` alone."""
    if name is PolicyName.TANDEM:
        return TandemPolicy(
            registry,
            rng,
            parameters,
            decode_choices=decode_choices,
            max_prefill_candidates=max_prefill_candidates,
        )
    return _SIMPLE[name](
        registry,
        rng,
        decode_choices=decode_choices,
        max_prefill_candidates=max_prefill_candidates,
    )
