"""KV arrives exactly, whatever the two nodes look like."""

from __future__ import annotations

import pytest
from kv_caches import layout
from kv_loopback import Loopback

from kv_transfer.metadata import TransferEventKind

TP_SIZES = [(1, 1), (2, 1), (1, 2), (2, 2)]
BLOCK_SIZES = [(16, 16), (16, 64), (64, 16)]


def prompt_lengths(*block_sizes: int) -> list[int]:
    """Block bounds of both sides and their neighbours."""
    bounds = {size * factor for size in block_sizes for factor in (1, 2)}
    return sorted({n for bound in bounds for n in (bound - 1, bound, bound + 1)} | {1})


@pytest.mark.parametrize("processes", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("num_streams", [1, 2, 8])
@pytest.mark.parametrize("block_sizes", BLOCK_SIZES, ids=str)
@pytest.mark.parametrize("tp_sizes", TP_SIZES, ids=str)
async def test_every_pair_of_layouts(
    tp_sizes: tuple[int, int],
    block_sizes: tuple[int, int],
    num_streams: int,
    processes: tuple[int, int],
) -> None:
    theirs = layout(tp_size=tp_sizes[0], block_size=block_sizes[0])
    ours = layout(tp_size=tp_sizes[1], block_size=block_sizes[1])
    loopback = Loopback(
        theirs,
        ours,
        num_streams=num_streams,
        producer_processes=processes[0],
        consumer_processes=processes[1],
        transport="grpcio" if num_streams == 2 else "h2",
        server="grpcio" if processes == (1, 2) else "h2",
    )
    async with loopback as (producer, consumer):
        pulls = {}
        for seed, num_tokens in enumerate([15, 64, 65]):
            transfer_id = producer.export_computed(seed, num_tokens)
            pulls[transfer_id] = (
                seed,
                num_tokens,
                consumer.pull(producer.peer, transfer_id, num_tokens),
            )
        for transfer_id, (seed, num_tokens, block_ids) in pulls.items():
            await consumer.until_all(TransferEventKind.RECEIVED, transfer_id)
            consumer.check(seed, range(num_tokens), block_ids)
            consumer.release(producer.peer, transfer_id)
            await producer.until_all(TransferEventKind.RELEASED, transfer_id)
            assert producer.count(TransferEventKind.STAGED, transfer_id) == producer.num_processes
        await consumer.until_empty()
        await producer.until_empty()
