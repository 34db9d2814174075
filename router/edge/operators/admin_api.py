"""Answers what operators and their tools ask the router.

    GET  /health     200 while the process lives
    GET  /ready      200 while requests would be served, else 503; SGLang: /health_generate
    GET  /metrics    Prometheus
    GET  /status     a page for people (`status_api.py`)
    POST /reset_prefix_cache    forgets the cached prefixes of all nodes; SGLang: /flush_cache
    -    /admin/nodes           the nodes, taken out of use and back (`node_api.py`)

All on the port of the API, or the last two on a port of their own (`admin_port`), which then has
the first two as well.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from edge.http.exposition import Exposition
from edge.http.request_head import READY_PATHS, RESET_PATHS
from router.errors import AdminOnly
from router.nodes.address import NodeRole
from router.nodes.operations.prefix_caches import RESET, PrefixCaches
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

    async def reset_prefix_cache() -> JSONResponse:
        if not may_change():
            raise AdminOnly("keys of clients do not reset caches; use the router's --admin-port")
        outcomes = await caches.reset()
        is_done = all(outcome == RESET for outcome in outcomes.values())
        return JSONResponse({"nodes": outcomes}, status_code=200 if is_done else 503)

    for path in RESET_PATHS:
        routes.post(path)(reset_prefix_cache)
    exposition = Exposition(metrics.registry)

    @routes.get("/metrics")
    async def scrape(request: Request) -> Response:
        return await exposition.response(request)

    return routes


def readiness(registry: NodeRegistry, is_draining: bool) -> str:
    if is_draining:
        return "draining"
    return "ready" if registry.usable(NodeRole.DECODE) else "no decode node"
