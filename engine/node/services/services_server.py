"""A node's gRPC services over the HTTP/2 server of the data plane, in place of grpcio's.

    1. `ServicesServer(...)`: generated `add_..._to_server` functions give it services
    2. `start(listener)`: serves
    3. `stop`

grpcio's server keeps what strangers send: headers without an end and bombs in them raise its memory
by gigabytes before any code of ours is asked who is calling, and no option of it bounds that.
Ours judges a call by its headers and keeps nothing of one that is refused. Clients are grpcio's as
before.

A servicer sees a context with the part of grpcio's interface that ours use.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from typing import Any, NoReturn, TypeAlias

import grpc

from edge.h2.out_message import OutMessage
from edge.h2.rpc_method import RpcMethod, ServerCall
from edge.h2.server import H2Server
from edge.security.call_guard import OPEN_SERVICES
from edge.security.config import Role
from edge.security.credentials import Credentials

_MAX_CALLS = 4096
"""Open calls of one connection. A decode node makes all its calls to a prefill node on one."""
_SEND_THREADS = 1
_PING_AFTER_S = 5.0
_GIVE_UP_AFTER_S = 10.0
"""A caller that is silent for this long is gone: what it asked for is called off."""

Handlers: TypeAlias = "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"


class CallContext:
    """The part of a call that the servicer that answers it may use."""

    def __init__(self, call: ServerCall, serialize: Callable[[Any], bytes]) -> None:
        self._call = call
        self._serialize = serialize
        self._callbacks: list[Callable[[CallContext], None]] = []

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns what the caller sent, without the fields that belong to HTTP/2."""
        return tuple((name, value) for name, value in self._call.headers.items() if name[:1] != ":")

    def add_done_callback(self, callback: Callable[[CallContext], None]) -> None:
        """Calls `callback` when the call has ended, however it did."""
        self._callbacks.append(callback)

    async def write(self, answer: Any) -> None:
        """Returns when another answer should follow."""
        await self._call.write(OutMessage([self._serialize(answer)]))

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """Ends the call with a status."""
        await self._call.abort(code, details)

    def over(self) -> None:
        for callback in self._callbacks:
            callback(self)


class ServicesServer:
    """Serves calls. `callers` say by name of the service who may call it; one that is not there is
    for no certificate at all."""

    def __init__(
        self,
        credentials: Credentials,
        callers: Mapping[str, Collection[Role]],
        max_request_bytes: int,
    ) -> None:
        self._credentials = credentials
        self._callers = callers
        self._max_request_bytes = max_request_bytes
        self._methods: dict[str, RpcMethod] = {}
        self._server: H2Server | None = None

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Does nothing: `add_registered_method_handlers` gets the same."""

    def add_registered_method_handlers(self, service: str, handlers: Handlers) -> None:
        """Adds the methods of a service. Each must take one request."""
        for name, handler in handlers.items():
            self._methods[f"/{service}/{name}"] = self._method(handler)

    async def start(self, listener: socket.socket) -> None:
        """Serves on a socket that listens."""
        self._server = H2Server(
            self._methods,
            self._judge,
            self._credentials.server_tls("grpc", h2=True),
            max_calls=_MAX_CALLS,
            max_send_threads=_SEND_THREADS,
            ping_after_s=_PING_AFTER_S,
            give_up_after_s=_GIVE_UP_AFTER_S,
        )
        self._server.serve(listener)

    async def stop(self) -> None:
        """Stops the server and cancels open calls. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    def _judge(
        self, names: Collection[str] | None, headers: Mapping[str, str], *, is_plaintext: bool
    ) -> None:
        """Checks who calls. Raises `CallerRefused`."""
        service = headers.get(":path", "").split("/")[1:2]
        name = service[0] if service else ""
        if name not in OPEN_SERVICES:
            self._credentials.check_caller(
                self._callers.get(name, ()), names, headers, is_plaintext=is_plaintext
            )

    def _method(self, handler: grpc.RpcMethodHandler[Any, Any]) -> RpcMethod:
        serialize = handler.response_serializer
        assert serialize is not None and handler.request_deserializer is not None
        if handler.response_streaming:
            handle, whole = _streaming(handler.unary_stream, serialize), None
        else:
            handle, whole = _unary(handler.unary_unary, serialize), serialize
        return RpcMethod(handle, handler.request_deserializer, whole, self._max_request_bytes)


def _unary(behavior: Any, serialize: Callable[[Any], bytes]) -> Any:
    async def handle(request: Any, call: ServerCall) -> Any:
        context = CallContext(call, serialize)
        try:
            return await behavior(request, context)
        finally:
            context.over()

    return handle


def _streaming(behavior: Any, serialize: Callable[[Any], bytes]) -> Any:
    async def handle(request: Any, call: ServerCall) -> None:
        context = CallContext(call, serialize)
        try:
            if inspect.isasyncgenfunction(behavior):
                answers: AsyncGenerator[Any, None] = behavior(request, context)
                async with aclosing(answers):
                    async for answer in answers:
                        await context.write(answer)
            else:
                await behavior(request, context)
        finally:
            context.over()

    return handle
