"""Streams of a transfer: whether a process joins or cuts its own, every chunk comes once."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from kv_caches import layout

from kv_transfer.config import KVTransferConfig
from kv_transfer.consumer.stream_plan import PlannedStreams, plan_streams
from kv_transfer.metadata import KVPeer, RecvMeta
from kv_transfer.wire.chunk_grid import ChunkGrid

SHAPE = layout()
CHUNK_BYTES = 2 * SHAPE.page_bytes


def plans(
    num_tokens: int, first_token: int, wanted: int, theirs: int, ours: int
) -> list[list[PlannedStreams]]:
    """Returns the plan of each of our processes."""
    addresses = tuple(f"prefill:{i}" for i in range(theirs))
    peer = KVPeer(engine_id="p", epoch=1, layout=SHAPE, endpoints=(addresses,))
    meta = RecvMeta("ab" * 16, 0, peer, (list(range(64)),), first_token, num_tokens)
    config = KVTransferConfig(
        kv_role="kv_consumer", num_processes=ours, num_streams=wanted, chunk_bytes=CHUNK_BYTES
    )
    return [plan_streams(meta, config, SHAPE, 0, index) for index in range(ours)]


@given(
    st.integers(1, 900),
    st.integers(0, 899),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 5),
    st.data(),
)
def test_every_chunk_is_asked_for_once(
    num_tokens: int, first: int, wanted: int, theirs: int, ours: int, data: st.DataObject
) -> None:
    first_token = min(first, num_tokens - 1)
    grid = ChunkGrid.of(SHAPE, CHUNK_BYTES, first_token, num_tokens)
    asked: list[int] = []
    for process in plans(num_tokens, first_token, wanted, theirs, ours):
        for planned in process:
            is_cut = data.draw(st.booleans())
            for job in planned.cut() if is_cut else [planned.job]:
                chunks = list(grid.stripe_of(job.source.share, job.stream, job.num_streams))
                held_by = int(planned.address.removeprefix("prefill:"))
                assert job.num_streams % theirs == 0 and job.stream % theirs == held_by
                assert all(index % theirs == held_by for index in chunks)
                asked += chunks
    assert sorted(asked) == list(grid.stripe(0, 1))


def test_a_pair_of_processes_needs_one_stream() -> None:
    """Each cuts its own into its part of those that were wanted."""
    for process in plans(900, 0, 8, 2, 4):
        (planned,) = process
        assert len(planned.cut()) == 2
        assert planned.only(planned.cut()[1]).cut() == [planned.cut()[1]]


def test_stages_pull_their_layers_from_the_stages_that_have_them() -> None:
    """Not those of others as well, which would be dropped."""
    shape = layout(num_layers=5)
    ours, theirs = (
        msgspec.structs.replace(shape, stage_starts=starts) for starts in ((0, 2), (0, 3))
    )
    peer = KVPeer(engine_id="p", epoch=1, layout=theirs, endpoints=(("first:1",), ("second:1",)))
    meta = RecvMeta("ab" * 16, 0, peer, (list(range(64)),), 0, 40)
    config = KVTransferConfig(kv_role="kv_consumer", num_processes=1, num_streams=1)
    pulled = [
        [
            (one.address, *map(list, one.job.layers))
            for one in plan_streams(meta, config, ours, rank, 0)
        ]
        for rank in range(2)
    ]
    assert pulled == [[("first:1", [0, 1])], [("first:1", [2]), ("second:1", [0, 1])]]
