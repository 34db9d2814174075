"""A router that lives for months grows by nothing that comes and goes: requests, nodes that die,
change their role or fall silent, adapters. What it remembers has bounds, and no cycle of references
is left that only a rare collection of garbage (`router.garbage`) would find."""

from __future__ import annotations

import gc
import logging
import statistics
import sys
from itertools import combinations

import pytest

from router.scaling.work_rate import WorkRate
from tandem_pb.node_pb2 import NODE_ROLE_DECODE, NODE_ROLE_PREFILL
from tests.edge.left_behind import garbage_is_kept, left_behind
from tests.router.cluster import Cluster, RunningRouter, eventually
from tests.router.fakes import FakeDecodeNode, FakeNode
from tests.router.token_server import TokenHandler


def restarted(router: RunningRouter) -> float:
    return router.metric("tandem_router_node_reports_total", outcome="restarted")


async def dies(router: RunningRouter, node: FakeNode) -> None:
    """Dies, is asked in vain and comes back as another."""
    lost, before = watches_lost(router), restarted(router)
    await node.stop()
    await eventually(lambda: watches_lost(router) >= lost + 3)
    await node.restart()
    await eventually(lambda: restarted(router) > before)


async def falls_silent(router: RunningRouter, node: FakeNode) -> None:
    lost = watches_lost(router)
    node.status.silent = True
    await eventually(lambda: watches_lost(router) > lost)
    node.status.silent = False
    await router.wait_usable(decode=1, prefill=1)


async def changes_its_role(router: RunningRouter, node: FakeNode) -> None:
    """There and back."""
    assert isinstance(node, FakeDecodeNode)
    for role in (NODE_ROLE_PREFILL, NODE_ROLE_DECODE):
        before = restarted(router)
        epoch = node.status.load.epoch + 1
        await node.status.change(role=role, epoch=epoch, http_port=node.port)
        await eventually(lambda before=before: restarted(router) > before)


def watches_lost(router: RunningRouter) -> float:
    return sum(
        router.metric("tandem_router_watch_failures_total", tier=tier)
        for tier in ("decode", "prefill")
    )


@pytest.mark.parametrize("harm", [dies, falls_silent, changes_its_role])
async def test_no_life_of_a_node_waits_for_the_collector(cluster: Cluster, harm: object) -> None:
    assert callable(harm)
    decode = await cluster.decode(handler=TokenHandler())
    router = await cluster.router(decode, await cluster.prefill(), stale_after_s=0.5)
    await harm(router, decode)
    with garbage_is_kept():
        await harm(router, decode)
        await harm(router, decode)
        assert not left_behind()


KEPT = [
    ("observe.status.recent_requests.KEPT", 8),
    ("observe.status.recent_figures.NUM_SLOTS", 1),
    ("relay.attempts.event_loop_stalls._KEPT_S", 1.0),
    ("scaling.scaling_signal._NUM_WORKS", 8),
    ("scaling.work_rate._SLOW_S", 4),
    ("scaling.work_rate._FAST_S", 2),
    ("scaling.work_rate._PEAK_S", 2),
]
"""Windows, of minutes or of many requests, which would fill for as long as the test lasts."""


async def test_nothing_grows_by_what_comes_and_goes(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kept_for_a_while, less in KEPT:
        monkeypatch.setattr(f"router.{kept_for_a_while}", less)
    caplog.set_level(logging.CRITICAL)  # It keeps what it captures.
    decode, prefill = await cluster.decode(handler=TokenHandler()), await cluster.prefill()
    router = await cluster.router(decode, prefill)
    sizes: list[int] = []
    for life in range(17):
        for number in range(8):
            body = {"model": "demo", "prompt": f"{number} " * 2000, "max_tokens": 3, "seed": 1}
            await router.text({**body, "stream": number % 2 == 0})
        await decode.status.serve_adapters({f"a{life % 2}": f"digest {life}"})
        await changes_its_role(router, decode)
        await decode.status.serve_adapters({})
        for node in (decode, prefill):
            before = restarted(router)
            await node.restart()
            await eventually(lambda before=before: restarted(router) > before)
        await router.wait_usable(decode=1, prefill=1)
        decode.requests.clear()
        gc.collect()
        sizes.append(sys.getallocatedblocks())
    # What is kept for a while, and what only every other life has, comes and goes: the median of
    # the slopes between any two lives is that of all of them.
    lives = combinations(enumerate(sizes[3:]), 2)
    grown = [(after - before) / (later - life) for (life, before), (later, after) in lives]
    assert statistics.median(grown) < 40, sizes


def test_a_rate_that_nobody_asks_for_keeps_two_minutes() -> None:
    work = WorkRate(0.0)
    for second in range(10_000):
        work.add(float(second), 1.0)
    assert len(work._sums) <= 121
    assert work.rate(10_000.0) == pytest.approx(1.0, rel=0.02)
