"""Nothing is believed, and nothing freed, before copies that take time are done."""

from __future__ import annotations

import asyncio
import random
import time
from unittest.mock import create_autospec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_caches import layout
from kv_loopback import Loopback, new_transfer_id, until
from late_device import LateDevice

from kv_transfer.errors import StagingFull
from kv_transfer.memory.devices.copy_queue import CopyQueue
from kv_transfer.memory.devices.copy_stream import CopyStream, Fence
from kv_transfer.memory.inbox import Inbox
from kv_transfer.metadata import TransferEventKind

FIRST_BYTE, STAGED, RELEASED, RECEIVED, FAILED, ABORTED = TransferEventKind
SHAPE = layout()


class CountedFence(Fence):
    """A fence of one copy, which counts how often it is looked at."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.is_over = False

    def is_done(self) -> bool:
        self.num_looks += 1
        return self.is_over

    def wait(self) -> None:
        self.is_over = True


def queue_of(*fences: Fence) -> CopyQueue:
    """Returns a queue whose next callbacks wait for these."""
    stream = create_autospec(CopyStream, instance=True)
    stream.fence.side_effect = fences
    return CopyQueue(stream)


async def breathe() -> None:
    """Long enough for everything that may happen at once to have happened."""
    for _ in range(50):
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)


async def test_kv_is_sent_when_it_was_copied_out_and_not_before() -> None:
    device = LateDevice()
    async with Loopback(SHAPE, SHAPE, num_streams=2, devices=(device, None)) as (prefill, decode):
        assert device.num_pinned_bytes > 0
        transfer_id = new_transfer_id()
        source = prefill.blocks.take(SHAPE, 60)
        target = decode.pull(prefill.peer, transfer_id, 60)
        prefill.export(transfer_id, 60)
        prefill.send(transfer_id, 1, range(60), source, 60)
        for layer in range(3):
            prefill.compute(1, 1, layer, range(60), source)
        await until(lambda: device.stream.num_waiting > 0)
        await breathe()
        assert decode.count(FIRST_BYTE, transfer_id) == 0
        device.stream.run(2)  # the blocks of one chunk at most
        await until(lambda: decode.count(FIRST_BYTE, transfer_id) == 1)
        assert prefill.count(STAGED, transfer_id) == 0
        device.go()
        await prefill.until_all(STAGED, transfer_id)
        await decode.until_all(RECEIVED, transfer_id)
        decode.check(1, range(60), target)
        decode.release(prefill.peer, transfer_id)
        await prefill.until_all(RELEASED, transfer_id)
        await prefill.until_empty()


async def test_a_slot_that_a_copy_still_writes_is_kept_after_an_abort() -> None:
    device = LateDevice()
    async with Loopback(SHAPE, SHAPE, devices=(device, None)) as (prefill, _):
        transfer_id = prefill.export_computed(1, 60)
        await until(lambda: device.stream.num_waiting > 0)
        prefill.abort(transfer_id)
        await prefill.until_all(ABORTED, transfer_id)
        assert prefill.staged_bytes > 0
        device.go()
        await until(lambda: prefill.staged_bytes == 0)
        await prefill.until_empty()


async def test_received_means_that_the_last_copy_is_done() -> None:
    device = LateDevice()
    async with Loopback(SHAPE, layout(block_size=64), devices=(None, device)) as (prefill, decode):
        transfer_id = prefill.export_computed(1, 100)
        target = decode.pull(prefill.peer, transfer_id, 100)
        await until(lambda: decode.receivers[0].num_pulls == 0 and device.stream.num_waiting > 0)
        await breathe()
        assert decode.count(RECEIVED, transfer_id) == 0
        assert decode.caches[0].untouched_except([])
        device.stream.run(device.stream.num_waiting - 1)
        await breathe()
        assert decode.count(RECEIVED, transfer_id) == 0
        device.go()
        await decode.until_all(RECEIVED, transfer_id)
        decode.check(1, range(100), target)
        decode.release(prefill.peer, transfer_id)
        await prefill.until_all(RELEASED, transfer_id)


@pytest.mark.parametrize("data", ["stream", "cuda_ipc,stream"])
async def test_an_abort_is_answered_when_no_copy_is_left_that_writes(
    data: str,
) -> None:
    """Asked twice, as the scheduler half does when a transfer has failed meanwhile."""
    device = LateDevice()
    async with Loopback(SHAPE, SHAPE, data=data, devices=(None, device)) as (prefill, decode):
        transfer_id = prefill.export_computed(1, 100)
        decode.pull(prefill.peer, transfer_id, 100)
        await until(lambda: device.stream.num_waiting > 0)
        decode.abort(transfer_id)
        await breathe()
        decode.abort(transfer_id)
        await breathe()
        assert decode.count(ABORTED, transfer_id) == 0
        device.stream.run()
        await decode.until_all(ABORTED, transfer_id)
        assert device.stream.num_waiting == 0
        await breathe()
        assert device.stream.num_waiting == 0
        assert decode.count(ABORTED, transfer_id) == 1
        device.go()
        decode.release(prefill.peer, transfer_id, complete=False)
        await prefill.until_all(ABORTED, transfer_id)
        await decode.until_empty()


@pytest.mark.parametrize("data", ["stream", "cuda_ipc,stream"])
async def test_an_abort_of_what_has_failed_leaves_its_end_to_the_copies(data: str) -> None:
    """All processes lose their peer in the same moment: the first one's word calls off the others,
    which have failed too and only wait for their copies."""
    device = LateDevice()
    async with Loopback(SHAPE, SHAPE, data=data, devices=(None, device)) as (prefill, decode):
        transfer_id = new_transfer_id()
        source = prefill.blocks.take(SHAPE, 100)
        prefill.compute_all(1, 100, source)
        decode.pull(prefill.peer, transfer_id, 100)
        prefill.export(transfer_id, 100)
        prefill.send(transfer_id, -1, range(40), source, 100)
        await until(lambda: device.stream.num_waiting > 0)
        prefill.abort(transfer_id)
        await prefill.until_all(ABORTED, transfer_id)
        await breathe()
        decode.abort(transfer_id)
        await breathe()
        ends = decode.count(FAILED, transfer_id) + decode.count(ABORTED, transfer_id)
        device.go()
        assert ends == 0, "copies were under way"
        await decode.until_all(FAILED, transfer_id)
        await decode.until_empty()


async def test_blocks_that_changed_while_they_were_copied_are_not_believed() -> None:
    """The holder let go when the puller had heard of all blocks but copied none."""
    device = LateDevice()
    loopback = Loopback(SHAPE, SHAPE, data="cuda_ipc,stream", devices=(None, device))
    async with loopback as (prefill, decode):
        transfer_id = new_transfer_id()
        source = prefill.blocks.take(SHAPE, 100)
        prefill.compute_all(1, 100, source)
        decode.pull(prefill.peer, transfer_id, 100)
        await until(lambda: len(prefill.senders[0].early_pulls) > 0)
        prefill.export(transfer_id, 100)
        await until(lambda: prefill.senders[0].num_pulls > 0)
        prefill.send(transfer_id, -1, range(100), source, 100)
        await until(lambda: decode.receivers[0].num_pulls == 0 and device.stream.num_waiting > 0)
        assert decode.views[0].inbox.used == 0, "names need no memory that a device knows"
        prefill.abort(transfer_id)
        await prefill.until_all(ABORTED, transfer_id)
        prefill.compute_all(2, 100, source)
        device.go()
        (event,) = await decode.until_all(FAILED, transfer_id)
        assert "let go" in event.reason and event.retryable
        await decode.until_empty()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30))
def test_the_inbox_never_lends_memory_that_a_copy_still_reads(seed: int) -> None:
    rng = random.Random(seed)

    async def run() -> None:
        device = LateDevice()
        queue = CopyQueue(device.new_stream())
        inbox = Inbox(device, queue, 2000, 64)
        out = np.zeros(200 * 400, np.uint8)
        expected = np.zeros_like(out)
        for i in range(200):
            payload = np.full(rng.choice([1, 10, 100, 333, 400]), i % 251 + 1, np.uint8)
            address = inbox.lend(payload)
            start, size = 400 * i, payload.nbytes
            expected[start : start + size] = payload
            queue.stream.copy(*np.array([[out.ctypes.data + start], [address], [size]]))
            inbox.copies_issued()
            assert inbox.used <= 1000
            if rng.random() < 0.3:
                device.stream.run(rng.randrange(4))
        device.go()
        await queue.settled()
        assert inbox.used == 0
        np.testing.assert_array_equal(out, expected)
        with pytest.raises(StagingFull, match="staging_bytes"):
            inbox.lend(np.zeros(1001, np.uint8))

    asyncio.run(run())


async def test_copies_that_nobody_waits_for_are_seldom_looked_at() -> None:
    """A loop that never sleeps would keep Python's lock from the threads beside it."""
    fence = CountedFence()
    queue = queue_of(fence)
    was_called = asyncio.Event()
    began = time.monotonic()
    queue.then_sometime(was_called.set)
    await asyncio.sleep(0.05)
    assert fence.num_looks <= (time.monotonic() - began) * 1000 + 2
    fence.is_over = True
    async with asyncio.timeout(60):
        await was_called.wait()


async def test_who_waits_is_called_behind_those_who_do_not_and_wakes_the_queue() -> None:
    fences = [CountedFence() for _ in range(3)]
    queue = queue_of(*fences)
    called: list[int] = []
    queue.then_sometime(lambda: called.append(0))
    await asyncio.sleep(0.05)
    queue.then(lambda: called.append(1))
    before = fences[0].num_looks
    for _ in range(5):
        # Pauses are longer than all of these together: only a queue that was woken looks now.
        await asyncio.sleep(0)
    assert fences[0].num_looks > before
    for fence in fences:
        fence.is_over = True
    async with asyncio.timeout(60):
        await queue.settled()
    assert called == [0, 1]
