"""Blocks of a GPU's cache that go to host memory and come back; the stream waits for each layer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
import torch
from gpu_caches import GpuRankCache, gpu_layout
from kv_nodes import KVNode, poll_until

from kv_transfer.config import KVTransferConfig
from kv_transfer.metadata import KVConnectorOutput
from kv_transfer.tier import LoadTicket
from kv_transfer.tiers.host_tier import PooledHostTier

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

SHAPE = gpu_layout()
NUM_STORED = 16


@pytest.fixture
def node() -> Iterator[KVNode]:
    """The driver pins pages of a memory file system, and none of a disk's."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield from _node(folder)


def _node(folder: str) -> Iterator[KVNode]:
    config = KVTransferConfig(
        kv_role="kv_producer",
        num_processes=2,
        host_tier_bytes=32 * SHAPE.block_bytes,
        host_tier_path=folder,
    )
    made = KVNode(config, SHAPE, cache_type=GpuRankCache)
    yield made
    made.close()


def tier_of(node: KVNode) -> PooledHostTier:
    tier = node.connector.host_tier
    assert tier is not None
    return tier


def until_done(node: KVNode, job: int) -> bool:
    found: dict[int, bool] = {}

    def look() -> bool:
        found.update((node.connector.get_finished() or KVConnectorOutput()).host_jobs)
        return job in found

    poll_until(look)
    return found[job]


def stored(node: KVNode) -> tuple[list[bytes], torch.Tensor]:
    """Returns the names of blocks that were stored, and what they hold."""
    tier, words = tier_of(node), node.caches[0].tensor
    poll_until(lambda: node.connector.get_finished() is None and tier.is_ready)
    words.random_()
    before = words[:, :NUM_STORED].clone()
    torch.cuda.synchronize()
    names = [bytes([index]) * 32 for index in range(NUM_STORED)]
    begun = tier.store([(name, index) for index, name in enumerate(names)])
    assert begun is not None and begun[1] == NUM_STORED and until_done(node, begun[0])
    words.zero_()
    torch.cuda.synchronize()
    return names, before


def test_every_byte_comes_back(node: KVNode) -> None:
    names, before = stored(node)
    blocks = list(range(20, 20 + NUM_STORED))
    assert until_done(node, tier_of(node).load(names, blocks))
    words = node.caches[0].tensor
    assert torch.equal(words[:, blocks], before)
    assert not words[:, :20].any() and not words[:, 20 + NUM_STORED :].any()


def test_the_stream_reads_no_layer_before_it_is_loaded(node: KVNode) -> None:
    """All kernels are launched before the load is even asked for."""
    names, before = stored(node)
    tier, words, worker = tier_of(node), node.caches[0].tensor, node.workers[0]
    tier._tickets._places.append(2)
    blocks = list(range(20, 20 + NUM_STORED))
    ticket = LoadTicket(2, tier._jobs._last + 2)  # Behind the number of the job.
    seen = []
    for layer in range(SHAPE.num_layers):
        worker.wait_for_layer_load(ticket, layer)
        seen.append(words[layer, 20 : 20 + NUM_STORED].clone())
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "nothing is loaded yet"
    job = tier.load(names, blocks)
    assert tier.ticket(job) == ticket
    assert until_done(node, job)
    poll_until(done.query)
    assert torch.equal(torch.stack(seen), before)


def test_a_stream_that_waits_for_a_load_that_failed_is_let_go(node: KVNode) -> None:
    worker = node.workers[0]
    ticket = LoadTicket(1, 77)
    worker.wait_for_layer_load(ticket, 3)
    worker.wait_for_layer_load(ticket, SHAPE.num_layers)
    done = torch.cuda.Event()
    done.record()
    assert not done.query()
    worker._gate.marks.release(ticket)
    poll_until(done.query)
