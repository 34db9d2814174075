"""Puts together what keeps responses. Its libraries are imported only where responses are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from router.config import RouterSettings
from router.errors import ConfigurationError
from router.models.open_request_limit import OpenRequestLimit
from router.observe.store_metrics import StoreMetrics
from router.request.tenants import Tenant
from router.store.running_tasks import running_tasks

if TYPE_CHECKING:
    from router.responses.background.background_runs import BackgroundRuns

_MIB = 1 << 20

KEPT_PATHS = ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact")
"""Paths whose requests may refer to what is kept."""


@dataclass(frozen=True, slots=True)
class KeptRoutes:
    """Serves responses that are kept. `endpoint` is for the paths that make them, `running` is
    open while the router serves, `begin_drain` is called when it takes no more requests."""

    endpoint: ASGIApp
    routes: Sequence[BaseRoute]
    running: Callable[[], AbstractAsyncContextManager[None]]
    begin_drain: Callable[[], None]


def make_responses(
    settings: RouterSettings,
    api: ASGIApp,
    room: OpenRequestLimit,
    tenants: Callable[[], Mapping[str, Tenant]],
    metrics: StoreMetrics,
) -> KeptRoutes:
    """Returns what is in front of `api`. Raises `ConfigurationError` where the store cannot be
    used."""
    try:
        from router.edge.response_api import ResponseRoutes
        from router.responses.background.background_runs import BackgroundRuns
        from router.responses.conversation_calls import ConversationCalls
        from router.responses.kept_responses import KeptResponses
        from router.responses.response_calls import ResponseCalls
        from router.responses.settings import KeepLimits
        from router.responses.stateful_endpoint import StatefulEndpoint
        from router.store.sql.database import Database
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"--response-store needs the package {error.name}: pip install 'tandem[state]'"
        ) from None
    url = settings.response_store.get_secret_value()
    limits = KeepLimits(
        ttl_s=settings.response_ttl_s,
        max_bytes_per_tenant=settings.response_store_mib_per_tenant * _MIB,
        max_item_bytes=settings.max_body_bytes,
        max_body_bytes=settings.max_body_bytes,
        lease_s=settings.response_lease_s,
        max_background=settings.max_background_responses,
    )
    database = Database(url, settings.response_store_timeout_s, metrics.observe)
    kept = KeptResponses(database, limits, clock=database.clock)
    runs = BackgroundRuns(kept=kept, api=api, tenants=tenants, drain_s=settings.drain_timeout_s)
    metrics.num_running = lambda: runs.num_running
    endpoint = StatefulEndpoint(
        api=api,
        kept=kept,
        runs=runs,
        room=room,
        refused=metrics.refused,
        body_limits=settings.body_limits(),
        keepalive_s=settings.sse_keepalive_s,
    )
    routes = ResponseRoutes(
        responses=ResponseCalls(kept, runs),
        conversations=ConversationCalls(kept),
        body_limits=settings.body_limits(),
        keepalive_s=settings.sse_keepalive_s,
    )
    return KeptRoutes(endpoint, routes.routes(), lambda: _running(runs), runs.begin_drain)


def _running(runs: BackgroundRuns) -> AbstractAsyncContextManager[None]:
    from router.responses.expiry import sweep_responses
    from router.store.sweeping import sweep_forever

    kept = runs.kept
    works = runs.watch(), sweep_forever(kept.database, partial(sweep_responses, kept))
    return running_tasks(kept.database, *works, drain=runs.drain, close=runs.close)
