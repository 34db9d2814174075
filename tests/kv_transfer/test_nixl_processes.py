"""Real transfer processes that read each other's windows through NIXL, and are killed meanwhile.
They send and receive, and have host memory behind their caches."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from kv_caches import UNTOUCHED, layout
from kv_nodes import KVNode, poll_until, until_empty
from test_both_ways import offer, place_of
from test_transfer_processes import new_node, one_prompt, until_restarted

NUM_TOKENS = 64
SHAPE = layout()


ROLES = ("prefill", "decode")


@pytest.fixture(scope="module")
def running_nodes() -> Iterator[tuple[KVNode, KVNode]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,self")
        prefill, decode = (
            new_node(
                role,
                SHAPE,
                transports="nixl,stream",
                shares_prefixes=True,
                host_tier_bytes=8 * SHAPE.block_bytes,
            )
            for role in ROLES
        )
        yield prefill, decode
        for node in (prefill, decode):
            node.close()


@pytest.fixture
def nodes(running_nodes: tuple[KVNode, KVNode]) -> tuple[KVNode, KVNode]:
    for node in running_nodes:
        node.renew()
    return running_nodes


def until_read_by_nixl(prefill: KVNode, decode: KVNode) -> None:
    """The first prompts come over the stream, until the agents have found each other."""
    kv_bytes = NUM_TOKENS // SHAPE.groups[0].block_size * SHAPE.block_bytes
    before = decode.connector.counters["received_bytes_nixl"]
    for seed in range(200):
        moved = decode.connector.counters["bytes_moved"]
        one_prompt(prefill, decode, seed, NUM_TOKENS)
        until_empty(prefill, decode)
        poll_until(lambda: decode.connector.counters["bytes_moved"] > moved, decode)  # noqa: B023
        if decode.connector.counters["received_bytes_nixl"] - before > kv_bytes / 2:
            return
    raise AssertionError("no prompt was read through NIXL")


def from_host_memory(holder: KVNode, seed: int) -> list[int]:
    """Returns blocks with a prefix that has been in host memory."""
    tier, cache = holder.connector.host_tier, holder.caches[0]
    assert tier is not None
    poll_until(lambda: tier.is_ready, holder)
    before, after = (holder.blocks.take(SHAPE, NUM_TOKENS) for _ in range(2))
    for layer in range(SHAPE.num_layers):
        cache.write(seed, layer, range(NUM_TOKENS), before)
    names = [b"%d/%d" % (seed, i) for i in range(len(before))]
    assert tier.store(list(zip(names, before, strict=True)))
    poll_until(lambda: not tier.num_jobs, holder)
    assert tier.num_found(names, 0) == len(names)
    cache.pages[:, before] = UNTOUCHED
    tier.load(names, after)
    poll_until(lambda: not tier.num_jobs, holder)
    return after


@pytest.mark.parametrize("holder", [0, 1], ids=ROLES)
def test_what_came_from_host_memory_is_read_either_way(
    nodes: tuple[KVNode, KVNode], holder: int
) -> None:
    """As prefixes are: of either node, by the other. One that is in the cache goes the same way."""
    source, target = nodes[holder], nodes[1 - holder]
    kv_bytes = NUM_TOKENS // SHAPE.groups[0].block_size * SHAPE.block_bytes
    before = target.connector.counters["received_bytes_nixl"]
    for seed in range(200):
        for node in nodes:
            node.renew()
        moved = target.connector.counters["bytes_moved"]
        request = offer(source, from_host_memory(source, seed), NUM_TOKENS)
        blocks = target.blocks.take(SHAPE, NUM_TOKENS)
        target.pull(place_of(source), request.transfer_id, NUM_TOKENS, blocks)
        poll_until(lambda: target.done.received, *nodes)
        target.check(seed, range(NUM_TOKENS), blocks)
        until_empty(*nodes)
        poll_until(lambda: target.connector.counters["bytes_moved"] > moved, target)  # noqa: B023
        if target.connector.counters["received_bytes_nixl"] - before > kv_bytes / 2:
            return
    raise AssertionError("no prefix was read through NIXL")


@pytest.mark.parametrize("role", ROLES)
def test_killed_process(nodes: tuple[KVNode, KVNode], role: str) -> None:
    """Its transfers fail on both sides, the other process lives, and new prompts are read again."""
    prefill, decode = nodes
    victim, other = nodes if role == "prefill" else nodes[::-1]
    until_read_by_nixl(prefill, decode)
    moved = decode.connector.counters["bytes_moved"]
    request = prefill.export(NUM_TOKENS)
    source = prefill.blocks.take(SHAPE, NUM_TOKENS)
    decode.pull(prefill.peer, request.transfer_id, NUM_TOKENS, decode.blocks.take(SHAPE, 64))
    prefill.step([(request, 1, range(32), source)])
    poll_until(lambda: decode.connector.counters["bytes_moved"] > moved, prefill, decode)

    survivor = other.connector.process_pids
    os.kill(victim.connector.process_pids[0], signal.SIGKILL)
    poll_until(lambda: request.transfer_id in decode.done.failed, prefill, decode)
    ended = prefill.done.failed if role == "prefill" else prefill.done.aborted
    poll_until(lambda: request.transfer_id in ended, prefill, decode)
    until_restarted(victim, 1, prefill, decode)
    until_empty(prefill, decode)
    until_read_by_nixl(prefill, decode)
    assert other.connector.process_pids == survivor
