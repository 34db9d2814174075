"""Time and tune the GEMMs of experts, and all of a layer's experts, beside their floor.

    python -m bench.engine.experts                 # a layer, with the tables as they are
    python -m bench.engine.experts --tune          # sweep, and write the table of this GPU
    python -m bench.engine.experts --tune --shape mixtral-8x7b --ranks 2 --tables FOLDER

The floor is the bytes of the experts that are touched over what a copy reaches, or the operations
over what a large GEMM reaches, whichever is longer. Routing is uniformly random.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from bench.engine.kernel_timing import copy_bytes_per_us, graph_us
from tandem_kernels.device import gpu_name
from tandem_kernels.expert_rows import ExpertRows
from tandem_kernels.expert_tuning import (
    TABLES,
    ExpertShape,
    ExpertTable,
    ExpertTuning,
    Range,
)
from tandem_kernels.fused_experts import expert_gemm, fused_experts

_FLOPS_PER_US = 690e6
"""A large bf16 GEMM on an H200, as measured inside our steps."""
_TOKENS = (1, 4, 16, 64, 256, 2048, 8192)
_SETS = 8
Timed = dict[int, list[tuple[float, ExpertTuning]]]
"""Microseconds of tunings, by tokens of a step."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    num_experts: int
    top_k: int
    hidden: int
    width: int

    @property
    def table(self) -> ExpertShape:
        return ExpertShape(self.num_experts, self.width, self.hidden)


SHAPES = {
    "deepseek-v2-lite": LayerShape(64, 6, 2048, 1408),
    "deepseek-v3": LayerShape(256, 8, 7168, 2048),
    "glm-4.5-air": LayerShape(128, 8, 4096, 1408),
    "gpt-oss-20b": LayerShape(32, 4, 2880, 2880),
    "gpt-oss-120b": LayerShape(128, 4, 2880, 2880),
    "minimax-m2": LayerShape(256, 8, 3072, 1536),
    "mixtral-8x7b": LayerShape(8, 2, 4096, 14336),
    "qwen3-30b-a3b": LayerShape(128, 8, 2048, 768),
    "qwen3-235b-a22b": LayerShape(128, 8, 4096, 1536),
}
"""Layers on one rank; `--ranks` divides their width."""


class Layer:
    """One layer's experts, and steps of uniformly random routing."""

    def __init__(self, shape: LayerShape, num_tokens: int) -> None:
        self.shape = shape
        with torch.device("cuda"):
            size = shape.num_experts, 2 * shape.width, shape.hidden
            self.w13 = torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.02)
            self.w2 = torch.empty(
                (shape.num_experts, shape.hidden, shape.width), dtype=torch.bfloat16
            ).normal_(0, 0.02)
            self.x = torch.randn(num_tokens, shape.hidden, dtype=torch.bfloat16)
            self.weights = torch.rand(num_tokens, shape.top_k)
            self.chosen = [
                torch.rand(num_tokens, shape.num_experts).argsort(-1)[:, : shape.top_k].int()
                for _ in range(_SETS)
            ]

    def floor_us(self, bytes_per_us: float) -> float:
        shape = self.shape
        touched = sum(len(chosen.unique()) for chosen in self.chosen) / _SETS
        expert_bytes = 6 * shape.hidden * shape.width
        operations = 6 * shape.hidden * shape.width * self.weights.numel()
        return max(touched * expert_bytes / bytes_per_us, operations / _FLOPS_PER_US)

    def all_us(self) -> float:
        return graph_us(
            [
                partial(fused_experts, self.x, self.w13, self.w2, self.weights, chosen)
                for chosen in self.chosen
            ]
        )

    def gemm_us(self, tuning: ExpertTuning, *, gated: bool, replays: int) -> float:
        """Microseconds of one GEMM, or infinity where the tuning does not fit the device. Without
        `replays` it runs once."""
        pairs = self.weights.numel()
        hidden, width = self.shape.hidden, self.shape.width
        kind = {"dtype": torch.bfloat16, "device": "cuda"}
        x = self.x if gated else torch.randn(pairs, width, **kind)
        out = torch.empty(pairs, width if gated else hidden, **kind)
        weight = self.w13 if gated else self.w2

        def run(rows: ExpertRows) -> None:
            expert_gemm(x, weight, self.weights, rows, out, tuning, gated=gated)

        steps = [ExpertRows.of(chosen, self.shape.num_experts) for chosen in self.chosen]
        try:
            run(steps[0])
            return graph_us([partial(run, step) for step in steps], replays) if replays else 0.0
        except OutOfResources:
            return math.inf


