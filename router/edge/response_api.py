"""Serves what is kept of responses and conversations.

    GET    /v1/responses/{id}                       with `stream=true&starting_after=N`: its events
    DELETE /v1/responses/{id}
    POST   /v1/responses/{id}/cancel
    GET    /v1/responses/{id}/input_items
    POST   /v1/conversations
    GET, POST, DELETE /v1/conversations/{id}
    GET, POST         /v1/conversations/{id}/items
    GET, DELETE       /v1/conversations/{id}/items/{item}

A key sees what belongs to its tenant; all else is not found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from edge.http.connection.client_connection import (
    BodyLimits,
    ClientDisconnected,
    lease_of,
    read_json_body,
    request_headers,
)
from edge.http.errors import BadRequest
from router.edge.list_order import is_ascending
from router.request.tenants import Tenant
from router.responses.background.event_feed import run_events, stored_events
from router.responses.conversation_calls import ConversationCalls
from router.responses.response_calls import ResponseCalls
from router.responses.stateful_endpoint import send_events
from router.store.items import Page

_JSON = "application/json"
_MAX_LIMIT, _DEFAULT_LIMIT = 100, 20
_MAX_DIGITS = 9
_FLAGS = {"true": True, "1": True, "false": False, "0": False}

Call = Callable[..., Awaitable[bytes]]
"""Is given the tenant, the ids of the path in order, and what the route reads besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRoutes:
    """Makes the routes."""

    responses: ResponseCalls
    conversations: ConversationCalls
    body_limits: BodyLimits
    keepalive_s: float

    def routes(self) -> list[BaseRoute]:
        response = "/v1/responses/{response_id}"
        every = "/v1/conversations"
        one = every + "/{conversation_id}"
        items = one + "/items"
        item = items + "/{item_id}"
        calls = self.conversations
        return [
            Route(response, RetrieveEndpoint(self), methods=["GET"]),
            self._route("DELETE", response, self.responses.delete),
            self._route("POST", response + "/cancel", self.responses.cancel),
            self._paged(response + "/input_items", self.responses.input_items),
            self._with_body(every, calls.create),
            self._route("GET", one, calls.retrieve),
            self._with_body(one, calls.update),
            self._route("DELETE", one, calls.delete),
            self._paged(items, calls.list_items),
            self._with_body(items, calls.add_items),
            self._route("GET", item, calls.retrieve_item),
            self._route("DELETE", item, calls.delete_item),
        ]

    def _route(
        self,
        method: str,
        path: str,
        call: Call,
        read: Callable[[Request], Awaitable[tuple[object, ...]]] | None = None,
    ) -> Route:
        async def endpoint(request: Request) -> Response:
            more = () if read is None else await read(request)
            answer = await call(_tenant(request), *request.path_params.values(), *more)
            return Response(answer, media_type=_JSON)

        return Route(path, endpoint, methods=[method])

    def _paged(self, path: str, call: Call) -> Route:
        async def read(request: Request) -> tuple[object, ...]:
            return (_page(request),)

        return self._route("GET", path, call, read)

    def _with_body(self, path: str, call: Call) -> Route:
        async def read(request: Request) -> tuple[object, ...]:
            headers = request_headers(request.scope)
            # Clients send no body at all where they have nothing to say.
            if headers.get("content-length") == "0":
                return (b"",)
            with lease_of(request.scope, self.body_limits) as lease:
                return (await read_json_body(headers, request.receive, self.body_limits, lease),)

        return self._route("POST", path, call, read)


class RetrieveEndpoint:
    """Tells a response, or streams its events (ASGI)."""

    def __init__(self, made: ResponseRoutes) -> None:
        self._made = made

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        tenant, name = _tenant(request), str(scope["path_params"]["response_id"])
        calls = self._made.responses
        if not _flag(request, "stream"):
            body = await calls.retrieve(tenant, name)
            await Response(body, media_type=_JSON)(scope, receive, send)
            return
        first = _number(request, "starting_after", -1) + 1
        await calls.check_stream(tenant, name)
        run, keepalive_s = calls.runs.find(tenant, name), self._made.keepalive_s
        if run is not None:
            events = run_events(run, first, keepalive_s)
        else:
            events = stored_events(calls.kept, tenant, name, first, keepalive_s)
        with contextlib.suppress(ClientDisconnected):
            await send_events(events, receive, send)


def _tenant(request: Request) -> str:
    tenant: Tenant = request.scope["state"]["tenant"]
    return tenant.name


def _page(request: Request) -> Page:
    """Returns the part of a list that is asked for. Raises `BadRequest`."""
    limit = _number(request, "limit", _DEFAULT_LIMIT)
    if not 1 <= limit <= _MAX_LIMIT:
        raise BadRequest(f"limit must be 1 to {_MAX_LIMIT}", param="limit")
    after = request.query_params.get("after", "")
    return Page(limit=limit, is_ascending=is_ascending(request), after=after)


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise BadRequest(f"{name} must be a number", param=name, code="invalid_type")
    return int(text)


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false").lower()
    if text not in _FLAGS:
        raise BadRequest(f"{name} must be true or false", param=name, code="invalid_type")
    return _FLAGS[text]
