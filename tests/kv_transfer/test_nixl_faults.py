"""A fault between the windows of two ends costs one transfer, and slots at most."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from kv_loopback import Loopback, LoopbackConsumer, LoopbackProducer, until
from late_device import LateDevice
from nixl_pairs import (
    CHUNK_BYTES,
    NUM_TOKENS,
    SHAPE,
    HeldReads,
    both_empty,
    connected,
    filled_of,
    kv_bytes,
    loopback,
    pull,
    queue_of,
    untouched,
)
from test_direct_copies import pulled_then_exported

from kv_transfer.metadata import ComputedMeta, TransferEventKind
from kv_transfer.transports.nixl.agent import NixlAgent, NixlError, Transfer
from kv_transfer.transports.nixl.filled_slots import FilledSlot
from kv_transfer.transports.nixl.window_export import WindowPull
from kv_transfer.transports.nixl.window_reads import ReadQueue, WindowRead

FIRST_BYTE, STAGED, RELEASED, RECEIVED, FAILED, ABORTED = TransferEventKind
KV_BYTES = kv_bytes(SHAPE)
ONE_SLOT = (CHUNK_BYTES, CHUNK_BYTES)


@pytest.fixture(autouse=True)
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")


async def given_up(pair: tuple[LoopbackProducer, LoopbackConsumer], transfer_id: str) -> None:
    """Both nodes are done with a transfer that has failed."""
    prefill, decode = pair
    decode.release(prefill.peer, transfer_id, complete=False)
    await prefill.until_all(ABORTED, transfer_id)


async def test_what_was_read_after_the_lease_had_ended_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slot may have held something else already. That is no reason to avoid the peer."""
    read_word = ReadQueue._read_word
    async with loopback() as (prefill, decode):
        await connected(prefill, decode)

        def too_late(queue: ReadQueue, read: WindowRead, place: int) -> Transfer:
            for filled in list(filled_of(prefill)._unread.values()):
                assert filled.lease is not None
                filled.lease.release()
            return read_word(queue, read, place)

        with monkeypatch.context() as patch:
            patch.setattr(ReadQueue, "_read_word", too_late)
            transfer_id, target = await pulled_then_exported(prefill, decode, 3, NUM_TOKENS)
            (event,) = await decode.until_all(FAILED, transfer_id)
        assert "let go" in event.reason and event.retryable
        assert event.num_tokens_kept == 0 and untouched(decode, target)
        await given_up((prefill, decode), transfer_id)
        await both_empty(prefill, decode)
        assert await pull(prefill, decode, 4) < KV_BYTES


