"""Puts together what has requests answered."""

from __future__ import annotations

import random

from router.config import RouterSettings
from router.make_scaling import make_prefill_hold
from router.models.per_model import PerModel
from router.relay.attempts import Attempts
from router.relay.client import Clients
from router.relay.forward import Forwarder
from router.relay.migration import Migrations
from router.relay.retry_budget import RetryBudget


def make_forwarder(settings: RouterSettings, attempts: Attempts, rng: random.Random) -> Forwarder:
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
        hold=make_prefill_hold(settings, attempts.registry, attempts.scaling, rng),
        clients=Clients(
            send_timeout_s=settings.send_timeout_s, keepalive_s=settings.sse_keepalive_s
        ),
        no_node_wait_s=settings.no_node_wait_s,
        rng=rng,
    )
