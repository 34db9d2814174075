"""Time and tune GEMMs with 4-bit weights beside their floor, at the shapes of Llama-3.1-8B.

    python -m bench.engine.int4                    # with the tunings that are built in
    python -m bench.engine.int4 --tune             # sweep, and keep the fastest of each shape
    python -m bench.engine.int4 --tune --rows 128

Each row has our kernel, the library's GEMM on weights that are dequantised first (`dequantised`),
and the library's on weights that are in bf16 all along (`bf16`). The floor is the longer of the
packed bytes over what a copy reaches, and the operations over what a large GEMM reaches. Writes
bench/results/int4.json, or int4_tuning.json with --tune.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bench.engine.timing.device_time import (
    copy_bytes_per_us,
    graph_us,
    matmul_flops_per_us,
    rotations,
)
from bench.record import write_result
from tandem_kernels import ops
from tandem_kernels.gemm.int4_gemm import launch
from tandem_kernels.gemm.int4_packing import padded_inputs
from tandem_kernels.gemm.int4_tuning import Int4Tuning, int4_tuning

BF16 = torch.bfloat16
ROWS = (1, 4, 16, 32, 64, 128, 256, 2048)
TUNED_ROWS = (1, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Shape:
    """`outputs` of the kernel: half of the weight's when gated."""

    outputs: int
    inputs: int
    gated: bool = False

    @property
    def weight_outputs(self) -> int:
        return self.outputs * (1 + self.gated)


SHAPES = {
    "qkv": Shape(6144, 4096),
    "o": Shape(4096, 4096),
    "gate_up": Shape(14336, 4096, gated=True),
    "down": Shape(4096, 14336),
}


