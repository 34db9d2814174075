"""Any two nodes with the same groups and planes: each byte of each wanted token is written once,
and no other. Chunks go from a sender's messages to a puller's assemblers without a network."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_caches import Blocks, RankCache
from memory_agent import MemoryAgent, peer_of, queue_into

from edge.h2.out_message import Buffer, OutMessage
from kv_transfer.config import KVTransferConfig
from kv_transfer.consumer.stream_plan import plan_streams
from kv_transfer.group_sizes import share_page_size
from kv_transfer.layout import STATE_SPAN, BlockIds, KVGroup, KVLayout
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.devices.copy_stream import HostCopyStream, Numbers
from kv_transfer.memory.staging import StagingPool
from kv_transfer.metadata import ExportMeta, KVPeer, RecvMeta, SendMeta, StepProgress
from kv_transfer.planes import Plane
from kv_transfer.producer.send_transfer import SendTransfer
from kv_transfer.transports.base import Export, ExportOwner, TransportId
from kv_transfer.transports.chunk_assembler import ChunkAssembler
from kv_transfer.transports.cuda_ipc.consumer import MappedBlocks
from kv_transfer.transports.cuda_ipc.peer_caches import PeerCaches
from kv_transfer.transports.cuda_ipc.producer import CudaIpcProducer
from kv_transfer.transports.fetch_job import FetchJob
from kv_transfer.transports.in_place.names_assembler import NamesAssembler
from kv_transfer.transports.in_place.read_leases import ReadLeases
from kv_transfer.transports.nixl.consumer import longest_share
from kv_transfer.transports.nixl.filled_slots import FilledSlots
from kv_transfer.transports.nixl.window import Window
from kv_transfer.transports.nixl.window_assembler import WindowAssembler
from kv_transfer.transports.nixl.window_export import WindowExport
from kv_transfer.transports.nixl.window_message import read_notice
from kv_transfer.transports.open_pull import PullTerms
from kv_transfer.transports.stream.chunk_messages import ChunkMessages
from kv_transfer.transports.stream.consumer import StreamAssembler
from kv_transfer.transports.stream.stream_export import StreamExport, StreamPull
from kv_transfer.wire.chunk import (
    HEADER,
    Chunk,
    ChunkHeader,
    ChunkKind,
    decode_chunk,
    encode_chunk,
    fill_header,
)
from kv_transfer.wire.chunk_grid import ChunkGrid, longest_chunk
from kv_transfer.wire.pull_spec import PullSpec

TRANSFER = "ab" * 16
Way = tuple[ChunkAssembler, Iterator[Chunk]]
"""Ends of one stream: where chunks belong, and the messages that bring them."""
tp_sizes = st.sampled_from([1, 2, 4])
block_sizes = st.sampled_from([4, 8, 16])


@dataclass(frozen=True)
class Case:
    theirs: KVLayout
    ours: KVLayout
    first_token: int
    num_tokens: int
    chunk_bytes: int
    num_streams: int
    is_early: bool = False
    """The pull comes before the prompt is computed, or after."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def plane(name: str) -> Plane:
        heads, row_bytes = draw(st.sampled_from([1, 2, 4])), 2 * draw(st.integers(1, 4))
        return Plane(name, heads, row_bytes, draw(st.booleans()))

    layers = iter(draw(st.permutations(range(5))))
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 1 if groups else 3))
        names = [f"plane{i}" for i in range(draw(st.integers(1, 3)))]
        is_state = draw(st.booleans())
        is_window = not is_state and draw(st.booleans())
        groups.append(
            KVGroup(
                layers=tuple(sorted(next(layers) for _ in range(count))),
                planes=tuple(plane(name) for name in names),
                block_size=STATE_SPAN if is_state else 4,
                dtype="bfloat16",
                window=draw(st.integers(1, 40)) if is_window else None,
                window_align=draw(st.sampled_from([1, 4, 16])) if is_window else 1,
                compress_ratio=1 if is_window or is_state else draw(st.sampled_from([1, 4, 16])),
            )
        )
    if draw(st.booleans()):
        # A layer in two groups, which keep different things of it.
        shared = {*groups[0].layers, *groups[-1].layers}
        groups[0] = msgspec.structs.replace(groups[0], layers=tuple(sorted(shared)))

    def node() -> KVLayout:
        tp_size = draw(tp_sizes)
        own = [
            group
            if group.is_state
            else msgspec.structs.replace(group, block_size=draw(block_sizes) * group.compress_ratio)
            for group in groups
        ]
        groups_of_node = share_page_size(own, tp_size)
        whole = KVLayout(groups=groups_of_node, tp_size=tp_size, model_hash="m")
        later = draw(st.sets(st.integers(1, 4), max_size=2))
        staged = msgspec.structs.replace(whole, stage_starts=(0, *sorted(later)))
        stages = range(staged.num_stages)
        has_layers = all(any(staged.layers_on(s, group) for group in own) for s in stages)
        return staged if later and has_layers else whole

    num_tokens = draw(st.integers(1, 70))
    return Case(
        node(),
        node(),
        draw(st.integers(0, num_tokens - 1)),
        num_tokens,
        draw(st.integers(1, 2000)),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
    )


