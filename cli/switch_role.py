"""Runs `tandem switch-role`: makes a running node prefill or decode, and waits until it is.

    1. asked: refused where the node cannot, and it goes on as it was
    2. drains: what it has begun ends, or goes on elsewhere
    3. reports as another node, of the role that was asked for

A command that is killed changes nothing any more: the node goes on with the switch by itself.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Annotated, Literal

import grpc
from pydantic import AfterValidator, Field

from cli.running_node import NodeCallSettings, grpc_address, node_stub, reason
from edge.command_line import parse_settings
from edge.security.config import SecurityError
from edge.security.credentials import Credentials
from engine.node.services.role_switch import NAMES
from tandem_pb import node_pb2, node_pb2_grpc

_ROLES = {name: role for role, name in NAMES.items()}
_CALL_TIMEOUT_S = 10.0
_LOOK_AGAIN_S = 0.1


class SwitchSettings(NodeCallSettings):
    """Change a node that `tandem node` runs between prefill and decode; weights stay where they
    are. Where services show each other certificates or a token, this needs them, too."""

    node: Annotated[str, AfterValidator(grpc_address)] = Field(
        description="host:port of the node's gRPC port."
    )
    to: Literal["prefill", "decode"] = Field(description="What it shall be.")
    drain_timeout_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds for what it has begun; then routers go on with it elsewhere. 0: as "
        "long as the node's --drain-timeout-s.",
    )
    wait_s: float = Field(
        default=300.0, gt=0, description="Seconds to wait until the node is what it shall be."
    )


class NoSwitch(Exception):
    """The node does not change. The message is the node's, or says what became of it."""


async def switch_role(settings: SwitchSettings, credentials: Credentials) -> float:
    """Returns the seconds that it took. Raises `NoSwitch`."""
    started_at = time.monotonic()
    async with node_stub(credentials, settings.node) as stub:
        request = node_pb2.SwitchRoleRequest(
            role=_ROLES[settings.to], drain_timeout_s=settings.drain_timeout_s
        )
        try:
            before: node_pb2.SwitchRoleAnswer = await stub.SwitchRole(
                request, timeout=_CALL_TIMEOUT_S, metadata=credentials.metadata()
            )
        except grpc.aio.AioRpcError as error:
            raise NoSwitch(reason(error)) from None
        print(f"{settings.node} drains ...", file=sys.stderr)
        try:
            async with asyncio.timeout(settings.wait_s):
                await _until_new(stub, credentials, before.epoch, _ROLES[settings.to])
        except TimeoutError:
            raise NoSwitch(
                f"it is not a {settings.to} node after {settings.wait_s:g} s; its log says why"
            ) from None
    return time.monotonic() - started_at


async def _until_new(
    stub: node_pb2_grpc.NodeStatusStub,
    credentials: Credentials,
    epoch: int,
    role: node_pb2.NodeRole,
) -> None:
    """Returns when another life of the node reports, in this role. Raises `NoSwitch` if it is
    not this one: the node has died on the way, and was started again."""
    while True:
        try:
            async for load in stub.Watch(node_pb2.WatchRequest(), metadata=credentials.metadata()):
                if load.epoch == epoch:
                    continue
                if load.role != role:
                    raise NoSwitch(
                        f"the node has died on its way and is a {NAMES[load.role]} node again"
                    )
                return
        except grpc.aio.AioRpcError:
            # Between two lives nothing listens for a moment; a node that was killed takes longer.
            await asyncio.sleep(_LOOK_AGAIN_S)


def main(args: list[str]) -> int:
    settings = parse_settings(SwitchSettings, "tandem switch-role", args)
    try:
        credentials = Credentials(settings.security_config())
        seconds = asyncio.run(switch_role(settings, credentials))
    except (NoSwitch, SecurityError, OSError) as error:
        print(f"{settings.node}: {error}", file=sys.stderr)
        return 1
    print(f"{settings.node} is a {settings.to} node after {seconds:.1f} s")
    return 0
