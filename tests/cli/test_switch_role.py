"""Tests `tandem switch-role`: it asks, waits for the next life, and says what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
import pytest_asyncio

from cli.local_cluster.cluster import free_ports
from cli.switch_role import main
from edge.security.config import SecurityConfig
from edge.security.credentials import Credentials
from engine.node.grpc_server import NodeGrpcServer
from engine.node.services.role_switch import RoleSwitch
from engine.node.status import NodeStatus
from tandem_pb import node_pb2
from tests.engine.frontend.test_node_status import StillEngine

PREFILL, DECODE = node_pb2.NODE_ROLE_PREFILL, node_pb2.NODE_ROLE_DECODE


class Lives:
    """A node that a test leads from one life to the next, at one address."""

    def __init__(self) -> None:
        self.engine = StillEngine()
        [self.port] = free_ports(1)
        self._server: NodeGrpcServer | None = None

    async def begin(self, role: node_pb2.NodeRole, http_port: int = 8100) -> RoleSwitch:
        await self.end()
        self.engine.config = replace(self.engine.config, epoch=self.engine.config.epoch + 1)
        switch = RoleSwitch(role, drain_timeout_s=9.0, http_port=http_port)
        status = NodeStatus(self.engine, role, 5.0, switch=switch)
        self._server = NodeGrpcServer("127.0.0.1", self.port, Credentials(SecurityConfig()))
        await self._server.start(status)
        return switch

    async def end(self) -> None:
        if self._server is not None:
            await self._server.stop()


@pytest_asyncio.fixture
async def lives() -> AsyncIterator[Lives]:
    lives = Lives()
    yield lives
    await lives.end()


async def run(lives: Lives, to: str, *args: str) -> int:
    node = f"grpc://127.0.0.1:{lives.port}"
    return await asyncio.to_thread(main, ["--node", node, "--to", to, *args])


@pytest.mark.parametrize(
    ("becomes", "code", "told"),
    [(DECODE, 0, "is a decode node after"), (PREFILL, 1, "has died on its way and is a prefill")],
)
async def test_it_waits_for_the_next_life(
    lives: Lives, capsys: Any, becomes: node_pb2.NodeRole, code: int, told: str
) -> None:
    switch = await lives.begin(PREFILL)
    asking = asyncio.create_task(run(lives, "decode", "--drain-timeout-s", "3"))
    wish = await switch.requested()
    assert (wish.role, wish.drain_timeout_s) == (DECODE, 3.0)
    await lives.begin(becomes)
    assert await asking == code
    said = capsys.readouterr()
    assert told in said.out + said.err


async def test_a_port_of_http_is_told_from_one_of_grpc(capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    node = f"127.0.0.1:{port}"
    assert await asyncio.to_thread(main, ["--node", node, "--to", "decode"]) == 1
    server.close()
    assert f"{node}: no node answers gRPC there" in capsys.readouterr().err


async def test_what_answers_without_this_call_is_no_node(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = grpc.aio.server()
    node = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    assert await asyncio.to_thread(main, ["--node", node, "--to", "decode"]) == 1
    await server.stop(None)
    assert f"{node}: what answers gRPC there is not a node" in capsys.readouterr().err


async def test_a_refusal_is_the_nodes(lives: Lives, capsys: pytest.CaptureFixture[str]) -> None:
    await lives.begin(PREFILL)
    assert await run(lives, "prefill") == 1
    assert "a prefill node already" in capsys.readouterr().err
    await lives.begin(PREFILL, http_port=0)
    assert await run(lives, "decode") == 1
    assert "tandem node" in capsys.readouterr().err


@pytest.mark.parametrize("node", ["http://127.0.0.1:8100", "decode-0", "127.0.0.1:x"])
def test_what_is_no_grpc_port_is_told_before_anybody_is_called(
    node: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--node", node, "--to", "decode"])
    assert ended.value.code == 2
    assert f"'{node}' is not host:port" in capsys.readouterr().err


async def test_a_node_that_takes_too_long_is_not_waited_for(
    lives: Lives, capsys: pytest.CaptureFixture[str]
) -> None:
    await lives.begin(PREFILL)
    assert await run(lives, "decode", "--wait-s", "0.05") == 1
    assert "is not a decode node after 0.05 s" in capsys.readouterr().err
    await lives.end()
    assert await run(lives, "decode") == 1