class Case:
    """Weights of one shape, as many as keep them out of the cache, and `rows` tokens."""

    def __init__(self, shape: Shape, rows: int, group_size: int) -> None:
        self.shape = shape
        columns, outputs = padded_inputs(shape.inputs, group_size), shape.weight_outputs
        self.weight_bytes = outputs * (columns // 2 + columns // group_size * 4)
        with torch.device("cuda"):
            self.x = torch.randn(rows, shape.inputs, dtype=BF16)
            self.out = torch.empty(rows, shape.outputs, dtype=BF16)
            limits = -(2**15), 2**15
            self.weights = []
            for _ in range(rotations(self.weight_bytes)):
                packed = torch.randint(*limits, (outputs, columns // 4), dtype=torch.int16)
                groups = torch.full((columns // group_size, outputs, 2), 8.0, dtype=BF16)
                groups[..., 0] = 0.0043
                self.weights.append((packed, groups))

    def floor_us(self, bytes_per_us: float, flops_per_us: float) -> float:
        flops = 2 * len(self.x) * self.shape.weight_outputs * self.shape.inputs
        moved = self.weight_bytes + self.x.nbytes + self.out.nbytes
        return max(moved / bytes_per_us, flops / flops_per_us)

    def packed_us(self, tuning: Int4Tuning | None, replays: int = 15) -> float:
        """Microseconds of our kernel, or infinity where the tuning does not fit the device. Without
        `replays` it runs once."""
        calls = [
            partial(launch, self.x, *weight, None, self.out, tuning, gated=self.shape.gated)
            for weight in self.weights
        ]
        try:
            calls[0]()
            return graph_us(calls, replays) if replays else 0.0
        except OutOfResources:
            return math.inf

    def dequantised_us(self) -> float:
        return graph_us([partial(self._dequantised, *weight) for weight in self.weights])

    def _dequantised(self, packed: Tensor, groups: Tensor) -> Tensor:
        return self._library(ops.int4_dequantise(packed, groups, self.shape.inputs))

    def bf16_us(self) -> float:
        size = self.shape.weight_outputs, self.shape.inputs
        weights = [
            torch.randn(size, dtype=BF16, device="cuda") for _ in range(min(8, len(self.weights)))
        ]
        return graph_us([partial(self._library, weight) for weight in weights])

    def _library(self, weight: Tensor) -> Tensor:
        if not self.shape.gated:
            return F.linear(self.x, weight)
        if len(self.x) >= 1024:
            return ops.fused_gate_up(self.x, weight)
        return ops.silu_and_mul(F.linear(self.x, weight))


_TILES = {
    8: [
        Int4Tuning(8, 32, 1, True, 1, 4, 8, True),
        Int4Tuning(8, 64, 1, True, 2, 4, 8, True),
        Int4Tuning(8, 128, 1, True, 4, 3, 8, True),
        Int4Tuning(8, 32, 1, True, 1, 3, 8, True),
    ],
    16: [
        Int4Tuning(16, 32, 1, True, 1, 3, 8, True),
        Int4Tuning(16, 64, 1, True, 2, 3, 8, True),
        Int4Tuning(16, 128, 1, False, 4, 3, 8, True),
        Int4Tuning(16, 64, 1, True, 4, 4, 8),
    ],
    32: [
        Int4Tuning(32, 128, 1, True, 4, 3, 8),
        Int4Tuning(32, 64, 1, True, 4, 3, 8, True),
        Int4Tuning(32, 128, 1, True, 4, 2, 8, True),
    ],
    64: [
        Int4Tuning(64, 128, 1, True, 8, 2, 8),
        Int4Tuning(64, 128, 1, True, 8, 2, 8, True),
        Int4Tuning(64, 64, 1, True, 4, 2, 8, True),
        Int4Tuning(64, 64, 1, True, 4, 3, 8, True),
        Int4Tuning(64, 128, 1, True, 8, 3, 8),
        Int4Tuning(64, 128, 1, True, 4, 2, 8),
        Int4Tuning(64, 64, 1, True, 4, 2, 8),
    ],
    128: [
        Int4Tuning(128, 128, 1, True, 8, 2),
        Int4Tuning(128, 128, 1, True, 8, 2, 0, True),
        Int4Tuning(128, 64, 1, True, 4, 2, 0, True),
        *(
            Int4Tuning(128, cols, 1, True, warps, stages, ahead, late, pieces)
            for cols, warps in ((64, 4), (128, 4), (128, 8))
            for pieces, stages in ((2, 3), (4, 3), (4, 4))
            for ahead, late in ((8, False), (8, True))
        ),
    ],
}
"""Lists what may suit this many rows: few, because each takes seconds to compile. Of 32 rows and
more only products whose scales come late (the last argument) do not wait for each other."""


def tunings(rows: int, *, gated: bool) -> Iterator[Int4Tuning]:
    """Lists what may suit `rows` tokens; each tile with two numbers of parts."""
    tile = next(size for size in _TILES if rows <= size)
    splits = (1, 2) if gated or tile == 128 else (2, 4) if tile in {32, 64} else (4, 8)
    for base, split in itertools.product(_TILES[tile], splits):
        yield replace(base, splits=split)
    yield replace(_TILES[tile][0], splits=splits[0], ahead=0)


def candidates(tuned: Sequence[int]) -> Iterator[tuple[str, int, Int4Tuning]]:
    for name, rows in itertools.product(SHAPES, tuned):
        for tuning in tunings(rows, gated=SHAPES[name].gated):
            yield name, rows, tuning


def compile_part(index: int, count: int, group_size: int, tuned: Sequence[int]) -> None:
    """Launches every `count`-th distinct tuning once."""
    distinct = {
        (SHAPES[name].gated, tuning): (name, rows) for name, rows, tuning in candidates(tuned)
    }
    for (_, tuning), (name, rows) in list(distinct.items())[index::count]:
        Case(SHAPES[name], rows, group_size).packed_us(tuning, replays=0)


def compile_all(processes: int) -> None:
    """Fills the compile cache by processes that launch each tuning once."""
    command = [sys.executable, "-m", "bench.engine.int4", *sys.argv[1:]]
    parts = [subprocess.Popen([*command, "--part", f"{i}/{processes}"]) for i in range(processes)]
    assert all(part.wait() == 0 for part in parts)


Row = dict[str, object]


def tune(group_size: int, tuned: Sequence[int]) -> list[Row]:
    """Returns, and prints, the five fastest of each shape."""
    by_case: dict[tuple[str, int], list[Int4Tuning]] = {}
    for name, rows, tuning in candidates(tuned):
        by_case.setdefault((name, rows), []).append(tuning)
    found: list[Row] = []
    for (name, rows), all_tunings in by_case.items():
        case = Case(SHAPES[name], rows, group_size)
        times = sorted(
            ((case.packed_us(tuning, replays=5), tuning) for tuning in all_tunings),
            key=lambda item: item[0],
        )
        for us, tuning in times[:5]:
            print(f"{name} M={rows} {us:.2f} us {tuning}", flush=True)
        best = [{"us": round(us, 2), **asdict(tuning)} for us, tuning in times[:5]]
        found.append({"shape": name, "rows": rows, "best": best})
    return found


def report(group_size: int, bytes_per_us: float, flops_per_us: float) -> list[Row]:
    table: list[Row] = []
    for name, rows in itertools.product(SHAPES, ROWS):
        case = Case(SHAPES[name], rows, group_size)
        floor = case.floor_us(bytes_per_us, flops_per_us)
        timings: dict[str, Callable[[], float]] = {
            "packed": lambda case=case: case.packed_us(None),
            "dequantised": case.dequantised_us,
            "bf16": case.bf16_us,
        }
        us = {label: round(measure(), 2) for label, measure in timings.items()}
        shape = SHAPES[name]
        tuning = int4_tuning(rows, shape.outputs, shape.inputs, gated=shape.gated)
        table.append(
            {
                "shape": name,
                "rows": rows,
                "floor_us": round(floor, 2),
                **{f"{label}_us": value for label, value in us.items()},
                "floor_share": round(floor / us["packed"], 3),
                "against_bf16": round(us["bf16"] / min(us["packed"], us["dequantised"]), 2),
                "tuning": asdict(tuning),
            }
        )
        print(" | ".join(f"{key} {value}" for key, value in table[-1].items()), flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", action="store_true", help="sweep the tunings")
    parser.add_argument("--rows", default=",".join(map(str, TUNED_ROWS)), help="with --tune")
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), default=128)
    parser.add_argument("--part", help="I/N: only compile every N-th tuning from I on")
    given = parser.parse_args()
    tuned = [int(count) for count in given.rows.split(",")]
    if given.part:
        index, count = map(int, given.part.split("/"))
        compile_part(index, count, given.group_size, tuned)
        return
    if given.tune:
        compile_all(min(16, os.cpu_count() or 1))
        rows, name = tune(given.group_size, tuned), "int4_tuning"
        figures: dict[str, object] = {}
    else:
        bytes_per_us, flops_per_us = copy_bytes_per_us(), matmul_flops_per_us()
        rows, name = report(given.group_size, bytes_per_us, flops_per_us), "int4"
        figures = {
            "copy_TB_s": round(bytes_per_us / 1e6, 3),
            "matmul_TFLOP_s": round(flops_per_us / 1e6, 1),
        }
    suffix = f"_{given.group_size}" if given.group_size != 128 else ""
    print(write_result(name + suffix, {**figures, "group_size": given.group_size, "rows": rows}))


if __name__ == "__main__":
    main()
