"""TLS is turned on in a cluster of processes under load: releases replace each other node by node,
and no client notices."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from edge.security.config import Role
from router.config import RouterSettings
from tests.decode_node.node_processes import NodeProcess, node_process
from tests.router.cluster import RunningRouter, eventually, run_router
from tests.security.authority import Authority

COUNTS = re.compile(r"^tandem_(?:kv_transfer_)?plaintext_connections\S* ([0-9.e+]+)$", re.MULTILINE)
PROMPTS = [f"Ada number {number} " * 12 for number in range(12)]
"""Each is long enough to be computed by a prefill node, so that its KV is pulled."""


@dataclass
class Release:
    """Settings of one step of the roll; its nodes and its router."""

    flags: dict[Role, dict[str, str | bool]]
    nodes: list[NodeProcess] = field(default_factory=list)

    async def start(self, stack: AsyncExitStack, checkpoint: Path) -> None:
        for role in (Role.PREFILL, Role.DECODE):
            flags = [
                f"--{name.replace('_', '-')}" + (f"={value}" if value is not True else "")
                for name, value in self.flags[role].items()
            ]
            node = node_process(
                f"{role}_node",
                checkpoint,
                *flags,
                "--served-model-name=demo",
                "--metrics-port=0",
            )
            self.nodes.append(await stack.enter_async_context(node))
        await asyncio.gather(*(node.wait_ready() for node in self.nodes))

    async def stop(self) -> None:
        for node in self.nodes:
            node.process.terminate()
        assert [await node.exit_code() for node in self.nodes] == [0, 0]

    @property
    def prefill(self) -> str:
        return str(self.nodes[0].ready["address"])

    @property
    def decode(self) -> str:
        ready = self.nodes[1].ready
        return f"{ready['address']}/{ready['grpc_address'].rpartition(':')[2]}"


def releases(authority: Authority) -> list[Release]:
    """Plaintext; TLS that may be missing; TLS."""
    files: dict[Role, dict[str, str | bool]] = {}
    for role in Role:
        folder = authority.service(role.value, role, ("10.9.9.9",))
        files[role] = {
            "tls_cert_file": str(folder / "tls.crt"),
            "tls_key_file": str(folder / "tls.key"),
            "tls_ca_file": str(folder / "ca.crt"),
            "tls_identity": "role",
        }
    either = {role: {**flags, "accept_missing_tls": True} for role, flags in files.items()}
    return [Release({role: {} for role in Role}), Release(either), Release(files)]


@asynccontextmanager
async def router_of(release: Release, known: list[Release]) -> AsyncIterator[RunningRouter]:
    """A router of this release, in front of the nodes of the known ones."""
    flags: dict[str, Any] = release.flags[Role.ROUTER]
    settings = RouterSettings(
        port=0,
        prefill=",".join(one.prefill for one in known),
        decode=",".join(one.decode for one in known),
        **flags,
    )
    async with run_router(settings) as router:
        await router.wait_usable(decode=len(known), prefill=len(known))
        yield router


@dataclass
class Load:
    """Asks without a pause; every answer must be whole and right."""

    routers: list[RunningRouter] = field(default_factory=list)
    answers: dict[str, set[str]] = field(default_factory=dict)
    num_answers: int = 0
    _numbers: Any = field(default_factory=itertools.count)

    async def run(self) -> None:
        while True:
            number = next(self._numbers)
            prompt = PROMPTS[number // 2 % len(PROMPTS)]
            router = self.routers[number % len(self.routers)]
            body = {"model": "demo", "prompt": prompt, "max_tokens": 6, "temperature": 0}
            async with router.post(body) as answer:
                found = await answer.json()
                assert answer.status == 200, found
            self.answers.setdefault(prompt, set()).add(found["choices"][0]["text"])
            self.num_answers += 1

    async def goes_on(self, worker: asyncio.Task[None], count: int = 16) -> None:
        until = self.num_answers + count
        await eventually(lambda: worker.done() or self.num_answers >= until)
        if worker.done():
            await worker


@pytest.mark.e2e
async def test_a_roll_under_load_loses_nothing(authority: Authority, demo_checkpoint: Path) -> None:
    plain, either, tls = releases(authority)
    load = Load()
    async with AsyncExitStack() as stack, aiohttp.ClientSession() as client:
        # All at once: a start is mostly waiting. The last release only serves from its turn on.
        await asyncio.gather(*(one.start(stack, demo_checkpoint) for one in (plain, either, tls)))
        await roll(load, plain, either)
        before = [await plaintext_connections(client, node) for node in either.nodes]
        assert all(before), "prefill and decode had peers without TLS"
        await roll(load, either, tls, lambda: check_counts(client, either, before))
        assert all(len(found) == 1 for found in load.answers.values()), load.answers
        assert len(load.answers) == len(PROMPTS)
        for address in (tls.prefill, tls.nodes[1].ready["address"]):
            with pytest.raises(aiohttp.ClientError):
                await client.get(f"http://{address}/v1/models")


async def roll(
    load: Load,
    old: Release,
    new: Release,
    before_the_end: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serves by routers and nodes of both releases, then by the new nodes alone."""
    async with router_of(old, [old, new]) as one, router_of(new, [old, new]) as other:
        load.routers = [one, other]
        worker = asyncio.create_task(load.run())
        await load.goes_on(worker)
        if before_the_end is not None:
            await before_the_end()
        await old.stop()
        await load.goes_on(worker)
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


async def check_counts(client: aiohttp.ClientSession, release: Release, before: list[int]) -> None:
    """Checks that nobody has come without TLS since `before`."""
    assert [await plaintext_connections(client, node) for node in release.nodes] == before


async def plaintext_connections(client: aiohttp.ClientSession, node: NodeProcess) -> int:
    """Returns how many there were on all ports of a node, those of KV included."""
    url = f"http://127.0.0.1:{node.ready['metrics_port']}/metrics"
    async with client.get(url) as answer:
        counts = COUNTS.findall(await answer.text())
    assert len(counts) >= 2, "node server and transfer processes"
    return int(sum(map(float, counts)))
