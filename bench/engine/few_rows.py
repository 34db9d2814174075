"""Linear layers of few rows: the library's way beside our own kernel over its tiles.

    python -m bench.engine.few_rows
    python -m bench.engine.few_rows --rows 1,4 --only qkv,router

The shapes are gpt-oss-120b's, with their biases; each time is in microseconds inside a CUDA graph
over weights that together exceed the cache. The floor is the weights' bytes over what a copy
reaches. A star marks the tiles that `few_row_tuning` takes. Writes bench/results/few-rows.json.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.engine.timing.device_time import copy_bytes_per_us, graph_us, rotations
from bench.engine.timing.tiles import compare_tiles
from bench.name_lists import names_among
from bench.record import write_result
from tandem_kernels.gemm.few_row_gemm import (
    REGISTER_ROWS,
    FewRowTuning,
    few_row_tuning,
    run_few_rows,
)

SHAPES = {"qkv": (5120, 2880), "o": (2880, 4096), "router": (128, 2880)}
"""Outputs and inputs."""
ROWS = (1, 2, 4, 8, 16)


def tunings(num_rows: int, num_outputs: int) -> Iterator[FewRowTuning]:
    """Yields the tiles that may be fast."""
    yield few_row_tuning(num_rows, num_outputs)
    if num_rows > REGISTER_ROWS:
        for cols, depth, stages in itertools.product((16, 32), (128, 256, 512), (3, 4, 5)):
            yield FewRowTuning(cols, depth, 4, stages)
        return
    for cols, depth, warps in itertools.product((1, 2, 4, 8), (512, 1024, 2048, 4096), (2, 4, 8)):
        numbers = cols * depth // (32 * warps)
        if numbers >= 8 and numbers * num_rows <= 128:
            yield FewRowTuning(cols, depth, warps)


def library(x: Tensor, weight: Tensor, bias: Tensor, is_router: bool) -> Tensor:
    """Computes what the engine leaves to the library."""
    if is_router:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x, weight, bias)


def measure(name: str, num_rows: int, bytes_per_us: float) -> dict[str, object]:
    num_outputs, inner = SHAPES[name]
    is_router = name == "router"
    with torch.device("cuda"):
        x = torch.randn(num_rows, inner, dtype=torch.bfloat16)
        sets = rotations(2 * num_outputs * inner)
        weights = torch.randn(sets, num_outputs, inner, dtype=torch.bfloat16)
        bias = torch.randn(num_outputs, dtype=torch.bfloat16)
        kind = torch.float32 if is_router else torch.bfloat16
        out = torch.empty(num_rows, num_outputs, dtype=kind)
    added = None if is_router else bias
    usual = graph_us([partial(library, x, weight, bias, is_router) for weight in weights])
    floor = weights[0].nbytes / bytes_per_us
    print(f"{name} rows={num_rows}: library {usual:.1f} us, floor {floor:.1f}")
    times = compare_tiles(
        tunings(num_rows, num_outputs),
        lambda tuning: [partial(run_few_rows, x, weight, added, out, tuning) for weight in weights],
    )
    return {
        "shape": name,
        "rows": num_rows,
        "library_us": usual,
        "floor_us": floor,
        **times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=ROWS)
    parser.add_argument("--only", type=names_among(SHAPES), default=list(SHAPES))
    given = parser.parse_args()
    bytes_per_us = copy_bytes_per_us()
    figures = [measure(name, rows, bytes_per_us) for name in given.only for rows in given.rows]
    print(write_result("few-rows", {"gemms": figures}))


if __name__ == "__main__":
    main()
