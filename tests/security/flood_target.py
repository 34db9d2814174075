"""A service without its engine, in a process of its own whose memory can be looked at:

`python -m tests.security.flood_target grpc|h2 TOKEN_FILE` listens as a prefill node's gRPC server,
or as the HTTP/2 server of a transfer process, prints its port, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path

from edge.h2.rpc_method import RpcMethod, ServerCall
from edge.h2.server import H2Server
from edge.security.config import Role, SecurityConfig
from edge.security.credentials import Credentials
from engine.node.grpc_server import NodeGrpcServer
from engine.node.status import NodeStatus
from kv_transfer.control.process import collect_garbage_rarely, keep_freed_memory
from prefill_node.metrics import PrefillMetrics
from prefill_node.service import CALLERS, PrefillServicer
from tandem_pb import node_pb2, prefill_pb2_grpc
from tests.prefill_node.prefill_fakes import FakePrefillEngine


async def listen_grpc(credentials: Credentials) -> int:
    engine = FakePrefillEngine()
    status = NodeStatus(engine, node_pb2.NODE_ROLE_PREFILL, 60)
    server = NodeGrpcServer("127.0.0.1", 0, credentials, CALLERS)
    servicer = PrefillServicer(
        engine,
        status,
        PrefillMetrics(engine.config),
        max_waiting_requests=9,
        max_waiting_tokens=9,
    )
    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server.server)
    await server.start(status)
    return server.port


async def listen_h2(credentials: Credentials) -> int:
    async def echo(request: bytes, call: ServerCall) -> bytes:
        return request

    judge = partial(credentials.check_caller, frozenset({Role.DECODE}))
    server = H2Server({"/tandem.v1.KVTransfer/PullKV": RpcMethod(echo, bytes, bytes)}, judge)
    return await server.listen("127.0.0.1", 0)


async def main(kind: str, token_file: Path) -> None:
    credentials = Credentials(SecurityConfig(cluster_token_file=str(token_file)))
    listen = listen_grpc if kind == "grpc" else listen_h2
    print(await listen(credentials), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    if sys.argv[1] == "h2":
        keep_freed_memory()
        collect_garbage_rarely()
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
