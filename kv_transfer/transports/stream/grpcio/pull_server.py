"""The calls to a transfer process, carried by grpcio."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio

from edge.h2.out_message import OutMessage
from edge.h2.rpc_method import RpcMethod, ServerCall
from edge.security.call_guard import CallGuard
from edge.security.config import Role
from edge.security.credentials import Credentials
from kv_transfer.wire.channels import SERVER_OPTIONS
from kv_transfer.wire.pull_server import PullServer
from kv_transfer.wire.service_paths import SERVICE


class GrpcPullServer(PullServer):
    """grpcio's."""

    def __init__(
        self,
        methods: Mapping[str, RpcMethod],
        credentials: Credentials,
        callers: Collection[Role],
    ) -> None:
        self._credentials = credentials
        self._server = grpc.aio.server(
            options=SERVER_OPTIONS, interceptors=[CallGuard(credentials, {SERVICE: callers})]
        )
        handlers = {path.rpartition("/")[2]: _handler(method) for path, method in methods.items()}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )

    async def listen(self, host: str, port: int) -> int:
        try:
            bound = self._credentials.add_port(self._server, host, port)
        except RuntimeError as error:
            raise OSError(str(error)) from error
        await self._server.start()
        return bound

    async def close(self) -> None:
        await self._server.stop(0)


class _GrpcCall(ServerCall):
    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context

    async def write(self, message: OutMessage) -> None:
        try:
            await self._context.write(message.joined())
        except BaseException:
            message.dropped()
            raise
        message.sent()

    @property
    def headers(self) -> Mapping[str, str]:
        return {key: str(value) for key, value in self._context.invocation_metadata() or ()}

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        await self._context.abort(code, details)


def _handler(method: RpcMethod) -> grpc.RpcMethodHandler[Any, Any]:
    async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return await method.handle(request, _GrpcCall(context))

    kind: Callable[..., grpc.RpcMethodHandler[Any, Any]] = (
        grpc.unary_stream_rpc_method_handler
        if method.serialize is None
        else grpc.unary_unary_rpc_method_handler
    )
    return kind(handle, request_deserializer=method.parse, response_serializer=method.serialize)
