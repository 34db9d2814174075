"""Blocks copied to host memory and back by transfer processes: every byte, damage, and deaths."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
from kv_caches import RankCache, layout
from kv_nodes import KVNode, poll_until
from late_device import LateDevice
from test_transfer_processes import new_node, until_restarted

from kv_transfer.host_tier import HostTier
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.device import DeviceError
from kv_transfer.memory.host_device import HostDevice
from kv_transfer.memory.host_pool import HostPool, PoolConfig
from kv_transfer.metadata import (
    HostTierEvent,
    KVConnectorOutput,
    LoadMeta,
    StoreMeta,
    TierEvent,
    TierJob,
)

SHAPE = layout(num_layers=3)


def store(job: int, blocks: list[int], slots: list[int]) -> StoreMeta:
    return StoreMeta(job, blocks, slots, [name_of(slot) for slot in slots])


def name_of(slot: int) -> bytes:
    return hashlib.sha256(b"%d" % slot).digest()


NUM_BLOCKS, NUM_SLOTS = 8, 6
NOTHING = KVConnectorOutput()


class Pools:
    """Two processes of one rank, without the processes."""

    def __init__(self, device: HostDevice | LateDevice | None = None, **paths: Path) -> None:
        self.cache = RankCache(SHAPE, 0, NUM_BLOCKS)
        self.views = [KVCacheView(self.cache.handle, SHAPE, device=device) for _ in range(2)]
        self.events: list[HostTierEvent] = []
        self.others: list[TierEvent] = []
        self.pools = [
            HostPool(
                view,
                PoolConfig(num_slots=NUM_SLOTS, share=(index, 2), process=index, **paths),
                self._hear,
            )
            for index, view in enumerate(self.views)
        ]
        self.contents = [pool.contents() for pool in self.pools]

    def _hear(self, event: TierEvent) -> None:
        if isinstance(event, HostTierEvent):
            self.events.append(event)
        else:
            self.others.append(event)

    async def do(self, *commands: TierJob) -> list[list[int]]:
        """Returns the slots that each job found damaged, once all processes have answered."""
        self.events.clear()
        for pool in self.pools:
            for command in commands:
                pool.obey(command)
        while len(self.events) < 2 * len(commands):
            await asyncio.sleep(0)
        return [
            sorted(
                {slot for event in self.events if event.job == one.job for slot in event.damaged}
            )
            for one in commands
        ]

    def fill(self, seed: int) -> npt.NDArray[np.generic]:
        """Writes other bytes into every block. Returns them."""
        rng = np.random.default_rng(seed)
        self.cache.words[...] = rng.integers(0, 1 << 16, self.cache.words.shape, np.uint16)
        return self.cache.words.copy()

    async def close(self) -> None:
        for pool in self.pools:
            await pool.close()
        for view in self.views:
            view.close()
        self.cache.close()


@pytest_asyncio.fixture
async def pools() -> AsyncIterator[Pools]:
    made = Pools()
    yield made
    await made.close()


async def test_what_was_stored_comes_back_into_other_blocks(pools: Pools) -> None:
    before = pools.fill(1)
    assert await pools.do(store(1, [1, 5, 3], [4, 0, 2])) == [[]]
    after = pools.fill(2)
    assert await pools.do(LoadMeta(2, [7, 0], [2, 4])) == [[]]
    np.testing.assert_array_equal(pools.cache.words[:, [7, 0]], before[:, [3, 1]])
    untouched = [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(pools.cache.words[:, untouched], after[:, untouched])


async def test_many_jobs_at_once_change_every_byte_and_no_other(pools: Pools) -> None:
    """Evicts and loads in random order, 100 times; each block is compared."""
    rng, kept = random.Random(5), dict[int, npt.NDArray[np.generic]]()
    job = 0
    for round_ in range(100):
        now = pools.fill(round_)
        slots, blocks = rng.sample(range(NUM_SLOTS), 2), rng.sample(range(NUM_BLOCKS), 4)
        commands: list[TierJob] = [store(job + 1, blocks[:2], slots)]
        known = [slot for slot in kept if slot not in slots][:2]
        if known:
            commands.append(LoadMeta(job + 2, blocks[2 : 2 + len(known)], known))
        job += 2
        assert await pools.do(*commands) == [[] for _ in commands]
        for block, slot in zip(blocks[2:], known, strict=False):
            np.testing.assert_array_equal(pools.cache.words[:, block], kept[slot])
        kept |= {slot: now[:, block] for block, slot in zip(blocks, slots, strict=False)}


async def test_a_flipped_bit_is_found_and_the_slot_forgotten(
    pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    pools.fill(1)
    await pools.do(store(1, [0, 1], [0, 1]))
    pools.pools[1]._memory.slot(1)[3] ^= 16
    assert await pools.do(LoadMeta(2, [2, 3], [0, 1])) == [[1]]
    assert await pools.do(LoadMeta(3, [2], [1])) == [[1]]
    assert await pools.do(LoadMeta(4, [2], [0])) == [[]]
    assert "damaged" in caplog.text


async def test_a_slot_that_holds_nothing_is_not_loaded(pools: Pools) -> None:
    before = pools.fill(1)
    assert await pools.do(LoadMeta(1, [2], [3])) == [[3]]
    np.testing.assert_array_equal(pools.cache.words, before)


async def test_no_answer_before_the_copies_are_done() -> None:
    """A device copies later than it is told to."""
    device = LateDevice(is_held=True)
    pools = Pools(device)
    before = pools.fill(1)
    for pool in pools.pools:
        pool.obey(store(1, [0, 1], [0, 1]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not pools.events
    device.go()
    while len(pools.events) < 2:
        await asyncio.sleep(0)
    pools.fill(2)
    await pools.do(LoadMeta(2, [5, 6], [0, 1]))
    np.testing.assert_array_equal(pools.cache.words[:, [5, 6]], before[:, [0, 1]])
    await pools.close()


async def test_without_pinned_memory_the_tier_is_off_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(self: HostDevice, memory: npt.NDArray[np.uint8]) -> None:
        if memory.nbytes:
            raise DeviceError("cuMemHostRegister: out of memory")

    monkeypatch.setattr(HostDevice, "pin", refuses)
    with caplog.at_level(logging.WARNING):
        pools = Pools()
        tier = HostTier(NUM_SLOTS, 2, lambda process, command: True)
        for contents in pools.contents:
            tier.apply(contents)
    assert caplog.text.count("KV in the host tier is off") == 1
    assert "cannot be pinned: cuMemHostRegister: out of memory" in caplog.text
    assert tier.store([(b"a", 0)]) is None
    assert await pools.do(store(1, [0, 1], [0, 1])) == [[0, 1]], "a late word is answered"
    await pools.close()


# Real processes -------------------------------------------------------------------------------


@pytest.fixture
def node() -> Iterator[KVNode]:
    made = new_node("prefill", SHAPE, host_tier_bytes=4 * SHAPE.block_bytes, num_processes=2)
    yield made
    made.close()


def test_a_killed_process_takes_the_tier_with_it(node: KVNode) -> None:
    """Jobs fail, nothing wrong is ever found, and the tier works again."""
    tier = node.connector.host_tier
    assert tier is not None
    words = node.caches[0].words

    def until_done(job: int) -> bool:
        found: dict[int, bool] = {}

        def look() -> bool:
            found.update((node.connector.get_finished() or NOTHING).host_jobs)
            return job in found

        poll_until(look)
        return found[job]

    def store(*names: bytes) -> int:
        begun = tier.store([(name, i) for i, name in enumerate(names)])
        assert begun is not None and begun[1] == len(names)
        return begun[0]

    def until_ready() -> None:
        poll_until(lambda: node.connector.get_finished() is None and tier.is_ready)

    until_ready()
    words[...] = 7
    assert until_done(store(b"a", b"b"))
    words[...] = 9
    assert until_done(tier.load([b"b"], [5]))
    assert (words[:, 5] == 7).all() and (words[:, 0] == 9).all()
    os.kill(node.connector.process_pids[1], signal.SIGKILL)
    poll_until(lambda: node.connector.get_finished() is None and not tier.is_ready)
    until_restarted(node, 1, node)
    until_ready()
    assert tier.num_found([b"a", b"b"], 0) == 0
    words[...] = 11
    assert until_done(store(b"a", b"c", b"d", b"e")), "no slot is lost"
    words[...] = 0
    assert until_done(tier.load([b"d", b"a"], [6, 7]))
    assert (words[:, [6, 7]] == 11).all()
    assert node.connector.counters["live_transfers"] == 0
