"""Lists the nodes for operators, and takes them out of use and back.

GET  /admin/nodes                what this router knows of each
POST /admin/nodes/{id}/drain     no new requests; idempotent
POST /admin/nodes/{id}/resume    in use again; idempotent

`{id}` is the node's id or its address, as the list has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from router.errors import AdminOnly
from router.nodes.node import Node
from router.nodes.operations.drains import NodeDrains
from router.nodes.registry import NodeRegistry


def node_routes(drains: NodeDrains, may_change: Callable[[], bool] = lambda: True) -> APIRouter:
    """Returns the routes. Where `may_change` is false they only tell."""
    routes = APIRouter()
    registry = drains.registry

    async def set_drained(node_id: str, is_drained: bool) -> JSONResponse:
        if not may_change():
            raise AdminOnly("keys of clients do not drain nodes; use the router's --admin-port")
        node, changed = await drains.set(node_id, is_drained)
        return JSONResponse({**_described(registry, node), "changed": changed})

    @routes.get("/admin/nodes")
    async def nodes() -> JSONResponse:
        ordered = sorted(registry.all_nodes(), key=lambda node: str(node.address))
        ordered.sort(key=lambda node: node.address.role)
        return JSONResponse({"nodes": [_described(registry, node) for node in ordered]})

    @routes.post("/admin/nodes/{node_id}/drain")
    async def drain(node_id: str) -> JSONResponse:
        return await set_drained(node_id, True)

    @routes.post("/admin/nodes/{node_id}/resume")
    async def resume(node_id: str) -> JSONResponse:
        return await set_drained(node_id, False)

    return routes


def _described(registry: NodeRegistry, node: Node) -> dict[str, Any]:
    """Returns what the list says of a node. `grpc`: where calls of operators reach it; `requests`:
    those that it has, of all routers."""
    report = node.report
    return {
        "id": report.node_id if report else "",
        "node": node.address.target,
        "grpc": node.address.status_target,
        "role": node.address.role,
        "state": registry.state(node),
        "model": node.model,
        "version": report.version if report else "",
        "requests": node.predicted_requests,
    }
