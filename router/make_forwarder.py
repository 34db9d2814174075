"""Puts together what places requests and has them answered."""

from __future__ import annotations

import random

from router.config import RouterSettings
from router.make_scaling import make_prefill_hold
from router.models.per_model import PerModel
from router.nodes.registry import NodeRegistry
from router.placement.base_policy import BasePolicy
from router.placement.candidates.node_pool import NodePool
from router.placement.choose_policy import PolicyName, choose_policy
from router.placement.tandem_policy import TandemParameters
from router.relay.attempts.attempts import Attempts
from router.relay.attempts.retry_budget import RetryBudget
from router.relay.client import Clients
from router.relay.forward import Forwarder
from router.relay.migration import Migrations


def make_forwarder(
    settings: RouterSettings, attempts: Attempts, pool: NodePool, rng: random.Random
) -> Forwarder:
    migrations = Migrations(
        attempts=attempts,
        registry=attempts.registry,
        budgets=PerModel(
            lambda model: RetryBudget(settings.retry_budget, settings.migration_burst)
        ),
        max_per_request=settings.max_migrations,
        timeout_s=settings.resume_timeout_s,
        rng=rng,
    )
    return Forwarder(
        attempts=attempts,
        migrations=migrations,
        metrics=attempts.metrics,
        hold=make_prefill_hold(settings, pool, attempts.scaling, rng),
        clients=Clients(
            send_timeout_s=settings.send_timeout_s, keepalive_s=settings.sse_keepalive_s
        ),
        no_node_wait_s=settings.no_node_wait_s,
        rng=rng,
    )


def make_policy(settings: RouterSettings, registry: NodeRegistry, rng: random.Random) -> BasePolicy:
    policy = choose_policy(
        PolicyName(settings.policy),
        registry,
        rng,
        TandemParameters(
            prefill_tokens_per_s=settings.default_prefill_tokens_per_s,
            short_prompt_tokens=settings.short_prompt_tokens,
            max_index_entries=settings.max_index_entries,
        ),
        decode_choices=settings.decode_choices,
        max_prefill_candidates=settings.max_prefill_candidates,
    )
    policy.spare.window_s = settings.batch_idle_window_s
    policy.spare.reserve = settings.batch_reserve
    return policy
