"""Two prefill and two decode nodes behind a router: many clients, clients that leave, and every
kind of process killed, drained and hung under load. One prefill node has two pipeline stages.

As long as one node of a tier lives no request notices; afterwards everything is back, and dead
services run again.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import openai
import pytest
import pytest_asyncio

from tandem_pb import node_pb2, node_pb2_grpc
from tests.processes import find_processes

REMOTE = ["--local-prefill-threshold", "0"]
STAGES = ("--pipeline-parallel-size", "2")
PATIENCE = ["--stale-after-s", "2", "--down-after-s", "4"]
WORKER, CORE, TRANSFER = (
    "engine.executor.worker_proc",
    "engine.core.core_proc",
    "kv_transfer.control.process",
)


def body(i: int) -> dict[str, Any]:
    """Request `i`: always the same, and different from the others from its first token on. Every
    fourth is for three choices."""
    rng = random.Random(i)
    length = rng.choice([3, 16, 33, 120, 300])
    return {
        "prompt": [10 + i, *(rng.randrange(10, 400) for _ in range(length))],
        "max_tokens": rng.choice([1, 2, 8, 30]),
        "temperature": rng.choice([0.0, 0.8]),
        "seed": i,
        "ignore_eos": True,
        "n": 3 if i % 4 == 3 else 1,
    }


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(share_cluster: Any) -> Any:
    return await share_cluster(
        each_prefill_args=[(), STAGES],
        decode=2,
        decode_args=REMOTE,
        router_args=PATIENCE,
        first_change_roles=True,
    )


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def expected(share_cluster: Any, complete: Any) -> list[str]:
    """Returns the answers of one node to requests 0 to 49."""
    single = await share_cluster(prefill=0, decode=1)
    results = await asyncio.gather(*(complete(single.decodes[0].url, **body(i)) for i in range(50)))
    assert all(r.error is None for r in results)
    return [r.text for r in results]


BEAMS = [
    {
        "prompt": body(i)["prompt"],
        "use_beam_search": True,
        "best_of": 4,
        "n": 2,
        "max_tokens": 20,
        "ignore_eos": True,
    }
    for i in (1, 2, 6)
]


async def searched(http: aiohttp.ClientSession, url: str) -> list[list[str]]:
    """Returns the answers of all beam searches, which no stream brings."""

    async def ask(wish: dict[str, Any]) -> list[str]:
        async with http.post(f"{url}/v1/completions", json=wish) as response:
            answer = await response.json()
        assert response.status == 200, answer
        return [choice["text"] for choice in answer["choices"]]

    return await asyncio.gather(*map(ask, BEAMS))


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def expected_beams(share_cluster: Any, http: aiohttp.ClientSession) -> list[list[str]]:
    """Returns what one node finds."""
    single = await share_cluster(prefill=0, decode=1)
    return await searched(http, single.decodes[0].url)


class Load:
    """Requests 0 to `count - 1`, all at once."""

    def __init__(self, complete: Any, url: str, count: int) -> None:
        self._complete = complete
        self._url = url
        self._started = asyncio.Event()
        self.tasks = self._ask(count)

    def _ask(self, count: int) -> list[asyncio.Task[Any]]:
        return [
            asyncio.create_task(
                self._complete(self._url, on_event=lambda _: self._started.set(), **body(i))
            )
            for i in range(count)
        ]

    async def under_way(self) -> None:
        """Waits until some answers have begun and some are still to come. Where this process comes
        to look when all have ended, all is asked again."""
        async with asyncio.timeout(60):
            await self._started.wait()
            while all(task.done() for task in self.tasks):
                self._started.clear()
                self.tasks = self._ask(len(self.tasks))
                await self._started.wait()

    async def results(self) -> list[Any]:
        async with asyncio.timeout(100):
            return await asyncio.gather(*self.tasks)


# Load ------------------------------------------------------------------------------------------


@pytest.mark.e2e
async def test_fifty_streams_of_the_official_client_equal_one_node(
    cluster: Any, expected: list[str]
) -> None:
    async def text_of(client: openai.AsyncOpenAI, i: int) -> str:
        wish = body(i)
        stream = await client.completions.create(
            model="demo", stream=True, extra_body={"ignore_eos": wish.pop("ignore_eos")}, **wish
        )
        texts = [""] * wish["n"]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        return "\n".join(texts)

    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        texts = await asyncio.gather(*(text_of(client, i) for i in range(50)))
    assert texts == expected
    await cluster.wait_empty()


async def call_or_leave(complete: Any, url: str, i: int) -> str | None:
    """Returns the text, or None when the client went away in the middle."""
    rng = random.Random(i)
    task = asyncio.create_task(complete(url, **body(i)))
    if rng.random() < 0.3:
        await asyncio.wait({task}, timeout=rng.random() * 2.0)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            return None
    result = await task
    assert result.error is None, result.error
    assert result.usage["completion_tokens"] == body(i)["n"] * body(i)["max_tokens"]
    return str(result.text)


@pytest.mark.e2e
async def test_two_hundred_requests_with_random_aborts_leave_nothing(
    cluster: Any, complete: Any, expected: list[str]
) -> None:
    texts = await asyncio.gather(*(call_or_leave(complete, cluster.url, i) for i in range(200)))
    assert sum(text is not None for text in texts) >= 100
    assert all(a in (None, b) for a, b in zip(texts[:50], expected, strict=True))
    await cluster.wait_empty()


@pytest.mark.e2e
async def test_no_shared_memory_has_a_name(cluster: Any) -> None:
    """A process that is killed would leave behind what has one."""
    maps = [Path(f"/proc/{pid}/maps").read_text().splitlines() for pid in cluster.pids()]
    paths = {line.split(maxsplit=5)[-1] for lines in maps for line in lines}
    assert any(path.startswith("/memfd:") for path in paths), "which is how they share it"
    names = [path for path in paths if path.startswith("/dev/shm/")]
    assert not [name for name in names if "tandem" in name or "psm_" in name or "torch" in name]


# Deaths that nobody notices --------------------------------------------------------------------


class Victim:
    """A process of a node: `strike` it, then wait until its node is `back`."""

    def __init__(self, node: Any, pid: int, *, node_dies: bool = True) -> None:
        self.pid = pid
        self._service = node.service
        self._restarts = node.service.restarts + node_dies

    def strike(self, signum: int = signal.SIGKILL) -> None:
        os.kill(self.pid, signum)

    async def back(self) -> None:
        async with asyncio.timeout(60):
            while self._service.restarts < self._restarts:
                await asyncio.sleep(0.05)


@pytest.fixture
def victim(cluster: Any) -> Any:
    """Finds a process, as `victim("prefill", 0, WORKER)`: of stages it is the last one. None stands
    for the node's server."""

    def choose(tier: str, index: int, pattern: str | None = None) -> Victim:
        node = (cluster.prefills if tier == "prefill" else cluster.decodes)[index]
        pid = node.pid if pattern is None else find_processes(node.pid, pattern)[-1]
        return Victim(node, pid, node_dies=pattern != TRANSFER)

    return choose


