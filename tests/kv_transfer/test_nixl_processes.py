"""Real transfer processes that read each other's memory through NIXL, and are killed meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from kv_caches import layout
from kv_nodes import KVNode, poll_until, until_empty
from test_transfer_processes import new_node, one_prompt, until_restarted

NUM_TOKENS = 64
SHAPE = layout()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[KVNode, KVNode]]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    prefill, decode = (new_node(role, SHAPE, transports="nixl,stream") for role in ROLES)
    yield prefill, decode
    for node in (prefill, decode):
        node.close()


ROLES = ("prefill", "decode")


def until_read_in_place(prefill: KVNode, decode: KVNode) -> None:
    """The first prompts come over the stream, until the agents have found each other."""
    kv_bytes = NUM_TOKENS // SHAPE.groups[0].block_size * SHAPE.block_bytes
    for seed in range(200):
        sent = prefill.connector.counters["bytes_moved"]
        one_prompt(prefill, decode, seed, NUM_TOKENS)
        until_empty(prefill, decode)
        if prefill.connector.counters["bytes_moved"] - sent < kv_bytes / 2:
            return
    raise AssertionError("no prompt was read through NIXL")


@pytest.mark.parametrize("role", ROLES)
def test_killed_process(nodes: tuple[KVNode, KVNode], role: str) -> None:
    """Its transfers fail on both sides, the other process lives, and new prompts are read again."""
    prefill, decode = nodes
    victim, other = nodes if role == "prefill" else nodes[::-1]
    until_read_in_place(prefill, decode)
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
    until_read_in_place(prefill, decode)
    assert other.connector.process_pids == survivor
