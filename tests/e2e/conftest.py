"""Real clusters for tests: every process as an operator would start it.

`start_cluster(...)` gives a running `Cluster`; the test's end stops it and checks that no process
of it is left. `share_cluster(...)` is the same for all tests of a module: asked for the same nodes
again, it gives the cluster that runs already, as soon as that one is whole and empty.

All tests here run in one event loop, because a shared cluster's pipes belong to a loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from bench.serving.clusters.node_metrics import held, read_metrics
from cli.local_cluster.cluster import free_ports
from cli.local_cluster.supervisor import Listener, Service, ServiceSpec, ServiceState, Supervisor
from tests.processes import descendants, find_processes, is_alive

_HERE = Path(__file__).parent

START_TIMEOUT_S = 90.0
SETTLE_TIMEOUT_S = 40.0


@dataclass(slots=True)
class Node:
    """One node: how to reach it, and where it tells its metrics."""

    service: Service
    address: str
    metrics_url: str

    @property
    def pid(self) -> int:
        assert self.service.pid is not None
        return self.service.pid

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def grpc_address(self) -> str:
        """Returns where it serves load reports."""
        info = self.service.ready_info
        return str(info.get("grpc_address", info["address"]))


@dataclass(slots=True)
class Cluster:
    """Running services; `url` is the router's."""

    url: str
    supervisor: Supervisor
    prefills: list[Node] = field(default_factory=list)
    decodes: list[Node] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)

    @property
    def nodes(self) -> list[Node]:
        return [*self.prefills, *self.decodes]

    def pids(self) -> set[int]:
        """Returns the ids of every process of the cluster."""
        roots = [s.pid for s in self.supervisor.services if s.pid is not None]
        return {pid for root in roots for pid in {root} | descendants(root)}

    async def wait_log(self, service: str, words: str) -> str:
        """Returns the first line of that service's log with these words; logs come a little later
        than answers.
        """
        async with asyncio.timeout(SETTLE_TIMEOUT_S):
            while True:
                for line in self.logs:
                    if line.startswith(service) and words in line:
                        return line
                await asyncio.sleep(0.05)

    async def wait_whole(self) -> None:
        """Waits until every service is ready, the restarted ones too, and the router knows of all
        nodes.
        """
        async with asyncio.timeout(START_TIMEOUT_S):
            while any(s.state is not ServiceState.READY for s in self.supervisor.services):
                await asyncio.sleep(0.05)
        await _wait_routable(self)

    async def wait_empty(self) -> None:
        """Waits until every node has all blocks, rows and buffers back. Fails naming what
        is left.
        """
        left: list[str] = ["nothing asked yet"]
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S), aiohttp.ClientSession() as session:
                while left:
                    left = [text for node in self.nodes for text in await _left_over(session, node)]
                    if left:
                        await asyncio.sleep(0.1)
        except TimeoutError:
            pytest.fail(f"not empty after {SETTLE_TIMEOUT_S} s: {left}")


async def _left_over(session: aiohttp.ClientSession, node: Node) -> list[str]:
    name = node.service.spec.name
    try:
        left = held(await read_metrics(session, node.metrics_url))
    except aiohttp.ClientError as error:
        return [f"{name}: {error}"]
    return [f"{name} {key}={value}" for key, value in left.items()]


def find_process(root: int, pattern: str) -> int:
    """Returns the one descendant of `root` whose command line matches."""
    matches = find_processes(root, pattern)
    assert matches, f"no process below {root} matches {pattern}"
    return matches[0]


def _argv(module: str, *args: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *args)


def _node_args(model: Path, args: Iterable[str]) -> list[str]:
    """Returns flags of a node with a cache of 4096 blocks, if `args` do not say otherwise: to find
    out how many fit takes a worker a fifth of a second of work. `tandem up` does."""
    usual = ["--model", str(model), "--served-model-name", "demo", "--device", "cpu"]
    return [*usual, "--num-blocks", "4096", *args]


