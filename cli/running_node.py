"""Reaches a running node by its gRPC port, as commands that ask one do, whatever its role is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic_settings import SettingsConfigDict

from edge.address import split_address
from edge.security.config import Role
from edge.security.credentials import Credentials
from edge.security.settings import SecuritySettings
from tandem_pb import node_pb2_grpc

_ROLES = (Role.PREFILL, Role.DECODE)
_ANSWER_S = 10.0


class NodeCallSettings(SecuritySettings):
    """Holds what a command shows to a node, and demands of it. Other variables of services are
    ignored."""

    model_config = SettingsConfigDict(
        env_prefix="TANDEM_",
        cli_implicit_flags=True,
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        extra="ignore",
    )


def grpc_address(address: str) -> str:
    """Returns host:port of a gRPC port, which operators also write as grpc://host:port. Raises
    `ValueError`."""
    address = address.removeprefix("grpc://")
    split_address(address)
    return address


@asynccontextmanager
async def node_stub(
    credentials: Credentials, address: str
) -> AsyncIterator[node_pb2_grpc.NodeStatusStub]:
    """Yields what calls the node at `address` (host:port), which fails if nothing is there. Raises
    `PlaintextRefused`."""
    await credentials.meet(address)
    role = await _role_at(credentials, address)
    async with credentials.channel(address, role, ()) as channel:
        yield node_pb2_grpc.NodeStatusStub(channel)  # type: ignore[no-untyped-call]


def reason(error: grpc.aio.AioRpcError) -> str:
    """Returns why a node's call failed: what the node says, or that none answers there."""
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return (
                "no node answers gRPC there; `tandem nodes` lists its gRPC port (--grpc-port), "
                f"which is not the one of HTTP ({error.details()})"
            )
        case grpc.StatusCode.UNIMPLEMENTED:
            return "what answers gRPC there is not a node, or is of a release without this call"
        case code:
            return error.details() or code.name


async def _role_at(credentials: Credentials, address: str) -> Role:
    """Returns the role that the node's certificate names, where it must name one."""
    *others, last = _ROLES
    for role in others:
        if credentials.server_name(role) is None:
            return role
        async with credentials.channel(address, role, ()) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            try:
                await health.Check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    continue
            return role
    return last
