"""Answers what every HTTP service of ours is asked about itself, by vLLM's names and shapes.

    GET       /version       {"version": "0.2.0"}
    GET, POST /ping          as /health, for platforms that ask so
    GET       /load          {"server_load": 3}: requests that are being answered
    GET       /openapi.json  the API, for programs
    GET       /docs          the same for people: a page without scripts and with nothing to load

All but /ping are for those who may use the API.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from edge.http.api_page import PAGE_HEADERS, render_api
from edge.installed_version import installed_version

Document = dict[str, Any]


def service_routes(
    health: Callable[[], Awaitable[Response]],
    num_open: Callable[[], int],
    document: Callable[[], Awaitable[Document]],
    root_path: str = "",
) -> list[Route]:
    """Returns the routes. `document` is OpenAPI's; `root_path` is where clients find it."""

    async def version(_: Request) -> Response:
        """Tells the release."""
        return _json({"version": installed_version()})

    async def ping(_: Request) -> Response:
        """Answers as /health, for platforms that ask so."""
        return await health()

    async def load(_: Request) -> Response:
        """Tells how many requests are being answered."""
        return _json({"server_load": num_open()})

    async def openapi(_: Request) -> Response:
        """Describes the API to programs."""
        return _json({**await document(), "servers": [{"url": root_path or "/"}]})

    async def docs(_: Request) -> Response:
        """Describes the API to people."""
        return HTMLResponse(render_api(await document()), headers=PAGE_HEADERS)

    return [
        Route("/version", version),
        Route("/ping", ping, methods=["GET", "POST"]),
        Route("/load", load),
        Route("/openapi.json", openapi),
        Route("/docs", docs),
    ]


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