def _decode_args(model: Path, args: Iterable[str]) -> list[str]:
    """Returns flags of a node that computes no prompt itself because a prefill node was paused."""
    return _node_args(model, ["--handshake-timeout-s", "6", *args])


StartCluster = Callable[..., Awaitable[Cluster]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE) and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


class _Clusters:
    """All that were started; `stop` ends them."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._running: list[Cluster] = []

    async def start(
        self,
        prefill: int = 1,
        decode: int = 1,
        *,
        prefill_args: Iterable[str] = (),
        decode_args: Iterable[str] = (),
        router_args: Iterable[str] = (),
        each_prefill_args: Sequence[Iterable[str]] = (),
        each_decode_args: Sequence[Iterable[str]] = (),
        first_change_roles: bool = False,
    ) -> Cluster:
        """Starts it. `each_decode_args` has those of one decode node alone, in their order, as
        `each_prefill_args` has those of prefill nodes. `first_change_roles`: the first node of
        each tier is one that changes its role."""
        prefills = [[*prefill_args, *own] for own in each_prefill_args or [()] * prefill]
        decodes = [[*decode_args, *own] for own in each_decode_args or [()] * decode]
        cluster = _make_cluster(self._model, prefills, decodes, router_args, first_change_roles)
        self._running.append(cluster)
        async with asyncio.timeout(START_TIMEOUT_S):
            await cluster.supervisor.start()
        await _wait_routable(cluster)
        return cluster

    async def stop(self) -> None:
        await asyncio.gather(*(_stop_and_check(cluster) for cluster in self._running))


@pytest_asyncio.fixture(loop_scope="session")
async def start_cluster(demo_checkpoint: Path) -> AsyncIterator[StartCluster]:
    """Factory: `await start_cluster(prefill=1, decode=1, prefill_args=[...], ...)`."""
    clusters = _Clusters(demo_checkpoint)
    yield clusters.start
    await clusters.stop()


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def share_cluster(demo_checkpoint: Path) -> AsyncIterator[StartCluster]:
    """Shares the factory; equal arguments give the same cluster."""
    clusters = _Clusters(demo_checkpoint)
    known: dict[str, Cluster] = {}

    async def share(**wanted: Any) -> Cluster:
        name = repr(sorted(wanted.items()))
        if name not in known:
            known[name] = await clusters.start(**wanted)
        await known[name].wait_whole()
        await known[name].wait_empty()
        return known[name]

    yield share
    await clusters.stop()


def _role_node(
    model: Path, role: str, args: Iterable[str], port: int, grpc_port: int, metrics_port: int
) -> tuple[str, ...]:
    ports = ("--port", port, "--grpc-port", grpc_port, "--metrics-port", metrics_port)
    return _argv("role_node", *_decode_args(model, args), "--role", role, *map(str, ports))


def _make_cluster(
    model: Path,
    each_prefill_args: Sequence[Iterable[str]],
    each_decode_args: Sequence[Iterable[str]],
    router_args: Iterable[str],
    first_change_roles: bool,
) -> Cluster:
    logs: list[str] = []
    listener = Listener(on_log=lambda service, line: logs.append(f"{service.spec.name}: {line}"))
    specs: list[ServiceSpec] = []
    addresses: list[tuple[str, str]] = []
    for i, prefill_args in enumerate(each_prefill_args):
        port, metrics_port = free_ports(2)
        ports = ("--port", str(port), "--metrics-port", str(metrics_port))
        argv = _argv("prefill_node", *_node_args(model, prefill_args), *ports)
        if first_change_roles and i == 0:
            argv = _role_node(model, "prefill", prefill_args, *free_ports(1), port, metrics_port)
        specs.append(ServiceSpec(f"prefill-{i}", argv, f"127.0.0.1:{port}", stop_stage=2))
        addresses.append((f"127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}/metrics"))
    decode_targets = []
    for i, decode_args in enumerate(each_decode_args):
        port, grpc_port = free_ports(2)
        ports = ("--port", str(port), "--grpc-port", str(grpc_port))
        argv, metrics_port = _argv("decode_node", *_decode_args(model, decode_args), *ports), port
        if first_change_roles and i == 0:
            (metrics_port,) = free_ports(1)
            argv = _role_node(model, "decode", decode_args, port, grpc_port, metrics_port)
        specs.append(ServiceSpec(f"decode-{i}", argv, f"127.0.0.1:{port}", stop_stage=1))
        addresses.append((f"127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}/metrics"))
        decode_targets.append(f"127.0.0.1:{port}/{grpc_port}")
    (router_port,) = free_ports(1)
    prefill = len(each_prefill_args)
    prefill_targets = [address for address, _ in addresses[:prefill]]
    router = _argv(
        "router", "--port", str(router_port), "--decode", ",".join(decode_targets),
        *(["--prefill", ",".join(prefill_targets)] if prefill_targets else []), *router_args,
    )  # fmt: skip
    specs.insert(0, ServiceSpec("router", router, f"http://127.0.0.1:{router_port}"))
    supervisor = Supervisor(specs, listener, max_pause_s=0.5)
    nodes = [
        Node(service, address, metrics_url)
        for service, (address, metrics_url) in zip(supervisor.services[1:], addresses, strict=True)
    ]
    return Cluster(specs[0].endpoint, supervisor, nodes[:prefill], nodes[prefill:], logs)


async def _wait_routable(cluster: Cluster) -> None:
    """Waits until the router has seen a report of every node."""
    wanted = (len(cluster.prefills), len(cluster.decodes))
    async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{cluster.url}/ready") as response:
                known = await response.json()
            if (known["prefill_nodes"], known["decode_nodes"]) == wanted:
                return
            await asyncio.sleep(0.05)


async def _stop_and_check(cluster: Cluster) -> None:
    pids = cluster.pids()
    await cluster.supervisor.stop()
    async with asyncio.timeout(30):
        while left := [pid for pid in pids if is_alive(pid)]:
            await asyncio.sleep(0.05)
    assert not left


@dataclass(slots=True)
class Completion:
    """The result of one streamed completion, with the text of each choice."""

    texts: dict[int, str] = field(default_factory=dict)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timeline: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    status: int = 0
    num_events: int = 0

    @property
    def text(self) -> str:
        """Returns the texts of all choices, one after the other."""
        return "\n".join(self.texts[index] for index in sorted(self.texts))


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=100)) as session:
        yield session


Complete = Callable[..., Awaitable[Completion]]


@pytest.fixture(scope="module")
def complete(http: aiohttp.ClientSession) -> Complete:
    """Streams a completion: `await complete(url, prompt=..., max_tokens=..., headers=...,
    on_event=...)`."""

    async def call(
        url: str,
        *,
        headers: dict[str, str] | None = None,
        on_event: Callable[[int], None] | None = None,
        **body: Any,
    ) -> Completion:
        import json

        request = {
            "model": "demo",
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        result = Completion()
        headers = {"x-tandem-timeline": "1", **(headers or {})}
        async with http.post(f"{url}/v1/completions", json=request, headers=headers) as response:
            result.status = response.status
            if response.status != 200:
                result.error = (await response.json())["error"]
                return result
            async for line in response.content:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[6:])
                result.error = event.get("error", result.error)
                result.usage = event.get("usage") or result.usage
                result.timeline = event.get("timeline") or result.timeline
                for choice in event.get("choices", []):
                    before = result.texts.get(choice["index"], "")
                    result.texts[choice["index"]] = before + choice["text"]
                    result.finish_reason = choice["finish_reason"] or result.finish_reason
                result.num_events += 1
                if on_event is not None:
                    on_event(result.num_events)
        return result

    return call


@pytest.fixture
def router_metrics() -> Callable[..., Awaitable[dict[str, float]]]:
    """Reads metrics: `await router_metrics(http, cluster.url)` gives name to value, summed over
    labels."""

    async def read(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
        return await read_metrics(session, f"{url}/metrics")

    return read


@pytest.fixture
def find() -> Callable[[int, str], int]:
    return find_process
