"""Nodes of Kubernetes services: what the slices say, and an API that fails in every way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.kubernetes.api_client import ApiUnavailable, EndpointSliceApi, KubernetesAccess
from router.kubernetes.endpoint_slices import Endpoints, EndpointSlice, EndpointSlices
from router.kubernetes.slice_watch import SliceWatch
from router.nodes.address import NodeAddress, NodeRole, NodeSource, parse_node_list
from router.nodes.discovery import Discovery
from tests.router.cluster import Cluster, eventually
from tests.router.factories import ManualClock
from tests.router.kubernetes_fake import FakeApi, a_slice, endpoint

PREFILL = NodeRole.PREFILL


def parsed(item: dict[str, Any]) -> EndpointSlice:
    return msgspec.convert(item, EndpointSlice)


def endpoints(*present: str, terminating: tuple[str, ...] = ()) -> Endpoints:
    return Endpoints(frozenset(present), frozenset(terminating))


# Slices ----------------------------------------------------------------------------------------


def test_slices_of_a_service_are_one_set() -> None:
    slices = EndpointSlices()
    slices.put(parsed(a_slice("a", endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=False))))
    slices.put(parsed(a_slice("b", endpoint("10.0.0.3", terminating=True))))
    assert slices.endpoints() == endpoints("10.0.0.1", "10.0.0.2", terminating=("10.0.0.3",))
    slices.delete(parsed(a_slice("a")))
    assert slices.endpoints() == endpoints(terminating=("10.0.0.3",))
    slices.replace([parsed(a_slice("c", endpoint("10.0.0.3")))])
    assert slices.endpoints() == endpoints("10.0.0.3")


def test_an_address_that_moves_between_slices_is_not_ending() -> None:
    slices = EndpointSlices()
    slices.put(parsed(a_slice("a", endpoint("10.0.0.1", terminating=True))))
    slices.put(parsed(a_slice("b", endpoint("10.0.0.1"))))
    assert slices.endpoints() == endpoints("10.0.0.1")


def test_a_slice_without_endpoints_is_empty() -> None:
    slices = EndpointSlices()
    slices.put(parsed({"metadata": {"name": "a"}, "endpoints": None}))
    slices.put(parsed({"metadata": {"name": "b"}}))
    assert slices.endpoints() == endpoints()


# The watch -------------------------------------------------------------------------------------


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("ns")
    return tmp_path


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    fake = FakeApi()
    await fake.start()
    yield fake
    await fake.stop()


class Followed:
    """Keeps what a watch told. `last` waits for it to be so."""

    def __init__(self) -> None:
        self.seen: list[Endpoints] = []
        self.num_failures = 0

    def fail(self) -> None:
        self.num_failures += 1

    async def last(self, expected: Endpoints) -> None:
        await eventually(lambda: bool(self.seen) and self.seen[-1] == expected)


@asynccontextmanager
async def following(api: FakeApi, credentials: Path) -> AsyncIterator[Followed]:
    followed = Followed()
    client = EndpointSliceApi(KubernetesAccess(url=api.url, credentials=credentials), "svc")
    watch = SliceWatch(
        client, "svc", followed.seen.append, followed.fail, random.Random(1), min_pause_s=0.01
    )
    task = asyncio.create_task(watch.run())
    try:
        yield followed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_changes_arrive_as_they_happen(api: FakeApi, credentials: Path) -> None:
    api.items = [a_slice("a", endpoint("10.0.0.1"))]
    api.version = 7
    async with following(api, credentials) as followed:
        await followed.last(endpoints("10.0.0.1"))
        await eventually(lambda: bool(api.watches))
        assert api.requests[1]["resourceVersion"] == "7"
        assert api.requests[1]["allowWatchBookmarks"] == "true"
        assert {query["labelSelector"] for query in api.requests} == {
            "kubernetes.io/service-name=svc"
        }
        await api.send("ADDED", a_slice("b", endpoint("10.0.0.2")), in_pieces=True)
        await followed.last(endpoints("10.0.0.1", "10.0.0.2"))
        await api.send("MODIFIED", a_slice("b", endpoint("10.0.0.2", terminating=True)))
        await followed.last(endpoints("10.0.0.1", terminating=("10.0.0.2",)))
        await api.send("DELETED", a_slice("b"))
        await followed.last(endpoints("10.0.0.1"))
        assert followed.num_failures == 0


async def test_a_watch_goes_on_behind_the_last_bookmark(api: FakeApi, credentials: Path) -> None:
    api.items = [a_slice("a", endpoint("10.0.0.1"))]
    async with following(api, credentials) as followed:
        await eventually(lambda: bool(api.watches))
        await api.send("BOOKMARK", {"metadata": {"resourceVersion": "99"}})
        api.end_watches()
        await eventually(lambda: bool(api.watches))
        assert api.requests[-1]["resourceVersion"] == "99"
        assert (api.num_lists, len(followed.seen)) == (1, 1)


@pytest.mark.parametrize("way", ["status", "event"])
async def test_a_version_that_is_too_old_means_a_new_list(
    api: FakeApi, credentials: Path, way: str
) -> None:
    api.items = [a_slice("a", endpoint("10.0.0.1"))]
    async with following(api, credentials) as followed:
        await eventually(lambda: bool(api.watches))
        api.items = [a_slice("b", endpoint("10.0.0.9"))]
        if way == "event":
            await api.send("ERROR", {"kind": "Status", "code": 410, "message": "too old"})
        else:
            api.expired = True
            api.end_watches()
        await followed.last(endpoints("10.0.0.9"))
        assert api.num_lists == 2


async def test_what_is_known_stays_through_an_outage(api: FakeApi, credentials: Path) -> None:
    api.items = [a_slice("a", endpoint("10.0.0.1"))]
    async with following(api, credentials) as followed:
        await eventually(lambda: bool(api.watches))
        await api.stop()
        await eventually(lambda: followed.num_failures >= 3)
        assert followed.seen == [endpoints("10.0.0.1")]
        await api.start()
        await eventually(lambda: bool(api.watches))
        await api.send("ADDED", a_slice("b", endpoint("10.0.0.2")))
        await followed.last(endpoints("10.0.0.1", "10.0.0.2"))


@pytest.mark.parametrize("status", [401, 403, 500])
async def test_an_api_that_refuses_is_asked_again(
    api: FakeApi, credentials: Path, status: int
) -> None:
    api.items = [a_slice("a", endpoint("10.0.0.1"))]
    api.status = status
    async with following(api, credentials) as followed:
        await eventually(lambda: followed.num_failures >= 2)
        (credentials / "token").write_text("renewed")
        api.status = 200
        await followed.last(endpoints("10.0.0.1"))
        assert (api.tokens[0], api.tokens[-1]) == ("Bearer first", "Bearer renewed")


@pytest.mark.parametrize("line", [b"no json\n", b'{"type": 3}\n', b'{"type": "ADDED"}\n'])
async def test_nonsense_from_the_api_is_an_outage(
    api: FakeApi, credentials: Path, line: bytes
) -> None:
    api.items = [a_slice("a", endpoint("10.0.0.1"))]
    async with following(api, credentials) as followed:
        await eventually(lambda: bool(api.watches))
        for watch in list(api.watches):
            await watch.write(line)
        await eventually(lambda: followed.num_failures == 1)
        assert followed.seen[-1] == endpoints("10.0.0.1")


async def test_a_service_without_slices_changes_nothing(api: FakeApi, credentials: Path) -> None:
    async with following(api, credentials) as followed:
        await eventually(lambda: followed.num_failures == 1 and bool(api.watches))
        assert not followed.seen


async def test_slices_of_before_do_not_outlive_a_service_that_was_made_anew(
    api: FakeApi, credentials: Path
) -> None:
    api.items = [a_slice("a", endpoint("10.0.0.1"))]
    async with following(api, credentials) as followed:
        await eventually(lambda: bool(api.watches))
        api.items = []
        await api.send("ERROR", {"kind": "Status", "code": 410, "message": "too old"})
        await eventually(lambda: followed.num_failures == 1 and bool(api.watches))
        assert followed.seen == [endpoints("10.0.0.1")], "an empty answer changes nothing"
        await api.send("ADDED", a_slice("b", endpoint("10.0.0.2")))
        await eventually(lambda: len(followed.seen) == 2)
        assert followed.seen[-1] == endpoints("10.0.0.2")


async def test_an_authority_that_cannot_be_read_is_named(credentials: Path) -> None:
    (credentials / "ca.crt").write_text("no certificate")
    access = KubernetesAccess(url="https://127.0.0.1:1", credentials=credentials)
    with pytest.raises(ApiUnavailable, match=r"ca\.crt"):
        await EndpointSliceApi(access, "svc").list()


# Members ---------------------------------------------------------------------------------------


class Members:
    """A discovery of one service, whose endpoints the test tells."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.alive: set[str] = set()
        self.announced: list[set[str]] = []
        self.leaving: set[str] = set()
        self.discovery = Discovery(
            parse_node_list(PREFILL, "k8s://svc.ns:5"),
            self._take,
            lambda where: where.target in self.alive,
            lambda: None,
            interval_s=0.01,
            watch=self._watch,
            clock=self.clock,
        )
        self.tell: Any = None

    def _take(self, members: set[NodeAddress], leaving: set[NodeAddress]) -> None:
        self.announced.append({m.target for m in members})
        self.leaving = {m.target for m in leaving}

    async def _watch(self, service: str, on_endpoints: Any) -> None:
        assert service == "svc.ns"
        self.tell = on_endpoints
        await asyncio.Event().wait()


