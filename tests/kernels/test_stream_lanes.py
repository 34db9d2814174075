"""Tests that kernels of streams that run at the same time count in memory of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from engine.layers.side_stream import SideStream
from tandem_kernels.stream_lanes import LANES, in_lane

pytest.importorskip("triton")

from tandem_kernels.experts.arrival_counts import arrival_counts
from tandem_kernels.gemm import fp4_gemm, fp8_gemm, int4_gemm

CPU = torch.device("cpu")
COUNTERS: list[Callable[[torch.device], Tensor]] = [
    arrival_counts, fp4_gemm._arrival_counts, fp8_gemm._tickets, int4_gemm._arrival_counts
]  # fmt: skip


@pytest.mark.parametrize("counters", COUNTERS)
def test_lanes_count_apart_and_as_aligned(counters: Callable[[torch.device], Tensor]) -> None:
    main = counters(CPU)
    found = [main]
    for lane in range(1, LANES):
        with in_lane(lane):
            found.append(counters(CPU))
    assert counters(CPU).data_ptr() == main.data_ptr()
    bounds = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in found]
    assert all(end <= begin for (_, end), (begin, _) in pairwise(bounds))
    assert {(begin - bounds[0][0]) % 16 for begin, _ in bounds} == {0}, "kernels are the same"


@pytest.mark.parametrize("lane", [0, 1])
def test_what_is_launched_beside_counts_apart(monkeypatch: pytest.MonkeyPatch, lane: int) -> None:
    """Queries of the attention and of the indexer are multiplied side by side in DeepSeek V4."""
    monkeypatch.setattr("engine.layers.side_stream.side_stream", lambda *_: _Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: _Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    main, side = fp8_gemm._tickets(CPU), SideStream(CPU, lane)
    with side.beside():
        own = fp8_gemm._tickets(CPU)
    assert own.data_ptr() != main.data_ptr() == fp8_gemm._tickets(CPU).data_ptr()


class _Stream:
    def wait_stream(self, other: _Stream) -> None:
        """Has nothing to wait for."""
