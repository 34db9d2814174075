"""Judges every call to a gRPC server before its handler learns of it."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import Any, TypeAlias

import grpc
import grpc.aio

from edge.security.config import Role
from edge.security.credentials import CallerRefused, Credentials

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
OPEN_SERVICES = frozenset({"grpc.health.v1.Health"})
"""Services for every caller that gets a connection: they tell nothing that a probe must not
know."""
_NAMES = "x509_subject_alternative_name"


class CallGuard(grpc.aio.ServerInterceptor):
    """Judges every call. `callers` say by name of the service who may call it. One that is not
    there is for no certificate at all. Methods must take one request."""

    def __init__(self, credentials: Credentials, callers: Mapping[str, Collection[Role]]) -> None:
        self._credentials = credentials
        self._callers = callers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        handler = await continuation(handler_call_details)
        service = handler_call_details.method.split("/")[1]
        is_open = service in OPEN_SERVICES or not self._credentials.config.is_secured
        if handler is None or is_open:
            return handler
        return self._guarded(handler, self._callers.get(service, ()))

    def _guarded(self, handler: _Handler, allowed: Collection[Role]) -> _Handler:
        if handler.response_streaming:
            make: Any = grpc.unary_stream_rpc_method_handler
            behavior: Any = self._guarded_stream(handler.unary_stream, allowed)
        else:
            make = grpc.unary_unary_rpc_method_handler
            behavior = self._guarded_call(handler.unary_unary, allowed)
        guarded: _Handler = make(
            behavior, handler.request_deserializer, handler.response_serializer
        )
        return guarded

    def _guarded_call(self, behavior: Any, allowed: Collection[Role]) -> Any:
        async def call(request: Any, context: _Context) -> Any:
            await self._check(context, allowed)
            return await behavior(request, context)

        return call

    def _guarded_stream(self, behavior: Any, allowed: Collection[Role]) -> Any:
        async def writes(request: Any, context: _Context) -> None:
            await self._check(context, allowed)
            await behavior(request, context)

        async def yields(request: Any, context: _Context) -> AsyncIterator[Any]:
            await self._check(context, allowed)
            async for answer in behavior(request, context):
                yield answer

        return yields if inspect.isasyncgenfunction(behavior) else writes

    async def _check(self, context: _Context, allowed: Collection[Role]) -> None:
        names = [bytes(name).decode("latin-1") for name in context.auth_context().get(_NAMES, ())]
        headers = {key: str(value) for key, value in context.invocation_metadata() or ()}
        try:
            self._credentials.check_caller(allowed, names, headers)
        except CallerRefused as error:
            await context.abort(error.code, str(error))
