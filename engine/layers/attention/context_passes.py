"""How contexts are expanded, or copied out of their pages: in passes of bounded size, whose
attention is joined.

    context of a request    0 ............ cached ................. num_cached ...... seq_len
                            |  slices: all queries see all of it   |  last pass: causal   |

Where all contexts of a step fit one pass there is no other, and nothing to join. Passes are joined
by the logarithms of their sums, as Milakov and Gimelshein's online softmax (arXiv 1805.02867).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from engine.layers.attention.backend import Int32Array, PrefillChunk
from tandem_kernels.attention.ragged_batch import RaggedBatch

_ALIGNED_INTS = 4
PASS_TOKENS = 16384
"""The most tokens of contexts that are expanded or copied at once, unless a step has more of its
own."""
RaggedKernel: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, RaggedBatch, float], tuple[Tensor, Tensor]
]
"""See `tandem_kernels.reference.ragged.ragged_attention`."""


class ContextRange(NamedTuple):
    """Positions [start, end) of the context of a request."""

    request: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ContextPass:
    """Tells of a part of the contexts of requests that lie together, and of who attends to it.

    Attributes:
        rows: Query rows of those requests, counted from the first that has a pass.
        block_tables: [R, max_blocks] int32.
        first: [R] int32, the first position of each request.
        num_keys: Of all of them.
        batch: Its bounds count from `rows.start`, and from the first key of the pass.
    """

    rows: slice
    block_tables: Tensor
    first: Tensor
    num_keys: int
    batch: RaggedBatch


def context_ranges(chunks: Sequence[PrefillChunk], most_tokens: int) -> list[list[ContextRange]]:
    """Returns the contexts of `chunks` cut into passes of `most_tokens` at most, the causal one
    first. That one has the chunks' own tokens, however many, and what fits of those before them.
    """
    room = max(0, most_tokens - sum(chunk.num_tokens for chunk in chunks))
    causal: list[ContextRange] = []
    left: list[ContextRange] = []
    for index, chunk in enumerate(chunks):
        taken = min(room, chunk.num_computed)
        room -= taken
        start = chunk.num_computed - taken
        causal.append(ContextRange(index, start, chunk.num_computed + chunk.num_tokens))
        left.append(ContextRange(index, 0, start))
    return [causal, *_slices(left, most_tokens)]


def _slices(left: list[ContextRange], most_tokens: int) -> Iterator[list[ContextRange]]:
    """Yields ranges of `most_tokens` together, as far as there are this many. Requests of a slice
    lie
    together: one in between that has nothing left is there with an empty range."""
    part: list[ContextRange] = []
    room = most_tokens
    for request, start, end in left:
        if start == end and part:
            part.append(ContextRange(request, start, end))
        while start < end:
            stop = min(end, start + room)
            part.append(ContextRange(request, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield part
                part, room = [], most_tokens
    while part and part[-1].start == part[-1].end:
        part.pop()
    if part:
        yield part


def context_passes(
    chunks: Sequence[PrefillChunk], block_tables: Tensor, most_tokens: int
) -> tuple[ContextPass, ...]:
    """Returns the passes over the contexts of `chunks`, whose block tables are [R, max_blocks]."""
    plan = context_ranges(chunks, most_tokens)
    bounds = [0, *accumulate(chunk.num_tokens for chunk in chunks)]
    arrays: list[Int32Array] = []
    for part in plan:
        queries = np.array(bounds[part[0].request : part[-1].request + 2], np.int32)
        lengths = [end - start for _, start, end in part]
        keys = np.array([0, *accumulate(lengths)], np.int32)
        first = np.array([start for _, start, _ in part], np.int32)
        arrays += [queries - queries[0], keys, first]
    on_device = iter(_upload(arrays, block_tables.device))
    passes = []
    for number, part in enumerate(plan):
        begin, end = part[0].request, part[-1].request + 1
        query_bounds, key_bounds, first_positions = (next(on_device) for _ in range(3))
        batch = RaggedBatch(
            query_bounds,
            key_bounds,
            max(chunk.num_tokens for chunk in chunks[begin:end]),
            max(stop - start for _, start, stop in part),
            causal=number == 0,
        )
        passes.append(
            ContextPass(
                slice(bounds[begin], bounds[end]),
                block_tables[begin:end],
                first_positions,
                sum(stop - start for _, start, stop in part),
                batch,
            )
        )
    return tuple(passes)


def _upload(arrays: Sequence[Int32Array], device: torch.device) -> list[Tensor]:
    """Returns device copies, made in one transfer that the host does not wait for."""
    sizes = [-(-len(array) // _ALIGNED_INTS) * _ALIGNED_INTS for array in arrays]
    starts = [0, *accumulate(sizes)]
    packed = torch.zeros(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + len(array)] = torch.from_numpy(array)
    there = packed.to(device, non_blocking=True)
    return [there[start : start + len(array)] for start, array in zip(starts, arrays, strict=False)]
