"""The grid covers every wanted block of every layer once, however it is striped."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.wire.chunk_grid import (
    ChunkGrid,
    GroupGrid,
    blocks_per_chunk,
    num_streams_for,
    streams_of,
)

group_grids = st.builds(
    GroupGrid,
    num_layers=st.integers(1, 6),
    num_blocks=st.integers(1, 40),
    blocks_per_chunk=st.integers(1, 12),
    first_block=st.integers(0, 45),
)
grids = st.lists(group_grids, min_size=1, max_size=3).map(lambda groups: ChunkGrid(tuple(groups)))


@given(grids, st.integers(1, 9))
def test_stripes_cover_each_wanted_block_once(grid: ChunkGrid, num_streams: int) -> None:
    seen = []
    for stream in range(num_streams):
        for index in grid.stripe(stream, num_streams):
            place = grid.position(index)
            assert grid.index(place) == index < grid.num_chunks
            blocks = grid.blocks_of(place)
            assert 1 <= len(blocks) <= grid.groups[place.group].blocks_per_chunk
            seen += [(place.group, place.layer, block) for block in blocks]
    wanted = [
        (number, layer, block)
        for number, group in enumerate(grid.groups)
        for layer in range(group.num_layers)
        for block in range(group.first_block, group.num_blocks)
    ]
    assert sorted(seen) == wanted


@given(grids, st.integers(0, 45))
def test_wanting_less_keeps_the_indices(grid: ChunkGrid, later: int) -> None:
    less = ChunkGrid(
        tuple(replace(group, first_block=max(group.first_block, later)) for group in grid.groups)
    )
    assert set(less.stripe(0, 1)) <= set(grid.stripe(0, 1))


@given(
    wanted=st.integers(1, 16),
    num_bytes=st.integers(1, 1 << 24),
    chunk_bytes=st.integers(1, 1 << 21),
    sender=st.integers(1, 4),
    puller=st.integers(1, 4),
)
def test_every_process_gets_its_streams(
    wanted: int, num_bytes: int, chunk_bytes: int, sender: int, puller: int
) -> None:
    num_streams = num_streams_for(wanted, num_bytes, chunk_bytes, sender)
    assert num_streams % sender == 0
    assert num_streams <= max(sender, -(-wanted // sender) * sender)
    opened = [s for process in range(puller) for s in streams_of(num_streams, process, puller)]
    assert sorted(opened) == list(range(num_streams))
    assert {stream % sender for stream in opened} == set(range(sender))


@given(grids, st.integers(1, 4), st.integers(1, 4))
def test_a_stream_reads_only_what_its_process_stages(
    grid: ChunkGrid, num_processes: int, factor: int
) -> None:
    num_streams = num_processes * factor
    for stream in range(num_streams):
        staged = set(grid.stripe(stream % num_processes, num_processes))
        assert set(grid.stripe(stream, num_streams)) <= staged


def test_blocks_per_chunk() -> None:
    assert blocks_per_chunk(1 << 20, 256 << 10) == 4
    assert blocks_per_chunk(1 << 20, 3 << 20) == 1
