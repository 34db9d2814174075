"""Time both GEMMs of MXFP4 experts together, where few rows have programs for each pair.

    python -m bench.engine.expert_pairs                 # gpt-oss-120b; writes the table of this GPU

What `bench.engine.experts --tune` cannot see, because it times each GEMM by itself: programs of the
first may ask the cache for the second's weights. Tunings of the first are timed in front of the
second that the table has, those of the second behind the quickest first; microseconds of a layer in
a CUDA graph, over experts that exceed the cache. All must give what the table's tunings give, but
for the order of additions. Writes bench/results/expert-pairs.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace as replaced
from functools import partial

import msgspec
import torch
from torch import Tensor

from bench.engine.experts import Layer, Timed, smaller, write_table
from bench.engine.timing.device_time import copy_bytes_per_us, graph_us
from bench.engine.timing.expert_formats import SHAPES, LayerShape, Mxfp4Weights
from bench.record import write_result
from tandem_kernels.device import gpu_name
from tandem_kernels.experts.expert_tuning import TABLES, ExpertTuning, nearest_table
from tandem_kernels.experts.mxfp4_pairs import mxfp4_pair_gemm

_TOKENS = 1, 4
_ROUNDED = 0.01
_FIRST = (8, 64, 64, 2, 3, 5), (8, 64, 64, 2, 3, 3), (8, 64, 64, 1, 3, 9), (8, 64, 128, 2, 3, 5)
_SECOND = (8, 64, 128, 2, 3, 9), (8, 64, 128, 2, 3, 5), (8, 128, 64, 2, 3, 5), (8, 64, 64, 2, 3, 3)
"""Rows, outputs, inputs, warps, stages and parts."""


def tunings(usual: ExpertTuning, *, gated: bool) -> Iterator[ExpertTuning]:
    """Yields what is tried, `usual` first."""
    yield usual
    sizes = [
        ExpertTuning(*size[:5], splits=size[5], each_pair=True)
        for size in (_FIRST if gated else _SECOND)
    ]
    for tuning in dict.fromkeys([usual, *sizes]):
        for own in (False, True):
            for following in ("no", "early", "late") if gated else ("no",):
                tried = msgspec.structs.replace(tuning, asks_own=own, asks_next=following)
                if tried != usual:
                    yield tried


class Pairs:
    """Computes a layer's experts, for the rows and the routings of a step."""

    def __init__(self, held: Mxfp4Weights, num_tokens: int) -> None:
        self.layer = Layer(held, num_tokens)
        self.w13, self.w2 = held.w13, held.w2

    def run(self, chosen: Tensor, first: ExpertTuning, second: ExpertTuning) -> Tensor:
        layer, shape = self.layer, self.layer.shape
        between = layer.x.new_empty(layer.weights.numel(), shape.width)
        out = torch.empty_like(layer.x)
        given = layer.weights, chosen
        mxfp4_pair_gemm(layer.x, self.w13, *given, between, first, following=self.w2)
        mxfp4_pair_gemm(between, self.w2, *given, out, second)
        return out

    def us(self, first: ExpertTuning, second: ExpertTuning, expected: Tensor) -> float:
        """Returns the microseconds of a layer, whose first routing must give `expected`."""
        found = self.run(self.layer.chosen[0], first, second).double()
        error = ((found - expected).norm() / expected.norm()).item()
        assert error < _ROUNDED, (first, second, error)
        return graph_us(
            [partial(self.run, chosen, first, second) for chosen in self.layer.chosen], 25
        )


def present(shape: LayerShape, num_tokens: int) -> tuple[ExpertTuning, ExpertTuning]:
    """Returns what the table has for both GEMMs."""
    gpu = gpu_name(torch.device("cuda"))
    table = nearest_table(Mxfp4Weights.table_shape(shape), gpu, TABLES)
    rows = num_tokens * shape.top_k / shape.num_experts
    return table.choose(rows, gated=True), table.choose(rows, gated=False)


def sweep(held: Mxfp4Weights, num_tokens: int) -> tuple[Timed, Timed, list[dict[str, object]]]:
    """Returns the times of first and of second GEMMs, and all of them as rows of a report."""
    pairs = Pairs(held, num_tokens)
    first, second = present(held.shape, num_tokens)
    expected = pairs.run(pairs.layer.chosen[0], first, second).double()
    report: list[dict[str, object]] = []

    def timed(one: ExpertTuning, other: ExpertTuning) -> float:
        us = pairs.us(one, other, expected)
        report.append({"tokens": num_tokens, "us": us, "first": repr(one), "second": repr(other)})
        print(f"T={num_tokens} {us:7.2f} us | {_told(one)} | {_told(other)}", flush=True)
        return us

    firsts = [(timed(one, second), one) for one in tunings(first, gated=True)]
    best = min(firsts, key=lambda found: found[0])[1]
    seconds = [(timed(best, other), other) for other in tunings(second, gated=False)]
    timed(first, second)
    return {num_tokens: firsts}, {num_tokens: seconds}, report


def _told(tuning: ExpertTuning) -> str:
    size = f"{tuning.cols} x {tuning.depth}, {tuning.num_warps} warps, {tuning.splits} parts"
    return f"{size}{', own' if tuning.asks_own else ''}, next {tuning.asks_next}"


def compile_part(shape: LayerShape, index: int, count: int) -> None:
    """Launches every `count`-th tuning once, from `index` on, for small experts: that fills the
    cache of compiled kernels."""
    held = Mxfp4Weights(replaced(smaller(shape), num_experts=8))
    for num_tokens in _TOKENS:
        pairs = Pairs(held, num_tokens)
        first, second = present(shape, num_tokens)
        tried = [(one, second) for one in tunings(first, gated=True)]
        tried += [(first, other) for other in tunings(second, gated=False)]
        for one, other in tried[index::count]:
            pairs.run(pairs.layer.chosen[0], one, other)
    torch.cuda.synchronize()


def compile_all(processes: int) -> None:
    command = [sys.executable, "-m", "bench.engine.expert_pairs", "--part"]
    parts = [subprocess.Popen([*command, f"{i}/{processes}"]) for i in range(processes)]
    assert all(part.wait() == 0 for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", help="I/N: only compile every N-th from I on")
    given = parser.parse_args()
    shape = SHAPES["gpt-oss-120b"]
    if given.part is not None:
        index, count = map(int, given.part.split("/"))
        compile_part(shape, index, count)
        return
    compile_all(min(12, os.cpu_count() or 1))
    held, rows = Mxfp4Weights(shape), []
    found: dict[bool, Timed] = {True: {}, False: {}}
    for num_tokens in _TOKENS:
        firsts, seconds, report = sweep(held, num_tokens)
        found[True] |= firsts
        found[False] |= seconds
        rows += report
    figures = {"floor_us": Layer(held, 1).floor_us(copy_bytes_per_us()), "rows": rows}
    print(write_result("expert-pairs", figures))
    print(write_table(Mxfp4Weights, shape, found, TABLES))


if __name__ == "__main__":
    main()
