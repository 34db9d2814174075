"""The routes of operators: what changes the node, and is not for clients, and its metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry
from starlette.responses import Response

from decode_node.errors import PermissionDenied, Unavailable
from decode_node.http.callers import Caller
from decode_node.http.engine_answers import engine_answers
from edge.http.exposition import Exposition


def create_admin_router(
    reset_prefix_cache: Callable[[], Awaitable[bool]], metrics: CollectorRegistry | None
) -> APIRouter:
    """Returns the routes. They are for routers and, where nothing has to show a key, for all.
    `metrics` None: they have a port of their own."""
    router = APIRouter()

    if metrics is not None:
        exposition = Exposition(metrics)

        @router.get("/metrics")
        async def scrape(request: Request) -> Response:
            """Tells counters and histograms to Prometheus."""
            return await exposition.response(request)

    @router.post("/reset_prefix_cache")
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

    return router
