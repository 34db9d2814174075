"""Linear layers of few rows with adapters: in one launch over its tiles, and as several launches.

    python -m bench.engine.lora_gemms
    python -m bench.engine.lora_gemms --rows 16 --only qkv,down

The shapes are Llama-3.1-8B's, with eight adapters of rank 16 that rows take turns with; each time
is in microseconds inside a CUDA graph over weights that together exceed the cache. `base` is the
layer without adapters as a decode step computes it, `beside` with the shrink on a stream of its
own. The floor is all bytes over what a copy reaches. A star marks the tiles that
`lora_gemm_tuning` takes. Writes bench/results/lora-gemms.json.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.engine.timing.device_time import copy_bytes_per_us, graph_us, rotations
from bench.engine.timing.tiles import compare_tiles
from bench.name_lists import names_among
from bench.record import write_result
from engine.layers.side_stream import SideStream, side_stream
from tandem_kernels.elementwise.silu_and_mul import silu_and_mul
from tandem_kernels.gemm.small_m_gemm import small_m_gate_up, small_m_gemm
from tandem_kernels.lora.lora_expand_few import lora_expand_few, lora_expand_gated
from tandem_kernels.lora.lora_gemm import run_lora_gemm
from tandem_kernels.lora.lora_gemm_shapes import num_counters
from tandem_kernels.lora.lora_gemm_tuning import LoraGemmTuning, lora_gemm_tuning
from tandem_kernels.lora.lora_shrink import lora_shrink

SHAPES = {
    "qkv": ((4096, 1024, 1024), 4096),
    "o": ((4096,), 4096),
    "gate_up": ((14336, 14336), 4096),
    "down": ((4096,), 14336),
}
"""Outputs of the projections, and inputs."""
_SLOTS, _RANK = 8, 16
_REPLAYS = 7
_SMALL_M_ROWS = 16


@dataclass(frozen=True, slots=True)
class Gemm:
    """One layer's inputs, weights and adapters. `gated`: it is gate and up."""

    x: Tensor
    weight: Tensor
    a: Tensor
    b: Tensor
    slots: Tensor
    ends: tuple[int, ...]
    counters: Tensor
    out: Tensor
    gated: bool

    def base(self, both: bool = False) -> Tensor:
        """Computes the layer alone; `both`: without the activation."""
        is_small = len(self.x) <= _SMALL_M_ROWS
        if self.gated and not both:
            if is_small:
                return small_m_gate_up(self.x, self.weight)
            return silu_and_mul(F.linear(self.x, self.weight))
        if is_small and len(self.ends) > 1:
            return small_m_gemm(self.x, self.weight)
        return F.linear(self.x, self.weight)

    def beside(self) -> Tensor:
        """Computes two launches, and the shrink on the side."""
        side = SideStream(self.x.device)
        with side.beside():
            shrunk = lora_shrink(self.x, self.a, self.slots, most_pieces=4)
        out = self.base(both=True)
        side.join()
        if self.gated:
            return lora_expand_gated(shrunk, self.b, self.slots, out, is_gelu=False)
        lora_expand_few(shrunk, self.b, self.slots, self.ends, out)
        return out

    def one_launch(self, tuning: LoraGemmTuning) -> Tensor:
        """Computes everything at once."""
        run_lora_gemm(
            self.x,
            self.weight,
            None,
            self.a,
            self.b,
            self.slots,
            self.ends,
            self.counters,
            self.out,
            tuning,
            gated=self.gated,
        )
        return self.out


