"""Lets an operator end answers early, as trainers do before they put in new weights.

POST /abort_request     {"rid"} or {"abort_all": true}, as SGLang has it
POST /abort_requests    {"request_ids"}; empty: all, as vLLM has it
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from edge.http.bodies.abort_bodies import ReadAbort, read_abort, read_aborts
from router.errors import AdminOnly
from router.nodes.operations.aborts import Aborts
from router.nodes.operations.each_node import FAILED


def abort_routes(aborts: Aborts, may_change: Callable[[], bool] = lambda: True) -> APIRouter:
    """Returns the routes. Where `may_change` is false they refuse."""
    routes = APIRouter()

    @routes.post("/abort_request")
    async def abort_one(request: Request) -> JSONResponse:
        return await end_answers(request, read_abort)

    @routes.post("/abort_requests")
    async def abort_several(request: Request) -> JSONResponse:
        return await end_answers(request, read_aborts)

    async def end_answers(request: Request, read: ReadAbort) -> JSONResponse:
        if not may_change():
            raise AdminOnly("keys of clients do not end answers; use the router's --admin-port")
        num_waiting, outcomes = await aborts.abort(await read(request))
        has_failed = any(outcome.startswith(FAILED) for outcome in outcomes.values())
        return JSONResponse(
            {"nodes": outcomes, "router": f"aborted {num_waiting}"},
            status_code=503 if has_failed else 200,
        )

    return routes
