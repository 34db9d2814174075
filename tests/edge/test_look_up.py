"""Checks that names whose servers are silent keep no other name waiting."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from edge.address import look_up
from router.kubernetes.api_client import _Names
from router.nodes.http.transport import _connect_any
from tests.awaited import until

REAL = socket.getaddrinfo


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Yields what is set when the servers of `silent-*` answer: that there is no such name."""
    answers = threading.Event()

    def ask(host: str, *rest: Any, **options: Any) -> Any:
        if options.get("flags"):
            return REAL(host, *rest, **options)
        if host.startswith("silent-"):
            answers.wait()
            raise socket.gaierror(socket.EAI_NONAME, host)
        return REAL("127.0.0.1", *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    yield answers
    answers.set()


def num_asking() -> int:
    return sum(thread.name.startswith("address of silent") for thread in threading.enumerate())


async def test_silent_names_keep_no_other_waiting(servers: threading.Event) -> None:
    silent = [asyncio.ensure_future(look_up(f"silent-{i}", 80)) for i in range(100)]
    again = [asyncio.ensure_future(look_up("silent-1", 80)) for _ in range(100)]
    await until(lambda: num_asking() == 100)
    async with asyncio.timeout(60):
        assert (await look_up("answers", 80))[0][4] == ("127.0.0.1", 80)
        assert (await _Names().resolve("answers", 80))[0]["host"] == "127.0.0.1"
    assert num_asking() == 100, "all who ask for a name share its thread"
    again[0].cancel()
    servers.set()
    for found in await asyncio.gather(*silent, *again[1:], return_exceptions=True):
        assert isinstance(found, socket.gaierror)


async def test_addresses_need_no_thread(servers: threading.Event) -> None:
    for host in ("127.0.0.1", "::1"):
        assert (await look_up(host, 80))[0][4][:2] == (host, 80)
    assert not [t for t in threading.enumerate() if t.name.startswith("address of")]


async def test_names_without_end_are_refused(servers: threading.Event) -> None:
    """Clients name hosts of images, which may be any."""
    silent = [asyncio.ensure_future(look_up(f"silent-{i}")) for i in range(256)]
    await until(lambda: num_asking() == 256)
    with pytest.raises(OSError, match="256 other names are asked for"):
        await look_up("one-more")
    assert (await look_up("127.0.0.1"))[0][4] == ("127.0.0.1", 0)
    servers.set()
    await asyncio.gather(*silent, return_exceptions=True)
    assert await look_up("one-more")


async def test_without_a_thread_a_name_is_asked_for_again(
    servers: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_room)
        with pytest.raises(OSError, match="node cannot be asked for now: can't start"):
            await look_up("node", 80)
    async with asyncio.timeout(60):
        assert (await look_up("node", 80))[0][4] == ("127.0.0.1", 80)


async def test_a_name_that_does_not_exist_leaves_no_cycle(servers: threading.Event) -> None:
    servers.set()
    gc.collect()
    gc.disable()
    try:
        fault = await _fault_of("silent-1")
        kept = weakref.ref(fault)
        del fault
        await until(lambda: kept() is None)  # The thread that asked has it until it ends.
    finally:
        gc.enable()


async def _fault_of(name: str) -> BaseException:
    try:
        await look_up(name)
    except OSError as error:
        return error.with_traceback(error.__traceback__)
    raise AssertionError("it exists")


async def test_a_node_is_tried_at_each_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    listening = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]

    async def both(host: str, port: int) -> list[tuple[object, ...]]:
        kind = socket.AF_INET, socket.SOCK_STREAM, 6, ""
        return [(*kind, ("127.0.0.2", port)), (*kind, ("127.0.0.1", port))]

    monkeypatch.setattr("router.nodes.http.transport.look_up", both)
    new: Any = asyncio.Protocol
    transport, _ = await _connect_any(new, "node", port, None, None)
    assert transport.get_extra_info("peername") == ("127.0.0.1", port)
    transport.close()
    listening.close()
    with pytest.raises(OSError):
        await _connect_any(new, "node", port, None, None)


async def test_an_address_of_one_link_keeps_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def connect(new: object, host: str, port: int, **options: object) -> None:
        asked.append(host)

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connect)
    new: Any = asyncio.Protocol
    for host in ("fe80::1%1", "::1", "127.0.0.1"):
        await _connect_any(new, host, 80, None, None)
    assert asked == ["fe80::1%1", "::1", "127.0.0.1"]
