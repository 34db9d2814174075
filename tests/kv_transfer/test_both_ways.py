"""Nodes that share prefixes: each one sends and receives, and what it sends may exist already."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from kv_caches import layout
from kv_nodes import FakeRequest, KVNode, poll_until, until_empty
from msgspec.structs import replace

from edge.security.config import Role
from kv_transfer.config import KVRole, KVTransferConfig
from kv_transfer.metadata import KVPeer, KVTransferParams
from tests.security.authority import Authority, tls_config

NUM_TOKENS = 100


@pytest.fixture(scope="module", params=["cuda_ipc,stream", "tls"])
def nodes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, KVNode]]:
    """Makes both. With TLS, certificates name roles: a puller must know whom it talks to."""
    authority = Authority(tmp_path_factory.mktemp("authority"))
    roles: dict[KVRole, Role] = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE}
    made = {}
    for kv_role, role in roles.items():
        more: dict[str, Any] = {"transports": request.param}
        if request.param == "tls":
            more = {"security": tls_config(authority.service(role.value, role), "role")}
        config = KVTransferConfig(
            kv_role=kv_role,
            shares_prefixes=True,
            chunk_bytes=2048,
            staging_bytes=8 << 20,
            num_processes=2,
            **more,
        )
        made[str(kv_role)] = KVNode(config, layout())
    yield made
    for node in made.values():
        node.close()


def place_of(holder: KVNode) -> KVPeer:
    """Returns the node as who asked it for prefixes knows it."""
    return replace(holder.peer, is_decode=holder.config.kv_role == "kv_consumer")


def offer(holder: KVNode, blocks: list[int], num_tokens: int) -> FakeRequest:
    """Exports a prefix that is in the cache. Returns its request."""
    params = KVTransferParams(do_remote_decode=True, transfer_id=uuid.uuid4().hex)
    request = FakeRequest("prefix", num_tokens, params)
    holder.connector.update_state_after_alloc(request, (blocks,), 0)
    holder.connector.request_finished(request)
    return request


def offer_old(holder: KVNode, seed: int) -> FakeRequest:
    """Exports a prefix that has been in the cache for long."""
    blocks = holder.blocks.take(holder.layout, NUM_TOKENS)
    for cache in holder.caches:
        for layer in range(holder.layout.num_layers):
            cache.write(seed, layer, range(NUM_TOKENS), blocks)
    return offer(holder, blocks, NUM_TOKENS)


@pytest.mark.parametrize("first_token", [0, 32])
@pytest.mark.parametrize("holder", ["kv_producer", "kv_consumer"])
def test_a_prefix_that_exists_is_pulled_either_way(
    nodes: dict[str, KVNode], holder: str, first_token: int
) -> None:
    source = nodes[holder]
    target = next(node for role, node in nodes.items() if role != holder)
    for node in nodes.values():
        node.renew()
    request = offer_old(source, 5)
    blocks = target.blocks.take(target.layout, NUM_TOKENS)
    target.pull(place_of(source), request.transfer_id, NUM_TOKENS, blocks, first_token)
    poll_until(lambda: request.transfer_id in target.done.received, *nodes.values())
    target.check(5, range(first_token, NUM_TOKENS), blocks)
    poll_until(lambda: request.transfer_id in source.done.released, *nodes.values())
    assert request.transfer_id in source.done.sent
    until_empty(*nodes.values())


def test_calling_off_one_direction_leaves_the_other(nodes: dict[str, KVNode]) -> None:
    """Both have a transfer under way when each calls its own off."""
    producer, consumer = nodes.values()
    for node in nodes.values():
        node.renew()
    export = producer.export(NUM_TOKENS)
    pull = consumer.pull(
        producer.peer, export.transfer_id, NUM_TOKENS,
        consumer.blocks.take(consumer.layout, NUM_TOKENS),
    )  # fmt: skip
    other = offer_old(consumer, 6)
    assert consumer.connector.abort(pull)
    poll_until(lambda: export.transfer_id in consumer.done.aborted, *nodes.values())
    poll_until(lambda: export.transfer_id in producer.done.aborted, *nodes.values())
    assert other.transfer_id not in consumer.done.aborted
    blocks = producer.blocks.take(producer.layout, NUM_TOKENS)
    producer.pull(place_of(consumer), other.transfer_id, NUM_TOKENS, blocks)
    poll_until(lambda: other.transfer_id in producer.done.received, *nodes.values())
    producer.check(6, range(NUM_TOKENS), blocks)
    until_empty(*nodes.values())


def test_a_holders_death_fails_the_pull(nodes: dict[str, KVNode]) -> None:
    producer, consumer = nodes.values()
    for node in nodes.values():
        node.renew()
    for pid in producer.connector.process_pids:
        os.kill(pid, signal.SIGSTOP)
    request = offer_old(producer, 7)
    blocks = consumer.blocks.take(consumer.layout, NUM_TOKENS)
    consumer.pull(producer.peer, request.transfer_id, NUM_TOKENS, blocks)
    for pid in producer.connector.process_pids:
        os.kill(pid, signal.SIGKILL)
    poll_until(lambda: request.transfer_id in consumer.done.failed, *nodes.values())
    poll_until(lambda: request.transfer_id in producer.done.failed, *nodes.values())
    until_empty(*nodes.values())
