"""The chart's pods as processes: what an operator does to a cluster that serves.

One cluster for all tests of this file, in their order: a release with a router, two prefill nodes
and a decode node, booted from the last release's chart alone. They begin with a token alone; on the
way an upgrade brings the tree's chart and turns TLS on, by certificates that the chart makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import pytest
import pytest_asyncio

from release import project
from tests.helm.releases.helm_release import CliRelease, Release
from tests.helm.releases.load import Load, body, stream
from tests.helm.releases.test_upgrade_from_release import NEWEST
from tests.kubernetes_stand_in.cluster import Cluster
from tests.kubernetes_stand_in.dns_server import may_serve
from tests.kubernetes_stand_in.pod_files import TOKEN_FOLDER
from tests.kubernetes_stand_in.resources import Object
from tests.processes import is_alive

Tls: TypeAlias = dict[str, Any]

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

_NUM_REQUESTS = 8
START_S = 90.0
LONG_WISHES = [body(i, max_tokens=250) for i in range(4)]
"""During these answers there is time to do something."""


NO_TLS: Tls = {"mode": "none"}
EITHER: Tls = {"mode": "generated", "acceptMissing": True}
TLS: Tls = {"mode": "generated"}


def values(
    cluster: Cluster, tls: Tls = NO_TLS, discovery: str = "kubernetes", **replicas: int
) -> dict[str, Any]:
    """Returns values of small nodes on CPU that are asked often how they are."""
    often = {"readiness": {"periodSeconds": 1}}
    drain = {"preStopSeconds": 1, "drainSeconds": 20, "teardownSeconds": 5}
    return {
        "model": {
            "servedName": "demo",
            "storage": {
                "type": "hostPath",
                "path": "demo_checkpoint",
                "hostPath": {"path": str(Path(__file__).parents[3] / "cli")},
            },
        },
        "tierDefaults": {
            "gpu": {"enabled": False},
            "settings": {"maxNumSeqs": 16, "numBlocks": 512},
            "probes": {"startup": {"budgetSeconds": 90, "periodSeconds": 1}, **often},
            "drain": drain,
        },
        "prefill": {"replicas": replicas.get("prefill", 1)},
        "decode": {"replicas": replicas.get("decode", 1)},
        "router": {
            "replicas": replicas.get("router", 1),
            "probes": often,
            "drain": drain,
            "discovery": {"type": discovery},
            "settings": {
                "dnsIntervalS": 0.25,
                "kubernetesUrl": f"https://127.0.0.1:{cluster.api.tls_port}",
                "kubernetesCredentials": TOKEN_FOLDER,
            },
            "service": {"port": 8000},
        },
        "tls": tls,
    }


@dataclass
class Serving:
    """An installed release. `expected`: what it answers to requests 0, 1, …, and to long ones."""

    cluster: Cluster
    release: Release
    url: str
    expected: list[str] = field(default_factory=list)
    long_expected: list[str] = field(default_factory=list)

    async def wait_known(self, **nodes: int) -> None:
        """Waits until the router uses so many nodes of each tier. While it is not ready, nobody
        answers.
        """
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{self.url}/ready") as response:
                        known = await response.json()
                    if all(known[f"{tier}_nodes"] == count for tier, count in nodes.items()):
                        return
                await asyncio.sleep(0.05)

    async def begin_long_answers(self) -> tuple[Object, list[asyncio.Task[str]]]:
        """Returns a decode pod, and answers that have begun, some of them there."""
        if not self.long_expected:
            calls = (stream(self.url, wish) for wish in LONG_WISHES)
            self.long_expected = await asyncio.gather(*calls)
        begun = [asyncio.Event() for _ in LONG_WISHES]
        answers = [
            asyncio.create_task(stream(self.url, wish, event))
            for wish, event in zip(LONG_WISHES, begun, strict=True)
        ]
        async with asyncio.timeout(START_S):
            await asyncio.gather(*(event.wait() for event in begun))
            running = {
                await num_open(pod["status"]["podIP"]): pod for pod in self.cluster.pods("decode")
            }
        assert max(running) > 0, "no answer is under way"
        return running[max(running)], answers


async def num_open(address: str) -> float:
    """Returns the requests that a decode node is answering."""
    [count] = await scraped(address, "tandem_open_requests")
    return count


async def scraped(address: str, pattern: str) -> list[float]:
    """Returns the samples of a node whose names match."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{address}:8101/metrics") as response,
    ):
        text = await response.text()
    found = re.findall(rf"^(?:{pattern})(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return [float(value) for value in found]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    folder = tmp_path_factory.mktemp("cluster")
    async with Cluster.real(folder) as cluster:
        release = CliRelease(cluster, folder)
        try:
            await release.install(values(cluster, prefill=2), wait_s=0, chart=NEWEST)
            await cluster.wait_ready(START_S, router=1, prefill=2, decode=1)
            service = cluster.get("Service", "tandem-router")["spec"]
            url = f"http://{service['clusterIP']}:{service['ports'][0]['port']}"
            serving = Serving(cluster, release, url)
            await serving.wait_known(prefill=2, decode=1)
            wishes = (stream(url, body(i)) for i in range(_NUM_REQUESTS))
            serving.expected += await asyncio.gather(*wishes)
            yield serving
        finally:
            print(cluster.kubelet.logs())  # shown if a test fails
            pids = cluster.kubelet.pids()
    assert not [pid for pid in pids if is_alive(pid)]


async def test_a_prompt_goes_through_both_tiers(serving: Serving) -> None:
    """The release's own test says so, in a pod of its own."""
    await serving.release.test()


async def test_scaling_each_tier_under_load_loses_nothing(serving: Serving) -> None:
    """The test adds a decode node, one prefill node less; what stays is not touched."""
    cluster = serving.cluster
    before = {name: cluster.uids(name) for name in ("router", "prefill", "decode")}
    async with Load(serving.url, serving.expected) as load:
        cluster.scale("Deployment", "tandem-decode", 2)
        cluster.scale("Deployment", "tandem-prefill", 1)
        await cluster.wait_ready(START_S, router=1, prefill=1, decode=2)
        await serving.wait_known(prefill=1, decode=2)
        await load.answers(10)
    assert not load.faults
    assert cluster.uids("router") == before["router"]
    assert cluster.uids("decode") > before["decode"]
    assert cluster.uids("prefill") < before["prefill"]


async def test_turning_tls_on_rolls_everything_under_load_and_loses_nothing(
    serving: Serving,
) -> None:
    """It begins when a decode pod was just deleted in the middle of its answers, and is the upgrade
    from the last release's chart. The new router finds the nodes by DNS, where there is one."""
    assert chart_label(serving) == NEWEST.stem
    pod, answers = await serving.begin_long_answers()
    serving.cluster.delete_pod(pod)
    async with Load(serving.url, serving.expected) as load:
        await roll(serving, EITHER)
        assert await asyncio.gather(*answers) == serving.long_expected
        before = await plaintext_connections(serving)
        assert len(before) == 3
        await load.answers(10)
        assert await plaintext_connections(serving) == before, "not all pods speak TLS"
    assert not load.faults
    assert chart_label(serving) == f"tandem-{project()['version']}"


async def test_turning_plaintext_off_under_load_loses_nothing(serving: Serving) -> None:
    async with Load(serving.url, serving.expected) as load:
        await roll(serving, TLS)
        await load.answers(10)
    assert not load.faults
    assert not await plaintext_connections(serving)
    async with aiohttp.ClientSession() as session:
        for pod in serving.cluster.pods("decode"):
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"http://{pod['status']['podIP']}:8100/health")
    await serving.release.test()


