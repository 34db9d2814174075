"""Sizing and sharing the KV cache."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import KVLayers, SchedulerConfig
from engine.kv_cache.capacity import (
    KVCacheMemoryError,
    blocks_per_sequence,
    blocks_that_fit,
    check_one_sequence_fits,
)
from engine.worker.memory.kv_cache import KVCache, describe_capacity
from host.memory_file import MemoryFile
from kv_transfer.memory.devices.cache_handle import handle_of_tensor
from kv_transfer.planes import Plane
from tandem_kernels.attention.index_pages import (
    CachesByGroup,
    GroupCache,
    IndexedLatents,
    IndexPages,
    OpenRows,
)

CPU = torch.device("cpu")


def test_blocks_fill_the_budget_up_to_what_all_rows_can_use(make_config) -> None:
    config = make_config()
    spec = config.kv_layout
    assert spec.block_bytes == 3 * 2 * 2 * 8 * 8 * 4
    assert blocks_per_sequence(config) == 12
    assert blocks_that_fit(config, 20 * spec.block_bytes) == 20
    assert blocks_that_fit(config, 21 * spec.block_bytes - 1) == 20
    assert blocks_that_fit(config, 1 << 40) == 6 * 12
    one_row = replace(config, scheduler=SchedulerConfig(max_num_seqs=1))
    assert blocks_that_fit(one_row, 1 << 40) == 12


def test_ranks_share_the_heads(make_config) -> None:
    whole, half = (make_config(tp_size=size).kv_layout for size in (1, 2))
    assert whole.block_bytes == 2 * half.block_bytes


@pytest.mark.parametrize(
    ("cache", "cure"),
    [
        ({"num_blocks": 11}, r"raise num_blocks \(now 11\)"),
        (
            {"num_blocks": None, "kv_cache_memory_bytes": 1000},
            r"raise kv_cache_memory_bytes \(now 1000\)",
        ),
        ({"num_blocks": None}, r"raise kv_cache_memory_bytes \(unset: a tenth of free memory\)"),
    ],
)
def test_less_than_one_sequence_is_refused_with_the_cure(make_config, cache, cure) -> None:
    config = make_config(**cache)
    check_one_sequence_fits(config, 12)
    with pytest.raises(KVCacheMemoryError, match=cure) as caught:
        check_one_sequence_fits(config, 11)
    for part in ("room for 88 tokens", "max_model_len is 96", "12 blocks", "at most 88"):
        assert part in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_mapping_sees_the_layers_one_after_the_other(make_config, dtype) -> None:
    config = make_config()
    spec = replace(config, model=replace(config.model, dtype=dtype)).kv_layout
    with closing(KVCache(spec, 5, CPU)) as cache:
        assert len(cache.layers) == 3
        assert cache.layers[0].shape == (5, 2, 2, 8, 8)
        assert not any(layer.any() for layer in cache.layers)
        cache.layers[1][4, 1, 0, 7, 3] = 2.5
        handle = handle_of_tensor(3, spec, cache.memory)
        assert (handle.rank, handle.pid, handle.num_blocks) == (3, os.getpid(), 5)
        other = MemoryFile.attach(handle.pid, handle.fd)
        assert other.size == 5 * spec.block_bytes
        seen = torch.frombuffer(bytearray(other.buffer), dtype=getattr(torch, dtype))
        seen = seen.view(3, 5, 2, 2, 8, 8)
        assert float(seen[1, 4, 1, 0, 7, 3]) == 2.5
        assert int((seen != 0).sum()) == 1
        other.buffer[:] = np.full(other.size, 0, np.uint8).tobytes()
        assert not cache.layers[1].any()
        other.close()


def test_closing_gives_the_memory_back(make_config) -> None:
    cache = KVCache(make_config().kv_layout, 4, CPU, name="tandem-test-kv-gone")
    assert "tandem-test-kv-gone" in _mappings()
    cache.close()
    cache.close()
    assert "tandem-test-kv-gone" not in _mappings()


def _mappings() -> str:
    return Path("/proc/self/maps").read_text(encoding="ascii")


def test_states_are_bytes_of_pages_that_tokens_may_have_later(make_config) -> None:
    config = make_config()
    planes = (Plane("state", 2, 96), Plane("conv", 2, 12))
    model = replace(
        config.model,
        kv_layers=(
            KVLayers(layers=(1,), planes=(Plane("k", 2, 16), Plane("v", 2, 16))),
            KVLayers(layers=(0,), planes=planes, is_state=True),
            KVLayers(layers=(2,), planes=planes, is_state=True),
        ),
    )
    config = replace(config, model=model)
    assert config.kv_layout.groups[0].block_size == 8
    with closing(KVCache(config.kv_layout, 5, CPU)) as cache:
        assert [layer.shape for layer in cache.layers] == [(5, 216), (5, 2, 2, 8, 4), (5, 216)]
        cache.layers[0][3] = 7
        assert torch.equal(cache.layers[2][3], cache.layers[0][3])
        assert bool((cache.pages[0, 3, :216] == 7).all()) and not cache.pages[0, 3, 216:].any()
    # One block of tokens for each 8, and two for the states of a sequence.
    assert blocks_per_sequence(config) == 12 + 2
    assert "(2 a request for its states)" in describe_capacity(config, 14)


def test_layers_in_several_groups_share_no_byte(make_config) -> None:
    """All groups lie at one base address and have blocks of other lengths: what each writes into
    every row of its own blocks is what it reads."""
    config = make_config()
    kv, index = Plane("kv", 1, 32, replicated=True), Plane("index", 1, 8, replicated=True)
    open_planes = tuple(Plane(name, 1, 64, replicated=True) for name in ("kv", "gate"))
    layers = (
        KVLayers(layers=(0, 2), planes=(kv,), window=17),
        KVLayers(layers=(1,), planes=(kv,), window=17),
        KVLayers(layers=(0, 2), planes=(kv, index), compress_ratio=4),
        KVLayers(layers=(0, 2), planes=open_planes, window=5, window_align=4, dtype="float32"),
        KVLayers(layers=(1,), planes=(kv,), compress_ratio=16),
        KVLayers(layers=(1,), planes=open_planes, window=1, window_align=16, dtype="float32"),
    )
    config = replace(config, model=replace(config.model, kv_layers=layers))
    layout = config.kv_layout
    assert "prefixes are found every 128 tokens" in describe_capacity(config, 400)
    rows = [(group.block_size, group.rows_per_block) for group in layout.groups]
    assert rows == [(8, 8), (8, 8), (32, 8), (2, 2), (128, 8), (2, 2)]
    num_groups, number = len(layout.groups), 0
    with closing(KVCache(layout, 3 * num_groups, CPU)) as cache:
        assert [layout.groups_of(layer) for layer in range(3)] == [(0, 2, 3), (1, 4, 5), (0, 2, 3)]
        written: dict[int, torch.Tensor] = {}
        for layer, found in enumerate(cache.layers):
            assert isinstance(found, CachesByGroup)
            for group, one in zip(layout.groups_of(layer), found.caches, strict=True):
                for view in _tensors(one):
                    number += 1
                    written[number] = view[group::num_groups]
                    written[number][...] = number
        assert number == 2 * (1 + 2 + 2) + (1 + 1 + 2)
        for number, view in written.items():
            assert bool((view == number).all()), number


def _tensors(cache: GroupCache) -> list[torch.Tensor]:
    match cache:
        case OpenRows(planes):
            return list(planes)
        case IndexedLatents(latents, IndexPages(keys)):
            return [latents, keys]
    assert isinstance(cache, torch.Tensor)
    return [cache]
