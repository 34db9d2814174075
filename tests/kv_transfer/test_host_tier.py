"""Blocks copied to host memory and back by transfer processes: every byte, damage, and deaths."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import random
import signal
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
from kv_caches import RankCache, layout
from kv_nodes import KVNode, poll_until
from late_device import LateDevice
from test_transfer_processes import new_node, until_restarted
from tier_stress import TierStress

from kv_transfer.control.sizing import choose_check_threads
from kv_transfer.layout import KVLayout
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.devices.device import DeviceError
from kv_transfer.memory.devices.host_device import HostDevice
from kv_transfer.memory.load_marks import LoadGate, LoadMarks
from kv_transfer.memory.pool import slot_memory
from kv_transfer.memory.pool.block_files import BlockFiles
from kv_transfer.memory.pool.host_pool import HostPool, PoolConfig
from kv_transfer.memory.pool.slot_checks import SlotChecks
from kv_transfer.memory.pool.slot_memory import SlotMemory
from kv_transfer.metadata import KVConnectorOutput
from kv_transfer.tier import (
    FetchMeta,
    ForgetMeta,
    HostTierEvent,
    LoadBegun,
    LoadMeta,
    LoadTicket,
    PutMeta,
    SpillMeta,
    StoreMeta,
    Tier,
    TierCommand,
    TierContents,
    TierEvent,
    TierJob,
)
from kv_transfer.tiers import disk_index
from kv_transfer.tiers.host_tier import PooledHostTier

SHAPE = layout(num_layers=3)
ANOTHER_MODEL = msgspec.structs.replace(SHAPE, model_hash="another")
OTHER_SCALES = msgspec.structs.replace(
    SHAPE, groups=(msgspec.structs.replace(SHAPE.groups[0], scales="others"),)
)


def store(job: int, blocks: list[int], slots: list[int]) -> StoreMeta:
    return StoreMeta(job, blocks, slots, [name_of(slot) for slot in slots])


def name_of(slot: int) -> bytes:
    """Returns one that is as long as a name may be."""
    return hashlib.sha384(b"%d" % slot).digest()


def test_a_name_that_would_be_cut_is_refused() -> None:
    memory = SlotMemory.anonymous(1, 1, 8)
    memory.put(0, name_of(0), [1])
    assert memory.contents() == {0: name_of(0)}
    with pytest.raises(ValueError, match="at most 48 bytes, not 49"):
        memory.put(0, name_of(0) + b"x", [1])


NUM_BLOCKS, NUM_SLOTS = 8, 6
NOTHING = KVConnectorOutput()


class Pools:
    """Two processes of one rank, without the processes."""

    def __init__(
        self,
        device: HostDevice | LateDevice | None = None,
        *,
        shape: KVLayout = SHAPE,
        has_marks: bool = False,
        first_layer: int = 0,
        **paths: Path,
    ) -> None:
        self.cache = RankCache(shape, 0, NUM_BLOCKS)
        handle = self.cache.handle
        self.marks = LoadMarks.create(shape.num_layers) if has_marks else None
        if self.marks is not None:
            handle = msgspec.structs.replace(handle, load_marks_fd=self.marks.fd)
        self.views = [KVCacheView(handle, shape, device=device) for _ in range(2)]
        self.events: list[HostTierEvent] = []
        self.others: list[TierEvent] = []
        self.pools = [
            HostPool(
                view,
                PoolConfig(
                    num_slots=NUM_SLOTS,
                    share=(index, 2),
                    process=index,
                    first_layer=first_layer,
                    **paths,
                ),
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
                pool.handle(command)
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

    def crash(self) -> None:
        """Ends without a word: what is on its way stays undone."""
        for pool in self.pools:
            for job in pool._jobs:
                job.cancel()
            pool._memory.close()
            if pool._files is not None:
                pool._files.close()

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


@pytest.mark.parametrize("num_threads", [1, 3])
async def test_every_page_is_compared_by_some_thread(num_threads: int) -> None:
    """Whatever the number of slots; of damaged ones all are named, each in its layer."""
    memory = SlotMemory.anonymous(num_slots=5, num_layers=2, page_bytes=64)
    memory.data[:] = np.arange(memory.data.size) % 251
    for slot in range(5):
        memory.put(slot, name_of(slot), memory.checksums(slot))
    memory.slot(3)[0] ^= 1
    memory.slot(0)[64 + 63] ^= 128
    checks = SlotChecks(memory, num_threads)
    for slots, damaged in (([4], [set(), set()]), ([0, 1, 2, 3], [{3}, {0}]), ([3], [{3}, set()])):
        layers = checks.begin(slots)
        assert [await layers.wrong_in(place) for place in range(2)] == damaged
    checks.close()


async def test_a_page_that_cannot_be_read_fails_its_layer_and_those_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = SlotMemory.anonymous(num_slots=2, num_layers=3, page_bytes=64)
    for slot in range(2):
        memory.put(slot, name_of(slot), memory.checksums(slot))
    compute = memory.checksum

    def checksum(slot: int, layer: int) -> int:
        if layer == 1:
            raise OSError("gone")
        return compute(slot, layer)

    monkeypatch.setattr(memory, "checksum", checksum)
    checks = SlotChecks(memory, 2)
    layers = checks.begin([0, 1])
    assert await layers.wrong_in(0) == set()
    for place in (1, 2):
        with pytest.raises(OSError, match="gone"):
            await layers.wrong_in(place)
    checks.close()


@pytest.mark.parametrize(
    ("cores", "processes", "wanted"), [(16, 4, 4), (8, 4, 2), (2, 4, 1), (96, 8, 4), (96, 32, 3)]
)
def test_all_cores_compare(cores: int, processes: int, wanted: int) -> None:
    assert choose_check_threads(cores, processes) == wanted


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
        pool.handle(store(1, [0, 1], [0, 1]))
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
        tier = PooledHostTier(NUM_SLOTS, 2, lambda process, command: True)
        for contents in pools.contents:
            tier.apply(contents)
    assert caplog.text.count("KV in the host tier is off") == 1
    assert tier.counters["host_tier_off"] == 1
    assert "cannot be pinned: cuMemHostRegister: out of memory" in caplog.text
    assert tier.store([(b"a", 0)]) is None
    assert await pools.do(store(1, [0, 1], [0, 1])) == [[0, 1]], "a late word is answered"
    await pools.close()


async def test_a_layer_is_marked_when_it_is_right_and_not_before() -> None:
    device = LateDevice(is_held=True)
    pools = Pools(device, has_marks=True)
    before = pools.fill(1)
    device.go()
    await pools.do(store(1, [0, 1], [0, 1]))
    pools.fill(2)
    device.is_held = True
    ticket, marks = LoadTicket(2, 7), pools.marks
    assert marks is not None
    for pool in pools.pools:
        pool.handle(LoadMeta(7, [4, 5], [0, 1], ticket))
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert not any(marks.is_there(ticket, layer) for layer in range(3)), "nothing is copied yet"
    device.go()
    while len(pools.events) < 4:
        await asyncio.sleep(0)
    assert all(marks.is_there(ticket, layer) for layer in range(3))
    assert not marks.is_there(LoadTicket(1, 7), 0), "of another place"
    assert sorted(event.process for event in pools.others if isinstance(event, LoadBegun)) == [0, 1]
    np.testing.assert_array_equal(pools.cache.words[:, [4, 5]], before[:, [0, 1]])
    await pools.close()


async def test_a_damaged_layer_is_never_marked() -> None:
    pools = Pools(has_marks=True)
    pools.fill(1)
    await pools.do(store(1, [0, 1], [0, 1]))
    pools.pools[0]._memory.slot(1)[SHAPE.page_bytes + 5] ^= 1
    ticket, marks = LoadTicket(0, 3), pools.marks
    assert marks is not None
    assert await pools.do(LoadMeta(3, [2, 3], [0, 1], ticket)) == [[1]]
    assert marks.is_there(ticket, 0), "layer 0 was right"
    assert marks.is_there(ticket, 1), "so was layer 1, of the other process"
    assert not marks.is_there(ticket, 2)
    marks.release(ticket)
    LoadGate(marks).wait(ticket, 2)
    LoadGate(marks).wait(ticket, 3)
    await pools.close()


# What outlives a process ----------------------------------------------------------------------


async def test_what_lies_in_a_memory_file_system_is_found_by_the_next_process(
    tmp_path: Path,
) -> None:
    pools = Pools(memory_path=tmp_path)
    before = pools.fill(1)
    await pools.do(store(1, [1, 5, 3], [4, 0, 2]))
    names = {slot: name_of(slot) for slot in (0, 2, 4)}
    pools.crash()
    again = Pools(memory_path=tmp_path)
    assert [contents.slots for contents in again.contents] == [names, names]
    assert await again.do(LoadMeta(1, [7], [4])) == [[]]
    np.testing.assert_array_equal(again.cache.words[:, 7], before[:, 1])
    await again.close()


async def test_a_slot_that_was_being_written_holds_nothing_afterwards(tmp_path: Path) -> None:
    device = LateDevice(is_held=True)
    pools = Pools(device, memory_path=tmp_path)
    pools.fill(1)
    for pool in pools.pools:
        pool.handle(store(1, [0], [3]))
    await asyncio.sleep(0)
    pools.crash()
    again = Pools(memory_path=tmp_path)
    assert [contents.slots for contents in again.contents] == [{}, {}]
    await again.close()


@pytest.mark.parametrize(
    "other",
    [{"shape": ANOTHER_MODEL}, {"shape": OTHER_SCALES}, {"first_layer": 3}],
    ids=["model", "scales", "stage"],
)
async def test_what_belongs_to_another_is_not_used(tmp_path: Path, other: dict[str, Any]) -> None:
    """Stages with equally many layers have equal layouts, and ranks may be the same if a node had
    another number of stages."""
    pools = Pools(memory_path=tmp_path / "memory", disk_path=tmp_path / "disk")
    await spilled(pools)
    pools.crash()
    again = Pools(memory_path=tmp_path / "memory", disk_path=tmp_path / "disk", **other)
    assert [(contents.slots, contents.files) for contents in again.contents] == [({}, [])] * 2
    await again.close()


async def test_processes_without_a_layer_agree_to_everything(tmp_path: Path) -> None:
    pools = Pools(
        shape=layout(num_layers=1), has_marks=True, memory_path=tmp_path, disk_path=tmp_path
    )
    before = await spilled(pools)
    assert await fetch(pools, 1, 5) == []
    assert await pools.do(LoadMeta(4, [6, 7], [5, 2], LoadTicket(0, 4))) == [[]]
    np.testing.assert_array_equal(pools.cache.words[:, [6, 7]], before[:, [1, 2]])
    assert sorted(event.process for event in pools.others if isinstance(event, LoadBegun)) == [0, 1]
    pools.crash()
    again = Pools(shape=layout(num_layers=1), memory_path=tmp_path, disk_path=tmp_path)
    assert all(set(contents.slots) == {0, 1, 2, 5} for contents in again.contents)
    assert await again.do(LoadMeta(5, [0], [0])) == [[]]
    await again.close()


async def test_two_nodes_do_not_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_memory, "_LOCK_TIMEOUT_S", 0.01)
    first = Pools(memory_path=tmp_path / "memory", disk_path=tmp_path / "disk")
    second = Pools(memory_path=tmp_path / "memory", disk_path=tmp_path / "disk")
    assert "in use by another node" in second.contents[0].off[Tier.HOST]
    third = Pools(disk_path=tmp_path / "disk")
    assert "in use by another node" in third.contents[0].off[Tier.DISK]
    for pools in (first, second, third):
        await pools.close()


# Disk -----------------------------------------------------------------------------------------


async def spilled(pools: Pools) -> npt.NDArray[np.generic]:
    """Returns what the cache held when blocks 0 to 2 went to slots and files 0 to 2."""
    before = pools.fill(1)
    await pools.do(store(1, [0, 1, 2], [0, 1, 2]))
    assert await pools.do(SpillMeta(2, [0, 1, 2])) == [[]]
    return before


async def fetch(pools: Pools, file: int, slot: int) -> list[int]:
    (damaged,) = await pools.do(FetchMeta(3, [name_of(file)], [slot]))
    return damaged


async def test_blocks_come_back_from_files_of_a_former_life(tmp_path: Path) -> None:
    pools = Pools(disk_path=tmp_path)
    before = await spilled(pools)
    pools.crash()
    again = Pools(disk_path=tmp_path)
    assert [sorted(contents.files) for contents in again.contents] == [
        sorted(map(name_of, (0, 1, 2)))
    ] * 2
    assert await fetch(again, 1, 5) == []
    assert await again.do(LoadMeta(4, [6], [5])) == [[]]
    np.testing.assert_array_equal(again.cache.words[:, 6], before[:, 1])
    again.pools[0].handle(ForgetMeta([name_of(1)]))
    assert await fetch(again, 1, 4) == [4], "one share is gone, so nobody has the block"
    await again.close()


@pytest.mark.parametrize("harm", ["flipped", "short", "foreign", "swapped", "unfinished"])
async def test_a_file_that_is_not_what_it_should_be_is_a_miss(tmp_path: Path, harm: str) -> None:
    pools = Pools(disk_path=tmp_path)
    await spilled(pools)
    name, other = name_of(0).hex(), name_of(1).hex()
    (path,) = tmp_path.glob(f"*/rank0-0of2/*/{name}.kv")
    (beside,) = tmp_path.glob(f"*/rank0-0of2/*/{other}.kv")
    data = bytearray(path.read_bytes())
    match harm:
        case "flipped":
            data[-3] ^= 4
            path.write_bytes(data)
        case "short":
            path.write_bytes(data[:-1])
        case "foreign":
            path.write_bytes(b"somebody else's")
        case "swapped":
            path.write_bytes(beside.read_bytes())
        case "unfinished":
            path.rename(path.with_suffix(".part"))
    assert await fetch(pools, 0, 4) == [4]
    assert await fetch(pools, 1, 4) == [], "others are as they were"
    pools.crash()
    again = Pools(disk_path=tmp_path)
    assert name_of(0) not in again.contents[0].files and not path.exists()
    assert not path.with_suffix(".part").exists()
    assert name_of(1) in again.contents[0].files
    await again.close()


async def test_what_was_forgotten_is_not_written_and_the_tier_stays_on(tmp_path: Path) -> None:
    pools = Pools(disk_path=tmp_path)
    pools.fill(1)
    await pools.do(store(1, [0, 1], [0, 1]))
    for pool in pools.pools:
        pool._memory.clear(0)
    assert await pools.do(SpillMeta(2, [0, 1])) == [[0]]
    for pool in pools.pools:
        pool.handle(ForgetMeta(None))
    assert await pools.do(SpillMeta(3, [1])) == [[1]]
    assert not pools.others and not list(tmp_path.rglob("*.kv"))
    await pools.close()


async def test_a_file_that_cannot_be_removed_leaves_no_other_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next node would find again what is left of what was forgotten."""
    pools = Pools(disk_path=tmp_path)
    await spilled(pools)
    unlink, stuck = Path.unlink, set[str]()

    def fails_at_first(self: Path, missing_ok: bool = False) -> None:
        share = self.parts[-3]
        if share not in stuck:
            stuck.add(share)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", fails_at_first)
    for pool in pools.pools:
        pool.handle(ForgetMeta(None))
    await pools.close()
    assert len(stuck) == 2 and len(list(tmp_path.rglob("*.kv"))) == 2
    assert [pool._files.num_damaged for pool in pools.pools if pool._files] == [1, 1]


