"""The HTTP application of a decode node: routes, errors in the API's form, the edge around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from decode_node.http.adapter_routes import adapter_routes
from decode_node.http.admin_routes import admin_routes
from decode_node.http.callers import CallerCheck
from decode_node.http.middleware import EdgeMiddleware
from decode_node.http.openapi import openapi_document
from decode_node.http.profile_routes import profile_routes
from decode_node.http.routes import Api, client_routes
from decode_node.http.tokenizer_routes import tokenizer_routes
from edge.http.error_forms import ErrorForms
from edge.http.errors import BadRequest, HttpError, bug
from edge.http.outer_edge import OuterEdge
from edge.http.service_routes import service_routes
from edge.http.unknown_path import serve, unknown_path
from edge.logs.request_log import RequestLog


def create_app(api: Api, callers: CallerCheck, num_open: Callable[[], int]) -> ASGIApp:
    """Returns the application. It needs no lifespan: the maker of `api` also starts and stops what
    is in it. `num_open` counts requests that are being answered."""
    app = Starlette()
    serve(app, _client_routes(api, num_open))
    serve(app, _operator_routes(api), is_named=False)
    app.add_exception_handler(HttpError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    edge = ErrorForms(EdgeMiddleware(app, callers, api.state.open))
    return OuterEdge(
        edge,
        lambda: api.state.draining,
        api.settings.http_front(),
        api.settings.sampler(),
        RequestLog(is_on=api.settings.log_requests),
    )


def node_routes(api: Api, num_open: Callable[[], int]) -> list[BaseRoute]:
    """Returns the routes of all that a node serves. The docstrings of what they call say what it
    is, in docs/api.md too."""
    return [*_client_routes(api, num_open), *_operator_routes(api)]


def _client_routes(api: Api, num_open: Callable[[], int]) -> list[BaseRoute]:
    own = client_routes(api) + tokenizer_routes(api)
    return [*own, *_service_routes(api, num_open)]


def _operator_routes(api: Api) -> list[BaseRoute]:
    metrics = api.metrics.registry if api.settings.metrics_port is None else None
    return [
        *admin_routes(api.reset_prefix_cache, api.state.answers.abort, metrics),
        *profile_routes(api.profiles),
        *adapter_routes(api.adapters),
    ]


def _service_routes(api: Api, num_open: Callable[[], int]) -> list[Route]:
    async def health() -> Response:
        api.state.check_alive()
        return Response()

    async def document() -> dict[str, Any]:
        return await asyncio.to_thread(openapi_document)

    front = api.settings.http_front()
    return service_routes(health, num_open, document, front.root_path)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return Response(
        error.body(),
        status_code=error.status,
        headers=error.headers(),
        media_type="application/json",
    )


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answers what the framework raises: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    if error.status_code in (404, 405):
        known = unknown_path(request)
    else:
        known = BadRequest(str(error.detail))
    return await _on_api_error(request, known)


async def _on_bug(request: Request, _error: Exception) -> Response:
    """Answers for a bug in the API's form; `EdgeMiddleware` logs the error, which goes on to it."""
    return await _on_api_error(request, bug())
