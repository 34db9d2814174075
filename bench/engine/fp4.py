"""Time and tune GEMMs with four-bit floats beside 4-bit integers, at the shapes of Llama-3.1-8B,
and NVFP4 experts of Qwen3-30B-A3B beside MXFP4's.

    python -m bench.engine.fp4                    # with the tunings that are built in
    python -m bench.engine.fp4 --experts          # experts alone
    python -m bench.engine.fp4 --tune             # sweep the tunings of each shape
    python -m bench.engine.fp4 --tune --rows 1,16

All columns of a row are timed in one process. `written_out` is the library's GEMM of weights that
are written out first, `bf16` that of weights that are in bf16 all along. Writes
bench/results/fp4.json, fp4-experts.json with --experts, or fp4-tuning.json with --tune.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bench.engine.experts import Layer
from bench.engine.int4 import SHAPES, Shape
from bench.engine.int4 import Case as Int4Case
from bench.engine.timing.device_time import copy_bytes_per_us, graph_us, rotations
from bench.engine.timing.expert_formats import FORMATS, POWERS, SCALES
from bench.engine.timing.expert_formats import SHAPES as LAYERS
from bench.record import write_result
from tandem_kernels import ops
from tandem_kernels.gemm.fp4_gemm import launch
from tandem_kernels.gemm.fp4_tiles import NUMBER_WORDS, NVFP4_TILE_WORDS, TILE_WORDS, tiles_of
from tandem_kernels.gemm.fp4_tuning import Fp4Tuning, fp4_tuning

BF16 = torch.bfloat16
FEW = (1, 4, 16, 32, 64)
MANY = (128, 256, 2048, 8192)
TUNED_ROWS = (1, 16, 32, 64, 128)
EXPERT_TOKENS = (1, 16, 64, 2048)
Row = dict[str, object]


class Case:
    """Tiles of one shape, as many as keep them out of the cache, and `rows` tokens."""

    def __init__(self, shape: Shape, rows: int, words: int = NVFP4_TILE_WORDS) -> None:
        self.shape = shape
        size = tiles_of(shape.weight_outputs, shape.inputs, words)
        self.weight_bytes = 4 * math.prod(size)
        with torch.device("cuda"):
            self.x = torch.randn(rows, shape.inputs, dtype=BF16)
            self.out = torch.empty(rows, shape.outputs, dtype=BF16)
            self.factors = None
            if words == NVFP4_TILE_WORDS:
                self.factors = torch.full((shape.weight_outputs,), 0.5)
            self.weights = []
            for _ in range(rotations(self.weight_bytes)):
                tiles = torch.randint(-(2**31), 2**31, size, dtype=torch.int32)
                tiles[..., NUMBER_WORDS:] = POWERS if words == TILE_WORDS else SCALES
                self.weights.append(tiles)

    def tiles_us(self, tuning: Fp4Tuning | None = None, replays: int = 15) -> float:
        """Microseconds of our kernel, or infinity where the tuning does not fit the device. Without
        `replays` it runs once."""
        gated = self.shape.gated
        calls = [
            partial(launch, self.x, tiles, self.factors, None, self.out, tuning, gated=gated)
            for tiles in self.weights
        ]
        try:
            calls[0]()
            return graph_us(calls, replays) if replays else 0.0
        except OutOfResources:
            return math.inf

    def written_out_us(self, library: Int4Case) -> float:
        return graph_us([partial(self._written_out, library, tiles) for tiles in self.weights])

    def _written_out(self, library: Int4Case, tiles: Tensor) -> Tensor:
        weight = ops.fp4_dequantise(tiles, self.factors, self.shape.inputs, BF16)
        return library._library(weight)


def gemms(bytes_per_us: float) -> Iterator[Row]:
    for (name, shape), rows in itertools.product(SHAPES.items(), FEW + MANY):
        ours, integers = Case(shape, rows), Int4Case(shape, rows, 128)
        row: Row = {"shape": name, "rows": rows}
        row["floor_us"] = round((ours.weight_bytes + ours.x.nbytes) / bytes_per_us, 2)
        if rows <= MANY[1]:
            row["nvfp4_us"] = round(ours.tiles_us(), 2)
            row["mxfp4_us"] = round(Case(shape, rows, TILE_WORDS).tiles_us(), 2)
            row["int4_us"] = round(integers.packed_us(None), 2)
            row["tuning"] = asdict(fp4_tuning(rows, shape.outputs, shape.inputs, gated=shape.gated))
        if rows >= FEW[-1]:
            row["nvfp4_written_out_us"] = round(ours.written_out_us(integers), 2)
            row["int4_written_out_us"] = round(integers.dequantised_us(), 2)
        row["bf16_us"] = round(integers.bf16_us(), 2)
        print(" | ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        yield row


def experts() -> Iterator[Row]:
    """Yields how long a layer of Qwen3-30B-A3B takes in each format."""
    held = {name: FORMATS[name](LAYERS["qwen3-30b-a3b"]) for name in ("nvfp4", "mxfp4", "int4")}
    for tokens in EXPERT_TOKENS:
        row: Row = {"tokens": tokens}
        for name, weights in held.items():
            torch.manual_seed(tokens)
            row[f"{name}_us"] = round(Layer(weights, tokens).all_us(), 2)
        print(" | ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        yield row


_TILES = {
    8: (
        (64, 64, 2, 3), (64, 64, 2, 5), (64, 128, 1, 3), (64, 128, 2, 3), (64, 128, 2, 4),
        (64, 256, 1, 2), (64, 256, 1, 3), (64, 256, 2, 2), (64, 256, 2, 3),
    ),
    16: (
        (64, 64, 4, 3), (64, 128, 2, 3), (64, 128, 4, 3), (64, 256, 2, 3), (64, 256, 4, 3),
        (128, 128, 4, 3),
    ),
    32: (
        (64, 64, 4, 5), (64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 4, 3),
        (128, 128, 4, 4), (128, 128, 8, 3),
    ),
    64: ((64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 4, 2), (128, 128, 8, 3)),
    128: (
        (64, 64, 4, 3), (64, 64, 4, 5), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 8, 5),
        (128, 128, 8, 3),
    ),
}  # fmt: skip
"""Lists cols, depth, warps and stages that may suit this many rows."""
_AHEAD = (0, 16, 32, 64, 256)


def tunings(rows: int, *, gated: bool) -> Iterator[Fp4Tuning]:
    tile = next(size for size in _TILES if rows <= size)
    few = tile <= 16
    splits = {(True, True): (2, 4, 8), (True, False): (8, 16), (False, True): (1, 2, 4)}
    counts = splits.get((few, gated), (1, 2, 4, 8))
    for (*size, warps, stages), split in itertools.product(_TILES[tile], counts):
        for ahead in _AHEAD if few else _AHEAD[-1:]:
            yield Fp4Tuning(tile, *size, split, warps, stages, ahead)


def candidates(tuned: Sequence[int]) -> Iterator[tuple[str, int, Fp4Tuning]]:
    for name, rows in itertools.product(SHAPES, tuned):
        for tuning in tunings(rows, gated=SHAPES[name].gated):
            yield name, rows, tuning


def compile_part(index: int, count: int, tuned: Sequence[int]) -> None:
    """Launches every `count`-th distinct tuning once."""
    distinct = {(SHAPES[name].gated, tuning): rows for name, rows, tuning in candidates(tuned)}
    for (gated, tuning), rows in list(distinct.items())[index::count]:
        Case(Shape(512, 2048, gated=gated), rows).tiles_us(tuning, replays=0)


def compile_all(processes: int) -> None:
    command = [sys.executable, "-m", "bench.engine.fp4", *sys.argv[1:]]
    parts = [subprocess.Popen([*command, "--part", f"{i}/{processes}"]) for i in range(processes)]
    assert all(part.wait() == 0 for part in parts)


def tune(tuned: Sequence[int]) -> Iterator[Row]:
    """Yields the times of each shape, the fastest first, and prints five."""
    for name, rows in itertools.product(SHAPES, tuned):
        case = Case(SHAPES[name], rows)
        times = sorted(
            (
                (case.tiles_us(tuning, replays=5), tuning)
                for tuning in tunings(rows, gated=SHAPES[name].gated)
            ),
            key=lambda item: item[0],
        )
        for us, tuning in times[:5]:
            print(f"{name} M={rows} {us:.2f} us {tuning}", flush=True)
        timed = [{"us": round(us, 2), **asdict(tuning)} for us, tuning in times]
        yield {"shape": name, "rows": rows, "timed": timed}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", action="store_true", help="experts alone")
    parser.add_argument("--tune", action="store_true", help="sweep the tunings")
    parser.add_argument("--rows", default=",".join(map(str, TUNED_ROWS)), help="with --tune")
    parser.add_argument("--part", help="I/N: only compile every N-th tuning from I on")
    given = parser.parse_args()
    tuned = [int(count) for count in given.rows.split(",")]
    if given.part:
        index, count = map(int, given.part.split("/"))
        compile_part(index, count, tuned)
    elif given.tune:
        compile_all(min(16, os.cpu_count() or 1))
        print(write_result("fp4-tuning", {"rows": list(tune(tuned))}))
    else:
        bytes_per_us = copy_bytes_per_us()
        figures = {"copy_TB_s": round(bytes_per_us / 1e6, 3)}
        layers = list(experts())
        if given.experts:
            print(write_result("fp4-experts", {**figures, "experts": layers}))
            return
        print(
            write_result("fp4", {**figures, "experts": layers, "rows": list(gemms(bytes_per_us))})
        )


if __name__ == "__main__":
    main()
