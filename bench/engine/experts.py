"""Time and tune the GEMMs of experts, and all of a layer's experts, beside their floor.

    python -m bench.engine.experts                 # a layer, with the tables as they are
    python -m bench.engine.experts --tune          # sweep, and write the table of this GPU
    python -m bench.engine.experts --tune --shape mixtral-8x7b --ranks 2 --tables FOLDER
    python -m bench.engine.experts --tune --shape gpt-oss-120b --format mxfp4 --tokens 2048,8192
    python -m bench.engine.experts --tune --shape gpt-oss-120b --format mxfp4 --like strips=2
    python -m bench.engine.experts --tune --like none      # the tunings of the table, and borders
    python -m bench.engine.experts --shape qwen3-30b-a3b --format nvfp4,mxfp4,int4

The floor is the bytes of the experts that are touched over what a copy reaches, or the operations
over what a large GEMM reaches, whichever is longer. Routing is uniformly random. Reports are
written to bench/results.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from bench.arguments import names_among, numbers, parser_of
from bench.engine.timing.device_time import compile_all, copy_bytes_per_us, graph_us
from bench.engine.timing.expert_formats import FORMATS, ExpertWeights
from bench.engine.timing.expert_shapes import SHAPES, LayerShape
from bench.record import write_result
from tandem_kernels.device import gpu_name
from tandem_kernels.experts.expert_rows import ExpertRows
from tandem_kernels.experts.expert_tuning import (
    TABLES,
    ExpertTable,
    ExpertTuning,
    Range,
    expert_tuning,
    nearest_table,
    searched_pairs,
)

_TOKENS = (1, 2, 4, 16, 64, 256, 2048, 8192)
_SETS = 8
Timed = dict[int, list[tuple[float, ExpertTuning]]]
"""Microseconds of tunings, by tokens of a step."""


class Layer:
    """One layer's experts, and steps of uniformly random routing."""

    def __init__(self, held: ExpertWeights, num_tokens: int) -> None:
        self.held, self.shape = held, held.shape
        with torch.device("cuda"):
            self.x = torch.randn(num_tokens, self.shape.hidden, dtype=torch.bfloat16)
            self.weights = torch.rand(num_tokens, self.shape.top_k)
            self.chosen = [
                torch.rand(num_tokens, self.shape.num_experts)
                .argsort(-1)[:, : self.shape.top_k]
                .int()
                for _ in range(_SETS)
            ]

    def floor_us(self, bytes_per_us: float) -> float:
        shape = self.shape
        touched = sum(len(chosen.unique()) for chosen in self.chosen) / _SETS
        numbers = shape.matrices * shape.hidden * shape.width
        expert_bytes = numbers * self.held.bits / 8
        operations = 2 * numbers * self.weights.numel()
        return max(touched * expert_bytes / bytes_per_us, operations / self.held.flops_per_us)

    def all_us(self) -> float:
        return graph_us(
            [partial(self.held.experts, self.x, self.weights, chosen) for chosen in self.chosen]
        )

    def gemm_us(self, tuning: ExpertTuning, *, gated: bool, replays: int) -> float:
        """Microseconds of one GEMM, or infinity where the tuning does not fit the device. Without
        `replays` it runs once."""
        x = self.x
        if not gated:
            pairs = self.weights.numel()
            x = torch.randn(pairs, self.shape.width, dtype=torch.bfloat16, device="cuda")
        given = self.held.given(x)

        def run(rows: ExpertRows) -> None:
            self.held.gemm(given, self.weights, rows, tuning, gated=gated)

        most = searched_pairs(self.held.table)
        steps = [ExpertRows.of(one, self.shape.num_experts, most) for one in self.chosen]
        try:
            run(steps[0])
            return graph_us([partial(run, step) for step in steps], replays) if replays else 0.0
        except OutOfResources:
            return math.inf


@dataclass(frozen=True, slots=True)
class Sweep:
    """Says what is swept: steps of `tokens`, by all tunings, or by those whose text has `like` in
    it and the one that a table among `tables` has."""

    tokens: Sequence[int]
    like: str
    tables: Path

    def tunings(
        self, kind: type[ExpertWeights], shape: LayerShape, rows: float, *, gated: bool
    ) -> list[ExpertTuning]:
        """Returns the tunings for this many rows of an expert."""
        every = kind.tunings(rows, gated=gated)
        if not self.like:
            return list(every)
        gpu = gpu_name(torch.device("cuda"))
        table = nearest_table(kind.table_shape(shape), gpu, self.tables)
        some = (tuning for tuning in every if self.like in repr(tuning))
        return list(dict.fromkeys([table.choose(rows, gated=gated), *some]))

    def candidates(
        self, kind: type[ExpertWeights], shape: LayerShape
    ) -> list[tuple[int, bool, ExpertTuning]]:
        """Returns (tokens, is it the first GEMM, tuning) of all that is to be timed."""
        rows = shape.top_k / shape.num_experts
        return [
            (num_tokens, gated, tuning)
            for num_tokens in self.tokens
            for gated in (True, False)
            for tuning in self.tunings(kind, shape, num_tokens * rows, gated=gated)
        ]


def compile_part(
    first: int, count: int, kind: type[ExpertWeights], shape: LayerShape, sweep: Sweep
) -> None:
    """Compiles for a small layer, which takes the same kernels as `shape`."""
    small = replace(shape, hidden=shape.hidden % 256 + 256, width=shape.width % 256 + 256)
    tune(kind(small), shape, sweep, slice(first, None, count), replays=0)


