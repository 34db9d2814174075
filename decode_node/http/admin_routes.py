"""The routes of operators: what changes the node, and is not for clients, and its metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from decode_node.errors import CacheInUse, PermissionDenied, Unavailable
from decode_node.http.callers import Caller
from decode_node.http.engine_answers import engine_answers
from edge.http.bodies.abort_bodies import ReadAbort, read_abort, read_aborts
from edge.http.bodies.flush_query import wait_of
from edge.http.exposition import Exposition

Abort = Callable[[Collection[str] | None], int]
"""Ends the answers of these names, or all; returns how many they are."""

_IN_USE = "requests are running, which hold blocks of the cache; try again when they have ended"


def admin_routes(
    reset_prefix_cache: Callable[[float], Awaitable[bool]],
    abort: Abort,
    metrics: CollectorRegistry | None,
) -> list[Route]:
    """Returns the routes. They are for routers and, where nothing has to show a key, for all.
    `metrics` None: they have a port of their own."""

    async def reset(request: Request) -> Response:
        """Forgets all cached prefixes: a router those of all its nodes. A router answers 503 where
        one could not, as one that is away; the others have, and `nodes` tells of each. For
        operators alone."""
        if not await is_reset(request, 0.0):
            raise Unavailable(_IN_USE, code="cache_in_use")
        return Response(status_code=200)

    async def flush(request: Request) -> Response:
        """Forgets all cached prefixes as SGLang does: a 400 while requests run, for whose end
        `?timeout=30` waits that many seconds. For operators alone."""
        if request.method == "HEAD":  # asks whether this is here
            return Response(status_code=200)
        if not await is_reset(request, wait_of(request.query_params)):
            raise CacheInUse(_IN_USE)
        return Response(status_code=200)

    async def is_reset(request: Request, within_s: float) -> bool:
        if request.state.caller is not Caller.TRUSTED:
            raise PermissionDenied("only operators may reset caches; ask the router's admin port")
        with engine_answers():
            return await reset_prefix_cache(within_s)

    async def abort_one(request: Request) -> Response:
        """Ends the answer `rid`, or with `abort_all` all answers, with what they have and the
        finish reason `abort`, as SGLang does. A router: at all nodes, and what waits in it. For
        operators alone."""
        return await end_answers(request, read_abort)

    async def abort_several(request: Request) -> Response:
        """Ends the answers `request_ids` in the same way, or all where it is empty, as vLLM does.
        For operators alone."""
        return await end_answers(request, read_aborts)

    async def end_answers(request: Request, read: ReadAbort) -> Response:
        if request.state.caller is not Caller.TRUSTED:
            raise PermissionDenied("only operators may end answers; ask the router's admin port")
        return JSONResponse({"aborted": abort(await read(request))})

    routes = [
        Route("/reset_prefix_cache", reset, methods=["POST"]),
        Route("/flush_cache", flush, methods=["GET", "POST"]),
        Route("/abort_request", abort_one, methods=["POST"]),
        Route("/abort_requests", abort_several, methods=["POST"]),
    ]
    return routes if metrics is None else [_metrics_route(metrics), *routes]


def _metrics_route(metrics: CollectorRegistry) -> Route:
    exposition = Exposition(metrics)

    async def scrape(request: Request) -> Response:
        """Tells counters and histograms to Prometheus."""
        return await exposition.response(request)

    return Route("/metrics", scrape)
