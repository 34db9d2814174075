"""The grid covers every wanted block of every layer once, however it is striped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.wire.chunk_grid import ChunkGrid, blocks_per_chunk, num_streams_for, streams_of

grids = st.builds(
    ChunkGrid,
    num_layers=st.integers(1, 6),
    num_blocks=st.integers(1, 40),
    blocks_per_chunk=st.integers(1, 12),
    first_block=st.integers(0, 45),
)


@given(grids, st.integers(1, 9))
def test_stripes_cover_each_wanted_block_once(grid: ChunkGrid, num_streams: int) -> None:
    seen = []
    for stream in range(num_streams):
        for index in grid.stripe(stream, num_streams):
            layer, group = grid.position(index)
            assert grid.index(layer, group) == index
            blocks = grid.blocks_of(group)
            assert 1 <= len(blocks) <= grid.blocks_per_chunk
            seen += [(layer, block) for block in blocks]
    wanted = [
        (layer, block)
        for layer in range(grid.num_layers)
        for block in range(min(grid.first_block, grid.num_blocks), grid.num_blocks)
    ]
    assert sorted(seen) == wanted


@given(grids, st.integers(0, 45))
def test_wanting_less_keeps_the_indices(grid: ChunkGrid, later: int) -> None:
    first_block = max(grid.first_block, later)
    less = set(grid.starting_at(first_block).stripe(0, 1))
    assert less <= set(grid.stripe(0, 1))


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