async def test_a_block_that_goes_while_it_is_read_comes_all_the_same(tmp_path: Path) -> None:
    """A small disk lets blocks go for others at any time, those of a long read among them."""
    pools = Pools(disk_path=tmp_path)
    before = await spilled(pools)
    names = [name_of(file) for file in (0, 1, 2)]
    pools.events.clear()
    for pool in pools.pools:
        pool.handle(FetchMeta(3, names, [3, 4, 5]))
        pool.handle(ForgetMeta(names))
    while len(pools.events) < 2:
        await asyncio.sleep(0)
    assert [event.damaged for event in pools.events] == [[], []]
    assert await pools.do(LoadMeta(4, [5, 6, 7], [3, 4, 5])) == [[]]
    np.testing.assert_array_equal(pools.cache.words[:, 5:8], before[:, :3])
    assert [pool._files.num_damaged for pool in pools.pools if pool._files] == [0, 0]
    await pools.close()
    assert not list(tmp_path.rglob("*.kv")), "and then they are gone"


async def test_a_full_disk_is_read_and_written_again_when_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The tier was off, with all that lay there, until the node was started again."""
    pools, now = Pools(disk_path=tmp_path), 1000.0
    monkeypatch.setattr(disk_index, "time", SimpleNamespace(monotonic=lambda: now))
    caplog.set_level(logging.INFO)
    before = pools.fill(1)

    def send(process: int, command: TierCommand) -> bool:
        pools.pools[process].handle(command)
        return True

    tier = PooledHostTier(2, 2, send, num_files=9)
    for contents in pools.contents:
        tier.apply(contents)

    async def until_done() -> None:
        while tier.num_jobs:
            await asyncio.sleep(0)
            events: list[TierEvent] = [*pools.others, *pools.events]
            pools.others.clear()
            pools.events.clear()
            for event in events:
                tier.apply(event)

    async def stored(*names: int) -> None:
        for name in names:
            assert tier.store([(name_of(name), name)]) is not None
            await until_done()

    def is_full(fd: int, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    await stored(0, 1)
    assert len(tier.disk) == 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", is_full)
        await stored(2, 3)
    await stored(4)
    assert len(tier.disk) == 1 and tier.counters["disk_tier_unwritten_blocks"] == 1
    assert len(list(tmp_path.rglob("*.kv"))) == 2 and not list(tmp_path.rglob("*.part"))
    assert caplog.text.count("KV cannot be written to the disk tier, and serving goes on") == 1
    assert "No space left on device" in caplog.text
    assert tier.num_found([name_of(0)], 0) == 1
    tier.load([name_of(0)], [7])
    await until_done()
    np.testing.assert_array_equal(pools.cache.words[:, 7], before[:, 0])
    now += 31.0
    await stored(5, 6)
    assert len(tier.disk) > 1
    assert caplog.text.count("KV is written to the disk tier again") == 1
    assert tier.leftovers() == []
    await pools.close()


def test_folders_that_cannot_be_had_turn_tiers_off(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    view = KVCacheView(RankCache(SHAPE, 0, NUM_BLOCKS).handle, SHAPE)
    for tier, paths in (
        (Tier.HOST, {"memory_path": tmp_path / "file" / "memory"}),
        (Tier.DISK, {"disk_path": tmp_path / "file" / "disk"}),
    ):
        config = PoolConfig(num_slots=2, share=(0, 1), process=0, **paths)
        assert tier in HostPool(view, config, lambda event: None).contents().off


async def test_a_disk_that_cannot_be_listed_turns_the_tier_off_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process would end, be started again, and end again."""
    first = Pools(disk_path=tmp_path)
    await spilled(first)
    first.crash()
    scandir = os.scandir

    def fails(path: Path) -> Any:
        if len(path.name) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fails)
        pools = Pools(disk_path=tmp_path)
    for contents in pools.contents:
        assert not contents.files and "Input/output error" in contents.off[Tier.DISK]
    before = pools.fill(1)
    assert await pools.do(store(1, [0], [0])) == [[]]
    assert await pools.do(LoadMeta(2, [3], [0])) == [[]]
    np.testing.assert_array_equal(pools.cache.words[:, 3], before[:, 0])
    await pools.close()


