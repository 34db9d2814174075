"""A server whose time is over tells clients that it stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from edge.http.connection.guarded_protocol import ConnectionLimits, guarded_protocol
from edge.http.outer_edge import OuterEdge
from edge.http.tls_http import TlsConfig
from engine.node.http_server import HttpServer, listen

TIMEOUT_S = 20.0


@asynccontextmanager
async def stopping(begins: bytes) -> AsyncIterator[httpx.AsyncClient]:
    """A server that sends a head with this type, if it is one, and no more. It stops as soon as it
    was asked."""
    asked = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if begins:
            head = {"type": "http.response.start", "status": 200}
            await send({**head, "headers": [(b"content-type", begins)]})
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        asked.set()
        await asyncio.Event().wait()

    config = TlsConfig(
        OuterEdge(app, lambda: True),
        None,
        http=guarded_protocol(ConnectionLimits()),
        lifespan="off",
        log_config=None,
        ws="none",
        timeout_graceful_shutdown=0,
    )
    listener = listen("127.0.0.1", 0)
    server = HttpServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def stop() -> None:
        await asked.wait()
        server.should_exit = True

    async with httpx.AsyncClient(base_url=url) as client, asyncio.timeout(TIMEOUT_S):
        stops = asyncio.create_task(stop())
        yield client
        await asyncio.gather(stops, serving)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("begins", [b"", b"text/event-stream; charset=utf-8"])
async def test_what_is_cut_off_is_told_in_the_form_of_its_api(
    path: str, begins: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with stopping(begins) as client:
        answer = await client.post(path)
    is_messages = path == "/v1/messages"
    if begins:
        first, last = answer.text.split("\n\n", 1)
        assert (answer.status_code, first) == (200, "data: 1")
        assert last.startswith("event: error\n" if is_messages else "data: ")
        error = json.loads(last.removeprefix("event: error\n").removeprefix("data: "))
    else:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert answer.headers["x-request-id"] and answer.headers["connection"] == "close"
        error = answer.json()
    assert error["error"]["type"] == ("overloaded_error" if is_messages else "service_unavailable")
    assert "stopping" in error["error"]["message"]
    assert not [one for one in caplog.records if one.exc_info], "no traceback"


@pytest.mark.parametrize(
    ("begins", "headers"),
    [(b"application/json", {}), (b"text/event-stream", {"x-tandem-journal": "1"})],
)
async def test_what_cannot_be_told_breaks_off(begins: bytes, headers: dict[str, str]) -> None:
    """A router that has asked for a journal goes on elsewhere."""
    async with stopping(begins) as client:
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked"):
            await client.post("/v1/completions", headers=headers)
