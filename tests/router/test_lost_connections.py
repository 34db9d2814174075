"""A network that forgets a connection tells neither end; what is asked over it goes elsewhere."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from aiohttp import web

from router.kubernetes import api_client
from router.nodes.http import transport
from router.nodes.http.transport import HttpTransport
from tests.lossy_switch import LossySwitch, NoSwitchError, opened_switch
from tests.router.cluster import Cluster, eventually
from tests.router.fakes import FakeDecodeNode, stream_tokens
from tests.router.kubernetes_fake import FakeApi, a_slice, endpoint
from tests.router.test_kubernetes import endpoints, following

ANSWER = stream_tokens(3)
BODY = {"model": "demo", "prompt": "hello", "stream": True}


@pytest.fixture
def switch() -> Iterator[LossySwitch]:
    try:
        with opened_switch("a") as switch:
            yield switch
    except NoSwitchError as error:
        pytest.skip(str(error))


class RemoteNode(FakeDecodeNode):
    """Listens on the host `a` of the switch."""

    def __init__(self, switch: LossySwitch) -> None:
        super().__init__("d", ANSWER)
        self._switch = switch
        self.host = switch.addresses["a"]

    def _listen_status(self, server: grpc.aio.Server) -> int:
        with self._switch.on("a"):
            return super()._listen_status(server)

    def _site(self, runner: web.AppRunner) -> web.BaseSite:
        with self._switch.on("a"):
            return web.SockSite(runner, socket.create_server((self.host, self.port)))


async def test_a_request_on_a_lost_connection_goes_to_another_node(
    switch: LossySwitch,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The node's reports come all the while: it would count as slow for ten minutes."""
    monkeypatch.setattr(transport, "_SILENCE_S", 2.0)
    far, near = await cluster._start(RemoteNode(switch)), await cluster.decode("e", ANSWER)
    router = await cluster.router(far, near, upstream_keepalive_s=60.0, allow_plaintext=True)
    while not far.requests:
        whole = await router.text(BODY)
    to_nodes = router.services.forwarder.attempts.transport
    assert isinstance(to_nodes, HttpTransport)
    for connection in to_nodes._open:
        if connection._transport.get_extra_info("peername")[0] == far.host:
            switch.lose(connection._transport.get_extra_info("sockname")[1])
    async with asyncio.timeout(30):
        while "Connection timed out" not in caplog.text:
            assert await router.text(BODY) == whole
    assert len(far.requests) == 1


class RemoteApi(FakeApi):
    """Serves on the host `a` of the switch."""

    def __init__(self, switch: LossySwitch) -> None:
        super().__init__()
        self._switch = switch
        self.host = switch.addresses["a"]

    def _site(self, runner: web.AppRunner) -> web.BaseSite:
        with self._switch.on("a"):
            return web.SockSite(runner, socket.create_server((self.host, self._port)))


async def test_a_watch_of_kubernetes_on_a_lost_connection_begins_again(
    switch: LossySwitch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router would not know of new pods for four minutes."""
    monkeypatch.setattr(api_client, "_SILENCE_S", 2.0)
    api = RemoteApi(switch)
    await api.start()
    (tmp_path / "namespace").write_text("ns")
    try:
        async with following(api, tmp_path) as followed:
            await eventually(lambda: bool(api.watches))
            switch.lose(api.ports[-1])
            await eventually(lambda: len(api.watches) == 2)
            await api.send("ADDED", a_slice("a", endpoint("10.0.0.1")))
            await followed.last(endpoints("10.0.0.1"))
    finally:
        await api.stop()
