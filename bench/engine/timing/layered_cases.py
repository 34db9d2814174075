"""Attention of models whose layers have heads of several kinds, as `kernel_cases` lists others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from bench.engine.timing.device_time import rotations
from bench.engine.timing.kernel_cases import BF16, Case, randn, scattered
from engine.head_sizes import HeadSizes
from tandem_kernels import ops
from tandem_kernels.attention.kv_pages import KVPages, PagedKV


@dataclass(frozen=True)
class _Kind:
    """Layers of one kind.

    Attributes:
        block_size: Of the tokens that fit one page beside the model's other layers.
    """

    heads: HeadSizes
    window: int | None
    block_size: int
    has_sinks: bool = False


def _heads(queries: int, kv: int, key: int, value: int) -> HeadSizes:
    return HeadSizes(num_heads=queries, num_kv_heads=kv, head_dim=key, v_head_dim=value)


KINDS = {
    "mimo-v2-flash full": _Kind(_heads(64, 4, 192, 128), None, 128),
    "mimo-v2-flash window": _Kind(_heads(64, 8, 192, 128), 129, 64, has_sinks=True),
    "gemma-4-26b full": _Kind(_heads(16, 2, 512, 512), None, 128),
    "gemma-4-26b window": _Kind(_heads(16, 8, 256, 256), 1024, 64),
}


def layered_attention_cases() -> Iterator[Case]:
    """Lists decodes of 1, 16 and 64 rows, and prompts of 2048 and 8192 tokens, of each kind."""
    for (name, kind), rows, context in itertools.product(
        KINDS.items(), (1, 16, 64), (1024, 16_384)
    ):
        calls, _, kv_bytes = _given(kind, [context] * rows, [1] * rows)
        yield Case("layered decode attention", f"{name}, {rows} x {context}", calls, kv_bytes)
    for (name, kind), length in itertools.product(KINDS.items(), (2048, 8192)):
        calls, q_bytes, kv_bytes = _given(kind, [length], [length])
        heads, seen = kind.heads, min(kind.window or length, length)
        pairs = seen * (seen + 1) / 2 + (length - seen) * seen
        flops = 2.0 * heads.num_heads * (heads.head_dim + heads.v_head_dim) * pairs
        moved = kv_bytes + 2 * q_bytes
        yield Case("layered prefill attention", f"{name}, {length}", calls, moved, flops)


def _given(
    kind: _Kind, seq_lens: list[int], query_lens: list[int]
) -> tuple[list[Callable[[], object]], float, float]:
    """Returns calls over several caches, the bytes of queries, and those of keys and values that
    are seen."""
    heads, size = kind.heads, kind.block_size
    metadata, num_blocks = scattered(seq_lens, query_lens, size, kind.window)
    seen = [
        length if kind.window is None else min(length, kind.window + new - 1)
        for length, new in zip(seq_lens, query_lens, strict=True)
    ]
    kv_bytes = 2.0 * sum(seen) * heads.num_kv_heads * (heads.head_dim + heads.v_head_dim)
    q = randn(sum(query_lens), heads.num_heads, heads.head_dim)
    sinks = torch.randn(heads.num_heads, device="cuda") if kind.has_sinks else None
    scale = heads.head_dim**-0.5
    calls: list[Callable[[], object]] = [
        partial(ops.paged_attention, q, cache, metadata, scale, 0.0, sinks)
        for cache in _caches(heads, size, num_blocks, rotations(kv_bytes, 16))
    ]
    return calls, float(q.nbytes), kv_bytes


def _caches(heads: HeadSizes, size: int, num_blocks: int, count: int) -> list[PagedKV]:
    """Returns caches as `kv_pages` describes them."""
    keys, values = (heads.num_kv_heads * size * dim for dim in (heads.head_dim, heads.v_head_dim))
    found: list[PagedKV] = []
    for _ in range(count):
        pages = torch.empty(num_blocks, keys + values, device="cuda", dtype=BF16).normal_()
        if keys == values:
            found.append(pages.view(num_blocks, 2, heads.num_kv_heads, size, heads.head_dim))
            continue
        shape = num_blocks, heads.num_kv_heads, size, -1
        found.append(KVPages(pages[:, :keys].view(shape), pages[:, keys:].view(shape)))
    return found
