"""A transfer that does not end well tells how much of the prompt's beginning is complete, and the
next attempt needs only the rest."""

from __future__ import annotations

import pytest
from kv_caches import layout
from kv_loopback import Loopback, LoopbackConsumer, LoopbackProducer, new_transfer_id, until

from kv_transfer.layout import KVLayout
from kv_transfer.metadata import TransferEventKind

FIRST_BYTE, STAGED, RELEASED, RECEIVED, FAILED, ABORTED = TransferEventKind
FIRST, WHOLE = 60, 200
"""Tokens of the first step, all of whose layers come, and of the prompt."""


def complete(consumer: LoopbackConsumer) -> int:
    """Leading tokens that all processes have, of the transfer in motion."""
    return min(t.num_tokens_complete for r in consumer.receivers for t in r._transfers)


async def first_step_has_come(
    producer: LoopbackProducer, consumer: LoopbackConsumer, at_least: int
) -> tuple[str, list[int], list[int]]:
    """And a layer of the second one."""
    transfer_id = new_transfer_id()
    source = producer.blocks.take(producer.layout, WHOLE)
    target = consumer.pull(producer.peer, transfer_id, WHOLE)
    producer.export(transfer_id, WHOLE)
    await until(lambda: all(sender.num_pulls > 0 for sender in producer.senders))
    producer.send(transfer_id, 1, range(FIRST), source, WHOLE)
    for layer in range(producer.layout.num_layers):
        producer.compute(1, 1, layer, range(FIRST), source)
    producer.send(transfer_id, 2, range(FIRST, WHOLE), source, WHOLE)
    producer.compute(1, 2, 0, range(FIRST, WHOLE), source)
    await until(lambda: complete(consumer) >= at_least)
    return transfer_id, source, target


LAYOUTS = [
    (layout(), layout(), 48),
    (layout(tp_size=2), layout(), 48),
    (layout(), layout(tp_size=2, block_size=64), 48),
    (layout(block_size=64), layout(), 0),
]
"""The prefill node's, the decode node's, and the tokens of whole blocks in the first step."""


@pytest.mark.parametrize("data", ["stream", "cuda_ipc,stream"])
@pytest.mark.parametrize(("theirs", "ours", "expected"), LAYOUTS)
async def test_the_next_attempt_goes_on_behind_what_is_complete(
    theirs: KVLayout, ours: KVLayout, expected: int, data: str
) -> None:
    loopback = Loopback(
        theirs, ours, producer_processes=2, consumer_processes=2, chunk_bytes=256, data=data
    )
    async with loopback as (producer, consumer):
        found = await first_step_has_come(producer, consumer, expected)
        transfer_id, source, target = found
        consumer.abort(transfer_id)
        events = await consumer.until_all(ABORTED, transfer_id)
        kept = min(event.num_tokens_kept for event in events)
        assert expected <= kept < FIRST
        consumer.release(producer.peer, transfer_id, complete=False)
        await producer.until_all(ABORTED, transfer_id)

        producer.compute_all(1, WHOLE, source)
        producer.export(transfer_id, WHOLE, attempt=1)
        producer.send(transfer_id, -1, range(WHOLE), source, WHOLE, attempt=1)
        consumer.pull(
            producer.peer, transfer_id, WHOLE, first_token=kept, attempt=1, block_ids=target
        )
        await consumer.until_all(RECEIVED, transfer_id, attempt=1)
        consumer.check(1, range(WHOLE), target)
        consumer.release(producer.peer, transfer_id, attempt=1)
        await producer.until_all(RELEASED, transfer_id, attempt=1)
        await producer.until_empty()
        await consumer.until_empty()


async def test_a_transfer_that_never_began_has_nothing() -> None:
    shape = layout()
    async with Loopback(shape, shape) as (producer, consumer):
        transfer_id = new_transfer_id()
        consumer.pull(producer.peer, transfer_id, WHOLE, first_token=32)
        consumer.abort(transfer_id)
        (event,) = await consumer.until_all(ABORTED, transfer_id)
        assert event.num_tokens_kept in (0, 32), "nothing was learnt"