async def test_what_came_before_a_read_failed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer of this prompt is one chunk, in a slot of its own. The last one does not come."""
    read_word, num_read = ReadQueue._read_word, 0

    def fails_at_last(queue: ReadQueue, read: WindowRead, place: int) -> Transfer:
        nonlocal num_read
        num_read += 1
        if num_read == SHAPE.num_layers:
            raise NixlError("the cable was pulled")
        return read_word(queue, read, place)

    async with loopback(windows=ONE_SLOT) as (prefill, decode):
        await connected(prefill, decode)
        monkeypatch.setattr(ReadQueue, "_read_word", fails_at_last)
        transfer_id, target = await pulled_then_exported(prefill, decode, 3, 32)
        (event,) = await decode.until_all(FAILED, transfer_id)
        assert event.num_tokens_kept == 0, "the last layer lacks all of them"
        assert event.stats.num_bytes == (SHAPE.num_layers - 1) * CHUNK_BYTES
        (cache,) = decode.caches
        cache.write(3, SHAPE.num_layers - 1, range(32), target)
        cache.check(3, range(32), target)


@pytest.mark.parametrize("windows", [ONE_SLOT, (1 << 16, 1 << 16)], ids=str)
async def test_after_a_read_has_failed_kv_comes_over_the_stream(
    windows: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The holder's only slot may not be free any more: then it sends nothing but signs of life, and
    the next one is enough to notice."""
    async with loopback(windows=windows) as (prefill, decode):
        await connected(prefill, decode)

        def fails(*_: object) -> bool:
            raise NixlError("a read failed: the cable was pulled")

        with monkeypatch.context() as patch:
            patch.setattr(NixlAgent, "has_ended", fails)
            patch.setattr(Transfer, "is_done", fails)
            transfer_id, target = await pulled_then_exported(prefill, decode, 4, NUM_TOKENS)
            (event,) = await decode.until_all(FAILED, transfer_id)
        assert "cable" in event.reason and event.retryable and untouched(decode, target)
        await given_up((prefill, decode), transfer_id)
        await both_empty(prefill, decode)
        assert await pull(prefill, decode, 5) > KV_BYTES
        assert sum("cannot be read through NIXL" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("num_slots", [1, 4])
async def test_a_read_that_never_ends_costs_its_slot(
    num_slots: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its transfer fails when nothing has come for long; the process lives. What that peer has
    comes over the stream, what others have too where no slot is left."""
    window = CHUNK_BYTES if num_slots == 1 else num_slots * 4096
    pair = loopback(windows=(1 << 14, window), stall_timeout_s=0.4)
    other = LoopbackProducer(pair.producer.config, SHAPE, epoch=8)
    await other.start()
    async with pair as (prefill, decode):
        told: list[BaseException] = []
        decode.views[0].copies.on_error = told.append
        for node in (prefill, other):
            await connected(node, decode)
        queue = queue_of(decode)
        slots = queue.window.slots
        held = HeldReads(monkeypatch, most=1)
        transfer_id, _ = await pulled_then_exported(prefill, decode, 4, NUM_TOKENS)
        decode.receivers[0].prompt_computed(ComputedMeta(transfer_id, 0))
        (event,) = await decode.until_all(FAILED, transfer_id)
        assert event.retryable and "for 0.4 s" in event.reason and held.num_held == 1
        await given_up((prefill, decode), transfer_id)
        await prefill.until_empty()
        await until(lambda: slots.num_free == num_slots - 1)

        assert await pull(prefill, decode, 5) > KV_BYTES, "over the stream"
        await until(lambda: num_slots > 1 or queue.is_stuck(0.4))
        through_nixl = await pull(other, decode, 6) < KV_BYTES
        assert through_nixl == (num_slots > 1)
        assert slots.num_free == num_slots - 1 and not told
        assert any("did not end" in line for line in caplog.messages)

        held.go()
        await decode.until_empty()
        assert await pull(other, decode, 7) < KV_BYTES
    await other.close()


async def test_reads_that_hang_behind_the_end_of_the_call_fail_their_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All was told, and the call is over: nothing comes that says how long it takes."""
    async with loopback(stall_timeout_s=0.4) as (prefill, decode):
        await connected(prefill, decode)
        held = HeldReads(monkeypatch)
        transfer_id, target = await pulled_then_exported(prefill, decode, 4, 32)
        await until(lambda: prefill.senders[0].num_pulls == 0)
        assert decode.count(RECEIVED, transfer_id) == 0
        assert filled_of(prefill).num_unread == 1, "its last slot is kept"
        (event,) = await decode.until_all(FAILED, transfer_id)
        assert "said nothing for 0.4 s" in event.reason and event.retryable
        held.go()
        await given_up((prefill, decode), transfer_id)
        await both_empty(prefill, decode)
        assert untouched(decode, target)


@pytest.mark.parametrize("who", ["puller", "holder"])
async def test_called_off_while_it_is_read(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that still arrive change no block, and their slot serves the next."""
    async with loopback(windows=(16384, 16384)) as (prefill, decode):
        await connected(prefill, decode)
        with monkeypatch.context() as patch:
            held = HeldReads(patch)
            transfer_id, target = await pulled_then_exported(prefill, decode, 4, NUM_TOKENS)
            await until(lambda: held.num_held > 0)
            if who == "puller":
                decode.abort(transfer_id)
                await decode.until_all(ABORTED, transfer_id)
                await given_up((prefill, decode), transfer_id)
            else:
                prefill.abort(transfer_id)
                await decode.until_all(FAILED, transfer_id)
            await until(lambda: prefill.senders[0].num_pulls == 0)
            await prefill.until_empty()
            assert not queue_of(decode).is_empty()
            held.go()
            await decode.until_empty()
            assert untouched(decode, target)
        assert await pull(prefill, decode, 5) < KV_BYTES, "it was nobody's fault"
        await both_empty(prefill, decode)


@pytest.fixture
def device() -> Iterator[LateDevice]:
    """Copies at once, until a test holds it; in the end it goes on, whatever came of the test."""
    device = LateDevice(is_held=False)
    yield device
    device.go()


async def test_copies_that_are_on_their_way_when_the_export_ends_keep_their_slots(
    device: LateDevice,
) -> None:
    async with loopback(windows=(16384, 16384), devices=(device, None)) as (prefill, decode):
        await connected(prefill, decode)
        slots = filled_of(prefill).window.slots
        device.is_held = True
        transfer_id, target = await pulled_then_exported(prefill, decode, 4, NUM_TOKENS)
        await until(lambda: slots.num_free == 0)
        unread = filled_of(prefill).num_unread
        prefill.abort(transfer_id)
        await prefill.until_all(ABORTED, transfer_id)
        await decode.until_all(FAILED, transfer_id)
        num_free = slots.num_free
        device.go()
        assert (unread, num_free) == (0, 0), "something may still be written to them"
        await until(lambda: slots.num_free == slots.num_slots)
        assert untouched(decode, target)
        await both_empty(prefill, decode)
        assert await pull(prefill, decode, 5) < KV_BYTES


async def test_a_slot_of_ours_serves_nobody_before_it_is_copied_out_of(device: LateDevice) -> None:
    async with loopback(windows=(16384, 4096), devices=(None, device)) as (prefill, decode):
        await connected(prefill, decode)
        device.is_held = True
        transfer_id, target = await pulled_then_exported(prefill, decode, 4, NUM_TOKENS)
        slots = queue_of(decode).window.slots
        await until(lambda: device.stream.num_waiting > 0 and not queue_of(decode).num_under_way)
        issued = device.stream.num_waiting
        for _ in range(200):
            await asyncio.sleep(0)
        found = slots.num_free, device.stream.num_waiting
        device.go()
        assert found == (0, issued)
        await decode.until_all(RECEIVED, transfer_id)
        decode.check(4, range(NUM_TOKENS), target)
        decode.release(prefill.peer, transfer_id)
        await prefill.until_all(RELEASED, transfer_id)
        await both_empty(prefill, decode)


@pytest.mark.parametrize("windows", [ONE_SLOT, (1 << 16, 1 << 16)], ids=str)
async def test_a_message_that_arrives_damaged_is_repeated(
    windows: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that it told of are copied once more. Its slot is not read, and free all the same."""
    message, is_damaged = WindowPull._message, False

    def damaged(pull: WindowPull, filled: FilledSlot) -> bytes:
        """Damages the last message: its slot is not free before the call has ended."""
        nonlocal is_damaged
        data = message(pull, filled)
        if is_damaged or not pull.is_complete:
            return data
        is_damaged = True
        return data[:-1] + bytes([data[-1] ^ 1])

    async with loopback(windows=windows) as (prefill, decode):
        await connected(prefill, decode)
        with monkeypatch.context() as patch:
            patch.setattr(WindowPull, "_message", damaged)
            transfer_id, target = await pulled_then_exported(prefill, decode, 4, NUM_TOKENS)
            await decode.until_all(RECEIVED, transfer_id)
        decode.check(4, range(NUM_TOKENS), target)
        assert decode.receivers[0].corrupt_chunks == 1
        decode.release(prefill.peer, transfer_id)
        await prefill.until_all(RELEASED, transfer_id)
        await both_empty(prefill, decode)


async def test_notices_of_others_free_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback() as (prefill, decode):
        await connected(prefill, decode)
        filled = filled_of(prefill)
        held = HeldReads(monkeypatch)
        transfer_id, _ = await pulled_then_exported(prefill, decode, 4, 32)
        await until(lambda: filled.num_unread == 1)
        (slot, number) = next(iter(filled._unread))
        stranger = NixlAgent(["127.0.0.1"])
        name = stranger.connect(filled.window.agent.metadata)
        taken: list[bytes] = []
        notices = filled.window.agent.notices

        def noting() -> list[bytes]:
            found = notices()
            taken.extend(found)
            return found

        monkeypatch.setattr(filled.window.agent, "notices", noting)
        words = [
            np.array(pair, "<u4").tobytes() for pair in ((slot, number + 1), (slot + 1, number))
        ]
        sent = [b"\0", b"seven b", b"\xff" * 8, b"\0" * 9, *words]
        for notice in sent:
            stranger._agent.send_notif(name, notice)

        def arrived() -> bool:
            stranger.notices()
            return len(taken) >= len(sent)

        await until(arrived)
        assert sorted(taken) == sorted(sent) and filled.num_unread == 1
        held.go()
        await decode.until_all(RECEIVED, transfer_id)
        await until(lambda: filled.num_unread == 0)


async def test_who_reads_nothing_makes_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that has died leaves its calls open, which would keep the slots. Alone it may take as
    long as it likes."""
    pair = loopback(windows=(4096, 1 << 16), stall_timeout_s=20.0)
    pair.producer = LoopbackProducer(replace(pair.producer.config, stall_timeout_s=0.3), SHAPE)
    second = Loopback(SHAPE, SHAPE, data="nixl,stream", num_streams=2).consumer
    async with pair as (prefill, decode):
        for node in (decode, second):
            await connected(prefill, node)
        filled = filled_of(prefill)
        with monkeypatch.context() as patch:
            held = HeldReads(patch)
            dead, target = await pulled_then_exported(prefill, decode, 4, NUM_TOKENS)
            await until(lambda: filled.num_unread == 2)
            (first, _) = filled._unread.values()
            await until(lambda: filled._clock_s - first.since > 0.4)
            assert decode.count(FAILED, dead) == 0
        assert await pull(prefill, second, 5) < KV_BYTES
        (event,) = await decode.until_all(FAILED, dead)
        assert "others wait" in event.reason and event.retryable and untouched(decode, target)
        held.go()
        await given_up((prefill, decode), dead)
        await both_empty(prefill, decode)
        await second.until_empty()
        await second.close()
