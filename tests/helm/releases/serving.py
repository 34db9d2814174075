"""A release whose pods are processes: what it is made of, and how it goes on from one state to the
next."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp

from tests.helm.releases.helm_release import Release
from tests.helm.releases.load import body, stream
from tests.kubernetes_stand_in.cluster import Cluster
from tests.kubernetes_stand_in.dns_server import may_serve
from tests.kubernetes_stand_in.pod_files import TOKEN_FOLDER
from tests.kubernetes_stand_in.resources import Object

Tls: TypeAlias = dict[str, Any]

START_S = 90.0
LONG_WISHES = [body(i, max_tokens=250) for i in range(4)]
"""During these answers there is time to do something."""


NO_TLS: Tls = {"mode": "none"}
EITHER: Tls = {"mode": "generated", "acceptMissing": True}
TLS: Tls = {"mode": "generated"}
STAGES = [NO_TLS, EITHER, TLS]
"""In the order in which a cluster may go on from one to the next."""


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
    tls: Tls = field(default_factory=NO_TLS.copy)

    async def reach(self, tls: Tls) -> None:
        """Goes on to `tls`, with a prefill node and two decode nodes. Behind the other tests all is
        so already."""
        if self.tls == NO_TLS and len(self.cluster.pods("decode")) < 2:
            self.cluster.scale("Deployment", "tandem-decode", 2)
            self.cluster.scale("Deployment", "tandem-prefill", 1)
            await self.cluster.wait_ready(START_S, router=1, prefill=1, decode=2)
        for stage in STAGES[STAGES.index(self.tls) + 1 : STAGES.index(tls) + 1]:
            await self.roll(stage)
        await self.wait_known(prefill=1, decode=2)

    async def roll(self, tls: Tls) -> None:
        """Upgrades, and waits until every pod is a new one."""
        cluster = self.cluster
        before = {name: cluster.uids(name) for name in ("router", "prefill", "decode")}
        discovery = "dns" if may_serve() else "kubernetes"
        await self.release.upgrade(values(cluster, tls, discovery, decode=2), wait_s=0)
        await cluster.wait(lambda: not before["decode"] & cluster.uids("decode"), START_S)
        await cluster.wait_ready(START_S, router=1, prefill=1, decode=2)
        await cluster.wait(
            lambda: not any(uids & cluster.uids(name) for name, uids in before.items()), START_S
        )
        self.tls = tls

    async def spread_decodes(self) -> None:
        """Leaves a decode node on each of two hosts. Behind an upgrade both may be on one: the
        second has come when only the first was not going."""
        cluster = self.cluster
        hosts = {pod["spec"]["nodeName"] for pod in cluster.pods("decode")}
        if len(hosts) == 1:
            going = cluster.pods("decode")[0]
            cluster.delete_pod(going)
            await cluster.wait(
                lambda: going["metadata"]["uid"] not in cluster.uids("decode"), START_S
            )
            await cluster.wait_ready(START_S, decode=2)
            await self.wait_known(prefill=1, decode=2)

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
        answers: list[asyncio.Task[str]] = []
        async with asyncio.timeout(START_S):
            while True:
                begun = [asyncio.Event() for _ in LONG_WISHES]
                answers += [
                    asyncio.create_task(stream(self.url, wish, event))
                    for wish, event in zip(LONG_WISHES, begun, strict=True)
                ]
                await asyncio.gather(*(event.wait() for event in begun))
                # Nodes may have given all answers before this process came to look.
                for pod in self.cluster.pods("decode"):
                    if await num_open(pod["status"]["podIP"]) > 0:
                        return pod, answers

    async def check_long(self, answers: list[asyncio.Task[str]]) -> None:
        """Waits for the answers of `begin_long_answers`, which must be whole."""
        rounds = len(answers) // len(LONG_WISHES)
        assert await asyncio.gather(*answers) == self.long_expected * rounds


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
