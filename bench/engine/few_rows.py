"""Linear layers of few rows: the library's way beside our own kernel over its tiles.

    python -m bench.engine.few_rows
    python -m bench.engine.few_rows --rows 1,4 --only qkv,router
    python -m bench.engine.few_rows --rows 1,2 --only front
    python -m bench.engine.few_rows --rows 1,2,4 --only head,head-8b

The shapes are gpt-oss-120b's, with their biases, and the head of Llama-3.1-8B. Each time is in
microseconds inside a CUDA graph over weights that together exceed the cache. The floor is the
weights' bytes over what a copy reaches. A star marks the tiles that `few_row_tuning` takes.
`front` is norm, q, k and v, rotation and the write into the cache: in three launches, and in one.
Writes bench/results/NAME.json.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.arguments import names_among
from bench.engine.timing.device_time import copy_bytes_per_us, graph_us, rotations
from bench.engine.timing.tiles import compare_tiles
from bench.record import write_result
from tandem_kernels import ops
from tandem_kernels.gemm.few_row_gemm import FewRowTuning, few_row_tuning, run_few_rows
from tandem_kernels.gemm.few_row_qkv import run_few_row_qkv
from tandem_kernels.gemm.few_row_shapes import MANY_OUTPUTS, REGISTER_ROWS, takes_heads

SHAPES = {
    "qkv": (5120, 2880),
    "o": (2880, 4096),
    "router": (128, 2880),
    "head": (201088, 2880),
    "head-8b": (128256, 4096),
}
"""Outputs and inputs."""
WIDE = ("router", "head", "head-8b")
"""Layers without biases whose outputs are float32."""
ROWS = (1, 2, 4, 8, 16)
FRONT, MOST_FRONT_ROWS = "front", 2
Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 64, 8, 64, 64


def tunings(num_rows: int, num_outputs: int) -> Iterator[FewRowTuning]:
    """Yields the tiles that may be fast."""
    yield few_row_tuning(num_rows, num_outputs)
    if num_rows > REGISTER_ROWS:
        for cols, depth, stages in itertools.product((16, 32), (128, 256, 512), (3, 4, 5)):
            yield FewRowTuning(cols, depth, 4, stages)
        return
    sizes = (1, 2, 4, 8), (512, 1024, 2048, 4096), (2, 4, 8)
    if num_outputs > MANY_OUTPUTS:
        sizes = (4, 8, 16), (512, 1024, 2048), (1, 2, 4)
    for cols, depth, warps in itertools.product(*sizes):
        numbers = cols * depth // (32 * warps)
        if numbers >= 8 and numbers * num_rows <= 128:
            yield FewRowTuning(cols, depth, warps)


def front_tunings(num_rows: int, num_outputs: int) -> Iterator[FewRowTuning]:
    """Yields tiles of the one launch, whose programs have whole vectors for each thread."""
    yield few_row_tuning(num_rows, num_outputs)
    sizes = (4, 8, 16), (512, 1024, 2048, 4096), (2, 4, 8), (None, 64, 96)
    for cols, depth, warps, registers in itertools.product(*sizes):
        vectors = depth // (8 * 32 * warps)
        if vectors > 0 and cols * vectors * num_rows <= 16:
            yield FewRowTuning(cols, depth, warps, max_registers=registers)


class Front:
    """The inputs of one step's attention, and as many layers as exceed the cache."""

    def __init__(self, num_rows: int) -> None:
        num_outputs, inner = SHAPES["qkv"]
        self.sets = rotations(2 * num_outputs * inner)
        with torch.device("cuda"):
            self.x = torch.randn(num_rows, inner, dtype=torch.bfloat16)
            self.weights = torch.randn(self.sets, num_outputs, inner, dtype=torch.bfloat16)
            self.biases = torch.randn(self.sets, num_outputs, dtype=torch.bfloat16)
            self.norms = torch.randn(self.sets, inner, dtype=torch.bfloat16)
            self.angles = torch.randn(4096, HEAD_DIM)
            shape = self.sets, 64, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM
            self.caches = torch.zeros(shape, dtype=torch.bfloat16)
            self.places = torch.arange(num_rows) * 1000
            self.out = torch.empty(num_rows, num_outputs, dtype=torch.bfloat16)
        self.heads = self.out.view(num_rows, -1, HEAD_DIM)

    def apart(self, index: int) -> None:
        """Computes a layer in three launches."""
        normed = ops.rms_norm(self.x, self.norms[index], 1e-5)
        tuning = few_row_tuning(len(self.x), len(self.biases[index]))
        run_few_rows(normed, self.weights[index], self.biases[index], self.out, tuning)
        q, k, v = self.heads.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
        to = self.caches[index], self.places
        ops.rope_and_cache(q, k, v, self.places, self.angles, *to)

    def at_once(self, tuning: FewRowTuning, index: int) -> None:
        """Computes a layer in one launch."""
        run_few_row_qkv(
            self.x, self.weights[index], self.biases[index], self.places, self.angles,
            self.caches[index], self.places, self.norms[index], 1e-5, self.heads, tuning,
        )  # fmt: skip


def measure_front(num_rows: int, bytes_per_us: float) -> dict[str, object]:
    front = Front(num_rows)
    layers = range(front.sets)
    assert takes_heads(front.x, front.weights[0], front.caches[0]), "its rows are few enough"
    apart = graph_us([partial(front.apart, index) for index in layers])
    floor = front.weights[0].nbytes / bytes_per_us
    print(f"{FRONT} rows={num_rows}: three launches {apart:.1f} us, floor {floor:.1f}")
    times = compare_tiles(
        front_tunings(num_rows, len(front.weights[0])),
        lambda tuning: [partial(front.at_once, tuning, index) for index in layers],
    )
    return {
        "shape": FRONT,
        "rows": num_rows,
        "three_launches_us": apart,
        "floor_us": floor,
        **times,
    }


def library(x: Tensor, weight: Tensor, bias: Tensor, is_wide: bool) -> Tensor:
    """Computes what the engine leaves to the library."""
    if is_wide:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x, weight, bias)


def measure(name: str, num_rows: int, bytes_per_us: float) -> dict[str, object]:
    num_outputs, inner = SHAPES[name]
    is_wide = name in WIDE
    with torch.device("cuda"):
        x = torch.randn(num_rows, inner, dtype=torch.bfloat16)
        sets = rotations(2 * num_outputs * inner)
        weights = torch.randn(sets, num_outputs, inner, dtype=torch.bfloat16)
        bias = torch.randn(num_outputs, dtype=torch.bfloat16)
        kind = torch.float32 if is_wide else torch.bfloat16
        out = torch.empty(num_rows, num_outputs, dtype=kind)
    added = None if is_wide else bias
    usual = graph_us([partial(library, x, weight, bias, is_wide) for weight in weights])
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
    names = [*SHAPES, FRONT]
    parser.add_argument("--only", type=names_among(names), default=names)
    parser.add_argument("--name", default="few-rows", help="of the result")
    given = parser.parse_args()
    bytes_per_us = copy_bytes_per_us()
    figures = [
        measure(name, rows, bytes_per_us) if name != FRONT else measure_front(rows, bytes_per_us)
        for name in given.only
        for rows in given.rows
        if name != FRONT or rows <= MOST_FRONT_ROWS
    ]
    print(write_result(given.name, {"gemms": figures}))


if __name__ == "__main__":
    main()
