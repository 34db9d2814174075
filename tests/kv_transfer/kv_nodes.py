"""Whole nodes with real transfer processes: scheduler half, worker half, and a fake worker.

The fake worker fills memory files as a model would: layer by layer, step by step.
"""

from __future__ import annotations

import itertools
import select
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kv_caches import UNTOUCHED, Blocks, GroupBlocks, RankCache, by_group

from host.life_signs import LifeSigns
from host.process_host import ProcessHost
from kv_transfer.base import ChunkLike, KVConnectorWorker
from kv_transfer.config import KVTransferConfig
from kv_transfer.control.scheduler import GrpcConnectorScheduler
from kv_transfer.factory import create_worker_connector
from kv_transfer.layout import BlockIds, KVLayout
from kv_transfer.metadata import KVPeer, KVTransferParams, TransferName, TransferStats

TIMEOUT_S = 60.0


@dataclass(slots=True)
class FakeRequest:
    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: KVTransferParams | None

    @property
    def transfer_id(self) -> str:
        assert self.kv_transfer_params is not None
        return self.kv_transfer_params.transfer_id


@dataclass(slots=True)
class FakeChunk:
    request: FakeRequest
    first_token: int
    num_tokens: int
    block_ids: BlockIds


@dataclass(slots=True)
class Outcomes:
    """Everything that `get_finished` ever said, by transfer."""

    sent: list[str] = field(default_factory=list)
    received: list[str] = field(default_factory=list)
    failed: dict[str, tuple[str, bool]] = field(default_factory=dict)
    failed_attempts: list[TransferName] = field(default_factory=list)
    failure_codes: dict[str, str] = field(default_factory=dict)
    num_tokens_kept: dict[str, int] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    stats: dict[str, TransferStats] = field(default_factory=dict)


