"""Serves files and batches.

    POST   /v1/files                    a form: purpose=batch, file
    GET    /v1/files                    with after, limit, order, purpose
    GET, DELETE /v1/files/{id}
    GET    /v1/files/{id}/content
    POST   /v1/batches
    GET    /v1/batches                  with after, limit
    GET    /v1/batches/{id}
    POST   /v1/batches/{id}/cancel

A key sees what belongs to its tenant; all else is not found.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from edge.http.connection.client_connection import (
    BodyLimits,
    ClientDisconnected,
    lease_of,
    read_json_body,
    request_headers,
)
from edge.http.errors import BadRequest
from router.batches.batch_calls import BatchCalls
from router.batches.files.file_calls import FileCalls
from router.batches.files.upload import Sender
from router.edge.list_order import is_ascending
from router.request.tenants import Tenant
from router.store.files import ListQuery

_JSON = "application/json"
_MAX_FILES, _MAX_BATCHES, _DEFAULT_BATCHES = 10_000, 100, 20
_MAX_DIGITS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRoutes:
    """Makes the routes."""

    files: FileCalls
    batches: BatchCalls
    body_limits: BodyLimits

    def routes(self) -> list[BaseRoute]:
        file, batch = "/v1/files/{file_id}", "/v1/batches/{batch_id}"
        return [
            Route("/v1/files", self._upload, methods=["POST"]),
            Route("/v1/files", self._list_files, methods=["GET"]),
            _route("GET", file, self.files.retrieve),
            _route("DELETE", file, self.files.delete),
            Route(f"{file}/content", self._content, methods=["GET"]),
            Route("/v1/batches", self._create, methods=["POST"]),
            Route("/v1/batches", self._list_batches, methods=["GET"]),
            _route("GET", batch, self.batches.retrieve),
            _route("POST", f"{batch}/cancel", self.batches.cancel),
        ]

    async def _upload(self, request: Request) -> Response:
        headers = request_headers(request.scope)
        try:
            body = await self.files.create(_tenant(request), headers, self._sender(request))
        except ClientDisconnected:
            return Response(status_code=499)
        return Response(body, media_type=_JSON)

    def _sender(self, request: Request) -> Sender:
        limits = self.body_limits
        lease = partial(lease_of, request.scope, limits)
        return Sender(receive=request.receive, lease=lease, part_timeout_s=limits.timeout_s)

    async def _list_files(self, request: Request) -> Response:
        page = _page(request, _MAX_FILES, _MAX_FILES)
        return Response(await self.files.list_all(_tenant(request), page), media_type=_JSON)

    async def _content(self, request: Request) -> Response:
        name = request.path_params["file_id"]
        size, content = await self.files.content(_tenant(request), name)
        headers = {"content-length": str(size)}
        return StreamingResponse(content, media_type="application/jsonl", headers=headers)

    async def _create(self, request: Request) -> Response:
        headers = request_headers(request.scope)
        with lease_of(request.scope, self.body_limits) as lease:
            body = await read_json_body(headers, request.receive, self.body_limits, lease)
        return Response(await self.batches.create(_tenant(request), body), media_type=_JSON)

    async def _list_batches(self, request: Request) -> Response:
        page = _page(request, _DEFAULT_BATCHES, _MAX_BATCHES)
        return Response(await self.batches.list_all(_tenant(request), page), media_type=_JSON)


def _route(method: str, path: str, call: Callable[[str, str], Awaitable[bytes]]) -> Route:
    async def endpoint(request: Request) -> Response:
        [name] = request.path_params.values()
        return Response(await call(_tenant(request), name), media_type=_JSON)

    return Route(path, endpoint, methods=[method])


def _tenant(request: Request) -> str:
    tenant: Tenant = request.scope["state"]["tenant"]
    return tenant.name


def _page(request: Request, default: int, most: int) -> ListQuery:
    """Returns the part of a list that is asked for. Raises `BadRequest`."""
    text = request.query_params.get("limit", str(default))
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    if not is_number or not 1 <= int(text) <= most:
        raise BadRequest(f"limit must be 1 to {most}", param="limit")
    return ListQuery(
        limit=int(text),
        is_ascending=is_ascending(request),
        after=request.query_params.get("after", ""),
        purpose=request.query_params.get("purpose", ""),
    )