async def test_a_process_does_not_wait_for_a_large_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV comes and goes while it looks at its files, and its end does not wait either."""
    first = Pools(disk_path=tmp_path)
    await spilled(first)
    first.crash()
    may_go_on: defaultdict[BlockFiles, threading.Event] = defaultdict(threading.Event)
    looks: list[BlockFiles] = []
    look, stop_scan = BlockFiles._name_in, BlockFiles.stop_scan

    def slow(self: BlockFiles, path: Path) -> bytes | None:
        looks.append(self)
        assert may_go_on[self].wait(30.0)
        return look(self, path)

    pools = Pools(disk_path=tmp_path)
    monkeypatch.setattr(BlockFiles, "_name_in", slow)
    for pool in pools.pools:
        await pool.tell_contents(0.01)
    while len(looks) < 2:
        await asyncio.sleep(0)
    assert not pools.others
    for pool in pools.pools:
        assert pool._files is not None
        may_go_on[pool._files].set()
    while len(pools.others) < 2:
        await asyncio.sleep(0)
    for contents in pools.others:
        assert isinstance(contents, TierContents)
        assert set(contents.files) == {name_of(0), name_of(1), name_of(2)}
    await pools.close()

    def stop_and_go_on(self: BlockFiles) -> None:
        stop_scan(self)
        may_go_on[self].set()

    monkeypatch.setattr(BlockFiles, "stop_scan", stop_and_go_on)
    monkeypatch.setattr(BlockFiles, "_name_in", look)
    ending = Pools(disk_path=tmp_path)
    looks.clear()
    monkeypatch.setattr(BlockFiles, "_name_in", slow)
    for pool in ending.pools:
        await pool.tell_contents(0.01)
    while len(looks) < 2:
        await asyncio.sleep(0)
    await ending.close()
    assert len(looks) == 2, "each has further files, and looks at none of them"
    assert not ending.others


def test_shares_of_blocks_that_not_everybody_has_are_removed() -> None:
    """Nobody counts them, so the disk would hold more than it may, until the node ends."""
    sent: list[tuple[int, TierCommand]] = []

    def send(process: int, command: TierCommand) -> bool:
        sent.append((process, command))
        return True

    def all_answer(job: TierJob) -> None:
        for process in range(2):
            tier.apply(HostTierEvent(job.job, process))

    def forgotten() -> list[tuple[int, list[bytes] | None]]:
        found = [(process, one.names) for process, one in sent if isinstance(one, ForgetMeta)]
        sent.clear()
        return found

    tier = PooledHostTier(2, 2, send, num_files=10)
    for process in range(2):
        tier.apply(TierContents(process, 0))
    assert tier.store([(b"a", 0), (b"b", 1)]) is not None
    stored = sent[0][1]
    assert isinstance(stored, StoreMeta)
    all_answer(stored)
    spill = sent[-1][1]
    assert isinstance(spill, SpillMeta)
    tier.apply(HostTierEvent(spill.job, 0))
    sent.clear()
    tier.process_is_gone(1)
    assert forgotten() == [(0, [b"a"]), (1, [b"a"])], "each may have written its share"

    tier.apply(TierContents(1, 1, dict(zip(stored.slots, stored.names, strict=True))))
    assert tier.store([(b"c", 0)]) is not None
    stored = sent[-1][1]
    assert isinstance(stored, StoreMeta)
    all_answer(stored)
    spill = sent[-1][1]
    assert isinstance(spill, SpillMeta)
    sent.clear()
    all_answer(spill)
    (known,) = [name for name in (b"a", b"b", b"c") if name in tier.disk]
    assert not forgotten()
    tier.process_is_gone(1)
    tier.apply(TierContents(1, 2))
    assert (0, [known]) in forgotten(), "the other's share went with its folder"


@pytest.mark.parametrize("kind", [StoreMeta, FetchMeta])
def test_what_was_on_its_way_when_all_was_forgotten_is_not_found(
    kind: type[StoreMeta | FetchMeta],
) -> None:
    sent: list[TierCommand] = []

    def send(process: int, command: TierCommand) -> bool:
        sent.append(command)
        return True

    tier = PooledHostTier(4, 1, send, num_files=4)
    tier.apply(TierContents(0, 0, files=[b"a"]))
    if kind is StoreMeta:
        assert tier.store([(b"b", 0)]) is not None
    else:
        assert tier.num_found([b"a"], 0) == 1
        assert tier.give_up(tier.load([b"a"], [0]))
    (job,) = sent
    assert isinstance(job, kind)
    tier.forget_all()
    tier.apply(HostTierEvent(job.job, 0))
    assert tier.num_found([b"a"], 0) == tier.num_found([b"b"], 0) == 0
    assert tier.store([(bytes([name]), name) for name in range(4)]) is not None, "slots are back"
    assert tier.num_jobs == 1


def test_nothing_is_loaded_beside_a_store_until_all_say_what_they_hold() -> None:
    """A process that was killed holds less than before, and the question of what the store has was
    asked when it still held all."""
    sent: list[TierCommand] = []

    def send(process: int, command: TierCommand) -> bool:
        sent.append(command)
        return True

    tier = PooledHostTier(4, 2, send, has_store=True)
    for process in range(2):
        tier.apply(TierContents(process, 0))
    assert tier.store([(b"a", 0)]) is not None
    (stored, _) = sent
    assert isinstance(stored, StoreMeta)
    for process in range(2):
        tier.apply(HostTierEvent(stored.job, process))
    put = sent[-1]
    assert isinstance(put, PutMeta) and tier.num_with_room([b"a", b"b"]) == 2
    tier.process_is_gone(1)
    assert tier.num_with_room([b"a", b"b"]) == 0
    tier.apply(TierContents(1, 1))
    assert tier.num_with_room([b"a", b"b"]) == 0, "the other one still gives the store its share"
    tier.apply(HostTierEvent(put.job, 0))
    assert tier.num_with_room([b"a", b"b"]) == 2 and b"a" not in tier


@pytest.mark.parametrize("lacking", [0, 1])
def test_files_count_only_where_every_process_has_its_disk(lacking: int) -> None:
    """Loads of blocks of which a share cannot be read would fail, and remove the other shares."""
    sent: list[TierCommand] = []

    def send(process: int, command: TierCommand) -> bool:
        sent.append(command)
        return True

    tier = PooledHostTier(4, 2, send, num_files=4)
    off = {Tier.DISK: "the folder is another node's"}
    for process in range(2):
        found = TierContents(process, 0, files=[b"a", b"b"])
        tier.apply(TierContents(process, 0, off=off) if process == lacking else found)
    assert tier.is_ready and not tier.has_disk
    assert tier.num_found([b"a", b"b"], 0) == 0 and tier.tier_of(b"a") is None
    assert tier.counters["disk_tier_blocks"] == 0 and not sent
    assert (tier.counters["host_tier_off"], tier.counters["disk_tier_off"]) == (0, 1)


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


def test_blocks_survive_crashes_or_are_computed_but_are_never_wrong(tmp_path: Path) -> None:
    """A slice of what `tier_stress` does for long."""
    stress = TierStress(tmp_path, seed=4)
    seen = stress.seen
    for _ in range(20):
        # How much comes back depends on how quick the processes are.
        stress.run(300, cycles_per_crash=120)
        if seen["compared"] > 40 and seen["spilled_blocks"] and seen["fetched_blocks"]:
            break
    stress.close()
    assert seen["compared"] > 40 and seen["wrong"] == 0, seen
    assert seen["deaths of a process"] + seen["deaths of an engine"] >= 2, seen
    assert seen["found after a start"] and seen["spilled_blocks"] and seen["fetched_blocks"], seen