class CountedStream(HostCopyStream):
    """Counts what is written where."""

    def __init__(self) -> None:
        self.written: Counter[int] = Counter()

    def copy(
        self, targets: Numbers, sources: Numbers, sizes: Numbers, in_portions: bool = False
    ) -> None:
        for target, size in zip(targets.tolist(), sizes.tolist(), strict=True):
            self.written.update(range(target, target + size))
        super().copy(targets, sources, sizes, in_portions)

    def copy_rows(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        row_bytes: int,
        num_rows: int,
    ) -> None:
        for row in range(num_rows):
            start = target + row * target_pitch
            self.written.update(range(start, start + row_bytes))
        super().copy_rows(target, target_pitch, source, source_pitch, row_bytes, num_rows)


class Owner(ExportOwner):
    """Owns exports that are stepped by hand; is a `StreamOwner` as well."""

    def __init__(self, pool: StagingPool) -> None:
        self.pool = pool

    def wake(self) -> None:
        return

    def suits_zero_copy(self, terms: PullTerms) -> bool:
        return False

    def next_message(self, pull: StreamPull) -> OutMessage | None:
        raise NotImplementedError

    def end(self, part: StreamExport, then: Callable[[], None]) -> None:
        then()

    def was_sent(self, export: Export, num_bytes: int) -> None:
        return

    def left_blocks(self, export: Export) -> None:
        return

    def fail(self, export: Export, reason: str) -> None:
        raise AssertionError(reason)

    def changed(self) -> None:
        return


class Call:
    """One PullKV call to a rank that computes the prompt before or after it comes."""

    def __init__(self, case: Case, view: KVCacheView, job: FetchJob, block_ids: BlockIds) -> None:
        self._layout = layout = job.layout
        self._rank = job.source.peer_rank
        self._view = view
        self.chunk_bytes = case.chunk_bytes
        meta = ExportMeta(TRANSFER, 1, case.num_tokens)
        self._export = SendTransfer(meta, layout, case.chunk_bytes, (0, 1))
        longest = HEADER.size + longest_chunk(layout, case.chunk_bytes)
        self._owner = Owner(StagingPool(longest * self._export.grid.num_chunks, longest))
        wish = PullSpec(
            rank=job.source.rank,
            tp_size=job.source.tp_size,
            stream=job.stream,
            num_streams=job.num_streams,
            first_token=case.first_token,
            num_tokens=case.num_tokens,
            layers=job.source.layers,
        )
        wish.check(layout, 0, 1, case.num_tokens)
        grid = ChunkGrid.of(layout, case.chunk_bytes, wish.first_token, wish.num_tokens)
        num_pullers = layout.num_pullers(self._rank, wish.tp_size)
        self._terms = PullTerms(wish, job.source.share, num_pullers, grid, job.layers)
        self._computed = SendMeta(TRANSFER, 1, -1, 0, case.num_tokens, block_ids)
        self._is_early = case.is_early

    def staged(self) -> Iterator[Chunk]:
        """Yields what a puller receives over the stream."""
        export, messages = self._export, ChunkMessages(self._layout, self._rank, self.chunk_bytes)
        part = StreamExport(self._owner, export, stage_after=0.0)
        export.parts[TransportId.STREAM] = part
        if self._is_early:
            export.narrow(self._terms.grid)
        export.announce(self._computed, StepProgress(0, 0))
        while part.has_ready:
            self._stage_next(part, messages)
        export.narrow(self._terms.grid)
        assert export.blocks_are_free
        pull = part.open_pull(self._terms)
        assert isinstance(pull, StreamPull)
        while entry := pull.next_staged():
            yield _received(messages.message_for(pull, entry))
        assert pull.is_complete
        yield self._end()

    def _stage_next(self, part: StreamExport, messages: ChunkMessages) -> None:
        place = part.pop_ready()
        blocks = self._export.blocks_of(place)
        payload_bytes = len(blocks) * self._layout.page(place.group, self._rank).num_bytes
        chunk = self._owner.pool.take(HEADER.size + payload_bytes, is_awaited=True)
        assert chunk is not None
        payload = int(chunk.buffer.ctypes.data) + HEADER.size
        self._view.copy_out(place.group, place.layer, blocks, payload)
        fill_header(chunk.buffer, messages.header(self._export, place))
        self._owner.pool.publish(chunk)
        part.add_staged(self._export.grid.index(place), chunk)

    def named(self) -> Iterator[Chunk]:
        """Yields what a puller receives that has mapped the rank's cache."""
        config = KVTransferConfig(kv_role="kv_producer", chunk_bytes=self.chunk_bytes)
        part = CudaIpcProducer(config, self._view, self._owner).open(self._export)
        self._export.parts[TransportId.CUDA_IPC] = part
        self._export.narrow(self._terms.grid)
        pull = part.open_pull(self._terms)
        self._export.announce(self._computed, StepProgress(0, 0))
        while message := pull.next_message():
            yield _received(message.joined())
        assert pull.is_complete
        yield self._end()

    def in_window(self, filled: FilledSlots) -> Iterator[Chunk]:
        """Yields what a puller receives that reads this window."""
        part = WindowExport(self._export, filled, self._owner, self.chunk_bytes)
        self._export.parts[TransportId.NIXL] = part
        self._export.narrow(self._terms.grid)
        pull = part.open_pull(self._terms)
        self._export.announce(self._computed, StepProgress(0, 0))
        while message := pull.next_message():
            yield _received(message.joined())
            for notice in filled.window.agent.notices():
                assert filled.was_read(read_notice(notice))
        assert pull.is_complete
        yield self._end()

    def _end(self) -> Chunk:
        header = ChunkHeader(
            kind=ChunkKind.END, transfer_id=TRANSFER, attempt=1, chunk_bytes=self.chunk_bytes
        )
        return _received(encode_chunk(header))


