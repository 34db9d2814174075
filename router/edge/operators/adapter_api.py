"""Loads and unloads adapters on all nodes, as operators ask: with vLLM's paths and fields.

POST /v1/load_lora_adapter      {"lora_name", "lora_path"; "load_inplace", "base_model_name"}
POST /v1/unload_lora_adapter    {"lora_name"; "base_model_name"}
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from edge.http.bodies.adapter_bodies import LoadBody, UnloadBody, read_adapter_body
from router.errors import AdminOnly
from router.nodes.adapters.adapters import ClusterAdapters


def adapter_routes(
    adapters: ClusterAdapters,
    may_change: Callable[[], bool] = lambda: True,
) -> APIRouter:
    """Returns the routes. Where `may_change` is false they refuse."""
    routes = APIRouter()

    @routes.post("/v1/load_lora_adapter")
    async def load(request: Request) -> JSONResponse:
        _check()
        body = await read_adapter_body(request, LoadBody)
        outcomes = await adapters.load(
            body.lora_name,
            body.lora_path,
            in_place=body.load_inplace,
            model=body.base_model_name,
        )
        return JSONResponse({"nodes": outcomes})

    @routes.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> JSONResponse:
        _check()
        body = await read_adapter_body(request, UnloadBody)
        outcomes = await adapters.unload(body.lora_name, model=body.base_model_name)
        return JSONResponse({"nodes": outcomes})

    def _check() -> None:
        if not may_change():
            raise AdminOnly("keys of clients do not change adapters; use the router's --admin-port")

    return routes
