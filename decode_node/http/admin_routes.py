"""The routes of operators: what changes the node, and is not for clients, and its metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from decode_node.errors import PermissionDenied, Unavailable
from decode_node.http.callers import Caller
from decode_node.http.engine_answers import engine_answers
from edge.http.exposition import Exposition


def admin_routes(
    reset_prefix_cache: Callable[[], Awaitable[bool]], metrics: CollectorRegistry | None
) -> list[Route]:
    """Returns the routes. They are for routers and, where nothing has to show a key, for all.
    `metrics` None: they have a port of their own."""

    async def reset(request: Request) -> Response:
        """Forgets all cached prefixes: a router those of all its nodes. For operators alone."""
        if request.state.caller is not Caller.TRUSTED:
            raise PermissionDenied("only operators may reset caches; ask the router's admin port")
        with engine_answers():
            is_reset = await reset_prefix_cache()
        if not is_reset:
            raise Unavailable(
                "requests are running, which hold blocks of the cache; try again when they have "
                "ended",
                code="cache_in_use",
            )
        return Response(status_code=200)

    routes = [Route("/reset_prefix_cache", reset, methods=["POST"])]
    return routes if metrics is None else [_metrics_route(metrics), *routes]


def _metrics_route(metrics: CollectorRegistry) -> Route:
    exposition = Exposition(metrics)

    async def scrape(request: Request) -> Response:
        """Tells counters and histograms to Prometheus."""
        return await exposition.response(request)

    return Route("/metrics", scrape)
