"""Answers POST /v1/responses where responses are kept (ASGI), with the API behind it.

A request that refers to nothing and is not to be kept passes as it is, byte for byte. Others go to
a node with all items that they refer to. In the background the answer to the client is the response
as it is queued, or its events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge.http import headers as names
from edge.http.answers.heartbeats import STREAM_HEADERS, send_start
from edge.http.connection.answer_transport import WRITE_DIRECTLY
from edge.http.connection.client_connection import (
    BodyLimits,
    ClientDisconnected,
    ClientGuard,
    lease_of,
    read_json_body,
    request_headers,
)
from edge.http.errors import HttpError, send_error
from edge.http.event_loop import long_work
from router.models.open_request_limit import OpenRequestLimit
from router.request.tenants import Tenant
from router.responses.background.background_runs import BackgroundRuns
from router.responses.background.event_feed import run_events
from router.responses.bodies.response_bodies import whole
from router.responses.bodies.state_fields import StateFields, read_state
from router.responses.bodies.turn import Turn
from router.responses.body_check import check_body
from router.responses.kept_answer import KeptAnswer
from router.responses.kept_responses import KeptResponses

RESPONSES = "/v1/responses"
_KEPT_HEADERS = (names.SESSION, *names.AGENT_SESSIONS, names.PRIORITY)
_JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatefulEndpoint:
    """Is in front of `api`, which has requests answered. `refused` is called with path,
    tenant and status of those that are refused before."""

    api: ASGIApp
    kept: KeptResponses
    runs: BackgroundRuns
    room: OpenRequestLimit
    refused: Callable[[str, str, int], None]
    body_limits: BodyLimits
    keepalive_s: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant: Tenant = scope["state"]["tenant"]
        try:
            with self.room.track():
                self.room.check()
                headers = request_headers(scope)
                with lease_of(scope, self.body_limits) as lease:
                    body = await read_json_body(headers, receive, self.body_limits, lease)
                    is_long = len(body) > long_work.LONG_BODY
                    state = await long_work.run(is_long, partial(read_state, body))
                turn = None
                if state is not None and not state.is_stateless:
                    turn = await self.kept.prepare(tenant.name, self._asked(scope, state))
            if turn is None:
                await self.api(scope, _again(body, receive), send)
            elif turn.state.background:
                await self._in_background(turn, scope, receive, send)
            else:
                await self._at_once(turn, scope, receive, send)
        except HttpError as error:
            self.refused(scope["path"], tenant.name, int(error.status))
            await send_error(send, error, scope["state"]["request_id"])
        except ClientDisconnected:
            pass

    def _asked(self, scope: Scope, state: StateFields) -> StateFields:
        """Returns what a request wants to be kept: of a count or a summary nothing."""
        if scope["path"] == RESPONSES:
            return state
        return StateFields(
            fields=state.fields,
            store=False,
            previous=state.previous,
            conversation=state.conversation,
        )

    async def _at_once(self, turn: Turn, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = turn.node_body(self.kept.limits.max_body_bytes)
            if scope["path"] == RESPONSES:
                scope["state"]["kept"] = turn.kept_header().header()
            if turn.state.keeps:
                send = answer = KeptAnswer(send, partial(self.kept.keep, turn))
                if write := scope["state"].get(WRITE_DIRECTLY):
                    scope["state"][WRITE_DIRECTLY] = answer.directly(write)
            await self.api(scope, _again(body, receive), send)
        finally:
            await self.kept.drop(turn)

    async def _in_background(self, turn: Turn, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.runs.check_room()
            body = turn.node_body(self.kept.limits.max_body_bytes)
            headers = request_headers(scope)
            headers = {name: headers[name] for name in _KEPT_HEADERS if name in headers}
            tenant: Tenant = scope["state"]["tenant"]
            await check_body(self.api, body, headers, tenant)
            run = await self.runs.start(turn, tenant, headers)
        except BaseException:
            await self.kept.drop(turn)
            raise
        if turn.state.is_stream:
            await send_events(run_events(run, 0, self.keepalive_s), receive, send)
            return
        await send_start(send, 200, _JSON)
        await send({"type": "http.response.body", "body": whole(run.row.body, [])})


async def send_events(events: AsyncIterator[bytes], receive: Receive, send: Send) -> None:
    """Answers with a stream of events, until they end or the client leaves. Raises
    `ClientDisconnected`."""
    await send_start(send, 200, STREAM_HEADERS)
    async with ClientGuard(receive):
        async for data in events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _again(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that begins with a body that was read."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return pending.pop() if pending else await receive()

    return receive_again