@pytest.fixture
async def members() -> AsyncIterator[Members]:
    found = Members()
    task = asyncio.create_task(found.discovery.run())
    await eventually(lambda: found.tell is not None)
    yield found
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_terminating_pod_is_leaving_at_once(members: Members) -> None:
    members.alive = {"10.0.0.1:5", "10.0.0.2:5"}
    members.tell(endpoints("10.0.0.1", "10.0.0.2"))
    assert (members.announced[-1], members.leaving) == (members.alive, set())
    members.tell(endpoints("10.0.0.1", terminating=("10.0.0.2",)))
    assert (members.announced[-1], members.leaving) == (members.alive, {"10.0.0.2:5"})
    members.alive = {"10.0.0.1:5"}
    members.clock.now += 1
    await eventually(lambda: members.announced[-1] == {"10.0.0.1:5"})
    assert not members.leaving


async def test_a_pod_that_vanished_but_reports_lingers(members: Members) -> None:
    members.tell(endpoints("10.0.0.1", "10.0.0.2"))
    members.clock.now += 1000
    members.alive = {"10.0.0.2:5"}
    members.tell(endpoints("10.0.0.1"))
    await eventually(lambda: members.announced[-1] == {"10.0.0.1:5", "10.0.0.2:5"})
    members.clock.now += 31
    await eventually(lambda: members.announced[-1] == {"10.0.0.1:5"})


def test_a_service_is_read() -> None:
    [entry] = parse_node_list(NodeRole.DECODE, "k8s://decode.llm:8101/9101")
    assert (entry.source, entry.host) == (NodeSource.KUBERNETES, "decode.llm")
    assert entry.address("10.0.0.7").status_target == "10.0.0.7:9101"


async def test_pods_of_a_service_serve(cluster: Cluster, api: FakeApi, credentials: Path) -> None:
    decode = await cluster.decode()
    http_port, status_port = decode.entry.removeprefix("127.0.0.1:").split("/")
    api.items = [a_slice("a", endpoint("127.0.0.1"))]
    router = await cluster.router(
        decode=f"k8s://decode.ns:{http_port}/{status_port}",
        kubernetes_url=api.url,
        kubernetes_credentials=credentials,
    )
    await router.wait_usable(decode=1, prefill=0)
    await router.text({"prompt": "x"})
    await api.send("MODIFIED", a_slice("a", endpoint("127.0.0.1", terminating=True)))
    await router.text({"prompt": "there is no other node"})