def _received(message: Buffer) -> Chunk:
    return decode_chunk(np.frombuffer(message, np.uint8))


def _window_that_sees_nothing() -> Case:
    """Its last span has blocks, but none that are wanted."""
    plane = Plane("k", 1, 8)
    groups = tuple(
        KVGroup(layers=(layer,), planes=(plane,), block_size=16, dtype="bfloat16", window=window)
        for layer, window in enumerate([None, 1])
    )
    node = KVLayout(groups=groups, tp_size=1, model_hash="m")
    return Case(node, node, 0, 5 * 16, 2 * node.page_bytes, 1)


def _cache(node: KVLayout, rank: int) -> RankCache:
    return RankCache(node.of_rank(rank), rank, 96, node.first_layer_on(rank))


def _by_stream(call: Call, job: FetchJob, source: KVCacheView, view: KVCacheView) -> Way:
    return StreamAssembler(job, view), call.staged()


def _by_names(call: Call, job: FetchJob, source: KVCacheView, view: KVCacheView) -> Way:
    peer = MappedBlocks(source, PeerCaches(view.device), ReadLeases().file)
    return NamesAssembler(job, view, TransportId.CUDA_IPC, peer), call.named()


def _by_window(call: Call, job: FetchJob, source: KVCacheView, view: KVCacheView) -> Way:
    """Through one slot on each side. That of the puller holds no more than its longest chunk."""
    agent, leases = MemoryAgent(), ReadLeases()
    longest = longest_chunk(job.layout, call.chunk_bytes)
    theirs = Window(agent, source.device, 1, 3 * longest)
    ours = Window(agent, view.device, 1, longest_share(job, call.chunk_bytes))
    peer, queue = peer_of(theirs, leases), queue_into(ours)
    assembler = WindowAssembler(job, view, TransportId.NIXL, peer, queue, 1.0)
    return assembler, call.in_window(FilledSlots(theirs, leases, source))


async def _receive(assembler: ChunkAssembler, messages: Iterator[Chunk]) -> None:
    for message in messages:
        if message.header.kind is ChunkKind.END:
            assembler.end(message)
        else:
            assembler.accept(message)
            await assembler.arrived()


@pytest.mark.parametrize("way", [_by_stream, _by_names, _by_window])
@example(case=_window_that_sees_nothing())
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_every_byte_of_every_wanted_token_once(way: Callable[..., Way], case: Case) -> None:
    case.ours.check_compatible(case.theirs)
    theirs = [_cache(case.theirs, rank) for rank in range(case.theirs.num_ranks)]
    sources = [KVCacheView(cache.handle, cache.layout) for cache in theirs]
    source_ids = Blocks(96, seed=1).take_all(case.theirs, case.num_tokens)
    for cache in theirs:
        for layer in range(cache.layout.num_layers):
            cache.write(5, layer, range(case.num_tokens), source_ids)
    addresses = tuple((f"rank:{rank}",) for rank in range(case.theirs.num_ranks))
    peer = KVPeer(engine_id="p", epoch=1, layout=case.theirs, endpoints=addresses)
    config = KVTransferConfig(
        kv_role="kv_consumer", num_processes=1, num_streams=case.num_streams,
        chunk_bytes=case.chunk_bytes,
    )  # fmt: skip
    target_ids = Blocks(96, seed=2).take_all(case.ours, case.num_tokens)
    meta = RecvMeta(TRANSFER, 1, peer, target_ids, case.first_token, case.num_tokens)
    for rank in range(case.ours.num_ranks):
        cache = _cache(case.ours, rank)
        view = KVCacheView(cache.handle, cache.layout)
        stream = view.copies.stream = CountedStream()
        for planned in plan_streams(meta, config, case.ours, rank, 0):
            source_view = sources[planned.job.source.peer_rank]
            for job in planned.cut():
                call = Call(case, source_view, job, source_ids)
                assembler, messages = way(call, job, source_view, view)
                asyncio.run(_receive(assembler, messages))
                assert assembler.missing == []
                assert assembler.num_tokens_complete(None) == case.num_tokens
        assert set(stream.written.values()) <= {1}, "a byte was written twice"
        cache.check(5, range(case.first_token, case.num_tokens), target_ids)
        assert cache.untouched_except(target_ids)
        view.close()
        cache.close()
    for source_view, cache in zip(sources, theirs, strict=True):
        source_view.close()
        cache.close()
