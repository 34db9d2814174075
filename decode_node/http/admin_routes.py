"""The routes of operators: what changes the node, and is not for clients, and its metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from decode_node.errors import PermissionDenied, Unavailable
from decode_node.http.callers import Caller
from decode_node.http.engine_answers import engine_answers
from edge.http.bodies.abort_bodies import ReadAbort, read_abort, read_aborts
from edge.http.exposition import Exposition
from edge.http.request_head import RESET_PATHS

Abort = Callable[[Collection[str] | None], int]
"""Ends the answers of these names, or all; returns how many they are."""


def admin_routes(
    reset_prefix_cache: Callable[[], Awaitable[bool]],
    abort: Abort,
    metrics: CollectorRegistry | None,
) -> list[Route]:
    """Returns the routes. They are for routers and, where nothing has to show a key, for all.
    `metrics` None: they have a port of their own."""

    async def reset(request: Request) -> Response:
        """Forgets all cached prefixes: a router those of all its nodes. A router answers 503 where
        one could not, as one that is away; the others have, and `nodes` tells of each. For
        operators alone."""
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
        *(Route(path, reset, methods=["POST"]) for path in RESET_PATHS),
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