class KVNode:
    """One engine's side of the data plane."""

    def __init__(
        self,
        config: KVTransferConfig,
        shape: KVLayout,
        num_blocks: int = 64,
        epoch: int = 7,
        cache_type: type[RankCache] = RankCache,
        hosts: Sequence[ProcessHost] = (),
        watches_life: bool = False,
    ) -> None:
        self.config = config
        self.layout = shape
        self.blocks = Blocks(num_blocks)
        self.caches = [cache_type(shape, rank, num_blocks) for rank in range(shape.tp_size)]
        engine_id = f"test-{uuid.uuid4().hex[:12]}"
        self.workers: list[KVConnectorWorker] = [
            create_worker_connector(config, engine_id, rank) for rank in range(shape.tp_size)
        ]
        handles = [
            worker.register_kv_cache(shape, cache.tensor, cache.current_stream)
            for worker, cache in zip(self.workers, self.caches, strict=True)
        ]
        signs = None
        if watches_life:
            signs = LifeSigns.create(engine_id, shape.tp_size * config.num_processes)
        self.connector = GrpcConnectorScheduler(
            config, engine_id, epoch, shape, handles, hosts, signs
        )
        self.done = Outcomes()
        self._steps = itertools.count()

    @property
    def peer(self) -> KVPeer:
        return self.connector.peer_info

    def poll(self) -> None:
        output = self.connector.get_finished()
        if output is None:
            return
        done = self.done
        done.sent += [name.transfer_id for name in output.finished_sending]
        done.received += [name.transfer_id for name in output.finished_recving]
        done.failed_attempts += output.failed
        done.failed |= {name.transfer_id: why for name, why in output.failed.items()}
        done.failure_codes |= {name.transfer_id: c for name, c in output.failure_codes.items()}
        done.num_tokens_kept |= {name.transfer_id: n for name, n in output.num_tokens_kept.items()}
        done.aborted += [name.transfer_id for name in output.aborted]
        done.released += [name.transfer_id for name in output.released]
        done.stats |= {name.transfer_id: stats for name, stats in output.stats.items()}

    # Producer ---------------------------------------------------------------------------------

    def export(self, num_tokens: int, transfer_id: str = "") -> FakeRequest:
        params = KVTransferParams(
            do_remote_decode=True,
            transfer_id=transfer_id or uuid.uuid4().hex,
        )
        request = FakeRequest("p-" + params.transfer_id, num_tokens, params)
        self.connector.update_state_after_alloc(request, (), 0)
        return request

    def prefill(
        self,
        request: FakeRequest,
        seed: int,
        block_ids: GroupBlocks,
        chunk: int = 1 << 30,
        cached: int = 0,
        between_layers: Callable[[], None] = lambda: None,
    ) -> bool:
        """Runs the whole prompt. What `request_finished` says."""
        for cache in self.caches:
            for layer in range(self.layout.num_layers):
                cache.write(seed, layer, range(cached), block_ids)
        for first in range(cached, request.num_prompt_tokens, chunk):
            stop = min(first + chunk, request.num_prompt_tokens)
            self.step([(request, seed, range(first, stop), block_ids)], between_layers)
        return self.connector.request_finished(request)

    def step(
        self,
        parts: list[tuple[FakeRequest, int, range, GroupBlocks]],
        between_layers: Callable[[], None] = lambda: None,
    ) -> None:
        """One step of the engine: (request, seed, tokens, blocks) of each prompt chunk."""
        step_id = next(self._steps)
        chunks: list[ChunkLike] = [
            FakeChunk(
                request,
                tokens.start,
                len(tokens),
                tuple(
                    ids[:count]
                    for ids, count in zip(
                        by_group(block_ids), self.layout.num_blocks_for(tokens.stop), strict=True
                    )
                ),
            )
            for request, _, tokens, block_ids in parts
        ]
        meta = self.connector.build_connector_meta(step_id, chunks)
        if meta is not None:
            for worker in self.workers:
                worker.start_load_kv(step_id, meta)
        for layer in range(self.layout.num_layers):
            for cache, worker in zip(self.caches, self.workers, strict=True):
                for _, seed, tokens, block_ids in parts:
                    cache.write(seed, layer, tokens, block_ids)
                if meta is not None:
                    worker.save_kv_layer(layer)
            between_layers()

    # Consumer ---------------------------------------------------------------------------------

    def pull(
        self,
        peer: KVPeer,
        transfer_id: str,
        num_tokens: int,
        block_ids: GroupBlocks,
        first_token: int = 0,
        attempt: int = 0,
    ) -> FakeRequest:
        params = KVTransferParams(
            do_remote_prefill=True, transfer_id=transfer_id, attempt=attempt, peer=peer
        )
        request = FakeRequest("d-" + transfer_id, num_tokens, params)
        external = self.connector.get_num_new_matched_tokens(request, first_token)
        if attempt:
            self.connector.retry(request, params, by_group(block_ids), first_token)
        else:
            self.connector.update_state_after_alloc(request, by_group(block_ids), external)
        return request

    def check(self, seed: int, tokens: range, block_ids: GroupBlocks) -> None:
        for cache in self.caches:
            cache.check(seed, tokens, block_ids)

    # Both -------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        counters = self.connector.counters
        names = ("live_transfers", "staged_bytes", "leases", "process_transfers", "open_pulls")
        return all(counters[name] == 0 for name in names)

    def renew(self) -> None:
        """As if nothing had happened yet, but for what is counted."""
        self.done = Outcomes()
        self.blocks = Blocks(self.caches[0].num_blocks)
        for cache in self.caches:
            cache.pages[:] = UNTOUCHED

    def close(self) -> None:
        """Idempotent."""
        self.connector.shutdown()
        for worker in self.workers:
            worker.shutdown()
        while self.caches:
            self.caches.pop().close()


def poll_until(condition: Callable[[], bool], *nodes: KVNode) -> None:
    """Sleeps on the connectors' descriptors, as an engine does."""
    poller = select.poll()
    for node in nodes:
        poller.register(node.connector.fileno(), select.POLLIN)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        for node in nodes:
            node.poll()
        if condition():
            return
        assert time.monotonic() < deadline, [(n.done.failed, n.connector.counters) for n in nodes]
        poller.poll(200)


def until_empty(*nodes: KVNode) -> None:
    poll_until(lambda: all(node.is_empty for node in nodes), *nodes)