def chart_label(serving: Serving) -> str:
    """Returns the chart that the running objects came with."""
    labels = serving.cluster.get("Deployment", "tandem-decode")["metadata"]["labels"]
    return str(labels["helm.sh/chart"])


async def roll(serving: Serving, tls: Tls) -> None:
    """Upgrades, and waits until every pod is a new one."""
    cluster = serving.cluster
    before = {name: cluster.uids(name) for name in ("router", "prefill", "decode")}
    discovery = "dns" if may_serve() else "kubernetes"
    await serving.release.upgrade(values(cluster, tls, discovery, decode=2), wait_s=0)
    await cluster.wait(lambda: not before["decode"] & cluster.uids("decode"), START_S)
    await cluster.wait_ready(START_S, router=1, prefill=1, decode=2)
    await cluster.wait(
        lambda: not any(uids & cluster.uids(name) for name, uids in before.items()), START_S
    )


async def plaintext_connections(serving: Serving) -> dict[str, list[float]]:
    """Returns what nodes count that accept them, by address: of the node's ports, and of KV."""
    addresses = [
        pod["status"]["podIP"]
        for tier in ("prefill", "decode")
        for pod in serving.cluster.pods(tier)
    ]
    name = "tandem_plaintext_connections_total"
    accept = {one: await scraped(one, name) for one in addresses}
    return {
        one: counts + await scraped(one, "tandem_kv_transfer_plaintext_connections")
        for one, counts in accept.items()
        if counts
    }


async def test_losing_a_pod_of_each_tier_under_load_loses_nothing(serving: Serving) -> None:
    """Answers of the lost decode node go on at the other one, which computes prompts itself until
    there is a prefill node again."""
    await serving.wait_known(prefill=1, decode=2)
    pod, answers = await serving.begin_long_answers()
    async with Load(serving.url, serving.expected) as load:
        serving.cluster.lose_pod(serving.cluster.pods("prefill")[0])
        serving.cluster.lose_pod(pod)
        assert await asyncio.gather(*answers) == serving.long_expected
        await load.answers(10)
    assert not load.faults


async def test_uninstall_stops_everything(serving: Serving) -> None:
    pids = serving.cluster.kubelet.pids()
    await serving.release.uninstall()
    await serving.cluster.wait(lambda: not serving.cluster.objects("Pod"), timeout_s=30)
    assert not [pid for pid in pids if is_alive(pid)]
    kinds = {obj["kind"] for obj in serving.cluster.store.all()}
    assert kinds == {"Namespace", "Node"}
