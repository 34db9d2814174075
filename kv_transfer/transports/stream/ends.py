"""Chooses who carries the calls: our HTTP/2 ends or grpcio's. The two nodes need not agree."""

from __future__ import annotations

from collections.abc import Mapping

from edge.h2.rpc_method import RpcMethod
from edge.security.credentials import Credentials
from kv_transfer.config import KVTransferConfig
from kv_transfer.transports.stream.grpcio.pull_client import GrpcPullClient
from kv_transfer.transports.stream.grpcio.pull_server import GrpcPullServer
from kv_transfer.transports.stream.h2.pull_client import H2PullClient
from kv_transfer.transports.stream.h2.pull_server import H2PullServer
from kv_transfer.wire.pull_client import PullClient
from kv_transfer.wire.pull_server import PullServer, pull_callers


def new_pull_server(
    config: KVTransferConfig, methods: Mapping[str, RpcMethod], credentials: Credentials
) -> PullServer:
    """Returns a server of `methods`, by path, for those who may pull from this node."""
    kind = H2PullServer if config.pull_transport == "h2" else GrpcPullServer
    return kind(methods, credentials, pull_callers(config))


def new_pull_client(
    config: KVTransferConfig, credentials: Credentials, source: str = ""
) -> PullClient:
    """Returns a client for streams.

    `source`: our address from which KV is pulled, where the client can say so; empty: any.
    """
    if config.pull_transport == "h2":
        return H2PullClient(credentials, source, config.receive_threads)
    return GrpcPullClient(credentials)