async def recovered(cluster: Any, victims: list[Victim]) -> None:
    """Processes that died run again, and everything is back."""
    for each in victims:
        await each.back()
    await cluster.wait_whole()
    await cluster.wait_empty()


@pytest.mark.e2e
@pytest.mark.parametrize(
    "names",
    [
        [("prefill", 0)],
        [("prefill", 1, WORKER), ("decode", 0, TRANSFER)],
        [("prefill", 0, CORE), ("prefill", 1, TRANSFER), ("decode", 1, TRANSFER)],
        [("prefill", 0), ("prefill", 1)],
    ],
    ids=["server", "stage and transfer", "core and transfers", "all prefill nodes"],
)
async def test_no_request_notices(
    cluster: Any,
    complete: Any,
    http: aiohttp.ClientSession,
    expected: list[str],
    expected_beams: list[list[str]],
    victim: Any,
    names: list[Any],
) -> None:
    load = Load(complete, cluster.url, 24)
    beams = asyncio.create_task(searched(http, cluster.url))
    await load.under_way()
    victims = [victim(*name) for name in names]
    for each in victims:
        each.strike()
    results = await load.results()
    assert [r.error for r in results] == [None] * 24
    assert [r.text for r in results] == expected[:24]
    assert await beams == expected_beams
    await recovered(cluster, victims)


@pytest.mark.e2e
async def test_a_node_of_each_tier_drains_and_no_request_notices(
    cluster: Any, complete: Any, expected: list[str], victim: Any
) -> None:
    load = Load(complete, cluster.url, 24)
    await load.under_way()
    victims = [victim("prefill", 1), victim("decode", 1)]
    for each in victims:
        each.strike(signal.SIGTERM)
    results = await load.results()
    assert [r.error for r in results] == [None] * 24
    assert [r.text for r in results] == expected[:24]
    await recovered(cluster, victims)


# Nodes that change their role --------------------------------------------------------------------


