"""Answers what operators and their tools ask the router.

    GET  /health     200 while the process lives
    GET  /ready      200 while requests would be served, else 503; SGLang: /health_generate
    GET  /metrics    Prometheus
    GET  /status     a page for people (`status_api.py`)
    POST /reset_prefix_cache    forgets the cached prefixes of all nodes; 503 where one could not
    GET, POST /flush_cache      the same as SGLang does it: 400 while requests run, ?timeout= waits
    -    /admin/nodes           the nodes, taken out of use and back (`node_api.py`)

All on the port of the API, or the last two on a port of their own (`admin_port`), which then has
the first two as well.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from edge.http.bodies.flush_query import wait_of
from edge.http.exposition import Exposition
from edge.http.request_head import READY_PATHS
from router.errors import AdminOnly
from router.nodes.address import NodeRole
from router.nodes.operations.prefix_caches import IN_USE, RESET, PrefixCaches
from router.nodes.registry import NodeRegistry
from router.observe.metrics import RouterMetrics


def probe_routes(
    registry: NodeRegistry, is_draining: Callable[[], bool], own_fault: Callable[[], str] = str
) -> APIRouter:
    """Returns the routes. `own_fault` tells why nodes refuse this router."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> JSONResponse:
        fault = own_fault()
        return JSONResponse({"status": "ok", **({"fault": fault} if fault else {})})

    async def ready() -> JSONResponse:
        counts = {f"{role}_nodes": len(registry.usable(role)) for role in NodeRole}
        state = readiness(registry, is_draining())
        code = 200 if state == "ready" else 503
        return JSONResponse({"status": state, **counts}, status_code=code)

    for path in READY_PATHS:
        routes.get(path)(ready)
    return routes


def admin_routes(
    metrics: RouterMetrics,
    caches: PrefixCaches,
    may_change: Callable[[], bool] = lambda: True,
) -> APIRouter:
    """Returns the routes. Where `may_change` is false they only tell."""
    routes = APIRouter()

    async def reset(within_s: float) -> dict[str, str]:
        if not may_change():
            raise AdminOnly("keys of clients do not reset caches; use the router's --admin-port")
        return await caches.reset(within_s)

    @routes.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> JSONResponse:
        nodes = await reset(0.0)
        return JSONResponse({"nodes": nodes}, 200 if set(nodes.values()) <= {RESET} else 503)

    @routes.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache(request: Request) -> JSONResponse:
        if request.method == "HEAD":  # asks whether this is here
            return JSONResponse({})
        nodes = await reset(wait_of(request.query_params))
        others = set(nodes.values()) - {RESET}
        status = 200 if not others else 400 if others == {IN_USE} else 503
        return JSONResponse({"nodes": nodes}, status)

    exposition = Exposition(metrics.registry)

    @routes.get("/metrics")
    async def scrape(request: Request) -> Response:
        return await exposition.response(request)

    return routes


def readiness(registry: NodeRegistry, is_draining: bool) -> str:
    if is_draining:
        return "draining"
    return "ready" if registry.usable(NodeRole.DECODE) else "no decode node"