def gemms(name: str, num_rows: int) -> list[Gemm]:
    """Makes as many as exceed the cache, all of one input."""
    counts, inner = SHAPES[name]
    gated = name == "gate_up"
    ends = tuple(itertools.accumulate(counts))
    half = torch.bfloat16
    with torch.device("cuda"):
        x = torch.randn(num_rows, inner, dtype=half)
        slots = (torch.arange(num_rows) % _SLOTS).int()
        out = torch.empty(num_rows, ends[0] if gated else ends[-1], dtype=half)
        return [
            Gemm(
                x,
                torch.randn(ends[-1], inner, dtype=half),
                torch.randn(_SLOTS, len(counts) * _RANK, inner, dtype=half),
                torch.randn(_SLOTS, ends[-1], _RANK, dtype=half),
                slots,
                ends,
                torch.zeros(num_counters(ends[-1]), dtype=torch.int32),
                out,
                gated,
            )
            for _ in range(rotations(2 * ends[-1] * inner))
        ]


def tunings(gemm: Gemm) -> Iterator[LoraGemmTuning]:
    """Yields the tiles that may be fast, the taken one first."""
    num_columns = gemm.a.shape[0] * gemm.a.shape[1]
    usual = lora_gemm_tuning(len(gemm.x), gemm.out.shape[1], num_columns, gemm.gated)
    yield usual
    for ahead in (1, 4, 8):
        yield replace(usual, ahead=ahead)
    for programs in (8, 32):
        yield replace(usual, shrink_programs=programs)
    yield replace(usual, num_stages=usual.num_stages - 1)
    if gemm.gated:
        yield replace(usual, depth=128, num_stages=5)
        yield replace(usual, num_warps=8)
        # Large enough for all to run at once, two on an SM, or one.
        for programs in (32, 40):
            yield replace(usual, cols=64, depth=128, shrink_programs=programs)
            yield replace(usual, cols=64, depth=128, num_warps=8, shrink_programs=programs)
        for num_stages in (4, 5):
            wide = replace(usual, cols=128, depth=64, num_warps=8, num_stages=num_stages)
            yield wide
            yield replace(wide, ahead=4)
        yield replace(usual, cols=128, depth=128, num_warps=8)
        return
    yield LoraGemmTuning(depth=512, num_stages=4, shrink_programs=4, ahead=1)
    yield LoraGemmTuning(depth=512, num_stages=3, shrink_programs=8, splits=2, ahead=2)
    yield LoraGemmTuning(cols=64, depth=256, num_stages=4, shrink_programs=36, ahead=2)
    yield LoraGemmTuning(cols=64, depth=256, num_stages=4, shrink_programs=36, ahead=4)
    yield LoraGemmTuning(num_stages=5, shrink_programs=72)


def measure(name: str, num_rows: int, bytes_per_us: float) -> dict[str, object]:
    made = gemms(name, num_rows)
    first = made[0]

    def timed_of(calls: list[Callable[[], object]]) -> float:
        return graph_us(calls, replays=_REPLAYS)

    base = timed_of([gemm.base for gemm in made])
    beside = timed_of([gemm.beside for gemm in made])
    present = min(num_rows, _SLOTS) / _SLOTS
    num_bytes = first.weight.nbytes + present * (first.a.nbytes + first.b.nbytes)
    floor = num_bytes / bytes_per_us
    print(f"{name} rows={num_rows}: base {base:.1f} us, beside {beside:.1f}, floor {floor:.1f}")
    times = compare_tiles(
        tunings(first),
        lambda tuning: [partial(gemm.one_launch, tuning) for gemm in made],
        replays=_REPLAYS,
    )
    return {
        "shape": name,
        "rows": num_rows,
        "base_us": base,
        "beside_us": beside,
        "floor_us": floor,
        **times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", type=lambda text: tuple(map(int, text.split(","))), default=(1, 16)
    )
    parser.add_argument("--only", type=names_among(SHAPES), default=list(SHAPES))
    given = parser.parse_args()
    side_stream(torch.device("cuda"))
    bytes_per_us = copy_bytes_per_us()
    figures = [measure(name, rows, bytes_per_us) for name in given.only for rows in given.rows]
    print(write_result("lora-gemms", {"gemms": figures}))


if __name__ == "__main__":
    main()