async def change_role(node: Any, to: str) -> None:
    """Asks a node; returns when it has begun to drain."""
    async with grpc.aio.insecure_channel(node.grpc_address) as channel:
        role = node_pb2.NodeRole.Value(f"NODE_ROLE_{to.upper()}")
        wish = node_pb2.SwitchRoleRequest(role=role, drain_timeout_s=0.1)
        await node_pb2_grpc.NodeStatusStub(channel).SwitchRole(wish)  # type: ignore[no-untyped-call]


async def until_tiers(cluster: Any, http: Any, prefill: int, decode: int) -> None:
    """Waits until the router would use so many nodes of each tier."""
    async with asyncio.timeout(60):
        while True:
            async with http.get(f"{cluster.url}/ready") as response:
                known = await response.json()
            if (known["prefill_nodes"], known["decode_nodes"]) == (prefill, decode):
                return
            await asyncio.sleep(0.05)


@pytest.mark.e2e
async def test_nodes_change_their_roles_and_back_and_no_request_notices(
    cluster: Any, complete: Any, http: Any, expected: list[str]
) -> None:
    """Answers of the decode node that changes go on elsewhere. Workers stay who they were. A node
    that is killed while it changes is what its command line says."""
    first_prefill, first_decode = cluster.prefills[0], cluster.decodes[0]
    workers = {node.pid: find_processes(node.pid, WORKER) for node in (first_prefill, first_decode)}
    for node, to, tiers in ((first_prefill, "decode", (1, 3)), (first_decode, "prefill", (2, 2))):
        load = Load(complete, cluster.url, 24)
        await load.under_way()
        await change_role(node, to)
        await until_tiers(cluster, http, *tiers)
        check_whole(await load.results(), expected)
    assert {pid: find_processes(pid, WORKER) for pid in workers} == workers
    load = Load(complete, cluster.url, 24)
    await load.under_way()
    await change_role(first_prefill, "prefill")
    await change_role(first_decode, "decode")
    dying = Victim(first_decode, first_decode.pid)
    dying.strike()
    check_whole(await load.results(), expected)
    await recovered(cluster, [dying])
    assert find_processes(first_prefill.pid, WORKER) == workers[first_prefill.pid]
    check_whole(await Load(complete, cluster.url, 8).results(), expected)


# Deaths of decode nodes, and of the router -----------------------------------------------------


def check_whole(results: list[Any], expected: list[str]) -> None:
    assert [r.error for r in results] == [None] * len(results)
    assert [r.text for r in results] == expected[: len(results)]


@pytest.mark.e2e
@pytest.mark.parametrize("name", [("decode", 0, WORKER), ("decode", 1, CORE), ("decode", 0)])
async def test_a_decode_node_dies_and_the_other_goes_on(
    cluster: Any, complete: Any, expected: list[str], victim: Any, name: Any
) -> None:
    load = Load(complete, cluster.url, 24)
    await load.under_way()
    dying = victim(*name)
    dying.strike()
    check_whole(await load.results(), expected)
    await recovered(cluster, [dying])


@pytest.mark.e2e
async def test_hung_nodes_are_given_up(
    cluster: Any, complete: Any, expected: list[str], victim: Any
) -> None:
    """Their processes stand still; their connections stay open."""
    load = Load(complete, cluster.url, 24)
    await load.under_way()
    hung = [victim("prefill", 0), victim("decode", 0)]
    for each in hung:
        each.strike(signal.SIGSTOP)
    try:
        async with asyncio.timeout(45):
            check_whole(await load.results(), expected)
    finally:
        for each in hung:
            each.strike()
    await recovered(cluster, hung)


@pytest.mark.e2e
async def test_all_decode_nodes_and_then_the_router_die(
    cluster: Any, complete: Any, expected: list[str], victim: Any
) -> None:
    load = Load(complete, cluster.url, 12)
    await load.under_way()
    victims = [victim("decode", 0), victim("decode", 1)]
    for each in victims:
        each.strike()
    for result in await load.results():
        assert result.error is None or result.error["message"]
        assert result.status in (200, 503)
    await recovered(cluster, victims)
    load = Load(complete, cluster.url, 12)
    await load.under_way()
    router = cluster.supervisor.services[0]
    os.kill(router.pid, signal.SIGKILL)
    await asyncio.gather(*load.tasks, return_exceptions=True)
    async with asyncio.timeout(60):
        while not router.restarts:
            await asyncio.sleep(0.05)
    await cluster.wait_whole()
    await cluster.wait_empty()
    results = await Load(complete, cluster.url, 12).results()
    assert [r.text for r in results] == expected[:12]