def tunings(rows_per_expert: float) -> Iterator[ExpertTuning]:
    if rows_per_expert <= 8:
        for cols, depth, stages in itertools.product((32, 64, 128), (64, 128, 256), (3, 4, 5)):
            if cols * depth * stages <= 64 * 128 * 5:
                yield ExpertTuning(16, cols, depth, 4, stages)
    elif rows_per_expert <= 32:
        for rows, cols, depth, warps in itertools.product(
            (16, 32, 64), (32, 64, 128), (64, 128), (4, 8)
        ):
            yield ExpertTuning(rows, cols, depth, warps, 3 if depth == 128 else 4)
    else:
        for rows, cols, warps, stages, group in itertools.product(
            (64, 128), (64, 128, 256), (4, 8), (3, 4), (1, 8)
        ):
            if rows * cols <= 128 * 256 and (rows * cols <= 128 * 128 or warps == 8):
                yield ExpertTuning(rows, cols, 64, warps, stages, group)


def candidates(shape: LayerShape) -> list[tuple[int, bool, ExpertTuning]]:
    return [
        (num_tokens, gated, tuning)
        for num_tokens in _TOKENS
        for gated in (True, False)
        for tuning in tunings(num_tokens * shape.top_k / shape.num_experts)
    ]


def tune(shape: LayerShape, part: tuple[int, int] | None) -> dict[bool, Timed]:
    """Returns the time of every tuning, of the first GEMM (True) and of the second. With `part`
    only compiles every so many-th."""
    found: dict[bool, Timed] = {True: {}, False: {}}
    layer: Layer | None = None
    for index, (num_tokens, gated, tuning) in enumerate(candidates(shape)):
        if part is not None and index % part[1] != part[0]:
            continue
        if layer is None or len(layer.x) != num_tokens:
            layer = None
            layer = Layer(shape, num_tokens)
        us = layer.gemm_us(tuning, gated=gated, replays=0 if part else 7)
        found[gated].setdefault(num_tokens, []).append((us, tuning))
    return found


def ranges(times: Timed, rows_per_token: float) -> tuple[Range, ...]:
    """Returns the fastest tuning of each number of tokens, for all numbers: between two that were
    measured the border is their geometric mean.

    Args:
        rows_per_token: Mean rows of an expert for each token.
    """
    sizes = sorted(times)
    best = [min(times[size], key=lambda timed: timed[0])[1] for size in sizes]
    borders = [
        round(math.sqrt(size * after) * rows_per_token, 3)
        for size, after in itertools.pairwise(sizes)
    ]
    parts: list[Range] = []
    for end, tuning, after in zip([*borders, None], best, [*best[1:], None], strict=True):
        if tuning != after:
            parts.append(Range(end, tuning))
    return tuple(parts)


def write_table(shape: LayerShape, found: dict[bool, Timed], tables: Path) -> Path:
    """Writes the table of a shape on this GPU, and prints the three fastest of each step."""
    for gated, times in found.items():
        for num_tokens, timed in times.items():
            for us, tuning in sorted(timed, key=lambda item: item[0])[:3]:
                print(f"T={num_tokens} {'gate-up' if gated else 'down'} {us:.1f} us {tuning}")
    rows = shape.top_k / shape.num_experts
    table = ExpertTable(gate_up=ranges(found[True], rows), down=ranges(found[False], rows))
    path = tables / gpu_name(torch.device("cuda")) / shape.table.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(table.to_json())
    return path


def compile_all(options: list[str], processes: int) -> None:
    """Fills the compile cache by processes that launch each tuning once."""
    command = [sys.executable, "-m", "bench.engine.experts", "--tune", *options, "--part"]
    parts = [subprocess.Popen([*command, f"{i}/{processes}"]) for i in range(processes)]
    assert all(part.wait() == 0 for part in parts)


def report(name: str, shape: LayerShape) -> None:
    bytes_per_us = copy_bytes_per_us()
    for num_tokens in _TOKENS:
        layer = Layer(shape, num_tokens)
        us, floor = layer.all_us(), layer.floor_us(bytes_per_us)
        print(f"{name} T={num_tokens}: {us:.1f} us, floor {floor:.1f}, {us / floor:.2f} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--tune", action="store_true", help="sweep the tunings, write the table")
    parser.add_argument("--tables", type=Path, default=TABLES, help="folder of the tables")
    parser.add_argument("--part", help="I/N: only compile every N-th from I on")
    given = parser.parse_args()
    whole = SHAPES[given.shape]
    shape = replace(whole, width=whole.width // given.ranks)
    if not given.tune:
        report(given.shape, shape)
    elif given.part is None:
        options = ["--shape", given.shape, "--ranks", str(given.ranks)]
        compile_all(options, min(8, os.cpu_count() or 1))
        print(write_table(shape, tune(shape, None), given.tables))
    else:
        index, count = map(int, given.part.split("/"))
        tune(shape, (index, count))


if __name__ == "__main__":
    main()
