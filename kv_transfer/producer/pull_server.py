"""Who carries the calls of a `PullService`: behind one interface, so that the choice is a setting.

On the wire both are gRPC, so either kind of puller can call either kind of server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio

from edge.security.call_guard import CallGuard
from edge.security.config import Role
from edge.security.credentials import Credentials
from kv_transfer.config import KVTransferConfig
from kv_transfer.h2.server import H2Server
from kv_transfer.producer.pull_service import SERVICE, PullService
from kv_transfer.wire.channels import SERVER_OPTIONS
from kv_transfer.wire.out_message import OutMessage
from kv_transfer.wire.rpc_method import RpcMethod, ServerCall

CALLERS = frozenset({Role.DECODE})
"""Who may greet us and take KV."""


class PullServer(ABC):
    """Listens on one address, for decode nodes alone."""

    @abstractmethod
    async def listen(self, host: str, port: int) -> int:
        """The port. Raises OSError when it cannot be had, `PlaintextRefused` when others could
        read along; port 0 is any."""

    @abstractmethod
    async def close(self) -> None:
        """Calls in motion are cancelled."""


class H2PullServer(PullServer):
    """Ours: hands memory to the kernel without a copy, with several threads."""

    def __init__(self, service: PullService, credentials: Credentials) -> None:
        self._credentials = credentials
        self._server = H2Server(
            service.methods(),
            partial(credentials.check_caller, CALLERS),
            credentials.server_context(h2=True),
        )

    async def listen(self, host: str, port: int) -> int:
        self._credentials.check_listen(host)
        return await self._server.listen(host, port)

    async def close(self) -> None:
        await self._server.close()


class GrpcPullServer(PullServer):
    """grpcio's."""

    def __init__(self, service: PullService, credentials: Credentials) -> None:
        self._credentials = credentials
        self._server = grpc.aio.server(
            options=SERVER_OPTIONS, interceptors=[CallGuard(credentials, {SERVICE: CALLERS})]
        )
        handlers = {
            path.rpartition("/")[2]: _handler(method) for path, method in service.methods().items()
        }
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


def new_pull_server(
    config: KVTransferConfig, service: PullService, credentials: Credentials
) -> PullServer:
    kind = H2PullServer if config.pull_transport == "h2" else GrpcPullServer
    return kind(service, credentials)


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
