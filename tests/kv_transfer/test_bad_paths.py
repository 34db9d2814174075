"""KV over paths that swallow, damage or hold up packets, between hosts on a switch of our own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kv_caches import layout
from kv_nodes import FakeRequest, KVNode, poll_until, until_empty

from edge.security.config import SecurityConfig
from kv_transfer.config import KVTransferConfig
from kv_transfer.errors import KV_DAMAGED, KV_LOST, KV_STALLED
from tests.lossy_switch import CLEAN, Conditions, LossySwitch, NoSwitchError, opened_switch

SHAPE = layout(num_layers=4, num_kv_heads=64)
"""Takes 8 KiB a token."""
LONG, SHORT = 700, 20
RATE = 2_500_000.0
"""Is 20 Mbit: 2.3 s for the long prompt, 0.07 s for the short one."""


@pytest.fixture(scope="module")
def switch() -> Iterator[LossySwitch]:
    try:
        with opened_switch("p", "d") as switch:
            yield switch
    except NoSwitchError as error:
        pytest.skip(str(error))


class Pair:
    """A prefill and a decode node, and a prompt's KV on its way."""

    def __init__(self, switch: LossySwitch, stall_timeout_s: float) -> None:
        self.nodes: list[KVNode] = []
        for name, role in (("p", "kv_producer"), ("d", "kv_consumer")):
            config = KVTransferConfig(
                kv_role=role,
                hosts=(switch.addresses[name],),
                num_streams=2,
                chunk_bytes=256 << 10,
                staging_bytes=16 << 20,
                stall_timeout_s=stall_timeout_s,
                security=SecurityConfig(allow_plaintext=True),
            )
            with switch.on(name):
                self.nodes.append(KVNode(config, SHAPE))
        self.prefill, self.decode = self.nodes
        self._there: dict[str, list[int]] = {}
        self.here: dict[str, list[int]] = {}

    def send(self, num_tokens: int, seed: int) -> str:
        """Computes a prompt, lets it be pulled, and returns its transfer."""
        request = self.prefill.export(num_tokens)
        name = request.transfer_id
        there = self.prefill.blocks.take(SHAPE, num_tokens)
        here = self.here[name] = self.decode.blocks.take(SHAPE, num_tokens)
        pull: FakeRequest = self.decode.pull(self.prefill.peer, name, num_tokens, here)
        self.prefill.prefill(request, seed, there)
        self.decode.connector.prompt_computed(pull)
        return name

    def until_over(self, *names: str) -> None:
        done = self.decode.done
        poll_until(
            lambda: all(name in done.received or name in done.failed for name in names), *self.nodes
        )

    def close(self) -> None:
        for node in self.nodes:
            node.close()


@contextmanager
def pair_on(switch: LossySwitch, stall_timeout_s: float = 0.8) -> Iterator[Pair]:
    pair = Pair(switch, stall_timeout_s)
    try:
        yield pair
        switch.set("p", "d", CLEAN)
        until_empty(*pair.nodes)
    finally:
        switch.set("p", "d", CLEAN)
        pair.close()


@pytest.mark.parametrize(
    ("conditions", "code"),
    [
        (Conditions(mtu=1000), KV_STALLED),
        (Conditions(corruption=1.0), KV_DAMAGED),
    ],
    ids=["large packets vanish", "damage that TCP does not see"],
)
def test_a_bad_path_says_what_is_wrong_and_works_once_it_is_mended(
    switch: LossySwitch, conditions: Conditions, code: str
) -> None:
    with pair_on(switch) as pair:
        switch.set("p", "d", conditions)
        codes = pair.decode.done.failure_codes
        lost = pair.send(SHORT, 1)
        pair.until_over(lost)
        while codes[lost] != code:
            # Damage of a frame's header, and not of numbers, ends the connection.
            assert code == KV_DAMAGED and codes[lost] == KV_LOST
            lost = pair.send(SHORT, 1)
            pair.until_over(lost)
        assert not pair.decode.done.received
        assert pair.decode.done.failed[lost][1], "another attempt may work"
        switch.set("p", "d", CLEAN)
        name = lost
        while name not in pair.decode.done.received:
            name = pair.send(SHORT, 2)
            pair.until_over(name)
        pair.decode.check(2, range(SHORT), pair.here[name])


def test_short_kv_does_not_wait_for_long_kv_and_the_rate_is_that_of_the_path(
    switch: LossySwitch,
) -> None:
    with pair_on(switch, stall_timeout_s=30.0) as pair:
        first = pair.send(SHORT, 1)
        pair.until_over(first)
        switch.set("p", "d", Conditions(rate=RATE))
        long, short = pair.send(LONG, 2), pair.send(SHORT, 3)
        pair.until_over(long, short)
        done = pair.decode.done
        assert done.received == [first, short, long], done.failed
        pair.decode.check(2, range(LONG), pair.here[long])
        pair.decode.check(3, range(SHORT), pair.here[short])
        assert 0 < done.stats[long].path_bytes_per_s < 2 * RATE
        assert done.stats[long].path_was_full
