"""Runs `tandem profile`: records a node's steps for a while, and says where the files are.

    1. start: refused where the node has no --torch-profiler-dir, or while another profile runs
    2. wait; Ctrl-C ends the waiting, not the answer
    3. stop: each rank has written its file by then

A command that is killed leaves nothing behind: the node ends the profile by itself.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from typing import Annotated, Any, Protocol

import aiohttp
import grpc
from pydantic import AfterValidator, Field

from cli.running_node import NodeCallSettings, grpc_address, node_stub, reason
from edge.command_line import parse_settings
from edge.security.config import Role, SecurityError
from edge.security.credentials import Credentials
from engine.frontend.calls.profile_calls import STOP_LIMIT_S
from tandem_pb import node_pb2

_HTTP = ("http://", "https://")
_NO_ANSWER = "no answer in time; its log says what it does"
_STOP_TIMEOUT_S = STOP_LIMIT_S + 20.0
"""Is longer than a node itself waits for its ranks, so that its answer says why."""


def _any_address(node: str) -> str:
    return node if node.startswith(_HTTP) else grpc_address(node)


class ProfileSettings(NodeCallSettings):
    """Profile a running node with torch.profiler. Where services show each other certificates or a
    token, this needs them, too."""

    node: Annotated[str, AfterValidator(_any_address)] = Field(
        description="The node: http://host:port or https://host:port of a decode node; host:port "
        "of the gRPC port of either kind, the only one that a prefill node has."
    )
    seconds: float = Field(default=5.0, gt=0, description="Seconds to record.")
    num_steps: int | None = Field(
        default=None, ge=1, description="End after this many steps, if that is sooner."
    )
    with_stack: bool = Field(
        default=False, description="Record where in the Python code operators are called. Slower."
    )
    record_shapes: bool = Field(default=False, description="Record shapes of operators' inputs.")

    def options(self) -> dict[str, Any]:
        steps = {} if self.num_steps is None else {"num_steps": self.num_steps}
        return {
            "seconds": self.seconds,
            "with_stack": self.with_stack,
            "record_shapes": self.record_shapes,
            **steps,
        }


class NodeRefused(Exception):
    """The node cannot be profiled now. The message is the node's."""


class _Node(Protocol):
    async def start(self, options: dict[str, Any]) -> None: ...
    async def stop(self) -> dict[str, Any]: ...


class HttpNode:
    """A decode node, by its HTTP port."""

    def __init__(self, url: str, credentials: Credentials) -> None:
        self._url = url.rstrip("/")
        self._credentials = credentials

    async def start(self, options: dict[str, Any]) -> None:
        await self._post("/start_profile", options)

    async def stop(self) -> dict[str, Any]:
        return await self._post("/stop_profile", {})

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        address = self._url.partition("://")[2]
        await self._credentials.meet(address)
        timeout = aiohttp.ClientTimeout(total=_STOP_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(
                self._url + path,
                json=body,
                headers=dict(self._credentials.metadata()),
                ssl=self._credentials.client_context(address) or True,
                server_hostname=self._credentials.server_name(Role.DECODE),
            ) as response,
        ):
            text = await response.text()
            if response.status != 200:
                raise NodeRefused(_message_of(text))
            answer: dict[str, Any] = json.loads(text)
            return answer


class GrpcNode:
    """A node of either kind, by its gRPC port."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._address = address
        self._credentials = credentials

    async def start(self, options: dict[str, Any]) -> None:
        await self._call("StartProfile", node_pb2.StartProfileRequest(**options))

    async def stop(self) -> dict[str, Any]:
        profile = await self._call("StopProfile", node_pb2.StopProfileRequest())
        traces = [
            {"rank": one.rank, "host": one.host, "path": one.path, "error": one.error}
            for one in profile.traces
        ]
        return {"name": profile.name, "ended_by": profile.ended_by, "traces": traces}

    async def _call(self, name: str, request: Any) -> node_pb2.Profile:
        async with node_stub(self._credentials, self._address) as stub:
            try:
                answer: node_pb2.Profile = await getattr(stub, name)(
                    request, timeout=_STOP_TIMEOUT_S, metadata=self._credentials.metadata()
                )
            except grpc.aio.AioRpcError as error:
                raise NodeRefused(reason(error)) from None
            return answer


def _message_of(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:500]


async def profile_node(node: _Node, settings: ProfileSettings) -> int:
    """Records, prints where the files are, and returns the exit code."""
    await node.start(settings.options())
    print(f"recording for {settings.seconds:g} s ...", file=sys.stderr)
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(settings.seconds)
    found = await node.stop()
    for trace in found["traces"]:
        what = trace["path"] or f"no file: {trace['error']}"
        print(f"rank {trace['rank']} on {trace['host']}: {what}")
    print("open the files at https://ui.perfetto.dev", file=sys.stderr)
    return 1 if any(trace["error"] for trace in found["traces"]) else 0


def main(args: list[str]) -> int:
    settings = parse_settings(ProfileSettings, "tandem profile", args)
    try:
        credentials = Credentials(settings.security_config())
        kind = HttpNode if settings.node.startswith(_HTTP) else GrpcNode
        return asyncio.run(profile_node(kind(settings.node, credentials), settings))
    except (NodeRefused, SecurityError, aiohttp.ClientError, OSError) as error:
        print(f"{settings.node}: {str(error) or _NO_ANSWER}", file=sys.stderr)
        return 1
