"""Serves the status service of a decode node that is always well, for benches of the router."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent import futures

import grpc

from tandem_pb.node_pb2 import NODE_ROLE_DECODE, NodeLoad
from tandem_pb.node_pb2_grpc import NodeStatusServicer, add_NodeStatusServicer_to_server


class _Status(NodeStatusServicer):
    def Watch(self, request: object, context: grpc.ServicerContext) -> Iterator[NodeLoad]:
        sequence = 0
        while context.is_active():
            sequence += 1
            yield NodeLoad(
                node_id=f"bench-{id(self)}", role=NODE_ROLE_DECODE, epoch=1, sequence=sequence,
                model_name="bench",
            )  # fmt: skip
            time.sleep(0.25)


def serve_status() -> int:
    """Serves until the process ends; returns the port."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    add_NodeStatusServicer_to_server(_Status(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    _running.append(server)
    server.start()
    return port


_running: list[grpc.Server] = []
