"""Time and tune the GEMMs of linear layers in each format of weights, beside their floor.

    python -m bench.engine.gemms --formats bf16,int4,nvfp4        # as the engine computes them
    python -m bench.engine.gemms --formats int4 --rows 128 --tune # all tiles that may suit, too
    python -m bench.engine.gemms --formats few-rows --shapes oss-qkv,oss-router --rows 1,2,4 --tune

The floor is the bytes of a weight and its rows over what a copy reaches, or the operations over
what a large bf16 GEMM reaches, whichever is longer. Each time is of a call in a CUDA graph, over
weights that together exceed the cache. `chosen`: as layers compute it; `library`: what is left to
the library; `written out`: the same after weights are written out in bf16; `_int_mm`: its product
of integers alone, whose sums are still to be scaled; `w8a16`: weights of 8 bits beside rows in
bf16. Writes bench/results/NAME.json.
"""

from __future__ import annotations

import argparse
import itertools
import math
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

from bench.arguments import names_among, numbers, parser_of
from bench.engine.timing.device_time import (
    compile_all,
    copy_bytes_per_us,
    graph_us,
    matmul_flops_per_us,
)
from bench.engine.timing.gemm_formats import FORMATS, SHAPES, Weights
from bench.record import write_result

_LLAMA = ["qkv", "o", "gate_up", "down"]
_ROWS = [1, 16, 32, 64, 128, 256, 2048]
_SHOWN = 6


def way_us(held: Weights) -> dict[str, float | str]:
    """Returns microseconds of each way; what one cannot do must not end the others."""
    found: dict[str, float | str] = {}
    for name, way in held.ways().items():
        calls = [partial(way, index) for index in range(held.count)]
        try:
            found[f"{name} us"] = round(graph_us(calls), 2)
        except Exception as error:
            found[f"{name} us"] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return found


def tuning_us(held: Weights, replays: int, part: slice = slice(None)) -> list[tuple[float, str]]:
    """Returns microseconds of each tiling, the quickest first; infinity where one does not fit the
    device. Without `replays` each of a part of them runs once."""
    found = []
    for tuning in list(dict.fromkeys(held.tunings()))[part]:
        calls = [partial(held.tiled, tuning, index) for index in range(held.count)]
        try:
            calls[0]()
            us = graph_us(calls, replays) if replays else 0.0
        except OutOfResources:
            us = math.inf
        found.append((us, repr(tuning)))
    return sorted(found)


def measure(given: argparse.Namespace, ceilings: tuple[float, float]) -> list[dict[str, object]]:
    bytes_per_us, flops_per_us = ceilings
    rows_found: list[dict[str, object]] = []
    for name, rows, kind in itertools.product(given.shapes, given.rows, given.formats):
        shape = SHAPES[name]
        held = FORMATS[kind](shape, rows)
        moved = held.nbytes + held.x.nbytes + held.out.nbytes
        operations = 2 * rows * shape.weight_outputs * shape.inputs
        floor = max(moved / bytes_per_us, operations / flops_per_us)
        row: dict[str, object] = {"shape": name, "rows": rows, "format": kind}
        row |= {"floor_us": round(floor, 2), **way_us(held)}
        print(" | ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        if given.tune:
            best = tuning_us(held, 5)[:_SHOWN]
            print("".join(f"    {us:8.2f} {tuning}\n" for us, tuning in best), end="", flush=True)
            row["tilings"] = [{"us": round(us, 2), "tuning": tuning} for us, tuning in best]
        rows_found.append(row)
        del held
        torch.cuda.empty_cache()
    return rows_found


def compile_part(first: int, count: int, given: argparse.Namespace) -> None:
    for name, rows, kind in itertools.product(given.shapes, given.rows, given.formats):
        tuning_us(FORMATS[kind](SHAPES[name], rows), 0, slice(first, None, count))


def main() -> None:
    parser = parser_of(__doc__, "gemms")
    parser.add_argument("--formats", type=names_among(FORMATS), default=["bf16", "fp8", "int8"])
    parser.add_argument("--shapes", type=names_among(SHAPES), default=_LLAMA)
    parser.add_argument("--rows", type=numbers, default=_ROWS, help="comma separated")
    parser.add_argument("--tune", action="store_true", help="sweep the tiles as well")
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.tune:
        compile_all(compile_part, given)
    ceilings = copy_bytes_per_us(), matmul_flops_per_us()
    figures = {
        "copy_TB_s": round(ceilings[0] / 1e6, 3),
        "matmul_TFLOP_s": round(ceilings[1] / 1e6, 1),
        "rows": measure(given, ceilings),
    }
    print(write_result(given.name, figures))


if __name__ == "__main__":
    main()
