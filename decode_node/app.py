"""The HTTP application of a decode node: routes, errors in the API's form, the edge around it."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from decode_node.errors import MethodNotAllowed, NotFound
from decode_node.http.callers import CallerCheck
from decode_node.http.middleware import EdgeMiddleware
from decode_node.http.routes import Api, create_router
from decode_node.http.tokenizer_routes import create_tokenizer_router
from edge.http.closing_connections import ClosingConnections
from edge.http.errors import BadRequest, HttpError


def create_app(api: Api, callers: CallerCheck) -> ASGIApp:
    """Returns the application. It needs no lifespan: whoever makes `api` also starts and stops what
    is in it."""
    app = FastAPI(title="tandem", openapi_url=None, docs_url=None, redoc_url=None)
    app.include_router(create_router(api))
    app.include_router(create_tokenizer_router(api))
    app.add_exception_handler(HttpError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    edge = EdgeMiddleware(app, callers)
    return ClosingConnections(edge, is_draining=lambda: api.state.draining)


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
    method, path = request.method, request.url.path
    known: HttpError
    if error.status_code == 404:
        known = NotFound(f"there is no {method} {path} here")
    elif error.status_code == 405:
        known = MethodNotAllowed(f"{path} does not take {method}")
    else:
        known = BadRequest(str(error.detail))
    return await _on_api_error(request, known)
