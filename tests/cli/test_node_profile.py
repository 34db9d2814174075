"""Tests `tandem profile`: it starts, waits, stops, and prints where the files are."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cli import node_profile
from cli.node_profile import main
from edge.security.config import Role, SecurityConfig
from edge.security.credentials import Credentials
from engine.contracts.reports.profiles import ProfileOptions, RankTrace
from engine.node.grpc_server import NodeGrpcServer
from engine.node.status import NodeStatus
from tandem_pb import node_pb2
from tests.decode_node.http_node import http_node, live
from tests.engine.frontend.test_node_status import StillEngine
from tests.security.authority import Authority

TOKEN = "t" * 32


async def run(*args: str) -> int:
    return await asyncio.to_thread(main, ["--seconds", "0.05", *args])


async def test_a_node_is_profiled_by_its_grpc_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    engine = StillEngine()
    status = NodeStatus(engine, node_pb2.NODE_ROLE_PREFILL, stuck_after_s=5.0)
    credentials = Credentials(SecurityConfig(cluster_token_file=str(token)))
    server = NodeGrpcServer("127.0.0.1", 0, credentials)
    await server.start(status)
    node = f"127.0.0.1:{server.port}"
    try:
        assert await run("--node", node) == 1
        assert "cluster token" in capsys.readouterr().err
        with_token = ("--node", node, "--cluster-token-file", str(token))
        assert await run(*with_token, "--num-steps", "5", "--with-stack") == 0
        assert engine.profiles.asked == [ProfileOptions(num_steps=5, seconds=0.05, with_stack=True)]
        assert capsys.readouterr().out == f"rank 0 on here: {engine.profiles.trace.path}\n"
        engine.profiles.trace = RankTrace(0, "here", error="the disk is full")
        assert await run(*with_token) == 1
        assert "the disk is full" in capsys.readouterr().out
        await engine.profiles.start(ProfileOptions())
        assert await run(*with_token) == 1
        assert "is running" in capsys.readouterr().err
    finally:
        await server.stop()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_node_of_either_role_is_reached_by_the_certificate_that_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], role: Role
) -> None:
    authority, engine = Authority(tmp_path / "ours"), StillEngine()
    status = NodeStatus(engine, node_pb2.NODE_ROLE_DECODE, stuck_after_s=5.0)
    server = NodeGrpcServer("127.0.0.1", 0, authority.credentials(role, "role"))
    await server.start(status)
    folder = authority.service("router", Role.ROUTER)
    files = {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
    shown = [f"--tls-{name}-file={folder / file}" for name, file in files.items()]
    node = f"grpc://127.0.0.1:{server.port}"
    try:
        assert await run("--node", node, "--tls-identity", "role", *shown) == 0
        assert str(engine.profiles.trace.path) in capsys.readouterr().out
    finally:
        await server.stop()
    assert await run("--node", node, "--tls-identity", "role", *shown) == 1
    assert f"127.0.0.1:{server.port}: " in capsys.readouterr().err


async def test_a_decode_node_is_profiled_by_its_http_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    async with http_node(api_keys="key", cluster_token_file=token) as node, live(node) as url:
        assert await run("--node", url) == 1
        assert "key" in capsys.readouterr().err
        assert await run("--node", url, "--cluster-token-file", str(token)) == 0
        assert capsys.readouterr().out == f"rank 0 on here: {node.engine.profiles.trace.path}\n"
    assert await run("--node", url) == 1
    assert url in capsys.readouterr().err


def test_what_is_neither_an_address_nor_a_url_is_told_before_anybody_is_called(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--node", "decode-0"])
    assert ended.value.code == 2
    assert "'decode-0' is not host:port" in capsys.readouterr().err


async def test_a_node_that_does_not_answer_is_said_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_profile, "_STOP_TIMEOUT_S", 0.2)
    done = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await done.wait()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await run("--node", url) == 1
        done.set()
    assert capsys.readouterr().err == f"{url}: no answer in time; its log says what it does\n"
