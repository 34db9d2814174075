"""FP8 GEMMs at the shapes of Llama 3.1 8B: the library's ways, and our own kernel over its tiles.

    python -m bench.engine.fp8_gemm                       # every shape and number of rows
    python -m bench.engine.fp8_gemm --rows 1,16 --only o,down

First tiles are tried in whole steps (`bench.engine.fp8_steps`). Then each line is a way to compute
one shape for so many rows, in microseconds inside a CUDA graph over weights that together exceed
the cache; `floor` is the larger of bytes over what a copy reaches and FLOPs over twice what a large
bf16 GEMM reaches, `error` the distance from the exact product of the same quantised numbers,
relative to its norm: what is far above 0.01 computes something else. Below: what quantises
activations. Writes bench/results/fp8-gemm.json.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from bench.engine.fp8_steps import try_steps
from bench.engine.timing.device_time import (
    copy_bytes_per_us,
    graph_us,
    matmul_flops_per_us,
    rotations,
)
from bench.name_lists import names_among
from bench.record import write_result
from tandem_kernels.elementwise import rms_norm, silu_and_mul
from tandem_kernels.gemm import fp8_activations, fp8_gemm, fp8_library, fused_gate_up
from tandem_kernels.gemm.fp8_gemm import Fp8Tuning
from tandem_kernels.gemm.small_m_gemm import small_m_gate_up, small_m_gemm
from tandem_kernels.reference import fp8 as reference

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
"""Outputs and inputs."""
ROWS = (1, 16, 32, 64, 128, 256, 2048, 8192)
_OWN_ROWS = 128
"""Our own kernel has a tile of all rows."""
_SHOWN = 6
BF16 = torch.bfloat16


@dataclass
class Way:
    """One way to compute a shape."""

    name: str
    call: Callable[[int], object]
    product: Callable[[], Tensor] | None = None


@dataclass
class Inputs:
    """Weights several times over, in every form that some way wants, and rows of inputs."""

    num_rows: int
    num_outputs: int
    inner: int
    plain: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        sets = rotations(self.num_outputs * self.inner)
        kind = {"device": "cuda"}
        self.x = torch.randn(self.num_rows, self.inner, **kind).to(BF16)
        self.x8, self.x_scales = fp8_activations.quantise_fp8(self.x)
        self.g8, self.g_scales = fp8_activations.quantise_fp8(self.x, 128)
        self.one = torch.tensor(self.x.abs().max().item() / 448, **kind)
        self.t8 = reference.to_e4m3(self.x.float() / self.one)
        for index in range(sets):
            plain = torch.randn(self.num_outputs, self.inner, **kind) * 0.02
            if index < max(1, sets // 2):
                self.plain.append(plain.to(BF16))
            self.weights.append(reference.to_e4m3(plain / 0.0002))
        self.w_scales = 0.0002 * (1 + torch.rand(self.num_outputs, **kind))
        blocks = self.num_outputs // 128, -(-self.inner // 512) * 4
        self.b_scales = 0.0002 * (1 + torch.rand(blocks, **kind))
        self.out = torch.empty(self.num_rows, self.num_outputs, device="cuda", dtype=BF16)
        self.gated_out = torch.empty(
            self.num_rows, self.num_outputs // 2, device="cuda", dtype=BF16
        )

    def exact(self, kind: str) -> Tensor:
        """Returns the product of the first weights, in float32, as the way of scaling has it."""
        scales = self.b_scales if kind == "block" else self.w_scales
        if kind == "tensor":
            weight = self.weights[0].float() * self.w_scales[0]
            return self.t8.float() * self.one @ weight.t()
        weight = reference.dequantise_weight(self.weights[0], scales)
        rows = (self.g8, self.g_scales) if kind == "block" else (self.x8, self.x_scales)
        given = self.x.float() if kind == "half" else reference.dequantise_rows(*rows)
        return given @ weight.t()

    def padded(self) -> tuple[Tensor, Tensor]:
        """Returns groups' numbers and scales with rows up to a multiple of 4."""
        rows = -(-self.num_rows // 4) * 4
        numbers = self.g8.as_strided((rows, self.inner), self.g8.stride())
        return numbers, self.g_scales.as_strided((len(self.g_scales), rows), (rows, 1))


def library_ways(given: Inputs) -> Iterator[tuple[Way, str]]:
    """Yields ways, each with the kind of scales that it has."""
    weights, plain = given.weights, given.plain
    yield (
        Way("bf16", lambda i: torch.mm(given.x, plain[i % len(plain)].t(), out=given.out)),
        "bf16",
    )

    def scaled(i: int, fast: bool = True) -> Tensor:
        return torch._scaled_mm(
            given.x8,
            weights[i].t(),
            scale_a=given.x_scales.reshape(-1, 1),
            scale_b=given.w_scales.view(1, -1),
            out_dtype=BF16,
            use_fast_accum=fast,
        )

    def by_tensor(i: int, fast: bool = True) -> Tensor:
        scale = given.w_scales[0]
        return torch._scaled_mm(
            given.t8,
            weights[i].t(),
            scale_a=given.one,
            scale_b=scale,
            out_dtype=BF16,
            use_fast_accum=fast,
        )

    rows, scales = given.padded()

    def by_block(i: int) -> Tensor:
        return fp8_library.block_scaled_mm(rows, scales, weights[i], given.b_scales, None, BF16)

    yield Way("scaled_mm tensor fast", by_tensor, lambda: by_tensor(0)), "tensor"
    yield Way("scaled_mm tensor", partial(by_tensor, fast=False), lambda: by_tensor(0)), "tensor"
    yield Way("scaled_mm row fast", scaled, lambda: scaled(0)), "row"
    yield Way("scaled_mm row", partial(scaled, fast=False), lambda: scaled(0, False)), "row"
    yield Way("scaled_mm block", by_block, lambda: by_block(0)[: given.num_rows]), "block"


def own_ways(given: Inputs, tunings: list[Fp8Tuning]) -> Iterator[tuple[Way, str]]:
    """Yields our kernel on rows, on blocks where the tile fits, and on half precision."""
    forms = {
        "row": (given.x8, given.x_scales, given.w_scales),
        "block": (given.g8, given.g_scales, given.b_scales),
        "half": (given.x, None, given.w_scales),
    }
    for tuning, (kind, (x, x_scales, w_scales)) in itertools.product(tunings, forms.items()):
        if kind == "block" and tuning.depth != 128:
            continue
        if kind == "half" and (given.num_rows > 16 or tuning.lines == 0):
            continue

        def own(
            i: int,
            x: Tensor = x,
            x_scales: Tensor | None = x_scales,
            w_scales: Tensor = w_scales,
            tuning: Fp8Tuning = tuning,
        ) -> Tensor:
            weight = given.weights[i]
            return fp8_gemm.fp8_small_m(x, x_scales, weight, w_scales, None, given.out, tuning)

        label = f"own {kind} {_short(tuning)}"
        yield Way(label, own, partial(own, 0)), kind


def gated_ways(given: Inputs, tunings: list[Fp8Tuning]) -> Iterator[tuple[Way, str]]:
    """Yields gate·up with its activation, which is not timed otherwise."""
    forms = {
        "row": (given.x8, given.x_scales, given.w_scales),
        "block": (given.g8, given.g_scales, given.b_scales),
        "half": (given.x, None, given.w_scales),
    }
    for tuning, (kind, (x, x_scales, w_scales)) in itertools.product(tunings, forms.items()):
        if tuning.splits > 1 or (kind == "block" and tuning.depth != 128):
            continue
        if kind == "half" and (given.num_rows > 16 or tuning.lines == 0):
            continue

        def own(
            i: int,
            x: Tensor = x,
            x_scales: Tensor | None = x_scales,
            w_scales: Tensor = w_scales,
            tuning: Fp8Tuning = tuning,
        ) -> Tensor:
            weight, out = given.weights[i], given.gated_out
            return fp8_gemm.fp8_small_m(
                x, x_scales, weight, w_scales, None, out, tuning, gated=True
            )

        yield Way(f"own gated {kind} {_short(tuning)}", own, partial(own, 0)), f"gated {kind}"


_BY_ROWS = ((32, 256, 4), (16, 256, 4))
_BY_OUTPUTS = ((64, 128, 6), (128, 128, 4))
"""Outputs, inner dimension at once and stages, by what is the first operand."""


def tunings(num_rows: int, outputs: int, inner: int) -> Iterator[Fp8Tuning]:
    """Yields the tiles that are worth a try: what is in flight fits an SM, and fills it."""
    tiles = [(*tile, True) for tile in _BY_OUTPUTS]
    if num_rows <= 32:
        tiles += [(*tile, False) for tile in _BY_ROWS]
    splits = (1,) if outputs > 8192 else (2, 4)
    for (cols, depth, stages, swap), parts, lines in itertools.product(tiles, splits, (0, 8)):
        fits = (cols + max(16, num_rows)) * depth * stages <= 160 * 1024
        if fits and inner % (depth * parts) == 0:
            yield Fp8Tuning(cols, depth, parts, swap, 4, stages, lines)


def _short(tuning: Fp8Tuning) -> str:
    order = "swap" if tuning.swap else "rows"
    return (
        f"{tuning.cols}x{tuning.depth}/{tuning.splits} {order} s{tuning.num_stages} l{tuning.lines}"
    )


def error_of(way: Way, expected: Tensor) -> float | None:
    if way.product is None:
        return None
    ours = way.product().float()
    return round(float((ours - expected).norm() / expected.norm()), 5)


def time_shape(
    name: str, num_rows: int, bytes_per_us: float, flops_per_us: float
) -> list[dict[str, object]]:
    outputs, inner = SHAPES[name]
    given = Inputs(num_rows, outputs, inner)
    floor = max(
        (outputs * inner + num_rows * (inner + 2 * outputs)) / bytes_per_us,
        2.0 * num_rows * outputs * inner / (2 * flops_per_us),
    )
    ways = [*library_ways(given)]
    if num_rows <= _OWN_ROWS:
        chosen = [*tunings(num_rows, outputs, inner)]
        ways += own_ways(given, chosen)
        if name == "gate_up":
            ways += gated_ways(given, [t for t in chosen if 2 * t.cols <= 128])
    expected: dict[str, Tensor] = {}
    rows = []
    for way, kind in ways:
        if kind not in expected and kind != "bf16":
            exact = given.exact(kind.removeprefix("gated "))
            if kind.startswith("gated"):
                gate, up = exact.to(BF16).float().chunk(2, -1)
                exact = torch.nn.functional.silu(gate) * up
            expected[kind] = exact
        row: dict[str, object] = {"shape": name, "rows": num_rows, "way": way.name}
        try:
            row["error"] = error_of(way, expected[kind]) if kind != "bf16" else None
            calls = [partial(way.call, i) for i in range(len(given.weights))]
            us = graph_us(calls, replays=7)
        except Exception as error:  # what one way cannot do must not end the others
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            rows.append(row)
            continue
        rows.append(row | {"us": round(us, 2), "floor_us": round(floor, 2)})
    return rows


def show(rows: list[dict[str, object]]) -> None:
    """Prints the library's ways, and the fastest of ours of each kind."""
    timed = sorted((row for row in rows if "us" in row), key=lambda row: float(str(row["us"])))
    counts: dict[str, int] = {}
    for row in timed:
        words = str(row["way"]).split()
        kind = " ".join(words[: 3 if words[1:2] == ["gated"] else 2])
        counts[kind] = counts.get(kind, 0) + 1
        if words[0] == "own" and counts[kind] > _SHOWN:
            continue
        us, floor = float(str(row["us"])), float(str(row["floor_us"]))
        print(
            f"{row['shape']:8}{row['rows']:>6}  {row['way']:38}{us:10.2f} us"
            f"{floor / us:8.2f} of floor   error {row['error']}"
        )
    for failure in sorted({str(row["failed"]) for row in rows if "failed" in row}):
        names = [str(row["way"]) for row in rows if row.get("failed") == failure]
        print(f"  failed ({len(names)}: {', '.join(names[:2])}): {failure}")
    print(flush=True)


def quantiser_rows() -> Iterator[dict[str, object]]:
    """Times what quantises activations beside what does the same without."""
    for num_rows in ROWS:
        sets = rotations(num_rows * 4096 * 4)
        x = [torch.randn(num_rows, 4096, device="cuda").to(BF16) for _ in range(sets)]
        wide = [torch.randn(num_rows, 28672, device="cuda").to(BF16) for _ in range(min(sets, 8))]
        weight = torch.ones(4096, device="cuda", dtype=BF16)
        kernels: dict[str, list[Callable[[], object]]] = {
            "add, norm": [
                partial(rms_norm.fused_add_rms_norm, part, part.clone(), weight, 1e-5) for part in x
            ],
            "silu, mul": [partial(silu_and_mul.silu_and_mul, part) for part in wide],
        }
        for group in (0, 128):
            kernels |= {
                f"quantise, group {group}": [
                    partial(fp8_activations.quantise_fp8, part, group) for part in x
                ],
                f"add, norm, quantise, group {group}": [
                    partial(fp8_activations.rms_norm_fp8, part, part.clone(), weight, 1e-5, group)
                    for part in x
                ],
                f"silu, mul, quantise, group {group}": [
                    partial(fp8_activations.silu_and_mul_fp8, part, False, group) for part in wide
                ],
            }
        for name, calls in kernels.items():
            us = round(graph_us(calls, replays=7), 2)
            print(f"{num_rows:>6}  {name:34}{us:10.2f} us", flush=True)
            yield {"rows": num_rows, "quantiser": name, "us": us}


def plain_rows() -> Iterator[dict[str, object]]:
    """Times what bf16 weights are computed with now where that is not the library."""
    for num_rows in ROWS:
        for name in ("qkv", "gate_up"):
            given = Inputs(num_rows, *SHAPES[name])
            call: Callable[[Tensor, Tensor], Tensor]
            if num_rows <= 16:
                call = small_m_gemm if name == "qkv" else small_m_gate_up
            elif name == "gate_up" and num_rows >= 1024:
                call = fused_gate_up.fused_gate_up
            else:
                continue
            us = round(graph_us([partial(call, given.x, w) for w in given.plain], replays=7), 2)
            print(f"{num_rows:>6}  bf16 {name} by our kernel {us:10.2f} us", flush=True)
            yield {"shape": name, "rows": num_rows, "way": "bf16 own", "us": us}


def compile_part(part: str, names: list[str], counts: list[int]) -> None:
    """Launches every n-th tile once, from i on, so that all processes fill the compile cache."""
    first, count = map(int, part.split("/"))
    found = set()
    for name, num_rows in itertools.product(names, counts):
        if num_rows <= _OWN_ROWS:
            found |= {(name, num_rows, t) for t in tunings(num_rows, *SHAPES[name])}
    order = sorted(found, key=lambda item: (item[0], item[1], str(item[2])))
    kept: dict[tuple[str, int], Inputs] = {}
    for name, num_rows, tuning in order[first::count]:
        if (name, num_rows) not in kept:
            kept.clear()
            kept[name, num_rows] = Inputs(num_rows, *SHAPES[name])
        given = kept[name, num_rows]
        ways = [*own_ways(given, [tuning])]
        if name == "gate_up" and 2 * tuning.cols <= 128:
            ways += gated_ways(given, [tuning])
        for way, _ in ways:
            try:
                way.call(0)
            except Exception as error:
                print(f"{way.name}: {str(error).splitlines()[0][:100]}", file=sys.stderr)


def compile_all(processes: int) -> None:
    command = [sys.executable, "-m", "bench.engine.fp8_gemm", *sys.argv[1:], "--part"]
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
    parser.add_argument(
        "--steps", default="1,16", help="requests of whole decode steps that are tried first"
    )
    parser.add_argument("--part", help="i/n: only compile every n-th tile, from i on")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    counts = [int(count) for count in arguments.rows.split(",")]
    if arguments.part:
        compile_part(arguments.part, arguments.only, counts)
        return
    figures: list[dict[str, object]] = []
    if arguments.steps:
        figures += try_steps([int(count) for count in arguments.steps.split(",")])
        gc.collect()
        torch.cuda.empty_cache()
    compile_all(arguments.processes)
    ceilings = copy_bytes_per_us(), matmul_flops_per_us()
    print(f"copy {ceilings[0] / 1e6:.2f} TB/s, bf16 GEMM {ceilings[1] / 1e6:.0f} TFLOP/s")
    figures += [*quantiser_rows(), *plain_rows()]
    for name, num_rows in itertools.product(arguments.only, counts):
        rows = time_shape(name, num_rows, *ceilings)
        show(rows)
        figures += rows
        torch.cuda.empty_cache()
    print(write_result("fp8-gemm", figures))


if __name__ == "__main__":
    main()