def tune(
    held: ExpertWeights,
    shape: LayerShape,
    sweep: Sweep,
    part: slice = slice(None),
    replays: int = 7,
) -> dict[bool, Timed]:
    """Returns the time of every tuning of a sweep, or of a part of them, of the first GEMM (True)
    and of the second. Without `replays` each runs once."""
    found: dict[bool, Timed] = {True: {}, False: {}}
    layer: Layer | None = None
    for num_tokens, gated, tuning in sweep.candidates(type(held), shape)[part]:
        if layer is None or len(layer.x) != num_tokens:
            layer = Layer(held, num_tokens)
        us = layer.gemm_us(tuning, gated=gated, replays=replays)
        found[gated].setdefault(num_tokens, []).append((us, tuning))
    return found


def ranges(times: Timed, rows_per_token: float) -> tuple[Range, ...]:
    """Returns the fastest tuning of each number of tokens, for all numbers: between two that were
    measured, with `refine` some more, the border is their geometric mean.

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


def refine(held: ExpertWeights, times: Timed, *, gated: bool) -> None:
    """Adds steps of sizes between two whose fastest tunings differ, with these two: a tile that is
    best for 256 rows of an expert may waste half of what it computes for 160."""
    best = {size: min(timed, key=lambda item: item[0])[1] for size, timed in times.items()}
    for size, after in itertools.pairwise(sorted(best)):
        both = best[size], best[after]
        for between in sizes_between(size, after) if both[0] != both[1] else ():
            layer = Layer(held, between)
            times[between] = [(layer.gemm_us(one, gated=gated, replays=7), one) for one in both]


def sizes_between(size: int, after: int) -> list[int]:
    """Returns sizes of which each is about the root of two times the one before."""
    steps = range(1, round(2 * math.log2(after / size)))
    return sorted({round(size * 2 ** (step / 2)) for step in steps} - {size, after})


def completed(times: Timed, kept: dict[int, ExpertTuning]) -> Timed:
    """Returns `times` with what is `kept` for steps of the sizes that were not timed."""
    return {size: times.get(size, [(0.0, tuning)]) for size, tuning in kept.items()}


def write_table(held: ExpertWeights, found: dict[bool, Timed], tables: Path) -> Path:
    """Writes the table of a shape on this GPU, and prints the three fastest of each step. Steps of
    other sizes, where not all were timed, keep what the table there says."""
    shape = held.shape
    for gated, times in found.items():
        for num_tokens, timed in times.items():
            for us, tuning in sorted(timed, key=lambda item: item[0])[:3]:
                print(f"T={num_tokens} {'gate-up' if gated else 'down'} {us:.1f} us {tuning}")
    rows = shape.top_k / shape.num_experts
    gpu, name = gpu_name(torch.device("cuda")), held.table_shape(shape)
    if set(found[True]) < set(_TOKENS):
        for gated, times in found.items():
            choose = partial(expert_tuning, name, gpu=gpu, gated=gated, tables=tables)
            kept = {size: choose(size * shape.top_k) for size in _TOKENS}
            found[gated] = completed(times, kept)
    for gated, times in found.items():
        refine(held, times, gated=gated)
    table = ExpertTable(gate_up=ranges(found[True], rows), down=ranges(found[False], rows))
    path = tables / gpu / name.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(table.to_json())
    return path


def report(name: str, kind: type[ExpertWeights], shape: LayerShape) -> list[dict[str, float]]:
    """Prints and returns how long a layer takes beside its floor, by tokens of a step."""
    bytes_per_us = copy_bytes_per_us()
    held = kind(shape)
    figures = []
    for num_tokens in _TOKENS:
        layer = Layer(held, num_tokens)
        us, floor = layer.all_us(), layer.floor_us(bytes_per_us)
        print(f"{name} T={num_tokens}: {us:.1f} us, floor {floor:.1f}, {us / floor:.2f} x")
        figures.append(
            {"tokens": num_tokens, "us": us, "floor_us": floor, "times_floor": us / floor}
        )
    return figures


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument(
        "--format", type=names_among(FORMATS), default=["bf16"],
        help="of the weights; without --tune several, comma separated",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--tune", action="store_true", help="sweep the tunings, write the table")
    about = "of the steps to sweep, comma separated, among those of a table"
    parser.add_argument("--tokens", type=numbers, default=_TOKENS, help=about)
    parser.add_argument(
        "--like", default="", help="sweep the table's tunings and those with this text: strips=2"
    )
    parser.add_argument("--tables", type=Path, default=TABLES, help="folder of the tables")
    given = parser.parse_args()
    if not set(given.tokens) <= set(_TOKENS):
        parser.error(f"--tokens: a table is of {_TOKENS}")
    if given.tune and len(given.format) > 1:
        parser.error("--tune takes one format")
    whole, kind = SHAPES[given.shape], FORMATS[given.format[0]]
    if whole.gate is not None and given.format != ["bf16"]:
        parser.error(f"--format: {given.shape} is measured in bf16 alone")
    shape = replace(whole, width=whole.width // given.ranks)
    sweep = Sweep(given.tokens, given.like, given.tables)
    if not given.tune:
        formats: list[str] = given.format
        layers = {name: report(f"{given.shape} {name}", FORMATS[name], shape) for name in formats}
        name = f"experts-{given.shape}-{'-'.join(formats)}"
        print(write_result(name, {"shape": asdict(shape), "layers": layers}))
        return
    compile_all(compile_part, kind, shape, sweep)
    held = kind(shape)
    print(write_table(held, tune(held, shape, sweep), given.tables))


if __name__ == "__main__":
    main()
