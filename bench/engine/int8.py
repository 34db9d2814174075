"""INT8 GEMMs at the shapes of Llama 3.1 8B beside FP8, bf16 and the library's GEMM of integers.

    python -m bench.engine.int8                          # every shape and number of rows
    python -m bench.engine.int8 --rows 64,2048 --only gate_up

Each line is a way to compute one shape for this many rows, in microseconds inside a CUDA graph over
weights that together exceed the cache: `chosen` as layers compute it, `tiles` and `few` by each
tiling that is worth a try, `_int_mm` the library's product of integers alone, whose sums are still
to be scaled, `w8a16` weights beside rows in bf16. gate_up has its activation in it where a kernel
has. Writes bench/results/int8.json.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.arguments import names_among
from bench.engine.timing.device_time import graph_us, rotations
from bench.record import write_result
from tandem_kernels.elementwise.silu_and_mul import silu_and_mul
from tandem_kernels.gemm import fp8_activations, fp8_gemm, fused_gate_up, int8_gemm, int8_weights
from tandem_kernels.gemm.fp8_gemm import Fp8Tuning, fp8_small_m
from tandem_kernels.gemm.int8_gemm import Int8Tuning, int8_tiles
from tandem_kernels.gemm.small_m_gemm import small_m_gate_up, small_m_gemm
from tandem_kernels.reference import fp8 as reference

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
"""Outputs and inputs."""
ROWS = (1, 16, 32, 64, 128, 256, 1024, 2048, 8192)
BF16 = torch.bfloat16
_FEW = 128
"""The kernel of few rows has a tile of all rows."""
_TILES = (
    Int8Tuning(64, 128, 128, 4, 5),
    Int8Tuning(64, 256, 128, 4, 4),
    Int8Tuning(128, 128, 128, 4, 5),
    Int8Tuning(128, 128, 128, 8, 5),
    Int8Tuning(128, 256, 128, 8, 3),
    Int8Tuning(128, 256, 128, 8, 4),
    Int8Tuning(256, 128, 128, 8, 3),
)
_FEW_TILES = (
    Fp8Tuning(64, 128, 1, True, 4, 4, lines=8),
    Fp8Tuning(64, 128, 2, True, 4, 4, lines=8),
    Fp8Tuning(128, 128, 1, True, 4, 4, lines=8),
    Fp8Tuning(32, 256, 1, False, 4, 4, lines=8),
    Fp8Tuning(32, 256, 2, False, 4, 4, lines=8),
)
_SMALL_M_ROWS, _FUSED_ROWS = 16, 1024
"""Kernels of our own multiply bf16 weights up to and from these rows."""

Way = tuple[str, Callable[[int], object]]


class Inputs:
    """Rows, and weights several times over, in every form."""

    def __init__(self, name: str, num_rows: int) -> None:
        self.gated = name == "gate_up"
        outputs, inner = SHAPES[name]
        self.num_rows, self.outputs = num_rows, outputs
        sets = max(2, rotations(outputs * inner, 8))
        with torch.device("cuda"):
            self.x = torch.randn(num_rows, inner).to(BF16)
            self.scales = torch.rand(outputs) / 1000
            self.plain = [(torch.randn(outputs, inner) / 50).to(BF16) for _ in range(2)]
            self.integers = [
                torch.randint(-128, 128, (outputs, inner), dtype=torch.int8) for _ in range(sets)
            ]
        self.floats = [reference.to_e4m3(weight.float()) for weight in self.integers]
        self.x8 = fp8_activations.quantise_int8(self.x)
        self.e8 = fp8_activations.quantise_fp8(self.x)
        width = outputs // 2 if self.gated else outputs
        self.out = torch.empty(num_rows, width, dtype=BF16, device="cuda")

    def chosen(self, i: int) -> Tensor:
        given = *self.x8, self.integers[i], self.scales
        if self.gated:
            return int8_gemm.int8_gate_up(*given, BF16)
        return int8_gemm.int8_gemm(*given, None, BF16)

    def fp8(self, i: int) -> Tensor:
        given = *self.e8, self.floats[i], self.scales
        if self.gated:
            return fp8_gemm.fp8_gate_up(*given, BF16)
        return fp8_gemm.fp8_gemm(*given, None, BF16)

    def bf16(self, i: int) -> Tensor:
        weight = self.plain[i % 2]
        if self.num_rows <= _SMALL_M_ROWS:
            return (small_m_gate_up if self.gated else small_m_gemm)(self.x, weight)
        if self.gated and self.num_rows >= _FUSED_ROWS:
            return fused_gate_up.fused_gate_up(self.x, weight)
        out = F.linear(self.x, weight)
        return silu_and_mul(out) if self.gated else out

    def halves(self, i: int) -> Tensor:
        given = self.x, self.integers[i], self.scales[None], None
        if self.gated:
            return int8_weights.int8_weight_gate_up(*given)
        return int8_weights.int8_weight_gemm(*given)

    def library(self, i: int) -> Tensor:
        return torch._int_mm(self.x8[0], self.integers[i].t())

    def tiled(self, tuning: Int8Tuning, i: int) -> Tensor:
        given = *self.x8, self.integers[i], self.scales, None, self.out
        return int8_tiles(*given, tuning, gated=self.gated)

    def few(self, tuning: Fp8Tuning, i: int) -> Tensor:
        given = *self.x8, self.integers[i], self.scales, None, self.out
        return fp8_small_m(*given, tuning, gated=self.gated)


def ways(given: Inputs) -> Iterator[Way]:
    yield "bf16", given.bf16
    yield "fp8", given.fp8
    yield "chosen", given.chosen
    if given.num_rows > 16:
        yield "_int_mm", given.library
    if given.num_rows <= int8_weights.MAX_ROWS:
        yield "w8a16", given.halves
    yield from tilings(given)


def tilings(given: Inputs) -> Iterator[Way]:
    if given.num_rows > 32:
        for tuning in _TILES:
            yield f"tiles {_text(tuning)}", partial(given.tiled, tuning)
    if given.num_rows <= _FEW:
        for few in _FEW_TILES:
            too_wide = not few.swap and given.num_rows > 32
            if not too_wide and not (given.gated and few.splits > 1):
                yield f"few {_text(few)}", partial(given.few, few)


def _text(tuning: Int8Tuning | Fp8Tuning) -> str:
    if isinstance(tuning, Int8Tuning):
        return f"{tuning.rows}x{tuning.cols} w{tuning.num_warps} s{tuning.num_stages}"
    side = "swap" if tuning.swap else "rows"
    return f"{tuning.cols}x{tuning.depth}/{tuning.splits} {side}"


def time_shape(name: str, num_rows: int) -> list[dict[str, object]]:
    given = Inputs(name, num_rows)
    expected = given.chosen(0).float()
    rows = []
    for way, call in ways(given):
        row: dict[str, object] = {"shape": name, "rows": num_rows, "way": way}
        try:
            if way.startswith(("tiles", "few")):
                found = call(0)
                assert isinstance(found, Tensor)
                error = (found.float() - expected).norm() / expected.norm()
                row["error"] = round(float(error), 5)
            calls = [partial(call, i) for i in range(len(given.integers))]
            row["us"] = round(graph_us(calls, replays=5), 2)
        except Exception as error:  # what one way cannot do must not end the others
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        rows.append(row)
    return rows


def show(rows: list[dict[str, object]]) -> None:
    timed = sorted((row for row in rows if "us" in row), key=lambda row: float(str(row["us"])))
    for row in timed:
        error = f"  off {row['error']}" if "error" in row else ""
        print(f"{row['shape']:8}{row['rows']:>6}  {row['way']:28}{row['us']:>10} us{error}")
    for row in rows:
        if "failed" in row:
            print(f"  {row['way']} failed: {row['failed']}")
    print(flush=True)


def compile_part(part: str, names: list[str], counts: list[int]) -> None:
    """Launches every n-th tiling once, from i on, so that all processes fill the compile cache."""
    first, count = map(int, part.split("/"))
    for index, (name, num_rows) in enumerate(itertools.product(names, counts)):
        if index % count == first:
            for way, call in ways(Inputs(name, num_rows)):
                try:
                    call(0)
                except Exception as error:
                    print(f"{way}: {str(error).splitlines()[0][:100]}", file=sys.stderr)


def compile_all(processes: int) -> None:
    command = [sys.executable, "-m", "bench.engine.int8", *sys.argv[1:], "--part"]
    parts = [subprocess.Popen([*command, f"{i}/{processes}"]) for i in range(processes)]
    for part in parts:
        part.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=names_among(SHAPES), default=[*SHAPES])
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--part", help="i/n: only compile every n-th tile, from i on")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    counts = [int(count) for count in arguments.rows.split(",")]
    if arguments.part:
        compile_part(arguments.part, arguments.only, counts)
        return
    compile_all(arguments.processes)
    figures: list[dict[str, object]] = []
    for name, num_rows in itertools.product(arguments.only, counts):
        rows = time_shape(name, num_rows)
        show(rows)
        figures += rows
        torch.cuda.empty_cache()
    print(write_result("int8", figures))


if __name__ == "__main__":
    main()
