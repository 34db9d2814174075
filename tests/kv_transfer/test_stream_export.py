"""One export over the stream, stepped by hand: staged chunks, pulls, and what nobody wants."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from kv_caches import layout

from edge.h2.out_message import OutMessage
from kv_transfer.memory.staging import StagedChunk, StagingPool
from kv_transfer.metadata import ExportMeta
from kv_transfer.transports.base import Export
from kv_transfer.transports.open_pull import PullTerms
from kv_transfer.transports.stream.stream_export import StreamExport, StreamPull
from kv_transfer.wire.chunk_grid import ChunkGrid
from kv_transfer.wire.pull_spec import PullSpec

SHAPE = layout(num_layers=2)
NUM_TOKENS = 96


class Owner:
    """A `StreamOwner` that stages nothing itself."""

    def __init__(self) -> None:
        self.pool = StagingPool(0, 1)

    def wake(self) -> None:
        return

    def suits_zero_copy(self, terms: PullTerms) -> bool:
        return False

    def next_message(self, pull: StreamPull) -> OutMessage | None:
        raise NotImplementedError

    def end(self, part: StreamExport, then: Callable[[], None]) -> None:
        then()


def grid_from(first_token: int) -> ChunkGrid:
    return ChunkGrid.of(SHAPE, SHAPE.page_bytes, first_token, NUM_TOKENS)


def new_export() -> tuple[Export, StreamExport]:
    """Six chunks of one block in each of two layers."""
    export = Export(ExportMeta("0" * 32, 0, NUM_TOKENS), SHAPE, SHAPE.page_bytes, (0, 1))
    return export, StreamExport(Owner(), export, stage_after=0.0)


def pull(
    part: StreamExport, stream: int, first_token: int = 0, repeat: frozenset[int] = frozenset()
) -> StreamPull:
    wish = PullSpec(
        rank=0,
        tp_size=1,
        stream=stream,
        num_streams=2,
        first_token=first_token,
        num_tokens=NUM_TOKENS,
        repeat=repeat,
    )
    opened = part.open_pull(PullTerms(wish, SHAPE.share(0, 0, 1), (1,), grid_from(first_token)))
    assert isinstance(opened, StreamPull)
    return opened


def stage_all(part: StreamExport) -> None:
    while part.has_ready:
        place = part.next_ready
        assert part.pop_ready() == place
        index = part.export.grid.index(place)
        part.add_staged(index, StagedChunk(0, np.empty(0, np.uint8)))


def seen(pull: StreamPull) -> list[int]:
    found = []
    while (entry := pull.next_staged()) is not None:
        found.append(entry.index)
    return found


async def test_pulls_see_their_stream_in_the_order_of_staging() -> None:
    _, part = new_export()
    even, odd, late = pull(part, 0), pull(part, 1), pull(part, 0, first_token=64)
    assert seen(even) == []
    part.ready(range(12))
    assert not part.blocks_are_free
    stage_all(part)
    assert part.blocks_are_free
    assert even.wake.is_set() and odd.wake.is_set()
    assert seen(even) == [0, 2, 4, 6, 8, 10]
    assert seen(odd) == [1, 3, 5, 7, 9, 11]
    assert seen(late) == [4, 10]
    assert even.is_complete and odd.is_complete and late.is_complete
    again = pull(part, 0, repeat=frozenset({2, 3, 10}))
    assert seen(again) == [2, 10]
    assert again.is_complete


async def test_what_the_puller_holds_is_never_staged() -> None:
    export, part = new_export()
    part.ready(range(6))
    export.grid = grid_from(64)
    part.narrow()
    stage_all(part)
    assert [entry.index for entry in part.staged] == [4, 5]
    part.ready(range(6, 12))
    stage_all(part)
    assert [entry.index for entry in part.staged] == [4, 5, 10, 11]
    assert part.blocks_are_free


async def test_nothing_is_staged_while_only_others_read_the_blocks() -> None:
    export, part = new_export()
    assert part.may_stage
    export.keeps_blocks = True
    assert not part.may_stage
    opened = pull(part, 0)
    assert part.may_stage
    part.close_pull(opened)
    assert not part.may_stage
