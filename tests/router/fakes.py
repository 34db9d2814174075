"""Nodes with real gRPC and HTTP servers and no engine, whose every move a test decides."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar, Self

import grpc
from aiohttp import web

from router.request.proxied_path import PROXIED_PATHS
from tandem_pb.node_pb2 import (
    NODE_ROLE_DECODE,
    NODE_ROLE_PREFILL,
    AbortAnswersAnswer,
    AbortAnswersRequest,
    AbortCall,
    Adapter,
    AdapterCall,
    LoadAdapterRequest,
    NodeLoad,
    ResetPrefixCacheAnswer,
    ResetPrefixCacheRequest,
    SetDrainedAnswer,
    SetDrainedRequest,
    SwitchRoleAnswer,
    SwitchRoleRequest,
    UnloadAdapterRequest,
    WatchRequest,
)
from tandem_pb.node_pb2_grpc import NodeStatusServicer, add_NodeStatusServicer_to_server

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MODEL = "demo"
FINGERPRINT = "f1"


class StatusService(NodeStatusServicer):
    """Sends the current load at once, then whenever a test changes it, and every `interval_s`."""

    def __init__(self, role: int, node_id: str) -> None:
        self.load = NodeLoad(
            node_id=node_id,
            role=role,
            epoch=random.getrandbits(64),
            host_name=f"host-of-{node_id}",
            model_name=MODEL,
            fingerprint=FINGERPRINT,
            num_free_blocks=1000,
            num_total_blocks=1000,
        )
        self.interval_s = 0.05
        self.silent = False
        self.num_watchers = 0
        self.watched: list[WatchRequest] = []
        self.num_resets = 0
        self.aborts: list[AbortAnswersRequest] = []
        self.may_act = asyncio.Event()
        self.may_act.set()
        self.num_calls = 0
        """Counts what operators have asked for, as soon as it is here."""
        self.adapter_calls: list[str] = []
        self.load_limits_s: list[float] = []
        """Seconds that the callers of `LoadAdapter` wait."""
        self.adapter_fault = ""
        """Says why the node loads no adapter."""
        self.role_wishes: list[SwitchRoleRequest] = []
        self.role_fault = ""
        """Says why the node does not change its role."""
        self._changed = asyncio.Event()
        """Set at the next change; each change has its own."""

    async def Watch(
        self, request: WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[NodeLoad]:
        self.num_watchers += 1
        self.watched.append(request)
        adapters: list[Adapter] | None = None
        try:
            while True:
                changed = self._changed
                if not self.silent:
                    self.load.sequence += 1
                    told = list(self.load.adapters)  # They may change while it is sent.
                    yield self._without(adapters)
                    if request.keeps_adapters and request.takes_adapter_changes:
                        adapters = told
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.interval_s):
                        await changed.wait()
        finally:
            self.num_watchers -= 1

    async def ResetPrefixCache(
        self, request: ResetPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> ResetPrefixCacheAnswer:
        self.num_calls += 1
        await self.may_act.wait()
        self.num_resets += 1
        self.reset_within_s = request.within_s
        return ResetPrefixCacheAnswer(is_reset=not self.load.num_running_requests)

    async def AbortAnswers(
        self, request: AbortAnswersRequest, context: grpc.aio.ServicerContext
    ) -> AbortAnswersAnswer:
        self.num_calls += 1
        await self.may_act.wait()
        self.aborts.append(request)
        if request.call:
            told = AbortCall(call=request.call, names=request.names, all=request.all)
            self.load.abort_calls.append(told)
            await self.change()
        return AbortAnswersAnswer(num_aborted=1)

    async def LoadAdapter(
        self, request: LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> Adapter:
        self.num_calls += 1
        await self.may_act.wait()
        self.adapter_calls.append(f"load {request.name}")
        self.load_limits_s.append(context.time_remaining() or 0.0)
        if self.adapter_fault:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.adapter_fault)
        served = {one.name: one.digest for one in self.load.adapters}
        self._follow(AdapterCall(
            name=request.name, digest=request.path, path=request.path, version=request.version,
            model=request.model,
        ))  # fmt: skip
        await self.serve_adapters(served | {request.name: request.path})
        return Adapter(name=request.name, digest=request.path)

    async def UnloadAdapter(
        self, request: UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> Adapter:
        self.adapter_calls.append(f"unload {request.name}")
        self._follow(AdapterCall(name=request.name, version=request.version, model=request.model))
        left = [one for one in self.load.adapters if one.name != request.name]
        if len(left) == len(self.load.adapters):
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is none")
        await self.serve_adapters({one.name: one.digest for one in left})
        return Adapter(name=request.name)

    async def SwitchRole(
        self, request: SwitchRoleRequest, context: grpc.aio.ServicerContext
    ) -> SwitchRoleAnswer:
        self.role_wishes.append(request)
        if self.role_fault:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.role_fault)
        return SwitchRoleAnswer(node_id=self.load.node_id, epoch=self.load.epoch)

    async def SetDrained(
        self, request: SetDrainedRequest, context: grpc.aio.ServicerContext
    ) -> SetDrainedAnswer:
        self.num_calls += 1
        await self.may_act.wait()
        load = self.load
        if load.draining and not load.drained:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this node stops")
        changed = load.drained is not request.drained
        await self.change(draining=request.drained, drained=request.drained)
        load.sequence += 1
        return SetDrainedAnswer(load=load, changed=changed)

    def _without(self, known: list[Adapter] | None) -> NodeLoad:
        """Returns the load for one who has these adapters of the last report."""
        if known is None:
            return self.load
        load = NodeLoad()
        load.CopyFrom(self.load)
        del load.adapters[:]
        load.has_same_adapters = True
        before = {one.name: one.digest for one in known}
        now = {one.name: one.digest for one in self.load.adapters}
        load.adapter_changes.extend(
            Adapter(name=name, digest=now.get(name, ""))
            for name in before | now
            if before.get(name) != now.get(name)
        )
        return load

    def _follow(self, call: AdapterCall) -> None:
        """Reports from now on that this was the newest call about its name."""
        others = [one for one in self.load.adapter_calls if one.name != call.name]
        del self.load.adapter_calls[:]
        self.load.adapter_calls.extend([*others, call])

    async def serve_adapters(self, digests: dict[str, str]) -> None:
        """Reports these adapters from now on: digest by name."""
        del self.load.adapters[:]
        self.load.adapters.extend(Adapter(name=n, digest=d) for n, d in digests.items())
        await self.change()

    async def change(self, **fields: Any) -> None:
        """Sets fields of the load and reports them now."""
        for name, value in fields.items():
            setattr(self.load, name, value)
        self._changed.set()
        self._changed = asyncio.Event()


class FakeNode:
    """`status_port` is the gRPC port. `stop` is sudden, like a process that dies; its ports stay
    its own, so that it can come back."""

    role: int
    host = "127.0.0.1"

    def __init__(self, node_id: str) -> None:
        self.status = StatusService(self.role, node_id)
        self.status_port = 0
        self._server: grpc.aio.Server | None = None
        self._held: dict[int, socket.socket] = {}

    async def start(self) -> Self:
        self._server = grpc.aio.server()
        add_NodeStatusServicer_to_server(self.status, self._server)
        self.status_port = self._listen_status(self._server)
        await self._server.start()
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None
            await self._hold(self.status_port)

    async def _hold(self, port: int) -> None:
        """Takes a port when nobody listens there any more: nobody else is given it, and this node
        can listen there again."""
        if port in self._held or self.host != FakeNode.host:
            return
        holder = self._held[port] = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        async with asyncio.timeout(30):
            while holder.getsockname()[1] != port:
                with contextlib.suppress(OSError):
                    holder.bind((self.host, port))
                await asyncio.sleep(0)

    def _listen_status(self, server: grpc.aio.Server) -> int:
        port: int = server.add_insecure_port(f"{self.host}:{self.status_port}")
        return port

    async def restart(self) -> None:
        """Restarts at the same addresses with another epoch, and knows nothing of adapters."""
        await self.stop()
        del self.status.load.adapters[:], self.status.load.adapter_calls[:]
        self.status.load.epoch = random.getrandbits(64)
        self.status.load.sequence = 0
        self.status.load.draining = self.status.load.drained = False
        await self.start()


class FakePrefillNode(FakeNode):
    role = NODE_ROLE_PREFILL

    @property
    def entry(self) -> str:
        return f"{self.host}:{self.status_port}"

    @property
    def target(self) -> str:
        return self.entry


class FakeDecodeNode(FakeNode):
    """Answers completions by `handler`; `requests` holds (headers, body) of all that arrived."""

    role = NODE_ROLE_DECODE
    document: ClassVar[dict[str, Any]] = {"openapi": "3.1.0", "paths": {"/fake": {"get": {}}}}

    def __init__(self, node_id: str, handler: Handler | None = None) -> None:
        super().__init__(node_id)
        self.handler = handler or stream_tokens(3)
        self.port = 0
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.tokenizer: dict[str, Any] | None = None
        self.num_open = 0
        self.num_aborted = 0
        self._runner: web.AppRunner | None = None

    @property
    def entry(self) -> str:
        return f"{self.host}:{self.port}/{self.status_port}"

    @property
    def target(self) -> str:
        return f"{self.host}:{self.port}"

    async def start(self) -> Self:
        await super().start()
        app = web.Application(client_max_size=64 << 20)
        for path in PROXIED_PATHS:
            app.router.add_post(path, self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/openapi.json", self._openapi)
        app.router.add_get("/tokenizer_info", self._tokenizer_info)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await self._site(self._runner).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        await self.stop_http()
        await super().stop()

    async def stop_http(self) -> None:
        """Shuts the node's door: from now on connections to the HTTP port are refused; open ones
        are cut."""
        if self._runner is not None:
            for connection in list(self._runner.server.connections if self._runner.server else ()):
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
            self._runner = None
            await self._hold(self.port)

    def _site(self, runner: web.AppRunner) -> web.BaseSite:
        return web.TCPSite(runner, self.host, self.port, reuse_address=True, backlog=2048)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.num_open += 1
        try:
            self.requests.append(
                ({k.lower(): v for k, v in request.headers.items()}, await request.read())
            )
            return await self.handler(request)
        except (asyncio.CancelledError, ConnectionError):
            self.num_aborted += 1
            raise
        finally:
            self.num_open -= 1

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.json_response(self.document)

    async def _tokenizer_info(self, request: web.Request) -> web.Response:
        if self.tokenizer is None:
            raise web.HTTPNotFound
        return web.json_response(self.tokenizer)

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self.status.load.model_name, "object": "model", "owned_by": "tandem"}
        return web.json_response({"object": "list", "data": [card]})


def event(index: int, text: str = "") -> bytes:
    data = {"id": "cmpl-1", "choices": [{"index": 0, "text": text or f"t{index} "}]}
    return f"data: {json.dumps(data)}\n\n".encode()


async def open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


def stream_tokens(count: int, gap_s: float = 0.0) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        for index in range(count):
            await response.write(event(index))
            await asyncio.sleep(gap_s)
        await response.write(b"data: [DONE]\n\n")
        return response

    return handler


def stream_forever(gap_s: float = 0.01) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        for index in itertools.count():
            await response.write(event(index))
            await asyncio.sleep(gap_s)
        return response

    return handler


def answer_json(status: int, body: object, headers: dict[str, str] | None = None) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)

    return handler


def break_after(*chunks: bytes, stream: bool = True) -> Handler:
    """Sends `chunks` and then dies. With no chunks: after the request, before any answer."""

    async def handler(request: web.Request) -> web.StreamResponse:
        if not chunks:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        kind = "text/event-stream" if stream else "application/json"
        response = web.StreamResponse(headers={"content-type": kind})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    return handler


def never_answer() -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        return web.Response()

    return handler
