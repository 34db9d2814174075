"""The calls to a transfer process, carried by our own HTTP/2 server."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

from edge.h2.rpc_method import RpcMethod
from edge.h2.server import H2Server
from edge.security.config import Role
from edge.security.credentials import Credentials
from kv_transfer.wire.pull_server import PullServer


class H2PullServer(PullServer):
    """Ours: hands memory to the kernel without a copy, with several threads."""

    def __init__(
        self,
        methods: Mapping[str, RpcMethod],
        credentials: Credentials,
        callers: Collection[Role],
    ) -> None:
        self._credentials = credentials
        self._server = H2Server(
            methods,
            partial(credentials.check_caller, callers),
            credentials.server_tls("kv", h2=True),
        )

    async def listen(self, host: str, port: int) -> int:
        self._credentials.check_listen(host)
        return await self._server.listen(host, port)

    async def close(self) -> None:
        await self._server.close()
