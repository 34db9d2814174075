"""Any two nodes with the same groups and planes: each byte of each wanted token is written once,
and no other. Chunks go from a sender's messages to a puller's assemblers without a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_caches import Blocks, RankCache

from kv_transfer.layout import BlockIds, KVGroup, KVLayout, Plane, share_page_size
from kv_transfer.memory.cache_view import KVCacheView
from kv_transfer.memory.copy_stream import HostCopyStream, Numbers
from kv_transfer.memory.staging import StagingPool
from kv_transfer.metadata import KVPeer, OfferMeta, RecvMeta, SendMeta, StepProgress
from kv_transfer.producer.send_transfer import Pull, SendTransfer
from kv_transfer.transports.chunk_assembler import ChunkAssembler, PullSource
from kv_transfer.transports.cuda_ipc.read_leases import ReadLeases
from kv_transfer.transports.stream.chunk_messages import ChunkMessages
from kv_transfer.wire.chunk import HEADER, Chunk, ChunkKind, decode_chunk, fill_header
from kv_transfer.wire.chunk_grid import ChunkGrid, longest_chunk
from kv_transfer.wire.out_message import Buffer
from kv_transfer.wire.pull_wish import PullWish

TRANSFER = "ab" * 16
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
        groups.append(
            KVGroup(
                layers=tuple(sorted(next(layers) for _ in range(count))),
                planes=tuple(plane(name) for name in names),
                block_size=4,
                dtype="bfloat16",
                window=draw(st.none() | st.integers(1, 40)),
            )
        )

    def node() -> KVLayout:
        tp_size = draw(tp_sizes)
        own = [KVGroup(**{**_fields(group), "block_size": draw(block_sizes)}) for group in groups]
        return KVLayout(groups=share_page_size(own, tp_size), tp_size=tp_size, model_hash="m")

    num_tokens = draw(st.integers(1, 70))
    return Case(
        node(),
        node(),
        draw(st.integers(0, num_tokens - 1)),
        num_tokens,
        draw(st.integers(1, 2000)),
        draw(st.integers(1, 3)),
    )


def _fields(group: KVGroup) -> dict[str, object]:
    return {name: getattr(group, name) for name in group.__struct_fields__}


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


class Call:
    """One PullKV call to a rank that has computed the prompt."""

    def __init__(
        self, case: Case, view: KVCacheView, assembler: ChunkAssembler, block_ids: BlockIds
    ) -> None:
        source, layout, chunk_bytes = assembler.source, case.theirs, case.chunk_bytes
        self._view = view
        self._layout = layout
        self._rank = source.peer_rank
        self._messages = ChunkMessages(layout, self._rank, chunk_bytes, ReadLeases())
        self._longest = HEADER.size + longest_chunk(layout, chunk_bytes)
        offer = OfferMeta(TRANSFER, 1, case.num_tokens, 0)
        self._transfer = SendTransfer(offer, layout, chunk_bytes, 0, 1)
        wish = PullWish(
            rank=source.rank,
            tp_size=source.tp_size,
            stream=assembler.stream,
            num_streams=assembler.num_streams,
            first_token=case.first_token,
            num_tokens=case.num_tokens,
            direct=assembler.peer_cache is not None,
        )
        wish.check(layout, 0, 1, case.num_tokens)
        grid = ChunkGrid.of(layout, chunk_bytes, wish.first_token, wish.num_tokens)
        num_pullers = layout.num_pullers(self._rank, wish.tp_size)
        self._pull = Pull(self._transfer, wish, source.share, num_pullers, grid)
        self._transfer.pulls.add(self._pull)
        send = SendMeta(TRANSFER, 1, -1, 0, case.num_tokens, block_ids)
        self._transfer.announce(send, StepProgress(0, 0))

    def messages(self) -> Iterator[Chunk]:
        """What the puller receives."""
        if not self._transfer.name_ready():
            self._stage()
        assert self._transfer.is_staged
        while entries := self._pull.next_entries():
            yield _received(self._messages.message_for(self._pull, entries))
        yield _received(self._messages.mark(ChunkKind.END, TRANSFER, 1))

    def _stage(self) -> None:
        transfer = self._transfer
        pool = StagingPool(self._longest * transfer.grid.num_chunks, self._longest)
        while transfer.has_ready:
            place = transfer.pop_ready()
            blocks = transfer.blocks_of(place)
            payload_bytes = len(blocks) * self._layout.page(place.group, self._rank).num_bytes
            chunk = pool.take(HEADER.size + payload_bytes, is_awaited=True)
            assert chunk is not None
            payload = int(chunk.buffer.ctypes.data) + HEADER.size
            self._view.copy_out(place.group, place.layer, blocks, payload)
            fill_header(chunk.buffer, self._messages.header(transfer, place))
            pool.publish(chunk)
            transfer.add_staged(transfer.grid.index(place), chunk)


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


@pytest.mark.parametrize("is_direct", [False, True])
@example(case=_window_that_sees_nothing())
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_every_byte_of_every_wanted_token_once(is_direct: bool, case: Case) -> None:
    case.ours.check_compatible(case.theirs)
    theirs = [RankCache(case.theirs, rank, 96) for rank in range(case.theirs.tp_size)]
    sources = [KVCacheView(cache.handle, case.theirs) for cache in theirs]
    source_ids = Blocks(96, seed=1).take_all(case.theirs, case.num_tokens)
    for cache in theirs:
        for layer in range(case.theirs.num_layers):
            cache.write(5, layer, range(case.num_tokens), source_ids)
    peer = KVPeer(engine_id="p", epoch=1, layout=case.theirs)
    target_ids = Blocks(96, seed=2).take_all(case.ours, case.num_tokens)
    meta = RecvMeta(TRANSFER, 1, peer, target_ids, case.first_token, case.num_tokens)
    for rank in range(case.ours.tp_size):
        cache = RankCache(case.ours, rank, 96)
        view = KVCacheView(cache.handle, case.ours)
        stream = view.copies.stream = CountedStream()
        for peer_rank, source_view in enumerate(sources):
            share = case.theirs.share(peer_rank, rank, case.ours.tp_size)
            source = PullSource(rank, case.ours.tp_size, peer_rank, share)
            for number in range(case.num_streams):
                if not any(page.num_bytes for page in share):
                    continue
                assembler = ChunkAssembler(meta, source, view, number, case.num_streams)
                assembler.peer_cache = source_view if is_direct else None
                for message in Call(case, source_view, assembler, source_ids).messages():
                    if message.header.kind is ChunkKind.END:
                        assembler.end(message)
                    else:
                        assembler.accept(message)
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
