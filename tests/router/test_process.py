"""`python -m router` as its supervisor sees it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from cli.local_cluster.cluster import free_ports
from edge.program import file_limit
from router.config import RouterSettings
from router.main import main, tell_file_limit
from router.nodes.node import NodeState
from router.server import bind
from tests.router.cluster import TIMEOUT_S, Cluster
from tests.router.fakes import event, open_stream
from tests.router.processes import ready_line, router_process

BODY = {"model": "demo", "prompt": "hello", "stream": True}


async def _ready(process: asyncio.subprocess.Process) -> str:
    line = await ready_line(process)
    assert line["event"] == "ready"
    return f"http://{line['host']}:{line['port']}"


async def _status(client: aiohttp.ClientSession, url: str) -> int:
    async with client.get(url) as response:
        return response.status


async def _wait_status(client: aiohttp.ClientSession, url: str, wanted: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while await _status(client, url) != wanted:
            await asyncio.sleep(0.02)


async def test_it_serves_and_drains_without_breaking_an_answer(cluster: Cluster) -> None:
    gate = asyncio.Event()

    async def held(request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(event(0))
        await gate.wait()
        await response.write(event(1))
        return response

    decode = await cluster.decode(handler=held)
    args = ("--decode", decode.entry, "--drain-delay-s", "3")
    async with router_process(*args) as process, aiohttp.ClientSession() as client:
        url = await _ready(process)
        await _wait_status(client, url + "/ready", 200)
        async with client.post(url + "/v1/completions", json=BODY) as response:
            assert await response.content.readany() == event(0)
            viewer = await client.get(url + "/status/events")
            process.send_signal(signal.SIGTERM)
            await _wait_status(client, url + "/ready", 503)
            async with aiohttp.ClientSession() as late:
                with pytest.raises(aiohttp.ClientConnectionError):
                    await _wait_status(late, url + "/health", -1)
            assert (await viewer.read()).endswith(b"\n\n"), "who looks on holds nobody up"
            gate.set()
            assert await response.read() == event(1)
        async with asyncio.timeout(TIMEOUT_S):
            assert await process.wait() == 0


async def test_a_second_signal_cuts_open_answers_short(cluster: Cluster) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(event(0))
        await asyncio.Event().wait()
        return response

    decode = await cluster.decode(handler=endless)
    async with (
        router_process("--decode", decode.entry) as process,
        aiohttp.ClientSession() as client,
    ):
        url = await _ready(process)
        await _wait_status(client, url + "/ready", 200)
        async with client.post(url + "/v1/completions", json=BODY) as response:
            await response.content.readany()
            process.send_signal(signal.SIGTERM)
            await _wait_status(client, url + "/ready", 503)
            assert process.returncode is None
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(TIMEOUT_S):
                last = await response.read()
                assert await process.wait() == 0
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "draining"


async def test_who_came_while_a_draining_router_was_held_up_is_answered(cluster: Cluster) -> None:
    """The connection was accepted by the kernel alone when the time for new ones was over."""
    router = await cluster.router(await cluster.decode(), drain_delay_s=0.05)
    host, port = router.url.removeprefix("http://").split(":")
    router.server.handle_exit(signal.SIGTERM, None)
    await asyncio.sleep(0)
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.call_soon(time.sleep, 0.3)
        async with asyncio.timeout(TIMEOUT_S):
            answer = await loop.sock_recv(client, 1 << 16)
    assert answer.startswith(b"HTTP/1.1 200 OK")


def test_every_address_is_those_of_both_families() -> None:
    with bind("::", 0) as listener:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listener.getsockname()[1])).close()


def test_an_address_is_taken_as_soon_as_it_is_bound() -> None:
    """Another router may start at the same time, and the admin port may be the same by mistake."""
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port} "):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--decode", "nonsense"), 2, "host:http_port/grpc_port"),
        (("--host", "203.0.113.1"), 1, "choose another port or address"),
        (("--check", "--decode", "nonsense"), 2, "host:http_port/grpc_port"),
        (("--check", "--batch-store", "files"), 2, "--batch-store must be sqlite:///FILE"),
        (("--check", "--response-store", "sqlite:////none/x.db"), 2, "there is no folder"),
        (("--check", "--batch-store", "sqlite:////proc"), 2, "/proc is no file; name a file"),
        (("--check", "--trace-file", "/none/spans"), 2, "make its folder"),
    ],
)
def test_a_wrong_setting_is_named_and_nothing_starts(
    args: tuple[str, ...],
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("router.main.setup_logging", lambda style, process: None)
    assert main(["--port", "0", *args]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--max-attempts", "0"), "--max-attempts (or TANDEM_ROUTER_MAX_ATTEMPTS): "),
        (("--max-attemps", "1"), "there is no --max-attemps; did you mean --max-attempts?"),
    ],
)
def test_a_wrong_flag_is_told_as_a_node_tells_it(
    args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*args])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_setting_is_a_flag_and_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_ROUTER_DECODE", "a:1/2")
    monkeypatch.setenv("TANDEM_ROUTER_PORT", "9000")
    settings = RouterSettings(_cli_parse_args=["--port", "9001", "--stale-after-s", "5"])
    assert (settings.decode, settings.port, settings.stale_after_s) == ("a:1/2", 9001, 5.0)
    assert settings.host == "127.0.0.1"


def test_every_setting_is_described() -> None:
    fields: dict[str, Any] = dict(RouterSettings.model_fields)
    assert all(field.description for field in fields.values())


def test_keys_do_not_show_when_settings_are_printed() -> None:
    settings = RouterSettings(api_keys="secret-1", node_api_key="secret-2")
    assert "secret-1" not in repr(settings)
    assert "secret-2" not in repr(settings)


def test_too_few_files_for_the_requests_are_told(caplog: pytest.LogCaptureFixture) -> None:
    limit = file_limit()
    tell_file_limit(RouterSettings(max_open_requests=1))
    assert not caplog.records
    tell_file_limit(RouterSettings(max_open_requests=limit))
    assert f"may have {limit} files open, and {limit} requests at a time" in caplog.text


async def test_a_router_without_a_file_left_lives_on_while_no_node_answers() -> None:
    """gRPC ended the process that had no channel open and no descriptor for the next one."""
    decode, grpc_port = free_ports(2)
    args = ("--decode", f"127.0.0.1:{decode}/{grpc_port}", "--log-level", "error")
    async with (
        router_process(*args) as process,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as client,
    ):
        url = await _ready(process)
        begun = await _watch_failures(client, url)
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, hard))
        async with asyncio.timeout(TIMEOUT_S):
            while await _watch_failures(client, url) < begun + 3:
                await asyncio.sleep(0.05)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        async with aiohttp.ClientSession() as other:
            await _wait_status(other, url + "/health", 200)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(TIMEOUT_S):
            assert await process.wait() == 0


async def _watch_failures(client: aiohttp.ClientSession, url: str) -> float:
    async with client.get(url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith("tandem_router_watch_failures_total")
    )


async def test_a_router_without_room_for_connections_blames_no_node(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = await cluster.decode()
    router = await cluster.router(decode)
    await router.wait_usable(decode=1, prefill=0)
    loop = asyncio.get_running_loop()
    connect, is_full = loop.create_connection, True

    async def connect_if_there_is_room(new: Any, *to: Any, **more: Any) -> Any:
        if is_full and to[1:] == (decode.port,):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return await connect(new, *to, **more)

    monkeypatch.setattr(loop, "create_connection", connect_if_there_is_room)
    for _ in range(5):
        async with router.post(BODY) as response:
            assert response.status == 503 and response.headers["retry-after"]
            said = await response.json()
        assert "no room for another connection" in said["error"]["message"]
    [node] = router.services.registry.all_nodes()
    assert router.services.registry.state(node) is NodeState.READY
    is_full = False
    async with router.post(BODY) as response:
        assert response.status == 200


_GROWTH = """
import gc
from router.garbage import settle

most, kept = 0, []

def look(phase, info):
    global most
    if phase == "start" and info["generation"] == 1:
        most = max(most, len(gc.get_objects(generation=1)))

settle()
gc.callbacks.append(look)
for _ in range(300_000):
    kept.append([])
print(most)
"""


def test_no_collection_looks_at_all_streams_that_have_begun() -> None:
    """The objects of 4,000 took it 0.1 s."""
    done = subprocess.run(
        [sys.executable, "-c", _GROWTH], capture_output=True, text=True, timeout=60, check=True
    )
    assert 500 < int(done.stdout) < 2_000
