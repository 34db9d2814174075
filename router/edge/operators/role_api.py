"""Lets an operator change the role of a node.

POST /switch_role    {"node", "role": "prefill" or "decode"; "drain_timeout_s"}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from edge.http.bodies.small_body import read_small_body
from router.errors import AdminOnly
from router.nodes.address import NodeRole
from router.nodes.operations.role_changes import RoleChanges


class SwitchBody(msgspec.Struct):
    """Asks for a change. `node`: its address or id, as /status has them. `drain_timeout_s`: seconds
    for what it has begun, which goes on elsewhere then; 0: as long as the node's settings allow."""

    node: str
    role: Literal["prefill", "decode"]
    drain_timeout_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0


def role_routes(changes: RoleChanges, may_change: Callable[[], bool] = lambda: True) -> APIRouter:
    """Returns the route. Where `may_change` is false it refuses."""
    routes = APIRouter()

    @routes.post("/switch_role")
    async def switch(request: Request) -> JSONResponse:
        if not may_change():
            raise AdminOnly("keys of clients do not change roles; use the router's --admin-port")
        body = await read_small_body(request, SwitchBody)
        role = NodeRole(body.role)
        node = await changes.change(body.node, role, body.drain_timeout_s)
        was = node.address
        answer = {"node": str(was), "was": was.role, "role": role, "state": "draining"}
        return JSONResponse(answer, status_code=202)

    return routes
