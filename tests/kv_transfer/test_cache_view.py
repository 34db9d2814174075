"""The mapped cache: which blocks lie together, and tokens between blocks of different sizes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_caches import RankCache, layout

from host.memory_file import MemoryFile
from kv_transfer.base import KVCacheHandle
from kv_transfer.memory.cache_view import KVCacheView, copy_blocks, copy_runs, token_runs
from kv_transfer.memory.devices.cache_handle import handle_of_tensor
from kv_transfer.memory.devices.copy_stream import HostCopyStream, Numbers
from kv_transfer.memory.page_copy import PageCopy
from kv_transfer.planes import HeadRange

sizes = st.sampled_from([1, 2, 3, 4, 8, 16, 64])


@given(st.integers(0, 300), st.integers(0, 300), sizes, sizes)
def test_token_runs_map_every_token_once(start: int, length: int, source: int, target: int) -> None:
    pairs = []
    for run in token_runs(start, start + length, source, target):
        assert run.num_tokens >= 1
        assert run.source_offset + run.num_tokens <= source
        assert run.target_offset + run.num_tokens <= target
        pairs += [
            (
                run.source_block * source + run.source_offset + i,
                run.target_block * target + run.target_offset + i,
            )
            for i in range(run.num_tokens)
        ]
    assert pairs == [(token, token) for token in range(start, start + length)]


def test_equal_block_sizes_move_whole_blocks() -> None:
    assert len(list(token_runs(0, 64, 16, 16))) == 4
    assert len(list(token_runs(0, 64, 16, 64))) == 4


class CountedStream(HostCopyStream):
    """Counts the copies that were issued, and the calls."""

    num_copies = num_calls = 0

    def copy(
        self, targets: Numbers, sources: Numbers, sizes: Numbers, in_portions: bool = False
    ) -> None:
        self.num_copies += len(targets)
        self.num_calls += 1
        super().copy(targets, sources, sizes, in_portions)


@given(st.lists(st.integers(0, 15), unique=True, max_size=16))
def test_copy_out_keeps_order_and_joins_neighbours(block_ids: list[int]) -> None:
    cache = RankCache(layout(), 0, 16)
    view = KVCacheView(cache.handle, layout())
    stream = view.copies.stream = CountedStream()
    cache.words[1] = np.arange(16, dtype=np.uint16)[:, None, None, None, None]
    out = np.zeros((len(block_ids) + 1, *cache.words.shape[2:]), np.uint16)
    view.copy_out(0, 1, block_ids, out.ctypes.data)
    assert out[:, 0, 0, 0, 0].tolist() == [*block_ids, 0]
    np.testing.assert_array_equal(out[:-1], cache.words[1][block_ids])
    breaks = sum(b != a + 1 for a, b in itertools.pairwise(block_ids))
    assert stream.num_copies == (breaks + 1 if block_ids else 0)
    view.close()
    cache.close()


@pytest.mark.parametrize("source_first_head", [0, 1])
def test_copied_runs_touch_nothing_else(source_first_head: int) -> None:
    shape = layout(tp_size=1, num_kv_heads=4)
    cache = RankCache(shape, 0, 8)
    view = KVCacheView(cache.handle, shape)
    before = cache.words.copy()
    run = next(token_runs(5, 9, 64, 16))
    num_heads = 2 + source_first_head
    source = np.arange(2 * num_heads * 64 * 8, dtype=np.uint16).reshape(2, num_heads, 64, 8)
    held = HeadRange(1 - source_first_head, num_heads)
    large = layout(tp_size=1, num_kv_heads=4, block_size=64).groups[0]
    wanted = large.page([HeadRange(1, 2)] * 2)
    copy = PageCopy(shape.page(0, 0), large.page([held] * 2), wanted)
    copy_runs(view.copies.stream, copy, [(int(source.ctypes.data), run, view.page_of(0, 2, 6))])
    before[2, 6, :, 1:3, 5:9] = source[:, source_first_head:, 5:9]
    np.testing.assert_array_equal(cache.words, before)
    view.close()
    cache.close()


@pytest.mark.parametrize("heads", [HeadRange(0, 4), HeadRange(1, 2)])
def test_whole_blocks_of_several_layers_are_one_call(heads: HeadRange) -> None:
    shape = layout(tp_size=1, num_kv_heads=4)
    cache = RankCache(shape, 0, 8)
    view = KVCacheView(cache.handle, shape)
    stream = view.copies.stream = CountedStream()
    before = cache.words.copy()
    source_shape = shape.groups[0].page([heads] * 2)
    blocks = np.arange(8 * 2 * heads.count * 16 * 8, dtype=np.uint16)
    blocks = blocks.reshape(8, 2, heads.count, 16, 8)
    layers, block_ids = np.repeat([0, 2], 4), np.array([2, 3, 4, 1] * 2)
    sources = np.arange(8) * source_shape.num_bytes + blocks.ctypes.data
    targets = view.addresses_of(layers, block_ids)
    copy = PageCopy(shape.page(0, 0), source_shape, source_shape)
    copy_blocks(view.copies.stream, copy, targets, sources, from_host=False)
    before[layers, block_ids, :, heads.start : heads.stop] = blocks
    np.testing.assert_array_equal(cache.words, before)
    assert stream.num_calls == 1
    is_all = heads.count == 4
    assert stream.num_copies == (4 if is_all else 16), "neighbours on both sides are one"
    view.close()
    cache.close()


def test_bounds() -> None:
    shape = layout()
    cache = RankCache(shape, 0, 4)
    view = KVCacheView(cache.handle, shape)
    view.check_block_ids([0, 3])
    for wrong in ([4], [-1], [0, 1, 100]):
        with pytest.raises(ValueError, match=r"0\.\.3"):
            view.check_block_ids(wrong)
    view.close()
    too_many = KVCacheHandle(rank=0, pid=cache.handle.pid, fd=cache.handle.fd, num_blocks=5)
    with pytest.raises(ValueError, match="5 blocks"):
        KVCacheView(too_many, shape)
    cache.close()


def test_handle_of_torch_tensors_leads_to_their_memory() -> None:
    shape = layout()
    memory = MemoryFile.create("test-kv", 4 * shape.block_bytes)
    flat = torch.frombuffer(memory.buffer, dtype=torch.bfloat16)
    handle = handle_of_tensor(1, shape, flat)
    assert (handle.rank, handle.pid, handle.num_blocks) == (1, memory.pid, 4)
    again = MemoryFile.attach(handle.pid, handle.fd)
    flat.view(3, 4, 2, 2, 16, 8)[2][3] = 1.0
    assert again.buffer[-2:] == memory.buffer[-2:] != b"\0\0"
    again.close()
    with pytest.raises(ValueError, match="memory file"):
        handle_of_tensor(0, shape, torch.zeros(4, 4))
    with pytest.raises(ValueError, match="memory file"):
        handle_of_tensor(0, shape, flat[len(flat) // 3 :])
    del flat
    memory.close()
