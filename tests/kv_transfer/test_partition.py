"""The network between a prefill and a decode node is cut while KV is on its way, and mended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kv_caches import layout
from kv_nodes import KVNode, poll_until, until_empty

from edge.security.config import SecurityConfig
from kv_transfer.config import KVTransferConfig
from tests.network_namespaces import Switch, switched

NUM_TOKENS = 100
SHAPE = layout()


@pytest.fixture
def switch() -> Iterator[Switch]:
    with switched("p", "d") as switch:
        yield switch


@pytest.fixture
def nodes(switch: Switch) -> Iterator[tuple[KVNode, KVNode]]:
    """Their transfer processes run on hosts of their own."""
    made = []
    try:
        for name, role in (("p", "kv_producer"), ("d", "kv_consumer")):
            config = KVTransferConfig(
                kv_role=role,
                hosts=(switch.addresses[name],),
                chunk_bytes=2048,
                staging_bytes=4 << 20,
                stall_timeout_s=0.8,
                lease_s=1.2,
                security=SecurityConfig(allow_plaintext=True),
            )
            with switch.on(name):
                made.append(KVNode(config, SHAPE))
        yield made[0], made[1]
    finally:
        for node in made:
            node.close()


def test_a_transfer_that_is_cut_fails_leaves_nothing_and_the_next_one_works(
    switch: Switch, nodes: tuple[KVNode, KVNode]
) -> None:
    prefill, decode = nodes
    request = prefill.export(NUM_TOKENS)
    transfer_id = request.transfer_id
    there, here = prefill.blocks.take(SHAPE, NUM_TOKENS), decode.blocks.take(SHAPE, NUM_TOKENS)
    decode.pull(prefill.peer, transfer_id, NUM_TOKENS, here)
    layers = 0

    def is_pulled_or_given_up() -> bool:
        """On a busy machine the limits may end before the pull is seen."""
        return decode.connector.counters["open_pulls"] > 0 or transfer_id in decode.done.failed

    def cut_after_one_layer() -> None:
        nonlocal layers
        layers += 1
        if layers == 1:
            poll_until(is_pulled_or_given_up, prefill, decode)
            switch.cut("d")

    prefill.prefill(request, 1, there, between_layers=cut_after_one_layer)
    poll_until(lambda: transfer_id in decode.done.failed, prefill, decode)
    assert decode.done.failed[transfer_id][1], "another attempt may work"
    until_empty(prefill)
    switch.mend("d")
    until_empty(prefill, decode)

    while not goes_through(prefill, decode, there, here):
        until_empty(prefill, decode)
    decode.check(2, range(NUM_TOKENS), here)
    until_empty(prefill, decode)


def goes_through(prefill: KVNode, decode: KVNode, there: list[int], here: list[int]) -> bool:
    """Returns whether another transfer arrived. On a busy machine it may fail as the one that was
    cut did: its limits are as short."""
    request = prefill.export(NUM_TOKENS)
    transfer_id = request.transfer_id
    decode.pull(prefill.peer, transfer_id, NUM_TOKENS, here)
    prefill.prefill(request, 2, there)
    ends = (decode.done.received, decode.done.failed)
    poll_until(lambda: any(transfer_id in end for end in ends), prefill, decode)
    reason, may_retry = decode.done.failed.get(transfer_id, ("", True))
    assert may_retry, reason
    return transfer_id in decode.done.received
