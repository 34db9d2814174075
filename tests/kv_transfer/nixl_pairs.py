"""Two ends that move KV through NIXL, over UCX's TCP and between real agents of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from kv_caches import UNTOUCHED, GroupBlocks, by_group, layout
from kv_loopback import Loopback, LoopbackConsumer, LoopbackProducer, until
from test_direct_copies import pulled_then_exported

from kv_transfer.layout import KVLayout
from kv_transfer.memory.devices.copy_stream import Numbers
from kv_transfer.metadata import TransferEventKind
from kv_transfer.transports.nixl.agent import NixlAgent, Transfer
from kv_transfer.transports.nixl.consumer import NixlConsumer
from kv_transfer.transports.nixl.filled_slots import FilledSlots
from kv_transfer.transports.nixl.producer import NixlProducer
from kv_transfer.transports.nixl.window_reads import ReadQueue

SHAPE = layout()
NUM_TOKENS = 129
CHUNK_BYTES = 2048


def kv_bytes(shape: KVLayout) -> int:
    """Returns how many bytes messages have at least that bring the KV themselves."""
    return NUM_TOKENS // shape.groups[0].block_size * shape.block_bytes // 2


def loopback(theirs: KVLayout = SHAPE, ours: KVLayout = SHAPE, **settings: Any) -> Loopback:
    return Loopback(theirs, ours, data="nixl,stream", num_streams=2, **settings)


def consumers(node: LoopbackConsumer) -> Iterator[NixlConsumer]:
    for receiver in node.receivers:
        yield from (one for one in receiver._transports if isinstance(one, NixlConsumer))


def queue_of(node: LoopbackConsumer) -> ReadQueue:
    """Returns the reads of its only process."""
    (consumer,) = consumers(node)
    assert consumer.queue is not None
    return consumer.queue


def filled_of(node: LoopbackProducer) -> FilledSlots:
    """Returns the slots of its only process."""
    (sender,) = node.senders
    (producer,) = (one for one in sender.transports if isinstance(one, NixlProducer))
    assert producer.filled is not None
    return producer.filled


async def pull(prefill: LoopbackProducer, decode: LoopbackConsumer, seed: int) -> int:
    """Moves a prompt and checks it. Returns how many bytes of messages it took."""
    before = sum(sender.bytes_sent for sender in prefill.senders)
    transfer_id, target = await pulled_then_exported(prefill, decode, seed, NUM_TOKENS)
    await decode.until_all(TransferEventKind.RECEIVED, transfer_id)
    decode.check(seed, range(NUM_TOKENS), target)
    decode.release(prefill.peer, transfer_id)
    await prefill.until_all(TransferEventKind.RELEASED, transfer_id)
    return sum(sender.bytes_sent for sender in prefill.senders) - before


async def connected(prefill: LoopbackProducer, decode: LoopbackConsumer) -> None:
    """The first KV of a peer comes over the stream; meanwhile agents find each other."""
    assert await pull(prefill, decode, 1) > kv_bytes(prefill.layout)
    peers = [peer for one in consumers(decode) for peer in one.peers]
    assert peers
    await until(lambda: all(peer.first_word.has_ended for peer in peers))


async def both_empty(prefill: LoopbackProducer, decode: LoopbackConsumer) -> None:
    await prefill.until_empty()
    await decode.until_empty()


def untouched(node: LoopbackConsumer, block_ids: GroupBlocks) -> bool:
    """Returns whether nothing was written to these blocks."""
    pages = (cache.pages[:, ids] for cache in node.caches for ids in by_group(block_ids))
    return all(bool((found == UNTOUCHED).all()) for found in pages)


class HeldReads:
    """Lets reads of more than a word seem to go on until `go`; at most `most` of them."""

    def __init__(self, patch: Any, most: int = 1 << 30) -> None:
        self.num_held = 0
        self._is_held = True
        begin = NixlAgent.read

        def read(agent: NixlAgent, name: str, *rest: Any) -> Transfer:
            transfer = begin(agent, name, *rest)
            sizes: Numbers = rest[2]
            if self._is_held and self.num_held < most and np.max(sizes) > 4:
                self.num_held += 1
                self._hold(transfer)
            return transfer

        patch.setattr(NixlAgent, "read", read)

    def go(self) -> None:
        self._is_held = False

    def _hold(self, transfer: Transfer) -> None:
        is_done = transfer.is_done
        transfer.is_done = lambda: not self._is_held and is_done()  # type: ignore[method-assign]
