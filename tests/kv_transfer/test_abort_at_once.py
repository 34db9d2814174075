"""A pull that is called off in the same breath in which it was asked for."""

from __future__ import annotations

from kv_caches import layout
from kv_loopback import Loopback

from kv_transfer.metadata import TransferEventKind


async def test_pull_that_is_aborted_before_its_first_step() -> None:
    async with Loopback(layout(), layout()) as (producer, consumer):
        transfer_id = producer.export_computed(1, 40)
        consumer.pull(producer.peer, transfer_id, 40)
        consumer.abort(transfer_id)
        await consumer.until_all(TransferEventKind.ABORTED, transfer_id)
        await consumer.until_empty()
        consumer.release(producer.peer, transfer_id, complete=False)
        await producer.until_all(TransferEventKind.ABORTED, transfer_id)
        await producer.until_empty()
